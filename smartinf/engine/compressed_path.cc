// Gradients are collected in host memory, compressed when the update starts, and what is not sent
// (the residual) waits for later steps. It is written to the devices every now and then, and the
// weights that come up step ahead by it. docs/smartcomp.md has the formulas.
#include <algorithm>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/compress/step_ahead.h"
#include "smartinf/engine/compressed_sender.h"
#include "smartinf/engine/device_share.h"
#include "smartinf/engine/gradient_path.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Status;

class CompressedPath final : public GradientPath, public Compression {
 public:
  CompressedPath(const PathParts& parts, std::unique_ptr<compress::GradientCompressor> compressor,
                 std::vector<kernels::StepAhead> ahead)
      : GradientPath(parts),
        compressor_(std::move(compressor)),
        sender_(*compressor_, parts.team, parts.watch),
        next_to_write_(parts.set.devices.size()),
        samples_current_(parts.set.fresh),  // all variances are 0
        samples_next_(parts.set.fresh),
        ahead_(std::move(ahead)) {
    ahead_.resize(parts.space.group_count());
    next_ahead_ = ahead_;
    const auto matrices = matrices_of_second_moment(parts.options, parts.space);
    if (matrices.empty() || !compressor_->feedback()) return;
    step_ahead_ =
        std::make_unique<compress::StepAheadWeights>(matrices, parts.space, parts.set.subgroups);
    weights_out_.resize(parts.set.subgroups.size());
  }

  /// Once after opening: the residual of the committed step, from the devices; where that is not
  /// there, none.
  Status recall_residual(const StepMetadata& committed) {
    const DeviceSet& set = parts_.set;
    if (!compressor_->feedback() || set.fresh || set.step == 0) return Status();
    if (!set.residual || committed.residual_step != set.step) {
      base::log(
          base::LogLevel::kWarning,
          fmt::format("the residual of step {} is not on the devices; training continues without "
                      "it (compress.residual_every = 1 writes it in every step)",
                      set.step));
      return Status();
    }
    const size_t plane = parts_.state.plane_count();
    return parts_.state.read(1u << plane, plane + 1,
                             [&](uint64_t first, std::span<const std::span<const float>> planes) {
                               compressor_->set_residual(first, planes.back());
                               return Status();
                             });
  }

  // ---- A step.

  Status begin_step() override {
    SI_RETURN_IF_ERROR(prepare_weights());  // the update samples what it changes, not all
    compressor_->begin_step();
    return Status();
  }

  Status put(std::span<const GradientTracker::Piece> pieces, uint64_t first, const void* gradient,
             base::DataType type) override {
    const auto* bytes = static_cast<const std::byte*>(gradient);
    parts_.team.run(pieces.size(), [&](uint32_t, size_t index) {
      const GradientTracker::Piece& piece = pieces[index];
      const std::byte* values = bytes + (piece.first - first) * base::data_type_bytes(type);
      compressor_->put(piece.first, values, type, piece.count);
      parts_.tracker.measure(piece, values, type);
    });
    return Status();
  }

  base::Result<double> finish(const UpdateOptions& options, base::StepNumber number) override {
    SI_ASSIGN_OR_RETURN(const GradientSummary gradient,
                        parts_.tracker.finish(options.gradient_scale));
    const auto skipped_in = [&](uint64_t first, uint64_t count) {
      std::vector<plan::GroupSpan> skipped = parts_.space.spans(first, count);
      std::erase_if(skipped,
                    [&](const plan::GroupSpan& span) { return !options.groups[span.group].skip; });
      return skipped;
    };
    compressor_->begin_update(number, options.gradient_scale, gradient.norm,
                              skipped_in(0, parts_.space.count()), parts_.team);
    std::vector<CompressedSender::Piece> pieces;
    for (const plan::Subgroup& subgroup : parts_.set.subgroups) {
      if (is_skipped(parts_.space, subgroup, options)) {
        compressor_->leave(subgroup);
        continue;
      }
      pieces.push_back({&subgroup, &parts_.set.device_of(subgroup.id),
                        skipped_in(subgroup.first, subgroup.count)});
    }
    SI_RETURN_IF_ERROR(sender_.send(pieces).status);
    return 1.0;  // a gradient is scaled before it meets the residual
  }

  Status early_update_possible() const override {
    return Status(ErrorCode::kUnsupported,
                  "an early update needs whole gradients, and these are compressed",
                  "Start the update when all gradients are complete.");
  }

  void start_update(const UpdateOptions& options, base::StepNumber number,
                    std::span<csd::Update> updates) override {
    summary_ = compressor_->summary();
    if (step_ahead_ == nullptr) return;
    std::vector<uint8_t> updated(parts_.set.subgroups.size(), 0);
    for (csd::Update& update : updates) {
      for (csd::SubgroupUpdate& one : update.updates) {
        updated[one.subgroup.value] = 1;
        weights_out_[one.subgroup.value] = one.weights_out;
        one.samples_out = step_ahead_->samples();
      }
    }
    step_ahead_->expect(updated);
    samples_current_ = false;
    samples_next_ = true;
    // A group that is skipped keeps its own: its weights stay where they are.
    next_ahead_ = ahead_;
    for (uint32_t g = 0; g < parts_.space.group_count(); ++g) {
      if (options.groups[g].skip) continue;
      next_ahead_[g] = kernels::make_step_ahead(parts_.options.rule, options.groups[g], number);
    }
  }

