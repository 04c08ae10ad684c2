#include "smartinf/train/memory_updater.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include <torch/optim/adamw.h>
#include <torch/types.h>

#include "smartinf/train/memory_state.h"
#include "smartinf/train/parameters.h"

namespace smartinf::train {
namespace {

using base::DataType;
using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

torch::ScalarType scalar_type(DataType type) {
  switch (type) {
    case DataType::kF32:
      return torch::kFloat32;
    case DataType::kBf16:
      return torch::kBFloat16;
    case DataType::kF16:
      return torch::kFloat16;
  }
  return torch::kFloat32;
}

class TorchAdamW final : public MemoryUpdater {
 public:
  TorchAdamW(const kernels::RuleOptions& rule, const plan::ParameterSpace& space, std::string run)
      : rule_(rule), space_(space), run_(std::move(run)) {
    const auto count = static_cast<int64_t>(space.count());
    for (Tensor& plane_N : planes_) plane_N = torch::zeros({count});
    gradient_N_ = torch::zeros({count});
  }

  Status load() {
    SI_ASSIGN_OR_RETURN(const MemoryState state, MemoryState::open(run_, space_));
    for (size_t i = 0; i < planes_.size(); ++i) {
      std::memcpy(planes_[i].data_ptr(), state.plane(i).data(), state.plane(i).size_bytes());
    }
    step_ = state.step();
    client_metadata_ = state.client_metadata();
    fresh_ = false;
    return Status();
  }

  Status save() override {
    return MemoryState::save(run_, space_, step_, client_metadata_, {plane(0), plane(1), plane(2)});
  }

  bool fresh() const override { return fresh_; }
  base::StepNumber committed_step() const override { return step_; }
  std::string client_metadata() const override { return client_metadata_; }
  const plan::ParameterSpace& space() const override { return space_; }

  Status initialize(const std::function<void(uint64_t, std::span<float>)>& fill,
                    const std::string& client_metadata) override {
    fill(0, {planes_[0].data_ptr<float>(), space_.count()});
    client_metadata_ = client_metadata;
    fresh_ = false;
    return save();
  }

  Status read_state(uint32_t plane_mask,
                    const std::function<Status(uint64_t, std::span<const std::span<const float>>)>&
                        visit) override {
    std::array<std::span<const float>, MemoryState::kPlanes> planes;
    for (size_t i = 0; i < planes.size(); ++i) {
      if (plane_mask >> i & 1) planes[i] = plane(i);
    }
    return visit(0, planes);
  }

  Status read_weights(
      const std::function<Status(uint64_t, std::span<const float>)>& visit) override {
    return visit(0, plane(0));
  }

  Status load_weights(DataType type, const engine::WeightsSink& sink) override {
    const Tensor weights_N = planes_[0].to(scalar_type(type));
    std::memcpy(sink(0), weights_N.data_ptr(), weights_N.nbytes());
    return Status();
  }

  Status begin_step() override {
    elements_put_ = 0;
    return Status();
  }

  Status put_gradient(uint64_t first, const void* gradient, DataType type,
                      uint64_t count) override {
    const auto n = static_cast<int64_t>(count);
    gradient_N_.narrow(0, static_cast<int64_t>(first), n)
        .copy_(torch::from_blob(const_cast<void*>(gradient), {n}, scalar_type(type)));
    elements_put_ += count;
    return Status();
  }

  Result<engine::GradientSummary> finish_gradients(double unscale) override {
    SI_CHECK(elements_put_ == space_.count(), "a range got no gradient");
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
    return summary;
  }

  Status start_update(const engine::UpdateOptions& options, DataType type,
                      const engine::WeightsSink& sink) override {
    if (options.gradient_scale != 1) gradient_N_.mul_(static_cast<float>(options.gradient_scale));
    if (optimizer_ == nullptr) make_optimizer();
    for (size_t group = 0; group < space_.group_count(); ++group) {
      auto& to =
          static_cast<torch::optim::AdamWOptions&>(optimizer_->param_groups()[group].options());
      to.lr(options.groups[group].lr).weight_decay(options.groups[group].weight_decay);
    }
    optimizer_->step();
    return load_weights(type, sink);
  }

  Status wait_weights(uint64_t, uint64_t) override { return Status(); }

  Status start_commit(const std::string& client_metadata) override {
    ++step_;
    client_metadata_ = client_metadata;
    return Status();
  }
  Status wait_commit() override { return Status(); }
  Status abort() override { return Status(); }

  engine::UpdaterTraffic traffic() const override { return {}; }
  uint64_t bytes_written_ever() const override { return 0; }
  uint64_t memory_bytes() const override { return planes_.size() * planes_[0].nbytes(); }
  uint64_t gradient_memory_bytes() const override { return gradient_N_.nbytes(); }
  std::vector<std::string> describe_devices() const override {
    return {"memory: torch's AdamW on f32 master weights in this process"};
  }

 private:
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
        state->step(static_cast<int64_t>(step_));
        state->exp_avg(part(planes_[1], range));
        state->exp_avg_sq(part(planes_[2], range));
        optimizer_->state()[member.unsafeGetTensorImpl()] = std::move(state);
      }
    }
  }

  kernels::RuleOptions rule_;
  plan::ParameterSpace space_;
  std::string run_;  // its folder
  std::array<Tensor, MemoryState::kPlanes> planes_;
  Tensor gradient_N_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  uint64_t elements_put_ = 0;
  base::StepNumber step_ = 0;
  std::string client_metadata_;
  bool fresh_ = true;
};

}  // namespace

Result<std::unique_ptr<MemoryUpdater>> MemoryUpdater::open(const kernels::RuleOptions& rule,
                                                           const plan::ParameterSpace& space,
                                                           const std::string& run) {
  if (rule.rule != kernels::UpdateRule::kAdamW || rule.maximize) {
    return Status(ErrorCode::kUnsupported,
                  "optimizer.where = \"memory\" has the rule \"adamw\" only",
                  "Choose optimizer.rule = \"adamw\", or optimizer.where = \"device\"");
  }
  auto updater = std::make_unique<TorchAdamW>(rule, space, run);
  if (std::filesystem::exists(MemoryState::path(run))) SI_RETURN_IF_ERROR(updater->load());
  return std::unique_ptr<MemoryUpdater>(std::move(updater));
}

}  // namespace smartinf::train
