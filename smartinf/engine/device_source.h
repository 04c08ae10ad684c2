// The engine's name for what every kind of device has: see csd/device_source.h.
#pragma once

#include "smartinf/csd/device_source.h"

namespace smartinf::engine {

using csd::DeviceShare;
using csd::DeviceSource;
using csd::DeviceSources;

}  // namespace smartinf::engine
