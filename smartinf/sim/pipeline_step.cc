#include "smartinf/sim/pipeline_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/plan/pipeline_schedule.h"
#include "smartinf/sim/event_graph.h"

namespace smartinf::sim {
namespace {

constexpr double kTick = 1e-9;  // of computing: what a "byte" of it takes
constexpr uint32_t kSteps = 3;  // until one is like the one before; the last is taken
// Micro batches that are simulated of a step which has more: from there on each takes as long.
constexpr uint64_t kBatchesMax = 96;
constexpr uint64_t kBatchesLess = 64;

using TaskIndex = EventGraph::TaskIndex;
constexpr TaskIndex kNone = EventGraph::kNone;

Link link_of(const Cluster& cluster, uint32_t from, uint32_t to) {
  if (from != to) return cluster.link(from, to);
  Link near;
  near.bytes_per_s = cluster.boxes[from].machine.network.near_bytes_per_s;  // 0: without limit
  return near;
}

/// All chunks of a rank.
StageTimes stage_of(const PipelineLoad& load, uint32_t rank) {
  StageTimes sum = load.of(rank, 0);
  for (uint32_t chunk = 1; chunk < load.chunks; ++chunk) {
    const StageTimes& times = load.of(rank, chunk);
    sum.forward_s += times.forward_s;
    sum.backward_s += times.backward_s;
    sum.exchange_s += times.exchange_s;
    sum.update_s += times.update_s;
    sum.sync_s += times.sync_s;
  }
  return sum;
}

class PipelineGraph {
 public:
  PipelineGraph(const PipelineLoad& load, const Cluster& cluster, bool trace)
      : load_(load), cluster_(cluster), trace_(trace) {
    for (uint32_t rank = 0; rank < load.ranks(); ++rank) {
      computing_.push_back(graph_.add_resource(fmt::format("rank {}", rank)));
    }
    channels_.resize(load.ranks(), {kNone, kNone});
    updated_.resize(load.ranks(), std::vector<TaskIndex>(load.chunks, kNone));
    packed_.resize(load.ranks(), kNone);
    synced_.resize(load.ranks(), kNone);
  }

  PipelineTimes run() {
    std::array<TaskIndex, kSteps> ends{};
    for (uint32_t step = 0; step < kSteps; ++step) ends[step] = add_step(step);
    graph_.run();
    const double from_s = graph_.times(ends[kSteps - 2]).end_s;
    const double to_s = graph_.times(ends[kSteps - 1]).end_s;
    PipelineTimes times;
    times.step_s = to_s - from_s;
    find_bound(times, from_s, to_s);
    for (const Label& label : labels_) {
      const TaskTimes& of = graph_.times(label.task);
      if (of.end_s <= from_s || of.start_s >= to_s || of.end_s == of.start_s) continue;
      times.spans.push_back({label.lane, label.name, std::max(0.0, of.start_s - from_s),
                             std::min(to_s, of.end_s) - from_s});
    }
    return times;
  }

 private:
  using Action = plan::PipelineAction;
  static size_t kind_of(bool back, uint32_t chunk) { return 2 * chunk + (back ? 1 : 0); }
  struct Label {
    TaskIndex task = kNone;
    std::string lane, name;
  };
  struct Computed {
    TaskIndex task = kNone;    // computing alone
    TaskIndex before = kNone;  // the rank's action before it
    TaskIndex ready = kNone;   // what it made may be sent, and the rank go on
  };

  using Made = std::vector<std::vector<Computed>>;  // by kind_of(), of the stage and a folded head

  static Stage seconds(double value, const std::vector<Use>& uses) {
    if (uses.empty()) return Stage(0, {}, value);
    return Stage(static_cast<uint64_t>(std::llround(value / kTick)), uses);
  }

  void label(TaskIndex task, uint32_t rank, std::string name) {
    if (!trace_) return;
    labels_.push_back({task,
                       fmt::format("stage {}, rank {}, {}", load_.stage(rank), rank,
                                   cluster_.boxes[load_.box[rank]].name),
                       std::move(name)});
  }

