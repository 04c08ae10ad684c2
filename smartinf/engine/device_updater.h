// The one Updater there is: SmartUpdate and host update differ in how the devices under it are
// built, not here.
//
// A thread of the engine's own takes the devices' completions and carries a commit through (writes
// done, prepare on all, commit on all, or abort on all), so that the caller may compute
// meanwhile.
#pragma once

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/compress/step_ahead.h"
#include "smartinf/engine/compressed_sender.h"
#include "smartinf/engine/device_replies.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/gradient_sender.h"
#include "smartinf/engine/gradient_tracker.h"
#include "smartinf/engine/step_metadata.h"
#include "smartinf/engine/step_protocol.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {

class DeviceUpdater final : public Updater {
 public:
  static base::Result<std::unique_ptr<Updater>> make(const UpdaterOptions& options,
                                                     const plan::ParameterSpace& space,
                                                     DeviceSet set);
  ~DeviceUpdater() override;
  DeviceUpdater(const DeviceUpdater&) = delete;
  DeviceUpdater& operator=(const DeviceUpdater&) = delete;

  bool fresh() const override;
  base::StepNumber committed_step() const override;
  std::string client_metadata() const override;
  const plan::ParameterSpace& space() const override { return space_; }

  base::Status initialize(const std::function<void(uint64_t, std::span<float>)>& fill,
                          const std::string& client_metadata) override;
  base::Status read_state(
      uint32_t plane_mask,
      const std::function<base::Status(uint64_t, std::span<const std::span<const float>>)>& visit)
      override;
  base::Status edit_state(
      const std::function<base::Result<bool>(uint64_t, std::span<const std::span<float>>)>& edit,
      const std::string& client_metadata, const base::Bf16* residual,
      std::span<const kernels::StepAhead> ahead) override;
  const base::Bf16* residual() const override;
  std::vector<kernels::StepAhead> step_ahead() const override;
  base::Status read_weights(
      const std::function<base::Status(uint64_t, std::span<const float>)>& visit) override;
  base::Status load_weights(base::DataType type, const WeightsSink& sink) override;

  base::Status begin_step() override;
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
  base::Status start_commit(const std::string& client_metadata) override;
  bool committing() const override;
  base::Status wait_commit() override;
  base::Status commit_prepared() override;
  base::Status flush() override;
  base::Result<StoredRun> snapshot() override;
  base::Status abort() override;

  void keep_residual() override;
  compress::CompressionSummary compression() const override;
  UpdaterTraffic traffic() const override;
  uint64_t bytes_written_ever() const override;
  std::vector<std::span<std::byte>> scratch_memory() override;
  uint64_t memory_bytes() const override;
  uint64_t state_cache_bytes() const override;
  uint64_t gradient_memory_bytes() const override;
  uint32_t slots() const override;
  uint64_t subgroup_elements() const override;
  std::vector<std::string> describe_devices() const override;

 private:
  using Phase = StepProtocol::Phase;
  using Next = StepProtocol::Next;

  DeviceUpdater(const UpdaterOptions& options, const plan::ParameterSpace& space, DeviceSet set,
                base::AlignedBuffer staging,
                std::unique_ptr<compress::GradientCompressor> compressor);

  const std::string& device_name(size_t device) const { return set_.devices[device]->info().name; }
  static base::Status check_client_metadata(const std::string& client_metadata);
  std::string stored_client_metadata()
      const;  // mutex_ held: commit_client_metadata_ and what belongs behind it

  csd::Device& device_of(base::SubgroupId subgroup) {
    return *set_.devices[set_.owner[subgroup.value].value];
  }
  /// The step's number for rules and random choices: the caller's, or the one to be committed.
  base::StepNumber number_of(const UpdateOptions& options) const;

  /// The message to a device; waits for the answer.
  base::Status on_device(csd::Device& device, csd::Message message);
  /// The message to every device, replies to the caller's own queue; waits for all.
  base::Status on_all_devices(const csd::Message& message);
  /// read_state of the first `plane_count` planes, a residual among them if wanted.
  base::Status read_planes(
      uint32_t plane_mask, size_t plane_count,
      const std::function<base::Status(uint64_t, std::span<const std::span<const float>>)>& visit);
  base::Status fill_subgroups(const std::function<void(uint64_t, std::span<float>)>& fill);
  base::Status edit_subgroups(
      const std::function<base::Result<bool>(uint64_t, std::span<const std::span<float>>)>& edit);
  /// True when every group of the subgroup sits this step out.
  bool is_skipped(const plan::Subgroup& subgroup, const UpdateOptions& options) const;
  /// Zeros for what got no gradient, where the rest of its subgroup is updated.
  base::Status fill_skipped(const UpdateOptions& options);

