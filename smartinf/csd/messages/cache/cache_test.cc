// The cache of a device: what it folds has the bits of a fold in memory, and what it cannot vouch
// for is an error.
#include <map>
#include <optional>
#include <thread>

#include "smartinf/base/log.h"
#include "smartinf/csd/messages/cache/cache_memory.h"
#include "smartinf/storage/cache_file.h"
#include "smartinf/storage/faulty_ring.h"

#include "tests/device_contract/contract.h"

namespace smartinf::csd {
namespace {

constexpr uint64_t kTokens = kernels::kCacheBlockTokens;
constexpr uint32_t kLayers = 2;

const kernels::AttentionShape kShape{{2, 64, kernels::CacheFormat::kBf16}, 4, 0.125f, 0};

/// Keys and values by the sequence, the layer and the place.
class TestSequences {
 public:
  uint64_t block_bytes() const { return kernels::cache_block_bytes(kShape.block); }

  /// Blocks of `tokens` tokens, from a block on.
  std::vector<std::byte> blocks(uint64_t id, uint32_t layer, uint64_t first,
                                uint64_t tokens) const {
    std::vector<std::byte> all(base::divide_up(tokens, kTokens) * block_bytes());
    for (uint64_t at = 0; at < tokens; at += kTokens) {
      const uint64_t block = first + at / kTokens;
      const uint64_t count = std::min(kTokens, tokens - at);
      std::vector<float> keys(kTokens * kShape.block.kv_heads * kShape.block.head_width);
      std::vector<float> values(keys.size());
      std::mt19937_64 random(id * 1000003 + layer * 1009 + block);
      std::uniform_real_distribution<float> uniform(-1, 1);
      for (size_t i = 0; i < keys.size(); ++i) {
        keys[i] = uniform(random);
        values[i] = uniform(random);
      }
      kernels::append_tokens(
          kShape.block, std::span(all).subspan(at / kTokens * block_bytes(), block_bytes()), 0,
          static_cast<uint32_t>(count), DataType::kF32, keys.data(), values.data());
    }
    return all;
  }
  static std::vector<float> query(uint64_t seed) {
    std::vector<float> query(kShape.heads * kShape.block.head_width);
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<float> uniform(-2, 2);
    for (float& value : query) value = uniform(random);
    return query;
  }
  /// The state after tokens [first, end), folded here.
  std::vector<float> folded(uint64_t id, uint32_t layer, uint64_t first, uint64_t end,
                            const std::vector<float>& query, std::vector<float> state = {}) const {
    if (state.empty()) {
      state.resize(kShape.state_floats());
      kernels::begin_fold(kShape, state.data());
    }
    const kernels::FoldQuery one{query.data(), state.data()};
    for (uint64_t block = first / kTokens; block < end / kTokens; ++block) {
      const std::vector<std::byte> bytes = blocks(id, layer, block, kTokens);
      kernels::fold_block(kShape, bytes, kernels::range_in_block(block, first, end), {&one, 1});
    }
    return state;
  }
};

OpenCache open_message() {
  OpenCache open;
  open.job[0] = 9;
  open.layers = kLayers;
  open.shape = kShape;
  open.identity = "a model";
  return open;
}

class DeviceCache : public DeviceContract {
 protected:
  void SetUp() override {
    DeviceContract::SetUp();
    cache_memory_bytes_ = 40 * data_.block_bytes();
  }
  void create_and_open() {
    create();
    ASSERT_FALSE(HasFatalFailure());
    const Status status = run(open_message());
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  void open_again() {
    open();
    ASSERT_FALSE(HasFatalFailure());
    const Status status = run(open_message());
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  base::Result<uint64_t> open_sequence(uint64_t id, uint64_t tokens_max) {
    uint64_t saved = 99;
    SI_RETURN_IF_ERROR(run(OpenSequence{id, tokens_max, false, &saved}));
    return saved;
  }
  Status append(uint64_t id, uint32_t layer, uint64_t first_block, uint64_t tokens) {
    const auto blocks = data_.blocks(id, layer, first_block, tokens);
    return run(AppendKeysValues{id, layer, first_block * kTokens, tokens, blocks});
  }
  void append_to_all(uint64_t id, uint64_t first_block, uint64_t tokens) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const Status status = append(id, layer, first_block, tokens);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
  }
  static Attend attend(uint64_t id, uint32_t layer, uint64_t first, uint64_t end,
                       const std::vector<float>& query, std::vector<float>& state) {
    Attend message;
    message.id = id;
    message.layer = layer;
    message.first_token = first;
    message.end_token = end;
    message.query = std::as_bytes(std::span(query));
    message.state_out = std::as_writable_bytes(std::span(state));
    return message;
  }
  void expect_attended(uint64_t id, uint32_t layer, uint64_t first, uint64_t end) {
    const auto query = TestSequences::query(id + layer);
    std::vector<float> state(kShape.state_floats());
    const Status status = run(attend(id, layer, first, end, query, state));
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(state == data_.folded(id, layer, first, end, query))
        << "sequence " << id << " layer " << layer << " tokens " << first << " to " << end;
  }

  TestSequences data_;
};

TEST_P(DeviceCache, FoldsHaveTheBitsOfThoseInMemoryAndBytesAreCounted) {
  create_and_open();
  ASSERT_FALSE(HasFatalFailure());
  for (const uint64_t id : {1, 2, 3}) {
    const auto saved = open_sequence(id, 20 * kTokens);
    ASSERT_TRUE(saved.ok()) << saved.status().to_string();
    EXPECT_EQ(*saved, 0u);
    append_to_all(id, 0, id * kTokens);
    append_to_all(id, id, 14 * kTokens);
  }
  // Some of it may wait in memory here.
  for (const uint64_t id : {1, 2, 3}) expect_attended(id, 1, 0, (id + 14) * kTokens);
  ASSERT_TRUE(run(SaveCache{}).ok());
  const auto store = device_->store_traffic();
  const auto host = device_->host_traffic();
  uint64_t read_blocks = 0;
  uint64_t queries = 0;
  for (const uint64_t id : {1, 2, 3}) {
    for (const auto& [first, end] :
         {std::pair{uint64_t{0}, 15 * kTokens}, std::pair{uint64_t{45}, 3 * kTokens},
          std::pair{5 * kTokens, 5 * kTokens}}) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        expect_attended(id, layer, first, end);
        read_blocks += end / kTokens - first / kTokens;
        ++queries;
      }
    }
  }
  EXPECT_EQ(device_->store_traffic().since(store).up(base::TrafficKind::kCache),
            read_blocks * data_.block_bytes());
  const auto crossed = device_->host_traffic().since(host);
  EXPECT_EQ(crossed.down(base::TrafficKind::kCache),
            queries * kShape.heads * kShape.block.head_width * sizeof(float));
  EXPECT_EQ(crossed.up(base::TrafficKind::kCache), queries * kShape.state_floats() * sizeof(float));
  // A fold that stopped elsewhere goes on here.
  const auto query = TestSequences::query(8);
  auto state = data_.folded(2, 0, 0, 4 * kTokens, query);
  const auto before = state;
  Attend message = attend(2, 0, 4 * kTokens, 16 * kTokens, query, state);
  message.state_in = std::as_bytes(std::span(before));
  ASSERT_TRUE(run(message).ok());
  EXPECT_TRUE(state == data_.folded(2, 0, 0, 16 * kTokens, query));
}

TEST_P(DeviceCache, ManyQueriesAtOnceInTheOrderThatWasSaidOrInAnother) {
  create_and_open();
  ASSERT_FALSE(HasFatalFailure());
  std::vector<LayerSequence> order;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint64_t id = 1; id <= 4; ++id) order.push_back({layer, id});
  }
  for (uint64_t id = 1; id <= 4; ++id) {
    ASSERT_TRUE(open_sequence(id, 20 * kTokens).ok());
    append_to_all(id, 0, 12 * kTokens);
  }
  ASSERT_TRUE(run(SaveCache{}).ok());
  const uint64_t step_bytes = order.size() * 12 * data_.block_bytes();
  const auto before = device_->store_traffic();
  ASSERT_TRUE(run(AttendOrder{order}).ok());
  const auto step = [&](const std::vector<LayerSequence>& asked, uint64_t blocks) {
    std::vector<std::vector<float>> queries, states;
    for (const LayerSequence& one : asked) {
      queries.push_back(TestSequences::query(one.id + one.layer));
      states.emplace_back(kShape.state_floats());
    }
    std::vector<Command> commands(asked.size());
    for (size_t i = 0; i < asked.size(); ++i) {
      commands[i].message =
          attend(asked[i].id, asked[i].layer, 0, blocks * kTokens, queries[i], states[i]);
      driver_.start(commands[i]);
    }
    for (size_t i = 0; i < asked.size(); ++i) {
      Completion done;
      ASSERT_TRUE(driver_.queue.pop(done, std::chrono::seconds(100)));
      ASSERT_TRUE(done.status.ok()) << done.status.to_string();
    }
    for (size_t i = 0; i < asked.size(); ++i) {
      EXPECT_TRUE(states[i] ==
                  data_.folded(asked[i].id, asked[i].layer, 0, blocks * kTokens, queries[i]));
    }
  };
  for (int i = 0; i < 3; ++i) step(order, 12);
  const uint64_t read = device_->store_traffic().since(before).up(base::TrafficKind::kCache);
  EXPECT_GE(read, 3 * step_bytes);
  EXPECT_LE(read, 3 * step_bytes + cache_memory_bytes_) << "read ahead, and nothing twice";
  // Blocks that come behind what was read ahead are folded as well.
  for (uint64_t id = 1; id <= 4; ++id) append_to_all(id, 12, kTokens);
  step(order, 13);
  std::vector<LayerSequence> backwards(order.rbegin(), order.rend());
  const auto between = device_->store_traffic();
  for (int i = 0; i < 3; ++i) {
    step(backwards, 13);
    step(order, 13);
  }
  EXPECT_LE(device_->store_traffic().since(between).up(base::TrafficKind::kCache),
            6 * order.size() * 13 * data_.block_bytes() + cache_memory_bytes_)
      << "what was read ahead stays until it is asked for";
  step(order, 7);
  ASSERT_TRUE(run(CloseSequence{3}).ok());
  backwards.erase(backwards.begin() + 1);
  backwards.erase(backwards.begin() + 4);
  step(backwards, 13);
}

