// Runs whose units, gradients and inputs come from the devices, beside the same run that keeps
// everything: what does not stay in memory changes time and never a bit.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/test_all.h"
#include "smartinf/base/units.h"
#include "smartinf/train/memory_plan.h"
#include "smartinf/train/offload_choice.h"
#include "smartinf/train/test_runs.h"

namespace smartinf::train {
namespace {

using base::TrafficKind;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kSteps = 12;
constexpr uint32_t kLayers = 6;

struct Setting {
  const char* name;
  base::StateFormat format = base::StateFormat::kF32;
  Precision precision = Precision::kBf16;
  uint32_t accumulation = 1;
  uint32_t devices = 1;
  uint32_t sequence = 16;
  uint32_t in_memory = 0;  // units, of eight
  uint32_t slots = 3;
  bool tied = true;
  bool spill = false;
  bool spool_inputs = false;
  bool spool_saved = false;  // tensors of autograd
  bool measured = false;     // how many of them: half have a buffer
  bool nan = false;
  bool evaluate = false;
  bool documents = false;  // packed, with a mask, instead of a stream of text
  storage::Durability durability = storage::Durability::kStep;

  friend void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }
};

const Setting kSettings[] = {
    {.name = "all_from_one_device"},
    {.name = "some_from_three_devices",
     .format = base::StateFormat::kBf16,
     .accumulation = 3,
     .devices = 3,
     .in_memory = 3,
     .nan = true},
    {.name = "q8_state_untied",
     .format = base::StateFormat::kQ8,
     .accumulation = 4,
     .in_memory = 1,
     .tied = false,
     .nan = true,
     .evaluate = true},
    {.name = "inputs_spooled",
     .accumulation = 3,
     .in_memory = 2,
     .spill = true,
     .spool_inputs = true,
     .nan = true},
    {.name = "all_spooled_to_three_devices",
     .precision = Precision::kF32,
     .accumulation = 4,
     .devices = 3,
     .sequence = 96,
     .tied = false,
     .spool_inputs = true,
     .spool_saved = true,
     .evaluate = true},
    {.name = "saved_tensors_spooled",
     .format = base::StateFormat::kBf16,
     .accumulation = 3,
     .sequence = 128,
     .in_memory = 8,
     .spill = true,
     .spool_saved = true,
     .nan = true},
    {.name = "as_many_as_is_measured",
     .accumulation = 3,
     .devices = 3,
     .sequence = 128,
     .in_memory = 2,
     .spool_saved = true,
     .measured = true},
    // An entry of the spool lies on one device whole, and fills none of them to the end.
    {.name = "spooled_to_eight_devices",
     .accumulation = 3,
     .devices = 8,
     .sequence = 128,
     .spool_inputs = true},
    {.name = "documents", .accumulation = 3, .in_memory = 2, .evaluate = true, .documents = true},
    {.name = "all_but_the_head", .in_memory = 7, .slots = 5, .evaluate = true},
    {.name = "updated_in_place",
     .accumulation = 3,
     .devices = 3,
     .in_memory = 2,
     .spool_inputs = true,
     .nan = true,
     .evaluate = true,
     .durability = storage::Durability::kNone},
};

class StreamedBits : public testing::TestWithParam<Setting> {
 protected:
  Job job(const std::string& run, double clip_norm, uint32_t devices) const {
    const Setting& setting = GetParam();
    Job job = runs_.job(run, kSteps, kLayers, devices);
    job.options.model.tied_head = setting.tied;
    job.options.data.sequence = setting.sequence;
    if (setting.documents) {
      job.options.data.paths = {runs_.write_documents()};
      job.options.model.vocabulary = TestRuns::kDocumentsVocabulary;
    }
    TrainOptions& train = job.options.train;
    train.overlap = Overlap::kNone;
    train.precision = setting.precision;
    train.accumulation = setting.accumulation;
    train.clip_norm = clip_norm;
    train.sample_tokens = 4;
    train.validation_batches = 2;
    job.options.memory.activations = Activations::kKeep;
    job.updater.format = setting.format;
    return job;
  }

  /// The plan that plan_run() would find with less memory than everything takes.
  plan::TrainingPlan less_memory() const {
    const Setting& setting = GetParam();
    const Job made = job("none", 0, 1);
    plan::TrainingPlan plan;
    plan.units = kLayers + 2;
    plan.placement = {setting.in_memory, setting.in_memory, setting.slots, 0};
    plan.recompute = plan.streams = true;
    plan.gradient_memory_bytes = setting.spill ? 0 : ~uint64_t{0};
    plan.input_bytes = base::data_type_bytes(precision_data_type(setting.precision)) *
                       made.options.data.sequence * made.options.model.width;
    plan.inputs_in_memory = uint64_t{kLayers + 1} * setting.accumulation;
    if (setting.spool_inputs) {
      const uint64_t least = setting.accumulation + 4;
      plan.inputs_spooled = plan.inputs_in_memory - least;
      plan.inputs_in_memory = least;
      plan.spool_bytes = (plan.inputs_spooled + 8) * whole(plan.input_bytes);
    }
    if (setting.spool_saved) {
      plan.saved_in_memory = 4;
      plan.saved_bytes = plan::layer_saved_bytes(
          training_model(with_vocabulary(made.options), made.options, {}),
          plan::TrainingProgram::kTrain,
          static_cast<uint32_t>(base::data_type_bytes(precision_data_type(setting.precision))));
      plan.saved_spool_bytes = (saved() + 8) * whole(plan.saved_bytes);
      plan.spool_bytes += plan.saved_spool_bytes;
      plan.measures_offload = setting.measured;
      if (setting.measured) plan.saved_in_memory += saved() / 2;
    }
    return plan;
  }
  static model::Architecture with_vocabulary(Options options) {
    options.model.vocabulary = 256;
    return architecture_of(options.model, options.data.sequence);
  }
  /// Saved entries: layers times micro batches.
  static uint64_t saved() { return uint64_t{kLayers} * GetParam().accumulation; }
  static uint64_t whole(uint64_t bytes) { return base::round_up(bytes, base::kIoAlignment); }

