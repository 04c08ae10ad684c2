// Keys and values on devices: the bits of a store in memory, wherever sequences lie and however
// often the process ends, and no sequence pays for another one's device.
#include "smartinf/engine/device_key_value_store.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/emulated_device.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/smallest_state.h"
#include "smartinf/plan/cache_traffic.h"
#include "smartinf/serve/test_server.h"

namespace smartinf::engine::on_devices {
namespace {

using base::DataType;
using base::ErrorCode;
using base::Status;

constexpr uint32_t kLayers = 3;
constexpr uint32_t kHeads = 4;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kWidth = 64;
constexpr uint32_t kRow = kKvHeads * kWidth;
constexpr uint64_t kTokensMax = 400;

KeyValueShape shape_of() {
  return {.attention = {.block = {.kv_heads = kKvHeads,
                                  .head_width = kWidth,
                                  .format = kernels::CacheFormat::kF32},
                        .heads = kHeads,
                        .scale = 0.125f},
          .layers = kLayers,
          .windows = {0, 70, 0}};
}

std::vector<float> random_floats(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(n);
  for (float& value : values) value = uniform(random);
  return values;
}

/// Keys, and values, of a sequence's layer.
const std::vector<float>& rows_of(SequenceId id, uint32_t layer, bool values) {
  static std::map<std::tuple<SequenceId, uint32_t, bool>, std::vector<float>> made;
  std::vector<float>& rows = made[{id, layer, values}];
  if (rows.empty()) {
    rows = random_floats(kTokensMax * kRow, static_cast<uint32_t>(20 * id + 2 * layer + values));
  }
  return rows;
}

/// Rows of the sequence, or of another one.
Status append(KeyValueStore& store, SequenceId id, uint32_t layer, uint64_t first, uint64_t count,
              SequenceId other = 0) {
  const SequenceId of = other == 0 ? id : other;
  return store.append(id, layer, count, DataType::kF32,
                      rows_of(of, layer, false).data() + first * kRow,
                      rows_of(of, layer, true).data() + first * kRow);
}
void append_to_all(KeyValueStore& store, SequenceId id, uint64_t first, uint64_t count,
                   SequenceId other = 0) {
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const Status status = append(store, id, layer, first, count, other);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
}

struct Answers {
  std::vector<std::vector<float>> out;
  Status status;
};

/// A step over layers, in two halves, each with a token more. tokens: those that are there before.
Answers step(KeyValueStore& store, const std::vector<SequenceId>& ids,
             std::map<SequenceId, uint64_t>& tokens) {
  Answers answers;
  const size_t half = ids.size() / 2;
  const std::span<const SequenceId> halves[] = {std::span(ids).first(half),
                                                std::span(ids).subspan(half)};
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    std::vector<std::vector<AttendQuery>> asked(2);
    std::vector<std::vector<float>> queries;
    queries.reserve(ids.size());
    answers.out.reserve(ids.size() * kLayers);
    std::vector<AttendTicket> tickets;
    for (size_t h = 0; h < 2; ++h) {
      for (const SequenceId id : halves[h]) {
        if (store.failure(id).ok()) (void)append(store, id, layer, tokens[id], 1);
        queries.push_back(random_floats(
            kHeads * kWidth, static_cast<uint32_t>(1000 + id + 50 * layer + tokens[id])));
        asked[h].push_back(
            {id, queries.back().data(), answers.out.emplace_back(kHeads * kWidth).data()});
      }
      const auto ticket = store.begin_attend(layer, asked[h]);
      EXPECT_TRUE(ticket.ok()) << ticket.status().to_string();
      tickets.push_back(*ticket);
    }
    for (const AttendTicket ticket : tickets) {
      Status status = store.finish_attend(ticket);
      if (!status.ok() && answers.status.ok()) answers.status = std::move(status);
    }
  }
  for (const SequenceId id : ids) ++tokens[id];
  return answers;
}

enum class Where { kOneDirectory, kTwoDirectories, kFiveEmulated, kRemote };

class DeviceStoreTest : public testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    if (GetParam() == Where::kRemote && !serve::wire::has_transport()) {
      GTEST_SKIP() << "built without gRPC";
    }
    options_.io_bytes = base::kMiB;
    options_.io_depth = 4;
    options_.pin_threads = false;
    const std::map<Where, std::vector<double>> rates = {{Where::kOneDirectory, {1}},
                                                        {Where::kTwoDirectories, {1, 3}},
                                                        {Where::kFiveEmulated, {5, 1, 2, 1, 9}},
                                                        {Where::kRemote, {1, 1}}};
    for (const double rate : rates.at(GetParam())) {
      DeviceOptions& device = options_.devices.emplace_back();
      device.path = scratch_ / ("d" + std::to_string(options_.devices.size()));
      device.name = "drive-" + std::to_string(options_.devices.size());
      device.threads = 1;
      device.bandwidth = rate;
      if (GetParam() != Where::kFiveEmulated) continue;
      device.internal_link.up_bytes_per_s = static_cast<uint64_t>(rate * 1e9);
      auto drive = csd::EmulatedDrive::create(
          *csd::EmulatedDrive::size_for(smallest_layout(), storage::Durability::kStep),
          8 * base::kMiB);
      ASSERT_TRUE(drive.ok());
      drives_.push_back(std::move(*drive));
    }
    if (GetParam() == Where::kRemote) serve_the_first();
  }
  void serve_the_first() {
    UpdaterOptions served_options = options_;
    served_options.devices.resize(1);
    serve::ServedDevice served;
    served.name = "fast0";
    served.memory_bytes = uint64_t{1} << 30;
    served.source =
        [served_options](
            const csd::SourceWishes&) -> base::Result<std::unique_ptr<csd::DeviceSource>> {
      return std::move(local_sources(served_options).front());
    };
    server_ = serve::wire::start_test_server(serve::wire::test_server_options({served}));
    options_.remote = serve::wire::TestTrust::shared().options();
    options_.devices.front().path = fmt::format("grpc://localhost:{}/fast0", server_->port());
  }
  DeviceSources sources() const {
    return GetParam() == Where::kFiveEmulated ? emulated_sources(options_, drives_)
                                              : local_sources(options_);
  }
  DeviceStoreOptions store_options() const {
    DeviceStoreOptions options;
    options.shape = shape_of();
    options.job[3] = 4;
    options.identity = "a model";
    options.device_memory_bytes = base::kMiB;
    return options;
  }
  void open_store(uint64_t device_memory_bytes = base::kMiB) {
    store_.reset();
    DeviceStoreOptions options = store_options();
    options.device_memory_bytes = device_memory_bytes;
    auto store = make_device_store(sources(), options);
    ASSERT_TRUE(store.ok()) << store.status().to_string();
    store_ = std::move(*store);
  }

  /// A step of a store in memory and of this one, whose answers are the same.
  void step_both(KeyValueStore& memory, const std::vector<SequenceId>& ids,
                 std::map<SequenceId, uint64_t>& tokens) {
    auto before = tokens;
    const Answers wanted = step(memory, ids, before);
    const Answers found = step(*store_, ids, tokens);
    ASSERT_TRUE(found.status.ok()) << found.status.to_string();
    EXPECT_TRUE(wanted.out == found.out);
    for (const SequenceId id : ids) EXPECT_EQ(store_->tokens(id), tokens[id]);
  }

  const base::Scratch scratch_;
  UpdaterOptions options_;
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives_;
  std::unique_ptr<serve::Server> server_;
  std::unique_ptr<KeyValueStore> store_;
};

