// One suite for every kind of updater over real devices: whatever the devices, their number, the
// cut into subgroups, the schedule, the ring, the place of the update or of the gradients, the same
// gradients give the same bits.
#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {
namespace {

class UpdaterContract : public ::testing::TestWithParam<Variant> {
 protected:
  base::Result<std::unique_ptr<Updater>> open() {
    if (!GetParam().in_memory) return Updater::open(options_, contract_space());
    while (drives_.size() < options_.devices.size()) {
      SI_ASSIGN_OR_RETURN(auto drive, csd::EmulatedDrive::create(64 * base::kMiB));
      drives_.push_back(std::move(drive));
    }
    return Updater::open(options_, contract_space(), emulated_sources(options_, drives_));
  }

  Scratch scratch_;
  UpdaterOptions options_ = options_of(GetParam(), scratch_);
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives_;
};

TEST_P(UpdaterContract, SameGradientsGiveTheSameBits) {
  Outcome outcome;
  {
    auto updater = open();
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    initialize(**updater);
    run_steps(**updater, 1, 2, outcome);
    EXPECT_LE((*updater)->memory_bytes(), options_.memory_budget_bytes);
    EXPECT_EQ((*updater)->describe_devices().size(), options_.devices.size());
  }
  // The last step after opening again.
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_FALSE((*updater)->fresh());
  EXPECT_EQ((*updater)->committed_step(), 2u);
  EXPECT_EQ((*updater)->client_metadata(), "after step 2");
  run_steps(**updater, 3, kSteps, outcome);
  EXPECT_EQ(outcome.norms, reference(GetParam().gradient_type).norms);
  EXPECT_EQ(outcome.weights, reference(GetParam().gradient_type).weights);
  EXPECT_EQ(outcome.state, reference(GetParam().gradient_type).state);
}

/// A guess of a step's options changes when it is updated, and nothing else: neither one that is
/// right, nor one that turns out wrong at the end, nor one that is known to be wrong before.
TEST_P(UpdaterContract, EarlyUpdatesGiveTheSameBits) {
  const Outcome& expected = reference(GetParam().gradient_type);
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  if (const base::Status possible = (*updater)->early_update_possible(); !possible.ok()) {
    EXPECT_TRUE(GetParam().durability == storage::Durability::kNone || (*updater)->slots() < 8);
    expect_ok((*updater)->begin_step());
    UpdateOptions guess;
    guess.groups.resize(2);
    EXPECT_EQ((*updater)->start_early_update(guess, DataType::kBf16, nullptr, 0).code(),
              base::ErrorCode::kUnsupported);
    expect_ok((*updater)->abort());
  }
  const auto guesses = [](int step, const UpdateOptions& right) {
    Guess guess{right};
    if (step == 1) return guess;
    guess.options.gradient_scale *= 1.5;
    if (step == 2) guess.options.groups[1].skip = true;
    if (step == 3) guess.norm_max = 0.1;  // the first piece's is more
    return guess;
  };
  const bool possible = (*updater)->early_update_possible().ok();
  Outcome outcome;
  run_steps(**updater, 1, kSteps, outcome, possible ? Guesses(guesses) : nullptr, expected.norms);
  EXPECT_EQ(outcome, expected);
}

/// What was updated early and then has to stay as it was.
TEST_P(UpdaterContract, AnEarlyUpdateIsTakenBack) {
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  if (const base::Status possible = (*updater)->early_update_possible(); !possible.ok()) {
    GTEST_SKIP() << possible.to_string();
  }
  initialize(**updater);
  const plan::ParameterSpace& space = (*updater)->space();
  std::vector<base::Bf16> weights(space.count());
  const WeightsSink sink = [&](uint64_t first) { return weights.data() + first; };
  const auto before = all_planes(**updater);
  UpdateOptions options;
  options.groups.resize(2);
  const auto begin_with_all_gradients = [&] {
    expect_ok((*updater)->begin_step());
    expect_ok((*updater)->start_early_update(options, DataType::kBf16, sink, 0));
    put_gradients(**updater, contract_gradient(space.count(), 7), std::nullopt);
    expect_ok((*updater)->finish_gradients(1).status());
  };
  begin_with_all_gradients();
  expect_ok((*updater)->abort());
  EXPECT_EQ(all_planes(**updater), before);

  // One that gradients are missing for cannot end by itself. Whether it has started is up to the
  // device.
  for (int attempt = 0; attempt < 5; ++attempt) {
    expect_ok((*updater)->begin_step());
    expect_ok((*updater)->start_early_update(options, DataType::kBf16, sink, 0));
    expect_ok((*updater)->abort());
  }
  EXPECT_EQ(all_planes(**updater), before);

  begin_with_all_gradients();
  UpdateOptions nothing = options;
  for (auto& group : nothing.groups) group.skip = true;
  expect_ok((*updater)->start_update(nothing, DataType::kBf16, sink));
  expect_ok((*updater)->wait_weights(0, space.count()));
  expect_ok((*updater)->commit("nothing changed"));
  EXPECT_EQ(all_planes(**updater), before);
  EXPECT_EQ(loaded_weights(**updater), digest(weights));
}

TEST_P(UpdaterContract, AStepAbortedLeavesNoTrace) {
  if (GetParam().durability == storage::Durability::kNone) {
    GTEST_SKIP() << "updates in place cannot be aborted";
  }
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  Outcome outcome;
  run_steps(**updater, 1, 1, outcome);
  const uint64_t count = contract_space().count();
  const auto other = contract_gradient(count, 99);
  for (const bool updated : {false, true}) {
    expect_ok((*updater)->begin_step());
    expect_ok((*updater)->put_gradient(0, other.data(), DataType::kBf16, count));
    if (updated) {
      expect_ok((*updater)->finish_gradients(1).status());
      UpdateOptions update;
      update.groups.resize(2);
      expect_ok((*updater)->start_update(update, DataType::kBf16, nullptr));
    }
    expect_ok((*updater)->abort());
    EXPECT_EQ((*updater)->committed_step(), 1u);
  }
  run_steps(**updater, 2, kSteps, outcome);
  EXPECT_EQ(outcome, reference(GetParam().gradient_type));
}

/// Bytes of a step over the host link and on the drive, exact but for metadata.
TEST_P(UpdaterContract, CountedBytesAreThoseOfTheScheme) {
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  const UpdaterTraffic before = (*updater)->traffic();
  Outcome outcome;
  const uint64_t count = contract_space().count();
  std::vector<base::Bf16> weights(count);
  const auto gradient = contract_gradient(count, 1);
  expect_ok((*updater)->begin_step());
  expect_ok((*updater)->put_gradient(0, gradient.data(), DataType::kBf16, count));
  expect_ok((*updater)->finish_gradients(1).status());
  UpdateOptions update;
  update.groups.resize(2);
  expect_ok((*updater)->start_update(update, DataType::kBf16,
                                     [&](uint64_t first) { return weights.data() + first; }));
  expect_ok((*updater)->commit("one step"));
  const base::TrafficReading host = (*updater)->traffic().host_link.since(before.host_link);
  const base::TrafficReading store = (*updater)->traffic().store.since(before.store);
  const uint64_t gradient_bytes = count * base::data_type_bytes(GetParam().gradient_type);
  const bool spilled = GetParam().gradient_budget_bytes == 0;
  // Planes of a subgroup are padded to pages, so the state is counted with that.
  const uint64_t padding = 3 * 4096 * 2 * (count / kBlock + 1);
  EXPECT_GE(store.up(TrafficKind::kState), 12 * count);
  EXPECT_LE(store.up(TrafficKind::kState), 12 * count + padding);
  if (GetParam().durability == storage::Durability::kStep) {
    EXPECT_EQ(store.down(TrafficKind::kState), store.up(TrafficKind::kState));
  } else {  // what stays in memory is not written
    EXPECT_LE(store.down(TrafficKind::kState), store.up(TrafficKind::kState));
  }
  if (GetParam().where == UpdateWhere::kDevice) {
    EXPECT_EQ(host.down(TrafficKind::kGradient), gradient_bytes);
    EXPECT_EQ(host.up(TrafficKind::kWeight), 2 * count);
    EXPECT_EQ(host.up(TrafficKind::kState), 0u);
    EXPECT_EQ(host.down(TrafficKind::kState), 0u);
  } else {
    EXPECT_EQ(host.up(TrafficKind::kState), store.up(TrafficKind::kState));
    EXPECT_EQ(host.down(TrafficKind::kState), store.down(TrafficKind::kState));
    EXPECT_GE(host.up(TrafficKind::kGradient), spilled ? gradient_bytes : 0);
    EXPECT_LE(host.up(TrafficKind::kGradient), spilled ? gradient_bytes + padding : 0);
    EXPECT_EQ(host.down(TrafficKind::kGradient), host.up(TrafficKind::kGradient));
  }
}

// What has a gradient changes as if everything had one; what has none keeps its bits and, where a
// whole subgroup is left alone, is not even read.
TEST_P(UpdaterContract, SkippedRangesStayAsTheyAre) {
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  const plan::ParameterSpace& space = (*updater)->space();
  const auto gradient = contract_gradient(space.count(), 1);
  std::vector<base::Bf16> weights(space.count());
  const auto step = [&](uint32_t skipped_group) {
    expect_ok((*updater)->begin_step());
    put_gradients(**updater, gradient, skipped_group);
    expect_ok((*updater)->finish_gradients(1).status());
    UpdateOptions update;
    update.groups.resize(2);
    const auto sink = [&](uint64_t first) { return weights.data() + first; };
    EXPECT_EQ((*updater)->start_update(update, DataType::kBf16, sink).code(),
              base::ErrorCode::kInvalidArgument);  // no gradient, and not said to be skipped
    update.groups[skipped_group].skip = true;
    expect_ok((*updater)->start_update(update, DataType::kBf16, sink));
    expect_ok((*updater)->wait_weights(0, space.count()));
    expect_ok((*updater)->commit("skipped"));
  };
  const auto before = all_planes(**updater);
  const uint64_t read_before = (*updater)->traffic().store.up(TrafficKind::kState);
  step(0);  // only norm and bias, 1077 elements, are updated
  const uint64_t read = (*updater)->traffic().store.up(TrafficKind::kState) - read_before;
  if (GetParam().subgroup_elements == kBlock) {
    EXPECT_LE(read, 3 * 12 * kBlock);
  }
  const auto between = all_planes(**updater);
  step(1);
  const auto after = all_planes(**updater);
  for (const plan::ParameterRange& range : space.ranges()) {
    for (uint64_t i = range.first; i < range.first + range.count; ++i) {
      for (size_t p = 0; p < before.size(); ++p) {
        const auto& same = range.group == 0 ? before : after;
        ASSERT_EQ(between[p][i], same[p][i]) << range.name << " element " << i << " plane " << p;
      }
      // The moment tells who was updated; a gradient of exactly 0 is rare enough not to be asked.
      if (base::to_f32(gradient[i]) != 0) {
        ASSERT_NE(after[1][i], 0.0f) << range.name << " element " << i;
      }
    }
  }
}

TEST_P(UpdaterContract, EditedStateIsKept) {
  {
    auto updater = open();
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    initialize(**updater);
    expect_ok((*updater)->edit_state(
        [&](uint64_t first, std::span<const std::span<float>> planes) -> base::Result<bool> {
          if (first == 0) return false;
          for (size_t p = 0; p < planes.size(); ++p) {
            for (size_t i = 0; i < planes[p].size(); ++i) {
              planes[p][i] += static_cast<float>(p + 1) + static_cast<float>(first + i);
            }
          }
          return true;
        },
        "edited"));
    EXPECT_EQ((*updater)->committed_step(), 1u);
  }
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_EQ((*updater)->client_metadata(), "edited");
  const auto planes = all_planes(**updater);
  const uint64_t edited_from = std::min(options_.subgroup_elements, (*updater)->space().count());
  for (uint64_t i = 0; i < (*updater)->space().count(); ++i) {
    const float start = 0.1f * std::sin(static_cast<float>(i));
    for (size_t p = 0; p < planes.size(); ++p) {
      const float old = p == 0 ? start : 0.0f;
      const float wanted =
          i < edited_from ? old : old + (static_cast<float>(p + 1) + static_cast<float>(i));
      ASSERT_EQ(planes[p][i], wanted) << "element " << i << " plane " << p;
    }
  }
  // A failing edit changes nothing.
  if (GetParam().durability == storage::Durability::kNone) return;
  EXPECT_EQ(
      (*updater)
          ->edit_state(
              [&](uint64_t first, std::span<const std::span<float>> pieces) -> base::Result<bool> {
                if (first > 0) return base::Status(base::ErrorCode::kCancelled, "enough");
                pieces[0][0] = 42;
                return true;
              },
              "never")
          .code(),
      edited_from < (*updater)->space().count() ? base::ErrorCode::kCancelled
                                                : base::ErrorCode::kOk);
  if (edited_from < (*updater)->space().count()) {
    EXPECT_EQ((*updater)->client_metadata(), "edited");
    EXPECT_EQ(all_planes(**updater), planes);
  }
}

const Variant kVariants[] = {
    {.name = "OneDevice"},
    {.name = "TwoDevices", .devices = 2},
    {.name = "ThreeDevices", .devices = 3},
    {.name = "SmallestSubgroups", .devices = 2, .subgroup_elements = kBlock},
    {.name = "OneSubgroup", .subgroup_elements = 64 * kBlock, .memory_budget_bytes = base::kGiB},
    {.name = "LeastMemory", .subgroup_elements = kBlock, .memory_budget_bytes = 8 * base::kMiB},
    {.name = "Naive", .devices = 2, .schedule = plan::ScheduleVariant::kNaive},
    {.name = "ThreadRing", .devices = 2, .ring = storage::RingKind::kThreads},
    {.name = "Spilled", .devices = 2, .gradient_budget_bytes = 0},
    {.name = "SpilledInSmallSubgroups", .subgroup_elements = kBlock, .gradient_budget_bytes = 0},
    {.name = "HalfSpilled", .gradient_budget_bytes = 2 * base::kMiB},
    {.name = "InPlace", .devices = 2, .durability = storage::Durability::kNone},
    {.name = "NoChecksums", .checksums = false},
    {.name = "F32Gradients", .gradient_type = DataType::kF32},
    {.name = "HostUpdate", .devices = 2, .where = UpdateWhere::kHost},
    {.name = "HostUpdateAsInThePaper",
     .devices = 3,
     .where = UpdateWhere::kHost,
     .gradient_type = DataType::kF32,
     .gradient_budget_bytes = 0},
    {.name = "HostUpdateNaive",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .schedule = plan::ScheduleVariant::kNaive},
    {.name = "UnequalDevices", .devices = 3, .subgroup_elements = kBlock, .unequal = true},
    {.name = "InMemory", .devices = 2, .in_memory = true},
    {.name = "InMemoryHostUpdate",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .in_memory = true},
    {.name = "BehindLinks", .devices = 2, .behind_links = true},
    {.name = "InMemoryBehindLinks", .devices = 3, .in_memory = true, .behind_links = true},
    {.name = "HostUpdateBehindLinks",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .behind_links = true},
    {.name = "InMemoryHostUpdateBehindLinks",
     .devices = 3,
     .where = UpdateWhere::kHost,
     .in_memory = true,
     .behind_links = true},
    {.name = "AllCached", .devices = 2, .in_memory = true, .state_cache_bytes = base::kGiB},
    {.name = "UnequalDevicesHalfCached",
     .devices = 3,
     .subgroup_elements = kBlock,
     .in_memory = true,
     .unequal = true,
     .state_cache_bytes = kHalfOfState},
    {.name = "HostUpdateSpilledHalfCached",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .behind_links = true,
     .state_cache_bytes = kHalfOfState},
    {.name = "InPlaceHalfCached",
     .devices = 2,
     .subgroup_elements = kBlock,
     .durability = storage::Durability::kNone,
     .state_cache_bytes = kHalfOfState},
};

INSTANTIATE_TEST_SUITE_P(All, UpdaterContract, ::testing::ValuesIn(kVariants),
                         [](const auto& variant) { return variant.param.name; });

}  // namespace
}  // namespace smartinf::engine