  /// All ranks' actions of a step; returns the end of all backwards.
  TaskIndex add_step(uint32_t step) {
    std::vector<Made> made(load_.ranks(), Made(2 * (size_t{load_.chunks} + 1)));
    std::vector<std::vector<Action>> actions;
    for (uint32_t rank = 0; rank < load_.ranks(); ++rank) {
      actions.push_back(load_.chunks > 1 ? plan::looped_actions(load_.chunks, load_.batches(rank))
                                         : plan::pipeline_actions(load_.stages, load_.stage(rank),
                                                                  load_.batches(rank), load_.ahead,
                                                                  load_.folds()));
      compute(rank, actions.back(), made[rank]);
      if (load_.chunks > 1) bring_weights(rank, made[rank]);
    }
    for (uint32_t rank = 0; rank < load_.ranks(); ++rank) {
      for (const Action& action : actions[rank]) send(rank, action, made);
    }
    const TaskIndex end = graph_.add_task({}, {});
    for (uint32_t rank = 0; rank < load_.ranks(); ++rank) {
      TaskIndex exchanged = synced_[rank];
      for (uint32_t chunk = load_.chunks; chunk-- > 0;) {
        exchanged = graph_.add_task({seconds(load_.of(rank, chunk).exchange_s, {})},
                                    {made[rank][kind_of(true, chunk)].back().ready, exchanged});
        label(exchanged, rank, "gradients");
      }
      graph_.add_dependency(end, exchanged);
    }
    for (uint32_t rank = 0; rank < load_.ranks(); ++rank) {
      TaskIndex before = end;
      double sync_s = 0;
      for (uint32_t chunk = 0; chunk < load_.chunks; ++chunk) {
        const StageTimes& times = load_.of(rank, chunk);
        std::vector<Use> uses;
        if (times.update_cores > 0) uses.push_back({computing_[rank], times.update_cores * kTick});
        uses.push_back({updating(rank), kTick});
        before = graph_.add_task({seconds(times.update_s, uses)}, {before});
        label(before, rank, fmt::format("update {}", step));
        updated_[rank][chunk] = before;
        sync_s += times.sync_s;
      }
      synced_[rank] = graph_.add_task({seconds(sync_s, {})}, {before});
      started_ = end;
    }
    return end;
  }

  /// Weights of chunks come while the chunk before is computed with: in forward from the update,
  /// which makes them as there is room, in backward from the devices, once they are committed.
  void bring_weights(uint32_t rank, const Made& made) {
    const auto chunks = static_cast<int>(load_.chunks);
    TaskIndex brought = kNone;
    const auto kind_at = [&](int i) {
      return i < chunks ? kind_of(false, static_cast<uint32_t>(i))
                        : kind_of(true, static_cast<uint32_t>(2 * chunks - 1 - i));
    };
    for (int i = 0; i < 2 * chunks; ++i) {
      const bool back = i >= chunks;
      const auto chunk = static_cast<uint32_t>(back ? 2 * chunks - 1 - i : i);
      const StageTimes& times = load_.of(rank, chunk);
      const bool reads = (back || !load_.late) && times.read_s > 0;
      const TaskIndex room = i < 2 ? kNone : made[kind_at(i - 2)].back().task;
      if (!back && load_.late && times.read_s > 0 && updated_[rank][chunk] != kNone &&
          room != kNone) {
        graph_.add_dependency(updated_[rank][chunk], room);
      }
      std::vector<Use> uses;
      if (reads) uses.push_back({updating(rank), kTick});
      const double takes_s = std::max(reads ? times.read_s : 0, times.fetch_s);
      if (takes_s == 0) continue;
      brought = graph_.add_task({seconds(takes_s, uses)},
                                {brought, room, reads ? synced_[rank] : kNone, started_});
      label(brought, rank, fmt::format("weights {}", chunk));
      graph_.add_dependency(made[kind_at(i)].front().task, brought);
    }
  }

