#include "smartinf/plan/training_memory.h"

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/units.h"

namespace smartinf::plan {
namespace {

using base::ErrorCode;
using ::testing::HasSubstr;

/// recipes/quickstart.toml, with a vocabulary of bytes.
TrainingModel small_llama() {
  TrainingModel model;
  model.layers = 6, model.width = 256, model.heads = 4;
  model.query_width = 256, model.kv_width = 128, model.mlp_width = 768;
  model.vocabulary = 256, model.tokens = 8 * 256, model.tied = true;
  model.largest_parameter = 768 * 256;
  model.parameters = 256 * 256 + 6 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 768 + 512) + 256;
  return model;
}

TEST(TrainingMemory, WhatAutogradKeepsOfALayerIsWhatTorchReported) {
  // Storages behind torch.autograd.graph.saved_tensors_hooks on the CPU: our trainer with torch
  // 2.15, and LlamaForCausalLM of transformers 5.23 with attention "sdpa".
  const TrainingModel model = small_llama();
  EXPECT_EQ(layer_saved_bytes(model, TrainingProgram::kTrain, 2), 27836416u);
  EXPECT_EQ(layer_saved_bytes(model, TrainingProgram::kTrain, 4), 47235072u);
  EXPECT_EQ(layer_saved_bytes(model, TrainingProgram::kPython, 2), 2048 * 11800u);
  EXPECT_EQ(layer_saved_bytes(model, TrainingProgram::kPython, 4), 2048 * 21528u);
}

TEST(TrainingMemory, AllWeightsAndGradientsAreOnTheGpu) {
  TrainingMemoryInput input;
  input.model = small_llama();
  input.model.parameters = 8'000'000'000;
  input.gpu = true;
  const uint64_t p = input.model.parameters;
  const uint64_t once = training_memory(input).accelerator_bytes;
  EXPECT_GT(once, 2 * p) << "weights of 16 bit; gradients leave unit by unit";
  EXPECT_LT(once, 2 * p + (uint64_t{1} << 30));
  input.messages = 4;
  EXPECT_GT(training_memory(input).accelerator_bytes, 4 * p) << "a stage has them all at its end";
  input.messages = 0;
  EXPECT_GT(training_memory(input).host_bytes, 2 * p) << "new weights arrive there";
  input.accumulation = 4;
  // A tied head has its own, in place of a gradient in 16 bit that waits for the embedding's.
  const uint64_t head = input.model.vocabulary * input.model.width;
  const uint64_t sums = p + head;
  EXPECT_EQ(training_memory(input).accelerator_bytes, once + 4 * sums - 2 * head) << "sums in f32";
  input.sums_by_tree = true;
  EXPECT_EQ(training_memory(input).accelerator_bytes, once + 2 * 4 * sums - 2 * head)
      << "sums in f32: of the first two, and of the third";
  input.ranks = 2;
  EXPECT_EQ(training_memory(input).accelerator_bytes, once + 4 * sums - 2 * head)
      << "of two micro batches";
  input.accumulation = 16;
  input.ranks = 4;
  EXPECT_EQ(training_memory(input).accelerator_bytes, once + 2 * 4 * sums - 2 * head)
      << "of four that are a node of the tree";
  input.accumulation = 14;
  EXPECT_EQ(training_memory(input).accelerator_bytes, once + 3 * 4 * sums - 2 * head)
      << "of four that may be none";
  input.accumulation = 4;
  input.ranks = 4;
  EXPECT_EQ(training_memory(input).accelerator_bytes, once) << "nothing is added";
  input.ranks = 1;

  input.program = TrainingProgram::kPython;
  const TrainingMemory added = training_memory(input);
  EXPECT_GT(added.accelerator_bytes, 4 * p);
  EXPECT_LT(added.accelerator_bytes, once + 3 * p) << "gradients are their own sums";
  input.release_gradients = true;
  const TrainingMemory released = training_memory(input);
  EXPECT_LT(released.accelerator_bytes, 2 * p + (uint64_t{1} << 30)) << "only weights stay";
  EXPECT_EQ(released.host_bytes, added.host_bytes + 4 * p) << "sums of released gradients in f32";
}

TEST(TrainingMemory, LogitsTakeThreeValuesOfF32Each) {
  TrainingMemoryInput input;
  input.model = small_llama();
  input.gpu = true;
  input.model.vocabulary = 128256;
  const uint64_t row = 12 * input.model.vocabulary;
  ASSERT_LT(head_rows(input.model.vocabulary), input.model.tokens);
  EXPECT_EQ(training_memory(input).accelerator.at(3).bytes, row * head_rows(input.model.vocabulary))
      << "some rows at a time";
  input.program = TrainingProgram::kPython;
  const TrainingMemory memory = training_memory(input);
  EXPECT_EQ(memory.accelerator.at(3).bytes, row * input.model.tokens) << "all at once";
  EXPECT_GT(memory.accelerator_bytes, row * input.model.tokens);
}

TEST(TrainingMemory, PartsAddUpAndWithoutAGpuAllIsTheHosts) {
  TrainingMemoryInput input;
  input.model = small_llama();
  input.process_bytes = 400'000'000;
  input.optimizer_bytes = 50'000'000;
  input.recompute = false;
  const TrainingMemory memory = training_memory(input);
  EXPECT_TRUE(memory.accelerator.empty());
  uint64_t sum = 0;
  for (const MemoryPart& part : memory.host) sum += part.bytes;
  EXPECT_EQ(memory.host_bytes, sum) << "more than what measuring the drives takes";
  input.accumulation = 2;
  const uint64_t head = input.model.vocabulary * input.model.width;  // tied
  EXPECT_EQ(training_memory(input).host_bytes, sum + 4 * (input.model.parameters + head));
}

// ---- What stays in memory.

/// Sixteen layers of four times small_llama()'s width, one a unit.
TrainingPlanInput planned(bool gpu = false) {
  TrainingPlanInput input;
  TrainingMemoryInput& memory = input.memory;
  TrainingModel& model = memory.model;
  model = small_llama();
  model.layers = 16, model.width = model.query_width = 1024;
  model.kv_width = 512, model.mlp_width = 3072;
  const uint64_t layer = 1024 * (1024 + 512 + 512 + 1024) + 3 * 1024 * 3072 + 2048;
  const uint64_t embedding = 256 * 1024;
  model.largest_parameter = 2 * 1024 * 3072;
  model.parameters = embedding + model.layers * layer + 1024;
  memory.units.push_back({0, embedding, 0, 0});
  for (uint32_t i = 0; i < model.layers; ++i) {
    memory.units.push_back({embedding + i * layer, layer, i, 1});
  }
  memory.units.push_back({memory.units.back().end(), 1024, 0, 0});
  memory.gpu = gpu;
  memory.accumulation = 2;
  memory.process_bytes = uint64_t{400} << 20;
  memory.optimizer_bytes = uint64_t{32} << 20;
  memory.slot_padding_bytes = uint64_t{256} << 10;
  input.gradient_bytes = 2 * model.parameters;
  return input;
}

constexpr uint64_t kInputs = 17 * 2;  // of units but the first, and micro batches
constexpr uint64_t kInputsLeast = 2 + 4;
constexpr uint64_t kLess = 3 * base::kMiB;

uint64_t host_bytes_of(const TrainingPlanInput& input) {
  const auto plan = plan_training(input);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return plan.ok() ? plan->memory.host_bytes : 0;
}

/// Limits from what everything needs down to where nothing fits.
std::vector<TrainingPlan> plans_with_less_and_less(TrainingPlanInput input) {
  std::vector<TrainingPlan> plans;
  input.host_limit_bytes = std::min(input.host_limit_bytes, host_bytes_of(input));
  for (auto plan = plan_training(input); plan.ok(); plan = plan_training(input)) {
    EXPECT_LE(plan->memory.host_bytes, input.host_limit_bytes);
    plans.push_back(*plan);
    input.host_limit_bytes -= kLess;
  }
  return plans;
}

TEST(TrainingPlan, EverythingStaysWhereThereIsMemory) {
  for (const bool gpu : {false, true}) {
    TrainingPlanInput input = planned(gpu);
    const auto plan = plan_training(input);
    ASSERT_TRUE(plan.ok());
    EXPECT_FALSE(plan->streams);
    EXPECT_FALSE(plan->recompute);
    EXPECT_EQ(plan->placement.in_memory, 18u);
    EXPECT_EQ(plan->placement.on_accelerator, 18u);
    EXPECT_EQ(plan->gradient_memory_bytes, input.gradient_bytes);
    EXPECT_EQ(plan->inputs_spooled, 0u);
    EXPECT_EQ(plan->spool_bytes, 0u);
    input.gradient_limit_bytes = 1000;
    EXPECT_EQ(plan_training(input)->gradient_memory_bytes, 1000u);
    input.activations = Activations::kRecompute;
    EXPECT_TRUE(plan_training(input)->recompute);
    EXPECT_FALSE(plan_training(input)->streams);
  }
}

TEST(TrainingPlan, WeightsLeaveBeforeGradientsAndThoseBeforeInputs) {
  TrainingPlanInput input = planned();
  input.activations = Activations::kRecompute;
  const std::vector<TrainingPlan> plans = plans_with_less_and_less(input);
  const auto rank = [](const TrainingPlan& plan) {
    const bool all_inputs = plan.inputs_in_memory == kInputs;
    const bool all_gradients = plan.gradient_memory_bytes == 2 * planned().memory.model.parameters;
    if (!plan.streams) return 1;
    return all_inputs && all_gradients ? 2 : all_inputs ? 3 : 4;
  };
  std::vector<int> ranks;
  for (const TrainingPlan& plan : plans) {
    if (ranks.empty() || ranks.back() != rank(plan)) ranks.push_back(rank(plan));
    if (rank(plan) >= 3) {
      EXPECT_EQ(plan.placement.in_memory, 0u);
    }
    if (rank(plan) == 4) {
      EXPECT_LE(plan.gradient_memory_bytes, (uint64_t{16} << 20) + plan.input_bytes)
          << "the least, and where one more input does not fit";
    }
    if (!plan.streams) continue;
    EXPECT_TRUE(plan.recompute);
    EXPECT_EQ(plan.inputs_in_memory + plan.inputs_spooled, kInputs);
    const uint64_t for_inputs = plan.spool_bytes - plan.saved_spool_bytes;
    EXPECT_EQ(for_inputs > 0, plan.inputs_spooled > 0);
    EXPECT_GE(for_inputs, plan.inputs_spooled * plan.input_bytes);
  }
  EXPECT_EQ(ranks, (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(plans.back().inputs_in_memory, kInputsLeast);
}

TEST(TrainingPlan, GradientsWaitWhereThereIsRoomForAllOfThem) {
  TrainingPlanInput input = planned();
  input.memory.accumulation = 1;
  const TrainingPlan plan = plan_training(input).value();
  EXPECT_TRUE(plan.gradients_wait);
  input.host_limit_bytes = plan.memory.host_bytes + 2 * input.memory.model.parameters - 1;
  EXPECT_FALSE(plan_training(input)->gradients_wait);
  EXPECT_EQ(plan_training(input)->memory.host_bytes, plan.memory.host_bytes);
}

TEST(TrainingPlan, BuffersAreMoreWhereGradientsAreSpilled) {
  TrainingPlanInput input = planned();
  input.activations = Activations::kRecompute;
  input.stream_bytes = uint64_t{16} << 20;
  input.spill_bytes = uint64_t{300} << 20;
  bool streamed = false;
  bool spilled = false;
  for (const TrainingPlan& plan : plans_with_less_and_less(input)) {
    const bool all = plan.gradient_memory_bytes == input.gradient_bytes;
    const uint64_t more = !plan.streams ? 0 : all ? input.stream_bytes : input.spill_bytes;
    const auto buffers =
        std::ranges::find(plan.memory.host, "optimizer: buffers and gradients",
                          [](const MemoryPart& part) { return std::string_view(part.name); });
    EXPECT_EQ(buffers->bytes, input.memory.optimizer_bytes + plan.gradient_memory_bytes + more);
    streamed = streamed || (plan.streams && all);
    spilled = spilled || !all;
  }
  EXPECT_TRUE(streamed);
  EXPECT_TRUE(spilled);
}

TEST(TrainingPlan, WithLessMemoryNothingThatLeavesFirstComesBack) {
  for (const bool gpu : {false, true}) {
    TrainingPlanInput input = planned(gpu);
    if (gpu) input.accelerator_limit_bytes = uint64_t{1000} << 20;
    // In the order of what leaves last: others may take what is left of one input's place.
    const auto kept = [](const TrainingPlan& plan) {
      return std::tuple(!plan.streams, plan.streams ? plan.inputs_in_memory : kInputs,
                        plan.gradient_memory_bytes, plan.placement.in_memory);
    };
    const std::vector<TrainingPlan> plans = plans_with_less_and_less(input);
    ASSERT_GT(plans.size(), 10u);
    for (size_t i = 1; i < plans.size(); ++i) {
      // But for what buffers for offloading took until they did not fit any more.
      if (plans[i].measures_offload != plans[i - 1].measures_offload) continue;
      EXPECT_LE(kept(plans[i]), kept(plans[i - 1])) << i;
    }
  }
}

TEST(TrainingPlan, TheLeastThatFitsIsWhatTheRefusalSays) {
  TrainingPlanInput input = planned();
  const uint64_t least = plans_with_less_and_less(input).back().memory.host_bytes;
  input.host_limit_bytes = least - kLess;
  const base::Status refused = plan_training(input).status();
  EXPECT_EQ(refused.code(), ErrorCode::kOutOfMemory);
  EXPECT_THAT(refused.to_string(), HasSubstr(base::format_bytes(input.host_limit_bytes)));
  for (const char* part : {"memory.host", "the host's memory at least", "slots of units",
                           "optimizer: buffers and gradients", "the process itself 400 MiB"}) {
    EXPECT_THAT(refused.to_string(), HasSubstr(part));
  }
  input.activations = Activations::kKeep;
  EXPECT_EQ(plan_training(input).status().code(), ErrorCode::kOutOfMemory) << "units cannot leave";
  input.activations = Activations::kAuto;
  input.streams = base::Status(ErrorCode::kUnsupported, "nothing can be read", "A test.");
  EXPECT_THAT(plan_training(input).status().to_string(), HasSubstr("nothing can be read"));

  TrainingPlanInput beside = planned(true);
  beside.accelerator_limit_bytes = base::kMiB;
  const std::string text = plan_training(beside).status().to_string();
  EXPECT_THAT(text, HasSubstr("memory.accelerator"));
  EXPECT_THAT(text, HasSubstr("CUDA itself"));
}

TEST(TrainingPlan, OffloadHasBuffersForWhatFitsAndRoomOnTheDevicesForTheRest) {
  TrainingPlanInput input = planned();
  input.activations = Activations::kOffload;
  const TrainingPlan roomy = plan_training(input).value();
  EXPECT_TRUE(roomy.streams) << "each unit does all micro batches";
  EXPECT_EQ(roomy.inputs_in_memory, kInputs);
  EXPECT_EQ(roomy.placement.in_memory, 18u);
  EXPECT_EQ(roomy.gradient_memory_bytes, input.gradient_bytes);
  const uint64_t of_layers = 16 * input.memory.accumulation;
  EXPECT_EQ(roomy.saved_in_memory, of_layers);
  EXPECT_GE(roomy.spool_bytes, of_layers * roomy.saved_bytes);

  input.host_limit_bytes = roomy.memory.host_bytes - 3 * roomy.saved_bytes;
  const TrainingPlan tight = plan_training(input).value();
  EXPECT_LE(tight.memory.host_bytes, input.host_limit_bytes);
  EXPECT_LT(tight.saved_in_memory + tight.placement.in_memory, of_layers + 18);
  EXPECT_EQ(tight.saved_bytes, roomy.saved_bytes);
  input.activations = Activations::kRecompute;
  EXPECT_EQ(plan_training(input)->saved_bytes, 0u) << "computed again";
}

TEST(TrainingPlan, BuffersForOffloadingAreCountedWhereAllUnitsStay) {
  for (const bool gpu : {false, true}) {
    TrainingPlanInput input = planned(gpu);
    input.activations = Activations::kRecompute;
    input.host_limit_bytes = host_bytes_of(input);
    input.activations = Activations::kOffload;
    const TrainingPlan plan = plan_training(input).value();
    EXPECT_GT(plan.saved_bytes, 0u);
    EXPECT_LE(plan.memory.host_bytes, input.host_limit_bytes);
    input.host_limit_bytes = ~uint64_t{0};
    const TrainingPlan roomy = plan_training(input).value();
    ASSERT_EQ(roomy.placement.in_memory, 18u);
    TrainingMemoryInput without = input.memory;
    without.units.clear();
    EXPECT_GT(roomy.memory.host_bytes,
              2 * without.model.parameters + roomy.saved_in_memory * roomy.saved_bytes);
    for (const MemoryPart& part : roomy.memory.accelerator) {
      if (std::string_view(part.name) == "slots of units") {
        EXPECT_EQ(part.bytes, 0u);
      }
    }
  }
}

TEST(TrainingPlan, AutoHasBuffersToMeasureOffloadingAfterAllElse) {
  TrainingPlanInput input = planned();
  const uint64_t keep = host_bytes_of(input);
  input.activations = Activations::kRecompute;
  const uint64_t recompute = host_bytes_of(input);
  ASSERT_LT(recompute, keep);
  input.activations = Activations::kAuto;

  // All stay but what autograd keeps.
  input.host_limit_bytes = keep - 1;
  TrainingPlan plan = plan_training(input).value();
  EXPECT_TRUE(plan.measures_offload);
  EXPECT_EQ(plan.placement.in_memory, 18u);
  EXPECT_EQ(plan.gradient_memory_bytes, input.gradient_bytes);
  EXPECT_EQ(plan.inputs_in_memory, kInputs);
  EXPECT_GT(plan.saved_in_memory, 4u) << "more than the least: there is memory";
  EXPECT_EQ(plan.spool_bytes, plan.saved_spool_bytes);

  // Buffers would take what weights and gradients have: they go before neither.
  input.host_limit_bytes = recompute;
  plan = plan_training(input).value();
  EXPECT_LE(plan.memory.host_bytes, recompute);
  if (plan.measures_offload) {
    EXPECT_EQ(plan.placement.in_memory, 18u);
    EXPECT_EQ(plan.gradient_memory_bytes, input.gradient_bytes);
  }

  // Units come from the devices.
  input.host_limit_bytes = recompute - recompute / 4;
  plan = plan_training(input).value();
  EXPECT_TRUE(plan.measures_offload);
  EXPECT_LT(plan.placement.in_memory, 18u);
  EXPECT_EQ(plan.saved_in_memory, 4u);

  const TrainingPlan without = without_offload(plan);
  EXPECT_FALSE(without.measures_offload);
  EXPECT_EQ(without.saved_bytes, 0u);
  EXPECT_EQ(without.spool_bytes, plan.spool_bytes - plan.saved_spool_bytes);

  // The least: no room for buffers.
  const TrainingPlan least = plans_with_less_and_less(input).back();
  EXPECT_FALSE(least.measures_offload);
  EXPECT_EQ(least.spool_bytes > 0, least.inputs_spooled > 0);
  input.streams = base::Status(ErrorCode::kUnsupported, "nothing can be read", "A test.");
  input.host_limit_bytes = recompute;
  EXPECT_FALSE(plan_training(input)->streams);
}

TEST(TrainingMemory, AStageHasAtOnceWhatOneMomentHas) {
  TrainingMemoryInput input;
  input.model = small_llama();
  input.accumulation = 4;
  input.recompute = false;
  input.messages = 7;
  const auto at = [&](std::vector<BackwardMoment> moments) {
    input.moments = std::move(moments);
    return training_memory(input).host_bytes;
  };
  const BackwardMoment first{.in_flight = 4, .head_summed = false, .layers_summed = false};
  const BackwardMoment second{.in_flight = 3};
  EXPECT_EQ(at({first, second}), std::max(at({first}), at({second})));
  EXPECT_LT(at({first, second}), at({{.in_flight = 4}})) << "never all, and all sums";
  EXPECT_EQ(at({{.in_flight = 1}}), at({})) << "as micro batch after micro batch";
  // What the first one's sums need is there at its end, with what the others still have.
  const BackwardMoment alone{.in_flight = 1, .head_summed = false, .layers_summed = false};
  const uint64_t sums = 4 * (input.model.parameters + input.model.vocabulary * input.model.width);
  EXPECT_GT(at({alone}), sums + input.process_bytes);
}

TEST(TrainingPlan, UnitsStayOnTheAcceleratorFirst) {
  TrainingPlanInput input = planned(true);
  input.accelerator_limit_bytes = uint64_t{1000} << 20;
  const TrainingPlan plan = plan_training(input).value();
  EXPECT_TRUE(plan.streams);
  EXPECT_EQ(plan.placement.in_memory, 18u);
  EXPECT_LT(plan.placement.on_accelerator, 18u);
  EXPECT_LE(plan.memory.accelerator_bytes, input.accelerator_limit_bytes);
}

TEST(TrainingPlan, AThirdSlotOnTheAcceleratorComesBeforeLayersThatStayThere) {
  TrainingPlanInput input = planned(true);
  input.accelerator_limit_bytes = uint64_t{1200} << 20;
  std::set<uint32_t> seen;
  for (auto plan = plan_training(input); plan.ok(); plan = plan_training(input)) {
    const UnitPlacement& placement = plan->placement;
    EXPECT_TRUE(placement.accelerator_slots == 3 || placement.on_accelerator <= 1);
    seen.insert(placement.accelerator_slots);
    input.accelerator_limit_bytes -= kLess;
  }
  EXPECT_EQ(seen, (std::set<uint32_t>{2, 3}));
}

TEST(TrainingPlan, GradientsLeaveAGpuThroughMemoryForThoseOfAUnit) {
  const TrainingPlanInput input = planned(true);
  const std::vector<Unit>& units = input.memory.units;
  TrainingModel model = input.memory.model;
  EXPECT_EQ(gradient_copies_elements(model, units), units[1].count);
  model.largest_parameter = 2 * units[1].count;
  EXPECT_EQ(gradient_copies_elements(model, units), model.largest_parameter);
  model.largest_parameter = 1;
  model.adapters = 1600;
  EXPECT_EQ(gradient_copies_elements(model, units), 100u) << "adapters of one of sixteen layers";
}

}  // namespace
}  // namespace smartinf::plan
