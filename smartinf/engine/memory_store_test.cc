#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/engine/key_value_store.h"

namespace smartinf::engine {
namespace {

using base::DataType;
using base::ErrorCode;
using kernels::CacheFormat;

constexpr uint32_t kLayers = 3;
constexpr uint32_t kHeads = 4;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kWidth = 16;
constexpr uint32_t kRow = kKvHeads * kWidth;

KeyValueShape shape_of(std::vector<uint32_t> windows = {}) {
  return {.attention = {.block = {.kv_heads = kKvHeads,
                                  .head_width = kWidth,
                                  .format = CacheFormat::kF32},
                        .heads = kHeads,
                        .scale = 0.25f},
          .layers = kLayers,
          .windows = std::move(windows)};
}

std::vector<float> random_floats(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& v : values) v = normal(random);
  return values;
}

constexpr uint64_t kTokensMax = 300;

/// Keys, and values, of a sequence's layer.
const std::vector<float>& rows_of(SequenceId id, uint32_t layer, bool values) {
  static std::map<std::tuple<SequenceId, uint32_t, bool>, std::vector<float>> made;
  std::vector<float>& rows = made[{id, layer, values}];
  if (rows.empty()) {
    rows = random_floats(kTokensMax * kRow, static_cast<uint32_t>(20 * id + 2 * layer + values));
  }
  return rows;
}

/// Tokens [first, first + count) of a sequence into every layer.
void append(KeyValueStore& store, SequenceId id, uint64_t first, uint64_t count) {
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_TRUE(store
                    .append(id, layer, count, DataType::kF32,
                            rows_of(id, layer, false).data() + first * kRow,
                            rows_of(id, layer, true).data() + first * kRow)
                    .ok());
  }
}

std::vector<float> attend(KeyValueStore& store, uint32_t layer,
                          const std::vector<SequenceId>& ids) {
  std::vector<float> out(ids.size() * kHeads * kWidth);
  std::vector<std::vector<float>> queries;
  std::vector<AttendQuery> asked;
  for (size_t i = 0; i < ids.size(); ++i) {
    queries.push_back(random_floats(kHeads * kWidth, 1000 + static_cast<uint32_t>(ids[i])));
    asked.push_back({ids[i], queries[i].data(), out.data() + i * kHeads * kWidth});
  }
  const base::Result<AttendTicket> ticket = store.begin_attend(layer, asked);
  EXPECT_TRUE(ticket.ok());
  EXPECT_TRUE(store.finish_attend(ticket.value()).ok());
  return out;
}

constexpr uint64_t kMemoryBytes = uint64_t{1} << 24;

TEST(MemoryStore, AnswersDependOnTheSequenceAlone) {
  auto together = make_memory_store(shape_of(), kMemoryBytes, 3);
  for (const SequenceId id : {1, 2, 3}) {
    ASSERT_TRUE(together->open(id, 100).ok());
    append(*together, id, 0, 30 * id);
  }
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const std::vector<float> all = attend(*together, layer, {3, 1, 2});
    for (const auto& [place, id] : {std::pair<size_t, SequenceId>{0, 3}, {1, 1}, {2, 2}}) {
      auto alone = make_memory_store(shape_of(), kMemoryBytes, 1);
      ASSERT_TRUE(alone->open(id, 100).ok());
      for (uint64_t t = 0; t < 30 * id; ++t) append(*alone, id, t, 1);
      EXPECT_EQ(alone->tokens(id), 30 * id);
      const std::vector<float> one = attend(*alone, layer, {id});
      EXPECT_TRUE(std::equal(one.begin(), one.end(),
                             all.begin() + static_cast<ptrdiff_t>(place * one.size())))
          << "sequence " << id << " layer " << layer;
    }
  }
}

TEST(MemoryStore, KeepsWhatAWindowShows) {
  auto store = make_memory_store(shape_of({0, 40, 40}), kMemoryBytes, 2);
  auto all = make_memory_store(shape_of(), kMemoryBytes, 2);
  ASSERT_TRUE(store->open(1, kTokensMax).ok());
  ASSERT_TRUE(all->open(1, kTokensMax).ok());
  append(*store, 1, 0, kTokensMax);
  append(*all, 1, 0, kTokensMax);
  EXPECT_EQ(attend(*store, 0, {1}), attend(*all, 0, {1}));
  EXPECT_NE(attend(*store, 1, {1}), attend(*all, 1, {1}));
  auto whole = make_memory_store(shape_of({0, 40, kTokensMax}), kMemoryBytes, 2);
  ASSERT_TRUE(whole->open(1, kTokensMax).ok());
  for (uint64_t t = 0; t < kTokensMax; ++t) append(*whole, 1, t, 1);
  EXPECT_EQ(attend(*store, 1, {1}), attend(*whole, 1, {1}));
  EXPECT_EQ(attend(*whole, 2, {1}), attend(*all, 2, {1}));
}

TEST(MemoryStore, TakesNoMoreMemoryThanItIsGiven) {
  // One block of a layer; 2 sequences of 64 tokens are 12 blocks.
  const uint64_t block_bytes = kernels::cache_block_bytes(shape_of().attention.block);
  auto store = make_memory_store(shape_of(), 12 * block_bytes, 1);
  ASSERT_TRUE(store->open(1, 64).ok());
  EXPECT_EQ(store->open(1, 1).code(), ErrorCode::kAlreadyExists);
  const base::Status full = store->open(2, 65);
  EXPECT_EQ(full.code(), ErrorCode::kOutOfMemory);
  EXPECT_EQ(store->tokens(2), 0u);
  ASSERT_TRUE(store->open(2, 64).ok());
  EXPECT_EQ(store->open(3, 1).code(), ErrorCode::kOutOfMemory);
  append(*store, 2, 0, 64);
  const std::vector<float> one = random_floats(kRow, 1);
  EXPECT_EQ(store->append(2, 0, 1, DataType::kF32, one.data(), one.data()).code(),
            ErrorCode::kOutOfMemory);
  EXPECT_EQ(store->append(7, 0, 1, DataType::kF32, one.data(), one.data()).code(),
            ErrorCode::kNotFound);
  store->close(1);
  ASSERT_TRUE(store->open(3, 64).ok());
  const AttendQuery closed{.id = 1};
  EXPECT_EQ(store->begin_attend(0, {&closed, 1}).status().code(), ErrorCode::kNotFound);
  EXPECT_EQ(store->tokens(2), 64u);
}

TEST(MemoryStore, TokensAreThoseThatAllLayersHave) {
  auto store = make_memory_store(shape_of(), kMemoryBytes, 1);
  ASSERT_TRUE(store->open(1, 64).ok());
  append(*store, 1, 0, 5);
  const std::vector<float> one = random_floats(kRow, 1);
  ASSERT_TRUE(store->append(1, 1, 1, DataType::kF32, one.data(), one.data()).ok());
  EXPECT_EQ(store->tokens(1), 5u);
}

}  // namespace
}  // namespace smartinf::engine
