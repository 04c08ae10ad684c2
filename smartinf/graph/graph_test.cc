#include <algorithm>
#include <numeric>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/graph/csr.h"
#include "smartinf/graph/generators.h"
#include "smartinf/graph/neighbourhood.h"
#include "smartinf/graph/partition.h"
#include "smartinf/graph/shares.h"

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

TEST(Csr, ReadsEdgesAndChecksRows) {
  const auto edges = edges_of_text("# from to\n0 1\n2,0\r\n\n", "edges.txt");
  ASSERT_TRUE(edges.ok());
  EXPECT_THAT(*edges, ElementsAre(Edge{0, 1}, Edge{2, 0}));
  EXPECT_EQ(vertices_of(*edges), 3u);
  EXPECT_THAT(edges_of_text("0 1\n1\n", "e").status().to_string(), HasSubstr("line 2"));
  EXPECT_TRUE(Csr::of_rows({0, 2, 2}, {0, 1}).ok());
  EXPECT_THAT(Csr::of_rows({0, 1, 2}, {1, 2}).status().to_string(),
              HasSubstr("vertex 1 has the neighbour 2, but there are 2"));
  EXPECT_FALSE(Csr::of_rows({0, 2, 1}, {0, 1}).ok());
  EXPECT_FALSE(Csr::of_rows({0, 2, 2}, {1, 0}).ok());
  const Csr simple = Csr::make(3, std::vector<Edge>{{0, 1}, {0, 1}, {1, 1}}).value().simple();
  EXPECT_EQ(simple.edges(), 1u);
}

Csr both_ways(uint64_t vertices, std::span<const Edge> edges) {
  return Csr::make(vertices, edges).value().both_ways().simple();
}

