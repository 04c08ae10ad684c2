#include "smartinf/sim/event_graph.h"

#include <gtest/gtest.h>

namespace smartinf::sim {
namespace {

constexpr uint64_t kGb = 1'000'000'000;

TEST(EventGraph, OneFlowTakesBytesOverRate) {
  EventGraph graph;
  const uint32_t link = graph.add_resource("link");
  const auto task = graph.add_task({Stage(4 * kGb, {{link, 1 / 2e9}}, 0.25)}, {});
  graph.run();
  EXPECT_NEAR(graph.times(task).end_s, 2.25, 1e-9);
  EXPECT_NEAR(graph.busy_s(link, 0, 10), 2.0, 1e-9);
}

TEST(EventGraph, SharesFairlyAndGivesBackWhatIsFree) {
  // Two flows of 1 GB over a 2 GB/s link, one of them held to 0.5 GB/s by a link of its own: the
  // other gets the remaining 1.5 GB/s.
  EventGraph graph;
  const uint32_t shared = graph.add_resource("shared");
  const uint32_t narrow = graph.add_resource("narrow");
  const auto slow = graph.add_task({Stage(kGb, {{shared, 1 / 2e9}, {narrow, 1 / 0.5e9}})}, {});
  const auto fast = graph.add_task({Stage(kGb, {{shared, 1 / 2e9}})}, {});
  graph.run();
  EXPECT_NEAR(graph.times(slow).end_s, 2.0, 1e-9);
  EXPECT_NEAR(graph.times(fast).end_s, 1 / 1.5, 1e-9);
}

TEST(EventGraph, ReadsAndWritesShareADriveAndLoseByMixing) {
  EventGraph graph;
  const uint32_t drive = graph.add_resource("drive", 0.5);
  const auto read = graph.add_task({Stage(kGb, {{drive, 1 / 4e9, Direction::kRead}})}, {});
  const auto write = graph.add_task({Stage(kGb, {{drive, 1 / 1e9, Direction::kWrite}})}, {});
  graph.run();
  // Together 1.25 s of drive time at half efficiency, in equal bytes.
  EXPECT_NEAR(graph.times(read).end_s, 2.5, 1e-9);
  EXPECT_NEAR(graph.times(write).end_s, 2.5, 1e-9);
  EventGraph apart;
  const uint32_t same = apart.add_resource("drive", 0.5);
  const auto first = apart.add_task({Stage(kGb, {{same, 1 / 4e9, Direction::kRead}})}, {});
  const auto second = apart.add_task({Stage(kGb, {{same, 1 / 1e9, Direction::kWrite}})}, {first});
  apart.run();
  EXPECT_NEAR(apart.times(second).end_s, 1.25, 1e-9);
}

TEST(EventGraph, KeepsDependenciesAndStagesInOrder) {
  EventGraph graph;
  const uint32_t a = graph.add_resource("a");
  const uint32_t b = graph.add_resource("b");
  const auto first = graph.add_task({Stage(kGb, {{a, 1e-9}}), Stage(kGb, {{b, 1e-9}})}, {});
  const auto barrier = graph.add_task({}, {first, EventGraph::kNone});
  const auto last = graph.add_task({Stage(kGb, {{a, 1e-9}})}, {barrier});
  graph.run();
  EXPECT_NEAR(graph.times(last).start_s, 2.0, 1e-9);
  EXPECT_NEAR(graph.end_s(), 3.0, 1e-9);
}

TEST(EventGraph, LinksWithoutLimitTakeNoTime) {
  EventGraph graph;
  const uint32_t link = graph.add_resource("link");
  const auto task = graph.add_task({Stage(kGb, {{link, 0}}), Stage(0, {{link, 1}})}, {});
  graph.run();
  EXPECT_EQ(graph.times(task).end_s, 0.0);
}

TEST(EventGraphDeathTest, ACircleIsABug) {
  EventGraph graph;
  const auto a = graph.add_task({}, {});
  const auto b = graph.add_task({}, {a});
  graph.add_dependency(a, b);
  EXPECT_DEATH(graph.run(), "circle");
}

}  // namespace
}  // namespace smartinf::sim
