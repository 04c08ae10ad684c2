// The one Updater there is: SmartUpdate and host update differ in how the devices under it are
// built, not here.
//
// A thread of the engine's own takes the devices' completions and carries a commit through (writes
// done, prepare on all, commit on all, or abort on all), so that the caller may compute
// meanwhile.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/worker.h"
#include "smartinf/engine/device_replies.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/gradient_path.h"
#include "smartinf/engine/gradient_tracker.h"
#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/spool.h"
#include "smartinf/engine/step_metadata.h"
#include "smartinf/engine/step_protocol.h"
#include "smartinf/engine/updater.h"
#include "smartinf/engine/weight_fetches.h"
#include "smartinf/engine/whole_state.h"

namespace smartinf::engine {

class DeviceUpdater final : public Updater {
 public:
  static base::Result<std::unique_ptr<DeviceUpdater>> make(const UpdaterOptions& options,
                                                           const plan::ParameterSpace& space,
                                                           DeviceSet set);
  ~DeviceUpdater() override;
  DeviceUpdater(const DeviceUpdater&) = delete;
  DeviceUpdater& operator=(const DeviceUpdater&) = delete;

  bool fresh() const override;
  base::StepNumber committed_step() const override;
  std::string client_metadata() const override;
  const plan::ParameterSpace& space() const override { return space_; }

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
  /// The two halves of put_gradient(), for who has the gradient only later: pieces of a span,
  /// marked as given; and their values, of which the devices here get what is theirs. The second
  /// may run on another thread than the caller's, until finish_gradients().
  base::Result<std::vector<GradientTracker::Piece>> take_gradient(uint64_t first, uint64_t count);
  base::Status put_pieces(std::span<const GradientTracker::Piece> pieces, uint64_t first,
                          const void* gradient, base::DataType type) {
    return path_->put(pieces, first, gradient, type);
  }
  base::Status put_gradient(uint64_t first, const void* gradient, base::DataType type,
                            uint64_t count) override;
  base::Status skip_gradient(uint64_t first, uint64_t count) override;
  base::Result<GradientSummary> finish_gradients(double unscale) override;
  base::Status early_update_possible() const override;
  base::Status start_early_update(const UpdateOptions& guess, base::DataType type,
                                  const WeightsSink& sink, double norm_max) override;
  base::Status start_update(const UpdateOptions& options, base::DataType type,
                            const WeightsSink& sink) override;
  base::Status wait_weights(uint64_t first, uint64_t count) override;
  plan::Subgroup subgroup_at(uint64_t element) const override;
  base::Status fetch_weights(uint64_t first, base::DataType type, void* out) override;
  base::Status wait_fetched(uint64_t first) override;
  bool has_fetched(uint64_t first) const override { return fetched(set_.subgroup_at(first)); }
  base::Status start_commit(const std::string& client_metadata) override;
  bool committing() const override;
  base::Status wait_commit() override;
  base::Status flush() override;
  base::Result<StoredRun> snapshot() override;
  base::Status abort() override;

  Spool* spool() override { return spool_.get(); }
  RowTables* tables() override { return tables_.get(); }
  Compression* compression() override { return path_->compression(); }
  UpdaterTraffic traffic() const override;
  uint64_t bytes_written_ever() const override;
  std::vector<std::span<std::byte>> scratch_memory() override;
  uint64_t memory_bytes() const override;
  uint64_t state_cache_bytes() const override;
  uint64_t gradient_memory_bytes() const override;
  uint32_t slots() const override;
  uint64_t subgroup_elements() const override;
  std::vector<std::string> describe_devices() const override;

  const DeviceSet& devices() const { return set_; }
  /// A step has begun whose gradients were not finished.
  bool takes_gradients() const;
  /// The answer of fetch_weights() to any fetch of a subgroup that is not under way.
  base::Status check_fetch(uint64_t first) const;
  GradientTracker& gradient_tracker() { return gradient_tracker_; }
  base::ThreadTeam& team() { return team_; }
  /// An update that waits for fetches goes on without them.
  void demand_nothing();
  /// Whether wait_weights() and wait_fetched() of a subgroup would return at once, with what was
  /// waited for. Any thread.
  bool weights_ready(size_t subgroup) const;
  bool fetched(size_t subgroup) const;