TEST_P(DeviceCache, BlocksThatMemoryKeepsAreNotReadAgain) {
  if (GetParam().fake) GTEST_SKIP() << "reads nothing";
  cache_memory_bytes_ = kCacheWorkBytes + 20 * data_.block_bytes();
  create_and_open();
  ASSERT_FALSE(HasFatalFailure());
  const auto blocks_read = [&](uint64_t id, uint64_t blocks) {
    const auto before = device_->store_traffic();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      expect_attended(id, layer, 0, blocks * kTokens);
    }
    return device_->store_traffic().since(before).up(base::TrafficKind::kCache) /
           data_.block_bytes();
  };
  for (const uint64_t id : {1, 2}) {
    ASSERT_TRUE(open_sequence(id, 20 * kTokens).ok());
    append_to_all(id, 0, id == 1 ? 12 * kTokens : 3 * kTokens);
    ASSERT_TRUE(run(SaveCache{}).ok());
  }
  // The first has all: 12 blocks of one layer, the last 8 of the other.
  EXPECT_EQ(blocks_read(1, 12), 4u);
  EXPECT_EQ(blocks_read(2, 3), 6u);
  append_to_all(1, 12, 2 * kTokens);
  ASSERT_TRUE(run(SaveCache{}).ok());
  EXPECT_EQ(blocks_read(1, 14), 2u + 6u) << "the first blocks give way to the last";
  ASSERT_TRUE(run(CloseSequence{1}).ok());
  append_to_all(2, 3, 5 * kTokens);
  ASSERT_TRUE(run(SaveCache{}).ok());
  EXPECT_EQ(blocks_read(2, 8), 6u);
  EXPECT_EQ(blocks_read(2, 8), 0u) << "what was read right before those that are kept";
  open_again();
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(open_sequence(2, 20 * kTokens).ok());
  EXPECT_EQ(blocks_read(2, 8), 16u);
  EXPECT_EQ(blocks_read(2, 8), 0u);
}

