#include "smartinf/sim/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::sim {
namespace {

using testing::HasSubstr;

base::Result<Cluster> parse(std::string_view text) {
  return parse_cluster(text, "c.toml", load_machine);
}

TEST(Cluster, IsReadAsWrittenByHand) {
  const auto cluster = parse(R"(
name = "desk"
[[box]]
name = "left"
machine = "workstation-gen4"
[[box]]
machine = "server-25gbe"
ranks = 2
cores = "4 Gbit/s"
count = 2
[links]
rate = "1 Gbit/s"
latency_s = 2e-4
[[link]]
from = "left"
to = "box-2"
rate = "2.5 Gbit/s"
together = "200 MB/s"
spread = 0.01
)");
  ASSERT_TRUE(cluster.ok()) << cluster.status().to_string();
  ASSERT_EQ(cluster->boxes.size(), 3u);
  EXPECT_EQ(cluster->boxes[2].name, "box-3");
  EXPECT_EQ(cluster->ranks(), cluster->boxes[0].ranks + 4);
  EXPECT_EQ(cluster->boxes[0].ranks, cluster->boxes[0].machine.gpu.count);
  EXPECT_DOUBLE_EQ(cluster->link(1, 2).shared(), 1.25e8);
  EXPECT_DOUBLE_EQ(cluster->link(0, 1).shared(), 2e8);
  EXPECT_DOUBLE_EQ(cluster->link(1, 0).bytes_per_s, 3.125e8) << "one direction is both";
  EXPECT_DOUBLE_EQ(cluster->spread(), 0.01);
  EXPECT_DOUBLE_EQ(cluster->boxes[2].machine.network.ranks_cores_bytes_per_s, 5e8);
  EXPECT_DOUBLE_EQ(cluster->boxes[0].machine.network.ranks_cores_bytes_per_s, 0);
  Cluster uneven = *cluster;
  uneven.link(2, 0).bytes_per_s = 5e7;
  const auto again = parse(cluster_to_toml(uneven));
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  for (uint32_t a = 0; a < 3; ++a) {
    EXPECT_DOUBLE_EQ(again->boxes[a].machine.network.ranks_cores_bytes_per_s, a > 0 ? 5e8 : 0);
    for (uint32_t b = 0; b < 3; ++b) {
      if (a == b) continue;
      EXPECT_DOUBLE_EQ(again->link(a, b).bytes_per_s, uneven.link(a, b).bytes_per_s) << a << b;
      EXPECT_DOUBLE_EQ(again->link(a, b).latency_s, uneven.link(a, b).latency_s);
    }
  }
}

TEST(Cluster, SaysWhatIsWrong) {
  const std::string box = "[[box]]\nname = 'a'\nmachine = 'workstation-gen4'\n";
  for (const auto& [text, error] : std::initializer_list<std::pair<std::string, const char*>>{
           {"", "there is no [[box]]"},
           {"[[box]]\nname = 'a'\n", "box.machine is not given"},
           {"[[box]]\nmachine = 'workstation-gen9'\n", "unknown machine"},
           {box + "cores = '4'\n", "box.cores: expected a rate like"},
           {box + box, "two boxes are named 'a'"},
           {box + "[[box]]\nmachine = 'workstation-gen4'\n", "there is no link from 'a' to"},
           {box + "[links]\nrate = '1 Gbit'\n", "expected a rate like"},
           {box + "[links]\nlatency = 1\nrate = '1 Gbit/s'\n", "latency"},
           {box + "[[link]]\nfrom = 'a'\nto = 'b'\nrate = '1 Gbit/s'\n", "there is no box 'b'"},
           {box + "[[boxes]]\n", "did you mean box"},
           {box + "[links]\nrate = '1 Gbit/s'\nspread = -1\n", "links.spread"}}) {
    const auto cluster = parse(text);
    ASSERT_FALSE(cluster.ok()) << text;
    EXPECT_THAT(cluster.status().to_string(), HasSubstr(error)) << text;
  }
}

}  // namespace
}  // namespace smartinf::sim
