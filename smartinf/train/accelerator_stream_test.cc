// Training on an accelerator has the bits of the CPU's run, wherever weights and activations stay:
// on the test accelerator (tests/accelerator), whose copies come late and which finds streams that
// nothing orders.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/base/units.h"
#include "smartinf/train/parameters.h"
#include "smartinf/train/torch_trainer.h"

#include "tests/accelerator/accelerator.h"

namespace smartinf::train {
namespace {

using test_accelerator::smartinf_test_accelerator_memory;
using test_accelerator::smartinf_test_accelerator_order_errors;
using test_accelerator::smartinf_test_accelerator_reset_peak;
using test_accelerator::smartinf_test_accelerator_set_options;
using testing::AllOf;
using testing::HasSubstr;

constexpr uint64_t kSteps = 8;
constexpr uint32_t kLayers = 6;
constexpr uint32_t kUnits = kLayers + 2;
const torch::Device kDevice(torch::kPrivateUse1, 0);

struct Setting {
  const char* name;
  plan::UnitPlacement placement;
  Overlap overlap = Overlap::kLate;
  bool tied = true;
  uint32_t accumulation = 1;
  bool recompute = false;  // where all units stay
  bool spools = false;

  friend void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }
};

constexpr plan::UnitPlacement kAllThere{kUnits, kUnits, 0, 0};
constexpr plan::UnitPlacement kInHost{1, kUnits, 0, 2};
constexpr plan::UnitPlacement kAllInHost{0, kUnits, 0, 2};
constexpr plan::UnitPlacement kFromDevices{1, 3, 3, 2};
constexpr plan::UnitPlacement kAllFromDevices{0, 0, 3, 2};

const Setting kSettings[] = {
    {"stays_none", kAllThere, Overlap::kNone, true, 3},
    {"stays_late_untied", kAllThere, Overlap::kLate, false, 1, true},
    {"stays_early", kAllThere, Overlap::kEarly, true, 1},
    {"stays_auto_recomputed", kAllThere, Overlap::kAuto, true, 3, true},
    {"stays_auto_kept", kAllThere, Overlap::kAuto, false, 1},
    {"host_none_untied", kInHost, Overlap::kNone, false, 1},
    {"host_late", kAllInHost, Overlap::kLate, true, 3},
    {"host_late_untied", kInHost, Overlap::kLate, false, 3},
    {"host_early", kInHost, Overlap::kEarly, true, 1},
    {"host_early_untied", kAllInHost, Overlap::kEarly, false, 3},
    {"host_late_spools", kInHost, Overlap::kLate, true, 3, false, true},
    {"devices_none", kFromDevices, Overlap::kNone, true, 1},
    {"devices_none_untied", kAllFromDevices, Overlap::kNone, false, 3},
    {"devices_late", kAllFromDevices, Overlap::kLate, true, 1},
    {"devices_late_untied", kFromDevices, Overlap::kLate, false, 3},
    {"devices_early", kAllFromDevices, Overlap::kEarly, true, 3},
    {"devices_early_untied", kFromDevices, Overlap::kEarly, false, 1},
    {"devices_auto", kFromDevices, Overlap::kAuto, true, 1},
    {"devices_late_spools", kFromDevices, Overlap::kLate, false, 3, false, true},
    {"devices_early_spools", kAllFromDevices, Overlap::kEarly, true, 1, false, true},
};

struct Outcome {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<float> state;  // all planes, subgroup by subgroup
  double validation = 0;
  uint64_t peak_bytes = 0;  // of the accelerator
};

class AcceleratorStream : public testing::Test {
 protected:
  void SetUp() override {
    std::ofstream corpus(folder_ / "corpus.txt");
    for (int i = 0; i < 60000; ++i) corpus << (i * i % 7 == 1 ? "value " : "index = ") << i % 13;
  }
  void TearDown() override { use({}); }

  static void use(const test_accelerator::Options& options) {
    smartinf_test_accelerator_set_options(&options);
  }

  Job job(const std::string& run) const {
    Job job;
    Options& options = job.options;
    options.model.layers = kLayers;
    options.model.width = 96;
    options.model.kv_heads = 2;
    options.model.mlp_width = 256;
    options.data.paths = {(folder_ / "corpus.txt").string()};
    options.data.sequence = 16;
    TrainOptions& train = options.train;
    train.run = (folder_ / run).string();
    train.steps = kSteps;
    train.micro_batch = 2;
    train.lr = 3e-3;
    train.threads = 1;
    train.accelerator = "auto";
    train.validation_batches = 2;
    train.sample_tokens = 0;
    engine::UpdaterOptions& updater = job.updater;
    updater.memory_budget_bytes = uint64_t{48} << 20;
    updater.subgroup_elements = 65536;
    updater.io_bytes = uint64_t{1} << 20;
    updater.io_depth = 4;
    engine::DeviceOptions device;
    device.path = (folder_ / (run + "-device")).string();
    updater.devices.push_back(device);
    job.recipe = "# of a test\n";
    return job;
  }

  Job job(const std::string& run, const Setting& setting) const {
    Job made = job(run);
    made.options.model.tied_head = setting.tied;
    made.options.train.overlap = setting.overlap;
    made.options.train.accumulation = setting.accumulation;
    return made;
  }