TEST_P(DeviceStoreTest, BitsAreThoseOfAStoreInMemoryAlsoAfterTheProcessEnds) {
  const auto memory = make_memory_store(shape_of(), uint64_t{1} << 27, make_decoder_team(1));
  open_store();
  ASSERT_FALSE(HasFatalFailure());
  std::vector<SequenceId> ids;
  std::map<SequenceId, uint64_t> tokens;
  for (SequenceId id = 1; id <= 7; ++id) {
    const uint64_t prompt = 37 * id;
    for (KeyValueStore* store : {memory.get(), store_.get()}) {
      const Status opened = store->open(id, kTokensMax);
      ASSERT_TRUE(opened.ok()) << opened.to_string();
      append_to_all(*store, id, 0, prompt / 2);
      append_to_all(*store, id, prompt / 2, prompt - prompt / 2);
    }
    tokens[id] = prompt;
    ids.push_back(id);
  }
  const auto compare = [&] { step_both(*memory, ids, tokens); };
  for (int i = 0; i < 20; ++i) compare();
  const Status saved = store_->save();
  ASSERT_TRUE(saved.ok()) << saved.to_string();
  for (int i = 0; i < 15; ++i) compare();
  open_store();
  ASSERT_FALSE(HasFatalFailure());
  for (const SequenceId id : ids) {
    const Status opened = store_->open(id, kTokensMax);
    ASSERT_TRUE(opened.ok()) << opened.to_string();
    const uint64_t there = store_->tokens(id);
    EXPECT_GE(there, 37 * id) << "the prompt was saved, with its last block";
    EXPECT_LE(there, tokens[id] - 15) << "what came after the save is not there";
    for (uint64_t at = there; at < tokens[id]; ++at) append_to_all(*store_, id, at, 1);
  }
  for (int i = 0; i < 5; ++i) compare();
  // Closed ones make room; their ids can be used again.
  for (KeyValueStore* store : {memory.get(), store_.get()}) {
    store->close(4);
    ASSERT_TRUE(store->open(4, kTokensMax).ok());
    append_to_all(*store, 4, 0, 50);
  }
  tokens[4] = 50;
  compare();
  store_.reset();
  const Status erased = erase_device_store(sources());
  ASSERT_TRUE(erased.ok()) << erased.to_string();
  for (const auto& left : std::filesystem::recursive_directory_iterator(scratch_.path())) {
    EXPECT_TRUE(left.is_directory() || left.path().filename() == "smartinf.tuning") << left.path();
  }
}

