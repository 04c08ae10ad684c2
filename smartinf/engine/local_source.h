// Device sources of this machine's directories and block devices.
#pragma once

#include <memory>
#include <vector>

#include "smartinf/engine/device_source.h"
#include "smartinf/engine/options.h"

namespace smartinf::engine {

/// One for each of options.devices, in order. Nothing is looked at or opened yet.
std::vector<std::unique_ptr<DeviceSource>> local_sources(const UpdaterOptions& options);

}  // namespace smartinf::engine
