#include "smartinf/base/aligned_buffer.h"

#include <cerrno>
#include <utility>

#include <fmt/format.h>
#include <sys/mman.h>

#include "smartinf/base/units.h"

namespace smartinf::base {

Result<AlignedBuffer> AlignedBuffer::allocate(uint64_t size_bytes, uint64_t alignment) {
  if (size_bytes == 0) return AlignedBuffer();
  const uint64_t mapped = round_up(size_bytes, kPageBytes);
  // Gives back the memory before and behind the aligned part.
  const uint64_t spare = alignment - kPageBytes;
  void* memory =
      mmap(nullptr, mapped + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status(
        ErrorCode::kOutOfMemory,
        fmt::format("cannot allocate {} of memory", format_bytes(size_bytes)),
        "Lower the memory budget, or raise the limit (ulimit -v, the container's memory).",
        ErrorPlace{{}, {}, {}, errno});
  }
  auto* start = static_cast<std::byte*>(memory);
  const uint64_t address = reinterpret_cast<uintptr_t>(start);
  const uint64_t before = round_up(address, alignment) - address;
  if (before > 0) munmap(start, before);
  start += before;
  if (spare > before) munmap(start + mapped, spare - before);
  // Best effort: without huge pages it is slower, not wrong.
  if (mapped >= kHugePageBytes) (void)madvise(start, mapped, MADV_HUGEPAGE);
  return AlignedBuffer(start, mapped);
}

bool AlignedBuffer::resize(uint64_t size_bytes) {
  const uint64_t mapped = round_up(size_bytes, kPageBytes);
  if (data_ == nullptr || mapped == 0) return false;
  if (mremap(data_, size_bytes_, mapped, 0) == MAP_FAILED) return false;
  size_bytes_ = mapped;
  if (mapped >= kHugePageBytes) (void)madvise(data_, mapped, MADV_HUGEPAGE);
  return true;
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, size_bytes_);
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

AlignedBuffer::~AlignedBuffer() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

}  // namespace smartinf::base
