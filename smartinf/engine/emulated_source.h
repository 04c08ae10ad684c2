// Device sources over drives in memory: any number of CSDs on one machine, as fast or slow as the
// links in the options say. What is on such a drive is gone with the process.
#pragma once

#include <memory>
#include <vector>

#include "smartinf/csd/emulated_device.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/options.h"

namespace smartinf::engine {

/// One for each of options.devices, in order, on the drive of the same number; drives outlive the
/// updaters opened over them. A device's path is only a name. Its bandwidth, when it is not given,
/// is the internal link's; its capacity is at most the drive's.
DeviceSources emulated_sources(const UpdaterOptions& options,
                               const std::vector<std::unique_ptr<csd::EmulatedDrive>>& drives);

}  // namespace smartinf::engine