  /// First all is computed again, then at least what has a buffer is offloaded; then one number
  /// stays.
  static void expect_tried(const Outcome& streamed) {
    constexpr size_t kWithout = 1 + OffloadChoice::kSteps;
    const std::vector<uint64_t>& offloaded = streamed.offloaded;
    EXPECT_EQ(std::count(offloaded.begin(), offloaded.begin() + kWithout, 0), kWithout);
    EXPECT_GE(offloaded[kWithout], saved() / 2);
    EXPECT_EQ(streamed.decisions.size(), 1u);
    const size_t tried = 1 + OffloadChoice::kSteps * OffloadChoice::kTrials;
    EXPECT_EQ(std::count(offloaded.begin() + tried, offloaded.end(), offloaded.back()),
              static_cast<ptrdiff_t>(offloaded.size() - tried));
  }

  Outcome train(const Job& job, uint64_t nan_call = 0) const {
    return runs_.train(job, {nan_call, kSteps / 4}, GetParam().evaluate ? 4 : 0);
  }

  const TestRuns runs_;
};

TEST_P(StreamedBits, AreThoseOfARunThatKeepsEverything) {
  const Setting& setting = GetParam();
  Outcome free = train(job("free", 0, 1));
  ASSERT_EQ(free.norms.size(), kSteps);
  EXPECT_THAT(free.described, Not(HasSubstr("come from the devices")));
  std::sort(free.norms.begin(), free.norms.end());
  const double clip_norm = free.norms[kSteps / 2];
  // In backward of the first layer's last batch, when all others have gone down.
  const uint64_t nan_call = setting.nan ? free.products : 0;
  const Outcome kept = train(job("kept", clip_norm, 1), nan_call);
  ASSERT_FALSE(kept.state.empty());
  const auto skipped = std::ranges::count_if(kept.skipped, [](auto& why) { return !why.empty(); });
  EXPECT_EQ(skipped, setting.nan ? 4 : 0);
  const auto bites = std::ranges::count_if(
      kept.norms, [&](double n) { return engine::clip_factor(n, clip_norm) != 1; });
  EXPECT_GT(bites, 1);
  EXPECT_LT(bites, static_cast<ptrdiff_t>(kept.norms.size()));

  for (const Overlap overlap : {Overlap::kNone, Overlap::kLate, Overlap::kEarly, Overlap::kAuto}) {
    if (overlap == Overlap::kEarly && setting.durability == storage::Durability::kNone) continue;
    if (overlap != Overlap::kLate && (setting.devices > 3 || setting.measured)) continue;
    const bool combined = overlap == Overlap::kNone || overlap == Overlap::kAuto;
    if (combined && !base::test_all()) continue;
    const std::string run = "overlap_" + std::string(base::enum_name(overlap));
    SCOPED_TRACE(run);
    Job streamed_job = job(run, clip_norm, setting.devices);
    streamed_job.options.train.overlap = overlap;
    streamed_job.updater.durability = setting.durability;
    streamed_job.plan = less_memory();
    // Unless it has kept them it computes each layer's four products of the forward again.
    const uint64_t again = setting.spool_saved ? 0 : 4 * saved();
    const Outcome streamed = train(streamed_job, setting.nan ? nan_call + again : 0);
    EXPECT_THAT(streamed.described, HasSubstr("come from the devices"));
    EXPECT_EQ(streamed.losses, kept.losses);
    EXPECT_EQ(streamed.norms, kept.norms);
    EXPECT_EQ(streamed.skipped, kept.skipped);
    EXPECT_EQ(streamed.validations, kept.validations);
    EXPECT_EQ(streamed.samples, kept.samples);
    EXPECT_TRUE(same_bits(streamed.state, kept.state));
    if (setting.measured) {
      expect_tried(streamed);
      continue;
    }
    uint64_t spooled = streamed_job.plan->inputs_spooled * whole(streamed_job.plan->input_bytes);
    if (setting.spool_saved) spooled += (saved() - 4) * whole(streamed_job.plan->saved_bytes);
    spooled *= streamed.norms.size();
    EXPECT_GE(streamed.traffic.host_link.down(TrafficKind::kActivation), spooled);
    EXPECT_GE(streamed.traffic.host_link.up(TrafficKind::kActivation), spooled);
    EXPECT_EQ(streamed.traffic.host_link.down(TrafficKind::kActivation) > 0, spooled > 0);
    if (overlap == Overlap::kEarly) {
      EXPECT_EQ(streamed.overlaps.count("early"), streamed.norms.size());
      EXPECT_EQ(streamed.wrong_guesses, static_cast<uint64_t>(bites));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, StreamedBits, testing::ValuesIn([] {
                           std::vector<Setting> all(std::begin(kSettings), std::end(kSettings));
                           constexpr std::string_view kAtNight[] = {
                               "all_from_one_device", "inputs_spooled", "q8_state_untied",
                               "some_from_three_devices"};
                           base::leave_for_the_night(all, kAtNight);
                           return all;
                         }()),
                         [](const auto& setting) { return std::string(setting.param.name); });

}  // namespace
}  // namespace smartinf::train
