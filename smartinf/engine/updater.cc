#include "smartinf/engine/updater.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/device_updater.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/ranks/peers.h"
#include "smartinf/engine/ranks/ranks_updater.h"
#include "smartinf/engine/stored_run.h"

namespace smartinf::engine {

base::Result<std::unique_ptr<Updater>> Updater::open(const UpdaterOptions& options,
                                                     const plan::ParameterSpace& space) {
  return open(options, space, local_sources(options));
}

base::Result<std::unique_ptr<Updater>> Updater::open(
    const UpdaterOptions& options, const plan::ParameterSpace& space,
    std::vector<std::unique_ptr<DeviceSource>> sources) {
  if (options.collectives != nullptr && options.collectives->world() > 1) {
    return RanksUpdater::open(options, space, std::move(sources));
  }
  if (options.peers != nullptr && options.peers->world() > 1) {
    return open_among_peers(options, space, std::move(sources));
  }
  UpdaterOptions alone = options;
  alone.collectives = alone.peers = nullptr;
  SI_ASSIGN_OR_RETURN(DeviceSet set, open_device_set(alone, space, sources));
  SI_ASSIGN_OR_RETURN(auto made, DeviceUpdater::make(alone, space, std::move(set)));
  return std::unique_ptr<Updater>(std::move(made));
}

base::Status check_groups(const UpdateOptions& options, const plan::ParameterSpace& space) {
  if (options.groups.size() >= space.group_count()) return base::Status();
  return base::Status(base::ErrorCode::kInvalidArgument,
                      fmt::format("learning rates for {} groups given, the model has {}",
                                  options.groups.size(), space.group_count()),
                      "Give one entry for every group of the parameter space.");
}

base::Status check_client_metadata(const std::string& client_metadata) {
  if (client_metadata.size() <= storage::Store::kClientMetadataBytesMax) return base::Status();
  return base::Status(
      base::ErrorCode::kInvalidArgument, "the data to be kept with a step is too long",
      fmt::format("It may take {}.", base::format_bytes(storage::Store::kClientMetadataBytesMax)));
}

UpdaterTraffic UpdaterTraffic::since(const UpdaterTraffic& earlier) const {
  UpdaterTraffic delta = *this;
  delta.host_link = host_link.since(earlier.host_link);
  delta.store = store.since(earlier.store);
  delta.ranks = ranks.since(earlier.ranks);
  delta.state_bytes_cached = state_bytes_cached - earlier.state_bytes_cached;
  for (size_t d = 0; d < devices.size(); ++d) {
    delta.host_link_by_device[d] = host_link_by_device[d].since(earlier.host_link_by_device[d]);
    delta.store_by_device[d] = store_by_device[d].since(earlier.store_by_device[d]);
  }
  return delta;
}

base::Status Updater::edit_state(
    const std::function<base::Result<bool>(uint64_t, std::span<const std::span<float>>)>&,
    const std::string&, const CompressionState&) {
  return base::Status(base::ErrorCode::kUnsupported, "this updater cannot change stored state",
                      "Use optimizer.where = \"device\".");
}

base::Result<StoredRun> Updater::snapshot() {
  return base::Status(base::ErrorCode::kUnsupported, "this updater gives no snapshot of its state",
                      "Use optimizer.where = \"device\".");
}

base::Status Updater::early_update_possible() const {
  return base::Status(base::ErrorCode::kUnsupported, "this updater has no early updates",
                      "Start the update when all gradients are complete.");
}

base::Status Updater::start_early_update(const UpdateOptions&, base::DataType, const WeightsSink&,
                                         double) {
  return early_update_possible();
}

plan::Subgroup Updater::subgroup_at(uint64_t) const { return {{}, 0, space().count()}; }

base::Status Updater::fetch_weights(uint64_t, base::DataType, void*) {
  return base::Status(base::ErrorCode::kUnsupported, "this updater does not hand out weights",
                      "Keep all weights in memory, or use optimizer.where = \"device\".");
}

base::Status Updater::wait_fetched(uint64_t first) { return fetch_weights(first, {}, nullptr); }

base::Status Updater::put_gradient_sums(uint64_t first, uint64_t count, const GradientSums& sums) {
  if (sums.nodes.size() != 1) {
    return base::Status(
        base::ErrorCode::kInvalidArgument,
        fmt::format("{} sums of a gradient were given, and one process has one of all "
                    "micro batches",
                    sums.nodes.size()),
        "This is a bug in the caller.");
  }
  const bool summed = sums.micro_batches > 1;
  return put_gradient(first, sums.nodes.front(), summed ? base::DataType::kF32 : sums.type, count);
}

base::Status Updater::skip_gradient(uint64_t, uint64_t) {
  return base::Status(base::ErrorCode::kUnsupported,
                      "this updater needs the gradient of every parameter",
                      "Use optimizer.where = \"device\".");
}

}  // namespace smartinf::engine
