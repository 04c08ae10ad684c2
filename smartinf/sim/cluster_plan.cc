#include "smartinf/sim/cluster_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/plan/micro_batches.h"
#include "smartinf/plan/pipeline_schedule.h"
#include "smartinf/plan/stage_plan.h"
#include "smartinf/sim/box_order.h"
#include "smartinf/sim/one_rank.h"
#include "smartinf/sim/planner.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr double kUnlimited = 1e15;  // bytes per second
constexpr uint64_t kMicroBatchMax = 64;

/// Seconds of a model's parts for a micro batch, on one rank of a kind of box.
struct PartSeconds {
  double layer_forward_s = 0, layer_backward_s = 0;
  double head_forward_s = 0, head_backward_s = 0;
};

/// Boxes of one machine and one number of ranks are one kind.
std::vector<uint32_t> kinds_of(const Cluster& cluster) {
  std::map<std::pair<std::string, uint32_t>, uint32_t> kinds;
  std::vector<uint32_t> of_box;
  for (const Box& box : cluster.boxes) {
    Machine machine = box.machine;
    machine.name = machine.note = "";
    const auto next = static_cast<uint32_t>(kinds.size());
    of_box.push_back(kinds.try_emplace({machine_to_toml(machine), box.ranks}, next).first->second);
  }
  return of_box;
}

/// A way to train, of which the order of boxes is still to be chosen.
struct Candidate {
  ClusterOption option;
  uint32_t boxes = 1;           // the first so many of the order
  double resident_least_s = 0;  // option.least_s where its weights stay in memory
};

class ClusterPlanner {
 public:
  ClusterPlanner(const ModelShape& model, const Cluster& cluster, const ClusterRequest& request)
      : cluster_(cluster), request_(request), kind_of_(kinds_of(cluster)), units_(model.units()) {
    plan_.model = model;
    plan_.cluster = cluster;
    plan_.options = request.options;
    plan_.options.method = Method::kSmartOver;
    for (const Box& box : cluster.boxes) {
      rank_machines_.push_back(part_of_machine(box.machine, box.ranks));
      devices_ += std::max(1u, box.machine.device_count());
      most_devices_ = std::max(most_devices_, rank_machines_.back().device_count());
      alike_ = alike_ && box.ranks == cluster.boxes.front().ranks;
    }
  }

  Result<ClusterPlan> make() {
    SI_RETURN_IF_ERROR(check());
    std::vector<Candidate> candidates;
    for (Candidate& candidate : all_candidates()) {
      ++plan_.considered;
      SI_RETURN_IF_ERROR(choose_order(candidate));
      ClusterOption& option = candidate.option;
      candidate.resident_least_s = option.least_s;
      if (may_loop(option)) option.least_s = std::min(option.least_s, least_looped_s(option));
      candidates.push_back(std::move(candidate));
    }
    std::ranges::stable_sort(candidates, {},
                             [](const Candidate& one) { return one.option.least_s; });
    uint64_t least_lack = ~uint64_t{0};
    for (Candidate& candidate : candidates) {
      ClusterOption& option = candidate.option;
      if (plan_.best.size() == kBestMax && option.least_s >= plan_.best.back().step_s) break;
      if (const std::string lacks = place_in_memory(option, least_lack); !lacks.empty()) {
        ++plan_.without_memory;
        continue;
      }
      if (option.chunks == 1) option.least_s = candidate.resident_least_s;
      if (plan_.best.size() == kBestMax && option.least_s >= plan_.best.back().step_s) continue;
      SI_RETURN_IF_ERROR(simulate(option));
      ++plan_.simulated;
      const auto whole = [](uint64_t last) { return last == 0; };
      if (option.form && std::ranges::all_of(option.exposed, whole)) continue;  // nothing to gain
      const auto at =
          std::ranges::upper_bound(plan_.best, option.step_s, {}, &ClusterOption::step_s);
      plan_.best.insert(at, std::move(option));
      if (plan_.best.size() > kBestMax) plan_.best.pop_back();
    }
    return std::move(plan_);
  }

 private:
  Status check() const {
    const auto invalid = [](std::string what, std::string advice) {
      return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
    };
    SI_RETURN_IF_ERROR(check_train_can(plan_.model));
    const uint64_t sequence = plan_.model.sequence;
    if (request_.tokens_per_step == 0 || request_.tokens_per_step % sequence != 0) {
      return invalid(fmt::format("{} tokens in a step are no whole sequences of {}",
                                 request_.tokens_per_step, sequence),
                     fmt::format("Give a multiple of {} (--tokens-per-step), or other sequences "
                                 "(--seq)",
                                 sequence));
    }
    for (const Box& box : cluster_.boxes) {
      if (!box.machine.can_update() ||
          box.machine.software.overlapped == plan::ScheduleVariant::kPaper) {
        return invalid(
            fmt::format("box '{}' ({}) is not a machine for `smartinf train`", box.name,
                        box.machine.name),
            "Measure it with smartinf calibrate, or take a workstation or server preset");
      }
    }
    if (std::ranges::adjacent_find(cluster_.boxes, [](const Box& a, const Box& b) {
          return (a.machine.gpu.name == "none") != (b.machine.gpu.name == "none");
        }) != cluster_.boxes.end()) {
      return invalid("some boxes have a GPU and others have none",
                     "Leave those without one out: `smartinf train` refuses them");
    }
    return {};
  }

  uint32_t ranks_of(std::span<const uint32_t> order) const {
    uint32_t sum = 0;
    for (const uint32_t box : order) sum += cluster_.boxes[box].ranks;
    return sum;
  }

