#include "smartinf/csd/opencl/memory.h"

#include <string>
#include <utility>

#include "smartinf/base/units.h"

namespace smartinf::csd::opencl {
namespace {

// Names from Xilinx' cl_ext_xilinx.h: a buffer's flag that says that its host pointer is this
// struct, and the flag in it that asks for memory which other devices on the bus reach.
constexpr cl_mem_flags kExtensionPointer = cl_mem_flags{1} << 31;
constexpr unsigned kPeerToPeer = 1u << 30;
struct ExtensionPointer {
  unsigned flags = kPeerToPeer;
  void* object = nullptr;
  void* parameter = nullptr;
};

std::byte* aligned(std::byte* at) {
  return reinterpret_cast<std::byte*>(
      base::round_up(reinterpret_cast<uintptr_t>(at), base::kPageBytes));
}

}  // namespace

base::Result<std::shared_ptr<Region>> Region::allocate(std::shared_ptr<Device> device,
                                                       uint64_t bytes) {
  std::shared_ptr<Region> made(new Region(device));
  if (device->memory == OpenClMemory::kShared) {
    SI_ASSIGN_OR_RETURN(made->host_, base::AlignedBuffer::allocate(bytes));
    made->bytes_ = made->host_.bytes();
    return made;
  }
  bytes = base::round_up(bytes, base::kPageBytes);
  const uint64_t room = bytes + base::kPageBytes;  // to be aligned for the drive
  const auto context = [&](base::Status status) {
    return std::move(status).with_context("memory of " + base::format_bytes(bytes) + " for slots");
  };
  const bool peer = device->memory == OpenClMemory::kPeer;
  if (peer && !device->options.pretend_peer) {
    ExtensionPointer extension;
    auto buffer = device->buffer(room, CL_MEM_READ_WRITE | kExtensionPointer, &extension);
    if (!buffer.ok()) return context(std::move(buffer).status());
    made->on_device_ = std::move(*buffer);
  } else {
    auto buffer = device->buffer(room, CL_MEM_READ_WRITE | (peer ? CL_MEM_ALLOC_HOST_PTR : 0));
    if (!buffer.ok()) return context(std::move(buffer).status());
    made->on_device_ = std::move(*buffer);
  }
  if (!peer) {
    auto buffer = device->buffer(room, CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR);
    if (!buffer.ok()) return context(std::move(buffer).status());
    made->pinned_ = std::move(*buffer);
  }
  cl_int error = CL_SUCCESS;
  const cl_mem mapped = peer ? made->on_device_.get() : made->pinned_.get();
  made->mapped_ = static_cast<std::byte*>(clEnqueueMapBuffer(device->out.get(), mapped, CL_TRUE,
                                                             CL_MAP_READ | CL_MAP_WRITE, 0, room, 0,
                                                             nullptr, nullptr, &error));
  if (error != CL_SUCCESS) return context(device->failed("clEnqueueMapBuffer", error));
  std::byte* begin = aligned(made->mapped_);
  if (peer) made->device_at_ = static_cast<uint64_t>(begin - made->mapped_);
  made->bytes_ = {begin, bytes};
  return made;
}

Region::~Region() {
  if (mapped_ == nullptr) return;
  clEnqueueUnmapMemObject(device_->out.get(), pinned_ ? pinned_.get() : on_device_.get(), mapped_,
                          0, nullptr, nullptr);
  clFinish(device_->out.get());
}

base::Result<cl_mem> Buffers::take(uint64_t bytes) {
  if (used_ == kept_.size()) kept_.emplace_back();
  Kept& kept = kept_[used_];
  if (kept.bytes < bytes || !kept.buffer) {
    kept = Kept();
    SI_ASSIGN_OR_RETURN(kept.buffer, device_.buffer(bytes, CL_MEM_READ_WRITE));
    kept.bytes = bytes;
  }
  ++used_;
  return kept.buffer.get();
}

base::Result<cl_mem> Buffers::borrow(void* host, uint64_t bytes) {
  SI_ASSIGN_OR_RETURN(Buffer buffer,
                      device_.buffer(bytes, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, host));
  borrowed_.push_back(std::move(buffer));
  return borrowed_.back().get();
}

}  // namespace smartinf::csd::opencl
