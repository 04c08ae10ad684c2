// A hidden update changes time and never a bit: runs of 40 steps, at night of 100, with every
// overlap beside the same run with none. Guesses are right, wrong and both by the limit of the
// norm; in some runs a gradient becomes NaN in the middle of backward.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_all.h"
#include "smartinf/train/test_runs.h"

namespace smartinf::train {
namespace {

const uint64_t kOverlapSteps = base::test_all() ? 100 : 40;

/// How many steps the limit of the norm bites in.
enum class Clip { kNone, kHalf, kAll };

struct OverlapSetting {
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

  friend void PrintTo(const OverlapSetting& setting, std::ostream* out) { *out << setting.name; }
};

// Every value beside every other one of its neighbours at least once.
const OverlapSetting kOverlapSettings[] = {
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

class OverlapBits : public testing::TestWithParam<OverlapSetting> {
 protected:
  Job job(const OverlapSetting& setting, const std::string& run, Overlap overlap, double clip_norm,
          uint32_t devices) const {
    Job job = runs_.job(run, kOverlapSteps, setting.layers, devices);
    TrainOptions& train = job.options.train;
    train.overlap = overlap;
    train.precision = setting.precision;
    train.accumulation = setting.accumulation;
    train.clip_norm = clip_norm;
    job.options.memory.activations =
        setting.recompute ? Activations::kRecompute : Activations::kKeep;
    job.updater.format = setting.format;
    if (setting.spill) job.updater.gradient_budget_bytes = 0;
    return job;
  }

  /// nan_call: the matrix product that is poisoned in every 20th step; 0: none.
  Outcome train(const Job& job, uint64_t nan_call) { return runs_.train(job, {nan_call, 20}); }

  const TestRuns runs_;
};

TEST_P(OverlapBits, AreThoseOfARunThatHidesNothing) {
  const OverlapSetting& setting = GetParam();
  Outcome free = train(job(setting, "free", Overlap::kNone, 0, 1), 0);
  ASSERT_EQ(free.norms.size(), kOverlapSteps);
  // In the last micro batch's backward, after gradients of the last layers have gone down: a layer
  // has four products in forward and eight in backward, the head one and two.
  const uint64_t nan_call = setting.nan ? free.products - 4 * setting.layers + 1 : 0;
  std::sort(free.norms.begin(), free.norms.end());
  const double clip_norm = setting.clip == Clip::kNone   ? 0
                           : setting.clip == Clip::kHalf ? free.norms[kOverlapSteps / 2]
                                                         : 0.5 * free.norms.front();
  const Outcome none = train(job(setting, "none", Overlap::kNone, clip_norm, 1), nan_call);
  ASSERT_FALSE(none.state.empty());
  const uint64_t skipped =
      std::ranges::count_if(none.skipped, [](auto& why) { return !why.empty(); });
  ASSERT_EQ(skipped, setting.nan ? kOverlapSteps / 20 : 0u);
  const uint64_t bites = clip_norm == 0 ? 0 : std::ranges::count_if(none.norms, [&](double n) {
    return engine::clip_factor(n, clip_norm) != 1;
  });

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
    EXPECT_EQ(hidden.wrong_guesses, bites);
  }
  switch (setting.clip) {
    case Clip::kNone:
      EXPECT_EQ(bites, 0u);
      break;
    case Clip::kHalf:
      EXPECT_GT(bites, kOverlapSteps / 10);
      EXPECT_LT(bites, none.norms.size() - kOverlapSteps / 10);
      break;
    case Clip::kAll:
      EXPECT_GT(bites, none.norms.size() * 9 / 10);
      break;
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, OverlapBits, testing::ValuesIn([] {
                           std::vector<OverlapSetting> all(std::begin(kOverlapSettings),
                                                           std::end(kOverlapSettings));
                           constexpr std::string_view kAtNight[] = {"bf16_spilled_all_clipped"};
                           base::leave_for_the_night(all, kAtNight);
                           return all;
                         }()),
                         [](const auto& setting) { return std::string(setting.param.name); });

}  // namespace
}  // namespace smartinf::train
