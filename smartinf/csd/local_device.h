// A device of this machine: a store, slots, and processor threads beside it. With links in its
// options it stands for a drive or a CSD of another speed; over a store in memory it needs no
// drive.
#pragma once

#include <memory>

#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/options.h"

namespace smartinf::csd {

/// Makes a store at options.path and a device over it. All memory is allocated here.
/// Gradients of a step may be put from BeginStep's submission on, until Update's. They stay in
/// device memory until that update's kDone, so the next BeginStep comes after it.
/// Errors: Store::create's; kOutOfMemory when memory_bytes holds no slot, or gradients exceed their
/// budget and the layout has no spill area; kInvalidArgument. All name the device.
base::Result<std::unique_ptr<Device>> create_local_device(LocalDeviceOptions options,
                                                          const storage::StoreLayout& layout);

/// Opens the device that create_local_device() made; its layout comes from the store.
/// Errors: Store::open's and the above.
base::Result<std::unique_ptr<Device>> open_local_device(LocalDeviceOptions options);

}  // namespace smartinf::csd
