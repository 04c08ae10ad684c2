// The state of a device that keeps none: its store is one block, so that whatever else the device
// does has a directory that is locked, a ring and a name.
#pragma once

#include <memory>

#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/storage/store.h"

namespace smartinf::engine {

/// One block of state, of a new run.
storage::StoreLayout smallest_layout();

bool is_smallest(const storage::StoreLayout& layout);

/// Opens what is there, whatever run it is of, recovered to its committed step; or makes and
/// commits a smallest state. Errors: the source's, each naming the device.
base::Result<std::unique_ptr<csd::Device>> open_or_make_smallest(csd::DeviceSource& source,
                                                                 const csd::DeviceShare& share);

}  // namespace smartinf::engine
