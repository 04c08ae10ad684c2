#include "smartinf/sim/event_graph.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "smartinf/base/check.h"

namespace smartinf::sim {
namespace {

// Completions closer together than this share of the time that passed are one moment: devices that
// run in step must not drift apart by a rounding error and so take different paths.
constexpr double kSameMoment = 1e-9;

}  // namespace

Stage::Stage(uint64_t stage_bytes, std::initializer_list<Use> stage_uses, double stage_latency_s)
    : bytes(stage_bytes), latency_s(stage_latency_s) {
  SI_CHECK(stage_uses.size() <= kUsesMax, "a stage uses at most four resources");
  for (const Use& use : stage_uses) uses[use_count++] = use;
}

uint32_t EventGraph::add_resource(std::string name, double mixed_efficiency, double catch_up_s) {
  SI_CHECK(mixed_efficiency > 0 && mixed_efficiency <= 1, "an efficiency is in (0, 1]");
  Resource resource;
  resource.name = std::move(name);
  resource.mixed_efficiency = mixed_efficiency;
  resource.catch_up_s = catch_up_s;
  resources_.push_back(std::move(resource));
  return static_cast<uint32_t>(resources_.size() - 1);
}

EventGraph::TaskIndex EventGraph::add_task(std::vector<Stage> stages,
                                           std::initializer_list<TaskIndex> after) {
  const auto task = static_cast<TaskIndex>(tasks_.size());
  Node node;
  node.first_stage = static_cast<uint32_t>(stages_.size());
  node.stage_count = static_cast<uint32_t>(stages.size());
  stages_.insert(stages_.end(), stages.begin(), stages.end());
  tasks_.push_back(node);
  for (const TaskIndex before : after) add_dependency(task, before);
  return task;
}

void EventGraph::add_dependency(TaskIndex task, TaskIndex after) {
  if (after == kNone) return;
  SI_CHECK(after < tasks_.size() && task < tasks_.size(),
           "a dependency on a task that is not there");
  edges_.emplace_back(after, task);
  ++tasks_[task].waiting_for;
}

void EventGraph::share_out(std::vector<Active>& active, double now_s) {
  // Progressive filling: all rates rise together until a resource is full; what uses it stays
  // there, the others go on. Few are active at a time (slots x devices), so plain loops are
  // fastest.
  const size_t count = resources_.size();
  std::vector<double> free(count, 1.0);
  std::vector<double> cost(count, 0.0);
  std::vector<uint8_t> directions(count, 0);
  std::vector<uint32_t> rising;
  std::vector<uint8_t> taken(count, 0);           // in order, and not this one's turn
  for (uint32_t i = 0; i < active.size(); ++i) {  // in the order in which they came
    active[i].rate = 0;
    if (active[i].latency_left_s > 0) continue;
    const Stage& stage = stages_[active[i].stage];
    bool turn = true;
    for (uint32_t u = 0; u < stage.use_count; ++u) turn = turn && !taken[stage.uses[u].resource];
    for (uint32_t u = 0; u < stage.use_count; ++u) {
      taken[stage.uses[u].resource] |= resources_[stage.uses[u].resource].in_order;
    }
    if (!turn) continue;
    rising.push_back(i);
    for (uint32_t u = 0; u < stage.use_count; ++u) {
      const Use& use = stage.uses[u];
      cost[use.resource] += use.seconds_per_byte;
      directions[use.resource] |= static_cast<uint8_t>(use.direction);
    }
  }
  for (size_t r = 0; r < count; ++r) {
    if (directions[r] == 3) free[r] = resources_[r].mixed_efficiency;
  }
  std::vector<double> capacity = free;
  double level = 0;
  while (!rising.empty()) {
    double rise = std::numeric_limits<double>::infinity();
    for (size_t r = 0; r < count; ++r) {
      if (cost[r] > 0) rise = std::min(rise, free[r] / cost[r]);
    }
    if (rise == std::numeric_limits<double>::infinity()) {
      // Nothing holds these back: no uses, or links without limit.
      for (const uint32_t i : rising) active[i].rate = rise;
      break;
    }
    level += rise;
    for (size_t r = 0; r < count; ++r) free[r] -= rise * cost[r];
    std::vector<uint32_t> still_rising;
    for (const uint32_t i : rising) {
      const Stage& stage = stages_[active[i].stage];
      bool full = false;
      for (uint32_t u = 0; u < stage.use_count; ++u) {
        const Use& use = stage.uses[u];
        if (use.seconds_per_byte > 0 && free[use.resource] <= 1e-12) full = true;
      }
      if (!full) {
        still_rising.push_back(i);
        continue;
      }
      active[i].rate = level;
    }
    for (const uint32_t i : rising) {
      if (active[i].rate == 0) continue;
      const Stage& stage = stages_[active[i].stage];
      for (uint32_t u = 0; u < stage.use_count; ++u) {
        cost[stage.uses[u].resource] -= stage.uses[u].seconds_per_byte;
      }
    }
    // Subtraction leaves dust where every user of a resource has stopped.
    std::fill(cost.begin(), cost.end(), 0.0);
    for (const uint32_t i : still_rising) {
      const Stage& stage = stages_[active[i].stage];
      for (uint32_t u = 0; u < stage.use_count; ++u) {
        cost[stage.uses[u].resource] += stage.uses[u].seconds_per_byte;
      }
    }
    rising = std::move(still_rising);
  }
  for (size_t r = 0; r < count; ++r) {
    const double used = directions[r] == 3
                            ? (capacity[r] - free[r]) / resources_[r].mixed_efficiency
                            : capacity[r] - free[r];
    auto& levels = resources_[r].levels;
    if (levels.empty() ? used > 0 : levels.back().second != used) levels.emplace_back(now_s, used);
  }
}

void EventGraph::run() {
  std::vector<uint32_t> first_edge(tasks_.size() + 1, 0);
  for (const auto& [before, after] : edges_) ++first_edge[before + 1];
  for (size_t i = 1; i < first_edge.size(); ++i) first_edge[i] += first_edge[i - 1];
  std::vector<TaskIndex> successors(edges_.size());
  {
    std::vector<uint32_t> next(first_edge.begin(), first_edge.end() - 1);
    for (const auto& [before, after] : edges_) successors[next[before]++] = after;
  }
  times_.assign(tasks_.size(), {});
  std::vector<uint32_t> waiting(tasks_.size());
  std::vector<TaskIndex> ready;
  for (TaskIndex i = 0; i < tasks_.size(); ++i) {
    waiting[i] = tasks_[i].waiting_for;
    if (waiting[i] == 0) ready.push_back(i);
  }
  std::vector<Active> active;
  size_t finished = 0;
  double now_s = 0;

  // Bytes that the resource which binds a stage lets through at once after an idle time. What is
  // left of a resource's idle time may still be used by the next stage: a token bucket.
  const auto caught_up = [&](const Stage& stage) {
    const Use* binds = nullptr;
    for (uint32_t u = 0; u < stage.use_count; ++u) {
      const Use& use = stage.uses[u];
      if (binds == nullptr || use.seconds_per_byte > binds->seconds_per_byte) binds = &use;
    }
    if (binds == nullptr || binds->seconds_per_byte <= 0) return 0.0;
    const auto credit_s = [&](const Resource& resource) {
      return std::min(resource.catch_up_s, now_s - resource.used_until_s);
    };
    const double bytes = std::min(static_cast<double>(stage.bytes),
                                  credit_s(resources_[binds->resource]) / binds->seconds_per_byte);
    for (uint32_t u = 0; u < stage.use_count; ++u) {
      const Use& use = stage.uses[u];
      Resource& resource = resources_[use.resource];
      resource.used_until_s =
          std::min(now_s, now_s - credit_s(resource) + bytes * use.seconds_per_byte);
    }
    return bytes;
  };
  const auto enter_stage = [&](Active& entry, uint32_t stage) {
    entry.stage = stage;
    entry.latency_left_s = stages_[stage].latency_s;
    entry.bytes_left = static_cast<double>(stages_[stage].bytes) - caught_up(stages_[stage]);
  };
  const auto finish = [&](TaskIndex task) {
    times_[task].end_s = now_s;
    ++finished;
    for (uint32_t e = first_edge[task]; e < first_edge[task + 1]; ++e) {
      if (--waiting[successors[e]] == 0) ready.push_back(successors[e]);
    }
  };

  while (finished < tasks_.size()) {
    for (size_t i = 0; i < ready.size(); ++i) {  // finish() may append
      const TaskIndex task = ready[i];
      times_[task].start_s = now_s;
      if (tasks_[task].stage_count == 0) {
        finish(task);
        continue;
      }
      Active entry;
      entry.task = task;
      enter_stage(entry, tasks_[task].first_stage);
      active.push_back(entry);
    }
    ready.clear();
    if (finished == tasks_.size()) break;
    SI_CHECK(!active.empty(), "the tasks of a step wait for each other in a circle");
    share_out(active, now_s);

    double passed_s = std::numeric_limits<double>::infinity();
    const auto left_s = [](const Active& entry) {
      if (entry.latency_left_s > 0) return entry.latency_left_s;
      return entry.bytes_left > 0 ? entry.bytes_left / entry.rate : 0.0;
    };
    for (const Active& entry : active) passed_s = std::min(passed_s, left_s(entry));
    now_s += passed_s;
    for (const Active& entry : active) {
      const Stage& stage = stages_[entry.stage];
      if (entry.latency_left_s > 0 || entry.bytes_left <= 0) continue;
      for (uint32_t u = 0; u < stage.use_count; ++u) {
        resources_[stage.uses[u].resource].used_until_s = now_s;
      }
    }
    const double same_s = passed_s + kSameMoment * std::max(passed_s, 1e-6);
    size_t kept = 0;
    for (size_t i = 0; i < active.size(); ++i) {
      Active entry = active[i];
      const bool stage_over = left_s(entry) <= same_s;
      if (entry.latency_left_s > 0) {
        entry.latency_left_s = stage_over ? 0 : entry.latency_left_s - passed_s;
        active[kept++] = entry;
        continue;
      }
      if (!stage_over) {
        entry.bytes_left -= entry.rate * passed_s;
        active[kept++] = entry;
        continue;
      }
      const Node& node = tasks_[entry.task];
      if (entry.stage + 1 < node.first_stage + node.stage_count) {
        enter_stage(entry, entry.stage + 1);
        active[kept++] = entry;
        continue;
      }
      finish(entry.task);
    }
    active.resize(kept);
  }
  end_s_ = now_s;
  for (Resource& resource : resources_) resource.levels.emplace_back(now_s, 0.0);
}

double EventGraph::busy_s(uint32_t resource, double from_s, double to_s) const {
  const auto& levels = resources_[resource].levels;
  double busy = 0;
  for (size_t i = 0; i + 1 < levels.size(); ++i) {
    const double begin = std::max(levels[i].first, from_s);
    const double end = std::min(levels[i + 1].first, to_s);
    if (end > begin) busy += levels[i].second * (end - begin);
  }
  return busy;
}

}  // namespace smartinf::sim
