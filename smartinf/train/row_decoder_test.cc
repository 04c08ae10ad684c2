// Sequences that are continued together by rows, beside torch's operations one after another, and
// beside themselves alone.
#include "smartinf/train/row_decoder.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/train/model_source.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/torch_decoder.h"

namespace smartinf::train {
namespace {

using base::DataType;
using base::ErrorCode;
using base::Status;
using torch::Tensor;

constexpr uint64_t kTokens = 40;
constexpr uint64_t kLongTokens = 3 * kPromptPart;

/// Random weights in memory.
class DrawnWeights final : public engine::WeightSource {
 public:
  explicit DrawnWeights(uint64_t count) : count_(count) {
    torch::manual_seed(1);
    weights_N_ = torch::randn({static_cast<int64_t>(count)}) * 0.2;
  }
  plan::Subgroup subgroup_at(uint64_t /*element*/) const override {
    return {base::SubgroupId(0), 0, count_};
  }
  Status fetch_weights(uint64_t /*first*/, DataType type, void* out) override {
    torch::from_blob(out, weights_N_.sizes(), torch::dtype(scalar_type(type))).copy_(weights_N_);
    return Status();
  }
  Status wait_fetched(uint64_t /*first*/) override { return Status(); }
  Status load_weights(DataType type, const engine::WeightsSink& sink) override {
    return fetch_weights(0, type, sink(0));
  }
  Status wait_weights(uint64_t /*first*/, uint64_t /*count*/) override { return Status(); }

 private:
  const uint64_t count_;
  Tensor weights_N_;
};

/// A store in memory that loses a sequence.
class LosingStore final : public engine::KeyValueStore {
 public:
  LosingStore(const engine::KeyValueShape& shape, SequenceId loses, uint64_t attends)
      : store_(engine::make_memory_store(shape, uint64_t{1} << 26, engine::make_decoder_team(1))),
        loses_(loses),
        attends_left_(attends) {}

  Status open(SequenceId id, uint64_t tokens_max, engine::SharedPrefix prefix) override {
    return store_->open(id, tokens_max, prefix);
  }
  uint64_t tokens(SequenceId id) const override { return store_->tokens(id); }
  Status append(SequenceId id, uint32_t layer, uint64_t count, DataType type, const void* keys,
                const void* values) override {
    // 0: a prompt's keys and values are refused.
    if (id == loses_ && attends_left_ == 0) lost_ = true;
    SI_RETURN_IF_ERROR(failure(id));
    return store_->append(id, layer, count, type, keys, values);
  }
  base::Result<engine::AttendTicket> begin_attend(
      uint32_t layer, std::span<const engine::AttendQuery> queries) override {
    std::vector<engine::AttendQuery> others;
    for (const engine::AttendQuery& query : queries) {
      if (query.id == loses_ && attends_left_ > 0 && --attends_left_ == 0) lost_ = true;
      if (failure(query.id).ok()) others.push_back(query);
    }
    any_lost_ = others.size() < queries.size();
    SI_ASSIGN_OR_RETURN(const engine::AttendTicket ticket, store_->begin_attend(layer, others));
    SI_RETURN_IF_ERROR(store_->finish_attend(ticket));
    return ticket;
  }
  Status finish_attend(engine::AttendTicket /*ticket*/) override {
    return any_lost_ ? failure(loses_) : Status();
  }
  Status failure(SequenceId id) const override {
    return id == loses_ && lost_ ? Status(ErrorCode::kCorrupt, "a block is damaged") : Status();
  }
  void close(SequenceId id) override {
    if (id == loses_ && lost_) {
      lost_ = false;
      attends_left_ = ~uint64_t{0};
    }
    store_->close(id);
  }

