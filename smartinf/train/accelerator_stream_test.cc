// Training on an accelerator has the bits of the CPU's run, wherever weights and activations stay:
// on the test accelerator (tests/accelerator), whose copies come late and which finds streams that
// nothing orders.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/test_all.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/memory.h"
#include "smartinf/engine/ranks/test_collectives.h"
#include "smartinf/train/linear.h"
#include "smartinf/train/memory_plan.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/spooled_buffers.h"
#include "smartinf/train/test_runs.h"
#include "smartinf/train/trainer.h"

#include "tests/accelerator/accelerator.h"

namespace smartinf::train {
namespace {

using test_accelerator::smartinf_test_accelerator_memory;
using test_accelerator::smartinf_test_accelerator_order_errors;
using test_accelerator::smartinf_test_accelerator_reset_peak;
using test_accelerator::smartinf_test_accelerator_set_options;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr uint64_t kSteps = 8;
constexpr uint32_t kLayers = 6;
constexpr uint32_t kUnits = kLayers + 2;

struct Setting {
  const char* name;
  plan::UnitPlacement placement;
  Overlap overlap = Overlap::kLate;
  bool tied = true;
  uint32_t accumulation = 1;
  bool recompute = false;  // where all units stay
  bool spools = false;
  bool offloads = false;
  bool unified = false;

  friend void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }
};

constexpr plan::UnitPlacement kAllThere{kUnits, kUnits, 0, 0};
constexpr plan::UnitPlacement kInHost{1, kUnits, 0, 2};
constexpr plan::UnitPlacement kAllInHost{0, kUnits, 0, 3};
constexpr plan::UnitPlacement kFromDevices{1, 3, 3, 3};
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
    {"stays_late_offloads", kAllThere, Overlap::kLate, true, 3, false, false, true},
    {"host_early_offloads", kAllInHost, Overlap::kEarly, true, 3, false, false, true},
    {"devices_late_offloads", kFromDevices, Overlap::kLate, false, 3, false, true, true},
    {"devices_early_spools", kAllFromDevices, Overlap::kEarly, true, 1, false, true},
    {"unified_stays", {0, kUnits, 0, 0}, Overlap::kLate, true, 3, true, false, false, true},
    {"unified_late", {0, 3, 3, 0}, Overlap::kLate, true, 3, false, true, false, true},
    {"unified_early", {0, 0, 3, 0}, Overlap::kEarly, false, 1, false, false, true, true},
};

struct AcceleratorOutcome : Outcome {
  uint64_t spooled_bytes = 0;
  uint64_t peak_bytes = 0;
};

class AcceleratorStream : public testing::Test {
 protected:
  void TearDown() override { use({}); }

  static void use(const test_accelerator::Options& options) {
    smartinf_test_accelerator_set_options(&options);
  }

  Job job(const std::string& run) const {
    Job made = runs_.job(run, kSteps, kLayers, /*devices=*/1);
    made.options.train.micro_batch = 2;
    made.options.train.accelerator = "auto";
    made.options.train.precision = comparable_precision();
    made.options.train.validation_batches = 2;
    made.options.train.sample_tokens = 4;
    return made;
  }

  Job job(const std::string& run, const Setting& setting) const {
    Job made = job(run);
    made.options.model.tied_head = setting.tied;
    made.options.train.overlap = setting.overlap;
    made.options.train.accumulation = setting.accumulation;
    if (setting.offloads) made.options.data.sequence = 128;  // small tensors stay
    return made;
  }

  static plan::TrainingModel model_of(const Options& options) {
    ModelOptions model = options.model;
    model.vocabulary = 256;
    return training_model(architecture_of(model, options.data.sequence), options, {});
  }

  /// bf16, unless linear() has products of its own for it on this CPU, as on no accelerator. Here
  /// the exact ones are 0, so that what comes is what was rounded on the way.
  static Precision comparable_precision() {
    const auto x_TK = torch::arange(4096).sin().view({8, 512}).to(torch::kBFloat16);
    const auto weight_NK = torch::arange(32768).cos().view({64, 512}).to(torch::kBFloat16);
    const auto x_TL = torch::cat({x_TK, x_TK}, 1);
    const auto weight_NL = torch::cat({weight_NK, -weight_NK}, 1);
    const bool same = torch::equal(train::linear(x_TL, weight_NL), torch::linear(x_TL, weight_NL));
    return same ? Precision::kBf16 : Precision::kF32;
  }

