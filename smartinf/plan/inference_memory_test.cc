#include "smartinf/plan/inference_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMillion = 1'000'000;

/// An embedding, four layers and a head, each of a million parameters in bf16.
InferenceMemoryInput small_model() {
  InferenceMemoryInput input;
  for (uint64_t i = 0; i < 6; ++i) {
    input.units.push_back({i * kMillion, kMillion, static_cast<uint32_t>(i), i % 5 == 0 ? 0u : 1u});
  }
  input.cache_bytes = kMillion;
  input.process_bytes = 10 * kMillion;
  return input;
}

TEST(InferenceMemory, EverythingStaysWhereItFits) {
  InferenceMemoryInput input = small_model();
  input.host_limit_bytes = 23 * kMillion;
  const InferencePlan plan = plan_inference(input).value();
  EXPECT_EQ(plan.placement.in_memory, 6u);
  EXPECT_EQ(plan.placement.host_slots, 0u);
  EXPECT_EQ(plan.memory.host_bytes, 23 * kMillion);
}

TEST(InferenceMemory, TheFirstUnitsStayAndTheOthersHaveSlots) {
  InferenceMemoryInput input = small_model();
  input.host_limit_bytes = 22 * kMillion;
  const InferencePlan plan = plan_inference(input).value();
  EXPECT_EQ(plan.placement.in_memory, 2u) << "beside three slots";
  EXPECT_EQ(plan.memory.host_bytes, 21 * kMillion);
  input.host_limit_bytes = 16 * kMillion;
  EXPECT_THAT(plan_inference(input).status().to_string(),
              HasSubstr("needs 16.2 MiB of the host's memory at least"));
}

TEST(InferenceMemory, WhatCannotStreamStaysOrIsRefused) {
  InferenceMemoryInput input = small_model();
  input.streams = base::Status(base::ErrorCode::kUnsupported, "it is written so");
  EXPECT_EQ(plan_inference(input).value().placement.in_memory, 6u);
  input.host_limit_bytes = 22 * kMillion;
  EXPECT_THAT(plan_inference(input).status().to_string(), HasSubstr("because it is written so"));
}

TEST(InferenceMemory, AGpuHasWhatFitsOfWhatTheHostHas) {
  InferenceMemoryInput input = small_model();
  input.gpu = true;
  input.gpu_library_bytes = 0;
  input.accelerator_limit_bytes = 10 * kMillion;
  const InferencePlan plan = plan_inference(input).value();
  EXPECT_EQ(plan.placement.in_memory, 6u);
  EXPECT_EQ(plan.placement.on_accelerator, 2u);
  EXPECT_EQ(plan.placement.accelerator_slots, 2u);
  EXPECT_EQ(plan.memory.accelerator_bytes, 9 * kMillion);
}

TEST(InferenceMemory, KeysAndValuesHaveMostOfWhatIsLeft) {
  EXPECT_EQ(key_value_room(1000, 200), 600u);
  EXPECT_EQ(key_value_room(1000, 900), 250u) << "weights are read for each step";
  EXPECT_EQ(key_value_room(1000, 2000), 250u);
  EXPECT_EQ(key_value_device_bytes(6000, 2, 10, 10'000), 500u) << "a third of a quarter";
  EXPECT_EQ(key_value_device_bytes(6000, 2, 10, 400), 400u);
  EXPECT_EQ(key_value_device_bytes(6000, 2, 100, 10'000), 1600u) << "16 blocks";
}

}  // namespace
}  // namespace smartinf::plan