  /// Numbers of boxes: all, and where all have as many ranks also fewer.
  std::vector<uint32_t> box_counts() const {
    const auto all = static_cast<uint32_t>(cluster_.boxes.size());
    std::vector<uint32_t> counts;
    for (uint32_t boxes = 1; boxes < all && alike_ && !request_.all_boxes;
         boxes = all > kAllOrdersMax ? 2 * boxes : boxes + 1) {
      counts.push_back(boxes);
    }
    counts.push_back(all);
    return counts;
  }

  std::vector<Candidate> all_candidates() const {
    const uint64_t sequences = request_.tokens_per_step / plan_.model.sequence;
    std::vector<Candidate> all;
    for (const uint32_t boxes : box_counts()) {
      std::vector<uint32_t> order(cluster_.boxes.size());
      std::iota(order.begin(), order.end(), 0);
      const uint32_t ranks = ranks_of(std::span(order).first(boxes));
      for (uint32_t pipeline = 1; pipeline <= std::min<size_t>(ranks, units_.size()); ++pipeline) {
        if (ranks % pipeline != 0 || request_.pipeline.value_or(pipeline) != pipeline) continue;
        for (uint64_t micro = 1; micro <= std::min(sequences, kMicroBatchMax); ++micro) {
          if (sequences % micro != 0 || sequences / micro < ranks ||
              request_.micro_batch.value_or(micro) != micro) {
            continue;
          }
          for (const bool recompute : {false, true}) {
            if (request_.recompute.value_or(recompute) != recompute) continue;
            Candidate one;
            one.boxes = boxes;
            one.option.pipeline = pipeline;
            one.option.replicas = ranks / pipeline;
            one.option.micro_batch = micro;
            one.option.accumulation = static_cast<uint32_t>(sequences / micro);
            one.option.recompute = recompute;
            one.option.order = order;
            all.push_back(one);
            for (size_t form = 0; form < request_.forms.size() && pipeline > 1; ++form) {
              one.option.form = form;
              one.option.compression = request_.forms[form].name;
              all.push_back(one);
            }
          }
        }
      }
    }
    return all;
  }

  ModelShape model_of(const ClusterOption& option) const {
    ModelShape model = plan_.model;
    model.batch = option.micro_batch;
    return model;
  }

  StepOptions options_of(const ClusterOption& option) const {
    StepOptions options = plan_.options;
    options.recompute = option.recompute;
    options.accumulation = option.accumulation;
    options.ranks = options.machines = option.pipeline * option.replicas;
    options.overlap = plan::Overlap::kLate;
    return options;
  }

  std::vector<uint32_t> boxes_of_ranks(std::span<const uint32_t> order) const {
    std::vector<uint32_t> boxes;
    for (const uint32_t box : order) boxes.insert(boxes.end(), cluster_.boxes[box].ranks, box);
    return boxes;
  }

  static std::vector<uint64_t> batches_of(const ClusterOption& option) {
    std::vector<uint64_t> batches;
    for (uint32_t replica = 0; replica < option.replicas; ++replica) {
      batches.push_back(
          plan::micro_batches_of(option.accumulation, replica, option.replicas).size());
    }
    return batches;
  }

  /// Bytes per second of what each of these ranks sends all others, in equal parts: the slowest.
  double exchange_rate(std::span<const uint32_t> boxes) const {
    if (boxes.size() < 2) return kUnlimited;
    std::map<uint32_t, double> here;
    for (const uint32_t box : boxes) ++here[box];
    const double each = 1.0 / (static_cast<double>(boxes.size()) - 1);
    double slowest_s = 1 / kUnlimited;  // of a byte
    for (const auto& [from, senders] : here) {
      double out_s = 0;
      double fastest = 0;
      for (const auto& [to, receivers] : here) {
        if (from == to) {
          const double near = cluster_.boxes[from].machine.network.near_bytes_per_s;
          if (near > 0) slowest_s = std::max(slowest_s, senders * (senders - 1) * each / near);
          continue;
        }
        const double rate = cluster_.link(from, to).shared();
        fastest = std::max(fastest, rate);
        slowest_s = std::max(slowest_s, senders * receivers * each / rate);
        out_s += senders * receivers * each;
      }
      if (fastest > 0) slowest_s = std::max(slowest_s, out_s / fastest);
    }
    return 1 / slowest_s;
  }

  const PartSeconds& part_seconds(uint32_t kind, const ClusterOption& option) {
    const auto key = std::tuple(kind, option.micro_batch, option.recompute);
    const auto [at, fresh] = parts_.try_emplace(key);
    if (!fresh) return at->second;
    const auto box = static_cast<size_t>(std::ranges::find(kind_of_, kind) - kind_of_.begin());
    const Machine& machine = rank_machines_[box];
    const ModelShape model = model_of(option);
    StepOptions options = plan_.options;
    options.recompute = option.recompute;
    options.weights = ResidentStep{};
    const auto units = static_cast<uint32_t>(units_.size());
    PartSeconds& part = at->second;
    std::tie(part.head_forward_s, part.head_backward_s) =
        computing_s(model.stage(units - 1, units), machine, options);
    const auto [forward_s, backward_s] = computing_s(model, machine, options);
    const auto layers = static_cast<double>(model.layers);
    part.layer_forward_s = (forward_s - part.head_forward_s) / layers;
    part.layer_backward_s = (backward_s - part.head_backward_s) / layers;
    return part;
  }

  /// Forward and backward of a folded head for a micro batch, by replica.
  std::vector<double> head_s(const ClusterOption& option, const std::vector<uint32_t>& boxes) {
    std::vector<double> seconds;
    for (uint32_t replica = 0; option.folds && replica < option.replicas; ++replica) {
      const PartSeconds& part = part_seconds(kind_of_[boxes[replica]], option);
      seconds.push_back(part.head_forward_s + part.head_backward_s);
    }
    return seconds;
  }

