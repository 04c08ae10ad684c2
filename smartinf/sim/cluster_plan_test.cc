#include "smartinf/sim/cluster_plan.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/sim/planner.h"

namespace smartinf::sim {
namespace {

using testing::HasSubstr;

ModelShape model_named(const char* name, uint64_t sequence = 2048) {
  auto model = model_preset(name);
  EXPECT_TRUE(model.ok());
  model->sequence = sequence;
  model->batch = 1;
  return *model;
}

Cluster boxes_of(uint32_t boxes, double gbit_s, const char* machine = "workstation-gen4") {
  auto cluster = parse_cluster("[[box]]\nname = 'box'\nranks = 1\nmachine = '" +
                                   std::string(machine) + "'\ncount = " + std::to_string(boxes) +
                                   "\n[links]\nlatency_s = 1e-4\nspread = 0.02\nrate = '" +
                                   std::to_string(gbit_s) + " Gbit/s'\n",
                               "boxes", load_machine);
  EXPECT_TRUE(cluster.ok()) << cluster.status().to_string();
  return *cluster;
}

ClusterPlan plan_of(const ModelShape& model, const Cluster& cluster, uint64_t tokens,
                    ClusterRequest request = {}) {
  request.tokens_per_step = tokens;
  auto plan = plan_cluster(model, cluster, request);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return *plan;
}

TEST(ClusterPlan, OneBoxIsTheMachineOfPlan) {
  const auto machine = load_machine("workstation-gen5");
  const ModelShape model = model_named("llama3-3B");
  PlanRequest request;
  request.options.accumulation = 16;
  request.options.weights = ResidentStep{};
  const auto plan = make_plan(model, *machine, request);
  ASSERT_TRUE(plan.ok());
  ClusterRequest asked;
  asked.micro_batch = 1;
  asked.recompute = true;
  const ClusterPlan cluster = plan_of(model, one_box(*machine, 1), 16 * 2048, asked);
  ASSERT_EQ(cluster.best.size(), 1u);
  for (const PlanOption& option : plan->options) {
    if (option.options.method != Method::kSmartOver || !option.exact) continue;
    EXPECT_DOUBLE_EQ(cluster.best[0].step_s, option.times.total_s);
    EXPECT_EQ(cluster.best[0].ranks[0].need.host_bytes, option.need.host_bytes);
    EXPECT_NEAR(cluster.best[0].cost_per_mtoken, option.cost_per_mtoken, 1e-9);
    EXPECT_DOUBLE_EQ(cluster.best[0].ranks[0].drive_life_days, option.drive_life_days);
  }
}

TEST(ClusterPlan, SlowLinksMakeStagesAndFastOnesReplicas) {
  ModelShape model = model_named("llama3-1B");
  model.tied = false;
  ClusterRequest both;
  both.all_boxes = true;
  const ClusterPlan slow = plan_of(model, boxes_of(2, 0.5), 32 * 2048, both);
  ASSERT_FALSE(slow.best.empty());
  EXPECT_EQ(slow.best[0].pipeline, 2u);
  EXPECT_EQ(slow.best[0].boundary_bytes, 2u * 32 * 2048 * 2048);
  const ClusterPlan fast = plan_of(model, boxes_of(2, 400), 32 * 2048, both);
  EXPECT_EQ(fast.best[0].pipeline, 1u);
  EXPECT_EQ(fast.best[0].replicas, 2u);
  for (const ClusterPlan* plan : {&slow, &fast}) {
    for (size_t i = 1; i < plan->best.size(); ++i) {
      EXPECT_LE(plan->best[i - 1].step_s, plan->best[i].step_s);
    }
    for (const ClusterOption& option : plan->best) {
      EXPECT_LE(option.least_s, option.step_s * 1.0001);
    }
  }
  // A step of so few tokens is that of one box.
  EXPECT_EQ(plan_of(model, boxes_of(2, 0.01), 2 * 2048).best[0].order.size(), 1u);
}

TEST(ClusterPlan, BoxesWithFastLinksAreNeighbours) {
  Cluster cluster = boxes_of(2, 1);
  cluster.boxes[1].machine.gpu.peak_flops *= 3;
  ClusterRequest request;
  request.pipeline = 2;
  const ClusterPlan plan = plan_of(model_named("llama3-1B"), cluster, 32 * 2048, request);
  const ClusterOption& best = plan.best.front();
  const auto recipe = cluster_recipe(plan, best, "mine.bin");
  ASSERT_TRUE(recipe.ok()) << recipe.status().to_string();
  EXPECT_THAT(*recipe, HasSubstr("[ranks]\npipeline = 2\n"));
  EXPECT_THAT(*recipe, HasSubstr("paths = [\"mine.bin\"]"));
  EXPECT_THAT(*recipe, HasSubstr("rank = 1\n"));
  const auto lines = cluster_launch(plan, best, "r.toml");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[1],
            "torchrun --nnodes 2 --node-rank 1 --master-addr " + cluster.boxes[best.order[0]].name +
                " --master-port 29500 --no-python --nproc-per-node 1 smartinf train r.toml");

