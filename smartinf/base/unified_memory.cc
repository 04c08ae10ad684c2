#include "smartinf/base/unified_memory.h"

#include <cstdlib>
#include <string_view>

#include <dlfcn.h>

#include "smartinf/base/log.h"

namespace smartinf::base {

namespace {

/// By the driver's own library, which is where it is installed, and which nothing here is linked to.
bool driver_says_integrated() {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return false;
  constexpr int kIntegrated = 18;  // CU_DEVICE_ATTRIBUTE_INTEGRATED
  const auto init = reinterpret_cast<int (*)(unsigned)>(::dlsym(driver, "cuInit"));
  const auto get = reinterpret_cast<int (*)(int*, int)>(::dlsym(driver, "cuDeviceGet"));
  const auto attribute =
      reinterpret_cast<int (*)(int*, int, int)>(::dlsym(driver, "cuDeviceGetAttribute"));
  int device = 0;
  int integrated = 0;
  return init != nullptr && get != nullptr && attribute != nullptr && init(0) == 0 &&
         get(&device, 0) == 0 && attribute(&integrated, kIntegrated, device) == 0 &&
         integrated == 1;
}

}  // namespace

bool memory_is_unified() {
  const char* const set = std::getenv("SMARTINF_UNIFIED_MEMORY");
  const std::string_view asked = set == nullptr ? "" : set;
  if (asked == "yes" || asked == "no") return asked == "yes";
  if (!asked.empty()) {
    log(LogLevel::kWarning, "SMARTINF_UNIFIED_MEMORY is neither \"yes\" nor \"no\": not used");
  }
  static const bool integrated = driver_says_integrated();
  return integrated;
}

}  // namespace smartinf::base
