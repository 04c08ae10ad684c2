#include "smartinf/plan/cache_traffic.h"

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

/// Llama 3 8B in bf16: 128 KiB a block.
CacheModel llama() {
  CacheModel model;
  model.layers = 32;
  model.heads = 32;
  model.kv_heads = 8;
  model.head_width = 128;
  model.block_bytes = 131072;
  return model;
}

constexpr uint64_t kTokenBytes = 131072;  // 2 L K d 2

TEST(CacheTraffic, OfAStepIsTheFormula) {
  const CachedSequence one{32768};
  const CacheTraffic step = step_traffic(llama(), std::span(&one, 1));
  EXPECT_EQ(step.read, 32768 * kTokenBytes);
  EXPECT_EQ(step.written, 0u);
  // Queries of 32 heads, and states of 128 + 2, in f32.
  EXPECT_EQ(step.link_down, 32u * 32 * 128 * 4);
  EXPECT_EQ(step.link_up, 32u * 32 * 130 * 4);
}

TEST(CacheTraffic, OfABlocksStepsWritesItOnce) {
  // N L (H d 4 + 2 K d 2) down and 2 L K d 2 written, for each of 32 tokens in the mean.
  const SequenceTraffic all = sequence_traffic(llama(), 32768, 32);
  EXPECT_EQ(all.decode.written, 32 * kTokenBytes);
  EXPECT_EQ(all.decode.link_down, 32u * 32 * (32 * 128 * 4 + 2 * 8 * 128 * 2));
  EXPECT_EQ(all.decode.read, 32 * 32768 * kTokenBytes);
  EXPECT_EQ(all.prefill.written, 32768 * kTokenBytes);
  EXPECT_EQ(all.prefill.link_down, 32768 * kTokenBytes);
  // Fetching would bring 3,615 times as much.
  const double link = static_cast<double>(all.decode.link_down + all.decode.link_up) / 32;
  EXPECT_NEAR(32768.0 * kTokenBytes / link, 3615, 1);
}

TEST(CacheTraffic, TheUnfinishedBlockStaysOnTheHost) {
  const SequenceTraffic all = sequence_traffic(llama(), 40, 24);
  EXPECT_EQ(all.prefill.written, 64 * kTokenBytes);  // the unfinished one is written once
  EXPECT_EQ(all.decode.written, 32 * kTokenBytes);   // and again when it is whole
  EXPECT_EQ(all.decode.read, 24 * 32 * kTokenBytes);
  const CachedSequence few{31};
  const CacheTraffic none = step_traffic(llama(), std::span(&few, 1));
  EXPECT_EQ(none.read + none.link_up, 0u);
  EXPECT_EQ(none.written, 32 * kTokenBytes);
  EXPECT_EQ(tail_bytes(llama()), 32 * kTokenBytes);
}

TEST(CacheTraffic, APrefixIsReadOnce) {
  std::vector<CachedSequence> questions(16, {16384 + 64, 16384, 7});
  const uint64_t shared = step_traffic(llama(), questions).read;
  EXPECT_EQ(shared, (16384 + 16 * 64) * kTokenBytes);
  const CacheTraffic links = step_traffic(llama(), questions);
  for (CachedSequence& one : questions) one.prefix_tokens = 0;
  const CacheTraffic alone = step_traffic(llama(), questions);
  EXPECT_LE(shared, alone.read / 12);
  EXPECT_EQ(links.link_down, alone.link_down);
  EXPECT_EQ(links.link_up, alone.link_up);
}

TEST(CacheTraffic, AWindowReadsWhatItSeesAndMemoryKeepsNoMore) {
  CacheModel model = llama();
  model.windows.assign(32, 512);
  model.windows[5] = 0;
  // The token at place 1000 sees those from 489 on: blocks 15 to 30; with 31 whole ones.
  EXPECT_EQ(blocks_read(model, 0, 1000), 31u - 15);
  EXPECT_EQ(blocks_read(model, 5, 1000), 31u);
  EXPECT_EQ(blocks_read(model, 0, 100), 3u);
  EXPECT_EQ(memory_bytes(model, 32768), (31u * 17 + 1024) * model.block_bytes);
  EXPECT_EQ(memory_bytes(model, 100), 32u * 4 * model.block_bytes);
  EXPECT_EQ(drive_bytes(model, 100), 32u * (4 + 2) * model.block_bytes);
  // Of a shared prefix one layer reads all, the others what the first of the sequences sees.
  const std::vector<CachedSequence> two{{1000, 960, 1}, {1064, 960, 1}};
  EXPECT_EQ(step_traffic(model, two).read,
            (31u * ((30 - 15) + 1 + 3) + (30 + 1 + 3)) * model.block_bytes);
}

}  // namespace
}  // namespace smartinf::plan