TEST_P(DeviceCache, QueriesOverOnePrefixShareItsReads) {
  constexpr uint64_t kPrefix = 1000;
  constexpr uint64_t kShared = 60;  // blocks; the device has memory for 40
  create_and_open();
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(open_sequence(kPrefix, kShared * kTokens).ok());
  for (uint64_t block = 0; block < kShared; block += 4) append_to_all(kPrefix, block, 4 * kTokens);
  for (uint64_t id = 1; id <= 5; ++id) {
    ASSERT_TRUE(open_sequence(id, 5 * kTokens).ok());
    if (id > 1) append_to_all(id, 0, (id - 1) * kTokens);
  }
  // The first sees nothing of its own, and the last one a part of the prefix.
  const auto first_of = [](uint64_t id) { return id == 5 ? 7 * kTokens + 3 : 0; };
  const auto expected = [&](uint64_t id, uint32_t layer, const std::vector<float>& query) {
    auto state = data_.folded(kPrefix, layer, first_of(id), kShared * kTokens, query);
    return data_.folded(id, layer, 0, (id - 1) * kTokens, query, state);
  };
  const auto attend_all = [&](uint32_t layer, uint64_t wrong = 0) {
    std::vector<std::vector<float>> queries, states;
    std::vector<Command> commands(5);
    for (uint64_t id = 1; id <= 5; ++id) {
      queries.push_back(TestSequences::query(id + layer));
      states.emplace_back(kShape.state_floats());
      Attend message = attend(id, layer, 0, (id - 1) * kTokens, queries.back(), states.back());
      message.prefix_id = kPrefix;
      message.prefix_first_token = first_of(id);
      message.prefix_end_token = kShared * kTokens;
      message.more = id < 5;
      if (id == wrong) message.end_token += kTokens;
      commands[id - 1].message = message;
    }
    for (Command& command : commands) driver_.start(command);
    for (size_t i = 0; i < commands.size(); ++i) {
      Completion done;
      ASSERT_TRUE(driver_.queue.pop(done, std::chrono::seconds(100)));
      const auto id = static_cast<uint64_t>(done.command - commands.data()) + 1;
      const auto code = id == wrong ? base::ErrorCode::kInvalidArgument : base::ErrorCode::kOk;
      ASSERT_EQ(done.status.code(), code) << done.status.to_string();
      if (id == wrong) continue;
      EXPECT_TRUE(states[id - 1] == expected(id, layer, queries[id - 1])) << "sequence " << id;
    }
  };
  for (uint32_t layer = 0; layer < kLayers; ++layer) attend_all(layer);
  ASSERT_TRUE(run(SaveCache{}).ok());
  std::vector<LayerSequence> order;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (const uint64_t id : {kPrefix, uint64_t{2}, uint64_t{3}, uint64_t{4}, uint64_t{5}}) {
      order.push_back({layer, id});
    }
  }
  const auto before = device_->store_traffic();
  for (uint32_t layer = 0; layer < kLayers; ++layer) attend_all(layer);
  const uint64_t once = kLayers * (kShared + 1 + 2 + 3 + 4) * data_.block_bytes();
  if (!GetParam().fake) {
    EXPECT_EQ(device_->store_traffic().since(before).up(base::TrafficKind::kCache), once);
  }
  ASSERT_TRUE(run(AttendOrder{order}).ok());
  for (int i = 0; i < 3; ++i) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) attend_all(layer);
  }
  // A query that is refused holds up nobody, wherever it stands.
  for (const uint64_t wrong : {1, 3, 5}) attend_all(0, wrong);
  if (!GetParam().fake) {
    EXPECT_EQ(run(AttendOrder{}).code(), base::ErrorCode::kOk);
    const auto query = TestSequences::query(1);
    std::vector<float> state(kShape.state_floats());
    Attend message = attend(2, 0, 0, kTokens, query, state);
    message.prefix_id = kPrefix;
    message.prefix_end_token = kTokens;
    message.more = true;
    Command waits{message};
    driver_.start(waits);
    ASSERT_TRUE(run(AttendOrder{}).ok()) << "another message comes in place of more";
    Completion done;
    ASSERT_TRUE(driver_.queue.pop(done, std::chrono::seconds(100)));
    EXPECT_TRUE(done.status.ok()) << done.status.to_string();
  }
  const auto query = TestSequences::query(1);
  std::vector<float> state(kShape.state_floats());
  Attend message = attend(2, 0, 0, kTokens, query, state);
  message.prefix_end_token = kTokens;
  message.prefix_id = 77;
  EXPECT_EQ(run(message).code(), base::ErrorCode::kNotFound);
  if (!GetParam().fake) {
    message.prefix_id = 2;
    EXPECT_EQ(run(message).code(), base::ErrorCode::kInvalidArgument) << "itself";
  }
  message.prefix_id = kPrefix;
  message.prefix_end_token = (kShared + 1) * kTokens;
  EXPECT_EQ(run(message).code(), base::ErrorCode::kInvalidArgument);
}

