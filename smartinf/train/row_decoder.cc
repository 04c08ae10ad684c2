#include "smartinf/train/row_decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
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

/// A step's products are shorter than it takes to wake a thread.
constexpr std::chrono::microseconds kAwake(200);

/// Gives a prompt's keys and values to a store.
class StoreCache final : public KeyValueCache {
 public:
  StoreCache(engine::KeyValueStore& store, SequenceId id, base::DataType type)
      : store_(store), id_(id), type_(type) {}

  int64_t tokens() const override { return 0; }
  void extend(uint32_t layer, Tensor& key_BKTD, Tensor& value_BKTD) override {
    const Tensor key_BTKD = key_BKTD.transpose(1, 2).contiguous();
    const Tensor value_BTKD = value_BKTD.transpose(1, 2).contiguous();
    Status appended = store_.append(id_, layer, static_cast<uint64_t>(key_BTKD.size(1)), type_,
                                    key_BTKD.const_data_ptr(), value_BTKD.const_data_ptr());
    if (store_.failure(id_).ok()) throw_if_error(std::move(appended));
  }

 private:
  engine::KeyValueStore& store_;
  const SequenceId id_;
  const base::DataType type_;
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

RowDecoder::RowDecoder(const LoadedModel& loaded, std::unique_ptr<engine::KeyValueStore> store,
                       Options options)
    : loaded_(loaded),
      store_(std::move(store)),
      options_(std::move(options)),
      team_(options_.threads, "si-rows", kAwake),
      rows_(loaded.model, loaded.type, team_) {}

/// Room in the store, which may have a beginning of the sequence.
Status RowDecoder::open(const SequenceInput& input) {
  const uint64_t known = input.prompt.size() + input.made.size();
  SI_CHECK(!input.prompt.empty() && known < input.tokens_max, "a prompt, and room behind it");
  const auto is_it = [&](const auto& one) { return one->id == input.id; };
  if (std::ranges::any_of(sequences_, is_it)) {
    return Status(ErrorCode::kAlreadyExists, fmt::format("sequence {} is there", input.id));
  }
  SI_RETURN_IF_ERROR(store_->open(input.id, input.tokens_max));
  const uint64_t kept = store_->tokens(input.id);
  // The keys and values of a prompt have the bits that they have when it is computed as a whole.
  if (kept > 0 && (kept + 1 < input.prompt.size() || kept >= known)) {
    store_->close(input.id);
    SI_RETURN_IF_ERROR(store_->open(input.id, input.tokens_max));
  }
  sequences_.push_back(std::make_unique<Sequence>(Sequence{input.id, input.tokens_max, {}}));
  return Status();
}

/// Computes prompts but for their last tokens, which are the first inputs of steps.
void RowDecoder::fill(std::span<const SequenceInput> sequences) {
  std::vector<StoreCache> caches;
  caches.reserve(sequences.size());
  std::vector<UnitPass::Begun> begun;
  for (const SequenceInput& input : sequences) {
    if (input.prompt.size() == 1 || store_->tokens(input.id) > 0) continue;
    caches.emplace_back(*store_, input.id, loaded_.type);
    const std::vector<int64_t> tokens(input.prompt.begin(), input.prompt.end() - 1);
    begun.push_back({torch::tensor(tokens, torch::kInt64).unsqueeze(0), &caches.back()});
  }
  // Weights in memory are at hand for each prompt; others are brought once for all prompts.
  const size_t at_once = loaded_.stream.streams() ? begun.size() : 1;
  for (size_t i = 0; i < begun.size(); i += at_once) {
    loaded_.pass.fill_caches(std::span(begun).subspan(i, at_once),
                             [&] { throw_if_stopped(options_.stop); });
  }
}

Status RowDecoder::admit(std::span<const SequenceInput> sequences) {
  drop_lost();  // those of save()
  const size_t before = sequences_.size();
  const Status status = guarded("begin sequences", [&]() -> Status {
    for (const SequenceInput& input : sequences) SI_RETURN_IF_ERROR(open(input));
    fill(sequences);
    for (size_t i = 0; i < sequences.size(); ++i) {
      std::deque<int64_t>& next = sequences_[before + i]->next;
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
  if (status.ok()) return status;
  while (sequences_.size() > before) release(sequences_.back()->id);
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
  const size_t groups = options_.halves && sequences.size() > 1 ? 2 : 1;
  std::vector<ModelRows> made(groups);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& one = *sequences[i];
    const uint64_t tokens = store_->tokens(one.id);
    SI_CHECK(tokens < one.tokens_max, "a sequence that has all its tokens is released");
    ModelRows& rows = made[i * groups / sequences.size()];
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
/// when the first one has begun the next.
void RowDecoder::run_layers(std::span<ModelRows> groups) {
  const std::span<const plan::Unit> units = loaded_.model.units();
  std::vector<RowModel::Layer> layers;  // that were begun
  const auto unit_of = [&](uint32_t layer) {
    return std::ranges::find_if(
        units, [&](const plan::Unit& unit) { return layer - unit.first_layer < unit.layers; });
  };
  for (const auto& [work, index, half] : plan::decode_host_order(
           loaded_.model.architecture().layers, static_cast<uint32_t>(groups.size()))) {
    if (work == plan::DecodeWork::kLogits) continue;  // choose_tokens()
    const auto unit = unit_of(index);
    const auto number = static_cast<size_t>(unit - units.begin());
    if (work == plan::DecodeWork::kTails) {
      rows_.end_layer(layers[index], groups[half], *store_);
      const bool last = index + 1 == unit->first_layer + unit->layers;
      if (last && half + 1 == groups.size()) loaded_.stream.release(number);
      continue;
    }
    if (half == 0 && index == unit->first_layer) {
      throw_if_stopped(options_.stop);
      const UnitWeights& weights = loaded_.stream.get(number);
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
    run_layers(groups);
  } catch (...) {
    for (ModelRows& rows : groups) {
      if (rows.ticket) (void)store_->finish_attend(*rows.ticket);  // its memory goes
    }
    throw;
  }
  for (Sequence* one : sequences) one->next.pop_front();
  if (choose != nullptr) choose_tokens(sequences, groups, *choose);
}

void RowDecoder::choose_tokens(std::span<Sequence* const> sequences,
                               std::span<const ModelRows> groups, const Choose& choose) {
  const size_t head = loaded_.model.head();
  // The head first, as in UnitPass.
  const UnitWeights& weights = loaded_.stream.get(head);
  const bool tied = loaded_.model.tied_head();
  const UnitWeights& embedding = tied ? loaded_.stream.get(0) : weights;
  const Tensor& matrix_VC = loaded_.model.head_matrix(weights, embedding);
  size_t at = 0;
  for (const ModelRows& rows : groups) {
    for (size_t first = 0; first < rows.count(); first += kHeadRows) {
      const size_t count = std::min(kHeadRows, rows.count() - first);
      const std::span<const float> logits_MV = rows_.logits(weights, matrix_VC, rows, first, count);
      const size_t vocabulary = logits_MV.size() / count;
      for (size_t r = 0; r < count; ++r, ++at) {
        Sequence& one = *sequences[at];
        if (!store_->failure(one.id).ok()) continue;
        one.next.push_back(choose(one.id, logits_MV.subspan(r * vocabulary, vocabulary)));
      }
    }
  }
  if (tied) loaded_.stream.release(0);
  loaded_.stream.release(head);
}

}  // namespace smartinf::train
