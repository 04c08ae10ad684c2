#include "smartinf/sim/one_rank.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/plan/rank_share.h"
#include "smartinf/sim/memory_need.h"
#include "smartinf/sim/planner.h"

namespace smartinf::sim {
namespace {

using plan::Overlap;
using testing::HasSubstr;

constexpr double kEndless = 1e18;

/// A machine in which only what a test limits takes time; its cores compute.
Machine endless(uint32_t devices) {
  Machine machine = *load_machine("workstation-gen4");
  machine.gpu.name = "none";
  machine.gpu.peak_flops = machine.gpu.memory_bytes_per_s = kEndless;
  machine.host.link_bytes_per_s = machine.host.copy_bytes_per_s = kEndless;
  machine.host.memory_bytes = 0;
  machine.devices.resize(1);
  DeviceGroup& device = machine.devices.front();
  device.count = devices;
  device.read_bytes_per_s = device.write_bytes_per_s = device.link_bytes_per_s = kEndless;
  device.update_bytes_per_s = kEndless;
  device.latency_s = 0;
  device.mixed_efficiency = 1;
  machine.network.bytes_per_s = kEndless;
  machine.software.subgroup_elements = 1 << 20;  // little is read beside backward
  return machine;
}

ModelShape shape() { return *model_preset("llama3-1B"); }

StepOptions ranks(uint32_t count, uint32_t machines, uint32_t micro_batches) {
  StepOptions options;
  options.ranks = count;
  options.machines = machines;
  options.accumulation = micro_batches;
  options.weights = ResidentStep{};
  return options;
}

StepTimes run(const Machine& machine, const StepOptions& options) {
  auto times = simulate_step(shape(), machine, options);
  EXPECT_TRUE(times.ok()) << times.status().to_string();
  return times.ok() ? *times : StepTimes{};
}

void expect_bytes(uint64_t bytes, double expected, const char* what) {
  EXPECT_NEAR(static_cast<double>(bytes) / expected, 1, 1e-6) << what;
}

TEST(OneRank, SendsGradientsAndWeightsOfBytesCountedByHand) {
  const auto p = static_cast<double>(shape().parameters());
  struct Case {
    uint32_t ranks, machines, micro_batches;
    double gradients, weights;  // bytes a parameter that one rank sends
  };
  for (const Case& one : {
           Case{2, 1, 2, 2 * 1 / 2.0, 2 * 1 / 2.0},  // one micro batch each: 2 bytes of one half
           Case{2, 2, 4, 4 * 1 / 2.0, 2 * 1 / 2.0},  // of two the sum in f32
           Case{4, 2, 4, 2 * 3 / 4.0, 2 * 3 / 4.0},  // three quarters are of others
           Case{2, 1, 6, 6 * 1 / 2.0, 2 * 1 / 2.0},  // three: the sum of two, and one
       }) {
    const StepOptions options = ranks(one.ranks, one.machines, one.micro_batches);
    const StepBytes bytes = run(endless(4), options).bytes;
    expect_bytes(bytes.ranks_sent, (one.gradients + one.weights) * p, "sent");
    expect_bytes(bytes.ranks_received, (one.gradients + one.weights) * p, "received");
    expect_bytes(bytes.drive_read, 12 * p / one.ranks, "its devices' state");
    expect_bytes(bytes.host_link_down, 2 * p / one.ranks, "sums, in bf16");
    expect_bytes(bytes.host_link_up, 2 * p / one.ranks, "new weights of its devices");
  }
}

TEST(OneRank, StreamedWeightsCrossOnceMoreInBackward) {
  const auto p = static_cast<double>(shape().parameters());
  StepOptions options = ranks(2, 2, 2);
  options.weights.emplace<StreamedStep>().units = shape().units();
  std::get<StreamedStep>(options.weights).placement = {0, 0, 3, 2};
  options.overlap = Overlap::kLate;
  const StepBytes bytes = run(endless(2), options).bytes;
  expect_bytes(bytes.ranks_sent, (1 + 1 + 1) * p, "gradients, weights, weights for backward");
  expect_bytes(bytes.ranks_received, (1 + 1 + 1) * p, "received");
  expect_bytes(bytes.drive_read, (12 + 4) * p / 2, "state and master weights of half");
}

TEST(OneRank, SendingTakesTheTimeOfCoresThatCompute) {
  const auto p = static_cast<double>(shape().parameters());
  Machine machine = endless(2);
  machine.network.ranks_cores_bytes_per_s = 1e9;
  EXPECT_NEAR(run(machine, ranks(2, 2, 2)).total_s, 4 * p / 1e9, 0.01) << "2 p there, 2 p back";
  EXPECT_NEAR(run(machine, ranks(4, 2, 4)).total_s, 6 * p * (2 / 3.0) / (1e9 / 2), 0.01)
      << "two ranks of a machine have half of its cores each; a third stays there";
  // They compute meanwhile as much as is left of them.
  const double sending_s = run(machine, ranks(2, 2, 2)).total_s;
  machine.gpu.peak_flops = 1e12;
  const double both_s = run(machine, ranks(2, 2, 2)).total_s;
  machine.network.ranks_cores_bytes_per_s = 0;
  EXPECT_NEAR(both_s, run(machine, ranks(2, 2, 2)).total_s + sending_s, 0.01 * both_s);
  machine.network.ranks_cores_bytes_per_s = 1e6;
  machine.gpu.name = "some";
  machine.gpu.link_bytes_per_s = kEndless;
  EXPECT_LT(run(machine, ranks(2, 2, 2)).total_s, both_s) << "beside a GPU they do nothing else";
}

TEST(OneRank, TheNetworkTakesItsTime) {
  const auto p = static_cast<double>(shape().parameters());
  Machine machine = endless(2);
  machine.network.bytes_per_s = 1e9;
  const double two_s = run(machine, ranks(2, 2, 2)).total_s;
  EXPECT_NEAR(two_s, 2 * p / 1e9, 0.01) << "gradients, then weights: p bytes each";
  // Each of four ranks on two machines has two of its three others behind the network, which two
  // ranks of a machine share.
  EXPECT_NEAR(run(machine, ranks(4, 2, 4)).total_s, 3 * p * (2 / 3.0) / (1e9 / 2), 0.01);
  machine.network.near_bytes_per_s = 1e9;
  EXPECT_NEAR(run(machine, ranks(2, 1, 2)).total_s, 2 * p / (1e9 / 2), 0.01)
      << "what two ranks of a machine send goes through its memory";
  machine.network.latency_s = 0.25;
  const double slow_s = run(machine, ranks(2, 2, 2)).total_s;
  EXPECT_GT(slow_s, two_s + 0.5);
}

TEST(OneRank, GradientsGoWhileBackwardRuns) {
  Machine machine = endless(2);
  machine.gpu.peak_flops = 1e13;
  const double alone_s = run(machine, ranks(2, 2, 2)).total_s;
  machine.network.bytes_per_s = 20e9;
  const StepTimes times = run(machine, ranks(2, 2, 2));
  const auto p = static_cast<double>(shape().parameters());
  EXPECT_LT(p / 20e9, 0.5 * times.backward_s);
  EXPECT_NEAR(times.total_s, alone_s + p / 20e9, 0.35 * p / 20e9) << "weights wait, not gradients";
}

TEST(OneRank, MachinesShareTheUpdateAndRanksTheMicroBatches) {
  Machine machine = endless(4);
  machine.devices.front().read_bytes_per_s = machine.devices.front().write_bytes_per_s = 1e9;
  machine.gpu.peak_flops = 1e13;
  const StepTimes one = run(machine, ranks(1, 1, 4));
  const StepTimes two = run(machine, ranks(2, 2, 4));
  EXPECT_NEAR(two.update_s, one.update_s / 2, 0.03 * one.update_s) << "twice the devices";
  EXPECT_NEAR(two.forward_s, one.forward_s / 2, 0.01 * one.forward_s);
  // Two ranks of one machine share its cores and drive two of its devices each.
  const StepTimes both = run(machine, ranks(2, 1, 4));
  EXPECT_NEAR(both.forward_s, one.forward_s, 0.01 * one.forward_s);
  EXPECT_NEAR(both.update_s, one.update_s, 0.03 * one.update_s);
  machine.gpu = *gpu_preset("A100");
  machine.gpu.count = 2;
  const StepTimes gpus = run(machine, ranks(2, 1, 4));
  machine.gpu.count = 1;
  EXPECT_NEAR(gpus.forward_s, run(machine, ranks(1, 1, 2)).forward_s, 1e-6) << "a GPU each";
}

TEST(OneRank, TheOneWithTheMostDevicesIsSimulated) {
  const auto p = static_cast<double>(shape().parameters());
  const StepBytes bytes = run(endless(3), ranks(2, 1, 3)).bytes;
  expect_bytes(bytes.drive_read, 12 * p * 2 / 3, "two of three devices");
  // Two micro batches that are no node of the tree, of the others' third; and weights of its own.
  expect_bytes(bytes.ranks_sent, 4 * p / 3 + 2 * p * 2 / 3, "sent");
  expect_bytes(bytes.ranks_received, 2 * p * 2 / 3 + 2 * p / 3, "received");
  const OneRank one = one_rank(endless(3), ranks(2, 1, 3));
  EXPECT_EQ(one.machine.device_count(), 2u);
  EXPECT_EQ(one.options.accumulation, 2u);
}

TEST(OneRank, WhatTheRanksOfTrainDoNotIsRefused) {
  const auto refused = [](const StepOptions& options, const Machine& machine) {
    return simulate_step(shape(), machine, options).status().to_string();
  };
  EXPECT_THAT(refused(ranks(2, 1, 1), endless(2)), HasSubstr("1 micro batches, but there are 2"));
  EXPECT_THAT(refused(ranks(3, 2, 3), endless(2)), HasSubstr("3 ranks on 2 machines"));
  EXPECT_THAT(refused(ranks(2, 0, 3), endless(2)), HasSubstr("2 ranks on 0 machines"));
  StepOptions early = ranks(2, 1, 2);
  early.overlap = Overlap::kEarly;
  EXPECT_THAT(refused(early, endless(2)), HasSubstr("before all gradients are there"));
  StepOptions compressed = ranks(2, 1, 2);
  compressed.method = Method::kSmartComp;
  EXPECT_THAT(refused(compressed, endless(2)), HasSubstr("compress what they send each other"));
  Machine alone = endless(2);
  alone.network.bytes_per_s = 0;
  EXPECT_THAT(refused(ranks(2, 2, 2), alone), HasSubstr("no network between them"));
  EXPECT_THAT(refused(ranks(2, 1, 2), *load_machine("smartssd-a5000")), HasSubstr("paper's stack"));
}

TEST(OneRank, MemoryIsThatOfTheTrainersPlan) {
  Machine machine = endless(4);
  machine.host.process_bytes = 500'000'000;
  const ModelShape model = shape();
  const uint64_t p = model.parameters();
  const MemoryNeed one = memory_need(model, machine, ranks(1, 1, 4), {});
  const MemoryNeed two = memory_need(model, machine, ranks(2, 2, 4), {});
  const auto part = [](const MemoryNeed& need, std::string_view name) {
    uint64_t bytes = 0;
    for (const plan::MemoryPart& found : need.host_parts) {
      if (found.name == name) bytes = found.bytes;
    }
    return bytes;
  };
  // Buckets, sums, and subgroups on their way; of the buffers and gradients the half.
  const plan::RankExchange exchange{
      .elements = p, .ranks = 2, .subgroup_elements = 1 << 20, .value_bytes = 2};
  EXPECT_EQ(plan::rank_bytes(p, exchange),
            5 * (8u << 20) + 4 * ((1u << 20) + (1u << 17)) + 4 * ((2u << 20) + 2048));
  const uint64_t gradients = 2 * p;
  const char* optimizer = "optimizer: buffers and gradients";
  EXPECT_LT(part(two, optimizer), part(one, optimizer));
  EXPECT_GT(part(two, optimizer), gradients / 2 + plan::rank_bytes(p, exchange));
  EXPECT_EQ(two.drive_bytes, 2 * 12 * ((p + 7) / 8)) << "eight devices";
  machine.host.memory_bytes = 8'000'000'000;
  EXPECT_EQ(host_limit_bytes(machine, ranks(2, 1, 4)), 4'000'000'000u);
  EXPECT_EQ(host_limit_bytes(machine, ranks(2, 2, 4)), 8'000'000'000u);
}

TEST(OneRank, APlanNamesTheCommandAndTheRankOfEachDevice) {
  Machine machine = endless(2);
  PlanRequest request;
  request.options = ranks(4, 2, 4);
  ModelShape model = *model_preset("llama3-8B");
  model.batch = 1;
  const auto plan = make_plan(model, machine, request);
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  ASSERT_TRUE(plan->fits) << plan_result(*plan).text();
  EXPECT_EQ(plan->use.program, plan::TrainingProgram::kTrain);
  EXPECT_EQ(plan->uses.size(), 1u) << "Python's ranks are others";
  for (const PlanOption& option : plan->options) {
    EXPECT_NE(option.options.method, Method::kSmartComp);
    EXPECT_NE(option.options.overlap, Overlap::kEarly);
    EXPECT_NEAR(option.tokens_per_s,
                4.0 * static_cast<double>(model.sequence) / option.times.total_s, 1e-6);
  }
  const auto recipe = plan_recipe(*plan);
  ASSERT_TRUE(recipe.ok()) << recipe.status().to_string();
  EXPECT_THAT(*recipe, HasSubstr("# Start it with torchrun --nnodes 2 --node-rank N"));
  EXPECT_THAT(*recipe, HasSubstr("--nproc-per-node 2 smartinf train RECIPE"));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(*recipe, HasSubstr("smartinf\"\nrank = " + std::to_string(rank) + "\n"));
  }
  EXPECT_EQ(launch_line(ranks(2, 1, 2), "a.toml"),
            "torchrun --no-python --nproc-per-node 2 smartinf train a.toml");
  EXPECT_EQ(launch_line(ranks(1, 1, 2), "a.toml"), "");
  request.program = plan::TrainingProgram::kPython;
  EXPECT_FALSE(make_plan(model, machine, request).ok());
}

// ---- Devices behind the network.

TEST(Remote, OnlyGradientsAndWeightsCrossTheNetwork) {
  Machine machine = endless(2);
  DeviceGroup& device = machine.devices.front();
  device.remote = true;
  device.read_bytes_per_s = device.write_bytes_per_s = 80e9;
  machine.network.bytes_per_s = 2e9;
  StepOptions options;
  const StepTimes times = run(machine, options);
  const auto p = static_cast<double>(shape().parameters());
  EXPECT_EQ(times.bytes.host_link_down, 2 * shape().parameters()) << "gradients in bf16";
  EXPECT_EQ(times.bytes.host_link_up, 2 * shape().parameters()) << "weights in bf16";
  EXPECT_EQ(times.bytes.drive_read, 12 * shape().parameters()) << "at the server";
  EXPECT_NEAR(times.backward_s, 2 * p / 2e9, 0.01);
  EXPECT_NEAR(times.update_s / (2 * p / 2e9), 1, 0.05) << "the drives are faster";
  EXPECT_EQ(times.bound_by.substr(0, 7), "network");
  // The baseline drags the state over it.
  options.method = Method::kBaseline;
  EXPECT_GT(run(machine, options).update_s, 12 * p / 2e9);
}

TEST(Remote, DevicesOfAServerShareItsLinkAndOfTwoServersDoNot) {
  Machine machine = endless(4);
  machine.devices.front().remote = true;
  machine.devices.front().link_bytes_per_s = 1e9;
  const double one_server_s = run(machine, {}).total_s;
  const auto p = static_cast<double>(shape().parameters());
  EXPECT_NEAR(one_server_s, 2 * 2 * p / 1e9, 0.02);
  machine.devices.front().count = 2;
  machine.devices.push_back(machine.devices.front());
  EXPECT_NEAR(run(machine, {}).total_s, one_server_s / 2, 0.02);
  for (DeviceGroup& device : machine.devices) device.remote = false;
  EXPECT_NEAR(run(machine, {}).total_s, one_server_s / 4, 0.02) << "a link for each";
}

TEST(Remote, LatencyIsTheDevicesAndTheNetworks) {
  Machine machine = endless(1);
  machine.devices.front().remote = true;
  machine.devices.front().latency_s = 0.5;
  machine.network.latency_s = 0.25;
  StepOptions options;
  options.slots = 1;
  options.subgroup_elements = shape().parameters();
  const double gradients = static_cast<double>(shape().units().size());
  EXPECT_GE(run(machine, options).total_s, 0.75 * gradients);
}

TEST(Remote, LocalDevicesBesideThemDoNotPassTheNetwork) {
  Machine machine = endless(1);
  machine.devices.push_back(machine.devices.front());
  machine.devices.back().remote = true;
  machine.network.bytes_per_s = 1e9;
  const auto p = static_cast<double>(shape().parameters());
  EXPECT_NEAR(run(machine, {}).total_s, 2 * 2 * (p / 2) / 1e9, 0.02)
      << "half of the state is there";
}

TEST(Remote, ARecipeNamesServers) {
  Machine machine = endless(2);
  machine.devices.push_back(machine.devices.front());
  for (DeviceGroup& group : machine.devices) group.remote = true;
  ModelShape model = *model_preset("llama3-8B");
  model.batch = 1;
  const auto plan = make_plan(model, machine, {});
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  const auto recipe = plan_recipe(*plan);
  ASSERT_TRUE(recipe.ok()) << recipe.status().to_string();
  EXPECT_THAT(*recipe, HasSubstr("[remote]\ncertificate = "));
  for (const char* path :
       {"server-0:7443/drive-0", "server-0:7443/drive-1", "server-1:7443/drive-1"}) {
    EXPECT_THAT(*recipe, HasSubstr(std::string("path = \"grpc://") + path + "\"\n"));
  }
}

TEST(Remote, NeedsANetwork) {
  Machine machine = endless(1);
  machine.devices.front().remote = true;
  machine.network.bytes_per_s = 0;
  EXPECT_THAT(check_machine(machine).to_string(), HasSubstr("remote, but there is no network"));
}

}  // namespace
}  // namespace smartinf::sim
