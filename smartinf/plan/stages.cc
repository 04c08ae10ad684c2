#include "smartinf/plan/stages.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"
#include "smartinf/plan/pipeline_schedule.h"
#include "smartinf/plan/stage_plan.h"
#include "smartinf/plan/training_memory.h"

namespace smartinf::plan {

uint32_t Stages::of_unit(uint32_t unit) const {
  const auto behind = std::upper_bound(begin.begin(), begin.end() - 1, unit);
  return (static_cast<uint32_t>(behind - begin.begin()) - 1) % count();
}

std::vector<uint32_t> split_units(uint32_t units, uint32_t stages, const StageCost& cost) {
  SI_CHECK(stages > 0 && units >= stages, "a stage without a unit");
  constexpr double kNone = std::numeric_limits<double>::infinity();
  // Of the first `end` units in so many stages: the largest cost, and where the last one begins.
  struct Best {
    double cost = kNone;
    uint32_t begin = 0;
  };
  std::vector<std::vector<Best>> best(stages + 1, std::vector<Best>(units + 1));
  best[0][0].cost = 0;
  for (uint32_t stage = 1; stage <= stages; ++stage) {
    for (uint32_t end = stage; end <= units; ++end) {
      for (uint32_t begin = stage - 1; begin < end; ++begin) {
        const double most = std::max(best[stage - 1][begin].cost, cost(stage - 1, begin, end));
        if (most < best[stage][end].cost) best[stage][end] = {most, begin};
      }
    }
  }
  std::vector<uint32_t> begins(stages + 1, units);
  for (uint32_t stage = stages; stage > 0; --stage) {
    begins[stage - 1] = best[stage][begins[stage]].begin;
  }
  return begins;
}

std::vector<uint32_t> split_units(uint32_t units, uint32_t stages, const StageCost& each,
                                  const StageCost& once) {
  const auto largest = [&](const std::vector<uint32_t>& begins, const StageCost& cost) {
    double most = 0;
    for (uint32_t stage = 0; stage < stages; ++stage) {
      most = std::max(most, cost(stage, begins[stage], begins[stage + 1]));
    }
    return most;
  };
  std::set<double> limits;  // of `once`
  for (uint32_t stage = 0; stage < stages; ++stage) {
    for (uint32_t first = 0; first < units; ++first) {
      for (uint32_t end = first + 1; end <= units; ++end) limits.insert(once(stage, first, end));
    }
  }
  std::vector<uint32_t> best = split_units(units, stages, each);
  const double least_each = largest(best, each);
  double least = least_each + largest(best, once);
  for (const double limit : limits) {
    if (limit + least_each >= least) break;
    constexpr double kBeyond = 1e100;
    const auto within = [&](uint32_t stage, uint32_t first, uint32_t end) {
      return once(stage, first, end) > limit ? kBeyond : each(stage, first, end);
    };
    std::vector<uint32_t> begins = split_units(units, stages, within);
    const double sum = largest(begins, within) + largest(begins, once);
    if (sum >= least) continue;
    least = sum;
    best = std::move(begins);
  }
  return best;
}

double unit_cost(const StageCosts& model, uint32_t unit) {
  const Unit& one = model.units[unit];
  if (unit == 0) return 0;
  if (unit + 1 == model.units.size()) return static_cast<double>(model.head_matrix);
  return static_cast<double>(one.count + one.layers * model.sequence * model.width);
}

namespace {

/// The numbers of "9, 8, 8, 7"; nothing where it is no such list.
std::optional<std::vector<uint32_t>> numbers_of(std::string_view text) {
  std::vector<uint32_t> numbers;
  for (const char *at = text.data(), *end = at + text.size();;) {
    while (at != end && *at == ' ') ++at;
    const auto [behind, error] = std::from_chars(at, end, numbers.emplace_back());
    if (error != std::errc()) return std::nullopt;
    at = std::find_if(behind, end, [](char c) { return c != ' '; });
    if (at == end) return numbers;
    if (*at++ != ',') return std::nullopt;
  }
}

}  // namespace

base::Result<std::vector<uint32_t>> divide_units(const StageCosts& model, uint32_t stages,
                                                 std::string_view split, bool folds) {
  const auto invalid = [](std::string what, std::string advice) {
    return base::Status(base::ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  const auto all_units = static_cast<uint32_t>(model.units.size());
  const uint32_t count = all_units - (folds ? 1 : 0);  // among all stages
  if (count < stages) {
    return invalid(fmt::format("ranks.pipeline is {}, but the model has {} parts to divide: the "
                               "embedding, {} groups of layers{}",
                               stages, count, all_units - 2, folds ? "" : " and the head"),
                   fmt::format("Set it to {} at most", count));
  }
  if (split.empty()) {
    return divide_units_by_memory(model, stages, folds, [&](uint32_t, uint32_t) { return count; });
  }
  const auto layers_of = [](uint32_t sum, const Unit& unit) { return sum + unit.layers; };
  const uint32_t all = std::accumulate(model.units.begin(), model.units.end(), 0u, layers_of);
  const std::optional<std::vector<uint32_t>> layers = numbers_of(split);
  if (!layers || layers->size() != stages ||
      std::accumulate(layers->begin(), layers->end(), 0u) != all) {
    return invalid(fmt::format("ranks.split is \"{}\"", split),
                   fmt::format("Give the layers of each of the {} stages, with commas; together "
                               "they are {}",
                               stages, all));
  }
  std::vector<uint32_t> begins{0};
  uint32_t unit = 1;  // behind the embedding
  for (uint32_t stage = 0; stage + (folds ? 0 : 1) < stages; ++stage) {
    uint32_t left = (*layers)[stage];
    for (; left > 0 && unit + 1 < all_units && model.units[unit].layers <= left; ++unit) {
      left -= model.units[unit].layers;
    }
    if (left > 0 || (stage > 0 && unit == begins.back())) {
      return invalid(fmt::format("ranks.split is \"{}\", and stage {} of it {}", split, stage,
                                 left > 0 ? "ends within a group of layers that is computed at once"
                                          : "has no layer"),
                     fmt::format("Take multiples of {} layers", model.units[1].layers));
    }
    begins.push_back(unit);
  }
  begins.push_back(all_units);
  return begins;
}

std::vector<uint32_t> divide_units_by_memory(
    const StageCosts& model, uint32_t stages, bool folds,
    const std::function<uint32_t(uint32_t, uint32_t)>& most_units) {
  constexpr double kDoesNotFit = 1e30;
  const uint32_t head = static_cast<uint32_t>(model.units.size()) - 1;
  const uint32_t count = folds ? head : head + 1;
  const auto cost = [&](uint32_t stage, uint32_t first, uint32_t end) {
    double sum = folds && stage == 0 ? unit_cost(model, head) : 0;
    for (uint32_t unit = first; unit < end; ++unit) sum += unit_cost(model, unit);
    return end - first > most_units(stage, first) ? kDoesNotFit : sum;
  };
  std::vector<uint32_t> begins = split_units(count, stages, cost);
  for (uint32_t stage = 0; stage < stages; ++stage) {
    if (cost(stage, begins[stage], begins[stage + 1]) == kDoesNotFit) return {};
  }
  if (folds) begins.push_back(head + 1);
  return begins;
}

bool head_folds(const TiedHead& head) {
  const uint64_t hidden_states = 2 * head.tokens * head.width * head.value_bytes;
  const uint64_t copies = 4 + uint64_t{head.replicas} * head.value_bytes;
  return hidden_states < copies * head.vocabulary * head.width;
}

namespace {

/// Of moments that differ only in how much is in flight, those with the most.
std::vector<BackwardMoment> backward_moments(const Pipeline& pipeline, uint64_t batches) {
  using enum PipelineAction::Kind;
  const bool folded = pipeline.stages.folds && pipeline.stage() == 0;
  std::vector<BackwardMoment> moments;
  BackwardMoment now{.in_flight = 0, .head_summed = false, .layers_summed = false};
  for (const PipelineAction& action :
       pipeline_actions(pipeline.stages.count(), pipeline.stage(), batches, pipeline.ahead,
                        pipeline.stages.folds)) {
    const bool of_head = folded && action.chunk > 0;
    if (action.kind == kForward) {
      if (!of_head) ++now.in_flight;
      continue;
    }
    now.head = of_head || !folded;
    now.layers = !of_head;
    const auto alike = std::ranges::find_if(moments, [&](const BackwardMoment& one) {
      return one.head == now.head && one.head_summed == now.head_summed &&
             one.layers == now.layers && one.layers_summed == now.layers_summed;
    });
    if (alike == moments.end()) {
      moments.push_back(now);
    } else {
      alike->in_flight = std::max(alike->in_flight, now.in_flight);
    }
    (of_head ? now.head_summed : now.layers_summed) = true;
    if (of_head) continue;
    --now.in_flight;
    now.head_summed = true;
  }
  return moments;
}

uint64_t shared_elements(uint64_t first, uint64_t end, const RankSpan& span) {
  const uint64_t from = std::max(first, span.first);
  return std::min(end, span.end()) - std::min({from, end, span.end()});
}

}  // namespace

StageState stage_state(const Pipeline& pipeline, std::span<const Unit> units, uint64_t tied,
                       uint64_t subgroup_elements, std::span<const Subgroup> held) {
  const Stages& stages = pipeline.stages;
  const bool two_stages = tied > 0 && !stages.folds;  // compute with the tied matrix
  StageState state;
  std::vector<RankSpan> mine;  // that this rank computes with
  for (uint32_t chunk = 0; chunk < pipeline.chunks(); ++chunk) {
    if (pipeline.begin(chunk) == pipeline.end(chunk)) continue;  // a division that is only tried
    const uint64_t first = units[pipeline.begin(chunk)].first;
    mine.push_back({first, units[pipeline.end(chunk) - 1].end() - first, pipeline.rank, 1});
    state.elements += mine.back().count;
  }
  if (two_stages && pipeline.has_head()) mine.push_back({0, tied, pipeline.rank, 1});
  RankExchange& exchange = state.exchange;
  exchange.subgroup_elements = subgroup_elements;
  exchange.ranks = stages.replicas * (two_stages ? 2 : 1);
  // Ends of parts, but for the model's own: a piece of a gradient goes beyond, and a block's
  // weights.
  uint64_t ends = 0;
  for (uint32_t chunk = 0; chunk < pipeline.chunks(); ++chunk) {
    ends +=
        (pipeline.part(chunk) > 0 ? 1 : 0) + (pipeline.part(chunk) + 1 < stages.parts() ? 1 : 0);
  }
  uint64_t held_mine = 0;
  for (const Subgroup& subgroup : held) {
    uint64_t most = 0;
    for (const RankSpan& span : mine) {
      most = std::max(most, shared_elements(subgroup.first, subgroup.first + subgroup.count, span));
    }
    held_mine += most;
    if (most == 0) state.of_others += subgroup.count;
  }
  const uint64_t at_ends = ends * base::kBlockElements;
  const bool all_here = held_mine + at_ends >= state.elements;
  state.is_own = held.empty() || (state.of_others == 0 && all_here);
  if (!state.is_own) {
    exchange.elements = units.back().end();
    exchange.ranks = 0;
    return state;
  }
  if (stages.replicas > 1) {
    exchange.elements = state.elements + (two_stages && pipeline.has_head() ? tied : 0);
    return state;
  }
  exchange.sums = 1;
  exchange.elements = ends * kRankPieceElements;
  if (two_stages && (pipeline.has_head() || pipeline.begin(0) == 0)) {
    exchange.elements += tied;
  } else {
    exchange.subgroup_elements = std::min(subgroup_elements, base::kBlockElements);
    exchange.ranks = 0;
  }
  return state;
}

void take_stage(const Pipeline& pipeline, TrainingMemoryInput& memory) {
  TrainingModel& model = memory.model;
  const uint64_t layers = std::exchange(model.layers, 0);
  model.parameters = 0;
  const std::vector<Unit> all = std::exchange(memory.units, {});
  for (const uint32_t unit : pipeline.units(model.tied)) {
    memory.units.push_back(all[unit]);
    memory.units.back().first = model.parameters;  // without what other stages have
    model.parameters += all[unit].count;
    model.layers += all[unit].layers;
  }
  model.adapters = model.adapters * model.layers / layers;
  if (!pipeline.has_head()) model.vocabulary = 0;
  const uint64_t batches = base::divide_up(memory.accumulation, pipeline.stages.replicas);
  memory.ranks = pipeline.stages.replicas;
  if (pipeline.stages.chunks == 1) {
    // A copy of the embedding that is the head is like a matrix of its own.
    if (pipeline.begin(0) > 0) model.tied = false;
    memory.moments = backward_moments(pipeline, batches);
    const uint32_t count = pipeline.stages.count();
    const bool folds = pipeline.stages.folds;
    const bool before = folds || pipeline.stage() > 0;
    const bool behind = folds || pipeline.stage() + 1 < count;
    // Sent ones are kept until as many more were; as many are awaited as there are ahead.
    const uint64_t sent = pipeline_in_flight(count, 0, batches, pipeline.ahead, folds);
    const uint64_t awaited = std::min<uint64_t>(batches, 1 + pipeline.ahead);
    memory.messages = (sent + awaited) * ((before ? 1 : 0) + (behind ? 1 : 0));
    return;
  }
  memory.messages = 2 * batches;
  for (uint32_t chunk = 0; chunk < pipeline.chunks(); ++chunk) {
    memory.chunk_units = std::max(memory.chunk_units, pipeline.end(chunk) - pipeline.begin(chunk));
  }
  const bool two_stages = model.tied && !pipeline.stages.folds;  // compute with the embedding
  memory.staying_units = two_stages && (pipeline.begin(0) == 0 || pipeline.has_head()) ? 1 : 0;
}

uint32_t most_ahead(std::span<const AheadCost> costs) {
  constexpr size_t kChoices = kPipelineAheadMax + 1;
  uint32_t ahead = kPipelineAheadMax;
  bool none_fits = true;
  for (size_t rank = 0; rank < costs.size(); rank += kChoices) {
    none_fits = none_fits && costs[rank] != AheadCost::kDoesNotFit;
  }
  const auto costs_nothing = [&] {
    for (size_t rank = 0; rank < costs.size(); rank += kChoices) {
      if (costs[rank + ahead] > (none_fits ? costs[rank] : AheadCost::kRecomputes)) return false;
    }
    return true;
  };
  while (ahead > 0 && !costs_nothing()) --ahead;
  return ahead;
}

std::vector<uint32_t> Pipeline::units(bool tied) const {
  std::vector<uint32_t> units;
  if (tied && has_head() && begin(0) > 0) units.push_back(0);
  for (uint32_t chunk = 0; chunk < chunks(); ++chunk) {
    for (uint32_t unit = begin(chunk); unit < end(chunk); ++unit) units.push_back(unit);
  }
  return units;
}

std::vector<RankSpan> rank_spans(const Stages& stages, std::span<const Unit> units, uint64_t tied) {
  std::vector<RankSpan> spans;
  const uint32_t count = stages.count();
  if (tied > 0 && count > 1) {
    spans.push_back({0, tied, stages.of_head() * stages.replicas, stages.replicas});
  }
  for (uint32_t part = 0; part < stages.parts(); ++part) {
    const uint64_t first = units[stages.begin[part]].first;
    const uint64_t end = units[stages.begin[part + 1] - 1].end();
    spans.push_back({first, end - first, part % count * stages.replicas, stages.replicas});
  }
  return spans;
}

}  // namespace smartinf::plan
