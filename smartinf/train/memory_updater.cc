#include "smartinf/train/memory_updater.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include <torch/optim/adamw.h>
#include <torch/types.h>

#include "smartinf/engine/gradient_tracker.h"
#include "smartinf/engine/step_protocol.h"
#include "smartinf/model/architecture.h"
#include "smartinf/train/memory_state.h"
#include "smartinf/train/scalar_type.h"

namespace smartinf::train {
namespace {

using base::DataType;
using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

/// An update overwrites the state in place, as torch's optimizers do: a copy of what it was would
/// cost memory and time that what is compared with this does not spend. So it cannot be aborted.
class TorchAdamW final : public engine::Updater {
 public:
  /// stored: the state to go on with; null: none, it is still to be initialized.
  TorchAdamW(const kernels::RuleOptions& rule, const plan::ParameterSpace& space, std::string run,
             const MemoryState* stored)
      : rule_(rule),
        space_(space),
        run_(std::move(run)),
        tracker_(space_),
        protocol_({.written = stored != nullptr,
                   .committed_step = stored != nullptr ? stored->step() : 0}) {
    const auto count = static_cast<int64_t>(space.count());
    for (Tensor& plane_N : planes_) plane_N = torch::zeros({count});
    gradient_N_ = torch::zeros({count});
    if (stored == nullptr) return;
    for (size_t i = 0; i < planes_.size(); ++i) {
      std::memcpy(planes_[i].data_ptr(), stored->plane(i).data(), stored->plane(i).size_bytes());
    }
    client_metadata_ = stored->client_metadata();
    saved_step_ = stored->step();
  }

  bool fresh() const override { return protocol_.phase() == Phase::kUnwritten; }
  base::StepNumber committed_step() const override { return protocol_.committed_step(); }
  std::string client_metadata() const override { return client_metadata_; }
  const plan::ParameterSpace& space() const override { return space_; }

  Status initialize(const FillWeights& fill, const std::string& client_metadata) override {
    SI_RETURN_IF_ERROR(engine::check_client_metadata(client_metadata));
    if (!fresh()) {
      return Status(ErrorCode::kFailedPrecondition, "there is a state already",
                    "initialize() is for a run without one.");
    }
    SI_RETURN_IF_ERROR(protocol_.begin_edit());
    Status written = fill(0, {planes_[0].data_ptr<float>(), space_.count()});
    next_client_metadata_ = client_metadata;
    if (written.ok()) written = save(0, client_metadata);
    SI_ASSIGN_OR_RETURN(const Next next, protocol_.start_commit(false, std::move(written)));
    return carry_through(next);
  }

  Status read_state(uint32_t plane_mask,
                    const std::function<Status(uint64_t, std::span<const std::span<const float>>)>&
                        visit) override {
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kIdle, "read_state"));
    std::array<std::span<const float>, MemoryState::kPlanes> planes;
    bool wanted = false;
    for (size_t i = 0; i < planes.size(); ++i) {
      if ((plane_mask >> i & 1) == 0) continue;
      planes[i] = plane(i);
      wanted = true;
    }
    return wanted ? visit(0, planes) : Status();
  }