  static plan::TrainingPlan hand_made_plan(const Setting& setting, const Options& options) {
    const uint32_t value_bytes = options.train.precision == Precision::kBf16 ? 2 : 4;
    plan::TrainingPlan plan;
    plan.units = kUnits;
    plan.placement = setting.placement;
    plan.streams = setting.placement.on_accelerator < kUnits;
    plan.gradients_wait = !plan.streams;
    plan.recompute = plan.streams || setting.recompute;
    plan.gradient_memory_bytes = uint64_t{1} << 20;
    plan.input_bytes = uint64_t{value_bytes} * options.train.micro_batch * options.data.sequence *
                       options.model.width;
    const uint64_t inputs = (kUnits - 1) * options.train.accumulation;
    plan.inputs_in_memory = inputs;
    if (setting.offloads) {
      plan.streams = plan.recompute = true;
      plan.saved_in_memory = SpooledBuffers::kOnTheirWay + 1;
      plan.saved_bytes =
          plan::layer_saved_bytes(model_of(options), plan::TrainingProgram::kTrain, value_bytes);
      const uint64_t saved = uint64_t{kLayers} * options.train.accumulation + 8;
      plan.spool_bytes = saved * base::round_up(plan.saved_bytes, uint64_t{base::kIoAlignment});
    }
    if (!setting.spools) return plan;
    plan.inputs_in_memory = options.train.accumulation + SpooledBuffers::kOnTheirWay;
    plan.inputs_spooled = inputs - plan.inputs_in_memory;
    plan.spool_bytes += 2 * inputs * base::round_up(plan.input_bytes, uint64_t{base::kIoAlignment});
    return plan;
  }

  static void run(Trainer& trainer, AcceleratorOutcome& outcome) {
    smartinf_test_accelerator_reset_peak();
    for (uint64_t i = 0; i < trainer.options().train.steps; ++i) {
      const auto report = trainer.train_step({});
      ASSERT_TRUE(report.ok()) << "step " << i + 1 << ": " << report.status().to_string();
      outcome.losses.push_back(report->loss);
      outcome.norms.push_back(report->gradient_norm);
      outcome.spooled_bytes += report->traffic.host_link.down(base::TrafficKind::kActivation);
    }
    outcome.peak_bytes = smartinf_test_accelerator_memory().peak_bytes;
    const auto validation = trainer.validate();
    ASSERT_TRUE(validation.ok()) << validation.status().to_string();
    outcome.validations.push_back(validation->loss.value());
    const std::vector<std::vector<int64_t>> prompts{{'i', 'n'}, {'='}};
    const auto samples = trainer.sample(prompts, {});
    ASSERT_TRUE(samples.ok()) << samples.status().to_string();
    outcome.samples = *samples;
    const auto finished = trainer.finish();
    ASSERT_TRUE(finished.ok()) << finished.status().to_string();
  }

  template <typename Opened>
  static AcceleratorOutcome train(const Job& job,
                                  Opened opened) {  // its trainer is gone afterwards
    AcceleratorOutcome outcome;
    EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    if (!opened.ok()) return outcome;
    run(**opened, outcome);
    const Options options = (*opened)->options();
    opened->reset();
    if (testing::Test::HasFatalFailure()) return outcome;
    const auto space =
        model::make_parameter_space(architecture_of(options.model, options.data.sequence));
    outcome.state = TestRuns::state_of(job, group_parameters(*space, options.train)->space);
    return outcome;
  }

  /// All in the host's memory.
  AcceleratorOutcome train_on_cpu(const std::string& run, const Setting& setting) const {
    Job made = job(run, setting);
    made.options.train.accelerator = "cpu";
    made.options.train.overlap = Overlap::kNone;
    return train(made, Trainer::open(made));
  }

  static void expect_same_bits(const AcceleratorOutcome& outcome,
                               const AcceleratorOutcome& expected) {
    ASSERT_FALSE(expected.state.empty());
    EXPECT_EQ(outcome.losses, expected.losses);
    EXPECT_EQ(outcome.norms, expected.norms);
    EXPECT_EQ(outcome.validations, expected.validations);
    EXPECT_EQ(outcome.samples, expected.samples);
    EXPECT_TRUE(same_bits(outcome.state, expected.state));
  }

  const TestRuns runs_{60000};  // words
};

class AcceleratorStreamBits : public AcceleratorStream,
                              public testing::WithParamInterface<Setting> {};

