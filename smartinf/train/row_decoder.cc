#include "smartinf/train/row_decoder.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <torch/torch.h>

#include "smartinf/base/check.h"
#include "smartinf/plan/decode_schedule.h"
#include "smartinf/train/guarded.h"
#include "smartinf/train/scalar_type.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Status;
using torch::Tensor;

namespace {

/// A prompt, or a beginning that prompts share, while it is computed.
struct Prompt {
  SequenceId id = 0;
  engine::KeyValueStore* store = nullptr;  // that gets keys and values; null: it has them
  std::span<const int64_t> tokens;         // those of the prefix as well
  Prompt* prefix = nullptr;                // or null
  uint32_t users = 0;                      // prompts that have this one as prefix

  /// Of the layers that are being computed.
  struct Layer {
    Tensor key_BKSD, value_BKSD;
    uint32_t users = 0;  // that have taken it
  };
  std::map<uint32_t, Layer> layers;

  int64_t first() const { return prefix == nullptr ? 0 : prefix->end(); }
  int64_t end() const { return static_cast<int64_t>(tokens.size()); }
  Layer& layer(uint32_t index, const Tensor& like_BKTD) {
    Layer& made = layers[index];
    if (made.key_BKSD.defined()) return made;
    const std::vector<int64_t> sizes{1, like_BKTD.size(1), end(), like_BKTD.size(3)};
    made.key_BKSD = torch::empty(sizes, like_BKTD.options());
    made.value_BKSD = torch::empty(sizes, like_BKTD.options());
    if (prefix == nullptr) return made;
    Layer& shared = prefix->layers.at(index);
    made.key_BKSD.narrow(2, 0, first()).copy_(shared.key_BKSD);
    made.value_BKSD.narrow(2, 0, first()).copy_(shared.value_BKSD);
    if (++shared.users == prefix->users) prefix->layers.erase(index);
    return made;
  }
};

/// A part of a prompt, which sees those before it.
class PartCache final : public KeyValueCache {
 public:
  PartCache(Prompt& prompt, int64_t first, base::DataType type)
      : prompt_(prompt), first_(first), type_(type) {}

  int64_t tokens() const override { return first_; }
  void extend(uint32_t layer, Tensor& key_BKTD, Tensor& value_BKTD) override {
    const int64_t count = key_BKTD.size(2);
    if (prompt_.store != nullptr) append(layer, key_BKTD, value_BKTD);
    Prompt::Layer& kept = prompt_.layer(layer, key_BKTD);
    kept.key_BKSD.narrow(2, first_, count).copy_(key_BKTD);
    kept.value_BKSD.narrow(2, first_, count).copy_(value_BKTD);
    key_BKTD = kept.key_BKSD.narrow(2, 0, first_ + count);
    value_BKTD = kept.value_BKSD.narrow(2, 0, first_ + count);
    if (first_ + count == prompt_.end() && prompt_.users == 0) prompt_.layers.erase(layer);
  }

 private:
  void append(uint32_t layer, const Tensor& key_BKTD, const Tensor& value_BKTD) {
    engine::KeyValueStore& store = *prompt_.store;
    const Tensor key_BTKD = key_BKTD.transpose(1, 2).contiguous();
    const Tensor value_BTKD = value_BKTD.transpose(1, 2).contiguous();
    Status appended = store.append(prompt_.id, layer, static_cast<uint64_t>(key_BTKD.size(1)),
                                   type_, key_BTKD.const_data_ptr(), value_BTKD.const_data_ptr());
    if (store.failure(prompt_.id).ok()) throw_if_error(std::move(appended));
  }

  Prompt& prompt_;
  const int64_t first_;
  const base::DataType type_;
};

/// Prompts whose keys and values a layer needs at the same time, and their parts in order.
struct PromptPass {
  uint64_t tokens() const {  // that are computed
    uint64_t sum = 0;
    for (const Prompt& prompt : prompts)
      sum += static_cast<uint64_t>(prompt.end() - prompt.first());
    return sum;
  }

  std::deque<Prompt> prompts;
  std::deque<PartCache> parts;
  std::vector<UnitPass::Begun> begun;

