// The devices of one run: created together or opened together, checked against the model and
// against each other, and recovered to the last step that all of them committed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/options.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::engine {

struct DeviceSet {
  std::vector<std::unique_ptr<csd::Device>> devices;  // in the run's order
  std::vector<plan::Subgroup> subgroups;              // of the whole space, by id
  std::vector<base::DeviceId> owner;                  // of every subgroup
  base::StepNumber step = 0;
  bool residual = false;       // the devices have room for the residual
  bool fresh = false;          // made now: step 0 is still to be written
  uint64_t staging_bytes = 0;  // bytes that the memory budget leaves to the engine itself

  csd::Device& device_of(base::SubgroupId subgroup) const {
    return *devices[owner[subgroup.value].value];
  }
  /// A device of this process has it.
  bool is_here(base::SubgroupId subgroup) const {
    return !device_of(subgroup).info().of_other_rank;
  }
  /// Index of the subgroup that holds an element of the space.
  size_t subgroup_at(uint64_t element) const;
};

/// Checks what open_device_set() asks of the options alone, and of this machine.
base::Status check_device_options(const UpdaterOptions& options, const plan::ParameterSpace& space);

/// Opens what the sources hold, or creates it when all are empty and options.create is set. A
/// creation that was interrupted before step 0 was committed everywhere is started over. Errors,
/// each naming the device:
///   kInvalidArgument     no device, the same place twice, a path that cannot be one
///   kNotFound            a device of the run is missing; nothing there and options.create is off
///   kMismatch            state of another model, rule or format; a device of another run
///   kBusy, kNoSpace, kOutOfMemory, kCorrupt, kIo      as the device says
base::Result<DeviceSet> open_device_set(const UpdaterOptions& options,
                                        const plan::ParameterSpace& space,
                                        std::vector<std::unique_ptr<DeviceSource>>& sources);

}  // namespace smartinf::engine
