#include "fpga/host/card.h"

#include <array>
#include <chrono>
#include <fstream>
#include <iterator>
#include <utility>

namespace smartinf::fpga {
namespace {

using base::ErrorCode;
using base::Status;

Status checked(const std::string& call, cl_int error) {
  if (error == CL_SUCCESS) return Status();
  return Status(ErrorCode::kIo, call + " answered " + std::to_string(error),
                "CL/cl.h names the number; dmesg and xbutil examine say what the card says.");
}

template <typename Get>
std::string text_of(const Get& get) {
  std::array<char, 256> text{};
  get(text.size() - 1, text.data());
  return text.data();
}

}  // namespace

Status CardKernel::set_bytes(cl_uint place, size_t bytes, const void* value) {
  return checked("clSetKernelArg of " + name_ + ", " + std::to_string(place),
                 clSetKernelArg(kernel_.get(), place, bytes, value));
}

base::Result<Card> Card::open(const std::filesystem::path& xclbin, const std::string& part) {
  std::ifstream file(xclbin, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  if (!file || content.empty()) {
    return Status(ErrorCode::kNotFound, "cannot read " + xclbin.string(),
                  "make -C fpga hw RULE=... GRADIENT=... makes it.");
  }
  cl_uint count = 0;
  clGetPlatformIDs(0, nullptr, &count);
  std::vector<cl_platform_id> platforms(count);
  clGetPlatformIDs(count, platforms.data(), nullptr);
  Card card;
  cl_device_id device = nullptr;
  for (size_t p = 0; p < platforms.size() && device == nullptr; ++p) {
    const std::string platform = text_of([&](size_t size, char* text) {
      clGetPlatformInfo(platforms[p], CL_PLATFORM_NAME, size, text, nullptr);
    });
    cl_uint devices = 0;
    clGetDeviceIDs(platforms[p], CL_DEVICE_TYPE_ACCELERATOR, 0, nullptr, &devices);
    std::vector<cl_device_id> ids(devices);
    clGetDeviceIDs(platforms[p], CL_DEVICE_TYPE_ACCELERATOR, devices, ids.data(), nullptr);
    for (size_t d = 0; d < ids.size() && device == nullptr; ++d) {
      card.name_ = platform + ": " + text_of([&](size_t size, char* text) {
                     clGetDeviceInfo(ids[d], CL_DEVICE_NAME, size, text, nullptr);
                   });
      if (card.name_.find(part) != std::string::npos) device = ids[d];
    }
  }
  if (device == nullptr) {
    return Status(
        ErrorCode::kNotFound,
        "there is no card" + (part.empty() ? "" : " \"" + part + "\"") + " among OpenCL's devices",
        "source /opt/xilinx/xrt/setup.sh; xbutil examine lists the cards.");
  }
  cl_int error = CL_SUCCESS;
  card.context_.reset(clCreateContext(nullptr, 1, &device, nullptr, nullptr, &error));
  SI_RETURN_IF_ERROR(checked("clCreateContext", error));
  card.queue_.reset(clCreateCommandQueue(card.context_.get(), device, 0, &error));
  SI_RETURN_IF_ERROR(checked("clCreateCommandQueue", error));
  card.second_queue_.reset(clCreateCommandQueue(card.context_.get(), device, 0, &error));
  SI_RETURN_IF_ERROR(checked("clCreateCommandQueue", error));
  const auto* bytes = reinterpret_cast<const unsigned char*>(content.data());
  const size_t size = content.size();
  cl_int loaded = CL_SUCCESS;
  card.program_.reset(
      clCreateProgramWithBinary(card.context_.get(), 1, &device, &size, &bytes, &loaded, &error));
  SI_RETURN_IF_ERROR(checked("clCreateProgramWithBinary", error));
  SI_RETURN_IF_ERROR(checked("clCreateProgramWithBinary of the device", loaded));
  return card;
}

base::Result<CardKernel> Card::kernel(const std::string& name, const std::string& unit) const {
  CardKernel kernel;
  kernel.name_ = name + ":{" + unit + "}";
  cl_int error = CL_SUCCESS;
  kernel.kernel_.reset(clCreateKernel(program_.get(), kernel.name_.c_str(), &error));
  SI_RETURN_IF_ERROR(checked("clCreateKernel of " + kernel.name_, error));
  return kernel;
}

base::Result<CardBuffer> Card::buffer(std::vector<Word>& words, CardKernel& kernel,
                                      cl_uint place) const {
  CardBuffer buffer;
  buffer.words_ = &words;
  cl_int error = CL_SUCCESS;
  const size_t bytes = std::max<size_t>(words.size(), 1) * sizeof(Word);
  buffer.memory_.reset(clCreateBuffer(context_.get(), CL_MEM_READ_WRITE, bytes, nullptr, &error));
  SI_RETURN_IF_ERROR(checked("clCreateBuffer of " + std::to_string(bytes) + " bytes", error));
  // XRT takes the bank from the first argument that a buffer is; so it comes before any copy.
  SI_RETURN_IF_ERROR(share(buffer, kernel, place));
  return buffer;
}

Status Card::share(const CardBuffer& buffer, CardKernel& kernel, cl_uint place) {
  return kernel.set(place, cl_mem{buffer.memory_.get()});
}

Status Card::write(const CardBuffer& buffer) const {
  if (buffer.words_->empty()) return Status();
  return checked("clEnqueueWriteBuffer",
                 clEnqueueWriteBuffer(queue_.get(), buffer.memory_.get(), CL_TRUE, 0,
                                      buffer.words_->size() * sizeof(Word), buffer.words_->data(),
                                      0, nullptr, nullptr));
}

Status Card::read(const CardBuffer& buffer) const {
  return checked("clEnqueueReadBuffer",
                 clEnqueueReadBuffer(queue_.get(), buffer.memory_.get(), CL_TRUE, 0,
                                     buffer.words_->size() * sizeof(Word), buffer.words_->data(), 0,
                                     nullptr, nullptr));
}

base::Result<double> Card::run(const CardKernel& first, const CardKernel& second) const {
  const auto begin = std::chrono::steady_clock::now();
  const auto start = [](const auto& queue, const CardKernel& kernel) {
    SI_RETURN_IF_ERROR(
        checked("clEnqueueTask of " + kernel.name_,
                clEnqueueTask(queue.get(), kernel.kernel_.get(), 0, nullptr, nullptr)));
    return checked("clFlush", clFlush(queue.get()));
  };
  SI_RETURN_IF_ERROR(start(queue_, first));
  SI_RETURN_IF_ERROR(start(second_queue_, second));
  SI_RETURN_IF_ERROR(checked("clFinish", clFinish(queue_.get())));
  SI_RETURN_IF_ERROR(checked("clFinish", clFinish(second_queue_.get())));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace smartinf::fpga
