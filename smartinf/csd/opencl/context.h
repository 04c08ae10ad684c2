// OpenCL's objects as values, and the one device that a processor uses. Only csd/opencl includes
// OpenCL's headers.
#pragma once

#define CL_TARGET_OPENCL_VERSION 120
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <CL/cl.h>

#include "smartinf/base/status.h"
#include "smartinf/csd/opencl_processor.h"

namespace smartinf::csd::opencl {

/// Released on destruction.
template <typename T, cl_int (*kRelease)(T)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T object) : object_(object) {}
  Handle(Handle&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Handle() {
    if (object_ != nullptr) kRelease(object_);
  }
  T get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T object_ = nullptr;
};
using Context = Handle<cl_context, clReleaseContext>;
using Queue = Handle<cl_command_queue, clReleaseCommandQueue>;
using Program = Handle<cl_program, clReleaseProgram>;
using Kernel = Handle<cl_kernel, clReleaseKernel>;
using Buffer = Handle<cl_mem, clReleaseMemObject>;
using Event = Handle<cl_event, clReleaseEvent>;

/// A device that has what is needed, its context and its queues. Threads: start(), allocate() of
/// the processor, one at a time; the queues are OpenCL's own to guard.
struct Device {
  OpenClOptions options;
  OpenClDevice info;
  cl_platform_id platform = nullptr;
  cl_device_id id = nullptr;
  uint32_t compute_units = 0;
  OpenClMemory memory = OpenClMemory::kShared;
  Context context;
  Queue in;       // copies to the device
  Queue compute;  // out of order where the device can
  Queue out;

  /// Makes an OpenCL call, or the fault in its place. Errors: as failed().
  template <typename Call>
  base::Status run(std::string_view name, const Call& call) const {
    const cl_int injected = options.fault ? options.fault(name) : CL_SUCCESS;
    const cl_int error = injected != CL_SUCCESS ? injected : call();
    return error == CL_SUCCESS ? base::Status() : failed(name, error);
  }
  /// The same of one that returns an object and its error in a variable: call(cl_int*).
  template <typename H, typename Call>
  base::Result<H> make(std::string_view name, const Call& call) const {
    cl_int error = options.fault ? options.fault(name) : CL_SUCCESS;
    if (error != CL_SUCCESS) return failed(name, error);
    H made(call(&error));
    if (error != CL_SUCCESS) return failed(name, error);
    return made;
  }
  /// kOutOfMemory or kIo; names the device, the call and the error.
  base::Status failed(std::string_view call, cl_int error) const;

  base::Result<Buffer> buffer(uint64_t bytes, cl_mem_flags flags, void* host = nullptr) const;
};

/// Finds the device and makes its context and queues. Errors: those of opencl_processor().
base::Result<std::unique_ptr<Device>> open_device(const OpenClOptions& options);

std::string error_name(cl_int error);

}  // namespace smartinf::csd::opencl
