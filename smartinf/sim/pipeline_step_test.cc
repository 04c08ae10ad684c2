#include "smartinf/sim/pipeline_step.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace smartinf::sim {
namespace {

/// A rank on each box, links of 1 byte a second: messages take as many seconds as they have bytes.
struct Case {
  PipelineLoad load;
  Cluster cluster;

  Case(uint32_t stages, uint64_t micro_batches, double forward_s, double backward_s,
       uint64_t message_s = 0, uint32_t replicas = 1) {
    load.stages = stages;
    load.replicas = replicas;
    load.micro_batches.assign(replicas, micro_batches);
    load.message_bytes = message_s;
    StageTimes times;
    times.forward_s = forward_s;
    times.backward_s = backward_s;
    for (uint32_t rank = 0; rank < stages * replicas; ++rank) {
      load.times.push_back(times);
      load.box.push_back(rank);
      cluster.boxes.emplace_back().name = "box" + std::to_string(rank);
    }
    Link link;
    link.bytes_per_s = 1;
    cluster.links.assign(load.box.size() * load.box.size(), link);
  }

  double step_s() const {
    const PipelineTimes times = simulate_pipeline(load, cluster);
    EXPECT_LE(least_step_s(load, cluster), times.step_s * (1 + 1e-9));
    return times.step_s;
  }
};

TEST(PipelineStep, ABubbleIsThatOf1F1B) {
  // (p - 1) / (m + p - 1) of the step, the zero-bubble README's and DualPipe's (P - 1)(F + B).
  for (const uint32_t stages : {1u, 2u, 4u, 8u}) {
    for (const uint64_t micro_batches : {8, 12, 64}) {
      for (const double backward_s : {1.0, 2.0}) {
        for (const uint32_t ahead : {0u, 2u}) {
          Case one(stages, micro_batches, 1, backward_s);
          one.load.ahead = ahead;
          const double busy = static_cast<double>(micro_batches) * (1 + backward_s);
          const double bubble = (stages - 1) * (1 + backward_s);
          EXPECT_NEAR(one.step_s(), busy + bubble, 1e-6);
          EXPECT_NEAR(simulate_pipeline(one.load, one.cluster).computing.front(),
                      1 - (stages - 1.0) / (static_cast<double>(micro_batches) + stages - 1), 1e-9);
        }
      }
    }
  }
}

TEST(PipelineStep, MessagesTakeTheTimeOfCoresThatCompute) {
  Case one(2, /*micro_batches=*/4, 1, 2, /*message_s=*/1);
  for (Link& link : one.cluster.links) link.bytes_per_s = 1e9;
  EXPECT_NEAR(one.step_s(), 15, 1e-6);
  for (Box& box : one.cluster.boxes) {
    box.machine.gpu.name = "none";
    box.machine.network.ranks_cores_bytes_per_s = 2;
  }
  // Each rank has half a second of each of eight messages.
  EXPECT_GE(one.step_s(), 12 + 8 * 0.5);
  EXPECT_LE(one.step_s(), 15 + 8 * 0.5 + 1e-6);
  for (Box& box : one.cluster.boxes) box.machine.gpu.name = "some";
  EXPECT_NEAR(one.step_s(), 15, 1e-6);
}

TEST(PipelineStep, ABubbleOfChunksIsThatOfBreadthFirst) {
  // (P - 1) of V M + P - 1, as published (Lamy-Poirier 2022): of V chunks a V-th of 1F1B's.
  for (const uint32_t stages : {2u, 4u}) {
    for (const uint32_t chunks : {2u, 3u, 8u}) {
      for (const uint64_t micro_batches : {4, 9}) {
        Case one(stages, micro_batches, 1, 2);
        one.load.chunks = chunks;
        const std::vector<StageTimes> of_chunk = one.load.times;
        const auto step_s = [&](double read_s) {
          one.load.times.clear();
          for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
            one.load.times.insert(one.load.times.end(), of_chunk.begin(), of_chunk.end());
          }
          for (StageTimes& times : one.load.times) times.read_s = read_s;
          return simulate_pipeline(one.load, one.cluster).step_s;
        };
        const auto busy = static_cast<double>(chunks * micro_batches);
        EXPECT_NEAR(step_s(0), (busy + stages - 1) * (1 + 2), 1e-6);
        // Weights are read while the chunk before computes; where that takes longer it sets the
        // pace, in backward: in forward the update gives them.
        EXPECT_NEAR(step_s(static_cast<double>(micro_batches)), step_s(0), 1e-6);
        const double reading = 5 * static_cast<double>(micro_batches);
        EXPECT_GE(step_s(reading), chunks * reading);
        EXPECT_LE(step_s(reading), chunks * reading + (busy + stages - 1) * (1 + 2));
      }
    }
  }
}

