// Device sources of this machine's directories and block devices.
#pragma once

#include <memory>
#include <vector>

#include "smartinf/engine/device_source.h"
#include "smartinf/engine/options.h"

namespace smartinf::engine {

/// One for each of options.devices, in order. Nothing is looked at or opened yet. read_only: what
/// is opened by them can be read and nothing else, also on a file system that cannot be written to.
std::vector<std::unique_ptr<DeviceSource>> local_sources(const UpdaterOptions& options,
                                                         bool read_only = false);

}  // namespace smartinf::engine