  uint32_t updating(uint32_t rank) {
    const auto [at, fresh] = updating_.try_emplace(rank, 0);
    if (fresh) at->second = graph_.add_resource(fmt::format("update of rank {}", rank));
    return at->second;
  }

  void compute(uint32_t rank, const std::vector<Action>& actions, Made& made) {
    TaskIndex last = load_.late ? started_ : updated_[rank].back();
    for (const Action& action : actions) {
      const bool back = action.kind == Action::Kind::kBackward;
      const bool head = load_.folds() && action.chunk > 0;
      const StageTimes& times = load_.of(rank, head ? 0 : action.chunk);
      double takes_s = back ? times.backward_s : times.forward_s;
      if (head) takes_s = back ? load_.head_s[rank] : 0;
      Computed& one = made[kind_of(back, action.chunk)].emplace_back();
      one.before = last;
      one.task = graph_.add_task({seconds(takes_s, {{computing_[rank], kTick}})}, {last});
      label(one.task, rank, fmt::format("{}{}", head ? "H" : back ? "B" : "F", action.micro_batch));
      // Of the first forward each part waits for its own new weights.
      const bool first = !back && !head && action.micro_batch == 0;
      const TaskIndex updated = first ? updated_[rank][action.chunk] : kNone;
      one.ready = updated != kNone ? graph_.add_task({}, {one.task, updated}) : one.task;
      last = one.ready;
    }
  }

  bool is_short(uint32_t rank, uint32_t sender, uint64_t micro_batch) const {
    const std::vector<uint64_t>& last = load_.shorts.last;
    return !last.empty() && micro_batch + last[sender] >= load_.batches(rank);
  }

  /// What an action made, on its way to the neighbour that needs it.
  void send(uint32_t rank, const Action& action, std::vector<Made>& made) {
    const bool back = action.kind == Action::Kind::kBackward;
    const uint32_t sender = action.chunk * load_.stages + load_.stage(rank);
    if (back ? sender == 0 : sender + 1 == load_.senders()) return;
    const uint32_t getter = back ? sender - 1 : sender + 1;
    const uint32_t to = load_.rank_of(getter, rank % load_.replicas);
    const Computed& from = made[rank][kind_of(back, action.chunk)][action.micro_batch];
    const Computed& needs = made[to][kind_of(back, getter / load_.stages)][action.micro_batch];
    const Link& link = link_of(cluster_, load_.box[rank], load_.box[to]);
    uint64_t bytes = load_.message_bytes;
    TaskIndex made_it = from.ready;
    if (back && is_short(rank, sender, action.micro_batch)) {
      bytes = load_.shorts.bytes;
      // A thread makes one after the other.
      made_it = graph_.add_task({seconds(load_.shorts.make_s, {})}, {made_it, packed_[rank]});
      packed_[rank] = made_it;
    } else if (!back && load_.forward_bytes > 0) {
      bytes = load_.forward_bytes;
    }
    std::vector<Use> uses = uses_of(load_.box[rank], load_.box[to]);
    for (const uint32_t end : {rank, to}) {
      const Box& box = cluster_.boxes[load_.box[end]];
      const double cores = box.machine.network.ranks_cores_bytes_per_s / box.ranks;
      if (cores > 0 && box.machine.gpu.name == "none" && load_.box[rank] != load_.box[to]) {
        uses.push_back({computing_[end], 1 / cores});
      }
    }
    const TaskIndex sent = graph_.add_task({Stage(bytes, uses)}, {made_it, channels_[rank][back]});
    channels_[rank][back] = sent;
    if (trace_ && load_.box[rank] != load_.box[to]) {
      labels_.push_back({sent,
                         fmt::format("{} to {}", cluster_.boxes[load_.box[rank]].name,
                                     cluster_.boxes[load_.box[to]].name),
                         fmt::format("{}{}", back ? "B" : "F", action.micro_batch)});
    }
    const TaskIndex arrived =
        link.latency_s > 0 ? graph_.add_task({Stage(0, {}, link.latency_s)}, {sent}) : sent;
    graph_.add_dependency(needs.task, arrived);
    if (!load_.waits) return;
    graph_.add_dependency(sent, needs.before);
    // The action behind the one that sends.
    for (auto& kind : made[rank]) {
      for (Computed& one : kind) {
        if (one.before == from.ready && &one != &from) graph_.add_dependency(one.task, arrived);
      }
    }
  }

