// One run over the devices of several ranks: an Updater whose calls all ranks make together, in the
// same order. Each has the whole parameter space, drives its own devices through a DeviceUpdater,
// and gets the rest from the ranks that have it.
//
// A failure that one rank finds is the error of the same call on all of them. A rank that is gone
// is the error of the next call that needs it; then nothing goes on but closing, and opening again
// recovers the last committed step on all devices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/traffic.h"
#include "smartinf/engine/device_updater.h"
#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/engine/ranks/gradient_exchange.h"
#include "smartinf/engine/ranks/messages.h"
#include "smartinf/engine/ranks/weight_exchange.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {

class RanksUpdater final : public Updater {
 public:
  /// options.collectives of two ranks or more. sources: of options.devices, those of all ranks.
  /// Errors: kInvalidArgument where the ranks were given different options (named);
  /// Updater::open's, of whichever rank.
  static base::Result<std::unique_ptr<Updater>> open(const UpdaterOptions& options,
                                                     const plan::ParameterSpace& space,
                                                     DeviceSources sources);
  /// Likewise. Errors: Updater::check_new_run's, of whichever rank.
  static base::Status check_new_run(const UpdaterOptions& options,
                                    const plan::ParameterSpace& space, DeviceSources sources,
                                    const storage::RunId& old);
  ~RanksUpdater() override;
  RanksUpdater(const RanksUpdater&) = delete;
  RanksUpdater& operator=(const RanksUpdater&) = delete;

  bool fresh() const override { return here_->fresh(); }
  base::StepNumber committed_step() const override { return here_->committed_step(); }
  std::string client_metadata() const override { return here_->client_metadata(); }
  const plan::ParameterSpace& space() const override { return here_->space(); }

  base::Status initialize(const FillWeights& fill, const std::string& client_metadata) override;
  base::Status read_state(
      uint32_t plane_mask,
      const std::function<base::Status(uint64_t, std::span<const std::span<const float>>)>& visit)
      override;
  base::Status edit_state(
      const std::function<base::Result<bool>(uint64_t, std::span<const std::span<float>>)>& edit,
      const std::string& client_metadata, const CompressionState& compression) override;
  base::Status read_weights(
      const std::function<base::Status(uint64_t, std::span<const float>)>& visit) override;
  base::Status load_weights(base::DataType type, const WeightsSink& sink) override;

  base::Status begin_step() override;
  base::Status put_gradient(uint64_t first, const void* gradient, base::DataType type,
                            uint64_t count) override;
  base::Status put_gradient_sums(uint64_t first, uint64_t count, const GradientSums& sums) override;
  base::Status skip_gradient(uint64_t first, uint64_t count) override;
  base::Result<GradientSummary> finish_gradients(double unscale) override;
  base::Status early_update_possible() const override;
  base::Status start_early_update(const UpdateOptions& guess, base::DataType type,
                                  const WeightsSink& sink, double norm_max) override;
  base::Status start_update(const UpdateOptions& options, base::DataType type,
                            const WeightsSink& sink) override;
  base::Status wait_weights(uint64_t first, uint64_t count) override;
  plan::Subgroup subgroup_at(uint64_t element) const override {
    return here_->subgroup_at(element);
  }
  base::Status fetch_weights(uint64_t first, base::DataType type, void* out) override;
  base::Status wait_fetched(uint64_t first) override;
  base::Status start_commit(const std::string& client_metadata) override;
  bool committing() const override { return here_->committing(); }
  base::Status wait_commit() override;
  base::Status flush() override;
  base::Result<StoredRun> snapshot() override;
  base::Status abort() override;

  std::shared_ptr<Collectives> collectives() const override { return ranks_; }
  RowTables* tables() override { return here_->tables(); }
  Spool* spool() override { return here_->spool(); }
  UpdaterTraffic traffic() const override;
  uint64_t bytes_written_ever() const override { return here_->bytes_written_ever(); }
  std::vector<std::span<std::byte>> scratch_memory() override { return here_->scratch_memory(); }
  uint64_t memory_bytes() const override;
  uint64_t state_cache_bytes() const override { return here_->state_cache_bytes(); }
  uint64_t gradient_memory_bytes() const override;
  uint32_t slots() const override { return here_->slots(); }
  uint64_t subgroup_elements() const override { return here_->subgroup_elements(); }
  std::vector<std::string> describe_devices() const override;