 private:
  const std::unique_ptr<engine::KeyValueStore> store_;
  const SequenceId loses_;
  uint64_t attends_left_;
  bool lost_ = false;
  bool any_lost_ = false;
};

/// A store in memory that writes down what is begun and ended, and refuses the last of so many
/// attends.
class RecordingStore final : public engine::KeyValueStore {
 public:
  RecordingStore(const engine::KeyValueShape& shape, size_t attends, std::string& record)
      : store_(engine::make_memory_store(shape, uint64_t{1} << 26, engine::make_decoder_team(1))),
        attends_left_(attends),
        record_(record) {}
  Status open(SequenceId id, uint64_t tokens_max, engine::SharedPrefix prefix) override {
    return store_->open(id, tokens_max, prefix);
  }
  uint64_t tokens(SequenceId id) const override { return store_->tokens(id); }
  Status append(SequenceId id, uint32_t layer, uint64_t count, DataType type, const void* keys,
                const void* values) override {
    return store_->append(id, layer, count, type, keys, values);
  }
  base::Result<engine::AttendTicket> begin_attend(
      uint32_t layer, std::span<const engine::AttendQuery> queries) override {
    if (--attends_left_ == 0) return Status(ErrorCode::kIo, "it ends here");
    auto begun = store_->begin_attend(layer, queries);
    const std::string name =
        std::to_string(layer) + (queries.front().id == prompts_first_ ? "A" : "B");
    names_[*begun] = name;
    record_ += " " + name;
    return begun;
  }
  Status finish_attend(engine::AttendTicket ticket) override {
    record_ += " -" + names_.at(ticket);
    return store_->finish_attend(ticket);
  }
  void close(SequenceId id) override { store_->close(id); }

 private:
  const std::unique_ptr<engine::KeyValueStore> store_;
  size_t attends_left_;
  std::string& record_;
  const SequenceId prompts_first_ = 1;
  std::map<engine::AttendTicket, std::string> names_;
};

class Loaded {
 public:
  Loaded(const model::Architecture& architecture, DataType type)
      : type_(type),
        space_(model::make_parameter_space(architecture).value()),
        weights_(space_.count()),
        model_(architecture, space_, torch::dtype(scalar_type(type)), kLongTokens,
               /*frozen=*/true),
        stream_(weights_, model_, copies_, type, placement()),
        pass_(model_, stream_, nullptr, /*recompute=*/true, UnitInputs(std::nullopt), {}) {
    EXPECT_TRUE(stream_.load().ok());
  }

  std::unique_ptr<SequenceDecoder> by_rows(bool halves = false, uint32_t threads = 2,
                                           uint64_t bytes = uint64_t{1} << 26) {
    const auto format =
        type_ == DataType::kF32 ? kernels::CacheFormat::kF32 : kernels::CacheFormat::kBf16;
    const auto team = engine::make_decoder_team(threads);
    return std::make_unique<RowDecoder>(
        LoadedModel{model_, stream_, pass_, nullptr, type_},
        engine::make_memory_store(key_value_shape(model_.architecture(), format), bytes, team),
        RowDecoder::Options{team, halves, {}});
  }
  std::unique_ptr<SequenceDecoder> over(std::unique_ptr<engine::KeyValueStore> store, bool halves) {
    return std::make_unique<RowDecoder>(
        LoadedModel{model_, stream_, pass_, nullptr, type_}, std::move(store),
        RowDecoder::Options{engine::make_decoder_team(1), halves, {}});
  }
  std::unique_ptr<SequenceDecoder> losing(SequenceId id, uint64_t attends) {
    return std::make_unique<RowDecoder>(
        LoadedModel{model_, stream_, pass_, nullptr, type_},
        std::make_unique<LosingStore>(
            key_value_shape(model_.architecture(), kernels::CacheFormat::kBf16), id, attends),
        RowDecoder::Options{engine::make_decoder_team(1), false, {}});
  }
  std::unique_ptr<SequenceDecoder> recording(size_t attends, std::string& record) {
    return std::make_unique<RowDecoder>(
        LoadedModel{model_, stream_, pass_, nullptr, type_},
        std::make_unique<RecordingStore>(
            key_value_shape(model_.architecture(), kernels::CacheFormat::kBf16), attends, record),
        RowDecoder::Options{engine::make_decoder_team(1), true, {}});
  }
  std::unique_ptr<SequenceDecoder> by_torch() {
    return std::make_unique<TorchDecoder>(model_, pass_, torch::dtype(scalar_type(type_)),
                                          std::stop_token());
  }

 private:
  plan::UnitPlacement placement() const {
    const auto units = static_cast<uint32_t>(model_.units().size());
    return {units, units, 0, 0};
  }