  /// Forward and backward of units [first, end) for a micro batch.
  std::pair<double, double> seconds_of(const PartSeconds& part, uint32_t first,
                                       uint32_t end) const {
    double layers = 0;
    for (uint32_t unit = first; unit < end; ++unit) layers += units_[unit].layers;
    const double head = end == units_.size() ? 1 : 0;
    return {layers * part.layer_forward_s + head * part.head_forward_s,
            layers * part.layer_backward_s + head * part.head_backward_s};
  }

  /// Bytes of a gradient between stages that is exposed, over those of a whole one.
  double short_gradient(const ClusterOption& option) const {
    if (!option.form) return request_.short_gradient;
    const uint64_t tokens = option.micro_batch * plan_.model.sequence;
    return static_cast<double>(request_.forms[*option.form].bytes(tokens)) /
           static_cast<double>(tokens * plan_.model.hidden * plan_.options.value_bytes);
  }

  /// Whether `smartinf train` may divide the stages into chunks. A folded head waits for all.
  bool may_loop(const ClusterOption& option) const {
    return option.pipeline > 1 && option.recompute && units_.size() >= 2 * option.pipeline &&
           request_.split.empty() && !request_.folds.value_or(false) &&
           request_.chunks.value_or(2) > 1 && short_gradient(option) == 1 &&
           request_.short_activation == 1;
  }

  /// No step of stages in chunks is shorter, whatever the chunks: all computing, equally busy, or
  /// a link with two messages at least for each micro batch.
  double least_looped_s(const ClusterOption& option) {
    const std::vector<uint32_t> boxes = boxes_of_ranks(option.order);
    const PipelineLoad load = load_of(option, boxes);
    double least_s = 0;
    for (uint32_t replica = 0; replica < option.replicas; ++replica) {
      const auto batches = static_cast<double>(load.micro_batches[replica]);
      double models_per_s = 0;
      for (uint32_t stage = 0; stage < option.pipeline; ++stage) {
        const uint32_t box = boxes[load.rank_of(stage, replica)];
        const auto [forward_s, backward_s] = seconds_of(part_seconds(kind_of_[box], option), 0,
                                                        static_cast<uint32_t>(units_.size()));
        models_per_s += 1 / (forward_s + backward_s);
        const uint32_t next = boxes[load.rank_of(stage + 1, replica)];
        if (stage + 1 == option.pipeline || box == next) continue;
        const double rate =
            std::min(cluster_.link(box, next).shared(), cluster_.link(next, box).shared());
        least_s = std::max(least_s, 2 * batches * static_cast<double>(load.message_bytes) / rate);
      }
      least_s = std::max(least_s, batches / models_per_s);
    }
    return least_s;
  }

  uint64_t parameters_of(uint32_t first, uint32_t end) const {
    return units_[end - 1].end() - units_[first].first;
  }

  /// Bytes that a stage's replicas exchange: gradients to the state's owner and weights back, and
  /// a tied head's sums and weights between the first stage and the last.
  double tied_bytes(const ClusterOption& option, uint32_t stage) const {
    const ModelShape& model = plan_.model;
    if (!model.tied || option.pipeline == 1 || option.folds) return 0;
    const auto table = static_cast<double>(model.vocabulary * model.hidden);
    return stage + 1 == option.pipeline ? (4 + 2) * table / option.replicas : 0;
  }

  double tied_s(const ClusterOption& option, std::span<const uint32_t> boxes,
                uint32_t stage) const {
    const double bytes = tied_bytes(option, stage);
    if (bytes == 0 || boxes.back() == boxes.front()) return 0;
    return bytes * option.replicas / cluster_.link(boxes.back(), boxes.front()).shared();
  }

  /// Nearly what a step takes with an order, for comparing orders: nothing is simulated.
  PipelineLoad rough_load(const ClusterOption& option, const std::vector<uint32_t>& boxes) {
    const std::vector<uint32_t>& begins = option.begins;
    PipelineLoad load = load_of(option, boxes);
    load.head_s = head_s(option, boxes);
    for (uint32_t stage = 0; stage < option.pipeline; ++stage) {
      const auto ranks = std::span(boxes).subspan(size_t{stage} * option.replicas, option.replicas);
      const double rate = exchange_rate(ranks);
      const auto parameters = static_cast<double>(parameters_of(begins[stage], begins[stage + 1]));
      for (const uint32_t box : ranks) {
        StageTimes& times = load.times.emplace_back();
        std::tie(times.forward_s, times.backward_s) =
            seconds_of(part_seconds(kind_of_[box], option), begins[stage], begins[stage + 1]);
        times.exchange_s = 4 * parameters * (option.replicas - 1.0) / option.replicas / rate +
                           tied_s(option, boxes, stage);
      }
    }
    return load;
  }

  PipelineLoad load_of(const ClusterOption& option, const std::vector<uint32_t>& boxes) const {
    PipelineLoad load;
    load.stages = option.pipeline;
    load.replicas = option.replicas;
    load.ahead = option.ahead;
    load.chunks = option.chunks;
    load.box = boxes;
    load.micro_batches = batches_of(option);
    load.message_bytes =
        plan_.options.value_bytes * option.micro_batch * plan_.model.sequence * plan_.model.hidden;
    const auto of_message = [&](double share) {
      return static_cast<uint64_t>(share * static_cast<double>(load.message_bytes));
    };
    if (request_.short_activation < 1) load.forward_bytes = of_message(request_.short_activation);
    if (short_gradient(option) < 1) {
      load.shorts.bytes = of_message(short_gradient(option));
      load.shorts.last.assign(load.stages + (option.folds ? 1 : 0), option.accumulation);
    }
    return load;
  }

  plan::StageCosts stage_costs() const {
    return {units_, plan_.model.hidden, plan_.model.vocabulary * plan_.model.hidden,
            plan_.model.sequence};
  }