/// But for the fake device, which forgets and is never full.
class DeviceCacheFile : public DeviceCache {};

TEST_P(DeviceCacheFile, WhatWasSavedIsThereAgain) {
  create_and_open();
  ASSERT_FALSE(HasFatalFailure());
  for (const uint64_t id : {1, 2}) ASSERT_TRUE(open_sequence(id, 9 * kTokens).ok());
  append_to_all(1, 0, 3 * kTokens + 5);
  append_to_all(2, 0, 2 * kTokens);
  ASSERT_TRUE(append(2, 0, 2, kTokens).ok());  // in one layer only
  ASSERT_TRUE(run(SaveCache{}).ok());
  ASSERT_TRUE(append(2, 0, 3, 7).ok());
  append_to_all(1, 3, 2 * kTokens);
  expect_attended(1, 0, 0, 5 * kTokens);
  open_again();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(*open_sequence(1, 9 * kTokens), 3 * kTokens + 5);
  EXPECT_EQ(open_sequence(1, 9 * kTokens).status().code(), base::ErrorCode::kAlreadyExists);
  EXPECT_EQ(*open_sequence(2, 9 * kTokens), 2 * kTokens);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    std::vector<std::byte> tail(data_.block_bytes());
    const Status status = run(ReadTail{1, layer, 5, tail});
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(tail == data_.blocks(1, layer, 3, 5));
    EXPECT_EQ(run(ReadTail{1, layer, 6, tail}).code(), base::ErrorCode::kNotFound);
    expect_attended(1, layer, 0, 3 * kTokens);
    expect_attended(2, layer, 0, 2 * kTokens);
  }
  append_to_all(1, 3, 4 * kTokens);
  expect_attended(1, 1, 0, 7 * kTokens);
  // Another job's, and none that was ever saved.
  open();
  OpenCache other = open_message();
  other.identity = "another model";
  const Status refused = run(other);
  EXPECT_EQ(refused.code(), base::ErrorCode::kMismatch);
  EXPECT_NE(refused.to_string().find("another model"), std::string::npos);
  other.afresh = true;
  ASSERT_TRUE(run(other).ok());
  EXPECT_EQ(*open_sequence(1, 9 * kTokens), 0u);
}