  Prompt& add(Prompt made, base::DataType type) {
    constexpr auto kPart = static_cast<int64_t>(kPromptPart);
    Prompt& prompt = prompts.emplace_back(std::move(made));
    for (int64_t first = prompt.first(); first < prompt.end(); first += kPart) {
      const auto tokens = prompt.tokens.subspan(static_cast<size_t>(first));
      const at::ArrayRef<int64_t> part(tokens.data(), std::min<size_t>(tokens.size(), kPromptPart));
      parts.emplace_back(prompt, first, type);
      begun.push_back({torch::tensor(part, torch::kInt64).unsqueeze(0), &parts.back()});
    }
    return prompt;
  }
};

}  // namespace

engine::KeyValueShape key_value_shape(const model::Architecture& model,
                                      kernels::CacheFormat format) {
  engine::KeyValueShape shape;
  shape.attention.block = {model.kv_heads, model.head_width, format};
  shape.attention.heads = model.heads;
  shape.attention.scale = static_cast<float>(
      model.attention_scale != 0 ? model.attention_scale
                                 : 1 / std::sqrt(static_cast<double>(model.head_width)));
  shape.attention.softcap = static_cast<float>(model.attention_softcap);
  shape.layers = model.layers;
  shape.windows = model.windows;
  return shape;
}

uint64_t RowDecoder::prompt_bytes(const model::Architecture& model, uint64_t sequences,
                                  uint64_t longest, base::DataType type) {
  const uint64_t together = std::min(sequences * longest, std::max(longest, kPassTokens));
  const uint64_t shared = sequences > 1 ? longest * 2 * model.kv_width() : 0;
  return together * sizeof(int64_t) +
         (together * model.width + shared) * base::data_type_bytes(type);
}

RowDecoder::RowDecoder(const LoadedModel& loaded, std::unique_ptr<engine::KeyValueStore> store,
                       Options options)
    : loaded_(loaded),
      store_(std::move(store)),
      options_(std::move(options)),
      rows_(loaded.model, loaded.type, *options_.team) {}

/// False: there is no room for it, and sequences are taken in without.
bool RowDecoder::open_prefix(const engine::SharedPrefix& prefix) {
  if (prefixes_.contains(prefix.id)) return true;
  if (!store_->open(prefix.id, prefix.tokens).ok()) return false;
  const uint64_t kept = store_->tokens(prefix.id);
  if (!store_->failure(prefix.id).ok() || (kept > 0 && kept < prefix.tokens)) {
    store_->close(prefix.id);
    if (!store_->open(prefix.id, prefix.tokens).ok()) return false;
  }
  prefixes_.insert(prefix.id);
  return true;
}

/// They stay as long as sequences have them.
void RowDecoder::close_prefixes() {
  for (const SequenceId id : std::exchange(prefixes_, {})) store_->close(id);
}

/// Room in the store, which may have a beginning of the sequence.
base::Result<RowDecoder::Sequence*> RowDecoder::open(const SequenceInput& input) {
  const uint64_t known = input.prompt.size() + input.made.size();
  SI_CHECK(!input.prompt.empty() && known < input.tokens_max, "a prompt, and room behind it");
  const auto is_it = [&](const auto& one) { return one->id == input.id; };
  if (std::ranges::any_of(sequences_, is_it)) {
    return Status(ErrorCode::kAlreadyExists, fmt::format("sequence {} is there", input.id));
  }
  engine::SharedPrefix prefix{input.prefix, input.prefix_tokens};
  SI_CHECK(prefix.tokens % kPromptPart == 0 && prefix.tokens < input.prompt.size(),
           "a prefix of whole parts, and a token behind it");
  if (prefix.tokens > 0 && !open_prefix(prefix)) prefix = {};
  Status opened = store_->open(input.id, input.tokens_max, prefix);
  if (!opened.ok() && prefix.tokens > 0) {  // where the prefix is, there is no room
    prefix = {};
    opened = store_->open(input.id, input.tokens_max);
  }
  SI_RETURN_IF_ERROR(opened);
  const uint64_t kept = store_->tokens(input.id);
  // The keys and values of a prompt have the bits that they have when it is computed as a whole.
  if (kept > prefix.tokens && (kept + 1 < input.prompt.size() || kept >= known)) {
    store_->close(input.id);
    SI_RETURN_IF_ERROR(store_->open(input.id, input.tokens_max, prefix));
  }
  // Behind the last one with this prefix.
  const auto shares = [&](const auto& one) {
    return prefix.tokens > 0 && one->prefix.tokens > 0 && one->prefix.id == prefix.id;
  };
  const auto last = std::find_if(sequences_.rbegin(), sequences_.rend(), shares);
  const auto place = last == sequences_.rend() ? sequences_.end() : last.base();
  return sequences_
      .insert(place, std::make_unique<Sequence>(Sequence{input.id, input.tokens_max, prefix, {}}))
      ->get();
}