  /// Messages between two boxes share their link, and those of a box its interface.
  std::vector<Use> uses_of(uint32_t from, uint32_t to) {
    const Link link = link_of(cluster_, from, to);
    std::vector<Use> uses;
    if (link.shared() <= 0) return uses;
    uses.push_back({resource({from, to}), 1 / link.shared()});
    if (from == to) return uses;
    double out = 0, in = 0;
    for (uint32_t box = 0; box < cluster_.boxes.size(); ++box) {
      if (box != from) out = std::max(out, cluster_.link(from, box).bytes_per_s);
      if (box != to) in = std::max(in, cluster_.link(box, to).bytes_per_s);
    }
    uses.push_back({resource({from, kAll}), 1 / out});
    uses.push_back({resource({kAll, to}), 1 / in});
    return uses;
  }

  uint32_t resource(std::pair<uint32_t, uint32_t> ends) {
    const auto [at, fresh] = links_.try_emplace(ends, 0);
    if (!fresh) return at->second;
    const auto name = [&](uint32_t box) -> std::string {
      return box == kAll ? "all others" : cluster_.boxes[box].name;
    };
    at->second = graph_.add_resource(
        ends.first == ends.second
            ? fmt::format("the memory of {}, between ranks", name(ends.first))
            : fmt::format("the network from {} to {}", name(ends.first), name(ends.second)));
    return at->second;
  }

  void find_bound(PipelineTimes& times, double from_s, double to_s) const {
    const auto take = [&](double busy_s, std::string what) {
      const double share = busy_s / (to_s - from_s);
      if (share <= times.bound_share + 1e-9) return;
      times.bound_share = share;
      times.bound_by = std::move(what);
    };
    for (uint32_t rank = 0; rank < load_.ranks(); ++rank) {
      const std::string& box = cluster_.boxes[load_.box[rank]].name;
      const StageTimes of = stage_of(load_, rank);
      const double head_s = rank < load_.head_s.size() ? load_.head_s[rank] : 0;
      const double alone_s =
          static_cast<double>(load_.batches(rank)) * (of.forward_s + of.backward_s + head_s);
      times.computing.push_back(alone_s / (to_s - from_s));
      take(alone_s, fmt::format("computing on {}", box));
      take(of.update_s + of.sync_s, fmt::format("the update on {} ({})", box, of.bound_by));
      const double reading_s = graph_.busy_s(updating_.at(rank), from_s, to_s);
      if (load_.chunks > 1) take(reading_s, fmt::format("the devices of {}", box));
      take(of.exchange_s, fmt::format("gradients of {}, on their way", box));
    }
    for (const auto& [ends, resource] : links_) {
      take(graph_.busy_s(resource, from_s, to_s), graph_.resource_name(resource));
    }
  }