TEST_P(DeviceCacheFile, AFullDeviceSaysWhatIsMissingAndGoesOn) {
  create_and_open();
  ASSERT_FALSE(HasFatalFailure());
  // Blocks of 16 KiB in two layers, and 4 MiB of room.
  ASSERT_TRUE(open_sequence(1, 100 * kTokens).ok());
  const Status full = open_sequence(2, 40 * kTokens).status();
  EXPECT_EQ(full.code(), base::ErrorCode::kNoSpace);
  EXPECT_NE(full.to_string().find(std::to_string(42 * kLayers * data_.block_bytes())),
            std::string::npos)
      << full.to_string();
  append_to_all(1, 0, 3 * kTokens);
  expect_attended(1, 0, 0, 3 * kTokens);
  ASSERT_TRUE(run(CloseSequence{1}).ok());
  ASSERT_TRUE(open_sequence(2, 100 * kTokens).ok());
  // What was saved and is not taken up gives way.
  ASSERT_TRUE(run(SaveCache{}).ok());
  open_again();
  EXPECT_EQ(*open_sequence(3, 100 * kTokens), 0u);
}

TEST_P(DeviceCache, MessagesThatDoNotFitAreRefusedAndNothingIsChanged) {
  create_and_open();
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(open_sequence(1, 4 * kTokens).ok());
  append_to_all(1, 0, 2 * kTokens);
  EXPECT_EQ(append(1, 0, 1, kTokens).code(), base::ErrorCode::kInvalidArgument);
  EXPECT_EQ(append(1, 0, 3, kTokens).code(), base::ErrorCode::kInvalidArgument);
  EXPECT_EQ(append(1, 0, 2, 3 * kTokens).code(), base::ErrorCode::kInvalidArgument);
  EXPECT_EQ(append(7, 0, 0, kTokens).code(), base::ErrorCode::kNotFound);
  const auto query = TestSequences::query(1);
  std::vector<float> state(kShape.state_floats());
  EXPECT_EQ(run(attend(7, 0, 0, kTokens, query, state)).code(), base::ErrorCode::kNotFound);
  EXPECT_EQ(run(attend(1, 0, 0, 3 * kTokens, query, state)).code(),
            base::ErrorCode::kInvalidArgument);
  EXPECT_EQ(run(attend(1, 0, 0, kTokens + 1, query, state)).code(),
            base::ErrorCode::kInvalidArgument);
  EXPECT_EQ(run(CloseSequence{7}).code(), base::ErrorCode::kNotFound);
  expect_attended(1, 0, 0, 2 * kTokens);
  if (GetParam().fake) return;
  EXPECT_EQ(run(open_message()).code(), base::ErrorCode::kFailedPrecondition);
  OpenCache none = open_message();
  none.shape.heads = 3;
  EXPECT_EQ(run(none).code(), base::ErrorCode::kInvalidArgument);
}