/// Computes prompts but for their last tokens, which are the first inputs of steps; a prefix once
/// for those that share it, also where the store has it already: the prompts behind it see keys and
/// values as they were before the store's format rounded them.
void RowDecoder::fill(std::span<const SequenceInput> inputs, std::span<Sequence* const> sequences) {
  std::vector<std::vector<size_t>> groups;
  std::map<SequenceId, size_t> group_of;  // by prefix
  for (size_t i = 0; i < inputs.size(); ++i) {
    const engine::SharedPrefix& prefix = sequences[i]->prefix;
    const size_t place = prefix.tokens == 0
                             ? groups.size()
                             : group_of.emplace(prefix.id, groups.size()).first->second;
    if (place == groups.size()) groups.emplace_back();
    groups[place].push_back(i);
  }
  std::deque<PromptPass> passes;
  for (std::vector<size_t>& group : groups) {
    const engine::SharedPrefix prefix = sequences[group.front()]->prefix;
    const auto shared = inputs[group.front()].prompt.first(prefix.tokens);
    const auto own = [&](size_t i) { return inputs[i].prompt.size() - 1 - prefix.tokens; };
    std::erase_if(group, [&](size_t i) {
      return own(i) == 0 || store_->tokens(inputs[i].id) > prefix.tokens;
    });
    bool missing = prefix.tokens > 0 && store_->tokens(prefix.id) == 0;
    for (size_t next = 0; next < group.size() || missing; missing = false) {
      const size_t first = next;
      uint64_t tokens = prefix.tokens;
      while (next < group.size() && (next == first || tokens + own(group[next]) <= kPassTokens)) {
        tokens += own(group[next++]);
      }
      PromptPass& pass = passes.emplace_back();
      Prompt* behind = nullptr;
      if (prefix.tokens > 0) {
        behind = &pass.add({.id = prefix.id,
                            .store = missing ? store_.get() : nullptr,
                            .tokens = shared,
                            .prefix = nullptr,
                            .users = static_cast<uint32_t>(next - first),
                            .layers = {}},
                           loaded_.type);
        shared_tokens_ += prefix.tokens * (std::max<size_t>(1, next - first) - 1);
      }
      for (size_t i = first; i < next; ++i) {
        const SequenceInput& input = inputs[group[i]];
        pass.add({.id = input.id,
                  .store = store_.get(),
                  .tokens = input.prompt.first(input.prompt.size() - 1),
                  .prefix = behind,
                  .users = 0,
                  .layers = {}},
                 loaded_.type);
      }
    }
  }
  const auto stop = [&] { throw_if_stopped(options_.stop); };
  if (!loaded_.stream.streams()) {
    for (; !passes.empty(); passes.pop_front()) {
      loaded_.pass.fill_caches(passes.front().begun, stop);
    }
    return;
  }
  // Weights are brought once for as many as may be computed together.
  while (!passes.empty()) {
    std::vector<UnitPass::Begun> all;
    uint64_t tokens = 0;
    size_t some = 0;
    for (; some < passes.size() && (some == 0 || tokens + passes[some].tokens() <= kPassTokens);
         ++some) {
      const PromptPass& pass = passes[some];
      tokens += pass.tokens();
      all.insert(all.end(), pass.begun.begin(), pass.begun.end());
    }
    if (!all.empty()) loaded_.pass.fill_caches(all, stop);
    for (; some > 0; --some) passes.pop_front();
  }
}

