#include "smartinf/sim/generation.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::sim {
namespace {

using testing::HasSubstr;

constexpr double kEndlessRate = 1e18;

ModelShape generation_model(std::string_view name) {
  auto model = model_preset(name);
  EXPECT_TRUE(model.ok());
  return *model;
}

/// Drives of 3 GB/s and nothing else that takes time.
Machine drives_only(uint32_t count) {
  Machine machine = *load_machine("workstation-gen4");
  machine.gpu.memory_bytes = 0;
  machine.gpu.peak_flops = machine.gpu.memory_bytes_per_s = kEndlessRate;
  machine.gpu.link_bytes_per_s = machine.host.link_bytes_per_s = kEndlessRate;
  machine.host.copy_bytes_per_s = kEndlessRate;
  machine.host.memory_bytes = 0;
  DeviceGroup& device = machine.devices.front();
  device.count = count;
  device.read_bytes_per_s = 3e9;
  device.fold_bytes_per_s = device.link_bytes_per_s = device.write_bytes_per_s = kEndlessRate;
  device.capacity_bytes = 0;
  device.mixed_efficiency = 1;
  return machine;
}

/// Without a GPU, the host's cores compute and fold.
Machine cores_and_a_drive() {
  Machine machine = drives_only(1);
  machine.gpu.name = "none";
  machine.devices.front().on_host_cores = true;
  return machine;
}

GenerationOptions asked(uint64_t context, uint64_t sequences, uint64_t tokens = 64) {
  GenerationOptions options;
  options.context = context;
  options.sequences = sequences;
  options.tokens = tokens;
  return options;
}

TEST(Generation, WithOnlyDrivesLeftAStepIsTheirTime) {
  const ModelShape model = generation_model("llama3-8B");
  for (const uint32_t count : {1u, 4u}) {
    const auto times = simulate_generation(model, drives_only(count), asked(32768, 16));
    ASSERT_TRUE(times.ok()) << times.status().to_string();
    const double read = 16 * 131072.0 * 32800;  // 2 L K d 2 for each of the tokens in blocks
    EXPECT_NEAR(static_cast<double>(times->traffic.read) / read, 1, 0.002);
    EXPECT_NEAR(times->step_s / (read / (3e9 * count)), 1, 0.002);
    EXPECT_EQ(times->bound_by, "drives");
    EXPECT_NEAR(times->tokens_per_s, 16 / times->step_s, 1e-9);
    EXPECT_EQ(times->traffic.written, 16u * 131072);
    EXPECT_EQ(times->traffic.link_down, 16u * 32 * (32 * 128 * 4 + 2 * 8 * 128 * 2));
    EXPECT_EQ(times->traffic.link_up, 16u * 32 * 32 * 130 * 4);
  }
}

TEST(Generation, ReadsAloneMayBeSlowerThanBothWaysTogether) {
  const ModelShape model = generation_model("llama3-8B");
  Machine machine = drives_only(2);
  const double whole_s = simulate_generation(model, machine, asked(8192, 16))->step_s;
  machine.devices.front().reads_only_bytes_per_s = 1.5e9;
  EXPECT_NEAR(simulate_generation(model, machine, asked(8192, 16))->step_s / whole_s, 2, 0.01);
}

/// Of a step of 16 sequences with llama3-8B's 32 layers.
double flops_of_products(const ModelShape& model) {
  return 16 * 2 *
         (32 * model.active_parameters() + static_cast<double>(model.hidden * model.vocabulary));
}

TEST(Generation, HalvesHideTheHostsTimeBehindTheDrives) {
  const ModelShape model = generation_model("llama3-8B");
  Machine machine = drives_only(4);
  const double drives_s = simulate_generation(model, machine, asked(8192, 16))->step_s;
  // Products of the whole step as long as 0.8 of the drives' time.
  const double flops = flops_of_products(model);
  machine.gpu.peak_flops = flops / (0.8 * drives_s) / machine.gpu.product_efficiency;
  const auto times = simulate_generation(model, machine, asked(8192, 16));
  EXPECT_NEAR(times->step_s / drives_s, 1, 0.06);  // the logits have nothing beside them
  GenerationOptions turns = asked(8192, 16);
  turns.in_turn = plan::InTurn::kAll;
  EXPECT_NEAR(simulate_generation(model, machine, turns)->step_s / drives_s, 1.8, 0.02);
  machine.gpu.peak_flops /= 4;
  EXPECT_EQ(simulate_generation(model, machine, asked(8192, 16))->bound_by, "GPU");
}

TEST(Generation, FetchingBringsAllKeysAndValuesOverTheLink) {
  const ModelShape model = generation_model("llama3-8B");
  Machine machine = drives_only(4);
  machine.host.link_bytes_per_s = 2e9;
  GenerationOptions options = asked(8192, 16);
  const auto beside = simulate_generation(model, machine, options);
  options.attention = AttentionPlace::kHost;
  const auto fetched = simulate_generation(model, machine, options);
  EXPECT_EQ(fetched->traffic.link_up, fetched->traffic.read);
  EXPECT_NEAR(fetched->step_s / beside->step_s, 6, 0.05);
  EXPECT_EQ(fetched->bound_by, "host link");
}

TEST(Generation, AServerBehindASlowNetworkIsAHundredTimesAsFastAsFetching) {
  Machine machine = *load_machine("server-25gbe");
  machine.network.bytes_per_s = machine.devices.front().link_bytes_per_s = 0.118e9;
  GenerationOptions options = asked(8192, 16);
  const ModelShape model = generation_model("llama3-8B");
  const auto beside = simulate_generation(model, machine, options);
  options.attention = AttentionPlace::kHost;
  const auto fetched = simulate_generation(model, machine, options);
  EXPECT_GT(fetched->step_s / beside->step_s, 100);
}

TEST(Generation, SharedPrefixesAndSmallerFormatsReadLess) {
  const ModelShape model = generation_model("llama3-8B");
  const Machine machine = drives_only(1);
  const double whole_s = simulate_generation(model, machine, asked(16448, 16))->step_s;
  GenerationOptions options = asked(16448, 16);
  options.prefix = 16384;
  EXPECT_LT(simulate_generation(model, machine, options)->step_s, whole_s / 12);
  options = asked(16448, 16);
  options.format = kernels::CacheFormat::kQ8;
  EXPECT_NEAR(simulate_generation(model, machine, options)->step_s / whole_s, 69632.0 / 131072,
              0.01);
}

TEST(Generation, InputsInPlaceOfKeysAndValuesAreTheClosedForm) {
  // alpha = 2 P / (S + P), and the gain (S + P) / S: 16 and 8 drives of 3 GB/s, a link of 16.
  const ModelShape model = generation_model("gpt2-8.4B");
  for (const uint32_t count : {16u, 8u}) {
    Machine machine = drives_only(count);
    machine.gpu.link_bytes_per_s = 16e9;
    GenerationOptions options = asked(512, 16);
    const double alone_s = simulate_generation(model, machine, options)->step_s;
    options.inputs = GenerationOptions::kAuto;
    const auto times = simulate_generation(model, machine, options);
    const double rate = 3.0 * count;
    EXPECT_NEAR(times->inputs, 32 / (rate + 16), 1e-9);
    EXPECT_NEAR(alone_s / times->step_s, (rate + 16) / rate, 0.02);
  }
  // Where heads share keys, inputs are larger than what they stand for.
  GenerationOptions options = asked(8192, 16);
  options.inputs = GenerationOptions::kAuto;
  EXPECT_EQ(simulate_generation(generation_model("llama3-8B"), drives_only(8), options)->inputs, 0);
}

TEST(Generation, WeightsStreamWhereMemoryIsShort) {
  Machine machine = *load_machine("workstation-gen4");
  machine.gpu.name = "none";
  machine.gpu.memory_bytes = 0;
  const ModelShape model = generation_model("llama3-8B");
  GenerationOptions options = asked(8192, 8);
  const auto resident = simulate_generation(model, machine, options);
  EXPECT_EQ(resident->weights_read, 0u);
  options.memory_bytes = 12'000'000'000;
  const auto need = generation_need(model, machine, options);
  ASSERT_TRUE(need.ok()) << need.status().to_string();
  EXPECT_LE(need->host_bytes, options.memory_bytes);
  const auto streamed = simulate_generation(model, machine, options);
  EXPECT_GT(streamed->weights_read, 4'000'000'000u);
  EXPECT_LT(streamed->weights_read, 14'000'000'000u);
  EXPECT_GT(streamed->step_s, resident->step_s);
}

TEST(Generation, WhatDoesNotFitIsRefusedWithNumbers) {
  const ModelShape model = generation_model("llama3-70B");
  Machine machine = *load_machine("workstation-gen4");
  GenerationOptions options = asked(131072, 4096);
  auto times = simulate_generation(model, machine, options);
  ASSERT_FALSE(times.ok());
  EXPECT_EQ(times.status().code(), base::ErrorCode::kNoSpace);
  EXPECT_THAT(std::string(times.status().what()), HasSubstr("4096 sequences"));
  options = asked(8192, 16);
  options.memory_bytes = 1'000'000'000;
  EXPECT_EQ(simulate_generation(model, machine, options).status().code(),
            base::ErrorCode::kOutOfMemory);
  options = asked(8192, 16);
  options.prefix = 9000;
  EXPECT_EQ(simulate_generation(model, machine, options).status().code(),
            base::ErrorCode::kInvalidArgument);
  EXPECT_EQ(
      simulate_generation(generation_model("bert-0.11B"), machine, asked(512, 1)).status().code(),
      base::ErrorCode::kUnsupported);
  EXPECT_EQ(simulate_generation(generation_model("gpt2-0.12B"), machine, asked(1000, 1, 100))
                .status()
                .code(),
            base::ErrorCode::kInvalidArgument);
}

TEST(Generation, APlanTakesAsManyTogetherAsFitAndCountsWear) {
  const ModelShape model = generation_model("llama3-8B");
  const Machine machine = *load_machine("workstation-gen4");
  GenerationOptions options = asked(32768, 4096, 512);
  const auto plan = plan_generation(model, machine, options);
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  // 4 x 2 TB have room for 457 sequences each of 4.37 GB: as many on each drive.
  EXPECT_EQ(plan->together, 4u * 457);
  EXPECT_EQ(plan->held_by, "drives");
  EXPECT_GT(plan->prefill_s, 0);
  EXPECT_NEAR(plan->decode_s, 4096 * 512 / plan->times.tokens_per_s, 1e-6 * plan->decode_s);
  const double written = 4096.0 * (32768 + 512) * 131072;
  EXPECT_NEAR(static_cast<double>(plan->written_bytes) / written, 1, 1e-9);
  EXPECT_NEAR(plan->requests_until_worn / (4096 / (written / 4 / 1200e12)), 1, 1e-6);
  options.sequences = 64;
  const auto small = plan_generation(model, machine, options);
  EXPECT_EQ(small->together, 64u);
  EXPECT_EQ(small->held_by, "");
}

TEST(Generation, APlanSaysFromHowManyDrivesOnSomethingElseLimits) {
  const ModelShape model = generation_model("llama3-8B");
  Machine machine = drives_only(4);
  const double drives_s = simulate_generation(model, machine, asked(8192, 16))->step_s;
  // Products as long as the reads of seven and a half drives.
  const double flops = flops_of_products(model);
  machine.gpu.peak_flops = flops / (4 * drives_s / 7.5) / machine.gpu.product_efficiency;
  for (const uint32_t there : {2u, 12u}) {
    machine.devices.front().count = there;
    const auto plan = plan_generation(model, machine, asked(8192, 16));
    ASSERT_TRUE(plan.ok()) << plan.status().to_string();
    EXPECT_EQ(plan->times.bound_by, there == 2 ? "drives" : "GPU");
    EXPECT_EQ(plan->drives, 8u) << there;
    EXPECT_EQ(plan->next_bound, "GPU");
    // Not only drives are more with more of them.
    machine.devices.front().read_bytes_per_s = 3e12;
    machine.devices.front().fold_bytes_per_s = 3e9;
    EXPECT_EQ(plan_generation(model, machine, asked(8192, 16))->drives, 8u);
    machine.devices.front() = drives_only(there).devices.front();
  }
}

TEST(Generation, OnCoresARowAddsItsArithmeticToReadingTheMatrices) {
  const ModelShape model = generation_model("qwen3-0.6B");
  Machine machine = cores_and_a_drive();
  machine.host.decode_bytes_per_s = 20e9;
  machine.host.decode_flops = 16 * 20e9 / 3;  // 16 rows take three times as long as reading
  machine.host.memory_bytes = 16'000'000'000;
  const double read_s = 2 / 20e9 *
                        (static_cast<double>(model.layers) * model.active_parameters() +
                         static_cast<double>(model.hidden * model.vocabulary));
  // And what is beside products a quarter of that.
  for (const auto& [rows, reads] : {std::pair(1, 1 + 0.75 / 16), std::pair(8, 1 + 14.0 / 15 + 0.375),
                                    std::pair(16, 3.75), std::pair(32, 7.5)}) {
    GenerationOptions options = asked(64, static_cast<uint64_t>(rows));
    options.cache = CachePlace::kMemory;
    const auto times = simulate_generation(model, machine, options);
    ASSERT_TRUE(times.ok()) << times.status().to_string();
    EXPECT_NEAR(times->step_s / read_s, reads, 0.01 * reads) << rows;
  }
}

TEST(Generation, OutputsOfProductsAndProductsThemselvesTakeTime) {
  const ModelShape model = generation_model("qwen3-0.6B");
  Machine machine = cores_and_a_drive();
  machine.host.decode_bytes_per_s = 1e15;
  machine.host.decode_flops = 1e18;
  machine.host.memory_bytes = 16'000'000'000;
  GenerationOptions options = asked(64, 8);
  options.cache = CachePlace::kMemory;
  const auto step_s = [&] { return simulate_generation(model, machine, options)->step_s; };
  machine.host.decode_value_s = 1e-15;
  const double others = step_s();
  machine.host.decode_value_s = 1e-6;
  // Of a layer: queries, keys and values; those of attention; gate, up and down.
  const uint64_t layer = (model.heads + 2 * model.kv_heads) * model.head_size + 2 * model.hidden +
                         2 * model.feed_forward;
  const double outputs = static_cast<double>(model.layers * layer + model.vocabulary);
  EXPECT_NEAR(step_s() - others, 8 * outputs * 1e-6, 8 * outputs * 1e-8);
  machine.host.decode_value_s = 1e-15;
  machine.host.decode_product_s = 0.1;
  const double products = static_cast<double>(4 * model.layers + 1);
  EXPECT_NEAR(step_s() - others, products * 0.1, products * 0.001);
}

TEST(Generation, DevicesHaveLessForReadingWhereMemoryIsScarce) {
  const ModelShape model = generation_model("qwen3-0.6B");
  Machine machine = cores_and_a_drive();
  GenerationOptions options = asked(2048, 8);
  options.cache = CachePlace::kDevices;
  options.memory_bytes = 2'000'000'000;
  const auto little = generation_need(model, machine, options);
  ASSERT_TRUE(little.ok()) << little.status().to_string();
  EXPECT_LT(little->slot_bytes, uint64_t{64} << 20);
  EXPECT_EQ(little->kept_bytes, 0u);
  options.memory_bytes = 8'000'000'000;
  const auto enough = generation_need(model, machine, options);
  EXPECT_EQ(enough->slot_bytes, uint64_t{64} << 20);
  EXPECT_GT(enough->kept_bytes, 0u);
}

TEST(Generation, KeysAndValuesAreInMemoryWhereThatIsFaster) {
  const ModelShape model = generation_model("qwen3-0.6B");
  Machine machine = cores_and_a_drive();
  machine.devices.front().fold_bytes_per_s = 10e9;
  machine.host.memory_bytes = 16'000'000'000;
  // 112 KiB a token: 16 x 2048 take 3.8 GB, and 128 of them 30 GB.
  const auto few = plan_generation(model, machine, asked(2048, 16));
  ASSERT_TRUE(few.ok()) << few.status().to_string();
  EXPECT_TRUE(few->need.in_memory);
  EXPECT_EQ(few->written_bytes + few->times.traffic.read + few->times.traffic.link_up, 0u);
  EXPECT_EQ(few->drives, 0u);
  EXPECT_NEAR(few->times.step_s, 16.0 * 2080 * 114688 / 10e9, 0.01 * few->times.step_s);
  GenerationOptions options = asked(2048, 16);
  options.cache = CachePlace::kDevices;
  const auto all_kept = plan_generation(model, machine, options);
  EXPECT_NEAR(all_kept->times.step_s, 16.0 * 2080 * 114688 / 10e9, 0.01) << "and are not read";
  EXPECT_EQ(all_kept->times.traffic.read, 0u);
  // A half is kept in memory that nothing else has a use for.
  options.memory_bytes = all_kept->need.host_bytes - all_kept->need.cache_bytes / 2;
  const auto half_kept = plan_generation(model, machine, options);
  ASSERT_TRUE(half_kept.ok()) << half_kept.status().to_string();
  EXPECT_NEAR(half_kept->times.step_s, 16.0 * 2080 * 114688 / 2 / 3e9, 0.03);
  // More than fit are faster in turns.
  const auto many = plan_generation(model, machine, asked(2048, 128));
  EXPECT_TRUE(many->need.in_memory);
  EXPECT_LT(many->together, 64u);
  EXPECT_EQ(many->held_by, "memory");
  EXPECT_LE(many->need.host_bytes, machine.host.memory_bytes);
  options = asked(2048, 16);
  options.cache = CachePlace::kMemory;
  EXPECT_EQ(simulate_generation(model, drives_only(1), options).status().code(),
            base::ErrorCode::kUnsupported);
}

TEST(Generation, IsTheSameToTheBitEveryTime) {
  const ModelShape model = generation_model("qwen3-0.6B");
  const Machine machine = *load_machine("server-100gbe");
  const auto once = simulate_generation(model, machine, asked(4096, 24));
  const auto again = simulate_generation(model, machine, asked(4096, 24));
  ASSERT_TRUE(once.ok()) << once.status().to_string();
  EXPECT_EQ(once->step_s, again->step_s);
}

}  // namespace
}  // namespace smartinf::sim
