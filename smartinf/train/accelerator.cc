#include "smartinf/train/accelerator.h"

#include <optional>
#include <string>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include "smartinf/base/log.h"
#include "smartinf/base/unified_memory.h"
#include "smartinf/plan/training_memory.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

/// torch's library for GPUs of one kind, which registers itself when it is loaded: why it could not
/// be; empty where it was, or where this torch has none.
std::string load_backend(const std::string& library) {
  if (::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return "";
  std::string error = ::dlerror();
  return error.starts_with(library + ": cannot open") ? "" : error;
}

/// Without a GPU, torch's libraries for them would take 0.2 s and 350 MiB of every process. torch
/// looks for a backend once, at a moment of its choice, so it is loaded before main().
const std::string kBackendError = [] {
  if (::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) != nullptr)
    return load_backend("libtorch_cuda.so");
  if (::access("/dev/kfd", F_OK) == 0) return load_backend("libtorch_hip.so");
  if (::access("/dev/dri", F_OK) == 0) return load_backend("libtorch_xpu.so");
  return std::string();
}();

}  // namespace

Result<torch::Device> choose_accelerator(const char* key, const std::string& name,
                                         uint32_t local_rank) {
  const std::optional<c10::DeviceType> found = at::getAccelerator(/*checked=*/false);
  const bool usable = found.has_value() && at::accelerator::deviceCount() > 0;
  if (!kBackendError.empty() && name != "cpu") {
    base::log(base::LogLevel::kWarning, "torch cannot use the GPU: " + kBackendError);
  }
  const std::string there = usable ? c10::DeviceTypeName(*found, /*lower_case=*/true) : "";
  if (name == "cpu" || (name == "auto" && !usable)) return torch::Device(torch::kCPU);
  if (name == "auto" || name == there) {
    const auto one = local_rank % static_cast<uint32_t>(at::accelerator::deviceCount());
    return torch::Device(*found, static_cast<c10::DeviceIndex>(one));
  }
  return Status(ErrorCode::kUnsupported,
                fmt::format("{} is \"{}\", but torch sees {}", key, name,
                            there.empty() ? "no accelerator" : "only \"" + there + "\""),
                "Choose \"auto\" or \"cpu\"; smartinf doctor may say why");
}

void pin_what_is_asked_for() {
  if (!c10::CachingAllocator::getAllocatorSettings().empty()) return;  // the user's
  const std::string key = "pinned_max_round_threshold_mb";
  // torch before 2.15 has no such key, and rounds pinned memory up to a power of two.
  if (!c10::CachingAllocator::AcceleratorAllocatorConfig::getKeys().contains(key)) return;
  c10::CachingAllocator::setAllocatorSettings(key + ":1");
}

AcceleratorMemory memory_of(const torch::Device& accelerator) {
  if (accelerator.is_cpu()) return {};
  const uint64_t taken = accelerator.is_cuda() ? plan::kCudaBytes : 0;
  if (base::memory_is_unified()) return {0, taken, true};
  return {c10::getDeviceAllocator(accelerator.type())->getMemoryInfo(accelerator.index()).first,
          taken};
}

}  // namespace smartinf::train