 private:
  /// Place of a subgroup's weights from the newest update.
  enum class Weights : uint8_t {
    kNone,       // there was none, or it was aborted
    kInFlight,   // they are on their way to where the sink pointed, or there
    kOnDemand,   // the sink had no place for them; the update makes them when they are fetched
    kConsumed,   // they were, or it does not wait for that any more
    kUnchanged,  // the subgroup was skipped
  };
  enum class Fetch : uint8_t { kNone, kUnderWay, kAfterCommit, kCancelled };
  struct LateFetch {
    size_t subgroup = 0;
    base::DataType type = base::DataType::kBf16;
    void* out = nullptr;
  };
  /// Reads what the devices here have, in ascending order.
  using ReadHere = std::function<base::Status(const WholeState::Visit&)>;

  RanksUpdater(const UpdaterOptions& options, std::unique_ptr<DeviceUpdater> here,
               std::unique_ptr<CompressedSums> compressed);

  bool is_here(size_t subgroup) const { return rank_of_[subgroup] == ranks_->rank(); }
  /// Whether this rank computes with weights of the subgroup.
  bool is_used(size_t subgroup) const {
    return std::ranges::binary_search(users_[subgroup], ranks_->rank());
  }
  /// Whether its new weights come to this rank or go from it.
  bool takes_part(size_t subgroup) const { return is_here(subgroup) || is_used(subgroup); }
  /// Whether all ranks that compute with the subgroup are of one stage, and one of them has it:
  /// only then it can be fetched.
  bool is_home(size_t subgroup) const;
  base::Status not_home(size_t subgroup) const;
  /// Ranks that have the gradients of a span, of each of so many trees. Errors: kInvalidArgument
  /// for a span that is not within a stage.
  base::Result<std::vector<Holders>> holders_of(uint64_t first, uint64_t count,
                                                uint32_t trees) const;
  /// The answer of all ranks to a call.
  base::Status all(std::string_view call, const base::Status& mine) const;
  /// The same where all of them, or all without stages, want the weights of the same subgroups.
  /// same: what else they have in common. Errors also: of a subgroup that is to be fetched and
  /// cannot be.
  base::Status all_with(std::string_view call, const std::vector<void*>& places,
                        const base::Status& mine, std::string_view same = {}) const;
  base::Status read_from_all(uint32_t plane_mask, size_t plane_count, const ReadHere& read_here,
                             const WholeState::Visit& visit);
  /// Where the sink wants each subgroup that `wanted` says; null: nowhere. Those here that only
  /// ranks of other stages compute with have memory of this object's, and those that this rank has
  /// no part in some place that is not used.
  std::vector<void*> places_of(const WeightsSink& sink, base::DataType type,
                               const std::function<bool(const plan::Subgroup&)>& wanted);
  WeightsSink sink_here(const std::vector<void*>& places) const;
  /// An update waits for fetches no longer.
  void demand_nothing();

  const UpdaterOptions options_;
  const std::shared_ptr<Collectives> ranks_;
  std::unique_ptr<DeviceUpdater> here_;
  const std::unique_ptr<CompressedSums> compressed_;  // null: sums go dense
  std::vector<uint32_t> rank_of_;             // of every subgroup
  std::vector<std::vector<uint32_t>> users_;  // likewise: ranks that compute with its weights
  std::map<size_t, std::vector<std::byte>> for_others_;  // weights of subgroups here
  base::TrafficCounter traffic_;

  base::Status gradient_error_;  // of the step in progress
  bool update_started_ = false;  // likewise
  bool commit_started_ = false;  // likewise
  base::DataType update_type_ = base::DataType::kBf16;
  std::vector<Weights> weights_;         // of every subgroup
  std::vector<Fetch> fetches_;           // likewise
  std::vector<LateFetch> late_fetches_;  // fetches after a commit which was not started

  // Their threads end before the devices do.
  std::unique_ptr<GradientExchange> gradient_exchange_;
  std::unique_ptr<WeightExchange> weight_exchange_;
};

}  // namespace smartinf::engine
