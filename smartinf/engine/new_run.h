// Where a new state goes: which device holds which subgroups of it. For a run that begins, and for
// one that is copied to other devices.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/options.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/storage/store.h"

namespace smartinf::engine {

/// Size of a state that devices are to hold.
struct StateSize {
  base::StateFormat format = base::StateFormat::kF32;
  std::vector<base::PlaneKind> planes;
  storage::Durability durability = storage::Durability::kStep;
  uint32_t gradient_spill_bytes = 0;  // for each element
  uint64_t subgroup_elements = 0;     // the last one's may be fewer

  /// On a device, for one subgroup.
  uint64_t subgroup_bytes() const;
};

struct Placement {
  std::vector<base::DeviceId> owner;  // of every subgroup
  std::string free_text;              // for people: "3.00 GiB on a, 2.00 GiB on b"
};
/// bandwidths: of the devices, relative; empty: alike. present: of every subgroup, the device that
/// has it on its drive now (plan::place()); empty: none. stages: UpdaterOptions::stages; where
/// their own devices have no room the state is spread over all. Errors: kNoSpace with what is free;
/// the sources' own.
base::Result<Placement> place_state(const StateSize& state,
                                    std::span<const plan::Subgroup> subgroups,
                                    const DeviceSources& sources,
                                    std::span<const double> bandwidths,
                                    std::span<const base::DeviceId> present = {},
                                    std::span<const plan::RankSpan> stages = {});

/// Makes a run's layout the one of this device. Returns how many elements it holds.
uint64_t set_device(storage::StoreLayout& layout, base::DeviceId device,
                    std::span<const plan::Subgroup> subgroups,
                    std::span<const base::DeviceId> owner);

/// Errors: kInvalidArgument for no device, the same place twice, a path that cannot be one.
base::Status check_places(const DeviceSources& sources);

/// Whether Updater::open() would begin a new run on these devices if the state of `old`, which some
/// of them hold, were erased: room, placement, memory, processors, locks. Nothing is changed, and
/// what the server of a device would allow then is taken to be the least that it can. Ranks make
/// the call together. Errors: of Updater::open(); kMismatch for a device with another state; kBusy.
base::Status check_new_run(const UpdaterOptions& options, const plan::ParameterSpace& space,
                           const storage::RunId& old);
/// The same with sources of options.devices, as all ranks see them.
base::Status check_new_run(const UpdaterOptions& options, const plan::ParameterSpace& space,
                           DeviceSources sources, const storage::RunId& old);

/// Creates the devices of a new run. Those that no subgroup falls to are taken out of `sources`,
/// with a warning. Errors: kNoSpace; of a device that cannot be created, and then none is.
base::Result<DeviceSet> create_devices(const UpdaterOptions& options,
                                       const plan::ParameterSpace& space, DeviceSources& sources);

}  // namespace smartinf::engine