  /// Finds the order of boxes, and the least step.
  Status choose_order(Candidate& candidate) {
    ClusterOption& option = candidate.option;
    const bool fewer_bytes =
        plan::head_folds({plan_.model.vocabulary, plan_.model.hidden, request_.tokens_per_step,
                          plan_.options.value_bytes, option.replicas});
    option.folds = option.pipeline > 1 && units_.size() > option.pipeline && plan_.model.tied &&
                   request_.folds.value_or(fewer_bytes);
    SI_ASSIGN_OR_RETURN(option.begins, plan::divide_units(stage_costs(), option.pipeline,
                                                          request_.split, option.folds));
    option.uneven = !request_.split.empty();
    const auto first_boxes = [&](std::span<const uint32_t> order) {
      return boxes_of_ranks(order.first(candidate.boxes));
    };
    const auto cost = [&](std::span<const uint32_t> order) {
      const std::vector<uint32_t> boxes = first_boxes(order);
      return least_step_s(rough_load(option, boxes), cluster_);
    };
    const double given_s = cost(option.order);
    const bool one_order = request_.all_boxes || cluster_.boxes.size() == 1 ||
                           (option.pipeline == 1 && candidate.boxes == cluster_.boxes.size());
    option.least_s = given_s;
    if (!one_order) {
      const auto found =
          best_order(static_cast<uint32_t>(cluster_.boxes.size()), cost, 0, moves_of(option));
      const double found_s = cost(found);
      option.order_gain = given_s / found_s - 1;
      if (option.order_gain > cluster_.spread()) {
        option.reordered = true;
        option.order = found;
        option.least_s = found_s;
      }
    }
    option.order.resize(candidate.boxes);
    if (option.pipeline == 1 || option.uneven) return {};
    SI_RETURN_IF_ERROR(divide(option, boxes_of_ranks(option.order), /*by_memory=*/false));
    if (option.uneven) {
      option.least_s = least_step_s(rough_load(option, boxes_of_ranks(option.order)), cluster_);
    }
    return {};
  }

  /// Seconds of a rank in a step, by what its stage has.
  struct RankRates {
    PartSeconds part;
    double batches = 0;
    double head_s = 0;      // of a micro batch, folded
    double update_s = 0;    // of a parameter
    double before_s = 0;    // until the stages before have made its first input...
    double behind_s = 0;    // ...and those before have done its last gradient
    double exchange_s = 0;  // of a parameter
    double tied_s = 0;      // of a step
  };

  Result<std::vector<RankRates>> rates_of(const ClusterOption& option,
                                          const std::vector<uint32_t>& boxes, uint32_t stage) {
    const auto ranks = std::span(boxes).subspan(size_t{stage} * option.replicas, option.replicas);
    std::map<uint32_t, RankRates> of_kind;
    for (const uint32_t box : ranks) {
      const auto [at, fresh] = of_kind.try_emplace(kind_of_[box]);
      if (!fresh) continue;
      RankRates& rates = at->second;
      rates.part = part_seconds(kind_of_[box], option);
      rates.batches = static_cast<double>(batches_of(option).front());
      if (option.folds && stage == 0) {
        rates.head_s = rates.part.head_forward_s + rates.part.head_backward_s;
      }
      SI_ASSIGN_OR_RETURN(rates.update_s, update_seconds(box, option));
      const auto units = static_cast<uint32_t>(units_.size());
      const auto [forward_s, backward_s] = seconds_of(rates.part, 0, units - 1);
      rates.before_s = stage * forward_s / option.pipeline;
      rates.behind_s = stage * backward_s / option.pipeline;
      rates.exchange_s = 4 * (option.replicas - 1.0) / option.replicas / exchange_rate(ranks);
      rates.tied_s = tied_s(option, boxes, stage);
    }
    std::vector<RankRates> all;
    for (const auto& [kind, rates] : of_kind) all.push_back(rates);
    return all;
  }

  /// Of a parameter, on a rank of so many replicas: by the drives, or whatever takes longer.
  Result<double> update_seconds(uint32_t box, const ClusterOption& option) {
    const auto [at, fresh] = updates_.try_emplace({kind_of_[box], option.replicas});
    if (!fresh) return at->second;
    StepOptions options = options_of(option);
    options.ranks = options.machines = option.replicas;
    SI_ASSIGN_OR_RETURN(
        const StageTimes times,
        stage_times(model_of(option), with_network(rank_machines_[box], kUnlimited), options));
    return at->second = times.update_s / static_cast<double>(plan_.model.parameters());
  }

  /// A step of a rank whose stage has units [first, end), without its update.
  double computing_of(const RankRates& rates, uint32_t first, uint32_t end) const {
    const auto [forward_s, backward_s] = seconds_of(rates.part, first, end);
    const auto parameters = static_cast<double>(parameters_of(first, end));
    return rates.batches * (forward_s + backward_s + rates.head_s) + rates.before_s +
           rates.behind_s + rates.exchange_s * parameters + rates.tied_s;
  }
  /// Its update, as far as it is not beside the first forward and those of the stages before: the
  /// other stages wait for it, but for the micro batches that may be under way.
  double update_of(const RankRates& rates, uint32_t first, uint32_t end) const {
    const double forward_s = seconds_of(rates.part, first, end).first;
    return std::max(0.0, rates.update_s * static_cast<double>(parameters_of(first, end)) -
                             rates.before_s - forward_s);
  }

