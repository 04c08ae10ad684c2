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

/// Tokens [first, first + count) of a sequence, or of another one, into every layer.
void append(KeyValueStore& store, SequenceId id, uint64_t first, uint64_t count,
            SequenceId other = 0) {
  const SequenceId of = other == 0 ? id : other;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_TRUE(store
                    .append(id, layer, count, DataType::kF32,
                            rows_of(of, layer, false).data() + first * kRow,
                            rows_of(of, layer, true).data() + first * kRow)
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
  auto together = make_memory_store(shape_of(), kMemoryBytes, make_decoder_team(3));
  for (const SequenceId id : {1, 2, 3}) {
    ASSERT_TRUE(together->open(id, 100).ok());
    append(*together, id, 0, 30 * id);
  }
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const std::vector<float> all = attend(*together, layer, {3, 1, 2});
    for (const auto& [place, id] : {std::pair<size_t, SequenceId>{0, 3}, {1, 1}, {2, 2}}) {
      auto alone = make_memory_store(shape_of(), kMemoryBytes, make_decoder_team(1));
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
  auto store = make_memory_store(shape_of({0, 40, 40}), kMemoryBytes, make_decoder_team(2));
  auto all = make_memory_store(shape_of(), kMemoryBytes, make_decoder_team(2));
  ASSERT_TRUE(store->open(1, kTokensMax).ok());
  ASSERT_TRUE(all->open(1, kTokensMax).ok());
  append(*store, 1, 0, kTokensMax);
  append(*all, 1, 0, kTokensMax);
  EXPECT_EQ(attend(*store, 0, {1}), attend(*all, 0, {1}));
  EXPECT_NE(attend(*store, 1, {1}), attend(*all, 1, {1}));
  auto whole = make_memory_store(shape_of({0, 40, kTokensMax}), kMemoryBytes, make_decoder_team(2));
  ASSERT_TRUE(whole->open(1, kTokensMax).ok());
  for (uint64_t t = 0; t < kTokensMax; ++t) append(*whole, 1, t, 1);
  EXPECT_EQ(attend(*store, 1, {1}), attend(*whole, 1, {1}));
  EXPECT_EQ(attend(*whole, 2, {1}), attend(*all, 2, {1}));
}

TEST(MemoryStore, TakesNoMoreMemoryThanItIsGiven) {
  // One block of a layer; 2 sequences of 64 tokens are 12 blocks.
  const uint64_t block_bytes = kernels::cache_block_bytes(shape_of().attention.block);
  auto store = make_memory_store(shape_of(), 12 * block_bytes, make_decoder_team(1));
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

TEST(MemoryStore, APrefixIsSharedWithTheSameBitsUntilNobodyUsesIt) {
  constexpr uint64_t kShared = 96;
  constexpr SequenceId kPrefix = 9;
  for (const std::vector<uint32_t>& windows : {std::vector<uint32_t>(), {0, 40, 100}}) {
    const uint64_t room = memory_store_bytes(shape_of(windows), kShared) +
                          2 * memory_store_bytes(shape_of(windows), kTokensMax - kShared);
    auto shared = make_memory_store(shape_of(windows), room, make_decoder_team(2));
    auto alone = make_memory_store(shape_of(windows), kMemoryBytes, make_decoder_team(2));
    ASSERT_TRUE(shared->open(kPrefix, kShared).ok());
    append(*shared, kPrefix, 0, 64);
    for (const SequenceId id : {1, 2}) {
      ASSERT_TRUE(shared->open(id, kTokensMax, {kPrefix, kShared}).ok());
      EXPECT_EQ(shared->tokens(id), kShared);
      ASSERT_TRUE(alone->open(id, kTokensMax).ok());
      append(*alone, id, 0, kShared, kPrefix);
    }
    const AttendQuery early{.id = 1};
    EXPECT_EQ(shared->begin_attend(0, {&early, 1}).status().code(), ErrorCode::kFailedPrecondition);
    append(*shared, kPrefix, 64, 32);
    EXPECT_EQ(shared->open(3, kTokensMax, {kPrefix, kShared}).code(), ErrorCode::kOutOfMemory);
    shared->close(kPrefix);
    EXPECT_EQ(shared->tokens(kPrefix), 0u);
    const auto compare = [&](const std::vector<SequenceId>& ids) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        EXPECT_EQ(attend(*shared, layer, ids), attend(*alone, layer, ids)) << "layer " << layer;
      }
    };
    compare({1, 2});
    for (const uint64_t count : {1, 30, 50}) {
      for (const SequenceId id : {1, 2}) {
        const uint64_t first = shared->tokens(id);
        append(*shared, id, first, count);
        append(*alone, id, first, count);
      }
      compare({2, 1});
    }
    shared->close(1);
    compare({2});
    // It is taken up again, as the same only.
    EXPECT_EQ(shared->open(kPrefix, 32).code(), ErrorCode::kAlreadyExists);
    ASSERT_TRUE(shared->open(kPrefix, kShared).ok());
    EXPECT_EQ(shared->tokens(kPrefix), kShared);
    EXPECT_EQ(shared->open(kPrefix, kShared).code(), ErrorCode::kAlreadyExists);
    ASSERT_TRUE(shared->open(1, kTokensMax, {kPrefix, kShared}).ok());
    for (const SequenceId id : {1, 2}) shared->close(id);
    EXPECT_EQ(shared->tokens(kPrefix), kShared) << "open itself";
    for (const SharedPrefix& wrong : {SharedPrefix{kPrefix, 64}, SharedPrefix{kPrefix, 90}}) {
      EXPECT_EQ(shared->open(1, kTokensMax, wrong).code(), ErrorCode::kInvalidArgument);
    }
    EXPECT_EQ(shared->open(1, kShared, {kPrefix, kShared}).code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(shared->open(1, kTokensMax, {8, kShared}).code(), ErrorCode::kNotFound);
    shared->close(kPrefix);
    EXPECT_EQ(shared->open(1, kTokensMax, {kPrefix, kShared}).code(), ErrorCode::kNotFound);
    ASSERT_TRUE(shared->open(1, kTokensMax).ok()) << "its room is free";
    ASSERT_TRUE(shared->open(2, kTokensMax - kShared).ok());
  }
}

TEST(MemoryStore, TokensAreThoseThatAllLayersHave) {
  auto store = make_memory_store(shape_of(), kMemoryBytes, make_decoder_team(1));
  ASSERT_TRUE(store->open(1, 64).ok());
  append(*store, 1, 0, 5);
  const std::vector<float> one = random_floats(kRow, 1);
  ASSERT_TRUE(store->append(1, 1, 1, DataType::kF32, one.data(), one.data()).ok());
  EXPECT_EQ(store->tokens(1), 5u);
}

}  // namespace
}  // namespace smartinf::engine
