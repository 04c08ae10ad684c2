// Memory for direct I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "smartinf/base/status.h"

namespace smartinf::base {

inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

/// Page-aligned anonymous memory, zeroed, released on destruction. Large ones ask for huge pages.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  /// size_bytes is rounded up to whole pages; alignment: a multiple of a page that is a power of
  /// two. Errors: kOutOfMemory with the size asked for and the limit that was met.
  static Result<AlignedBuffer> allocate(uint64_t size_bytes, uint64_t alignment = kPageBytes);

  /// Makes it longer or shorter where it is, with what it holds of both; new memory is zeroed.
  /// False where there is no room behind it: it stays as it was.
  bool resize(uint64_t size_bytes);

  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer();

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_bytes_; }
  std::span<std::byte> bytes() const { return {data_, size_bytes_}; }

 private:
  AlignedBuffer(std::byte* data, uint64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}
  std::byte* data_ = nullptr;
  uint64_t size_bytes_ = 0;
};

}  // namespace smartinf::base
