// Builds the device over a store that somebody made: on a drive, in memory, behind links.
#pragma once

#include <memory>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/options.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

enum class StoreOrigin : uint8_t {
  kCreated,  // stands in step 0, not yet initialized
  kOpened,   // waits for recover_to
};

/// `kind` is for DeviceInfo. Errors: see create_local_device.
base::Result<std::unique_ptr<Device>> make_device_over(std::unique_ptr<storage::Store> store,
                                                       StoreOrigin origin,
                                                       LocalDeviceOptions options,
                                                       std::string kind);

}  // namespace smartinf::csd
