// A hidden update changes time and never a bit: runs of 100 steps with every overlap beside the
// same run with none. Guesses are right, wrong and both by the limit of the norm; in some runs a
// gradient becomes NaN in the middle of backward.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <unistd.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/engine/updater.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/parameters.h"
#include "smartinf/train/trainer.h"

namespace smartinf::train {
namespace {

constexpr uint64_t kSteps = 100;

/// How many steps the limit of the norm bites in.
enum class Clip { kNone, kHalf, kAll };

struct Setting {
  const char* name;
  base::StateFormat format = base::StateFormat::kF32;
  Precision precision = Precision::kBf16;
  Clip clip = Clip::kHalf;
  uint32_t accumulation = 1;
  bool recompute = false;
  bool spill = false;
  bool nan = false;
  uint32_t devices = 3;  // of the runs that hide; the others have one
  uint32_t layers = 2;

  friend void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }
};

// Every value beside every other one of its neighbours at least once.
const Setting kSettings[] = {
    {.name = "f32_state"},
    {.name = "bf16_state",
     .format = base::StateFormat::kBf16,
     .accumulation = 2,
     .recompute = true,
     .nan = true},
    {.name = "q8_state", .format = base::StateFormat::kQ8, .nan = true},
    {.name = "q8_all_clipped",
     .format = base::StateFormat::kQ8,
     .clip = Clip::kAll,
     .accumulation = 2,
     .devices = 1},
    {.name = "f32_weights_never_clipped",
     .precision = Precision::kF32,
     .clip = Clip::kNone,
     .recompute = true,
     .nan = true,
     .devices = 1},
    // An early update beside gradients that are spilled takes eight subgroups.
    {.name = "spilled", .accumulation = 2, .spill = true, .nan = true, .devices = 1, .layers = 6},
    {.name = "bf16_spilled_all_clipped",
     .format = base::StateFormat::kBf16,
     .clip = Clip::kAll,
     .recompute = true,
     .spill = true,
     .devices = 1,
     .layers = 6},
};

/// Counts matrix products; the result of one of them, by count, becomes NaN.
class Poison {
 public:
  Poison() {
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(nullptr, &Poison::after)
            .needsOutputs(true)
            .scopes({at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::FUNCTION}));
  }
  ~Poison() { at::removeCallback(handle_); }
  Poison(const Poison&) = delete;
  Poison& operator=(const Poison&) = delete;

  /// The call of this number from now on; 0: none. Returns how many there were since the last time.
  static uint64_t next(uint64_t call) {
    poisoned_ = call;
    return std::exchange(calls_, 0);
  }

 private:
  static void after(const at::RecordFunction& function, at::ObserverContext*) {
    if (std::strcmp(function.name(), "aten::mm") != 0) return;
    if (++calls_ != poisoned_) return;
    for (const c10::IValue& output : function.outputs()) {
      output.toTensor().fill_(std::numeric_limits<double>::quiet_NaN());
    }
  }

  static inline uint64_t calls_ = 0;
  static inline uint64_t poisoned_ = 0;
  at::CallbackHandle handle_;
};

struct Outcome {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<std::string> skipped;
  std::multiset<std::string> overlaps;
  uint64_t wrong_guesses = 0;
  std::vector<float> state;  // all planes, subgroup by subgroup
  uint64_t products = 0;     // of matrices, in a step
};