  // Four boxes, of which the first and the third, and the second and the fourth, are near.
  Cluster pairs = boxes_of(4, 0.05);
  for (const auto& [a, b] : {std::pair(0u, 2u), std::pair(1u, 3u)}) {
    pairs.link(a, b).bytes_per_s = pairs.link(b, a).bytes_per_s = 2e9;
  }
  request.pipeline = 4;
  ModelShape untied = model_named("llama3-1B");  // a tied head is near the embedding
  untied.tied = false;
  const ClusterPlan near = plan_of(untied, pairs, 8 * 2048, request);
  const ClusterOption& found = near.best.front();
  EXPECT_TRUE(found.reordered);
  EXPECT_EQ((found.order[0] + 2) % 4, found.order[1]);
  EXPECT_THAT(order_text(near, found), HasSubstr("shorter than in the file's"));
  // Where all links are alike there is nothing to gain, whatever the noise of measuring.
  Cluster alike = boxes_of(4, 0.05);
  double noise = 1;
  for (Link& link : alike.links) link.bytes_per_s *= noise = 1 / (noise * 1.004);
  const ClusterPlan same = plan_of(untied, alike, 8 * 2048, request);
  EXPECT_FALSE(same.best.front().reordered);
  EXPECT_THAT(order_text(same, same.best.front()), HasSubstr("nothing to gain"));
}

/// The step of each division of 16 layers among two stages that can be, by the first one's layers.
std::map<uint32_t, double> steps_of_all(const ModelShape& model, const Cluster& cluster,
                                        ClusterRequest request) {
  std::map<uint32_t, double> steps;
  for (uint32_t first = 0; first <= 16; ++first) {
    request.split = fmt::format("{}, {}", first, 16 - first);
    request.tokens_per_step = 16 * 2048;
    const auto plan = plan_cluster(model, cluster, request);
    if (plan.ok() && !plan->best.empty()) steps[first] = plan->best.front().step_s;
  }
  return steps;
}

TEST(ClusterPlan, LayersAreDividedByComputingDrivesLinksAndMemory) {
  ClusterRequest request;
  request.pipeline = 2;
  request.micro_batch = 1;
  request.recompute = true;
  request.all_boxes = true;
  const ModelShape model = model_named("llama3-1B");
  const auto layers_of = [&](const char* what, const std::function<void(Box&)>& change,
                             const ClusterRequest& asked) {
    SCOPED_TRACE(what);
    Cluster cluster = boxes_of(2, 10);
    change(cluster.boxes[1]);
    const ClusterPlan plan = plan_of(model, cluster, 16 * 2048, asked);
    EXPECT_FALSE(plan.best.empty());
    if (plan.best.empty()) return 0;
    const ClusterOption& best = plan.best.front();
    // No other division is better, but for what the cost of a division leaves out.
    double least_s = best.step_s;
    std::string all;
    for (const auto& [first, step_s] : steps_of_all(model, cluster, asked)) {
      least_s = std::min(least_s, step_s);
      all += fmt::format("{}: {:.3f} s; ", first, step_s);
    }
    EXPECT_LE(best.step_s, 1.03 * least_s) << split_text(plan, best) << " of " << all;
    EXPECT_LE(best.least_s, best.step_s * 1.0001);
    return std::atoi(split_text(plan, best).c_str());
  };
  const int alike = layers_of(
      "alike", [](Box&) {}, request);
  const auto slower = [](Box& box) { box.machine.gpu.peak_flops /= 3; };
  EXPECT_GT(layers_of("computing", slower, request), alike + 2);
  const auto slow_drives = [](Box& box) {
    for (DeviceGroup& group : box.machine.devices) group.read_bytes_per_s /= 40;
  };
  EXPECT_GT(layers_of("drives", slow_drives, request), alike + 2);
  const auto small = [](Box& box) { box.machine.gpu.memory_bytes /= 8; };
  EXPECT_GT(layers_of("memory", small, request), alike + 2);
}

TEST(ClusterPlan, MoreMemoryNeverTurnsAFitIntoAMisfit) {
  const ModelShape model = model_named("llama3-8B");
  ClusterRequest request;
  request.pipeline = 4;
  request.micro_batch = 1;
  bool fitted = false;
  size_t changes = 0;
  for (uint64_t gigabytes = 8; gigabytes <= 104; gigabytes += 16) {
    Cluster cluster = boxes_of(4, 1);
    for (Box& box : cluster.boxes) {
      box.machine.host.memory_bytes = gigabytes * 1'000'000'000;
      box.machine.gpu.memory_bytes = gigabytes * 500'000'000;
    }
    const bool fits = !plan_of(model, cluster, 16 * 2048, request).best.empty();
    EXPECT_TRUE(fits || !fitted) << gigabytes;
    changes += fits != fitted ? 1 : 0;
    fitted = fits;
  }
  EXPECT_EQ(changes, 1u) << "both are among them";
}

TEST(ClusterPlan, StagesLargerThanMemoryStreamTheirWeights) {
  // 16 GB of weights, and as much of gradients.
  const ModelShape model = model_named("llama3-8B");
  for (const bool gpus : {true, false}) {
    Cluster cluster = boxes_of(2, 100);
    for (Box& box : cluster.boxes) {
      if (!gpus) box.machine.gpu.name = "none";
      box.machine.host.memory_bytes = 16'000'000'000;
      box.machine.gpu.memory_bytes = 16'000'000'000;
    }
    ClusterRequest request;
    request.pipeline = 2;
    const ClusterPlan plan = plan_of(model, cluster, 32 * 2048, request);
    ASSERT_FALSE(plan.best.empty()) << plan.lacks;
    const ClusterOption& best = plan.best.front();
    EXPECT_GT(best.chunks, 1u);
    EXPECT_TRUE(best.recompute);
    EXPECT_LE(best.least_s, best.step_s * 1.0001);
    EXPECT_EQ(best.boundary_bytes, uint64_t{2} * 32 * 2048 * 4096 * (2 * best.chunks - 1));
    for (const RankNeed& rank : best.ranks) {
      EXPECT_LE(rank.need.host_bytes, 16'000'000'000u);
      EXPECT_LE(rank.need.gpu_bytes, 16'000'000'000u);
      EXPECT_GT(rank.need.units_from_devices() + rank.need.units_from_host(), 0u);
    }
    const auto recipe = cluster_recipe(plan, best);
    ASSERT_TRUE(recipe.ok());
    EXPECT_THAT(*recipe, HasSubstr(fmt::format("pipeline = 2\nchunks = {}\n", best.chunks)));
    EXPECT_THAT(*recipe, HasSubstr("activations = \"recompute\""));
    EXPECT_THAT(option_text(plan, best), HasSubstr("chunks by turns"));
    // Where drives are slow their reading is seen.
    for (Box& box : cluster.boxes) {
      for (DeviceGroup& device : box.machine.devices) device.read_bytes_per_s /= 100;
    }
    request.chunks = best.chunks;
    request.micro_batch = best.micro_batch;
    const ClusterPlan slow = plan_of(model, cluster, 32 * 2048, request);
    ASSERT_FALSE(slow.best.empty());
    EXPECT_GT(slow.best.front().step_s, 2 * best.step_s);
  }
}

TEST(ClusterPlan, FormsThatLoseAreTriedOnlyWhereTheyAreNamed) {
  ModelShape model = model_named("llama3-1B");
  model.tied = false;
  const Cluster cluster = boxes_of(2, 0.5);
  ClusterRequest request;
  request.pipeline = 2;
  request.micro_batch = 1;
  request.all_boxes = true;
  const ClusterPlan whole = plan_of(model, cluster, 8 * 2048, request);
  ASSERT_FALSE(whole.best.empty());
  request.forms = {{"int8", [](uint64_t tokens) { return tokens * 2048; }}};
  const ClusterPlan either = plan_of(model, cluster, 8 * 2048, request);
  EXPECT_EQ(either.considered, 2 * whole.considered);
  const ClusterOption& best = either.best.front();
  EXPECT_LT(best.step_s, whole.best.front().step_s);
  EXPECT_EQ(best.compression, "int8");
  EXPECT_THAT(best.exposed, testing::ElementsAre(0u, testing::Gt(0u)));
  EXPECT_EQ(best.boundary_bytes, 8u * 2 * 2048 * 2048);
  EXPECT_EQ(best.back_bytes, best.boundary_bytes - best.exposed[1] * 2048 * 2048);
  const auto recipe = cluster_recipe(either, best);
  ASSERT_TRUE(recipe.ok());
  EXPECT_THAT(*recipe, HasSubstr("[compress]\npipeline = \"int8\"\npipeline_when = \"exposed\"\n"));
  EXPECT_THAT(*recipe, HasSubstr("cluster = \"boxes\"\n"));
  // Where a gradient's way is short there is nothing to gain, and no such option.
  for (const ClusterOption& option : plan_of(model, boxes_of(2, 400), 8 * 2048, request).best) {
    EXPECT_EQ(option.compression, "");
  }
}

TEST(ClusterPlan, GradientsOfReplicasAreCompressedWhereThatIsFaster) {
  ModelShape model = model_named("llama3-1B");
  model.tied = false;
  ClusterRequest request;
  request.all_boxes = true;
  for (const uint32_t stages : {1, 2}) {
    request.pipeline = stages;
    const auto step = [&](double gbit_s, double bytes, std::optional<uint32_t> compressed) {
      ClusterRequest asked = request;
      asked.compressed_gradient_bytes = bytes;
      asked.compressed_stages = compressed;
      const ClusterPlan plan = plan_of(model, boxes_of(2 * stages, gbit_s), 16 * 2048, asked);
      if (plan.best.empty()) return ADD_FAILURE() << plan.lacks, ClusterOption();
      return plan.best.front();
    };
    for (const double gbit_s : {0.5, 5.0, 400.0}) {
      SCOPED_TRACE(fmt::format("{} stages, {} Gbit/s", stages, gbit_s));
      const ClusterOption dense = step(gbit_s, 0, {});
      EXPECT_EQ(dense.compressed_stages, 0u);
      const ClusterOption chosen = step(gbit_s, 0.066, {});
      double best_s = dense.step_s;
      for (uint32_t some = 0; some <= stages; ++some) {
        const ClusterOption given = step(gbit_s, 0.066, some);
        EXPECT_EQ(given.compressed_stages, some);
        best_s = std::min(best_s, given.step_s);
      }
      EXPECT_LE(chosen.step_s, 1.0051 * best_s);
      EXPECT_EQ(chosen.compressed_stages > 0, gbit_s < 400);
      if (gbit_s > 1) continue;
      EXPECT_EQ(chosen.compressed_stages, stages);
      EXPECT_LT(chosen.step_s, 0.8 * dense.step_s);
      EXPECT_LT(chosen.exchange_bytes, 0.7 * static_cast<double>(dense.exchange_bytes));
    }
  }
}

TEST(ClusterPlan, WhatCannotBeIsRefused) {
  ClusterRequest request;
  request.tokens_per_step = 1000;
  const auto odd = plan_cluster(model_named("llama3-1B"), boxes_of(2, 1), request);
  ASSERT_FALSE(odd.ok());
  EXPECT_THAT(odd.status().to_string(), HasSubstr("no whole sequences of 2048"));
  request.tokens_per_step = 2048;
  const auto paper =
      plan_cluster(model_named("llama3-1B"), boxes_of(2, 1, "smartssd-a5000"), request);
  ASSERT_FALSE(paper.ok());
  EXPECT_THAT(paper.status().to_string(), HasSubstr("not a machine for `smartinf train`"));
  Cluster small = boxes_of(2, 1);
  for (Box& box : small.boxes) box.machine.gpu.memory_bytes = 100'000'000;
  const ClusterPlan none = plan_of(model_named("llama3-1B"), small, 4 * 2048);
  EXPECT_TRUE(none.best.empty());
  EXPECT_THAT(none.lacks, HasSubstr("GPU memory lacks"));
}

}  // namespace
}  // namespace smartinf::sim
