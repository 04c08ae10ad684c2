#include "smartinf/plan/block_stages.h"

#include <algorithm>
#include <array>
#include <random>

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

/// The slowest stage of the best of all divisions of blocks [first, ...) among at most `left`
/// ranks.
double least(std::span<const BlockCost> blocks, const BlockRanks& ranks, uint32_t first,
             uint32_t left) {
  const auto count = static_cast<uint32_t>(blocks.size());
  if (first == count) return 0;
  double best = 1e300;
  for (uint32_t end = first + 1; end <= count; ++end) {
    uint64_t bytes = 0;
    for (uint32_t i = first; i < end; ++i) bytes += blocks[i].memory_bytes;
    if (ranks.memory_bytes != 0 && bytes > ranks.memory_bytes) break;
    const uint64_t most = ranks.micro_batches == 0 ? left : ranks.micro_batches;
    for (uint32_t replicas = 1; replicas <= std::min<uint64_t>(left, most); ++replicas) {
      best = std::min(best, std::max(block_stage_seconds(blocks, ranks, first, end, replicas),
                                     least(blocks, ranks, end, left - replicas)));
    }
  }
  return best;
}

TEST(BlockStages, NoDivisionIsBetterThanTheOneThatIsFound) {
  std::mt19937 draw(5);
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<BlockCost> blocks(1 + draw() % 8);
    for (BlockCost& block : blocks) {
      block = {0.1 * (draw() % 10), 0.1 * (draw() % 30), 1 + draw() % 9, draw() % 40,
               0.1 * static_cast<double>(draw() % 3)};
    }
    const BlockRanks ranks{1 + static_cast<uint32_t>(draw() % 6),
                           draw() % 3 == 0 ? 12u : 0u,
                           draw() % 2 == 0 ? 20.0 : 0.0,
                           8,
                           0.5,
                           draw() % 4};
    const auto stages = divide_blocks(blocks, ranks);
    const double best = least(blocks, ranks, 0, ranks.ranks);
    ASSERT_EQ(stages.ok(), best < 1e300) << stages.status().to_string();
    refused += stages.ok() ? 0 : 1;
    if (!stages.ok()) continue;
    uint32_t block = 0;
    uint32_t used = 0;
    double slowest = 0;
    for (const BlockStage& stage : *stages) {
      ASSERT_EQ(stage.first, block);
      ASSERT_LT(stage.first, stage.end);
      EXPECT_EQ(stage.seconds,
                block_stage_seconds(blocks, ranks, stage.first, stage.end, stage.ranks));
      block = stage.end;
      used += stage.ranks;
      slowest = std::max(slowest, stage.seconds);
    }
    EXPECT_EQ(block, blocks.size());
    EXPECT_LE(used, ranks.ranks);
    EXPECT_DOUBLE_EQ(slowest, best);
  }
  EXPECT_GT(refused, 5);
}

TEST(BlockStages, ReplicasHaveWholeMicroBatchesAndEachUpdate) {
  BlockCost block;
  block.teacher_s = 1;
  block.student_s = 4;
  block.update_s = 0.5;
  const std::array<BlockCost, 2> blocks{block, block};
  const BlockRanks ranks{.ranks = 3, .micro_batches = 5};
  EXPECT_DOUBLE_EQ(block_stage_seconds(blocks, ranks, 0, 1, 3), 5 * 2.0 / 5 + 0.5);
  const BlockRanks one{.ranks = 3, .micro_batches = 1};
  const auto stages = divide_blocks(blocks, one);
  ASSERT_TRUE(stages.ok());
  EXPECT_EQ(stages->size(), 2u);
  EXPECT_EQ(stages->front().ranks, 1u);
}

// Bars of the poster's epoch (seconds): what each rank's blocks take, and how long the epoch is for
// it. Its ranks have one stage each; no times of single blocks are given.
TEST(BlockStages, TheSlowestStageOfThePoster) {
  const std::array<BlockCost, 4> ranks{
      {{1.57, 7.55, 0, 0}, {1.03, 7.07, 0, 0}, {1.36, 8.40, 0, 0}, {0.58, 5.12, 0, 0}}};
  const std::array<double, 4> epoch{0.94 + 1.57 + 7.55, 1.03 + 7.07 + 2.26, 1.36 + 8.40 + 0.87,
                                    0.58 + 5.12 + 4.75};
  const BlockRanks four{.ranks = 4, .loading_s = 0.94};
  double slowest = 0;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    slowest = std::max(slowest, block_stage_seconds(ranks, four, rank, rank + 1, 1));
  }
  EXPECT_NEAR(slowest, 10.06, 1e-9);
  for (const double seconds : epoch) EXPECT_NEAR(slowest / seconds, 1, 0.055);
  // Where nothing is lost between ranks, the best is that all share all blocks: the poster's ideal.
  const auto divided = divide_blocks(ranks, four);
  ASSERT_TRUE(divided.ok());
  EXPECT_EQ(divided->front().ranks, 4u);
  EXPECT_NEAR(divided->front().seconds / (0.49 + 1.11 + 6.71), 1, 0.02);
}

}  // namespace
}  // namespace smartinf::plan