  /// Makes a step the shortest, of the slowest stage and the longest update. by_memory: among
  /// divisions that fit.
  Status divide(ClusterOption& option, const std::vector<uint32_t>& boxes, bool by_memory) {
    std::vector<std::vector<RankRates>> rates;
    for (uint32_t stage = 0; stage < option.pipeline; ++stage) {
      SI_ASSIGN_OR_RETURN(rates.emplace_back(), rates_of(option, boxes, stage));
    }
    const auto units = static_cast<uint32_t>(units_.size()) - (option.folds ? 1 : 0);
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> ends;  // that fit, by stage and first unit
    const auto fits = [&](uint32_t stage, uint32_t first, uint32_t end) {
      const auto [at, fresh] = ends.try_emplace({stage, first}, first);
      if (fresh) {  // more units need more
        for (uint32_t most = units; at->second < most;) {
          const uint32_t middle = most - (most - at->second) / 2;
          const bool has = has_memory(option, boxes, stage, first, middle);
          (has ? at->second : most) = has ? middle : middle - 1;
        }
      }
      return end <= at->second;
    };
    const auto computing = [&](uint32_t stage, uint32_t first, uint32_t end) {
      double slowest_s = by_memory && !fits(stage, first, end) ? kUnlimited : 0;
      for (const RankRates& rank : rates[stage]) {
        slowest_s = std::max(slowest_s, computing_of(rank, first, end));
      }
      return slowest_s;
    };
    const auto update = [&](uint32_t stage, uint32_t first, uint32_t end) {
      double longest_s = 0;
      for (const RankRates& rank : rates[stage]) {
        longest_s = std::max(longest_s, update_of(rank, first, end));
      }
      return longest_s;
    };
    const auto step_s = [&](const std::vector<uint32_t>& begins) {
      double slowest_s = 0, longest_s = 0;
      for (uint32_t stage = 0; stage < option.pipeline; ++stage) {
        slowest_s = std::max(slowest_s, computing(stage, begins[stage], begins[stage + 1]));
        longest_s = std::max(longest_s, update(stage, begins[stage], begins[stage + 1]));
      }
      return slowest_s + longest_s;
    };
    std::vector<uint32_t> begins = plan::split_units(units, option.pipeline, computing, update);
    if (option.folds) begins.push_back(units + 1);
    if (step_s(begins) > 0.99 * step_s(option.begins)) return {};
    option.begins = std::move(begins);
    option.uneven = true;
    return {};
  }

  /// Of a stage of units [first, end), on all its ranks.
  bool has_memory(const ClusterOption& option, const std::vector<uint32_t>& boxes, uint32_t stage,
                  uint32_t first, uint32_t end) const {
    ClusterOption tried = option;
    tried.ahead = 0;
    for (uint32_t i = 0; i < option.pipeline; ++i) tried.begins[i] = i <= stage ? first : end;
    tried.begins[stage + 1] = end;
    std::set<uint32_t> kinds;
    for (uint32_t replica = 0; replica < option.replicas; ++replica) {
      const uint32_t rank = stage * option.replicas + replica;
      if (!kinds.insert(kind_of_[boxes[rank]]).second) continue;
      const Machine& machine = rank_machines_[boxes[rank]];
      if (!lack_of(option, need_of(option, machine, pipeline_of(tried, rank)), machine).empty()) {
        return false;
      }
    }
    return true;
  }

  /// Fewer where each costs more, so that 64 boxes take no longer than 16.
  static uint32_t moves_of(const ClusterOption& option) {
    const uint64_t ranks = uint64_t{option.pipeline} * option.replicas;
    return static_cast<uint32_t>(std::clamp<uint64_t>(
        kOrderMoves * 16 / std::max<uint64_t>(1, ranks), kOrderMoves / 4, kOrderMoves));
  }

  MemoryNeed need_of(const ClusterOption& option, const Machine& machine,
                     const plan::Pipeline& pipeline) const {
    TrainingUse use;
    use.recompute = option.recompute;
    StepOptions options = options_of(option);
    options.devices = devices_;
    Machine with_most = machine;  // all ranks plan for those of the rank with the most
    with_most.devices.front().count += most_devices_ - machine.device_count();
    return memory_need(model_of(option), with_most, options, use, pipeline);
  }

  std::string lack_of(const ClusterOption& option, const MemoryNeed& need,
                      const Machine& machine) const {
    TrainingUse use;
    use.recompute = option.recompute;
    return shortfall_of(need, machine, options_of(option), use);
  }

  /// Every rank's memory; what lacks, empty where all fits.
  std::string place_in_memory(ClusterOption& option, uint64_t& least_lack) {
    const std::vector<uint32_t> boxes = boxes_of_ranks(option.order);
    std::string lacks;
    if (request_.chunks.value_or(1) == 1) {
      lacks = place_stages(option, boxes);
      if (!lacks.empty() && option.pipeline > 1 && request_.split.empty() && some_fit(option)) {
        if (divide(option, boxes, /*by_memory=*/true).ok()) lacks = place_stages(option, boxes);
      }
    } else if (!may_loop(option)) {
      return "it has no chunks";
    }
    if (may_loop(option) && (!lacks.empty() || request_.chunks))
      lacks = place_chunks(option, boxes);
    if (lacks.empty()) return {};
    uint64_t over = 0;
    for (const RankNeed& rank : option.ranks) {
      const auto beyond = [](uint64_t need, uint64_t limit) {
        return limit > 0 && need > limit ? need - limit : 0;
      };
      over += beyond(rank.need.host_bytes, rank.host_limit_bytes) +
              beyond(rank.need.gpu_bytes, rank.gpu_limit_bytes);
    }
    if (over < least_lack) {
      least_lack = over;
      plan_.lacks = fmt::format("{}: {}", option_text(plan_, option), lacks);
    }
    return lacks;
  }

  /// Whether a rank has what it needs; else all would lack as much with other layers.
  static bool some_fit(const ClusterOption& option) {
    return std::ranges::any_of(option.ranks, [](const RankNeed& rank) {
      const auto within = [](uint64_t need, uint64_t limit) { return limit == 0 || need <= limit; };
      return within(rank.need.host_bytes, rank.host_limit_bytes) &&
             within(rank.need.gpu_bytes, rank.gpu_limit_bytes);
    });
  }