class OverlapBits : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    std::ofstream corpus(folder_ / "corpus.txt");
    for (int i = 0; i < 6000; ++i) corpus << (i * i % 7 == 1 ? "value " : "index = ") << i % 13;
  }

  Job job(const Setting& setting, const std::string& run, Overlap overlap, double clip_norm,
          uint32_t devices) const {
    Job job;
    Options& options = job.options;
    options.model.layers = setting.layers;
    options.model.width = 96;
    options.model.kv_heads = 2;
    options.model.mlp_width = 256;
    options.data.paths = {(folder_ / "corpus.txt").string()};
    options.data.sequence = 16;
    TrainOptions& train = options.train;
    train.run = (folder_ / run).string();
    train.overlap = overlap;
    train.precision = setting.precision;
    train.steps = kSteps;
    train.micro_batch = 1;
    train.accumulation = setting.accumulation;
    options.memory.activations = setting.recompute ? Activations::kRecompute : Activations::kKeep;
    train.lr = 3e-3;
    train.clip_norm = clip_norm;
    train.threads = 1;
    train.accelerator = "cpu";
    train.validate_every = 0;
    train.sample_tokens = 0;
    engine::UpdaterOptions& updater = job.updater;
    updater.format = setting.format;
    updater.memory_budget_bytes = uint64_t{48} << 20;
    updater.subgroup_elements = 65536;
    updater.io_bytes = uint64_t{1} << 20;
    updater.io_depth = 4;
    if (setting.spill) updater.gradient_budget_bytes = 0;
    for (uint32_t i = 0; i < devices; ++i) {
      engine::DeviceOptions device;
      device.path = (folder_ / (run + "-device" + std::to_string(i))).string();
      device.bandwidth = 1;
      updater.devices.push_back(device);
    }
    job.recipe = "# of a test\n";
    return job;
  }

  /// nan_call: the matrix product that is poisoned in every 20th step; 0: none.
  Outcome train(const Job& job, uint64_t nan_call) {
    Outcome outcome;
    plan::ParameterSpace space;
    {
      auto trainer = Trainer::open(job);
      EXPECT_TRUE(trainer.ok()) << trainer.status().to_string();
      if (!trainer.ok()) return outcome;
      Poison poison;
      for (uint64_t i = 1; i <= kSteps && (*trainer)->step() < kSteps; ++i) {
        Poison::next(i % 20 == 10 ? nan_call : 0);
        const auto report = (*trainer)->train_step({});
        EXPECT_TRUE(report.ok()) << report.status().to_string();
        if (!report.ok()) return outcome;
        outcome.losses.push_back(report->loss);
        outcome.skipped.push_back(report->skipped);
        if (!report->skipped.empty()) continue;
        outcome.norms.push_back(report->gradient_norm);
        outcome.overlaps.emplace(report->overlap);
        outcome.wrong_guesses += report->wrong_guess ? 1 : 0;
      }
      outcome.products = Poison::next(0);
      EXPECT_TRUE((*trainer)->finish().ok());
      const Options& options = (*trainer)->options();
      space = group_parameters(make_parameter_space(options.model).value(), options.train)
                  .value()
                  .space;
    }
    auto updater = engine::Updater::open(job.updater, space);
    EXPECT_TRUE(updater.ok()) << updater.status().to_string();
    if (!updater.ok()) return outcome;
    const base::Status read =
        (*updater)->read_state(~0u, [&](uint64_t, std::span<const std::span<const float>> planes) {
          for (const auto& plane : planes) {
            outcome.state.insert(outcome.state.end(), plane.begin(), plane.end());
          }
          return base::Status();
        });
    EXPECT_TRUE(read.ok()) << read.to_string();
    return outcome;
  }

  const base::Scratch scratch_;
  const std::filesystem::path folder_ = scratch_.path();
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_P(OverlapBits, AreThoseOfARunThatHidesNothing) {
  const Setting& setting = GetParam();
  Outcome free = train(job(setting, "free", Overlap::kNone, 0, 1), 0);
  ASSERT_EQ(free.norms.size(), kSteps);
  // In the last micro batch's backward, after gradients of the last layers have gone down: a layer
  // has four products in forward and eight in backward, the head one and two.
  const uint64_t nan_call = setting.nan ? free.products - 4 * setting.layers + 1 : 0;
  std::sort(free.norms.begin(), free.norms.end());
  const double clip_norm = setting.clip == Clip::kNone   ? 0
                           : setting.clip == Clip::kHalf ? free.norms[kSteps / 2]
                                                         : 0.5 * free.norms.front();
  const Outcome none = train(job(setting, "none", Overlap::kNone, clip_norm, 1), nan_call);
  ASSERT_FALSE(none.state.empty());
  const auto skipped = std::ranges::count_if(none.skipped, [](auto& why) { return !why.empty(); });
  ASSERT_EQ(skipped, setting.nan ? 5 : 0);
  const auto bites =
      clip_norm == 0 ? 0
                     : std::ranges::count_if(none.norms, [&](double n) { return n > clip_norm; });

  for (const Overlap overlap : {Overlap::kLate, Overlap::kEarly, Overlap::kAuto}) {
    const std::string run = std::string("run") + std::to_string(static_cast<int>(overlap));
    SCOPED_TRACE(run);
    const Outcome hidden = train(job(setting, run, overlap, clip_norm, setting.devices), nan_call);
    EXPECT_EQ(hidden.losses, none.losses);
    EXPECT_EQ(hidden.norms, none.norms);
    EXPECT_EQ(hidden.skipped, none.skipped);
    EXPECT_TRUE(same_bits(hidden.state, none.state));
    if (overlap != Overlap::kEarly) continue;
    EXPECT_EQ(hidden.overlaps.count("early"), hidden.norms.size());
    EXPECT_EQ(hidden.wrong_guesses, static_cast<uint64_t>(bites));
  }
  switch (setting.clip) {
    case Clip::kNone:
      EXPECT_EQ(bites, 0);
      break;
    case Clip::kHalf:
      EXPECT_GT(bites, 10);
      EXPECT_LT(bites, static_cast<ptrdiff_t>(none.norms.size()) - 10);
      break;
    case Clip::kAll:
      EXPECT_GT(bites, static_cast<ptrdiff_t>(none.norms.size()) * 9 / 10);
      break;
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, OverlapBits, testing::ValuesIn(kSettings),
                         [](const auto& setting) { return std::string(setting.param.name); });

}  // namespace
}  // namespace smartinf::train