  base::Status check_groups(const UpdateOptions& options) const;
  /// A message for each device, of which some may have nothing to update; notes which subgroups
  /// take part. mutex_ held.
  std::vector<csd::Update> make_updates(const UpdateOptions& options, base::DataType type,
                                        const WeightsSink& sink);
  /// Adds what an early update has changed and the step leaves as it was: their scalars skip, which
  /// writes the committed state again. guessed: updated_ of the early update. mutex_ held.
  void restore_skipped(const std::vector<uint8_t>& guessed, const WeightsSink& sink,
                       std::vector<csd::Update>& updates);
  /// Those with something to update. mutex_ held.
  void submit_updates(std::vector<csd::Update> updates);
  /// Ends an early update whose guess is known to be wrong.
  void watch_norm(std::span<const GradientTracker::Piece> pieces);

  /// Compresses and sends all gradients of the step.
  base::Status send_compressed(const UpdateOptions& options);
  /// What compression kept at the committed step, from the devices or, where that is not there,
  /// nothing. Once after opening.
  base::Status recall_residual();
  /// Writes the next residual of one of a device's subgroups (by index in its layout).
  csd::WriteState next_residual(size_t device, size_t subgroup) const;
  void keep_next_of(size_t device);  // mutex_ held: writes its next subgroup's residual
  /// Commits, or after a failure aborts, what was written from outside; waits for it.
  base::Status commit_edit(bool residual, base::Status written);
  void committed();  // mutex_ held: the step in progress is real
  /// Samples of the committed step's variances, where weights step ahead.
  base::Status find_samples();
  /// Takes weights of the committed step that are as stored to where training is. weights: [count]
  /// of type.
  void step_ahead(uint64_t first, uint64_t count, void* weights, base::DataType type);

  void take_completions();                      // the engine thread
  void complete(csd::Completion&& completion);  // mutex_ held
  void act(Next next);                          // mutex_ held
  void submit_to_all(const csd::Message& message, DeviceReplies& replies);

  const UpdaterOptions options_;
  const plan::ParameterSpace space_;
  DeviceSet set_;
  base::AlignedBuffer staging_;
  base::AlignedBuffer edit_memory_;  // of an edit; stays after one that failed (DeviceReplies)
  DeviceWatch watch_;
  GradientTracker gradient_tracker_;
  base::ThreadTeam team_;  // copies, casts, measures and compresses gradients
  GradientSender gradient_sender_;
  std::unique_ptr<compress::GradientCompressor> compressor_;  // null: gradients go down whole
  std::unique_ptr<CompressedSender> compressed_sender_;       // with it
  std::unique_ptr<compress::StepAheadWeights>
      weights_ahead_;                           // null: weights come up as they are stored
  std::vector<void*> weights_out_;              // with it: of every subgroup in this step
  bool samples_current_ = false;                // its samples are of the committed step
  bool samples_next_ = false;                   // and will be when the step in progress is
  std::vector<kernels::StepAhead> next_ahead_;  // of the step in progress, by group

  // Replies to commands that are waited for in the call that makes them: reading, writing.
  DeviceReplies caller_replies_{watch_};
  base::Status gradient_error_;
  struct Skipped {
    uint64_t first = 0;
    uint64_t count = 0;
  };
  std::vector<Skipped> skipped_;   // in this step
  bool gradients_given_ = false;   // in this step
  double sum_of_squares_ = 0;      // of those measured since an early update began
  double sum_of_squares_max_ = 0;  // 0: there is no limit, or it was passed

  DeviceReplies step_replies_{watch_};  // to the engine thread
  std::vector<size_t> next_to_keep_;    // by device: index in its layout

  mutable std::mutex mutex_;  // of everything below
  std::condition_variable changed_;
  StepProtocol protocol_;
  std::string client_metadata_;
  std::vector<uint8_t> weights_ready_;             // of every subgroup
  std::vector<uint8_t> updated_;                   // of every subgroup: is in this step's update
  std::vector<kernels::StepScalars> guess_;        // of the early update
  std::optional<base::DataType> guess_type_;       // likewise; empty: it does not count
  bool keep_wanted_ = false;                       // by keep_residual()
  bool keeping_ = false;                           // this commit writes residuals
  bool new_residual_ = false;                      // and they count from it on
  std::optional<base::StepNumber> residual_step_;  // of those on the devices
  std::vector<kernels::StepAhead> ahead_;          // of the committed step, by group
  compress::CompressionSummary compression_;       // of the last update
  std::string commit_client_metadata_;

  std::jthread completions_thread_;
};

}  // namespace smartinf::engine