  void weights_arrived(size_t subgroup, base::DataType type, std::vector<size_t>& ready) override {
    if (step_ahead_ == nullptr) return ready.push_back(subgroup);
    step_ahead_->arrived({compressor_->next_residual(0), next_ahead_}, subgroup,
                         weights_out_[subgroup], type, [&](size_t done) { ready.push_back(done); });
  }

  // ---- Its commit, or an edit's.

  bool start_commit(base::StepNumber step, StepMetadata& next) override {
    const uint64_t every = parts_.options.compress.residual_every;
    const bool wanted = std::exchange(write_wanted_, false);
    const bool write = may_write() && (wanted || step % every == 0);
    if (write) next.residual_step = step;
    return start_commit_of(true, write, next);
  }

  base::Result<bool> start_commit_of_edit(const CompressionState& import, bool changed,
                                          base::StepNumber step, StepMetadata& next) override {
    if (!import.ahead.empty() && import.ahead.size() != ahead_.size()) {
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("the state to import steps ahead in {} groups, but the model has {}",
                      import.ahead.size(), ahead_.size()));
    }
    next_ahead_ = import.ahead.empty() ? ahead_ : import.ahead;
    samples_next_ = samples_current_ && !changed;
    const bool imported = import.residual != nullptr && compressor_->feedback();
    const bool write = imported && may_write();
    if (imported) {
      compressor_->propose_residual(import.residual);
      if (write) next.residual_step = step;
    } else {
      SI_RETURN_IF_ERROR(GradientPath::start_commit_of_edit(import, changed, step, next).status());
    }
    return start_commit_of(imported, write, next);
  }

  std::optional<csd::WriteState> next_write(size_t device) override {
    const storage::StoreLayout& layout = parts_.set.devices[device]->layout();
    if (next_to_write_[device] == layout.subgroups.size()) return std::nullopt;
    const storage::StoredSubgroup& stored = layout.subgroups[next_to_write_[device]++];
    csd::WriteState write{stored.id, stored.count, {}, 1u << (layout.planes.size() - 1)};
    write.residual = compressor_->next_residual(stored.first_element);
    return write;
  }

  void committed() override {
    if (new_residual_) compressor_->commit();
    samples_current_ = samples_next_;
    const std::lock_guard lock(mutex_);
    ahead_ = next_ahead_;
  }

  // ---- Weights.

  bool adjusts_weights() const override { return step_ahead_ != nullptr; }

  Status prepare_weights() override {
    if (step_ahead_ == nullptr || samples_current_) return Status();
    const size_t plane = kernels::variance_plane(parts_.options.rule.rule);
    SI_RETURN_IF_ERROR(
        parts_.state.read(1u << plane, parts_.state.plane_count(),
                          [&](uint64_t first, std::span<const std::span<const float>> planes) {
                            step_ahead_->take(first, planes[plane]);
                            return Status();
                          }));
    samples_current_ = true;
    return Status();
  }

  void adjust_weights(uint64_t first, uint64_t count, void* weights, base::DataType type) override {
    if (step_ahead_ == nullptr) return;
    step_ahead_->step({compressor_->residual(), ahead_}, first, count, weights, type);
  }

  // ---- For the caller.

  Compression* compression() override { return this; }
  uint64_t memory_bytes() const override {
    return compressor_->memory_bytes() + (step_ahead_ ? step_ahead_->memory_bytes() : 0);
  }
  CompressionState state() const override {
    CompressionState state;
    state.residual = compressor_->residual();
    const std::lock_guard lock(mutex_);
    if (step_ahead_ != nullptr) state.ahead = ahead_;
    return state;
  }
  void write_residual() override { write_wanted_ = true; }
  compress::CompressionSummary summary() const override { return summary_; }

 private:
  bool may_write() const {
    return parts_.set.residual && parts_.options.compress.residual_on_devices();
  }
  /// new_residual: the step brings one, which counts from its commit on. Returns `write`.
  bool start_commit_of(bool new_residual, bool write, StepMetadata& next) {
    new_residual_ = new_residual;
    if (step_ahead_ != nullptr) next.ahead = next_ahead_;
    std::fill(next_to_write_.begin(), next_to_write_.end(), size_t{0});
    return write;
  }

  const std::unique_ptr<compress::GradientCompressor> compressor_;
  CompressedSender sender_;
  std::unique_ptr<compress::StepAheadWeights> step_ahead_;  // null: weights are as they are stored
  compress::CompressionSummary summary_;                    // of the last update
  bool write_wanted_ = false;                               // by write_residual()

  // State of the step in progress.
  std::vector<void*> weights_out_;  // of every subgroup, with step_ahead_
  std::vector<kernels::StepAhead> next_ahead_;
  bool new_residual_ = false;
  std::vector<size_t> next_to_write_;  // by device: index in its layout

  bool samples_current_;  // step_ahead_'s samples are of the committed step
  bool samples_next_;     // and will be when the step in progress is
  mutable std::mutex mutex_;
  std::vector<kernels::StepAhead> ahead_;  // of the committed step, by group; mutex_ held
};

}  // namespace

base::Result<std::unique_ptr<GradientPath>> make_compressed_path(const PathParts& parts,
                                                                 const StepMetadata& committed) {
  SI_ASSIGN_OR_RETURN(auto compressor,
                      compress::GradientCompressor::make(
                          parts.options.compress, parts.space.count(), parts.options.seed,
                          matrices_of_second_moment(parts.options, parts.space)));
  auto path = std::make_unique<CompressedPath>(parts, std::move(compressor), committed.ahead);
  SI_RETURN_IF_ERROR(path->recall_residual(committed));
  return std::unique_ptr<GradientPath>(std::move(path));
}

}  // namespace smartinf::engine