 private:
  using Phase = StepProtocol::Phase;
  using Next = StepProtocol::Next;

  DeviceUpdater(const UpdaterOptions& options, const plan::ParameterSpace& space, DeviceSet set,
                base::AlignedBuffer staging);

  /// The step's number for rules and random choices: the caller's, or the one to be committed.
  base::StepNumber number_of(const UpdateOptions& options) const;
  base::Result<GradientSummary> finish_gradients_here(double unscale);
  static void add_tables(const RowTables::Found& found, double unscale, GradientSummary& summary);
  /// For a call between steps (`what`, in the error): waits for a commit that was started.
  base::Status be_idle(std::string_view what);

  /// Checks that nothing without a gradient is to be updated.
  base::Status check_skipped(const UpdateOptions& options) const;
  /// A message for each device, of which some may have nothing to update; notes which subgroups
  /// take part. mutex_ held.
  std::vector<csd::Update> make_updates(const UpdateOptions& options, double gradient_scale,
                                        base::DataType type, const WeightsSink& sink);
  /// Adds what an early update has changed and the step leaves as it was: their scalars skip, which
  /// writes the committed state again. guessed: updated_ of the early update. mutex_ held.
  void restore_skipped(const std::vector<uint8_t>& guessed, const WeightsSink& sink,
                       std::vector<csd::Update>& updates);
  /// Submits the messages that have something to update. mutex_ held.
  void submit_updates(std::vector<csd::Update> updates);
  /// Ends an early update whose guess is known to be wrong.
  void prefetch();
  void watch_norm(std::span<const GradientTracker::Piece> pieces);

  // Weights that are fetched. mutex_ held.
  bool weights_are_new() const;
  /// Marks the subgroups without a place for their weights.
  void mark_on_demand(std::vector<csd::Update>& updates);
  /// An update that waits for fetches goes on without them.
  void finish_update();
  base::Status cannot_come() const;

  void take_completions();                      // the engine thread
  void complete(csd::Completion&& completion);  // mutex_ held
  void act(Next next);                          // mutex_ held
  void submit_to_all(const csd::Message& message);

  const UpdaterOptions options_;
  const plan::ParameterSpace space_;
  DeviceSet set_;
  DeviceWatch watch_;
  GradientTracker gradient_tracker_;
  base::ThreadTeam team_;  // copies, casts, measures and compresses gradients
  WholeState state_;
  std::unique_ptr<GradientPath> path_;

  base::Status gradient_error_;    // of the step in progress
  double sum_of_squares_ = 0;      // of those measured since an early update began
  double sum_of_squares_max_ = 0;  // 0: there is no limit, or it was passed

  DeviceReplies step_replies_{watch_};  // to the engine thread
  std::unique_ptr<Spool> spool_;        // null: none was asked for
  std::unique_ptr<RowTables> tables_;   // null: none were asked for

  mutable std::mutex mutex_;  // of everything below
  std::condition_variable changed_;
  StepProtocol protocol_;
  StepMetadata metadata_;                     // of the committed step
  StepMetadata next_metadata_;                // of the one that is being committed
  std::string next_text_;                     // the same as the devices keep it
  std::vector<uint8_t> weights_ready_;        // of every subgroup
  std::vector<uint8_t> updated_;              // of every subgroup: is in this step's update
  std::vector<kernels::StepScalars> guess_;   // of the early update
  std::optional<base::DataType> guess_type_;  // likewise; empty: it does not count
  bool update_started_ = false;               // of the step in progress
  base::DataType update_type_ = base::DataType::kBf16;  // of its weights
  WeightFetches fetches_;

  std::jthread completions_thread_;
  /// A question to all ranks between prepare and commit, and once more after it, over
  /// Channel::kGradients, on which nothing else is going on during a commit.
  struct Question {
    std::string call;
    base::Status mine;
  };
  std::unique_ptr<base::Worker<Question>> agreement_;  // null: this process alone decides
};

}  // namespace smartinf::engine