TEST(Partition, FindsBlocksAndKeepsThemEven) {
  const uint32_t blocks = 8;
  const uint64_t vertices = 4000;
  // Vertices of a block of the graph do not stand next to each other.
  std::vector<Edge> edges = block_edges(vertices, 40'000, blocks, 0.9, 3);
  for (Edge& edge : edges) {
    edge.from = static_cast<Vertex>(edge.from * 1237ull % vertices);
    edge.to = static_cast<Vertex>(edge.to * 1237ull % vertices);
  }
  const Csr csr = both_ways(vertices, edges);
  std::vector<PartitionMethod> methods{PartitionMethod::kStream};
  if (has_metis()) methods.push_back(PartitionMethod::kMetis);
  for (const PartitionMethod method : methods) {
    SCOPED_TRACE(base::enum_name(method));
    const std::vector<uint32_t> block_of = partition(csr, blocks, method).value();
    EXPECT_EQ(block_of, partition(csr, blocks, method).value());
    std::vector<uint64_t> sizes(blocks);
    for (const uint32_t block : block_of) ++sizes.at(block);
    EXPECT_LE(*std::ranges::max_element(sizes), 520u);
    // The graph's own blocks cut 0.0875 of the edges; any others nearly 0.875.
    EXPECT_LT(static_cast<double>(cut_edges(csr, block_of)),
              0.2 * static_cast<double>(csr.edges()));

    const BlockOrder order = order_blocks(csr, block_of, blocks);
    const Csr ordered = renumbered(csr, order.order);
    EXPECT_EQ(ordered.edges(), csr.edges());
    const std::vector<Vertex> number = inverse(order.order);
    for (const Edge& edge : edges) {
      if (edge.from == edge.to) continue;
      EXPECT_TRUE(
          std::ranges::binary_search(ordered.neighbours(number[edge.from]), number[edge.to]));
    }
    for (uint32_t b = 0; b < blocks; ++b) {
      std::set<uint32_t> of;
      for (Vertex i = order.first[b]; i < order.first[b + 1]; ++i)
        of.insert(block_of[order.order[i]]);
      EXPECT_EQ(of.size(), 1u);
    }
  }
  EXPECT_THAT(partition(csr, 4001, PartitionMethod::kStream).status().to_string(),
              HasSubstr("4001 blocks of 4000 vertices"));
}

/// A ring in which each vertex has edges to the next four, of which one in twenty leads anywhere.
Csr ring_with_far_edges(Vertex vertices) {
  std::vector<Edge> edges;
  uint64_t draw = 1;
  for (Vertex v = 0; v < vertices; ++v) {
    for (Vertex step = 1; step <= 4; ++step) {
      draw = draw * 6364136223846793005u + 1442695040888963407u;
      const bool far = (draw >> 33) % 20 == 0;
      edges.push_back({v, static_cast<Vertex>((far ? draw >> 40 : v + step) % vertices)});
    }
  }
  return both_ways(vertices, edges);
}

TEST(Partition, StreamKeepsANumberingThatCutsFewer) {
  // Breadth first from any vertex is everywhere at once after some hops.
  const Vertex vertices = 20'000;
  const uint32_t blocks = 20;
  const Csr csr = ring_with_far_edges(vertices);
  std::vector<uint32_t> as_numbered(vertices);
  for (Vertex v = 0; v < vertices; ++v) as_numbered[v] = v / (vertices / blocks);
  const auto block_of = partition(csr, blocks, PartitionMethod::kStream).value();
  EXPECT_LE(cut_edges(csr, block_of), cut_edges(csr, as_numbered));
}

TEST(Partition, OrdersABlockByTheBlocksThatNeedIt) {
  const Vertex vertices = 4000;
  const uint32_t blocks = 8;
  const Csr csr = ring_with_far_edges(vertices);
  std::vector<uint32_t> block_of(vertices);
  for (Vertex v = 0; v < vertices; ++v) block_of[v] = v / (vertices / blocks);
  const BlockOrder order = order_blocks(csr, block_of, blocks);
  const Csr ordered = renumbered(csr, order.order);
  for (uint32_t b = 0; b < blocks; ++b) {
    std::vector<uint32_t> lowest;  // of other blocks that each vertex has edges to; 0: none
    for (Vertex v = order.first[b]; v < order.first[b + 1]; ++v) {
      lowest.push_back(0);
      for (const Vertex to : ordered.neighbours(v)) {
        const auto block =
            static_cast<uint32_t>(std::ranges::upper_bound(order.first, to) - order.first.begin());
        if (block != b + 1 && (lowest.back() == 0 || block < lowest.back())) lowest.back() = block;
      }
    }
    EXPECT_TRUE(std::ranges::is_sorted(lowest));
    EXPECT_EQ(lowest.front(), 0u);
    EXPECT_GT(lowest.back(), 0u);
  }
}

TEST(Neighbourhood, OrdersByHopsAndSamplesWhatLeadsFurther) {
  //  0 - 1 - 2 - 3,  1 - 4 (a hub of 5, 6, 7),  1 - 8 (a leaf)
  const std::vector<Edge> edges{{0, 1}, {1, 2}, {2, 3}, {1, 4}, {4, 5}, {4, 6}, {4, 7}, {1, 8}};
  const Csr csr = both_ways(9, edges);
  Neighbourhood around(csr);
  for (int twice = 0; twice < 2; ++twice) {
    const HopOrder order = around.within(std::vector<Vertex>{0}, 2);
    EXPECT_THAT(order.vertices, ElementsAre(0, 1, 2, 4, 8));
    EXPECT_THAT(order.ends, ElementsAre(1, 2, 5));
  }
  // Of 1's neighbours 4 leads to three more, 2 to one, 8 to none.
  const HopOrder one = around.sample(std::vector<Vertex>{1}, {.hops = 2, .fanout = 1});
  EXPECT_THAT(one.vertices, ElementsAre(1, 4, ::testing::AnyOf(5, 6, 7)));
  EXPECT_THAT(around.sample(std::vector<Vertex>{1}, {.hops = 1, .fanout = 2}).vertices,
              ElementsAre(1, 2, 4));
  EXPECT_THAT(around.sample(std::vector<Vertex>{0}, {.hops = 3, .fanout = 9}).vertices,
              ::testing::SizeIs(9));
  const Csr induced = around.induced(std::vector<Vertex>{4, 1, 8, 5});
  EXPECT_THAT(induced.neighbours(0), ElementsAre(1, 3));
  EXPECT_THAT(induced.neighbours(1), ElementsAre(0, 2));
  const std::vector<PartRows> rows = part_rows(csr, std::vector<Vertex>{0, 2, 5, 9});
  EXPECT_EQ(rows[0].own, 2u);
  EXPECT_EQ(rows[0].halo, 3u);  // 2, 4, 8
  EXPECT_EQ(rows[1].halo, 4u);  // 1, 5, 6, 7
  EXPECT_EQ(rows[2].halo, 2u);  // 1, 4
}

TEST(Shares, RanksOfAServerComputeWhatItPreloads) {
  // A path 0 - 1 - ... - 7 on two servers of two ranks.
  std::vector<Edge> edges;
  for (Vertex v = 0; v < 7; ++v) edges.push_back({v, v + 1});
  const Csr csr = both_ways(8, edges);
  const Spread spread{.bounds = {0, 2, 4, 6, 8}, .servers = 2};
  EXPECT_EQ(spread.owner(5), 2u);
  const std::vector<Propagation> steps = propagations(3, 2);
  EXPECT_THAT(steps, ElementsAre(Propagation{.out = 1, .preloaded = true}, Propagation{},
                                 Propagation{.between = true}, Propagation{.between = true},
                                 Propagation{.between = true}));
  ServerShare first(csr, spread, 0, 2, 1);  // rings 4 and 5, in pieces of one vertex
  EXPECT_THAT(first.computed(1, 0), ElementsAre(2, 3));
  EXPECT_THAT(first.computed(0, 2), ElementsAre(0, 1));
  EXPECT_THAT(first.computed(1, 9), ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(first.read_only(1), ElementsAre(1, 6));
  EXPECT_THAT(first.lacking(1, Propagation{}),
              ElementsAre(ElementsAre(1), IsEmpty(), IsEmpty(), IsEmpty()));
  EXPECT_THAT(first.lacking(1, {.between = true}),
              ElementsAre(ElementsAre(1), IsEmpty(), ElementsAre(4), IsEmpty()));
  EXPECT_THAT(first.lacking(1, {.out = 1, .preloaded = true})[0], IsEmpty());
  // A sample of one hop has 4, and its edge to 3; 5 is not there.
  const Csr sample = sampled_graph(csr, spread, 0, {.hops = 1, .fanout = 2});
  EXPECT_THAT(sample.neighbours(4), ElementsAre(3));
  EXPECT_THAT(sample.neighbours(5), IsEmpty());
  EXPECT_THAT(sampled_propagations(3, 1)[1].out, 1u);
  EXPECT_THAT(sampled_propagations(3, 1)[2].out, 0u);
}

TEST(Shares, PreloadIsChosenByRatesAndRoom) {
  const std::vector<PreloadCost> costs{
      {.hops = 0, .work = 0.5, .between_bytes = 1000, .room_bytes = 10},
      {.hops = 1, .work = 0.5, .between_bytes = 600, .room_bytes = 20},
      {.hops = 2, .work = 1.0, .within_bytes = 100, .room_bytes = 30}};
  PreloadRates rates{.alone_s = 1, .within = 1e3, .between = 1e9};
  EXPECT_EQ(choose_preload(costs, rates).value(), 1u);  // a fast link
  rates.between = 1e3;
  EXPECT_NEAR(predicted_seconds(costs[1], rates), 1.1, 1e-12);
  EXPECT_EQ(choose_preload(costs, rates).value(), 1u);  // 1.1 s each: fewer hops
  rates.between = 900;
  EXPECT_EQ(choose_preload(costs, rates).value(), 2u);
  rates.rows = 1e3;
  std::vector<PreloadCost> with_rows = costs;
  with_rows[2].row_bytes = 100;  // 100 ms, more than the gain
  EXPECT_EQ(choose_preload(with_rows, rates).value(), 1u);
  std::vector<PreloadCost> with_exchanges = costs;
  with_exchanges[1].exchanges = 4;
  with_exchanges[2].exchanges = 3;
  rates = {.alone_s = 1, .within = 1e3, .between = 1e3, .exchange_s = 0.01};
  EXPECT_NEAR(predicted_seconds(with_exchanges[1], rates), 1.14, 1e-12);
  EXPECT_EQ(choose_preload(with_exchanges, rates).value(), 2u);  // 1.13 s
  rates.room_bytes = 29;
  EXPECT_EQ(choose_preload(costs, rates).value(), 1u);
  rates.room_bytes = 9;
  EXPECT_THAT(choose_preload(costs, rates).status().to_string(), HasSubstr("10 B at least"));
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
