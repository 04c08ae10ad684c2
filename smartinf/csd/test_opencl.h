// For tests: whether there is OpenCL to test with.
#pragma once

#include <string>

#include "smartinf/base/test_all.h"
#include "smartinf/csd/opencl_processor.h"

namespace smartinf::csd {

/// Why not; empty: there is a device.
inline std::string no_opencl() {
  if (base::kSanitized) return "OpenCL's platforms are not made for sanitizers";
  const auto devices = opencl_devices();
  if (!devices.ok()) return devices.status().what();
  return devices->empty() ? "no OpenCL device" : "";
}

}  // namespace smartinf::csd