  const DataType type_;
  const plan::ParameterSpace space_;
  DrawnWeights weights_;
  Model model_;
  const CopyStreams copies_{torch::kCPU};
  LayerStream stream_;
  UnitPass pass_;
};

struct Form {
  std::string name;
  model::Architecture architecture;
};

std::vector<Form> forms() {
  ModelOptions options;
  options.layers = 3;
  options.width = 40;
  options.heads = 4;
  options.kv_heads = 2;
  options.vocabulary = 50;
  const model::Architecture plain = architecture_of(options, kLongTokens);
  std::vector<Form> all;
  const auto add = [&](const char* name) -> model::Architecture& {
    return all.emplace_back(Form{name, plain}).architecture;
  };
  add("plain");
  model::Architecture& windows = add("windows");
  windows.family = model::Family::kGemma3;
  windows.windows = {5, 0, 33};
  windows.window_rope.base = 100;
  windows.attention_softcap = 2;
  windows.norm = model::Norm::kRmsPlusOne;
  windows.norm_after = windows.scaled_embedding = windows.query_key_norm = true;
  windows.activation = model::Activation::kGeluTanh;
  windows.logit_softcap = 3;
  model::Architecture& gpt2 = add("learned positions, transposed");
  gpt2.family = model::Family::kGpt2;
  gpt2.kv_heads = gpt2.heads;
  gpt2.learned_positions = gpt2.transposed = true;
  gpt2.norm = model::Norm::kLayer;
  gpt2.qkv_bias = gpt2.output_bias = gpt2.mlp_bias = true;
  gpt2.gated = false;
  gpt2.activation = model::Activation::kGelu;
  model::Architecture& experts = add("experts");
  experts.family = model::Family::kMixtral;
  experts.experts = 5;
  experts.experts_per_token = 2;
  experts.tied_head = false;
  return all;
}

using Prompts = std::map<SequenceId, std::vector<int64_t>>;

const Prompts& prompts() {
  static const Prompts kPrompts{{3, {7}}, {1, {4, 9, 30, 2, 8}}, {8, std::vector<int64_t>(20, 11)}};
  return kPrompts;
}

/// Logits of each step, by sequence.
using Logits = std::map<SequenceId, std::vector<std::vector<float>>>;

void admit(SequenceDecoder& decoder, const Prompts& some, std::span<const int64_t> made = {}) {
  std::vector<SequenceInput> inputs;
  for (const auto& [id, prompt] : some) {
    inputs.push_back({.id = id, .prompt = prompt, .made = made, .tokens_max = kTokens});
  }
  const Status status = decoder.admit(inputs);
  ASSERT_TRUE(status.ok()) << status.to_string();
}

/// The tokens that follow do not depend on the logits, so that decoders can be compared.
int64_t token_of(SequenceId id, size_t step) {
  return static_cast<int64_t>((7 * id + 13 * step) % 50);
}

void go_on(SequenceDecoder& decoder, size_t steps, Logits& logits) {
  const auto choose = [&](SequenceId id, std::span<const float> row) {
    logits[id].emplace_back(row.begin(), row.end());
    return token_of(id, logits[id].size());
  };
  for (size_t i = 0; i < steps; ++i) {
    const Status status = decoder.step(choose);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(RowDecoder, LogitsAreThoseOfTorch) {
  for (const DataType type : {DataType::kF32, DataType::kBf16}) {
    for (const Form& form : forms()) {
      SCOPED_TRACE(form.name + " " + std::string(base::data_type_name(type)));
      Loaded loaded(form.architecture, type);
      Logits here;
      Logits there;
      const auto by_rows = loaded.by_rows();
      admit(*by_rows, prompts());
      go_on(*by_rows, 9, here);
      const auto by_torch = loaded.by_torch();
      admit(*by_torch, prompts());
      go_on(*by_torch, 9, there);
      for (const auto& [id, steps] : there) {
        ASSERT_EQ(here[id].size(), steps.size());
        for (size_t i = 0; i < steps.size(); ++i) {
          const Tensor row_V = torch::tensor(here[id][i]);
          const Tensor row_of_torch_V = torch::tensor(steps[i]);
          const double largest = row_of_torch_V.abs().max().item<double>();
          // Sums in another order; in bf16 a last bit of the residual stream here and there.
          const double share = type == DataType::kF32 ? 2e-5 : 0.06;
          EXPECT_LT((row_V - row_of_torch_V).abs().max().item<double>(), share * largest)
              << "sequence " << id << ", step " << i;
        }
      }
    }
  }
}

TEST(RowDecoder, ASequenceHasTheSameBitsHoweverItIsComputed) {
  for (const Form& form : forms()) {
    SCOPED_TRACE(form.name);
    Loaded loaded(form.architecture, DataType::kBf16);
    Logits together;
    const auto all = loaded.by_rows();
    admit(*all, prompts());
    go_on(*all, 9, together);

    Logits otherwise;
    const auto late = loaded.by_rows(/*halves=*/true, /*threads=*/1);
    for (const auto& [id, prompt] : prompts()) {
      admit(*late, {{id, prompt}});
      go_on(*late, 2, otherwise);
    }
    go_on(*late, 3, otherwise);
    for (const auto& [id, prompt] : prompts()) {
      ASSERT_GE(otherwise[id].size(), 5u);
      together[id].resize(9);
      for (size_t i = 0; i < otherwise[id].size(); ++i) {
        EXPECT_EQ(otherwise[id][i], together[id][i]) << "sequence " << id << ", step " << i;
      }
      // Interrupted behind its fourth token, and gone on with alone.
      std::vector<int64_t> made;
      for (size_t i = 1; i <= 4; ++i) made.push_back(token_of(id, i));
      const auto again = loaded.by_rows();
      Logits behind{{id, {together[id].begin(), together[id].begin() + 4}}};
      admit(*again, {{id, prompt}}, made);
      go_on(*again, 5, behind);
      EXPECT_EQ(behind[id], together[id]);
    }
  }
}

TEST(RowDecoder, OnlyTheSequenceThatIsLostEndsAndItGoesOnWithTheSameBits) {
  constexpr SequenceId kLost = 8;
  Loaded loaded(forms().front().architecture, DataType::kBf16);
  Logits together;
  const auto all = loaded.by_rows();
  admit(*all, prompts());
  go_on(*all, 9, together);
  // In its prompt; in the first step; in the middle of the third one.
  for (const uint64_t attends : {0, 1, 8}) {
    SCOPED_TRACE(attends);
    Logits logits;
    const auto losing = loaded.losing(kLost, attends);
    admit(*losing, prompts());
    for (int i = 0; i < 9; ++i) {
      for (const LostSequence& one : losing->take_lost()) {
        EXPECT_EQ(one.id, kLost);
        EXPECT_EQ(one.why.code(), ErrorCode::kCorrupt);
        std::vector<int64_t> made;
        for (size_t m = 1; m <= logits[kLost].size(); ++m) made.push_back(token_of(kLost, m));
        admit(*losing, {{kLost, prompts().at(kLost)}}, made);
      }
      go_on(*losing, 1, logits);
    }
    EXPECT_EQ(logits.at(kLost).size(), attends == 0 ? 9u : 8u);
    Logits expected = together;
    expected[kLost].resize(logits.at(kLost).size());
    EXPECT_EQ(logits, expected);
  }
}

TEST(RowDecoder, AHalfAttendsWhileTheOtherIsComputedAcrossLayersToo) {
  Loaded loaded(forms().front().architecture, DataType::kBf16);
  const std::map<SequenceId, std::vector<int64_t>> two{{1, {5}}, {2, {7}}};
  const auto choose = [](SequenceId, std::span<const float>) { return int64_t{3}; };
  std::string record;
  const auto decoder = loaded.recording(1000, record);
  admit(*decoder, two);
  ASSERT_TRUE(decoder->step(choose).ok());
  ASSERT_EQ(forms().front().architecture.layers, 3u);
  EXPECT_EQ(record, " 0A 0B -0A 1A -0B 1B -1A 2A -1B 2B -2A -2B");
  // What is under way when a step fails is waited for: its memory goes.
  record.clear();
  const auto failing = loaded.recording(4, record);
  admit(*failing, two);
  EXPECT_EQ(failing->step(choose).code(), ErrorCode::kIo);
  EXPECT_EQ(record, " 0A 0B -0A 1A -0B -1A");
}

/// Two parts that all but one begin with; behind them one token, many, and a part and more.
struct SharedPrompts {
  SharedPrompts() {
    for (uint64_t i = 0; i < 2 * kPromptPart; ++i) shared.push_back(static_cast<int64_t>(i % 47));
    for (const auto& [id, behind] :
         {std::pair<SequenceId, size_t>{1, 1}, {2, 40}, {3, 60}, {4, kPromptPart - 20}}) {
      prompts[id] = shared;
      for (size_t i = 0; i < behind; ++i) {
        prompts[id].push_back(static_cast<int64_t>((i * id + 3) % 50));
      }
    }
    prompts[5] = {1, 2, 3};
  }
  std::vector<SequenceInput> inputs(const std::vector<SequenceId>& ids, bool share,
                                    const Prompts& made = {}) const {
    std::vector<SequenceInput> all;
    for (const SequenceId id : ids) {
      SequenceInput& input = all.emplace_back();
      input.id = id;
      input.prompt = prompts.at(id);
      input.tokens_max = input.prompt.size() + 10;
      if (made.contains(id)) input.made = made.at(id);
      if (!share || id == 5) continue;
      input.prefix = 1000;
      input.prefix_tokens = shared.size();
    }
    return all;
  }
  std::vector<int64_t> shared;
  Prompts prompts;
};

void admit_all(SequenceDecoder& decoder, const std::vector<SequenceInput>& inputs) {
  const Status status = decoder.admit(inputs);
  ASSERT_TRUE(status.ok()) << status.to_string();
}

TEST(RowDecoder, ASharedBeginningChangesNoBit) {
  const SharedPrompts some;
  DataType type = DataType::kF32;
  for (const Form& form : forms()) {
    type = type == DataType::kF32 ? DataType::kBf16 : DataType::kF32;
    SCOPED_TRACE(form.name + " " + std::string(base::data_type_name(type)));
    Loaded loaded(form.architecture, type);
    Logits alone;
    for (const auto& [id, prompt] : some.prompts) {
      const auto decoder = loaded.by_rows();
      admit_all(*decoder, some.inputs({id}, false));
      go_on(*decoder, 7, alone);
      EXPECT_EQ(decoder->shared_tokens(), 0u);
    }
    Logits shared;
    const auto decoder = loaded.by_rows(/*halves=*/true);
    admit_all(*decoder, some.inputs({2, 5, 1}, true));
    EXPECT_EQ(decoder->shared_tokens(), 0u) << "what the first has behind is its last token";
    go_on(*decoder, 2, shared);
    admit_all(*decoder, some.inputs({4, 3}, true));
    EXPECT_EQ(decoder->shared_tokens(), some.shared.size());
    go_on(*decoder, 1, shared);
    // All that had it leave; another one needs it anew.
    for (const SequenceId id : {1, 2, 4, 3}) decoder->release(id);
    for (const SequenceId id : {1, 2, 3, 4}) shared[id].clear();
    admit_all(*decoder, some.inputs({3, 1}, true));
    go_on(*decoder, 3, shared);
    // It goes on inside its answer.
    decoder->release(3);
    std::vector<int64_t> made;
    for (size_t i = 1; i <= 3; ++i) made.push_back(token_of(3, i));
    admit_all(*decoder, some.inputs({3}, true, {{3, made}}));
    go_on(*decoder, 1, shared);
    for (const auto& [id, steps] : shared) {
      for (size_t i = 0; i < steps.size(); ++i) {
        EXPECT_TRUE(steps[i] == alone.at(id)[i]) << "sequence " << id << ", step " << i;
      }
    }
  }
}

TEST(RowDecoder, ASharedBeginningIsKeptOnceAndWithoutRoomForItNotAtAll) {
  const SharedPrompts some;
  Loaded loaded(forms().front().architecture, DataType::kF32);
  const auto shape = key_value_shape(forms().front().architecture, kernels::CacheFormat::kF32);
  const auto bytes = [&](uint64_t tokens) { return engine::memory_store_bytes(shape, tokens); };
  const uint64_t once = bytes(some.shared.size()) + bytes(50) + bytes(70);
  const auto decoder = loaded.by_rows(false, 1, once);
  EXPECT_EQ(decoder->admit(some.inputs({2, 3}, false)).code(), ErrorCode::kOutOfMemory);
  admit_all(*decoder, some.inputs({2, 3}, true));
  EXPECT_EQ(decoder->admit(some.inputs({1}, true)).code(), ErrorCode::kOutOfMemory);
  for (const SequenceId id : {2, 3}) decoder->release(id);
  // The beginning alone leaves no room; without it there is some.
  const auto tight = loaded.by_rows(false, 1, bytes(some.shared.size() + 50));
  admit_all(*tight, some.inputs({2}, true));
  Logits logits;
  go_on(*tight, 1, logits);
}

/// Bytes of torch's tensors that this thread makes and frees.
struct TensorBytes final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void* /*pointer*/, int64_t bytes, size_t /*allocated*/,
                         size_t /*reserved*/, c10::Device /*device*/) override {
    now += bytes;
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now = 0, most = 0;
};

TEST(RowDecoder, PromptsThatAreComputedTogetherTakeTheMemoryThatIsPlanned) {
  constexpr uint64_t kTogether = 24;
  const Form form = forms().front();
  Loaded loaded(form.architecture, DataType::kF32);
  std::vector<std::vector<int64_t>> prompts;
  for (uint64_t i = 0; i < kTogether; ++i) {
    prompts.emplace_back(kLongTokens - 20);
    for (size_t t = 0; t < prompts[i].size(); ++t) {
      prompts[i][t] = static_cast<int64_t>(t < kPromptPart ? t % 47 : (t * (i + 2)) % 50);
    }
  }
  const auto most_of = [&](uint64_t count) {
    std::vector<SequenceInput> inputs(count);
    for (uint64_t i = 0; i < count; ++i) {
      inputs[i].id = i + 1;
      inputs[i].prompt = prompts[i];
      inputs[i].tokens_max = prompts[i].size() + 1;
      inputs[i].prefix = 1000;
      inputs[i].prefix_tokens = kPromptPart;
    }
    const auto decoder = loaded.by_rows();
    const auto bytes = std::make_shared<TensorBytes>();
    const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, bytes);
    admit_all(*decoder, inputs);
    return static_cast<uint64_t>(bytes->most);
  };
  const uint64_t more = most_of(kTogether) - most_of(1);
  const uint64_t planned = RowDecoder::prompt_bytes(form.architecture, kTogether,
                                                    prompts.front().size(), DataType::kF32);
  EXPECT_LE(more, planned);
  EXPECT_GE(more, planned / 2) << "it is not much more than what is needed";
}

TEST(RowDecoder, WhatDoesNotFitIsNotTakenIn) {
  Loaded loaded(forms().front().architecture, DataType::kF32);
  const auto shape = key_value_shape(forms().front().architecture, kernels::CacheFormat::kF32);
  const auto decoder = loaded.by_rows(false, 1, 2 * engine::memory_store_bytes(shape, kTokens));
  const std::vector<int64_t> prompt{1, 2, 3};
  const auto input = [&](SequenceId id) {
    return SequenceInput{.id = id, .prompt = prompt, .made = {}, .tokens_max = kTokens};
  };
  const std::vector<SequenceInput> three{input(1), input(2), input(3)};
  EXPECT_EQ(decoder->admit(three).code(), ErrorCode::kOutOfMemory);
  EXPECT_TRUE(decoder->admit(std::span(three).first(1)).ok());
  EXPECT_EQ(decoder->admit(std::span(three).first(1)).code(), ErrorCode::kAlreadyExists);
  EXPECT_TRUE(decoder->admit(std::span(three).subspan(1, 1)).ok());
  Logits logits;
  go_on(*decoder, 1, logits);
  EXPECT_EQ(logits[1], logits[2]);
  decoder->release(1);
  EXPECT_TRUE(decoder->admit(std::span(three).subspan(2)).ok());
  go_on(*decoder, 1, logits);
  EXPECT_EQ(logits[3].front(), logits[2].front());
}

}  // namespace
}  // namespace smartinf::train