  plan::Pipeline pipeline_of(const ClusterOption& option, uint32_t rank) const {
    return {{option.begins, option.replicas, option.chunks, option.folds}, rank, option.ahead};
  }

  /// The fewest chunks for which all have memory, as the trainer finds them; else the most.
  std::string place_chunks(ClusterOption& option, const std::vector<uint32_t>& boxes) {
    const auto units = static_cast<uint32_t>(units_.size());
    const uint32_t most = units / option.pipeline;
    option.folds = option.uneven = false;
    option.ahead = 0;
    std::string lacks = "too few parts for so many chunks";
    for (option.chunks = request_.chunks.value_or(2); option.chunks <= most; ++option.chunks) {
      auto begins = plan::divide_units(stage_costs(), option.pipeline * option.chunks);
      option.begins = std::move(*begins);
      lacks = place_ranks(option, boxes);
      if (lacks.empty() || request_.chunks) return lacks;
    }
    --option.chunks;
    return lacks;
  }

  /// Every rank's memory for its stage.
  std::string place_ranks(ClusterOption& option, const std::vector<uint32_t>& boxes) const {
    std::map<std::pair<uint32_t, uint32_t>, MemoryNeed> needs;  // by kind and stage
    std::string lacks;
    option.ranks.clear();
    for (uint32_t rank = 0; rank < boxes.size(); ++rank) {
      const uint32_t stage = rank / option.replicas;
      const Machine& machine = rank_machines_[boxes[rank]];
      const auto [at, fresh] = needs.try_emplace({kind_of_[boxes[rank]], stage});
      if (fresh) at->second = need_of(option, machine, pipeline_of(option, rank));
      add_rank(option, boxes[rank], stage, at->second);
      const std::string lack = lack_of(option, at->second, machine);
      if (!lack.empty() && lacks.empty()) {
        lacks = fmt::format("{}: {}", cluster_.boxes[boxes[rank]].name, lack);
      }
    }
    return lacks;
  }