constexpr SequenceId kPrefix = 77;
constexpr uint64_t kShared = 256;

/// Opens sequences with a common beginning, which memory has as their own, and `store` once.
void begin_shared(KeyValueStore& memory, KeyValueStore& store, const std::vector<SequenceId>& ids,
                  std::map<SequenceId, uint64_t>& tokens) {
  ASSERT_TRUE(store.open(kPrefix, kShared).ok());
  if (store.tokens(kPrefix) == 0) append_to_all(store, kPrefix, 0, kShared);
  for (const SequenceId id : ids) {
    ASSERT_TRUE(memory.open(id, kTokensMax).ok());
    const Status opened = store.open(id, kTokensMax, {kPrefix, kShared});
    ASSERT_TRUE(opened.ok()) << opened.to_string();
    append_to_all(memory, id, 0, kShared, kPrefix);
    for (KeyValueStore* one : {&memory, &store}) append_to_all(*one, id, kShared, 9 * id);
    tokens[id] = kShared + 9 * id;
  }
  store.close(kPrefix);
}

TEST_P(DeviceStoreTest, APrefixIsReadOnceAndChangesNoBit) {
  const auto memory = make_memory_store(shape_of(), uint64_t{1} << 27, make_decoder_team(1));
  constexpr uint64_t kMemory = 16 * base::kMiB;  // nothing that was read ahead makes room
  open_store(kMemory);
  ASSERT_FALSE(HasFatalFailure());
  // Those that share it are the first half of a step.
  const std::vector<SequenceId> sharing{1, 2, 3, 4};
  const std::vector<SequenceId> ids{1, 2, 3, 4, 7, 8, 9, 10};
  std::map<SequenceId, uint64_t> tokens;
  begin_shared(*memory, *store_, sharing, tokens);
  ASSERT_FALSE(HasFatalFailure());
  for (const SequenceId id : {7, 8, 9, 10}) {
    for (KeyValueStore* store : {memory.get(), store_.get()}) {
      ASSERT_TRUE(store->open(id, kTokensMax).ok());
      append_to_all(*store, id, 0, 40);
    }
    tokens[id] = 40;
  }
  const auto compare = [&] { step_both(*memory, ids, tokens); };
  for (int i = 0; i < 10; ++i) compare();
  ASSERT_TRUE(store_->save().ok());
  const auto read = store_->traffic();
  // Two layers' whole prefix and a window's three blocks are read once, and each sequence's own;
  // ahead of the next step no more than there is memory for.
  uint64_t blocks = 0;
  for (int i = 0; i < 60; ++i) {
    compare();
    blocks += 2 * kShared / kernels::kCacheBlockTokens + 3;
    for (const SequenceId id : ids) {
      blocks += kLayers * ((tokens[id] - (id <= 4 ? kShared : 0)) / kernels::kCacheBlockTokens);
    }
  }
  const uint64_t block_bytes = kernels::cache_block_bytes(shape_of().attention.block);
  EXPECT_LE(store_->traffic().since(read).up(base::TrafficKind::kCache),
            blocks * block_bytes + options_.devices.size() * kMemory);
  // After the process has ended, whichever are opened first.
  open_store();
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(store_->open(kPrefix, kShared).ok());
  EXPECT_EQ(store_->tokens(kPrefix), kShared);
  for (const SequenceId id : {4, 2, 8, 1, 3, 9, 7, 10}) {
    const SharedPrefix prefix = id <= 4 ? SharedPrefix{kPrefix, kShared} : SharedPrefix{};
    ASSERT_TRUE(store_->open(id, kTokensMax, prefix).ok());
    EXPECT_GE(store_->tokens(id), id <= 4 ? kShared + 9 * id : 40);
    for (uint64_t at = store_->tokens(id); at < tokens[id]; ++at) append_to_all(*store_, id, at, 1);
  }
  compare();
  store_->close(kPrefix);
  for (const SequenceId id : sharing) {
    store_->close(id);
    if (id == sharing.back()) break;
    EXPECT_TRUE(store_->open(kPrefix, kShared).ok()) << "taken up again";
    EXPECT_EQ(store_->tokens(kPrefix), kShared);
    store_->close(kPrefix);
  }
  ASSERT_TRUE(store_->open(kPrefix, kShared).ok());
  EXPECT_EQ(store_->tokens(kPrefix), 0u) << "nobody used it any more";
}