Status RowDecoder::admit(std::span<const SequenceInput> sequences) {
  drop_lost();  // those of save()
  std::vector<Sequence*> taken;
  const Status status = guarded("begin sequences", [&]() -> Status {
    for (const SequenceInput& input : sequences) {
      SI_ASSIGN_OR_RETURN(Sequence* const one, open(input));
      taken.push_back(one);
    }
    fill(sequences, taken);
    for (size_t i = 0; i < sequences.size(); ++i) {
      std::deque<int64_t>& next = taken[i]->next;
      next.assign(sequences[i].prompt.begin(), sequences[i].prompt.end());
      next.insert(next.end(), sequences[i].made.begin(), sequences[i].made.end());
      next.erase(next.begin(),
                 next.begin() + static_cast<std::ptrdiff_t>(store_->tokens(sequences[i].id)));
    }
    for (;;) {
      drop_lost();
      std::vector<Sequence*> behind;
      for (const auto& one : sequences_) {
        if (one->next.size() > 1) behind.push_back(one.get());
      }
      if (behind.empty()) return Status();
      run_pass(behind, nullptr);
    }
  });
  close_prefixes();
  if (status.ok()) return status;
  for (const SequenceInput& input : sequences.first(taken.size())) release(input.id);
  std::erase_if(lost_, [&](const LostSequence& one) {
    return std::ranges::find(sequences, one.id, &SequenceInput::id) != sequences.end();
  });
  return status;
}

Status RowDecoder::step(const Choose& choose) {
  return guarded("continue sequences", [&]() -> Status {
    std::vector<Sequence*> all;
    for (const auto& one : sequences_) all.push_back(one.get());
    if (!all.empty()) run_pass(all, &choose);
    drop_lost();
    return Status();
  });
}

void RowDecoder::release(SequenceId id) {
  store_->close(id);
  std::erase_if(sequences_, [&](const auto& one) { return one->id == id; });
}

void RowDecoder::drop_lost() {
  const size_t before = lost_.size();
  for (const auto& one : sequences_) {
    Status why = store_->failure(one->id);
    if (!why.ok()) lost_.push_back({one->id, std::move(why)});
  }
  for (size_t i = before; i < lost_.size(); ++i) release(lost_[i].id);
}

std::vector<ModelRows> RowDecoder::groups_of(std::span<Sequence* const> sequences) const {
  size_t half = sequences.size();  // as near to the middle as prefixes allow
  for (size_t i = 1; i < sequences.size() && options_.halves; ++i) {
    const engine::SharedPrefix& prefix = sequences[i]->prefix;
    if (prefix.tokens > 0 && prefix.id == sequences[i - 1]->prefix.id) continue;
    const auto from_middle = [&](size_t at) {
      return std::max(2 * at, sequences.size()) - std::min(2 * at, sequences.size());
    };
    if (from_middle(i) < from_middle(half)) half = i;
  }
  std::vector<ModelRows> made(half < sequences.size() ? 2 : 1);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& one = *sequences[i];
    const uint64_t tokens = store_->tokens(one.id);
    SI_CHECK(tokens < one.tokens_max, "a sequence that has all its tokens is released");
    ModelRows& rows = made[i < half ? 0 : 1];
    rows.ids.push_back(one.id);
    rows.tokens.push_back(one.next.front());
    rows.positions.push_back(static_cast<int64_t>(tokens));
  }
  return made;
}

RowModel::Layer RowDecoder::layer_of(size_t unit, const UnitWeights& weights,
                                     uint32_t index) const {
  const plan::Unit& span = loaded_.model.units()[unit];
  const size_t of_layer = weights.size() / span.layers;
  RowModel::Layer layer{
      std::span(weights).subspan(index * of_layer, of_layer), {}, span.first_layer + index};
  if (loaded_.adapters != nullptr) layer.adapters = loaded_.adapters->of(unit)[index];
  return layer;
}