TEST(PipelineStep, MessagesThatTakeNoLongerThanComputingAreHidden) {
  const auto each_s = [](uint32_t stages, uint64_t message_s, bool waits) {
    Case many(stages, 40, 4, 4, message_s), few(stages, 30, 4, 4, message_s);
    for (Case* one : {&many, &few}) {
      one->load.ahead = waits ? 0 : 2;
      one->load.waits = waits;
    }
    return (many.step_s() - few.step_s()) / 10;
  };
  for (const uint32_t stages : {2u, 3u}) {
    // A box with two neighbours sends two messages for a micro batch over its interface.
    const double messages = stages - 1;
    for (const uint64_t message_s : {2, 4, 8, 16}) {
      EXPECT_NEAR(each_s(stages, message_s, false),
                  std::max(8.0, messages * static_cast<double>(message_s)), 1e-6)
          << stages << ", " << message_s;
    }
  }
  // Where exchanges are waited for, each end does it: f + b + c between two stages, and once more
  // for a stage with two neighbours.
  EXPECT_NEAR(each_s(2, 4, true), 12, 1e-6);
  EXPECT_NEAR(each_s(3, 4, true), 16, 1e-6);
}

TEST(PipelineStep, AFoldedHeadIsTheFirstStagesAndItsMessagesAreHidden) {
  for (const uint64_t message_s : {0, 2, 4}) {
    const auto step_s = [&](uint64_t micro_batches) {
      Case one(2, micro_batches, 2, 4, message_s);  // stages of 6 s
      one.load.ahead = 2;
      one.load.times[0] = {};
      one.load.times[0].forward_s = one.load.times[0].backward_s = 1;
      one.load.head_s = {4};
      return one.step_s();
    };
    // An interface has two messages of a micro batch in each direction.
    const double each_s = std::max(6.0, 2.0 * static_cast<double>(message_s));
    EXPECT_NEAR(step_s(40) - step_s(30), 10 * each_s, 1e-6) << message_s;
    if (message_s == 0) {
      EXPECT_NEAR(step_s(30), 1 + 30 * 6 + 1, 1e-6);
    }
  }
  Case one(2, 20, 2, 4, 4);
  one.load.ahead = 2;
  one.load.head_s = {0};
  EXPECT_EQ(exposed_gradients(one.load, one.cluster).size(), 3u) << "of the head, too";
}

TEST(PipelineStep, ALongStepIsOfAsLongMicroBatches) {
  Case longer(4, 500, 2, 3, 4), shorter(4, 96, 2, 3, 4);
  longer.load.ahead = shorter.load.ahead = 2;
  longer.load.times[2].forward_s = shorter.load.times[2].forward_s = 2.5;
  EXPECT_NEAR(longer.step_s() - shorter.step_s(), 404 * 8, 1e-6) << "the interfaces' pace";
}

TEST(PipelineStep, RanksOfABoxShareItsLink) {
  Case apart(2, 20, 1, 1, 4, 2);
  apart.load.ahead = 2;
  Case together = apart;
  together.load.box = {0, 0, 1, 1};
  EXPECT_NEAR(together.step_s() / apart.step_s(), 2, 0.15);
  together.cluster.boxes[0].machine.network.near_bytes_per_s = 100;
  together.load.box = {0, 0, 0, 0};
  EXPECT_LT(together.step_s(), 0.6 * apart.step_s()) << "no link is between them";
}

TEST(PipelineStep, GradientsAreExposedAsFarAsTheStepWaitsForThem) {
  const auto exposed = [](uint32_t stages, uint64_t message_s, uint64_t forward_s = 0) {
    Case one(stages, 20, 4, 4, message_s);
    one.load.ahead = 2;
    one.load.forward_bytes = forward_s;
    const double whole_s = one.step_s();
    std::vector<uint64_t> found = exposed_gradients(one.load, one.cluster);
    one.load.shorts.last = found;
    const double found_s = one.step_s();
    one.load.shorts.last.assign(stages, 20);
    EXPECT_LE(found_s, 1.02 * one.step_s());
    EXPECT_LE(found_s, whole_s - 0.9 * static_cast<double>(message_s));
    return found;
  };
  using Last = std::vector<uint64_t>;
  EXPECT_EQ(exposed(2, 0), Last({0, 0})) << "nothing to gain";
  EXPECT_EQ(exposed(2, 4), Last({0, 1})) << "behind the last one nothing is left to compute";
  EXPECT_EQ(exposed(3, 2), Last({0, 1, 1})) << "fewer than the paper's epilogue";
  // The link sets the pace of gradients, and no longer that of activations: nearly all.
  EXPECT_GE(exposed(2, 16, 4)[1], 16u);
}

