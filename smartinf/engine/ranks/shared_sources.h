// The devices of all ranks as each of them opens a run: every call of a source is made by the rank
// that has the device, and all ranks get its outcome. So they all decide alike, by the same rules
// as one process (device_set.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "smartinf/engine/device_source.h"
#include "smartinf/engine/ranks/collectives.h"

namespace smartinf::engine {

/// sources: of all ranks, in the same order on each; those of other ranks are never called.
/// rank_of: of each source, the rank that has it. What is opened is a device that does the same:
/// its own rank's works, and the others' stand for it (DeviceInfo::of_other_rank): they take every
/// command and do nothing. Calls go over Channel::kControl, and so do recover_to(), cache_state()
/// and snapshot() of the devices; an error names the rank.
DeviceSources share_sources(DeviceSources sources, const std::vector<uint32_t>& rank_of,
                            std::shared_ptr<Collectives> ranks);

}  // namespace smartinf::engine
