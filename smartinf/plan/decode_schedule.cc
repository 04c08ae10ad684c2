#include "smartinf/plan/decode_schedule.h"

#include <algorithm>
#include <array>

#include "smartinf/base/check.h"

namespace smartinf::plan {
namespace {

constexpr uint32_t kNothing = ~0u;

/// Adds tasks one after another, and remembers what later ones wait for.
class DecodeOrder {
 public:
  explicit DecodeOrder(const DecodeScheduleInput& input)
      : input_(input),
        read_(input.devices, kNothing),
        weights_read_(input.devices, kNothing),
        fold_(input.devices, kNothing),
        states_(input.halves),
        ready_(input.halves, kNothing) {}

  std::vector<DecodeTask> make() {
    for (step_ = 0; step_ < input_.steps; ++step_) add_step();
    return std::move(tasks_);
  }

 private:
  uint32_t add(DecodeWork work, uint32_t layer, uint32_t half, uint32_t device,
               std::initializer_list<uint32_t> after) {
    DecodeTask task;
    task.work = work;
    task.step = step_;
    task.layer = layer;
    task.half = half;
    task.device = device;
    for (const uint32_t one : after) {
      if (one != kNothing) task.after.push_back(one);
    }
    tasks_.push_back(std::move(task));
    return static_cast<uint32_t>(tasks_.size() - 1);
  }

  uint32_t add_on_host(DecodeWork work, uint32_t layer, uint32_t half,
                       std::initializer_list<uint32_t> after) {
    const uint32_t task = add(work, layer, half, DecodeTask::kHost, after);
    if (host_ != kNothing) tasks_[task].after.push_back(host_);
    return host_ = task;
  }

  bool in_turn() const { return input_.in_turn != InTurn::kNothing; }
  bool streams(uint32_t layer) const { return !input_.streamed.empty() && input_.streamed[layer]; }

  /// Into the slot of the streamed layer that is done with.
  void add_weights(uint32_t layer) {
    weights_.clear();
    if (!streams(layer)) return;
    const uint32_t room = weights_taken_ < input_.weight_slots
                              ? kNothing
                              : freed_[weights_taken_ - input_.weight_slots];
    ++weights_taken_;
    for (uint32_t d = 0; d < input_.devices; ++d) {
      weights_read_[d] =
          add(DecodeWork::kWeights, layer, 0, d,
              {weights_read_[d], room, input_.in_turn == InTurn::kAll ? host_ : kNothing});
      weights_.push_back(weights_read_[d]);
    }
  }

  void add_attention(uint32_t layer, uint32_t half, uint32_t products) {
    states_[half].clear();
    for (uint32_t d = 0; d < input_.devices; ++d) {
      const uint32_t queries = add(DecodeWork::kQueries, layer, half, d, {products});
      if (!in_turn()) read_[d] = add(DecodeWork::kRead, layer, half, d, {read_[d]});
      fold_[d] = add(DecodeWork::kFold, layer, half, d, {queries, read_[d], fold_[d]});
      states_[half].push_back(add(DecodeWork::kStates, layer, half, d, {fold_[d]}));
    }
  }

  void add_tails(uint32_t layer, uint32_t half) {
    const uint32_t task = add_on_host(DecodeWork::kTails, layer, half, {});
    std::vector<uint32_t>& after = tasks_[task].after;
    after.insert(after.end(), states_[half].begin(), states_[half].end());
    if (half + 1 == input_.halves && streams(layer)) freed_.push_back(task);
  }

  void add_step() {
    const bool streams = std::ranges::find(input_.streamed, true) != input_.streamed.end();
    for (const auto& [work, layer, half] :
         decode_host_order(input_.layers, input_.halves, streams)) {
      if (work == DecodeWork::kProducts) {
        if (half == 0) add_weights(layer);
        const uint32_t products =
            add_on_host(work, layer, half, {layer == 0 ? ready_[half] : kNothing});
        std::vector<uint32_t>& after = tasks_[products].after;
        after.insert(after.end(), weights_.begin(), weights_.end());
        add_attention(layer, half, products);
      } else if (work == DecodeWork::kTails) {
        add_tails(layer, half);
      } else {
        if (half == 0) add_appends();
        ready_[half] = add_on_host(work, layer, half, {});
        if (!in_turn()) continue;
        std::vector<uint32_t>& after = tasks_[ready_[half]].after;
        after.insert(after.end(), appended_.begin(), appended_.end());
      }
    }
  }

  void add_appends() {
    appended_.clear();
    for (uint32_t d = 0; d < input_.devices; ++d) {
      appended_.push_back(
          add(DecodeWork::kAppend, 0, 0, d, {fold_[d], in_turn() ? host_ : kNothing}));
    }
  }

  const DecodeScheduleInput& input_;
  std::vector<DecodeTask> tasks_;
  uint32_t step_ = 0;
  uint32_t host_ = kNothing;                   // the host's last
  std::vector<uint32_t> read_;                 // by device, its last
  std::vector<uint32_t> weights_read_;         // likewise
  std::vector<uint32_t> fold_;                 // likewise
  std::vector<std::vector<uint32_t>> states_;  // by half, of the layer under way
  std::vector<uint32_t> ready_;                // by half, what the next step waits for
  std::vector<uint32_t> weights_;              // of the layer under way
  size_t weights_taken_ = 0;                   // layers that came into slots
  std::vector<uint32_t> freed_;                // ends of those layers, each of which frees its slot
  std::vector<uint32_t> appended_;             // of the step, by device
};

}  // namespace

std::string_view decode_work_name(DecodeWork work) {
  static constexpr std::array<std::string_view, 9> kNames{
      "weights", "products", "queries", "read", "fold", "states", "tails", "logits", "append"};
  return kNames[static_cast<size_t>(work)];
}

std::vector<DecodeHostTask> decode_host_order(uint32_t layers, uint32_t halves, bool logits_last) {
  std::vector<DecodeHostTask> order;
  for (uint32_t layer = 0; layer <= layers; ++layer) {
    for (uint32_t half = 0; half < halves; ++half) {
      if (layer > 0) order.push_back({DecodeWork::kTails, layer - 1, half});
      if (layer < layers) order.push_back({DecodeWork::kProducts, layer, half});
      if (layer == layers && !logits_last) order.push_back({DecodeWork::kLogits, 0, half});
    }
  }
  for (uint32_t half = 0; half < halves && logits_last; ++half) {
    order.push_back({DecodeWork::kLogits, 0, half});
  }
  return order;
}

std::vector<DecodeTask> make_decode_schedule(const DecodeScheduleInput& input) {
  SI_CHECK(input.layers > 0 && input.devices > 0, "a step has layers and devices");
  SI_CHECK(input.halves == 1 || (input.halves == 2 && input.in_turn == InTurn::kNothing),
           "one half, or two that are not in turn");
  SI_CHECK(input.streamed.empty() || input.streamed.size() == input.layers, "one for each layer");
  SI_CHECK(input.weight_slots >= 2, "a layer is used while the next one comes");
  return DecodeOrder(input).make();
}

}  // namespace smartinf::plan