  /// As the trainer does: of one stage all ranks make one plan, for the least of their limits.
  std::string place_stages(ClusterOption& option, const std::vector<uint32_t>& boxes) {
    const auto ranks = static_cast<uint32_t>(boxes.size());
    if (option.pipeline == 1) {
      uint32_t least = boxes.front();
      for (const uint32_t box : boxes) {
        if (rank_machines_[box].host.memory_bytes < rank_machines_[least].host.memory_bytes)
          least = box;
      }
      const MemoryNeed need = need_of(option, rank_machines_[least], {});
      option.ranks.clear();
      std::string lacks = lack_of(option, need, rank_machines_[least]);
      for (uint32_t rank = 0; rank < ranks; ++rank) add_rank(option, boxes[rank], 0, need);
      return lacks.empty() ? lacks : fmt::format("{}: {}", cluster_.boxes[least].name, lacks);
    }
    std::vector<plan::AheadCost> costs;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      for (uint32_t ahead = 0; ahead <= plan::kPipelineAheadMax; ++ahead) {
        option.ahead = ahead;
        const Machine& machine = rank_machines_[boxes[rank]];
        const std::string lack =
            lack_of(option, need_of(option, machine, pipeline_of(option, rank)), machine);
        costs.push_back(lack.empty() ? plan::AheadCost::kKeeps : plan::AheadCost::kDoesNotFit);
      }
    }
    option.ahead = plan::most_ahead(costs);
    return place_ranks(option, boxes);
  }

  void add_rank(ClusterOption& option, uint32_t box, uint32_t stage, MemoryNeed need) const {
    const Machine& machine = rank_machines_[box];
    RankNeed& rank = option.ranks.emplace_back();
    rank.box = box;
    rank.stage = stage;
    rank.need = std::move(need);
    rank.host_limit_bytes = machine.host.memory_bytes;
    rank.gpu_limit_bytes = machine.gpu.name == "none" ? 0 : machine.gpu.memory_bytes;
  }

  Machine with_network(const Machine& machine, double rate) const {
    Machine rank = machine;
    rank.network.bytes_per_s = rate;
    double latency_s = 0;
    for (const Link& link : cluster_.links) latency_s = std::max(latency_s, link.latency_s);
    rank.network.latency_s = latency_s;
    return rank;
  }

  Status simulate(ClusterOption& option) {
    const std::vector<uint32_t> boxes = boxes_of_ranks(option.order);
    SI_RETURN_IF_ERROR(option.pipeline == 1 ? simulate_replicas(option, boxes)
                                            : simulate_stages(option, boxes));
    option.tokens_per_s = static_cast<double>(request_.tokens_per_step) / option.step_s;
    double per_second = 0;
    for (size_t i = 0; i < option.order.size(); ++i) {
      const Box& box = cluster_.boxes[option.order[i]];
      double life_days = 0;
      for (const RankNeed& rank : option.ranks) {
        if (rank.box != option.order[i] || rank.drive_life_days == 0) continue;
        life_days =
            life_days == 0 ? rank.drive_life_days : std::min(life_days, rank.drive_life_days);
      }
      per_second += cost_per_second(box.machine, life_days);
    }
    option.cost_per_mtoken = per_second / option.tokens_per_s * 1e6;
    return {};
  }

  void add_life(ClusterOption& option, size_t rank, const StepBytes& bytes) const {
    const Machine& machine = rank_machines_[option.ranks[rank].box];
    option.ranks[rank].drive_life_days = drive_life_days(
        machine, static_cast<double>(bytes.drive_written) / std::max(1u, machine.device_count()),
        option.step_s);
  }

  /// Finds of how many stages gradients among replicas are compressed: the fewest with which a step
  /// is as short as with any number, to 0.5 % of it. step_s: with so many.
  template <typename StepSeconds>
  Status choose_compressed(ClusterOption& option, const StepSeconds& step_s) const {
    constexpr double kNotWorth = 1.005;
    option.compressed_stages = 0;
    if (request_.compressed_gradient_bytes == 0 || option.replicas == 1) return {};
    option.compressed_stages = std::min(option.pipeline, request_.compressed_stages.value_or(0));
    if (request_.compressed_stages) return {};
    std::vector<double> seconds;
    for (uint32_t stages = 0; stages <= option.pipeline; ++stages) {
      SI_ASSIGN_OR_RETURN(seconds.emplace_back(), step_s(stages));
    }
    const double enough_s = kNotWorth * *std::ranges::min_element(seconds);
    while (seconds[option.compressed_stages] > enough_s) ++option.compressed_stages;
    return {};
  }

  Status simulate_replicas(ClusterOption& option, const std::vector<uint32_t>& boxes) {
    SI_RETURN_IF_ERROR(choose_compressed(option, [&](uint32_t stages) -> Result<double> {
      ClusterOption tried = option;
      tried.compressed_stages = stages;
      SI_RETURN_IF_ERROR(simulate_replicas_of(tried, boxes));
      return tried.step_s;
    }));
    return simulate_replicas_of(option, boxes);
  }

  Status simulate_replicas_of(ClusterOption& option, const std::vector<uint32_t>& boxes) {
    StepOptions options = with_plan(options_of(option), option.ranks.front().need);
    if (option.compressed_stages > 0) {
      options.compressed_gradient_bytes = request_.compressed_gradient_bytes;
    }
    const double rate = exchange_rate(boxes);
    std::map<uint32_t, StepTimes> times;
    for (const uint32_t box : boxes) {
      const auto [at, fresh] = times.try_emplace(kind_of_[box]);
      if (fresh) {
        SI_ASSIGN_OR_RETURN(
            at->second,
            simulate_step(model_of(option), with_network(rank_machines_[box], rate), options));
      }
      if (at->second.total_s <= option.step_s) continue;
      option.step_s = at->second.total_s;
      option.bound_by =
          boxes.size() == 1 || alike_kinds()
              ? at->second.bound_by
              : fmt::format("{} on {}", at->second.bound_by, cluster_.boxes[box].name);
    }
    for (size_t rank = 0; rank < boxes.size(); ++rank) {
      const StepBytes& bytes = times.at(kind_of_[boxes[rank]]).bytes;
      add_life(option, rank, bytes);
      option.exchange_bytes = std::max(option.exchange_bytes, bytes.ranks_sent);
    }
    return {};
  }

  bool alike_kinds() const {
    return std::ranges::all_of(kind_of_, [](uint32_t kind) { return kind == 0; });
  }

  Status simulate_stages(ClusterOption& option, const std::vector<uint32_t>& boxes) {
    PipelineLoad load = load_of(option, boxes);
    load.head_s = head_s(option, boxes);
    StepOptions options = options_of(option);
    options.ranks = options.machines = option.replicas;
    const ModelShape model = model_of(option);
    std::map<std::tuple<uint32_t, uint32_t, bool>, StageTimes> known;  // by kind, part, compressed
    const auto take_times = [&](uint32_t compressed) -> Status {
      load.times.clear();
      for (uint32_t part = 0; part < option.pipeline * option.chunks; ++part) {
        const bool is = part % option.pipeline < compressed;
        options.compressed_gradient_bytes = is ? request_.compressed_gradient_bytes : 0;
        for (uint32_t replica = 0; replica < option.replicas; ++replica) {
          const uint32_t rank = load.rank_of(part, replica);
          const auto [at, fresh] = known.try_emplace({kind_of_[boxes[rank]], part, is});
          if (fresh) {
            SI_ASSIGN_OR_RETURN(at->second, times_of(option, boxes, rank, part, model, options));
          }
          load.times.push_back(at->second);
        }
      }
      return {};
    };
    SI_RETURN_IF_ERROR(choose_compressed(option, [&](uint32_t stages) -> Result<double> {
      SI_RETURN_IF_ERROR(take_times(stages));
      return simulate_pipeline(load, cluster_).step_s;
    }));
    SI_RETURN_IF_ERROR(take_times(option.compressed_stages));
    if (short_gradient(option) < 1) {
      option.exposed = load.shorts.last = exposed_gradients(load, cluster_);
    }
    PipelineTimes times = simulate_pipeline(load, cluster_, true);
    option.step_s = times.step_s;
    option.bound_by =
        fmt::format("{}, {:.0f} % of the step", times.bound_by, 100 * times.bound_share);
    option.spans = std::move(times.spans);
    for (uint32_t rank = 0; rank < boxes.size(); ++rank) {
      StepBytes bytes;
      for (uint32_t chunk = 0; chunk < option.chunks; ++chunk) {
        bytes.drive_written += load.of(rank, chunk).bytes.drive_written;
        bytes.ranks_sent += load.of(rank, chunk).bytes.ranks_sent;
      }
      add_life(option, rank, bytes);
      option.exchange_bytes = std::max(option.exchange_bytes, bytes.ranks_sent);
    }
    // Between two stages the way from the last one back to the first is the same boundary.
    const uint32_t around = option.pipeline == 2 ? load.senders() - 1 - option.chunks : 0;
    option.boundary_bytes = (option.chunks + around) * load.message_bytes *
                            *std::ranges::max_element(load.micro_batches);
    option.back_bytes = option.boundary_bytes;
    if (const auto& exposed = option.exposed; exposed.size() > 1) {
      const auto senders = std::span(exposed).subspan(1);
      const uint64_t gradients = around > 0 ? std::accumulate(senders.begin(), senders.end(), 0ull)
                                            : *std::ranges::min_element(senders);
      option.back_bytes -= gradients * (load.message_bytes - load.shorts.bytes);
    }
    return {};
  }

  /// What a rank does with a part of the model.
  Result<StageTimes> times_of(const ClusterOption& option, const std::vector<uint32_t>& boxes,
                              uint32_t rank, uint32_t part, const ModelShape& model,
                              StepOptions options) const {
    const uint32_t stage = rank / option.replicas;
    const uint32_t chunk = part / option.pipeline;
    const double rate =
        exchange_rate(std::span(boxes).subspan(size_t{stage} * option.replicas, option.replicas));
    const plan::Pipeline pipeline = pipeline_of(option, rank);
    const MemoryNeed& need = option.ranks[rank].need;
    const auto units = [&](uint32_t first, uint32_t end) {
      return static_cast<double>(
          plan::elements_of(std::span(need.units).subspan(first), end - first));
    };
    uint32_t first = static_cast<uint32_t>(need.units.size());
    for (uint32_t c = option.chunks; c-- > chunk;) first -= pipeline.end(c) - pipeline.begin(c);
    const uint32_t end = first + pipeline.end(chunk) - pipeline.begin(chunk);
    const double mine = units(first, end);
    if (need.gradients_spilled) {
      const double share = mine / units(0, static_cast<uint32_t>(need.units.size()));
      options.gradient_memory_bytes =
          static_cast<uint64_t>(share * static_cast<double>(need.plan.gradient_memory_bytes));
    }
    SI_ASSIGN_OR_RETURN(StageTimes times,
                        stage_times(model.stage(pipeline.begin(chunk), pipeline.end(chunk)),
                                    with_network(rank_machines_[boxes[rank]], rate), options));
    if (part + 1 == option.pipeline * option.chunks)
      times.exchange_s += tied_s(option, boxes, stage);
    const auto beyond = [&](uint32_t stay) {
      return stay >= end ? 0 : units(std::max(stay, first), end) / mine;
    };
    times.read_s *= beyond(need.plan.placement.in_memory);
    times.fetch_s *= beyond(need.plan.placement.on_accelerator);
    return times;
  }

  const Cluster& cluster_;
  const ClusterRequest& request_;
  const std::vector<uint32_t> kind_of_;  // by box
  const std::vector<plan::Unit> units_;
  std::vector<Machine> rank_machines_;  // one rank's part, by box
  uint32_t devices_ = 0;
  uint32_t most_devices_ = 0;
  bool alike_ = true;  // in ranks
  std::map<std::tuple<uint32_t, uint64_t, bool>, PartSeconds> parts_;
  std::map<std::pair<uint32_t, uint32_t>, double> updates_;  // by kind and replicas
  ClusterPlan plan_;
};

}  // namespace

