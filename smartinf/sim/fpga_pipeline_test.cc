#include "smartinf/sim/fpga_pipeline.h"

#include <gtest/gtest.h>

#include "smartinf/sim/machine.h"
#include "smartinf/sim/model_shape.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {
namespace {

constexpr double kGb = 1e9;

FpgaPipeline smartssd() {
  return {.clock_hz = 300e6,
          .word_cycles = 4,
          .banks = 1,
          .bank_bytes_per_s = 19.2e9,
          .bank_efficiency = 0.75};
}

/// Bytes that the kernel takes in, as the paper counts.
double bytes_in_per_s(const FpgaPipeline& pipeline, const PipelineElement& element) {
  return (4 * element.planes + element.gradient_bytes) / pipeline_seconds(pipeline, element);
}

// Adam with gradients in f32 in one bank: 28 bytes an element are moved.
TEST(FpgaPipeline, OneBankOfMemoryIsTheLimit) {
  const PipelineElement dense{.planes = 3, .gradient_bytes = 4};
  EXPECT_NEAR(bytes_in_per_s(smartssd(), dense), 19.2e9 * 0.75 * 16 / 28, 1e6);
  EXPECT_GT(bytes_in_per_s(smartssd(), dense), 8 * kGb);
  // Compressed to 2 %, it moves less for an element and is faster.
  const PipelineElement pairs{.planes = 3, .gradient_bytes = 0.08, .values = 0.01};
  EXPECT_GT(pipeline_seconds(smartssd(), dense) / pipeline_seconds(smartssd(), pairs), 1.15);
  EXPECT_EQ(pipeline_cycles(smartssd(), pairs).slowest(),
            pipeline_cycles(smartssd(), pairs).memory);
}

// The table in docs/fpga.md. With compressed gradients planes come in and go out, and nothing else:
// of what one bank moves at most half comes in.
TEST(FpgaPipeline, WhatOneBankGivesCompressedGradients) {
  const PipelineElement pairs{.planes = 3, .gradient_bytes = 0.08, .values = 0.01};
  const PipelineElement signs{
      .planes = 3, .gradient_bytes = 0.061, .weights_bytes = 2, .values = 0.08};
  // In elements that are 16 bytes each, as with dense f32 gradients.
  EXPECT_NEAR(16 / pipeline_seconds(smartssd(), pairs), 9.6 * kGb, 0.05 * kGb);
  EXPECT_NEAR(16 / pipeline_seconds(smartssd(), signs), 8.8 * kGb, 0.05 * kGb);
  // In bytes as they lie in memory.
  const auto bytes_in = [](double efficiency, const PipelineElement& element) {
    FpgaPipeline pipeline = smartssd();
    pipeline.bank_efficiency = efficiency;
    return bytes_in_per_s(pipeline, element);
  };
  EXPECT_NEAR(bytes_in(0.75, pairs), 7.2 * kGb, 0.05 * kGb);
  EXPECT_NEAR(bytes_in(1, pairs), 9.6 * kGb, 0.05 * kGb);
  EXPECT_NEAR(bytes_in(0.831, pairs), 8 * kGb, 0.01 * kGb);
  EXPECT_NEAR(bytes_in(0.9, signs), 8 * kGb, 0.01 * kGb);
}

// The kernels themselves, with memory for each port: a word a cycle.
TEST(FpgaPipeline, TheKernelsAloneAreFasterThanEightGbs) {
  FpgaPipeline alone = smartssd();
  alone.bank_bytes_per_s = 1e15;
  alone.banks = 1000;
  const PipelineElement dense{.planes = 3, .gradient_bytes = 4};
  const PipelineElement pairs{.planes = 3, .gradient_bytes = 0.08, .values = 0.01};
  EXPECT_NEAR(bytes_in_per_s(alone, dense), 16 * 4 * 300e6, 0.01 * 19.2e9);
  EXPECT_GT(bytes_in_per_s(alone, pairs), 8 * kGb);
  alone.word_cycles = 1;
  EXPECT_NEAR(bytes_in_per_s(alone, dense), 16 * 16 * 300e6, 0.02 * 76.8e9);
  // Then many values are what takes time: one a cycle.
  const PipelineElement many{.planes = 3, .gradient_bytes = 8, .values = 1};
  EXPECT_NEAR(pipeline_cycles(alone, many).slowest(), 1 + 1.0 / 16, 1e-9);
}

Machine machine_with_kernels() {
  const auto machine = load_machine("smartssd-kernels");
  EXPECT_TRUE(machine.ok()) << machine.status().to_string();
  return *machine;
}

StepTimes run(const Machine& machine, const StepOptions& options) {
  const auto shape = model_preset("gpt2-4.0B");
  EXPECT_TRUE(shape.ok());
  const auto times = simulate_step(*shape, machine, options);
  EXPECT_TRUE(times.ok()) << times.status().to_string();
  return *times;
}

// With drives and links out of the way a step's update takes what the cycles say.
TEST(FpgaPipeline, AStepsUpdateTakesItsCycles) {
  Machine machine = machine_with_kernels();
  ASSERT_GT(machine.devices.front().kernel.clock_hz, 0);
  machine.host.link_bytes_per_s = machine.host.weights_bytes_per_s = 1e15;
  machine.software.update_start_s = 0;
  DeviceGroup& device = machine.devices.front();
  device.count = 1;
  device.read_bytes_per_s = device.write_bytes_per_s = device.link_bytes_per_s =
      device.weights_bytes_per_s = 1e15;
  StepOptions options;
  options.method = Method::kSmartOver;
  const auto shape = model_preset("gpt2-4.0B");
  ASSERT_TRUE(shape.ok());
  const auto parameters = static_cast<double>(shape->parameters());
  const double adam = pipeline_seconds(device.kernel, {.planes = 3, .gradient_bytes = 4});
  EXPECT_NEAR(run(machine, options).update_s, parameters * adam, 0.01 * parameters * adam);
  options.rule = kernels::UpdateRule::kSgdMomentum;
  const double sgd = pipeline_seconds(device.kernel, {.planes = 2, .gradient_bytes = 4});
  EXPECT_NEAR(run(machine, options).update_s, parameters * sgd, 0.01 * parameters * sgd);
  options.rule = kernels::UpdateRule::kAdamW;
  options.method = Method::kSmartComp;
  const double pairs =
      pipeline_seconds(device.kernel, {.planes = 3, .gradient_bytes = 0.08, .values = 0.01});
  EXPECT_NEAR(run(machine, options).update_s, parameters * pairs, 0.01 * parameters * pairs);
}

TEST(FpgaPipeline, WhatTheKernelsDoNotKnowIsRefused) {
  const Machine machine = machine_with_kernels();
  const auto shape = model_preset("gpt2-4.0B");
  ASSERT_TRUE(shape.ok());
  StepOptions options;
  options.format = base::StateFormat::kQ8;
  EXPECT_EQ(simulate_step(*shape, machine, options).status().code(), base::ErrorCode::kUnsupported);
  options.format = base::StateFormat::kF32;
  options.rule = kernels::UpdateRule::kLion;
  EXPECT_EQ(simulate_step(*shape, machine, options).status().code(), base::ErrorCode::kUnsupported);
}

TEST(FpgaPipeline, AMachineFileGivesRatesOrCycles) {
  Machine machine = machine_with_kernels();
  machine.devices.front().update_bytes_per_s = 8e9;
  EXPECT_NE(check_machine(machine).to_string().find("kernel_clock_hz"), std::string::npos);
  machine = machine_with_kernels();
  machine.devices.front().kernel.bank_bytes_per_s = 0;
  EXPECT_FALSE(check_machine(machine).ok());
  EXPECT_EQ(machine_with_kernels().can_update(), true);
}

}  // namespace
}  // namespace smartinf::sim
