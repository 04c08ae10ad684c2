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
  // What lies before and behind the aligned part is given back.
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

Lease::Lease(Lease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), index_(other.index_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    index_ = other.index_;
  }
  return *this;
}

std::span<std::byte> Lease::bytes() const {
  SI_CHECK(held(), "bytes of a lease that is not held");
  return pool_->buffer(index_);
}

void Lease::release() {
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->give_back(index_);
}

Result<std::unique_ptr<BufferPool>> BufferPool::create(uint32_t count, uint64_t buffer_bytes) {
  const uint64_t each = round_up(buffer_bytes, kPageBytes);
  SI_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::allocate(each * count));
  return std::unique_ptr<BufferPool>(new BufferPool(std::move(memory), count, each));
}

BufferPool::BufferPool(AlignedBuffer memory, uint32_t count, uint64_t buffer_bytes)
    : memory_(std::move(memory)), count_(count), buffer_bytes_(buffer_bytes) {
  free_.reserve(count);
  for (uint32_t i = count; i > 0; --i) free_.push_back(i - 1);
}

Lease BufferPool::try_lease() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return Lease();
  const uint32_t index = free_.back();
  free_.pop_back();
  return Lease(this, index);
}

std::span<std::byte> BufferPool::buffer(uint32_t index) const {
  SI_CHECK(index < count_, "buffer index outside the pool");
  return memory_.bytes().subspan(index * buffer_bytes_, buffer_bytes_);
}

void BufferPool::give_back(uint32_t index) {
  const std::lock_guard lock(mutex_);
  free_.push_back(index);
}

}  // namespace smartinf::base