Result<ClusterPlan> plan_cluster(const ModelShape& model, const Cluster& cluster,
                                 const ClusterRequest& request) {
  SI_RETURN_IF_ERROR(check_model(model));
  return ClusterPlanner(model, cluster, request).make();
}

namespace {

std::string layers_text(const ClusterPlan& plan, const ClusterOption& option,
                        std::string_view between) {
  const std::vector<plan::Unit> units = plan.model.units();
  std::string text;
  for (uint32_t stage = 0; stage < option.pipeline; ++stage) {
    uint32_t layers = 0;
    for (uint32_t unit = option.begins[stage]; unit < option.begins[stage + 1]; ++unit) {
      layers += units[unit].layers;
    }
    text += fmt::format("{}{}", stage > 0 ? between : "", layers);
  }
  return text;
}

}  // namespace

std::string split_text(const ClusterPlan& plan, const ClusterOption& option) {
  return layers_text(plan, option, ", ");
}

std::string option_text(const ClusterPlan& plan, const ClusterOption& option) {
  std::string text;
  if (option.pipeline == 1) {
    text = option.replicas == 1 ? "one rank"
                                : fmt::format("{} ranks, each the whole model", option.replicas);
  } else {
    text = option.chunks > 1
               ? fmt::format("{} stages of {} chunks by turns", option.pipeline, option.chunks)
               : fmt::format("{} stages of {} layers", option.pipeline,
                             layers_text(plan, option, " + "));
    if (option.folds) text += ", the head on the first";
    if (option.replicas > 1) text += fmt::format(", {} replicas", option.replicas);
  }
  text += fmt::format(", {} micro batches of {}, {}", option.accumulation, option.micro_batch,
                      option.recompute ? "activations computed again" : "activations kept");
  if (option.compressed_stages > 0) {
    text += option.pipeline == 1
                ? ", compressed gradients"
                : fmt::format(", compressed gradients of the first {} stages' replicas",
                              option.compressed_stages);
  }
  if (option.form) {
    text += fmt::format(", exposed gradients as {} (it loses something)", option.compression);
  }
  if (!option.ranks.empty()) {
    const std::string streamed = streamed_text(option.ranks.front().need);
    if (!streamed.empty()) text += "; " + streamed;
  }
  return text;
}

std::string order_text(const ClusterPlan& plan, const ClusterOption& option) {
  if (plan.cluster.boxes.size() < 2 || option.pipeline == 1) return {};
  const double spread = plan.cluster.spread();
  if (option.reordered) {
    std::vector<std::string> names;
    for (const uint32_t box : option.order) names.push_back(plan.cluster.boxes[box].name);
    return fmt::format(
        "In this order of boxes, {}, a step is {:.1f} % shorter than in the file's; "
        "links differ by {:.1f} % between rounds.",
        fmt::join(names, ", "), 100 * (1 - 1 / (1 + option.order_gain)), 100 * spread);
  }
  return fmt::format(
      "Another order of boxes has nothing to gain: {:.1f} %, and links differ by {:.1f} % "
      "between rounds.",
      100 * std::max(0.0, option.order_gain), 100 * spread);
}

}  // namespace smartinf::sim