TEST_P(DeviceStoreTest, ErrorsAreNamed) {
  open_store();
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(store_->open(1, 40).ok());
  EXPECT_EQ(store_->open(1, 40).code(), ErrorCode::kAlreadyExists);
  EXPECT_EQ(append(*store_, 1, 0, 0, 41).code(), ErrorCode::kOutOfMemory);
  EXPECT_EQ(append(*store_, 2, 0, 0, 1).code(), ErrorCode::kNotFound);
  const AttendQuery none{2, nullptr, nullptr};
  EXPECT_EQ(store_->begin_attend(0, std::span(&none, 1)).status().code(), ErrorCode::kNotFound);
  EXPECT_EQ(store_->tokens(2), 0u);
  ASSERT_TRUE(store_->save().ok());
  store_.reset();
  DeviceStoreOptions other = store_options();
  other.identity = "another model";
  const auto refused = make_device_store(sources(), other);
  EXPECT_EQ(refused.status().code(), ErrorCode::kMismatch);
  EXPECT_NE(refused.status().to_string().find("drive-1"), std::string::npos)
      << refused.status().to_string();
  other.afresh = true;
  EXPECT_TRUE(make_device_store(sources(), other).ok());
  if (GetParam() != Where::kFiveEmulated) return;
  // Drives of 8 MiB: all of them together are full at some point.
  open_store();
  ASSERT_FALSE(HasFatalFailure());
  Status full;
  SequenceId id = 1;
  for (; full.ok() && id < 100; ++id) full = store_->open(id, kTokensMax);
  EXPECT_EQ(full.code(), ErrorCode::kNoSpace) << full.to_string();
  EXPECT_EQ(id, 5u * 5 + 2) << "five on each of five drives, and one too many";
  store_->close(3);
  EXPECT_TRUE(store_->open(1000, kTokensMax).ok());
}

/// A source that shows the devices that it opens.
class ShownSource final : public DeviceSource {
 public:
  ShownSource(std::unique_ptr<DeviceSource> source, std::vector<csd::Device*>& shown)
      : source_(std::move(source)), shown_(shown) {}
  const std::string& name() const override { return source_->name(); }
  std::string place() const override { return source_->place(); }
  base::Result<std::optional<storage::StoreState>> peek() override { return source_->peek(); }
  base::Result<double> bandwidth() override { return source_->bandwidth(); }
  base::Result<uint64_t> capacity_bytes() override { return source_->capacity_bytes(); }
  base::Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                                    const DeviceShare& share) override {
    return show(source_->create(layout, share));
  }
  base::Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) override {
    return show(source_->open(share));
  }
  Status erase() override { return source_->erase(); }

 private:
  base::Result<std::unique_ptr<csd::Device>> show(
      base::Result<std::unique_ptr<csd::Device>> device) {
    if (device.ok()) shown_.push_back(device->get());
    return device;
  }
  std::unique_ptr<DeviceSource> source_;
  std::vector<csd::Device*>& shown_;
};

/// Devices whose links are counted here.
class CountedDeviceStore : public DeviceStoreTest {};

