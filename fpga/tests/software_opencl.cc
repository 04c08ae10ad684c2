// Stands in for XRT's OpenCL under fpga/host: one card whose kernels are those in software. Only
// what the host calls, and strict where XRT is: an argument that is missing, or that is a stream's,
// is an error. SMARTINF_SOFTWARE_CARD=flip: one bit of what is read back is wrong.
#define CL_TARGET_OPENCL_VERSION 120
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <CL/cl.h>

#include "fpga/kernels/job.h"

using smartinf::fpga::GradientWord;
using smartinf::fpga::Word;
using Stream = hls::stream<GradientWord>;

struct _cl_platform_id {};
struct _cl_device_id {};
struct _cl_context {};
struct _cl_program {};
struct _cl_command_queue {
  cl_kernel task = nullptr;
};
struct _cl_mem {
  std::vector<Word> words;
};

/// Arguments as bytes; a buffer's is its cl_mem.
struct _cl_kernel {
  cl_uint arguments = 0;
  cl_uint stream = 0;  // which of them nobody sets
  std::function<void(_cl_kernel&, Stream&)> run;
  std::map<cl_uint, std::vector<char>> given;

  template <typename T>
  T value(cl_uint at) const {
    T it{};
    std::memcpy(&it, given.at(at).data(), sizeof(it));
    return it;
  }
  Word* words(cl_uint at) const { return value<cl_mem>(at)->words.data(); }
  uint32_t number(cl_uint at) const { return value<uint32_t>(at); }
};

namespace {

_cl_platform_id the_platform;
_cl_device_id the_device;
std::vector<cl_command_queue> queues;

void make_kernel(const std::string& name, _cl_kernel& kernel) {
  if (name == "smartinf_update_adam:{update}") {
    kernel = {14,
              0,
              [](_cl_kernel& k, Stream& s) {
                smartinf_update_adam(s, k.words(1), k.words(2), k.words(3), k.words(4), k.words(5),
                                     k.words(6), k.words(7), k.words(8), k.words(9), k.words(10),
                                     k.number(11), k.number(12), k.number(13));
              },
              {}};
  } else if (name == "smartinf_update_sgd:{update}") {
    kernel = {12,
              0,
              [](_cl_kernel& k, Stream& s) {
                smartinf_update_sgd(s, k.words(1), k.words(2), k.words(3), k.words(4), k.words(5),
                                    k.words(6), k.words(7), k.words(8), k.number(9), k.number(10),
                                    k.number(11));
              },
              {}};
  } else if (name == "smartinf_update_adagrad:{update}") {
    kernel = {12,
              0,
              [](_cl_kernel& k, Stream& s) {
                smartinf_update_adagrad(s, k.words(1), k.words(2), k.words(3), k.words(4),
                                        k.words(5), k.words(6), k.words(7), k.words(8), k.number(9),
                                        k.number(10), k.number(11));
              },
              {}};
  } else if (name == "smartinf_gradient_dense:{gradient}") {
    kernel = {4,
              3,
              [](_cl_kernel& k, Stream& s) {
                smartinf_gradient_dense(k.words(0), k.number(1), k.number(2), s);
              },
              {}};
  } else if (name == "smartinf_gradient_pairs:{gradient}") {
    kernel = {5,
              4,
              [](_cl_kernel& k, Stream& s) {
                smartinf_gradient_pairs(k.words(0), k.number(1), k.number(2), k.words(3), s);
              },
              {}};
  } else if (name == "smartinf_gradient_message:{gradient}") {
    kernel = {8,
              7,
              [](_cl_kernel& k, Stream& s) {
                smartinf_gradient_message(k.words(0), k.words(1), k.words(2), k.words(3),
                                          k.value<uint64_t>(4), k.number(5), k.words(6), s);
              },
              {}};
  }
}

template <typename T>
T* made(cl_int* error) {
  *error = CL_SUCCESS;
  return new T;
}

cl_int answer(const std::string& text, size_t size, void* value) {
  std::memcpy(value, text.c_str(), std::min(size, text.size() + 1));
  return CL_SUCCESS;
}

}  // namespace

