#include "smartinf/plan/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/units.h"

namespace smartinf::plan {
namespace {

using base::PlaneKind;

const std::vector<PlaneKind> kAdamPlanes{PlaneKind::kMaster, PlaneKind::kMomentum,
                                         PlaneKind::kVariance};

MemoryPlanInput two_hundred_million() {
  MemoryPlanInput input;
  input.planes = kAdamPlanes;
  input.elements = 200'000'000;
  return input;
}

TEST(MemoryPlan, StaysWithinTheBudgetAndKeepsThePipelineFull) {
  for (const uint64_t budget_mib : {16, 64, 512, 4096}) {
    for (const uint32_t devices : {1u, 2u, 3u, 10u}) {
      for (const auto format :
           {base::StateFormat::kF32, base::StateFormat::kBf16, base::StateFormat::kQ8}) {
        MemoryPlanInput input = two_hundred_million();
        input.budget_bytes = budget_mib * base::kMiB;
        input.devices = devices;
        input.format = format;
        input.gradient_spill_bytes = 2;
        const auto plan = plan_memory(input);
        if (budget_mib == 16 && devices == 10) {
          EXPECT_EQ(plan.status().code(), base::ErrorCode::kOutOfMemory);
          continue;
        }
        ASSERT_TRUE(plan.ok()) << plan.status().to_string();
        EXPECT_LE(plan->staging_bytes + devices * plan->slots * plan->slot_bytes,
                  input.budget_bytes);
        EXPECT_GE(plan->slots, kSlotsMin);
        EXPECT_EQ(plan->subgroup_elements % base::kBlockElements, 0u);
        EXPECT_LE(2 * 4 * plan->subgroup_elements, plan->staging_bytes);
      }
    }
  }
}

TEST(MemoryPlan, SlotsForReadingWeightsComeOutOfTheBudget) {
  for (const uint64_t budget_mib : {64, 512}) {
    MemoryPlanInput input = two_hundred_million();
    input.budget_bytes = budget_mib * base::kMiB;
    input.devices = 2;
    const auto without = plan_memory(input);
    input.weight_read_slots = kWeightReadSlots;
    const auto with = plan_memory(input);
    ASSERT_TRUE(with.ok()) << with.status().to_string();
    EXPECT_EQ(without->device_bytes, without->slots * without->slot_bytes);
    EXPECT_EQ(with->device_bytes,
              with->slots * with->slot_bytes + kWeightReadSlots * 4 * with->subgroup_elements);
    EXPECT_LE(with->staging_bytes + 2 * with->device_bytes, input.budget_bytes);
  }
}

TEST(MemoryPlan, TheAdvisedBudgetIsEnoughAndOneByteLessIsNot) {
  MemoryPlanInput input = two_hundred_million();
  input.subgroup_elements = 1'000'000;
  input.weight_read_slots = 3;
  input.budget_bytes = 1;
  const auto refused = plan_memory(input).status();
  EXPECT_EQ(refused.code(), base::ErrorCode::kOutOfMemory);
  EXPECT_THAT(refused.to_string(), ::testing::HasSubstr("or make the subgroups smaller"));
  uint64_t low = 1;
  uint64_t high = base::kGiB;
  while (low < high) {
    input.budget_bytes = (low + high) / 2;
    if (plan_memory(input).ok()) {
      high = input.budget_bytes;
    } else {
      low = input.budget_bytes + 1;
    }
  }
  EXPECT_THAT(refused.to_string(), ::testing::HasSubstr(base::format_bytes(low)));
}

TEST(MemoryPlan, SmallModelsStillGiveEveryDeviceSeveralSubgroups) {
  MemoryPlanInput input = two_hundred_million();
  input.elements = 5'000'000;
  input.devices = 2;
  const auto plan = plan_memory(input);
  ASSERT_TRUE(plan.ok());
  EXPECT_GE(input.elements / plan->subgroup_elements, 2u * 12);
}

TEST(MemoryPlan, AStateCacheMustFitTheMachine) {
  const uint64_t gib = base::kGiB;
  EXPECT_TRUE(check_state_cache(14 * gib, 2 * gib, 16 * gib).ok());
  const auto refused = check_state_cache(14 * gib + 1, 2 * gib, 16 * gib);
  EXPECT_EQ(refused.code(), base::ErrorCode::kOutOfMemory);
  EXPECT_THAT(refused.to_string(), ::testing::HasSubstr("16.0 GiB of memory"));
  EXPECT_THAT(refused.to_string(), ::testing::HasSubstr("at most 14.0 GiB"));
  EXPECT_FALSE(check_state_cache(1, 17 * gib, 16 * gib).ok());
}

TEST(MemoryPlan, StateBytesAreThoseOfTheEncodings) {
  using base::StateFormat;
  const uint64_t block = base::kBlockElements;
  const std::vector<PlaneKind> momentum{PlaneKind::kMaster, PlaneKind::kMomentum};
  EXPECT_EQ(state_bytes(StateFormat::kF32, kAdamPlanes, 10 * block), 120 * block);
  EXPECT_EQ(state_bytes(StateFormat::kBf16, kAdamPlanes, 10 * block), 80 * block);
  EXPECT_EQ(state_bytes(StateFormat::kF32, momentum, 10 * block), 80 * block);
}

TEST(MemoryPlan, ADeviceTakesTheSlotsThatItsTransfersFillAndNoMore) {
  DeviceSlotsInput input;
  input.slot_bytes = 12 * base::kMiB;
  input.memory_bytes = 512 * base::kMiB;
  input.subgroups = 100;
  EXPECT_EQ(device_slots(input), 6u) << "fewer are not worth saving memory for";
  input.in_flight_bytes = 48 * base::kMiB;
  EXPECT_EQ(device_slots(input), 2u * 4 + 2);
  input.in_flight_bytes = base::kGiB;
  EXPECT_EQ(device_slots(input), kSlotsMax);
  input.gradients_spilled = true;
  input.in_flight_bytes = 0;
  EXPECT_EQ(device_slots(input), kSlotsMax) << "they also collect gradients";
  input.subgroups = 7;
  EXPECT_EQ(device_slots(input), 7u);
  input.slots = 3;
  EXPECT_EQ(device_slots(input), 3u);
  input.memory_bytes = 25 * base::kMiB;
  EXPECT_EQ(device_slots(input), 2u);
  input.memory_bytes = 1;
  EXPECT_EQ(device_slots(input), 0u);
}

}  // namespace
}  // namespace smartinf::plan