TEST_P(CountedDeviceStore, MovesTheBytesOfTheFormula) {
  DeviceStoreOptions options = store_options();
  options.shape.attention.block.format = kernels::CacheFormat::kQ8;
  options.device_memory_bytes = 256 * base::kKiB;  // what is read ahead at the end is not compared
  std::vector<csd::Device*> devices;
  DeviceSources shown;
  for (auto& source : sources()) {
    shown.push_back(std::make_unique<ShownSource>(std::move(source), devices));
  }
  auto store = make_device_store(shown, options);
  ASSERT_TRUE(store.ok()) << store.status().to_string();
  plan::CacheModel model;
  model.layers = kLayers;
  model.heads = kHeads;
  model.kv_heads = kKvHeads;
  model.head_width = kWidth;
  model.windows = options.shape.windows;
  model.block_bytes = kernels::cache_block_bytes(options.shape.attention.block);
  const auto counted = [&] {
    plan::CacheTraffic all;
    for (const csd::Device* device : devices) {
      const auto drive = device->store_traffic();
      const auto link = device->host_traffic();
      all += {drive.up(base::TrafficKind::kCache), drive.down(base::TrafficKind::kCache),
              link.down(base::TrafficKind::kCache), link.up(base::TrafficKind::kCache)};
    }
    return all;
  };
  plan::CacheTraffic wanted;
  std::vector<SequenceId> ids;
  std::map<SequenceId, uint64_t> tokens;
  for (SequenceId id = 1; id <= 10; ++id) {
    ASSERT_TRUE((*store)->open(id, kTokensMax).ok());
    tokens[id] = 31 * id;
    append_to_all(**store, id, 0, tokens[id]);
    wanted += plan::sequence_traffic(model, tokens[id], 0).prefill;
    ids.push_back(id);
  }
  ASSERT_TRUE((*store)->save().ok());
  const plan::CacheTraffic prompts = counted();
  EXPECT_EQ(prompts.written, wanted.written);
  EXPECT_EQ(prompts.link_down, wanted.link_down);
  wanted = {};
  for (int i = 0; i < 80; ++i) {
    std::vector<plan::CachedSequence> sequences;
    for (const SequenceId id : ids) sequences.push_back({tokens[id]});
    wanted += plan::step_traffic(model, sequences);
    ASSERT_TRUE(step(**store, ids, tokens).status.ok());
  }
  ASSERT_TRUE((*store)->save().ok());
  const plan::CacheTraffic all = counted();
  EXPECT_EQ(all.written - prompts.written, wanted.written);
  EXPECT_EQ(all.link_down - prompts.link_down, wanted.link_down);
  EXPECT_EQ(all.link_up - prompts.link_up, wanted.link_up);
  const auto read = static_cast<double>(all.read - prompts.read);
  EXPECT_NEAR(read / static_cast<double>(wanted.read), 1, 0.01);
}

class DamagedDeviceStore : public DeviceStoreTest {};

TEST_P(DamagedDeviceStore, FailsItsSequenceOnly) {
  const auto memory = make_memory_store(shape_of(), uint64_t{1} << 27, make_decoder_team(1));
  open_store();
  ASSERT_FALSE(HasFatalFailure());
  std::vector<SequenceId> ids;
  std::map<SequenceId, uint64_t> tokens;
  for (SequenceId id = 1; id <= 8; ++id) {
    for (KeyValueStore* store : {memory.get(), store_.get()}) {
      ASSERT_TRUE(store->open(id, kTokensMax).ok());
      append_to_all(*store, id, 0, 100);
    }
    tokens[id] = 100;
    ids.push_back(id);
  }
  ASSERT_TRUE(store_->save().ok());
  // The first sequence of the first drive; the other has three times as many.
  store_.reset();
  {
    std::fstream file(scratch_ / "d1/smartinf.cache",
                      std::ios::in | std::ios::out | std::ios::binary);
    ASSERT_TRUE(file);
    file.seekp(static_cast<std::streamoff>(128 * base::kKiB + 5000));
    file.put('x');
    file.put('y');
  }
  open_store();
  ASSERT_FALSE(HasFatalFailure());
  for (const SequenceId id : ids) {
    ASSERT_TRUE(store_->open(id, kTokensMax).ok());
    ASSERT_EQ(store_->tokens(id), 100u);
  }
  auto before = tokens;
  const Answers wanted = step(*memory, ids, before);
  const Answers found = step(*store_, ids, tokens);
  EXPECT_EQ(found.status.code(), ErrorCode::kCorrupt) << found.status.to_string();
  EXPECT_NE(found.status.to_string().find("drive-1"), std::string::npos)
      << found.status.to_string();
  size_t failed = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!store_->failure(ids[i]).ok()) {
      ++failed;
      EXPECT_NE(found.status.to_string().find(fmt::format("sequence {}", ids[i])),
                std::string::npos);
      // Made again.
      store_->close(ids[i]);
      ASSERT_TRUE(store_->open(ids[i], kTokensMax).ok());
      EXPECT_EQ(store_->tokens(ids[i]), 0u);
      append_to_all(*store_, ids[i], 0, tokens[ids[i]]);
      continue;
    }
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_TRUE(wanted.out[layer * ids.size() + i] == found.out[layer * ids.size() + i]);
    }
  }
  EXPECT_EQ(failed, 1u);
  before = tokens;
  const Answers again = step(*memory, ids, before);
  EXPECT_TRUE(again.out == step(*store_, ids, tokens).out);
}

