// A card that an xclbin is loaded into, by OpenCL 1.2, and a pair of kernels on it. For XRT; the
// calls are few, so that fpga/tests/software_opencl.cc can stand in for it.
#pragma once

#define CL_TARGET_OPENCL_VERSION 120
#include <filesystem>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <CL/cl.h>

#include "smartinf/base/status.h"

#include "fpga/kernels/job.h"

namespace smartinf::fpga {

template <auto kRelease>
struct Release {
  template <typename T>
  void operator()(T* object) const {
    kRelease(object);
  }
};
template <typename T, auto kRelease>
using ClHandle = std::unique_ptr<std::remove_pointer_t<T>, Release<kRelease>>;

/// A kernel's unit and what it was given.
class CardKernel {
 public:
  /// An argument by its place in job.h; streams between kernels have a place and are not set.
  template <typename T>
  base::Status set(cl_uint place, const T& value) {
    return set_bytes(place, sizeof(value), &value);
  }

 private:
  friend class Card;
  base::Status set_bytes(cl_uint place, size_t bytes, const void* value);

  std::string name_;
  ClHandle<cl_kernel, clReleaseKernel> kernel_;
};

/// Words of this machine that the card has a copy of; the vector outlives it.
class CardBuffer {
 private:
  friend class Card;
  std::vector<Word>* words_ = nullptr;
  ClHandle<cl_mem, clReleaseMemObject> memory_;
};

/// Threads: one. Errors: kIo with the call and OpenCL's number.
class Card {
 public:
  /// The first device with that part in its platform's or its own name gets the xclbin. Errors:
  /// also kNotFound.
  static base::Result<Card> open(const std::filesystem::path& xclbin, const std::string& part);

  /// As `nk=` names it in the link file: kernel and unit.
  base::Result<CardKernel> kernel(const std::string& name, const std::string& unit) const;
  /// Room for the words in the memory bank of the kernel's argument, which it becomes.
  base::Result<CardBuffer> buffer(std::vector<Word>& words, CardKernel& kernel,
                                  cl_uint place) const;
  /// Another argument for the same words.
  static base::Status share(const CardBuffer& buffer, CardKernel& kernel, cl_uint place);

  base::Status write(const CardBuffer& buffer) const;
  base::Status read(const CardBuffer& buffer) const;
  /// Starts both, since a stream goes from one to the other, and waits for both. Seconds.
  base::Result<double> run(const CardKernel& first, const CardKernel& second) const;

  const std::string& name() const { return name_; }

 private:
  std::string name_;
  ClHandle<cl_context, clReleaseContext> context_;
  ClHandle<cl_command_queue, clReleaseCommandQueue> queue_;
  ClHandle<cl_command_queue, clReleaseCommandQueue> second_queue_;
  ClHandle<cl_program, clReleaseProgram> program_;
};

}  // namespace smartinf::fpga