TEST_P(AcceleratorStreamBits, AreThoseOfTheCpu) {
  const Setting& setting = GetParam();
  const AcceleratorOutcome expected = train_on_cpu("cpu", setting);
  use({.delay_us = 300});
  Job made = job("accelerator", setting);
  made.plan = hand_made_plan(setting, made.options);
  ::setenv("SMARTINF_UNIFIED_MEMORY", setting.unified ? "yes" : "no", 1);
  const AcceleratorOutcome outcome = train(made, Trainer::open(made));
  ::unsetenv("SMARTINF_UNIFIED_MEMORY");
  expect_same_bits(outcome, expected);
  EXPECT_EQ(outcome.spooled_bytes > 0, setting.spools || setting.offloads);
  EXPECT_EQ(smartinf_test_accelerator_order_errors(), 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Settings, AcceleratorStreamBits, testing::ValuesIn([] {
      std::vector<Setting> all(std::begin(kSettings), std::end(kSettings));
      constexpr std::string_view kAtNight[] = {
          "stays_late_untied",   "stays_auto_kept",      "host_late",
          "host_late_untied",    "host_early",           "host_early_untied",
          "devices_none",        "devices_late",         "devices_early",
          "devices_late_untied", "devices_early_untied", "devices_late_spools"};
      base::leave_for_the_night(all, kAtNight);
      return all;
    }()),
    [](const auto& setting) { return std::string(setting.param.name); });

/// Two ranks as threads of this process, which share the accelerator.
class AcceleratorRanks : public AcceleratorStream, public testing::WithParamInterface<Setting> {
 protected:
  Job job_of(const std::string& run) const {
    Job made = runs_.job(run, kSteps, kLayers, /*devices=*/2);
    const Job one = job(run, GetParam());
    made.options.train = one.options.train;
    made.options.model = one.options.model;
    made.options.train.overlap = Overlap::kAuto;
    made.options.ranks.order = SumOrder::kFixed;
    return made;
  }

  static AcceleratorOutcome train_as_ranks(const Job& job) {
    constexpr uint32_t kRanks = 2;
    engine::Board board(kRanks);
    std::vector<AcceleratorOutcome> outcomes(kRanks);
    {
      std::vector<std::jthread> threads;
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        threads.emplace_back([&, rank] {
          Job mine = job;
          for (uint32_t i = 0; i < kRanks; ++i) mine.updater.devices[i].rank = i;
          mine.ranks =
              Ranks(std::make_shared<engine::BoardRank>(board, rank), {"rank 0", "rank 1"}, 0, 1);
          const auto opened = Trainer::open(mine);
          ASSERT_TRUE(opened.ok()) << opened.status().to_string();
          run(**opened, outcomes[rank]);
        });
      }
    }
    EXPECT_EQ(outcomes[0].losses, outcomes[1].losses);
    const Options& options = job.options;
    ModelOptions model = options.model;
    model.vocabulary = 256;
    const auto space = model::make_parameter_space(architecture_of(model, options.data.sequence));
    outcomes[0].state = TestRuns::state_of(job, group_parameters(*space, options.train)->space);
    return outcomes[0];
  }
};