/// A group attends while the other one is computed. Units are held until the last group is through,
/// when the first one has begun the next; the head until the last group has its logits.
void RowDecoder::run_model(std::span<Sequence* const> sequences, std::span<ModelRows> groups,
                           const Choose* choose) {
  const std::span<const plan::Unit> units = loaded_.model.units();
  std::vector<RowModel::Layer> layers;  // that were begun
  const auto unit_of = [&](uint32_t layer) {
    return std::ranges::find_if(
        units, [&](const plan::Unit& unit) { return layer - unit.first_layer < unit.layers; });
  };
  const size_t head_unit = loaded_.model.head();
  Head head;
  LayerStream& stream = loaded_.stream;
  for (const auto& [work, index, half] :
       plan::decode_host_order(loaded_.model.architecture().layers,
                               static_cast<uint32_t>(groups.size()), stream.streams())) {
    if (work == plan::DecodeWork::kLogits) {
      if (choose == nullptr) continue;
      if (half == 0) {
        head.weights = &stream.get(head_unit);  // the head first, as in UnitPass
        const UnitWeights& embedding = loaded_.model.tied_head() ? stream.get(0) : *head.weights;
        head.matrix_VC = &loaded_.model.head_matrix(*head.weights, embedding);
      }
      choose_tokens(sequences.subspan(half == 0 ? 0 : groups[0].count(), groups[half].count()),
                    groups[half], head, *choose);
      if (half + 1 < groups.size()) continue;
      if (loaded_.model.tied_head()) stream.release(0);
      stream.release(head_unit);
      continue;
    }
    const auto unit = unit_of(index);
    const auto number = static_cast<size_t>(unit - units.begin());
    if (work == plan::DecodeWork::kTails) {
      rows_.end_layer(layers[index], groups[half], *store_);
      const bool last = index + 1 == unit->first_layer + unit->layers;
      if (last && half + 1 == groups.size()) stream.release(number);
      continue;
    }
    if (half == 0 && index == unit->first_layer) {
      throw_if_stopped(options_.stop);
      const UnitWeights& weights = stream.get(number);
      for (uint32_t i = 0; i < unit->layers; ++i) layers.push_back(layer_of(number, weights, i));
    }
    rows_.begin_layer(layers[index], groups[half], *store_);
  }
}

/// Computes the next token of each sequence, and where there is `choose` the one behind it.
void RowDecoder::run_pass(std::span<Sequence* const> sequences, const Choose* choose) {
  const torch::NoGradGuard no_grad;
  if (loaded_.adapters != nullptr) throw_if_error(loaded_.adapters->wait_all());
  std::vector<ModelRows> groups = groups_of(sequences);
  // Units of the next step are read while this one's last units compute.
  std::vector<uint32_t> order = loaded_.pass.forward_order();
  const std::vector<uint32_t> next = order;
  if (choose == nullptr) order.resize(loaded_.model.head());
  order.insert(order.end(), next.begin(), next.end());
  LayerStream& stream = loaded_.stream;
  stream.start(std::move(order));
  const UnitWeights& embedding = stream.get(0);
  for (ModelRows& rows : groups) rows_.embed(embedding, rows);
  stream.release(0);
  try {
    run_model(sequences, groups, choose);
  } catch (...) {
    for (ModelRows& rows : groups) {
      if (rows.ticket) (void)store_->finish_attend(*rows.ticket);  // its memory goes
    }
    throw;
  }
  for (Sequence* one : sequences) one->next.pop_front();
}

/// sequences: those of the rows.
void RowDecoder::choose_tokens(std::span<Sequence* const> sequences, const ModelRows& rows,
                               const Head& head, const Choose& choose) {
  for (size_t first = 0; first < rows.count(); first += kHeadRows) {
    const size_t count = std::min(kHeadRows, rows.count() - first);
    const std::span<const float> logits_MV =
        rows_.logits(*head.weights, *head.matrix_VC, rows, first, count);
    const size_t vocabulary = logits_MV.size() / count;
    for (size_t r = 0; r < count; ++r) {
      Sequence& one = *sequences[first + r];
      if (!store_->failure(one.id).ok()) continue;
      one.next.push_back(choose(one.id, logits_MV.subspan(r * vocabulary, vocabulary)));
    }
  }
}

}  // namespace smartinf::train
