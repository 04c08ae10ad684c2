// torch's AdamW behind the engine's interface, against the contract of all updaters. Its arithmetic
// is torch's, which rounds elsewhere than the engine's kernels do, so its bits are those of torch's
// optimizer over plain tensors, computed here.
#include "smartinf/train/memory_updater.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater_contract.h"

namespace smartinf::train {
namespace {

using torch::Tensor;

std::span<const float> values_of(const Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

/// engine::run_steps() by a loop over torch's optimizer, each parameter a tensor of its own.
engine::Outcome torch_run() {
  const plan::ParameterSpace space = engine::contract_space();
  const kernels::RuleOptions rule;
  std::vector<Tensor> parameters;
  std::array<std::vector<Tensor>, 2> members;
  for (const plan::ParameterRange& range : space.ranges()) {
    Tensor& parameter = parameters.emplace_back(torch::empty(static_cast<int64_t>(range.count)));
    for (uint64_t i = 0; i < range.count; ++i) {
      parameter.data_ptr<float>()[i] = 0.1f * std::sin(static_cast<float>(range.first + i));
    }
    members[range.group].push_back(parameter);
  }
  torch::optim::AdamWOptions of_all;
  of_all.betas({rule.beta1, rule.beta2}).eps(rule.eps);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t g = 0; g < members.size(); ++g) {
    auto options = std::make_unique<torch::optim::AdamWOptions>(of_all);
    options->lr(g == 0 ? 0.01 : 0.02).weight_decay(g == 0 ? 0.1 : 0);
    groups.emplace_back(members[g], std::move(options));
  }
  torch::optim::AdamW optimizer(std::move(groups), of_all);

  engine::Outcome outcome;
  for (int step = 1; step <= engine::kSteps; ++step) {
    auto gradient = engine::contract_gradient(space.count(), step);
    double sum_of_squares = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const plan::ParameterRange& range = space.ranges()[i];
      const Tensor own = torch::from_blob(gradient.data() + range.first,
                                          {static_cast<int64_t>(range.count)}, torch::kBFloat16);
      parameters[i].mutable_grad() = own.to(torch::kFloat32);
      sum_of_squares += own.to(torch::kFloat64).square().sum().item<double>();
    }
    outcome.norms.push_back(0.25 * std::sqrt(sum_of_squares));
    const auto scale = static_cast<float>(0.25 * std::min(1.0, 1.0 / outcome.norms.back()));
    for (const Tensor& parameter : parameters) parameter.mutable_grad().mul_(scale);
    optimizer.step();
    std::vector<base::Bf16> weights;
    for (const Tensor& parameter : parameters) {
      for (const float value : values_of(parameter)) weights.push_back(base::to_bf16(value));
    }
    outcome.weights.push_back(engine::digest(weights));
  }
  std::array<std::vector<float>, 3> planes;
  for (const Tensor& parameter : parameters) {
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(
        *optimizer.state().at(parameter.unsafeGetTensorImpl()));
    const std::array<Tensor, 3> all = {parameter, state.exp_avg(), state.exp_avg_sq()};
    for (size_t p = 0; p < all.size(); ++p) {
      const std::span<const float> values = values_of(all[p]);
      planes[p].insert(planes[p].end(), values.begin(), values.end());
    }
  }
  for (const auto& plane : planes) outcome.state = engine::digest(plane, outcome.state);
  return outcome;
}

const engine::Outcome& torch_reference() {
  static const engine::Outcome outcome = torch_run();
  return outcome;
}

class MemoryPlace final : public engine::StatePlace {
 public:
  MemoryPlace() { std::filesystem::create_directory(run_); }
  base::Result<std::unique_ptr<engine::Updater>> open() override {
    return open_memory_updater(kernels::RuleOptions(), engine::contract_space(), run_);
  }

 private:
  const engine::Scratch scratch_;
  const std::string run_ = scratch_ / "run";
};

engine::UpdaterKind memory_kind() {
  engine::UpdaterKind kind;
  kind.name = "Memory";
  kind.make_place = [] { return std::make_unique<MemoryPlace>(); };
  kind.reference = torch_reference;
  kind.on_devices = false;
  kind.in_place = true;
  return kind;
}

TEST(MemoryUpdater, GoesOnFromWhatWasWrittenLast) {
  MemoryPlace place;
  engine::Outcome outcome;
  {
    auto updater = place.open();
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    engine::initialize(**updater);
    engine::run_steps(**updater, 1, 1, outcome);
    engine::expect_ok((*updater)->flush());
    engine::run_steps(**updater, 2, 2, outcome);  // lost with the process
  }
  auto updater = place.open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_EQ((*updater)->committed_step(), 1u);
  EXPECT_EQ((*updater)->client_metadata(), "after step 1");
  outcome = {};
  engine::run_steps(**updater, 2, engine::kSteps, outcome);
  EXPECT_EQ(outcome.weights.back(), torch_reference().weights.back());
  EXPECT_EQ(outcome.state, torch_reference().state);
}

TEST(MemoryUpdater, AGroupThatIsSkippedIsRefused) {
  MemoryPlace place;
  auto updater = place.open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  engine::initialize(**updater);
  const auto gradient = engine::contract_gradient((*updater)->space().count(), 1);
  engine::expect_ok((*updater)->begin_step());
  engine::expect_ok(
      (*updater)->put_gradient(0, gradient.data(), base::DataType::kBf16, gradient.size()));
  engine::expect_ok((*updater)->finish_gradients(1).status());
  engine::UpdateOptions options;
  options.groups = {{}, {.skip = true}};
  EXPECT_EQ((*updater)->start_update(options, base::DataType::kBf16, nullptr).code(),
            base::ErrorCode::kUnsupported);
  engine::expect_ok((*updater)->abort());
}

}  // namespace
}  // namespace smartinf::train

namespace smartinf::engine {

INSTANTIATE_TEST_SUITE_P(Torch, UpdaterContract, ::testing::Values(train::memory_kind()),
                         [](const auto& kind) { return kind.param.name; });

}  // namespace smartinf::engine
