// Memory for direct I/O, and the pool of such memory that a device lends out piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

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

class BufferPool;

/// The right to use one buffer of a pool until destruction. A transfer in flight holds the lease.
/// The pool outlives its leases.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { release(); }

  bool held() const { return pool_ != nullptr; }
  uint32_t index() const { return index_; }
  std::span<std::byte> bytes() const;
  void release();

 private:
  friend class BufferPool;
  Lease(BufferPool* pool, uint32_t index) : pool_(pool), index_(index) {}
  BufferPool* pool_ = nullptr;
  uint32_t index_ = 0;
};

/// A fixed number of equal buffers in one allocation. Bound: `count` leases at a time.
/// Threads: try_lease and release are safe from any thread; neither blocks nor allocates.
class BufferPool {
 public:
  static Result<std::unique_ptr<BufferPool>> create(uint32_t count, uint64_t buffer_bytes);

  /// A lease, or one that is not held when all buffers are out.
  Lease try_lease();
  uint32_t count() const { return count_; }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  std::span<std::byte> buffer(uint32_t index) const;
  /// The whole allocation, e.g. to register it with a ring.
  std::span<std::byte> memory() const { return memory_.bytes(); }

 private:
  friend class Lease;
  BufferPool(AlignedBuffer memory, uint32_t count, uint64_t buffer_bytes);
  void give_back(uint32_t index);

  AlignedBuffer memory_;
  uint32_t count_;
  uint64_t buffer_bytes_;
  std::mutex mutex_;
  std::vector<uint32_t> free_;  // capacity count_ from the start
};

}  // namespace smartinf::base