extern "C" {

cl_int clGetPlatformIDs(cl_uint count, cl_platform_id* ids, cl_uint* all) {
  if (count > 0) *ids = &the_platform;
  if (all != nullptr) *all = 1;
  return CL_SUCCESS;
}
cl_int clGetPlatformInfo(cl_platform_id, cl_platform_info, size_t size, void* value, size_t*) {
  return answer("Xilinx", size, value);
}
cl_int clGetDeviceIDs(cl_platform_id, cl_device_type, cl_uint count, cl_device_id* ids,
                      cl_uint* all) {
  if (count > 0) *ids = &the_device;
  if (all != nullptr) *all = 1;
  return CL_SUCCESS;
}
cl_int clGetDeviceInfo(cl_device_id, cl_device_info, size_t size, void* value, size_t*) {
  return answer("kernels in software", size, value);
}
cl_context clCreateContext(const cl_context_properties*, cl_uint, const cl_device_id*,
                           void(CL_CALLBACK*)(const char*, const void*, size_t, void*), void*,
                           cl_int* error) {
  return made<_cl_context>(error);
}
cl_int clReleaseContext(cl_context context) {
  delete context;
  return CL_SUCCESS;
}
cl_command_queue clCreateCommandQueue(cl_context, cl_device_id, cl_command_queue_properties,
                                      cl_int* error) {
  queues.push_back(made<_cl_command_queue>(error));
  return queues.back();
}
cl_int clReleaseCommandQueue(cl_command_queue queue) {
  std::erase(queues, queue);
  delete queue;
  return CL_SUCCESS;
}
cl_program clCreateProgramWithBinary(cl_context, cl_uint, const cl_device_id*, const size_t*,
                                     const unsigned char**, cl_int* loaded, cl_int* error) {
  *loaded = CL_SUCCESS;
  return made<_cl_program>(error);
}
cl_int clReleaseProgram(cl_program program) {
  delete program;
  return CL_SUCCESS;
}
cl_kernel clCreateKernel(cl_program, const char* name, cl_int* error) {
  auto* kernel = made<_cl_kernel>(error);
  make_kernel(name, *kernel);
  if (!kernel->run) *error = CL_INVALID_KERNEL_NAME;
  return kernel;
}
cl_int clReleaseKernel(cl_kernel kernel) {
  delete kernel;
  return CL_SUCCESS;
}
cl_int clSetKernelArg(cl_kernel kernel, cl_uint at, size_t size, const void* value) {
  if (at >= kernel->arguments || at == kernel->stream) return CL_INVALID_ARG_INDEX;
  const auto* bytes = static_cast<const char*>(value);
  kernel->given[at].assign(bytes, bytes + size);
  return CL_SUCCESS;
}
cl_mem clCreateBuffer(cl_context, cl_mem_flags, size_t size, void*, cl_int* error) {
  auto* memory = made<_cl_mem>(error);
  memory->words.resize(size / sizeof(Word));
  return memory;
}
cl_int clReleaseMemObject(cl_mem memory) {
  delete memory;
  return CL_SUCCESS;
}
cl_int clEnqueueWriteBuffer(cl_command_queue, cl_mem memory, cl_bool, size_t, size_t size,
                            const void* from, cl_uint, const cl_event*, cl_event*) {
  std::memcpy(static_cast<void*>(memory->words.data()), from, size);
  return CL_SUCCESS;
}
cl_int clEnqueueReadBuffer(cl_command_queue, cl_mem memory, cl_bool, size_t, size_t size, void* to,
                           cl_uint, const cl_event*, cl_event*) {
  std::memcpy(to, static_cast<const void*>(memory->words.data()), size);
  if (std::getenv("SMARTINF_SOFTWARE_CARD") != nullptr) *static_cast<unsigned char*>(to) ^= 1;
  return CL_SUCCESS;
}
cl_int clEnqueueTask(cl_command_queue queue, cl_kernel kernel, cl_uint, const cl_event*,
                     cl_event*) {
  if (kernel->given.size() + 1 != kernel->arguments) return CL_INVALID_KERNEL_ARGS;
  queue->task = kernel;
  return CL_SUCCESS;
}
cl_int clFlush(cl_command_queue) { return CL_SUCCESS; }
/// All that was started, at once.
cl_int clFinish(cl_command_queue) {
  software::Simulation run({});
  hls::stream<GradientWord, 16> stream("gradients");
  for (const cl_command_queue queue : queues) {
    if (queue->task == nullptr) continue;
    run.start("kernel", [&stream, kernel = queue->task] { kernel->run(*kernel, stream); });
    queue->task = nullptr;
  }
  return run.run().empty() ? CL_SUCCESS : CL_OUT_OF_RESOURCES;
}
}
