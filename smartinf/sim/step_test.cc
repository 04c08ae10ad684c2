#include "smartinf/sim/step.h"

#include <cmath>
#include <ctime>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_timing.h"

namespace smartinf::sim {
namespace {

using kernels::UpdateRule;
using plan::Overlap;

constexpr std::array kMethods{Method::kBaseline, Method::kSmart, Method::kSmartOver,
                              Method::kSmartComp};
constexpr double kEndless = 1e18;

/// So many devices, all of the first kind it has.
Machine with_devices(Machine machine, uint32_t devices) {
  machine.devices.resize(1);
  machine.devices.front().count = devices;
  return machine;
}
Machine paper_machine(uint32_t devices) {
  auto machine = load_machine("smartssd-a5000");
  EXPECT_TRUE(machine.ok()) << machine.status().to_string();
  return with_devices(*machine, devices);
}
ModelShape model(std::string_view name) {
  auto found = model_preset(name);
  EXPECT_TRUE(found.ok());
  return *found;
}
StepTimes run(const ModelShape& shape, const Machine& machine, const StepOptions& options) {
  auto times = simulate_step(shape, machine, options);
  EXPECT_TRUE(times.ok()) << times.status().to_string();
  return times.ok() ? *times : StepTimes{};
}

TEST(Step, BytesOnTheHostLinkAreTableOneExactly) {
  for (const Method method : kMethods) {
    for (const UpdateRule rule :
         {UpdateRule::kAdamW, UpdateRule::kSgdMomentum, UpdateRule::kAdagrad}) {
      for (const uint32_t devices : {1u, 3u, 7u, 10u}) {
        StepOptions options;
        options.method = method;
        options.rule = rule;
        const ModelShape shape = model("gpt2-1.6B");
        const StepTimes times = run(shape, paper_machine(devices), options);
        const auto p = static_cast<double>(shape.parameters());
        // Without the host's update weights come up and gradients go down, 4 bytes each.
        const double planes = static_cast<double>(kernels::rule_planes(rule).size());
        const bool on_host = method == Method::kBaseline;
        const double moved = on_host ? (4 * planes + 4) * p : 4 * p;
        EXPECT_EQ(static_cast<double>(times.bytes.host_link_up), moved);
        if (method == Method::kSmartComp) {
          // Whole (index, value) pairs on every device: at most one pair short on each.
          const auto down = static_cast<double>(times.bytes.host_link_down);
          EXPECT_LE(down, options.ratio * moved);
          EXPECT_GT(down, options.ratio * moved - 8.0 * (devices + 1));
        } else {
          EXPECT_EQ(static_cast<double>(times.bytes.host_link_down), moved);
        }
        const uint64_t state = rule == UpdateRule::kAdamW ? 12 : 8;
        const uint64_t gradient = times.bytes.drive_written - state * shape.parameters();
        EXPECT_EQ(times.bytes.drive_read, state * shape.parameters() + gradient)
            << "what is written of gradients is read again";
        EXPECT_EQ(times.bytes.gpu_link_down, 4 * shape.parameters()) << "weights twice, 16-bit";
      }
    }
  }
}

TEST(Step, AHostThatSelectsGetsGradientsWholeAndSendsThemPacked) {
  auto machine = load_machine("workstation-gen5");
  ASSERT_TRUE(machine.ok());
  const ModelShape shape = model("llama3-8B");
  const auto p = static_cast<double>(shape.parameters());
  StepOptions options;
  options.subgroup_elements = 1 << 20;
  const StepTimes whole = run(shape, *machine, options);
  options.method = Method::kSmartComp;
  options.residual_every = 0;
  const StepTimes packed = run(shape, *machine, options);
  EXPECT_EQ(packed.bytes.gpu_link_up, whole.bytes.gpu_link_up);
  EXPECT_EQ(packed.bytes.drive_written, whole.bytes.drive_written);
  // docs/smartcomp.md: signs of 8 % are 0.061 bytes a parameter. docs/format.md: row and column
  // factors take 0.004 more for matrices of 4096 columns, 0.014 for those of 14336.
  StepOptions sgd = options;
  sgd.rule = UpdateRule::kSgdMomentum;
  const StepTimes signs = run(shape, *machine, sgd);
  EXPECT_NEAR(static_cast<double>(signs.bytes.host_link_down) / p, 0.061, 0.001);
  EXPECT_EQ(signs.bytes.host_link_up, whole.bytes.host_link_up);
  const uint64_t factors = packed.bytes.host_link_down - signs.bytes.host_link_down;
  EXPECT_GT(static_cast<double>(factors) / p, 0.004);
  EXPECT_LT(static_cast<double>(factors) / p, 0.014);
  // Samples in bf16: 32 of 4096 rows or columns, 20 of 1024, 72 of 14336, 517 of 128256.
  const double layer =
      2 * (2 * 32 * 4096) + 2 * (20 * 4096 + 32 * 1024) + 3 * (72 * 4096 + 32 * 14336);
  const double samples = 32 * (layer + 2 * 4128) + 2 * (517 * 4096 + 32 * 128256) + 4128;
  EXPECT_NEAR(static_cast<double>(packed.bytes.host_link_up - whole.bytes.host_link_up),
              2 * samples, 0.02 * samples)
      << "with several devices the place of a subgroup is not exact";
  options.residual_every = 4;
  const StepTimes kept = run(shape, *machine, options);
  EXPECT_NEAR(static_cast<double>(kept.bytes.host_link_down - packed.bytes.host_link_down) / p, 0.5,
              1e-6);
  EXPECT_NEAR(static_cast<double>(kept.bytes.drive_written - packed.bytes.drive_written) / p, 0.5,
              1e-6);
  // Nothing is read before all is selected, nor selected before all of backward is there.
  EXPECT_LT(std::abs(packed.backward_s / whole.backward_s - 1), 0.02);
  machine->host.step_ahead_params_per_s = 0;
  machine->host.select_params_per_s = 1e18;
  const StepTimes alone = run(shape, *machine, options);
  machine->host.select_params_per_s = p / 100;
  EXPECT_NEAR(run(shape, *machine, options).total_s, alone.total_s + 100, 0.5);
  options.overlap = Overlap::kLate;
  EXPECT_GT(run(shape, *machine, options).total_s, alone.backward_s + alone.forward_s + 100);
  options.overlap = Overlap::kEarly;
  EXPECT_EQ(simulate_step(shape, *machine, options).status().code(), base::ErrorCode::kUnsupported);
  options.overlap = Overlap::kNone;
  machine->host.select_params_per_s = 5e9;
  machine->host.step_ahead_params_per_s = p / 100;
  EXPECT_GT(run(shape, *machine, options).update_s, 100);
  options.rule = UpdateRule::kSgdMomentum;
  EXPECT_LT(run(shape, *machine, options).update_s, 100) << "of Adam's rule only";
}

TEST(Step, IsTheSameToTheBitEveryTime) {
  for (const Method method : kMethods) {
    StepOptions options;
    options.method = method;
    const StepTimes once = run(model("gpt2-4.0B"), paper_machine(6), options);
    const StepTimes again = run(model("gpt2-4.0B"), paper_machine(6), options);
    EXPECT_EQ(once.total_s, again.total_s);
    EXPECT_EQ(once.backward_s, again.backward_s);
    EXPECT_EQ(once.bound_by, again.bound_by);
  }
}

TEST(Step, A33BStepOnTenDevicesIsFast) {
  const ModelShape shape = model("gpt2-33.0B");
  const Machine machine = paper_machine(10);
  const std::clock_t start = std::clock();
  const StepTimes times = run(shape, machine, {});
  base::expect_in_time(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 1.0);
  EXPECT_GT(times.events, 3000u);
  EXPECT_LT(times.events, 5000u);
}

TEST(Step, WithOnlyDrivesLeftTheUpdateIsTheirTime) {
  // Everything else without limit, deep slots: what remains is state and gradient over the drives.
  Machine machine = paper_machine(4);
  machine.host.link_bytes_per_s = machine.host.copy_bytes_per_s = kEndless;
  DeviceGroup& device = machine.devices.front();
  device.link_bytes_per_s = device.update_bytes_per_s = device.weights_bytes_per_s = kEndless;
  machine.host.weights_bytes_per_s = kEndless;
  machine.software.update_start_s = 0;
  device.mixed_efficiency = 1;
  machine.software.overlapped = plan::ScheduleVariant::kOverlapped;
  StepOptions options;
  options.slots = 8;
  options.subgroup_elements = 4'000'000;
  const ModelShape shape = model("gpt2-4.0B");
  const StepTimes times = run(shape, machine, options);
  const double p = static_cast<double>(shape.parameters());
  const double expected = p * (16 / device.read_bytes_per_s + 12 / device.write_bytes_per_s) / 4;
  EXPECT_NEAR(times.update_s / expected, 1.0, 0.01);  // filling and draining the slots
  EXPECT_EQ(times.bound_by, "drives");
}

TEST(Step, WhatFindsASlotFreeIsReadBesideBackward) {
  // As above, but with gradients in memory and a slot for all, a half or an eighth of the state.
  Machine machine = paper_machine(1);
  machine.host.link_bytes_per_s = machine.host.copy_bytes_per_s = kEndless;
  machine.gpu.peak_flops = 1e9;  // backward takes longer than reading everything
  machine.software.gradient_spilled = false;
  DeviceGroup& device = machine.devices.front();
  device.link_bytes_per_s = device.update_bytes_per_s = device.weights_bytes_per_s = kEndless;
  machine.host.weights_bytes_per_s = kEndless;
  machine.software.update_start_s = 0;
  device.mixed_efficiency = 1;
  StepOptions options;
  const ModelShape shape = model("gpt2-4.0B");
  options.subgroup_elements = (shape.parameters() + 63) / 64;
  const double p = static_cast<double>(shape.parameters());
  const double read_s = 12 * p / device.read_bytes_per_s;
  const double write_s = 12 * p / device.write_bytes_per_s;
  for (const double share : {1.0, 0.5, 0.125}) {
    options.slots = static_cast<uint32_t>(64 * share);
    machine.software.overlapped = plan::ScheduleVariant::kOverlapped;
    const double expected = read_s * (1 - share) + write_s;
    EXPECT_NEAR(run(shape, machine, options).update_s / expected, 1.0, 0.01) << share;
  }
  machine.software.overlapped = plan::ScheduleVariant::kPaper;
  EXPECT_GT(run(shape, machine, options).update_s, (read_s + write_s) * 0.99) << "not in the paper";
}

TEST(Step, APipelineTakesAsLongForAnElementWithAnyRule) {
  Machine machine = paper_machine(1);
  machine.host.link_bytes_per_s = machine.host.weights_bytes_per_s = kEndless;
  machine.software.update_start_s = 0;
  DeviceGroup& device = machine.devices.front();
  device.link_bytes_per_s = device.weights_bytes_per_s = kEndless;
  device.read_bytes_per_s = device.write_bytes_per_s = kEndless;
  StepOptions options;
  options.method = Method::kSmart;
  const ModelShape shape = model("gpt2-4.0B");
  const auto p = static_cast<double>(shape.parameters());
  for (const auto rule : {kernels::UpdateRule::kAdamW, kernels::UpdateRule::kSgdMomentum}) {
    options.rule = rule;
    EXPECT_NEAR(run(shape, machine, options).update_s, 16 * p / device.update_bytes_per_s, 0.01);
  }
  // Four pairs in a hundred more than those in the rate.
  options.method = Method::kSmartComp;
  options.ratio = 0.02;
  const double usual_s = run(shape, machine, options).update_s;
  options.ratio = 0.1;
  EXPECT_NEAR(run(shape, machine, options).update_s - usual_s, 0.04 * p / device.pairs_per_s, 0.01);
}

TEST(Step, ThePapersStackDealsWholeMatricesInRounds) {
  // Matrices of 4e7 elements or more: the embedding, then positions with query, key and value; and
  // in each layer the output with the inner matrix in (5 in units of the width squared), that out
  // (4) and query, key and value (3). Of each six, one is of 5; the last round has 4, and what is
  // no matrix.
  const ModelShape shape = model("gpt2-8.4B");
  const double square = 5120.0 * 5120;
  const double in_a_row = 50257 * 5120.0 + 12 * 5 * square + 4 * square;
  Machine machine = paper_machine(6);
  machine.software.update_start_s = 0;
  DeviceGroup& device = machine.devices.front();
  device.read_bytes_per_s = 1e9;
  device.write_bytes_per_s = device.update_bytes_per_s = device.link_bytes_per_s = kEndless;
  device.weights_bytes_per_s = machine.host.weights_bytes_per_s = kEndless;
  machine.host.link_bytes_per_s = kEndless;
  for (const Method method : {Method::kSmart, Method::kSmartOver}) {
    StepOptions options;
    options.method = method;
    EXPECT_NEAR(run(shape, machine, options).update_s, 16 * in_a_row / 1e9, 0.1);
  }
  // An embedding of three parts: all 14 rounds have a subgroup of 5.
  device.memory_bytes = 2'000'000'000;
  EXPECT_NEAR(run(shape, machine, {}).update_s, 16 * 14 * 5 * square / 1e9, 0.1);
  // 0.33 B parameters are nine subgroups: two for the first three of six devices, and as long as
  // if all six had two.
  const StepTimes six = run(model("bert-0.34B"), paper_machine(6), {});
  const StepTimes five = run(model("bert-0.34B"), paper_machine(5), {});
  const StepTimes nine = run(model("bert-0.34B"), paper_machine(9), {});
  EXPECT_NEAR(five.update_s, six.update_s, 0.1 * six.update_s);
  EXPECT_LT(nine.update_s, 0.75 * six.update_s);
}

TEST(Step, WithASlowHostLinkTheUpdateIsTheLinksTime) {
  Machine machine = paper_machine(10);
  machine.host.link_bytes_per_s = 0.2e9;
  machine.host.copy_bytes_per_s = kEndless;
  machine.software.overlapped = plan::ScheduleVariant::kOverlapped;
  StepOptions options;
  options.slots = 8;
  const ModelShape shape = model("gpt2-4.0B");
  const StepTimes times = run(shape, machine, options);
  const double expected = 4.0 * static_cast<double>(shape.parameters()) / 0.2e9;
  EXPECT_NEAR(times.update_s / expected, 1.0, 0.03);
  EXPECT_EQ(times.bound_by, "host link up");
}

TEST(Step, MoreNeverHurts) {
  const ModelShape shape = model("gpt2-8.4B");
  for (const Method method : kMethods) {
    StepOptions options;
    options.method = method;
    double before = 1e9;
    for (const uint32_t devices : {1u, 2u, 4u, 8u, 16u, 64u}) {
      const double total = run(shape, paper_machine(devices), options).total_s;
      EXPECT_LE(total, before * 1.0001) << method_name(method) << " " << devices;
      before = total;
    }
    Machine faster = paper_machine(6);
    const double base = run(shape, faster, options).total_s;
    faster.host.copy_bytes_per_s *= 2;
    faster.devices.front().read_bytes_per_s *= 2;
    EXPECT_LT(run(shape, faster, options).total_s, base);
  }
}

TEST(Step, AnOverlappedUpdateNeverCostsAndNeverBeatsTheDrives) {
  auto workstation = load_machine("workstation-gen4");
  ASSERT_TRUE(workstation.ok());
  const ModelShape shape = model("llama3-3B");
  const DeviceGroup& device = workstation->devices.front();
  const double drives_s = static_cast<double>(shape.parameters()) * 12 / 4 *
                          (1 / device.read_bytes_per_s + 1 / device.write_bytes_per_s);
  for (const bool weights_stay : {false, true}) {
    StepOptions options;
    if (weights_stay) options.weights = ResidentStep{};
    const StepTimes apart = run(shape, *workstation, options);
    double before_s = apart.total_s;
    for (const Overlap overlap : {Overlap::kLate, Overlap::kEarly}) {
      options.overlap = overlap;
      const StepTimes times = run(shape, *workstation, options);
      EXPECT_LT(times.total_s, before_s * 0.99) << base::enum_name(overlap);
      EXPECT_EQ(times.bytes.host_link_up, apart.bytes.host_link_up);
      EXPECT_EQ(times.bytes.drive_written, apart.bytes.drive_written);
      EXPECT_EQ(times.bytes.gpu_link_down, apart.bytes.gpu_link_down);
      before_s = times.total_s;
    }
    EXPECT_GE(before_s, drives_s * 0.999);
  }
}

TEST(Step, AWrongGuessIsDoneAgainBehindBackward) {
  auto workstation = load_machine("workstation-gen4");
  ASSERT_TRUE(workstation.ok());
  const ModelShape shape = model("llama3-3B");
  StepOptions options;
  options.weights = ResidentStep{};
  options.overlap = Overlap::kLate;
  const StepTimes late = run(shape, *workstation, options);
  options.overlap = Overlap::kEarly;
  const StepTimes right = run(shape, *workstation, options);
  options.wrong_guess = true;
  const StepTimes wrong = run(shape, *workstation, options);
  EXPECT_LT(right.total_s, late.total_s);
  EXPECT_GE(wrong.total_s, late.total_s * 0.999);
  EXPECT_GT(wrong.bytes.drive_written, right.bytes.drive_written);
  EXPECT_LE(wrong.bytes.drive_written, 2 * right.bytes.drive_written);
}

TEST(Step, WithComputingForEverLongAnEarlyUpdateTakesNoTimeOfItsOwn) {
  auto workstation = load_machine("workstation-gen4");
  ASSERT_TRUE(workstation.ok());
  workstation->gpu.peak_flops /= 100;
  workstation->software.subgroup_elements = 1 << 20;
  const ModelShape shape = model("llama3-3B");
  StepOptions options;
  options.weights = ResidentStep{};
  const StepTimes apart = run(shape, *workstation, options);
  options.overlap = Overlap::kEarly;
  // But for the first layer's subgroups, which become complete last.
  EXPECT_NEAR(run(shape, *workstation, options).total_s, apart.forward_s + apart.backward_s,
              0.005 * apart.total_s);
  options.overlap = Overlap::kLate;
  // But for the first layer's, for which forward waits.
  EXPECT_NEAR(run(shape, *workstation, options).total_s, apart.forward_s + apart.backward_s,
              0.02 * apart.total_s);
}

TEST(Step, WithoutAGpuComputingAndUpdatingShareTheCores) {
  auto machine = load_machine("workstation-gen4");
  ASSERT_TRUE(machine.ok());
  machine->gpu.name = "none";
  machine->gpu.peak_flops = 2e12;
  DeviceGroup& device = machine->devices.front();
  device.read_bytes_per_s = device.write_bytes_per_s = kEndless;
  device.update_bytes_per_s = 1e9;
  const ModelShape shape = model("llama3-1B");
  StepOptions options;
  const StepTimes apart = run(shape, *machine, options);
  options.overlap = Overlap::kEarly;
  const StepTimes aside = run(shape, *machine, options);
  device.on_host_cores = true;
  EXPECT_LT(aside.total_s, apart.total_s - 0.5 * apart.update_s);
  const StepTimes shared = run(shape, *machine, options);
  // The cores have as much to do as one after another, but for what does not compute: gradients.
  EXPECT_NEAR(shared.total_s, apart.total_s, 0.05 * apart.total_s);
}

TEST(Step, WhatDevicesMoveTakesTimeOfCoresThatCompute) {
  auto machine = load_machine("server-25gbe");
  ASSERT_TRUE(machine.ok());
  machine->gpu.name = "none";
  machine->gpu.peak_flops = 2e12;
  machine->network.bytes_per_s = kEndless;
  DeviceGroup& device = machine->devices.front();
  device.link_bytes_per_s = device.update_bytes_per_s = kEndless;
  device.read_bytes_per_s = device.write_bytes_per_s = kEndless;
  const ModelShape shape = model("llama3-1B");
  const auto bytes = static_cast<double>(4 * shape.parameters());  // 2 down, 2 up
  for (const Overlap overlap : {Overlap::kNone, Overlap::kLate}) {
    StepOptions options;
    options.overlap = overlap;
    machine->network.cores_bytes_per_s = 0;
    const double without_s = run(shape, *machine, options).total_s;
    machine->network.cores_bytes_per_s = 0.5e9;
    EXPECT_NEAR(run(shape, *machine, options).total_s, without_s + bytes / 0.5e9, 0.03 * without_s)
        << base::enum_name(overlap);
  }
  device.on_host_cores = true;  // then their drives as well
  const double without_s = run(shape, *machine, {}).total_s;
  device.cores_bytes_per_s = 4e9;
  EXPECT_NEAR(run(shape, *machine, {}).total_s, without_s + 6 * bytes / 4e9, 0.03 * without_s);
  machine->gpu.name = "A100";
  const double on_gpu_s = run(shape, *machine, {}).total_s;
  machine->network.cores_bytes_per_s = device.cores_bytes_per_s = 0;
  EXPECT_EQ(run(shape, *machine, {}).total_s, on_gpu_s);
}

TEST(Step, EarlyUpdatesNeedSlotsBesideSpilledGradients) {
  StepOptions options;
  options.overlap = Overlap::kEarly;
  const auto refused = simulate_step(model("gpt2-4.0B"), paper_machine(2), options);
  EXPECT_EQ(refused.status().code(), base::ErrorCode::kUnsupported);
  options.slots = 8;
  EXPECT_TRUE(simulate_step(model("gpt2-4.0B"), paper_machine(2), options).ok());
}

TEST(Step, StateInMemoryIsNotRead) {
  const ModelShape shape = model("gpt2-1.6B");
  Machine machine = paper_machine(3);
  machine.software.overlapped =
      plan::ScheduleVariant::kOverlapped;  // the paper's has no such cache
  for (const Method method : {Method::kBaseline, Method::kSmart, Method::kSmartOver}) {
    StepOptions options;
    options.method = method;
    options.subgroup_elements = 4'000'000;
    const StepTimes none = run(shape, machine, options);
    const uint64_t state = 12 * shape.parameters();
    for (const uint64_t part : {4u, 2u, 1u}) {
      options.state_cache_bytes = state / part;
      const StepTimes cached = run(shape, machine, options);
      const uint64_t saved = none.bytes.drive_read - cached.bytes.drive_read;
      EXPECT_LE(saved, options.state_cache_bytes);
      EXPECT_GE(saved + 3 * 12 * options.subgroup_elements, options.state_cache_bytes);
      EXPECT_EQ(cached.bytes.drive_written, none.bytes.drive_written);
      EXPECT_LT(cached.update_s, none.update_s);
      if (method == Method::kBaseline) {
        EXPECT_EQ(none.bytes.host_link_up - cached.bytes.host_link_up, saved);
      }
    }
  }
}

TEST(Step, SmallerStatesAndGradientsTakeLessTime) {
  const ModelShape shape = model("gpt2-4.0B");
  StepOptions options;
  const double f32 = run(shape, paper_machine(2), options).update_s;
  options.format = base::StateFormat::kBf16;
  const double bf16 = run(shape, paper_machine(2), options).update_s;
  options.format = base::StateFormat::kQ8;
  const double q8 = run(shape, paper_machine(2), options).update_s;
  EXPECT_LT(bf16, f32 * 0.85);
  EXPECT_LT(q8, bf16 * 0.95);
  EXPECT_EQ(state_bytes_per_parameter(UpdateRule::kAdamW, base::StateFormat::kF32), 12);
  EXPECT_EQ(state_bytes_per_parameter(UpdateRule::kAdamW, base::StateFormat::kBf16), 8);
  EXPECT_NEAR(state_bytes_per_parameter(UpdateRule::kAdamW, base::StateFormat::kQ8), 6.03, 0.01);
  EXPECT_NEAR(state_bytes_per_parameter(UpdateRule::kAdamW,
                                        {base::MomentFormat::kQ8, base::MasterFormat::kM24}),
              5.03, 0.01);
  options = {};
  options.method = Method::kSmartComp;
  double before = 0;
  for (const double ratio : {0.01, 0.02, 0.1, 0.5}) {
    options.ratio = ratio;
    const double total = run(shape, paper_machine(2), options).total_s;
    EXPECT_GT(total, before);
    before = total;
  }
}

/// As `smartinf train` on a workstation with two drives, all weights from there.
StepOptions all_streamed(const ModelShape& shape) {
  StepOptions options;
  options.accumulation = 3;
  StreamedStep& streamed = options.weights.emplace<StreamedStep>();
  streamed.units = shape.units();
  streamed.placement = {0, 0, 3, 2};
  return options;
}

TEST(Step, StreamedWeightsAreBytesCountedByHand) {
  const Machine machine = with_devices(*load_machine("workstation-gen4"), 2);
  const ModelShape shape = model("llama3-3B");
  const uint64_t p = shape.parameters();
  StepOptions options = all_streamed(shape);
  options.overlap = Overlap::kLate;
  const StepBytes late = run(shape, machine, options).bytes;
  EXPECT_EQ(late.drive_read, (12 + 4) * p) << "the state, and master weights for backward";
  EXPECT_EQ(late.drive_written, 12 * p);
  EXPECT_EQ(late.host_link_up, (2 + 2) * p) << "forward's from the update, and backward's";
  EXPECT_EQ(late.host_link_down, 2 * p) << "gradients";
  EXPECT_EQ(late.gpu_link_down, (2 + 2) * p) << "once each for all micro batches";
  EXPECT_EQ(late.gpu_link_up, 2 * p);
  for (const Overlap overlap : {Overlap::kNone, Overlap::kEarly}) {
    options.overlap = overlap;
    const StepBytes other = run(shape, machine, options).bytes;
    EXPECT_EQ(other.drive_read, (12 + 4 + 4) * p) << base::enum_name(overlap);
    EXPECT_EQ(other.drive_written, 12 * p);
    EXPECT_EQ(other.host_link_up, (2 + 2) * p) << "none from the update";
  }
  options.overlap = Overlap::kLate;
  options.gradient_memory_bytes = 0;
  const StepBytes spilled = run(shape, machine, options).bytes;
  EXPECT_EQ(spilled.drive_read, (12 + 4 + 2) * p);
  EXPECT_EQ(spilled.drive_written, (12 + 2) * p);
  options.gradient_memory_bytes = p;
  EXPECT_EQ(run(shape, machine, options).bytes.drive_written, (12 + 1) * p) << "half of them";
}

TEST(Step, StreamedWeightsAreMadeAsForwardAsksForThemOnThePapersStackToo) {
  const ModelShape shape = model("qwen3-32B");  // its rounds and forward would wait for each other
  StepOptions options = all_streamed(shape);
  for (const Overlap overlap : {Overlap::kNone, Overlap::kLate}) {
    options.overlap = overlap;
    EXPECT_GT(run(shape, paper_machine(10), options).total_s, 0) << base::enum_name(overlap);
  }
}

TEST(Step, TheNextUpdateWaitsUntilWritesAreSynced) {
  Machine machine = *load_machine("workstation-gen4");
  DeviceGroup& device = machine.devices.front();
  const ModelShape shape = model("llama3-1B");
  const double written = static_cast<double>(12 * shape.parameters()) / device.count;
  StepOptions options;
  options.weights = ResidentStep{};
  for (const Overlap overlap : {Overlap::kNone, Overlap::kLate, Overlap::kEarly}) {
    SCOPED_TRACE(base::enum_name(overlap));
    options.overlap = Overlap::kNone;
    device.sync_bytes_per_s = 0;
    const double update_s = run(shape, machine, options).update_s;
    options.overlap = overlap;
    const StepTimes at_once = run(shape, machine, options);
    // Beside the computing of the next step there is time for it,
    device.sync_bytes_per_s = written / (0.01 * at_once.backward_s);
    EXPECT_NEAR(run(shape, machine, options).total_s, at_once.total_s, 0.02 * at_once.total_s);
    // but not for this: then step follows step as update and sync do.
    const double sync_s = 5 * at_once.total_s;
    device.sync_bytes_per_s = written / sync_s;
    const double total_s = run(shape, machine, options).total_s;
    EXPECT_GT(total_s, sync_s + 0.5 * update_s);
    EXPECT_LT(total_s, sync_s + at_once.total_s);
  }
}

TEST(Step, EveryMethodWaitsForTheSync) {
  Machine machine = *load_machine("workstation-gen4");
  machine.host.select_params_per_s = 1e9;
  machine.software.gradient_spilled = false;
  const ModelShape shape = model("llama3-1B");
  for (const Method method : kMethods) {
    for (const Overlap overlap : {Overlap::kNone, Overlap::kLate}) {
      SCOPED_TRACE(fmt::format("{} {}", method_name(method), base::enum_name(overlap)));
      StepOptions options;
      options.method = method;
      options.overlap = overlap;
      options.weights = ResidentStep{};
      machine.devices.front().sync_bytes_per_s = 0;
      const StepTimes at_once = run(shape, machine, options);
      const double written = static_cast<double>(12 * shape.parameters()) / machine.device_count();
      const double sync_s = 5 * at_once.total_s;
      machine.devices.front().sync_bytes_per_s = written / sync_s;
      const StepTimes behind = run(shape, machine, options);
      EXPECT_GT(behind.total_s, sync_s + 0.5 * at_once.update_s);
      EXPECT_LT(behind.total_s, 1.1 * sync_s + at_once.total_s);  // a residual is written as well
      EXPECT_GT(behind.update_s, at_once.update_s) << "the wait is the update's";
      EXPECT_NEAR(behind.backward_s, at_once.backward_s, 0.1 * at_once.backward_s);
    }
  }
}

TEST(Step, StreamedWeightsAreReadWhenTheyAreSynced) {
  Machine machine = with_devices(*load_machine("workstation-gen4"), 2);
  const ModelShape shape = model("llama3-3B");
  StepOptions options = all_streamed(shape);
  options.gradient_memory_bytes = 0;
  options.slots = 8;  // for early
  const double written = static_cast<double>((12 + 2) * shape.parameters()) / 2;
  constexpr double kSyncS = 2.5;
  for (const Overlap overlap : {Overlap::kNone, Overlap::kEarly}) {
    options.overlap = overlap;
    machine.devices.front().sync_bytes_per_s = 0;
    const double at_once_s = run(shape, machine, options).total_s;
    machine.devices.front().sync_bytes_per_s = written / kSyncS;
    EXPECT_NEAR(run(shape, machine, options).total_s, at_once_s + kSyncS, 1e-3 * at_once_s)
        << base::enum_name(overlap) << ": forward's first";
  }
  // Forward's come from the update, and those of backward wait for what is left of the sync.
  options.overlap = Overlap::kLate;
  machine.devices.front().sync_bytes_per_s = 0;
  const double at_once_s = run(shape, machine, options).total_s;
  machine.devices.front().sync_bytes_per_s = written / kSyncS;
  const double total_s = run(shape, machine, options).total_s;
  EXPECT_GT(total_s, at_once_s);
  EXPECT_LT(total_s, at_once_s + 1.001 * kSyncS);
}

TEST(Step, UnitsThatStayAreNotRead) {
  const Machine machine = with_devices(*load_machine("workstation-gen4"), 2);
  const ModelShape shape = model("llama3-3B");
  const uint64_t p = shape.parameters();
  StepOptions options = all_streamed(shape);
  std::get<StreamedStep>(options.weights).placement.in_memory = 6;
  std::get<StreamedStep>(options.weights).placement.on_accelerator = 2;
  const uint64_t stays = std::get<StreamedStep>(options.weights).units[5].end();
  const uint64_t near = std::get<StreamedStep>(options.weights).units[1].end();
  for (const auto& [overlap, times] : {std::pair{Overlap::kLate, 1}, {Overlap::kNone, 2}}) {
    options.overlap = overlap;
    const StepBytes bytes = run(shape, machine, options).bytes;
    EXPECT_EQ(bytes.drive_read, 12 * p + 4 * times * (p - stays)) << base::enum_name(overlap);
    EXPECT_NEAR(static_cast<double>(bytes.host_link_up),
                static_cast<double>(4 * (p - stays) + 2 * stays), 64);
    EXPECT_EQ(bytes.gpu_link_down, 4 * (p - near) + 2 * near);
  }
}

TEST(Step, SpooledInputsGoToTheDrivesAndComeBack) {
  const Machine machine = with_devices(*load_machine("workstation-gen4"), 2);
  const ModelShape shape = model("llama3-3B");
  StepOptions options = all_streamed(shape);
  const StepTimes none = run(shape, machine, options);
  std::get<StreamedStep>(options.weights).input_bytes = 2 * shape.tokens() * shape.hidden;
  std::get<StreamedStep>(options.weights).inputs_near = false;
  std::get<StreamedStep>(options.weights).inputs_spooled =
      7;  // of three micro batches: two units and a third of one
  const StepTimes some = run(shape, machine, options);
  const uint64_t input = std::get<StreamedStep>(options.weights).input_bytes;
  EXPECT_EQ(some.bytes.drive_written, none.bytes.drive_written + 7 * input);
  EXPECT_EQ(some.bytes.drive_read, none.bytes.drive_read + 7 * input);
  const uint64_t inputs = 3 * (std::get<StreamedStep>(options.weights).units.size() - 1);
  EXPECT_EQ(some.bytes.gpu_link_up, none.bytes.gpu_link_up + inputs * input);
  EXPECT_EQ(some.bytes.gpu_link_down, none.bytes.gpu_link_down + inputs * input);
  EXPECT_GE(some.total_s, none.total_s);
}

TEST(Step, ALateUpdateGivesStreamedWeightsForLessTime) {
  const Machine machine = with_devices(*load_machine("workstation-gen4"), 2);
  const ModelShape shape = model("llama3-3B");
  StepOptions options = all_streamed(shape);
  const double apart = run(shape, machine, options).total_s;
  options.overlap = Overlap::kLate;
  const StepTimes late = run(shape, machine, options);
  EXPECT_LT(late.total_s, apart);
  const DeviceGroup& device = machine.devices.front();
  EXPECT_GT(late.total_s, static_cast<double>(shape.parameters()) / 2 *
                              (16 / device.read_bytes_per_s + 12 / device.write_bytes_per_s));
}

TEST(Step, RefusesToStreamWhatTheEngineDoesNot) {
  const Machine machine = *load_machine("workstation-gen4");
  const ModelShape shape = model("llama3-3B");
  StepOptions options = all_streamed(shape);
  for (const Method method : {Method::kBaseline, Method::kSmartComp}) {
    options.method = method;
    EXPECT_EQ(simulate_step(shape, machine, options).status().code(),
              base::ErrorCode::kUnsupported);
  }
  options.method = Method::kSmartOver;
  std::get<StreamedStep>(options.weights).units.pop_back();
  EXPECT_EQ(simulate_step(shape, machine, options).status().code(),
            base::ErrorCode::kInvalidArgument);
}

TEST(Step, TracesEveryTaskInsideTheStep) {
  StepOptions options;
  options.trace = true;
  const StepTimes times = run(model("gpt2-1.6B"), paper_machine(2), options);
  EXPECT_GT(times.spans.size(), 200u);
  for (const Span& span : times.spans) {
    EXPECT_GE(span.start_s, 0);
    EXPECT_GT(span.end_s, span.start_s);
    EXPECT_LE(span.end_s, times.total_s * (1 + 1e-9));
  }
}

TEST(Step, RefusesWhatCannotBe) {
  StepOptions options;
  options.method = Method::kSmartComp;
  options.ratio = 1.5;
  auto result = simulate_step(model("gpt2-4.0B"), paper_machine(2), options);
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.status().to_string().find("ratio"), std::string::npos);
  options.ratio = std::nan("");
  EXPECT_FALSE(simulate_step(model("gpt2-4.0B"), paper_machine(2), options).ok());
  options = {};
  EXPECT_FALSE(simulate_step(model("gpt2-4.0B"), paper_machine(0), options).ok());
  Machine plain = paper_machine(2);
  plain.devices.front().update_bytes_per_s = 0;
  result = simulate_step(model("gpt2-4.0B"), plain, options);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), base::ErrorCode::kUnsupported);
  ModelShape empty = model("gpt2-4.0B");
  empty.layers = 0;
  EXPECT_FALSE(simulate_step(empty, paper_machine(2), options).ok());
  options.subgroup_elements = 1;
  EXPECT_FALSE(simulate_step(model("gpt2-4.0B"), paper_machine(2), options).ok());
}

}  // namespace
}  // namespace smartinf::sim