  Status read_weights(
      const std::function<Status(uint64_t, std::span<const float>)>& visit) override {
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kIdle, "read_weights"));
    return visit(0, plane(0));
  }

  Status load_weights(DataType type, const engine::WeightsSink& sink) override {
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kIdle, "load_weights"));
    hand_out_weights(type, sink);
    return Status();
  }

  Status begin_step() override {
    SI_RETURN_IF_ERROR(protocol_.begin_step());
    tracker_.begin();
    return Status();
  }

  Status put_gradient(uint64_t first, const void* gradient, DataType type,
                      uint64_t count) override {
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kGradients, "put_gradient"));
    SI_RETURN_IF_ERROR(tracker_.take(first, count).status());
    const auto n = static_cast<int64_t>(count);
    gradient_N_.narrow(0, static_cast<int64_t>(first), n)
        .copy_(torch::from_blob(const_cast<void*>(gradient), {n}, scalar_type(type)));
    return Status();
  }

  Result<engine::GradientSummary> finish_gradients(double unscale) override {
    if (protocol_.phase() != Phase::kSummed) {
      SI_RETURN_IF_ERROR(protocol_.require(Phase::kGradients, "finish_gradients"));
    }
    SI_RETURN_IF_ERROR(tracker_.finish(unscale).status());  // whether all are there
    engine::GradientSummary summary;
    double sum_of_squares = 0;
    for (const plan::ParameterRange& range : space_.ranges()) {
      const Tensor squares = part(gradient_N_, range).to(torch::kFloat64).square();
      const double sum = squares.sum().item<double>();
      if (!std::isfinite(sum) && summary.finite) {
        summary.finite = false;
        summary.first_bad = range.name;
      }
      sum_of_squares += sum;
    }
    summary.norm = std::sqrt(sum_of_squares) * unscale;
    SI_RETURN_IF_ERROR(protocol_.finish_gradients());
    return summary;
  }

  Status start_update(const engine::UpdateOptions& options, DataType type,
                      const engine::WeightsSink& sink) override {
    SI_RETURN_IF_ERROR(engine::check_groups(options, space_));
    for (const kernels::GroupOptions& group : options.groups) {
      if (!group.skip) continue;
      return Status(ErrorCode::kUnsupported, "torch's AdamW in memory updates all groups",
                    "Keep the state on devices, where groups can be skipped.");
    }
    SI_RETURN_IF_ERROR(protocol_.start_update(0));
    if (options.gradient_scale != 1) gradient_N_.mul_(static_cast<float>(options.gradient_scale));
    if (optimizer_ == nullptr) make_optimizer();
    for (size_t group = 0; group < space_.group_count(); ++group) {
      auto& to =
          static_cast<torch::optim::AdamWOptions&>(optimizer_->param_groups()[group].options());
      to.lr(options.groups[group].lr).weight_decay(options.groups[group].weight_decay);
    }
    optimizer_->step();
    weights_ready_ = true;
    hand_out_weights(type, sink);
    return Status();
  }

  Status wait_weights(uint64_t, uint64_t) override {
    if (weights_ready_) return Status();
    return Status(ErrorCode::kFailedPrecondition, "wait_weights was called without an update",
                  "Call start_update() first.");
  }

  Status start_commit(const std::string& client_metadata) override {
    SI_RETURN_IF_ERROR(engine::check_client_metadata(client_metadata));
    SI_ASSIGN_OR_RETURN(const Next next, protocol_.start_commit(false));
    next_client_metadata_ = client_metadata;
    return carry_through(next);
  }
  Status wait_commit() override { return Status(); }  // start_commit() has

  Status abort() override {
    const bool updated = protocol_.phase() == Phase::kUpdating;
    SI_ASSIGN_OR_RETURN(const Next next, protocol_.abort());
    return carry_through(
        next, updated ? Status(ErrorCode::kFailedPrecondition,
                               "the update has overwritten the state in memory",
                               "Start again: the run goes on from the state that was saved last.")
                      : Status());
  }

  Status flush() override {
    if (fresh()) return Status();
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kIdle, "flush"));
    return saved_step_ == committed_step() ? Status() : save(committed_step(), client_metadata_);
  }

  engine::UpdaterTraffic traffic() const override { return {}; }
  uint64_t bytes_written_ever() const override { return 0; }
  uint64_t memory_bytes() const override { return planes_.size() * planes_[0].nbytes(); }
  uint64_t gradient_memory_bytes() const override { return gradient_N_.nbytes(); }
  std::vector<std::string> describe_devices() const override {
    return {"memory: torch's AdamW on f32 master weights in this process"};
  }

 private:
  using Phase = engine::StepProtocol::Phase;
  using Next = engine::StepProtocol::Next;

  /// Carries the protocol's actions through: what it asks devices for has happened already, or has
  /// failed, here.
  Status carry_through(Next next, const Status& answer = {}) {
    while (next != Next::kWait && next != Next::kCommitted) next = protocol_.answered(answer);
    if (next == Next::kCommitted) client_metadata_ = std::move(next_client_metadata_);
    return protocol_.take_outcome();
  }

  Status save(base::StepNumber step, const std::string& client_metadata) {
    SI_RETURN_IF_ERROR(
        MemoryState::save(run_, space_, step, client_metadata, {plane(0), plane(1), plane(2)}));
    saved_step_ = step;
    return Status();
  }

  void hand_out_weights(DataType type, const engine::WeightsSink& sink) const {
    void* out = sink ? sink(0) : nullptr;
    if (out == nullptr) return;
    torch::from_blob(out, planes_[0].sizes(), scalar_type(type)).copy_(planes_[0]);
  }

  std::span<const float> plane(size_t index) const {
    return {planes_[index].const_data_ptr<float>(), space_.count()};
  }
  Tensor part(const Tensor& flat_N, const plan::ParameterRange& range) const {
    return flat_N.narrow(0, static_cast<int64_t>(range.first), static_cast<int64_t>(range.count));
  }

  // Ranges are torch's parameters; their state is put where the planes are.
  void make_optimizer() {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    torch::optim::AdamWOptions defaults;
    defaults.betas({rule_.beta1, rule_.beta2}).eps(rule_.eps);
    for (uint32_t group = 0; group < space_.group_count(); ++group) {
      std::vector<Tensor> members;
      for (const plan::ParameterRange& range : space_.ranges()) {
        if (range.group != group) continue;
        Tensor member = part(planes_[0], range);
        member.mutable_grad() = part(gradient_N_, range);
        members.push_back(member);
      }
      groups.emplace_back(members, std::make_unique<torch::optim::AdamWOptions>(defaults));
    }
    optimizer_ = std::make_unique<torch::optim::AdamW>(std::move(groups), defaults);
    for (const auto& group : optimizer_->param_groups()) {
      for (const Tensor& member : group.params()) {
        const auto offset = static_cast<uint64_t>(member.storage_offset());
        const plan::ParameterRange& range = space_.at(offset);
        auto state = std::make_unique<torch::optim::AdamWParamState>();
        state->step(static_cast<int64_t>(committed_step()));
        state->exp_avg(part(planes_[1], range));
        state->exp_avg_sq(part(planes_[2], range));
        optimizer_->state()[member.unsafeGetTensorImpl()] = std::move(state);
      }
    }
  }

  const kernels::RuleOptions rule_;
  const plan::ParameterSpace space_;
  const std::string run_;  // its folder
  std::array<Tensor, MemoryState::kPlanes> planes_;
  Tensor gradient_N_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  engine::GradientTracker tracker_;  // what has come; the norm is torch's
  engine::StepProtocol protocol_;
  std::string client_metadata_;
  std::string next_client_metadata_;  // of the step in progress
  base::StepNumber saved_step_ = 0;
  bool weights_ready_ = false;
};

}  // namespace

Result<std::unique_ptr<engine::Updater>> open_memory_updater(const kernels::RuleOptions& rule,
                                                             const plan::ParameterSpace& space,
                                                             const std::string& run) {
  if (rule.rule != kernels::UpdateRule::kAdamW || rule.maximize) {
    return Status(ErrorCode::kUnsupported,
                  "optimizer.where = \"memory\" has the rule \"adamw\" only",
                  "Choose optimizer.rule = \"adamw\", or optimizer.where = \"device\"");
  }
  std::optional<MemoryState> stored;
  if (std::filesystem::exists(MemoryState::path(run))) {
    SI_ASSIGN_OR_RETURN(stored, MemoryState::open(run, space));
  }
  return std::unique_ptr<engine::Updater>(
      std::make_unique<TorchAdamW>(rule, space, run, stored ? &*stored : nullptr));
}

}  // namespace smartinf::train