  static plan::TrainingPlan plan_of(const Setting& setting, const Options& options) {
    plan::TrainingPlan plan;
    plan.placement = setting.placement;
    plan.streams = setting.placement.on_accelerator < kUnits;
    plan.recompute = plan.streams || setting.recompute;
    plan.gradient_memory_bytes = uint64_t{1} << 20;
    plan.input_bytes = 2 * options.train.micro_batch * options.data.sequence * options.model.width;
    const uint64_t inputs = (kUnits - 1) * options.train.accumulation;
    plan.inputs_in_memory = inputs;
    if (!setting.spools) return plan;
    plan.inputs_in_memory = UnitInputs::buffers_min(options.train.accumulation);
    plan.inputs_spooled = inputs - plan.inputs_in_memory;
    plan.spool_bytes = 2 * inputs * base::round_up(plan.input_bytes, uint64_t{base::kIoAlignment});
    return plan;
  }

  /// Trainer::open() with a plan of ours.
  static base::Result<std::unique_ptr<TorchTrainer>> open(const Job& job, const Setting& setting) {
    Options options = job.options;
    options.model = with_defaults(options.model);
    SI_ASSIGN_OR_RETURN(Corpus corpus, Corpus::open(options.data));
    options.model.vocabulary = corpus.vocabulary();
    SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space, make_parameter_space(options.model));
    SI_ASSIGN_OR_RETURN(GroupedParameters parameters, group_parameters(space, options.train));
    SI_ASSIGN_OR_RETURN(const RunStart start,
                        choose_run(options.train.run, {job.updater.devices[0].path}, {}));
    SI_ASSIGN_OR_RETURN(RunFolder folder, RunFolder::open(options.train.run));
    plan::TrainingPlan plan = plan_of(setting, options);
    auto trainer =
        std::make_unique<TorchTrainer>(std::move(options), std::move(corpus), std::move(folder),
                                       std::move(parameters), kDevice, std::move(plan));
    SI_RETURN_IF_ERROR(trainer->start(job, start));
    return trainer;
  }

  static void run(Trainer& trainer, Outcome& outcome) {
    smartinf_test_accelerator_reset_peak();
    for (uint64_t i = 0; i < kSteps; ++i) {
      const auto report = trainer.train_step({});
      ASSERT_TRUE(report.ok()) << "step " << i + 1 << ": " << report.status().to_string();
      outcome.losses.push_back(report->loss);
      outcome.norms.push_back(report->gradient_norm);
    }
    outcome.peak_bytes = smartinf_test_accelerator_memory().peak_bytes;
    const auto validation = trainer.validation_loss();
    ASSERT_TRUE(validation.ok()) << validation.status().to_string();
    outcome.validation = *validation;
    const base::Status finished = trainer.finish();
    ASSERT_TRUE(finished.ok()) << finished.to_string();
  }

  static void read_state(const Job& job, const Options& options, Outcome& outcome) {
    const auto space = make_parameter_space(options.model);
    const auto grouped = group_parameters(*space, options.train);
    auto updater = engine::Updater::open(job.updater, grouped->space);
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    const base::Status read =
        (*updater)->read_state(~0u, [&](uint64_t, std::span<const std::span<const float>> planes) {
          for (const auto& plane : planes) {
            outcome.state.insert(outcome.state.end(), plane.begin(), plane.end());
          }
          return base::Status();
        });
    ASSERT_TRUE(read.ok()) << read.to_string();
  }

  template <typename Opened>
  static Outcome train(const Job& job, Opened opened) {
    Outcome outcome;
    EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    if (!opened.ok()) return outcome;
    run(**opened, outcome);
    const Options options = (*opened)->options();
    opened->reset();
    if (!testing::Test::HasFatalFailure()) read_state(job, options, outcome);
    return outcome;
  }

  /// All in the host's memory.
  Outcome train_on_cpu(const std::string& run, const Setting& setting) const {
    Job made = job(run, setting);
    made.options.train.accelerator = "cpu";
    made.options.train.overlap = Overlap::kNone;
    return train(made, Trainer::open(made));
  }

  static void expect_same_bits(const Outcome& outcome, const Outcome& expected) {
    ASSERT_FALSE(expected.state.empty());
    EXPECT_EQ(outcome.losses, expected.losses);
    EXPECT_EQ(outcome.norms, expected.norms);
    EXPECT_EQ(outcome.validation, expected.validation);
    ASSERT_EQ(outcome.state.size(), expected.state.size());
    EXPECT_EQ(std::memcmp(outcome.state.data(), expected.state.data(),
                          expected.state.size() * sizeof(float)),
              0);
  }

  const base::Scratch scratch_;
  const std::filesystem::path folder_ = scratch_.path();
};

class AcceleratorStreamBits : public AcceleratorStream,
                              public testing::WithParamInterface<Setting> {};

TEST_P(AcceleratorStreamBits, AreThoseOfTheCpu) {
  const Setting& setting = GetParam();
  const Outcome expected = train_on_cpu("cpu", setting);
  use({.delay_us = 300});
  const Job made = job("accelerator", setting);
  expect_same_bits(train(made, open(made, setting)), expected);
  EXPECT_EQ(smartinf_test_accelerator_order_errors(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Settings, AcceleratorStreamBits, testing::ValuesIn(kSettings),
                         [](const auto& setting) { return std::string(setting.param.name); });

}  // namespace
}  // namespace smartinf::train
