#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/graph/csr.h"
#include "smartinf/graph/generators.h"

namespace smartinf::graph {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Csr, HasEveryEdgeBothWaysRound) {
  const std::vector<Edge> edges{{2, 0}, {0, 3}, {0, 1}, {2, 2}, {0, 3}};
  const Csr csr = Csr::make(4, edges).value();
  EXPECT_EQ(csr.vertices(), 4u);
  EXPECT_EQ(csr.edges(), 5u);
  EXPECT_THAT(csr.neighbours(0), ElementsAre(1, 3, 3));
  EXPECT_THAT(csr.neighbours(1), IsEmpty());
  EXPECT_THAT(csr.neighbours(2), ElementsAre(0, 2));
  const Csr reversed = csr.reversed();
  EXPECT_THAT(reversed.neighbours(0), ElementsAre(2));
  EXPECT_THAT(reversed.neighbours(2), ElementsAre(2));
  EXPECT_THAT(reversed.neighbours(3), ElementsAre(0, 0));
  EXPECT_THAT(csr.both_ways().neighbours(0), ElementsAre(1, 2, 3, 3));
}

TEST(Csr, RefusesAVertexThatIsNotThere) {
  const std::vector<Edge> edges{{0, 1}, {1, 4}};
  EXPECT_THAT(Csr::make(4, edges).status().to_string(),
              HasSubstr("edge 1 (1 to 4) names vertex 4, but there are 4"));
  EXPECT_FALSE(Csr::make(uint64_t{1} << 32, {}).ok());
}

TEST(Generators, AreSeededAndOfTheirShape) {
  const uint64_t vertices = 1000;
  const auto rmat = rmat_edges(vertices, 50'000, 7);
  EXPECT_EQ(rmat, rmat_edges(vertices, 50'000, 7));
  EXPECT_NE(rmat, rmat_edges(vertices, 50'000, 8));
  const auto low = [&](const std::vector<Edge>& edges, auto belongs) {
    return static_cast<double>(std::count_if(edges.begin(), edges.end(), belongs)) /
           static_cast<double>(edges.size());
  };
  // Three quarters of R-MAT's edges begin in the lower half of 1024 numbers, 512 of these 1000.
  EXPECT_NEAR(low(rmat, [](const Edge& e) { return e.from < 512; }), 0.76, 0.02);
  const auto uniform = uniform_edges(vertices, 50'000, 7);
  EXPECT_NEAR(low(uniform, [](const Edge& e) { return e.to < 512; }), 0.512, 0.02);
  const auto blocks = block_edges(vertices, 50'000, 7, 0.8, 7);
  EXPECT_NEAR(low(blocks, [&](const Edge& e) { return e.from * 7 / 1000 == e.to * 7 / 1000; }),
              0.8 + 0.2 / 7, 0.02);
  for (const auto& edges : {rmat, uniform, blocks}) EXPECT_TRUE(Csr::make(vertices, edges).ok());
}

}  // namespace
}  // namespace smartinf::graph
