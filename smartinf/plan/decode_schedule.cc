#include "smartinf/plan/decode_schedule.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

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
        folds_(input.devices),
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
      std::vector<uint32_t>& folds = folds_[d];
      const uint32_t last = folds.empty() ? kNothing : folds.back();
      if (!in_turn()) {
        const size_t ahead = input_.halves_ahead.empty() ? 1 : input_.halves_ahead[d];
        const uint32_t room = folds.size() < ahead ? kNothing : folds[folds.size() - ahead];
        read_[d] = add(DecodeWork::kRead, layer, half, d, {read_[d], room});
      }
      folds.push_back(add(DecodeWork::kFold, layer, half, d, {queries, read_[d], last}));
      states_[half].push_back(add(DecodeWork::kStates, layer, half, d, {folds.back()}));
    }
  }

  void add_tails(uint32_t layer, uint32_t half) {
    const uint32_t task = add_on_host(DecodeWork::kTails, layer, half, {});
    std::vector<uint32_t>& after = tasks_[task].after;
    after.insert(after.end(), states_[half].begin(), states_[half].end());
    if (half + 1 == input_.halves && streams(layer)) freed_.push_back(task);
  }

  void add_step() {
    for (uint32_t layer = 0; layer < input_.layers; ++layer) {
      if (in_turn() && layer > 0) {
        for (uint32_t half = 0; half < input_.halves; ++half) add_tails(layer - 1, half);
      }
      add_weights(layer);
      for (uint32_t half = 0; half < input_.halves; ++half) {
        if (!in_turn() && layer > 0) add_tails(layer - 1, half);
        const uint32_t products =
            add_on_host(DecodeWork::kProducts, layer, half, {layer == 0 ? ready_[half] : kNothing});
        std::vector<uint32_t>& after = tasks_[products].after;
        after.insert(after.end(), weights_.begin(), weights_.end());
        add_attention(layer, half, products);
      }
    }
    for (uint32_t half = 0; half < input_.halves; ++half) {
      add_tails(input_.layers - 1, half);
      if (half + 1 == input_.halves) add_appends();
      ready_[half] = add_on_host(DecodeWork::kLogits, 0, half, {});
      if (!in_turn()) continue;
      std::vector<uint32_t>& after = tasks_[ready_[half]].after;
      after.insert(after.end(), appended_.begin(), appended_.end());
    }
  }

  void add_appends() {
    appended_.clear();
    for (uint32_t d = 0; d < input_.devices; ++d) {
      appended_.push_back(
          add(DecodeWork::kAppend, 0, 0, d, {folds_[d].back(), in_turn() ? host_ : kNothing}));
    }
  }

  const DecodeScheduleInput& input_;
  std::vector<DecodeTask> tasks_;
  uint32_t step_ = 0;
  uint32_t host_ = kNothing;                   // the host's last
  std::vector<uint32_t> read_;                 // by device, its last
  std::vector<uint32_t> weights_read_;         // likewise
  std::vector<std::vector<uint32_t>> folds_;   // by device
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

std::vector<DecodeTask> make_decode_schedule(const DecodeScheduleInput& input) {
  SI_CHECK(input.layers > 0 && input.devices > 0, "a step has layers and devices");
  SI_CHECK(input.halves == 1 || input.halves == 2, "one half or two");
  SI_CHECK(input.streamed.empty() || input.streamed.size() == input.layers, "one for each layer");
  SI_CHECK(input.weight_slots >= 2, "a layer is used while the next one comes");
  return DecodeOrder(input).make();
}

std::vector<uint32_t> decode_halves(std::span<const uint64_t> bytes,
                                    std::span<const uint32_t> device,
                                    std::span<const uint32_t> prefix) {
  SI_CHECK(device.size() == bytes.size(), "a device for each sequence");
  SI_CHECK(prefix.empty() || prefix.size() == bytes.size(), "a prefix for each sequence");
  struct Group {
    uint64_t bytes = 0;
    std::vector<size_t> members;
  };
  // A prefix with all that share it is one, and so is each sequence without; in order of place.
  std::vector<Group> groups;
  std::map<uint32_t, size_t> of_prefix;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool shares = !prefix.empty() && prefix[i] != 0;
    size_t group = groups.size();
    if (shares) group = of_prefix.try_emplace(prefix[i], group).first->second;
    if (group == groups.size()) groups.emplace_back();
    groups[group].bytes += bytes[i];
    groups[group].members.push_back(i);
  }
  std::vector<size_t> largest_first(groups.size());
  std::iota(largest_first.begin(), largest_first.end(), size_t{0});
  std::ranges::stable_sort(largest_first,
                           [&](size_t a, size_t b) { return groups[a].bytes > groups[b].bytes; });
  std::map<uint32_t, std::array<uint64_t, 2>> read;  // by device and half
  std::array<uint64_t, 2> members{};
  std::vector<uint32_t> half(bytes.size(), 0);
  for (const size_t group : largest_first) {
    auto& here = read[device[groups[group].members.front()]];
    // Where a device's halves are even, the half with fewer sequences.
    const bool second = here[0] != here[1] ? here[1] < here[0] : members[1] < members[0];
    here[second] += groups[group].bytes;
    members[second] += groups[group].members.size();
    for (const size_t i : groups[group].members) half[i] = second;
  }
  return half;
}

}  // namespace smartinf::plan