std::vector<Kind> cache_kinds(bool fake) {
  std::vector<Kind> some = kinds();
  std::erase_if(some, [&](const Kind& kind) {
    constexpr std::string_view kNames[] = {"memory", "local",        "local_threads_ring",
                                           "remote", "five_threads", "behind_links_half_in_memory"};
    return !(fake && kind.fake) && std::ranges::find(kNames, kind.name) == std::end(kNames);
  });
  return some;
}
std::string kind_name(const testing::TestParamInfo<Kind>& kind) { return kind.param.name; }

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceCache, testing::ValuesIn(cache_kinds(true)), kind_name);
INSTANTIATE_TEST_SUITE_P(Kinds, DeviceCacheFile, testing::ValuesIn(cache_kinds(false)), kind_name);
INSTANTIATE_TEST_SUITE_P(
    OpenCl, DeviceCache,
    testing::ValuesIn(opencl_kinds({"opencl", "opencl_copied_half_in_memory"})), kind_name);

// Each shape is compared with the scalar truth when the cache is opened.
class DeviceCacheShape : public DeviceCache {};
TEST_P(DeviceCacheShape, IsFoldedByTheProcessor) {
  cache_memory_bytes_ = uint64_t{4} << 20;
  for (const kernels::CacheFormat format :
       {kernels::CacheFormat::kBf16, kernels::CacheFormat::kF32, kernels::CacheFormat::kQ8}) {
    for (const float softcap : {0.0f, 30.0f}) {
      create();
      ASSERT_FALSE(HasFatalFailure());
      OpenCache message = open_message();
      message.shape = {{3, 80, format}, 6, 0.125f, softcap};
      const Status status = run(message);
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}
INSTANTIATE_TEST_SUITE_P(OpenCl, DeviceCacheShape, testing::ValuesIn(opencl_kinds({"opencl"})),
                         kind_name);

// ---- Faults.

class DeviceCacheFaults : public DeviceCache {
 protected:
  void SetUp() override {
    DeviceCache::SetUp();
    faulty_ = true;
    faults_.kind = base::TrafficKind::kCache;
    create_and_open();
    for (const uint64_t id : {1, 2}) {
      ASSERT_TRUE(open_sequence(id, 20 * kTokens).ok());
      append_to_all(id, 0, 6 * kTokens);
    }
    ASSERT_TRUE(run(SaveCache{}).ok());
  }
};

TEST_P(DeviceCacheFaults, ABlockThatIsNotWhatWasWrittenIsNeverFolded) {
  faults_.what = Faults::What::kFlipReads;
  const auto query = TestSequences::query(1);
  std::vector<float> state(kShape.state_floats());
  const Status flipped = run(attend(1, 1, 0, 6 * kTokens, query, state));
  EXPECT_EQ(flipped.code(), base::ErrorCode::kCorrupt) << flipped.to_string();
  for (const char* named : {"drive-a", "sequence 1", "layer 1", "block "}) {
    EXPECT_NE(flipped.to_string().find(named), std::string::npos) << flipped.to_string();
  }
  faults_.what = Faults::What::kNothing;
  expect_attended(1, 1, 0, 6 * kTokens);
  // A block that the drive lost.
  faults_.what = Faults::What::kDropWrites;
  append_to_all(2, 6, kTokens);
  Status dropped = run(SaveCache{});
  EXPECT_TRUE(dropped.ok()) << "nobody can see it yet: " << dropped.to_string();
  faults_.what = Faults::What::kNothing;
  EXPECT_EQ(run(attend(2, 0, 0, 7 * kTokens, query, state)).code(), base::ErrorCode::kCorrupt);
  expect_attended(2, 0, 0, 6 * kTokens);
}

TEST_P(DeviceCacheFaults, ADamagedPrefixFailsThoseThatUseItAndASequencesOwnBlocksOnlyIt) {
  ASSERT_TRUE(open_sequence(3, 20 * kTokens).ok());
  append_to_all(3, 0, 2 * kTokens);
  ASSERT_TRUE(run(SaveCache{}).ok());
  const auto both = [&] {
    const auto query = TestSequences::query(1);
    std::vector<std::vector<float>> states(2, std::vector<float>(kShape.state_floats()));
    std::vector<Command> commands(2);
    for (const uint64_t id : {2, 3}) {
      Attend message = attend(id, 0, 0, 2 * kTokens, query, states[id - 2]);
      message.prefix_id = 1;
      message.prefix_end_token = 6 * kTokens;
      message.more = id == 2;
      commands[id - 2].message = message;
      driver_.start(commands[id - 2]);
    }
    std::vector<Status> said(2);
    for (int i = 0; i < 2; ++i) {
      Completion done;
      EXPECT_TRUE(driver_.queue.pop(done, std::chrono::seconds(100)));
      said[static_cast<size_t>(done.command - commands.data())] = done.status;
    }
    return said;
  };
  for (const Status& status : both()) EXPECT_TRUE(status.ok()) << status.to_string();
  faults_.what = Faults::What::kFlipReads;
  for (const Status& status : both()) {
    EXPECT_EQ(status.code(), base::ErrorCode::kCorrupt);
    EXPECT_NE(status.to_string().find("of sequence 1"), std::string::npos) << status.to_string();
  }
  // Behind the two reads of the prefix, and one more, the other one's own blocks.
  faults_.after = 3;
  const auto said = both();
  faults_.what = Faults::What::kNothing;
  ASSERT_NE(said[0].ok(), said[1].ok());
  const std::string failed = said[said[0].ok() ? 1 : 0].to_string();
  const std::string named = said[0].ok() ? "of sequence 3" : "of sequence 2";
  EXPECT_NE(failed.find(named), std::string::npos) << failed;
  for (const Status& status : both()) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_P(DeviceCacheFaults, BlocksThatAreNotWrittenYetAreFoldedFromMemory) {
  faults_.what = Faults::What::kHoldWrites;
  append_to_all(1, 6, 3 * kTokens);
  append_to_all(1, 9, kTokens);
  const auto before = device_->store_traffic();
  for (const uint64_t end : {7, 9, 10}) expect_attended(1, 1, 0, end * kTokens);
  expect_attended(1, 0, 8 * kTokens + 3, 10 * kTokens);
  EXPECT_EQ(device_->store_traffic().since(before).up(base::TrafficKind::kCache),
            3 * 6 * data_.block_bytes());
  faults_.what = Faults::What::kNothing;
  ASSERT_TRUE(run(SaveCache{}).ok());
  expect_attended(1, 1, 0, 10 * kTokens);
}

TEST_P(DeviceCacheFaults, AWriteThatFailsCostsItsSequenceOnly) {
  faults_.what = Faults::What::kFailWrites;
  ASSERT_TRUE(append(2, 1, 6, kTokens).ok());
  (void)run(SaveCache{});
  faults_.what = Faults::What::kNothing;
  const auto query = TestSequences::query(1);
  std::vector<float> state(kShape.state_floats());
  const Status failed = run(attend(2, 0, 0, 6 * kTokens, query, state));
  EXPECT_EQ(failed.code(), base::ErrorCode::kIo) << failed.to_string();
  EXPECT_NE(failed.to_string().find("sequence 2"), std::string::npos) << failed.to_string();
  expect_attended(1, 0, 0, 6 * kTokens);
  ASSERT_TRUE(run(CloseSequence{2}).ok());
  ASSERT_EQ(*open_sequence(2, 20 * kTokens), 0u);
  append_to_all(2, 0, 4 * kTokens);
  ASSERT_TRUE(run(SaveCache{}).ok());
  expect_attended(2, 1, 0, 4 * kTokens);
}

TEST_P(DeviceCacheFaults, ClosingAnswersWhatIsUnderWay) {
  const auto query = TestSequences::query(1);
  std::vector<float> state(kShape.state_floats());
  faults_.what = Faults::What::kHoldReads;
  CompletionQueue queue;
  Command command{attend(1, 0, 0, 6 * kTokens, query, state)};
  command.replies = &queue;
  device_->submit(command);
  std::jthread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    faults_.what = Faults::What::kNothing;
  });
  device_.reset();
  Completion done;
  EXPECT_TRUE(queue.pop(done, std::chrono::nanoseconds(0))) << "not answered";
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceCacheFaults, testing::ValuesIn([] {
                           Kind memory;
                           memory.name = "memory";
                           Kind local;
                           local.name = "local";
                           local.memory = false;
                           return std::vector<Kind>{memory, local};
                         }()),
                         kind_name);

class DeviceCacheOnABadDrive : public DeviceCache {};

TEST_P(DeviceCacheOnABadDrive, WhatIsFoldedIsRightOrAnError) {
  base::set_log_sink([](base::LogLevel, std::string_view) {});
  uint64_t right = 0;
  uint64_t wrong = 0;
  storage::FaultCounts counts;
  create();
  ASSERT_FALSE(HasFatalFailure());
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    device_.reset();
    LocalDeviceOptions bad = options();
    bad.store.wrap_ring = [&](std::unique_ptr<storage::Ring> ring) {
      storage::FaultOptions faults;
      faults.seed = seed;
      faults.short_transfer = faults.interrupted = faults.try_again = faults.delayed = 0.05;
      faults.no_space = faults.io_error = 0.01;
      faults.flipped_bit = faults.misdirected = faults.lost = 0.01;
      faults.from_offset_bytes = storage::kCacheDataOffset;
      return storage::make_faulty_ring(std::move(ring), faults, &counts);
    };
    auto made = EmulatedDrive::create(drive_->size_bytes(), cache_bytes_);
    ASSERT_TRUE(made.ok());
    auto device = create_emulated_device(bad, layout_, **made);
    if (!device.ok()) continue;
    driver_.drive(**device);
    OpenCache open = open_message();
    if (!run(open).ok()) continue;
    for (uint64_t id = 1; id <= 4; ++id) {
      Status status = open_sequence(id, 16 * kTokens).status();
      for (uint64_t block = 0; block < 16 && status.ok(); block += 4) {
        status = append(id, 0, block, 4 * kTokens);
      }
      if (status.ok()) (void)run(SaveCache{});
      const auto query = TestSequences::query(id);
      std::vector<float> state(kShape.state_floats());
      if (status.ok()) status = run(attend(id, 0, 0, 16 * kTokens, query, state));
      if (status.ok()) {
        ++right;
        EXPECT_TRUE(state == data_.folded(id, 0, 0, 16 * kTokens, query)) << "seed " << seed;
      } else {
        ++wrong;
        EXPECT_NE(status.to_string().find("drive-a"), std::string::npos) << status.to_string();
      }
    }
  }
  base::set_log_sink({});
  EXPECT_GT(right, 5u);
  EXPECT_GT(wrong, 5u);
  EXPECT_GT(counts.silent, 5u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceCacheOnABadDrive, testing::ValuesIn([] {
                           Kind memory;
                           memory.name = "memory";
                           return std::vector<Kind>{memory};
                         }()),
                         kind_name);

}  // namespace
}  // namespace smartinf::csd
