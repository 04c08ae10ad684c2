// The memory that slots lie in, and what a kernel sees of memory that is not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/csd/opencl/context.h"
#include "smartinf/csd/processor.h"

namespace smartinf::csd::opencl {

/// Memory of OpenClMemory's kinds, mapped here for the drive.
class Region {
 public:
  /// Errors: kOutOfMemory, kIo.
  static base::Result<std::shared_ptr<Region>> allocate(std::shared_ptr<Device> device,
                                                        uint64_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  bool contains(const std::byte* at) const {
    return at >= bytes_.data() && at < bytes_.data() + bytes_.size();
  }
  /// The buffer that kernels use in its place, and the position there; none for shared memory.
  cl_mem on_device() const { return on_device_.get(); }
  uint64_t at(const std::byte* host) const {
    return device_at_ + static_cast<uint64_t>(host - bytes_.data());
  }

 private:
  explicit Region(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  std::shared_ptr<Device> device_;
  base::AlignedBuffer host_;  // shared
  Buffer pinned_;             // copied: this machine's half
  Buffer on_device_;          // copied: the device's half. peer: all there is
  std::byte* mapped_ = nullptr;
  uint64_t device_at_ = 0;
  std::span<std::byte> bytes_;
};

/// Where a range of this machine's memory is for a kernel.
struct Place {
  cl_mem buffer = nullptr;
  uint64_t at = 0;      // in bytes
  bool copied = false;  // what is there has to be brought, and fetched
};

/// Buffers of a job that are in use until it ends. They are kept for the next one, which is about
/// as large.
class Buffers {
 public:
  explicit Buffers(const Device& device) : device_(device) {}

  /// Memory of the device of at least so many bytes. Errors: kOutOfMemory, kIo.
  base::Result<cl_mem> take(uint64_t bytes);
  /// This machine's memory, for a device that computes in it. Until release().
  base::Result<cl_mem> borrow(void* host, uint64_t bytes);
  /// The job has ended.
  void release() {
    used_ = 0;
    borrowed_.clear();
  }

 private:
  struct Kept {
    Buffer buffer;
    uint64_t bytes = 0;
  };
  const Device& device_;
  std::vector<Kept> kept_;
  size_t used_ = 0;  // of kept_
  std::vector<Buffer> borrowed_;
};

}  // namespace smartinf::csd::opencl
