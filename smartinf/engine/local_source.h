// Device sources of this machine's directories and block devices, and of other machines'.
#pragma once

#include <string>
#include <vector>

#include "smartinf/engine/device_source.h"
#include "smartinf/engine/options.h"

namespace smartinf::engine {

/// One for each of options.devices, in order: a path that is a URL is another machine's. Nothing is
/// looked at or opened yet. read_only: what is opened by them can be read and nothing else, also on
/// a file system that cannot be written to.
DeviceSources local_sources(const UpdaterOptions& options, bool read_only = false);

/// Sources of devices at these paths, for their states: nothing is trained with them.
DeviceSources sources_at(const std::vector<std::string>& paths,
                         storage::RingKind ring = storage::RingKind::kAuto,
                         const serve::RemoteOptions& remote = {});

}  // namespace smartinf::engine