  static constexpr uint32_t kAll = ~0u;
  const PipelineLoad& load_;
  const Cluster& cluster_;
  const bool trace_;
  EventGraph graph_;
  std::vector<uint32_t> computing_;
  std::map<uint32_t, uint32_t> updating_;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> links_;
  std::vector<std::array<TaskIndex, 2>> channels_;  // the message before, of each rank and way
  std::vector<std::vector<TaskIndex>> updated_;     // of the step before, by rank and chunk
  std::vector<TaskIndex> synced_;                   // likewise, by rank
  std::vector<TaskIndex> packed_;                   // the short gradient before, by rank
  TaskIndex started_ = kNone;
  std::vector<Label> labels_;
};

}  // namespace

PipelineTimes simulate_pipeline(const PipelineLoad& load, const Cluster& cluster, bool trace) {
  SI_CHECK(load.box.size() == load.ranks() && load.times.size() == load.chunks * load.box.size(),
           "a rank without a stage");
  const uint64_t most = *std::ranges::max_element(load.micro_batches);
  if (most <= kBatchesMax || load.chunks > 1) return PipelineGraph(load, cluster, trace).run();
  const auto with = [&](uint64_t batches, bool traced) {
    PipelineLoad fewer = load;
    for (uint64_t& of : fewer.micro_batches) of = of - most + batches;
    for (uint64_t& last : fewer.shorts.last) {
      if (last >= most) last = batches;
    }
    return PipelineGraph(fewer, cluster, traced).run();
  };
  PipelineTimes times = with(kBatchesMax, trace);
  const double each_s = (times.step_s - with(kBatchesLess, false).step_s) /
                        static_cast<double>(kBatchesMax - kBatchesLess);
  const double all_s = times.step_s + static_cast<double>(most - kBatchesMax) * each_s;
  const double larger = static_cast<double>(most) / static_cast<double>(kBatchesMax);
  for (double& share : times.computing) share *= larger * times.step_s / all_s;
  times.bound_share = std::min(1.0, times.bound_share * larger * times.step_s / all_s);
  times.step_s = all_s;
  return times;
}

std::vector<uint64_t> exposed_gradients(const PipelineLoad& load, const Cluster& cluster) {
  constexpr double kNotWorth = 1.005;
  const uint64_t all = *std::ranges::max_element(load.micro_batches);
  PipelineLoad tried = load;
  std::vector<uint64_t>& last = tried.shorts.last;
  last.assign(load.senders(), all);
  last.front() = 0;
  const double shortest_s = simulate_pipeline(tried, cluster).step_s;
  for (uint32_t stage = 1; stage < load.senders(); ++stage) {
    uint64_t least = 0;
    for (uint64_t most = all; least < most;) {
      last[stage] = least + (most - least) / 2;
      const bool enough = simulate_pipeline(tried, cluster).step_s <= kNotWorth * shortest_s;
      (enough ? most : least) = enough ? last[stage] : last[stage] + 1;
    }
    last[stage] = least;
  }
  return std::move(last);
}

double least_step_s(const PipelineLoad& load, const Cluster& cluster) {
  double least_s = 0;
  for (uint32_t replica = 0; replica < load.replicas; ++replica) {
    const auto batches = static_cast<double>(load.micro_batches[replica]);
    double there_s = 0;  // until the first message is at the stage, and the last one's way back
    for (uint32_t sender = 0; sender < load.senders(); ++sender) {
      const uint32_t rank = load.rank_of(sender, replica);
      const StageTimes& times = load.times[rank];
      const double head_s = load.folds() ? load.head_s[replica] : 0;
      const double each_s = sender == load.stages ? head_s : times.forward_s + times.backward_s;
      const double all_s = batches * (each_s + (sender == 0 ? head_s : 0));
      least_s = std::max(least_s, there_s + all_s + times.exchange_s);
      if (sender + 1 == load.senders()) break;
      const uint32_t next = load.rank_of(sender + 1, replica);
      const auto message_s = [&](uint32_t from, uint32_t to, uint64_t bytes) {
        const Link link = link_of(cluster, load.box[from], load.box[to]);
        const double rate = link.shared();
        return std::pair(rate > 0 ? static_cast<double>(bytes) / rate : 0.0, link.latency_s);
      };
      const uint64_t there = load.forward_bytes > 0 ? load.forward_bytes : load.message_bytes;
      const uint64_t back = load.shorts.last.empty() ? load.message_bytes : load.shorts.bytes;
      for (const auto& [bytes_s, latency_s] :
           {message_s(rank, next, there), message_s(next, rank, back)}) {
        least_s = std::max(least_s, there_s + each_s + batches * bytes_s + latency_s);
        there_s += bytes_s + latency_s;
      }
      there_s += each_s;
    }
  }
  return least_s;
}

}  // namespace smartinf::sim
