#include "smartinf/plan/training_memory.h"

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

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
  EXPECT_GT(once, 4 * p) << "weights and gradients of 16 bit";
  EXPECT_LT(once, 4 * p + (uint64_t{1} << 30));
  EXPECT_GT(training_memory(input).host_bytes, 2 * p) << "new weights arrive there";
  input.accumulation = 4;
  EXPECT_EQ(training_memory(input).accelerator_bytes, once + 4 * p) << "sums in f32";

  input.program = TrainingProgram::kPython;
  const TrainingMemory added = training_memory(input);
  EXPECT_GT(added.accelerator_bytes, 4 * p);
  EXPECT_LT(added.accelerator_bytes, once + p) << "gradients are their own sums";
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
  const uint64_t logits = 12 * input.model.tokens * input.model.vocabulary;
  const TrainingMemory memory = training_memory(input);
  EXPECT_EQ(memory.accelerator.at(3).bytes, logits);
  EXPECT_GT(memory.accelerator_bytes, logits);
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
  EXPECT_EQ(training_memory(input).host_bytes, sum + 4 * input.model.parameters);
}

}  // namespace
}  // namespace smartinf::plan