TEST_P(AcceleratorRanks, HaveTheBitsOfOneProcessOnTheCpu) {
  Job on_cpu = job_of("cpu");
  on_cpu.options.train.accelerator = "cpu";
  const AcceleratorOutcome expected = train(on_cpu, Trainer::open(on_cpu));
  use({.delay_us = 300});
  Job made = job_of("ranks");
  made.plan = hand_made_plan(GetParam(), made.options);
  expect_same_bits(train_as_ranks(made), expected);
  EXPECT_EQ(smartinf_test_accelerator_order_errors(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Settings, AcceleratorRanks,
                         testing::Values(Setting{"stays", kAllThere, Overlap::kAuto, true, 3, true},
                                         Setting{"host", kInHost, Overlap::kAuto, true, 3},
                                         Setting{"devices", kFromDevices, Overlap::kAuto, true, 2},
                                         Setting{"devices_untied", kAllFromDevices, Overlap::kAuto,
                                                 false, 5}),
                         [](const auto& setting) { return std::string(setting.param.name); });

/// The plan that Trainer::open() makes, but for what the process has in memory by then.
base::Result<plan::TrainingPlan> plan_of(const Job& job, uint64_t accelerator_bytes) {
  Options options = job.options;
  const model::Architecture model = architecture_of(options.model, options.data.sequence);
  SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space, model::make_parameter_space(model));
  return plan_run(model, options, job.updater, space,
                  memory_limits(options.memory, {accelerator_bytes, 0}));
}

class AcceleratorMemoryPlan : public AcceleratorStream {
 protected:
  Job larger_job(const std::string& run) const {
    Job made = job(run);
    made.options.model.layers = 8;
    made.options.model.width = 256;
    made.options.model.mlp_width = 768;
    made.options.model.vocabulary = 257;
    made.options.data.sequence = 128;
    made.options.train.micro_batch = 4;
    made.options.train.steps = 3;
    return made;
  }

  /// The least that a run can do with, and some more, so that it need not be exact.
  static uint64_t least_accelerator_bytes(const Job& job) {
    uint64_t bytes = uint64_t{1} << 16;
    while (!plan_of(job, bytes).ok()) bytes += uint64_t{1} << 16;
    return bytes;
  }
};

TEST_F(AcceleratorMemoryPlan, AllStaysWhereThereIsRoom) {
  const auto plan = plan_of(larger_job("run"), uint64_t{1} << 30);
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  EXPECT_FALSE(plan->streams);
  EXPECT_FALSE(plan->recompute);
  EXPECT_EQ(plan->placement.on_accelerator, 10u);
}

TEST_F(AcceleratorMemoryPlan, UnifiedMemoryIsPlannedOnce) {
  const Job job = larger_job("run");
  const model::Architecture model = architecture_of(job.options.model, job.options.data.sequence);
  const auto space = model::make_parameter_space(model);
  MemoryLimits limits = memory_limits(job.options.memory, {});
  const auto on_cpu = plan_run(model, job.options, job.updater, *space, limits);
  constexpr uint64_t kTaken = 1000;
  limits.accelerator = {0, kTaken, true};
  const auto plan = plan_run(model, job.options, job.updater, *space, limits);
  ASSERT_TRUE(plan.ok() && on_cpu.ok());
  EXPECT_TRUE(plan->memory.accelerator.empty());
  EXPECT_GT(plan->memory.host_bytes, on_cpu->memory.host_bytes + kTaken) << "and gradients' copies";
}

TEST_F(AcceleratorMemoryPlan, PeakIsWhatWasPlanned) {
  struct Case {
    const char* name;
    Activations activations;
    uint32_t sequence;
    bool least;
    uint32_t accumulation;
    double share_min;  // of what is planned
  };
  // Gradients that would wait for the commit of the step before have no room there.
  std::vector<Case> cases{{"keep", Activations::kKeep, 128, false, 1, 0.9},
                          {"keep_sums", Activations::kKeep, 128, false, 2, 0.9},
                          {"recompute", Activations::kRecompute, 128, false, 1, 0.9},
                          {"least", Activations::kAuto, 128, true, 1, 0.9},
                          {"least_of_few_tokens", Activations::kAuto, 8, true, 1, 0.9},
                          {"least_sums", Activations::kAuto, 8, true, 3, 0.9}};
  constexpr std::string_view kAtNight[] = {"keep_sums", "least_of_few_tokens"};
  base::leave_for_the_night(cases, kAtNight);
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    Job made = larger_job(c.name);
    made.options.data.sequence = c.sequence;
    made.options.memory.activations = c.activations;
    made.options.train.accumulation = c.accumulation;
    if (c.least) made.options.memory.accelerator_bytes = least_accelerator_bytes(made);
    const auto plan = plan_of(made, uint64_t{1} << 30);
    ASSERT_TRUE(plan.ok()) << plan.status().to_string();
    EXPECT_EQ(plan->streams, c.least);
    const uint64_t before = smartinf_test_accelerator_memory().current_bytes;
    // Gradients that are being copied to the host go a little later; an allocation that lacks their
    // room waits for them.
    const auto planned = static_cast<double>(plan->memory.accelerator_bytes);
    use({.memory_bytes = before + static_cast<uint64_t>(1.1 * planned)});
    const AcceleratorOutcome outcome = train(made, Trainer::open(made));
    use({});
    const double share = static_cast<double>(outcome.peak_bytes - before) / planned;
    EXPECT_LE(share, 1.1);
    EXPECT_GE(share, c.share_min);
    RecordProperty(c.name, std::to_string(share));
  }
}