TEST_P(DamagedDeviceStore, APrefixFailsThoseThatUseItAndTheyAreMadeAgain) {
  const auto memory = make_memory_store(shape_of(), uint64_t{1} << 27, make_decoder_team(1));
  open_store();
  ASSERT_FALSE(HasFatalFailure());
  std::map<SequenceId, uint64_t> tokens;
  // The prefix and what shares it come first, on the first drive.
  begin_shared(*memory, *store_, {1, 2, 3}, tokens);
  ASSERT_FALSE(HasFatalFailure());
  const std::vector<SequenceId> ids{1, 2, 3, 8, 9};
  for (const SequenceId id : {8, 9}) {
    for (KeyValueStore* store : {memory.get(), store_.get()}) {
      ASSERT_TRUE(store->open(id, kTokensMax).ok());
      append_to_all(*store, id, 0, 100);
    }
    tokens[id] = 100;
  }
  ASSERT_TRUE(store_->save().ok());
  store_.reset();
  const auto damage = [&](const char* drive) {
    std::fstream file(scratch_ / (std::string(drive) + "/smartinf.cache"),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(128 * base::kKiB + 5000));
    file << "xyz";
    return file.good();
  };
  ASSERT_TRUE(damage("d2")) << "of three times the speed";
  open_store();
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(store_->open(kPrefix, kShared).ok());
  for (const SequenceId id : ids) {
    const SharedPrefix prefix = id < 8 ? SharedPrefix{kPrefix, kShared} : SharedPrefix{};
    ASSERT_TRUE(store_->open(id, kTokensMax, prefix).ok());
    ASSERT_EQ(store_->tokens(id), tokens[id]);
  }
  store_->close(kPrefix);
  auto before = tokens;
  const Answers wanted = step(*memory, ids, before);
  const Answers found = step(*store_, ids, tokens);
  EXPECT_EQ(found.status.code(), ErrorCode::kCorrupt) << found.status.to_string();
  EXPECT_NE(found.status.to_string().find("sequence 77"), std::string::npos)
      << found.status.to_string();
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(store_->failure(ids[i]).ok(), ids[i] >= 8) << ids[i];
    for (uint32_t layer = 0; layer < kLayers && ids[i] >= 8; ++layer) {
      EXPECT_TRUE(wanted.out[layer * ids.size() + i] == found.out[layer * ids.size() + i]);
    }
  }
  for (const SequenceId id : {1, 2, 3}) {
    EXPECT_FALSE(append(*store_, id, 0, tokens[id], 1).ok());
    store_->close(id);
    memory->close(id);
  }
  begin_shared(*memory, *store_, {1, 2, 3}, tokens);
  ASSERT_FALSE(HasFatalFailure());
  before = tokens;
  const Answers again = step(*memory, ids, before);
  const Answers made = step(*store_, ids, tokens);
  ASSERT_TRUE(made.status.ok()) << made.status.to_string();
  EXPECT_TRUE(again.out == made.out);
}

std::string name_of(const testing::TestParamInfo<Where>& where) {
  switch (where.param) {
    case Where::kOneDirectory:
      return "one_directory";
    case Where::kTwoDirectories:
      return "two_directories";
    case Where::kFiveEmulated:
      return "five_emulated";
    case Where::kRemote:
      return "remote";
  }
  return {};
}

INSTANTIATE_TEST_SUITE_P(Places, DeviceStoreTest,
                         testing::Values(Where::kOneDirectory, Where::kTwoDirectories,
                                         Where::kFiveEmulated, Where::kRemote),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Places, CountedDeviceStore,
                         testing::Values(Where::kOneDirectory, Where::kTwoDirectories,
                                         Where::kFiveEmulated),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Places, DamagedDeviceStore, testing::Values(Where::kTwoDirectories),
                         name_of);

}  // namespace
}  // namespace smartinf::engine::on_devices