TEST(PipelineStep, AShortGradientTakesTimeToMakeAndLessToSend) {
  Case one(2, 8, 4, 4, 4);
  one.load.ahead = 2;
  const double whole_s = one.step_s();
  one.load.shorts = {.bytes = 1, .make_s = 2, .last = {0, 1}};
  EXPECT_NEAR(one.step_s(), whole_s - 4 + 1 + 2, 1e-6);
  one.load.forward_bytes = 1;
  EXPECT_NEAR(one.step_s(), whole_s - 4 + 1 + 2 - 4 + 1, 1e-6);
}

TEST(PipelineStep, MeasuredStepsAreMet) {
  // bench/pipeline_points.py: stages in network namespaces, whose computing sleeps.
  std::ifstream file(SI_MEASURED_PIPELINES);
  double apart = 0, most = 0;
  int rows = 0;
  for (std::string line; std::getline(file, line); ++rows) {
    const auto row = nlohmann::json::parse(line);
    const std::vector<double> forward_s = row["forward_s"];
    const std::vector<double> backward_s = row["backward_s"];
    Case one(static_cast<uint32_t>(forward_s.size()), row["micro_batches"], 0, 0);
    for (size_t stage = 0; stage < forward_s.size(); ++stage) {
      one.load.times[stage].forward_s = forward_s[stage];
      one.load.times[stage].backward_s = backward_s[stage];
    }
    one.load.ahead = 2;
    one.load.message_bytes = row["message_bytes"];
    one.load.forward_bytes = row["forward_bytes"];
    one.load.shorts = {row["gradient_bytes"], row["make_s"], row["short_last"]};
    // A box whose links are fast: so the others' interfaces are, too, and each link is its own.
    const size_t boxes = one.cluster.boxes.size() + 1;
    one.cluster.boxes.emplace_back().name = "beside";
    Link link;
    one.cluster.links.assign(boxes * boxes, link);
    for (size_t i = 0; i < boxes * boxes; ++i) {
      const bool beside = i % boxes + 1 == boxes || i / boxes + 1 == boxes;
      one.cluster.links[i].bytes_per_s = beside ? 1e12 : row["link_bytes_per_s"].get<double>();
    }
    const double simulated_s = one.step_s();
    const double error = std::abs(simulated_s / row["step_s"].get<double>() - 1);
    fmt::print("{}: measured {:.3f} s, simulated {:.3f} s, {:.1f} %\n", row["point"].dump(),
               row["step_s"].get<double>(), simulated_s, 100 * error);
    apart += error;
    most = std::max(most, error);
  }
  ASSERT_GE(rows, 20);
  fmt::print("{} steps: mean {:.1f} %, worst {:.1f} %\n", rows, 100 * apart / rows, 100 * most);
  EXPECT_LE(apart / rows, 0.10);
}

TEST(PipelineStep, AnUpdateRunsBesideTheNextForwardAndInBubbles) {
  Case one(2, 8, 1, 1);
  const double alone_s = one.step_s();
  one.load.times[1].update_s = 2;  // the second stage waits for the first one's forward anyway
  EXPECT_NEAR(one.step_s(), alone_s, 1e-6);
  one.load.times[0].update_s = 3;
  EXPECT_NEAR(one.step_s(), alone_s + 2, 1e-6) << "all but the first forward";
  one.load.late = false;
  EXPECT_NEAR(one.step_s(), alone_s + 3, 1e-6);
  one.load.times[0].update_cores = 0.5;  // of the cores that compute
  one.load.late = true;
  EXPECT_GT(one.step_s(), alone_s + 2);
  one.load.times[0].update_cores = 0;
  one.load.times[0].sync_s = 100;  // gradients go to devices behind it
  EXPECT_NEAR(one.step_s(), 103, 1e-6);
}

TEST(PipelineStep, TheSlowestOfAllSetsThePaceAndIsNamed) {
  Case one(3, 30, 1, 1);
  EXPECT_EQ(simulate_pipeline(one.load, one.cluster).bound_by, "computing on box0");
  one.load.times[1].backward_s = 3;
  EXPECT_EQ(simulate_pipeline(one.load, one.cluster).bound_by, "computing on box1");
  one.load.message_bytes = 5;
  one.load.ahead = 2;
  const PipelineTimes times = simulate_pipeline(one.load, one.cluster, true);
  EXPECT_TRUE(times.bound_by.starts_with("the network from ")) << times.bound_by;
  // The spans are those of one step.
  const auto of_lane = [&](const std::string& lane) {
    return std::ranges::count(times.spans, lane, &Span::lane);
  };
  EXPECT_EQ(of_lane("stage 1, rank 1, box1"), 60);
  EXPECT_EQ(of_lane("box0 to box1"), 30);
  for (const Span& span : times.spans) {
    EXPECT_GE(span.start_s, 0);
    EXPECT_LE(span.end_s, times.step_s + 1e-9);
  }
}

}  // namespace
}  // namespace smartinf::sim