TEST_F(AcceleratorMemoryPlan, TooLittleIsRefusedBeforeAnythingIsWritten) {
  Job made = larger_job("run");
  made.options.memory.accelerator_bytes = uint64_t{1} << 20;
  const auto opened = Trainer::open(made);
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.status().code(), base::ErrorCode::kOutOfMemory);
  EXPECT_THAT(opened.status().what(), AllOf(HasSubstr("training needs "),
                                            HasSubstr(" of the accelerator's memory at least, "
                                                      "and 1.00 MiB may be used: "),
                                            HasSubstr("slots of units "), Not(HasSubstr("CUDA"))));
  EXPECT_THAT(opened.status().to_string(), HasSubstr("memory.accelerator"));
  EXPECT_FALSE(std::filesystem::exists(made.options.train.run));
  EXPECT_FALSE(std::filesystem::exists(made.updater.devices[0].path));
}

/// 146 million parameters, whose weights alone are 290 MB, on an accelerator of 256 MB. Takes a
/// minute or two and 8 GB in the folder of temporary files: ctest -C Nightly.
class LargerThanTheAccelerator : public AcceleratorStream {
 protected:
  static constexpr uint64_t kAcceleratorBytes = 256'000'000;

  Job large_job(const std::string& run) const {
    Job made = job(run);
    ModelOptions& model = made.options.model;
    model.layers = 12;
    model.width = 896;
    model.heads = 14;
    model.kv_heads = 14;
    model.mlp_width = 2432;
    model.vocabulary = 32000;
    made.options.data.paths = {(runs_.folder() / "tokens.bin").string()};
    made.options.data.sequence = 64;
    made.options.train.steps = 3;
    made.options.train.micro_batch = 1;
    made.options.train.threads = 0;
    made.updater.subgroup_elements = 0;
    made.updater.memory_budget_bytes = uint64_t{256} << 20;
    return made;
  }

  void write_tokens() const {
    constexpr int kTokens = 65536;
    std::vector<int32_t> header(256);
    header[0] = 20240520;  // llm.c's
    header[1] = 1;
    header[2] = kTokens;
    std::ofstream out(runs_.folder() / "tokens.bin", std::ios::binary);
    out.write(reinterpret_cast<const char*>(header.data()), 1024);
    uint32_t draw = 1;
    for (int i = 0; i < kTokens; ++i) {
      draw = draw * 1664525 + 1013904223;
      const auto token = static_cast<uint16_t>((draw >> 16) % 32000);
      out.write(reinterpret_cast<const char*>(&token), sizeof(token));
    }
  }
};

TEST_F(LargerThanTheAccelerator, ALargeModelHasTheBitsOfTheCpu) {
  write_tokens();
  Job on_cpu = large_job("cpu");
  on_cpu.options.train.accelerator = "cpu";
  const AcceleratorOutcome expected = train(on_cpu, Trainer::open(on_cpu));

  use({.memory_bytes = kAcceleratorBytes});
  for (const bool small_host : {false, true}) {
    Job made = large_job(small_host ? "devices" : "host");
    SCOPED_TRACE(made.options.train.run);
    if (small_host) {
      made.options.memory.host_bytes = engine::resident_memory_bytes();
      while (!plan_of(made, kAcceleratorBytes).ok()) {
        made.options.memory.host_bytes += uint64_t{16} << 20;
      }
      made.options.memory.host_bytes += uint64_t{64} << 20;
    }
    const auto plan = plan_of(made, kAcceleratorBytes);
    ASSERT_TRUE(plan.ok()) << plan.status().to_string();
    EXPECT_EQ(plan->placement.in_memory < 14, small_host);
    const uint64_t begin_ns = base::now_ns();
    const AcceleratorOutcome outcome = train(made, Trainer::open(made));
    std::filesystem::remove_all(made.updater.devices[0].path);
    RecordProperty(small_host ? "devices_s" : "host_s",
                   std::to_string(base::seconds_since(begin_ns)));
    RecordProperty(small_host ? "devices_peak_bytes" : "host_peak_bytes",
                   std::to_string(outcome.peak_bytes));
    expect_same_bits(outcome, expected);
    EXPECT_GE(static_cast<double>(outcome.peak_bytes),
              0.9 * static_cast<double>(plan->memory.accelerator_bytes));
    EXPECT_EQ(smartinf_test_accelerator_order_errors(), 0u);
  }
}

}  // namespace
}  // namespace smartinf::train
