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
constexpr double kEver = std::numeric_limits<double>::infinity();

}  // namespace

Stage::Stage(uint64_t stage_bytes, std::span<const Use> stage_uses, double stage_latency_s)
    : bytes(stage_bytes), latency_s(stage_latency_s) {
  for (const Use& use : stage_uses) add(use);
}

void Stage::add(const Use& use) {
  const std::span<Use> there(uses.data(), use_count);
  if (const auto same = std::ranges::find(there, use.resource, &Use::resource);
      same != there.end()) {
    same->seconds_per_byte += use.seconds_per_byte;
    return;
  }
  SI_CHECK(use_count < kUsesMax, "a stage uses at most five resources");
  uses[use_count++] = use;
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

/// Stages that may pass now, and what they want of the resources.
EventGraph::Wants EventGraph::wants_of(const std::vector<Active>& active) const {
  const size_t count = resources_.size();
  Wants wants;
  wants.cost.assign(count, 0.0);
  wants.free.assign(count, 1.0);
  wants.directions.assign(count, 0);
  std::vector<uint8_t> taken(count, 0);           // in order, and not this one's turn
  for (uint32_t i = 0; i < active.size(); ++i) {  // in the order in which they came
    if (active[i].latency_left_s > 0) continue;
    const Stage& stage = stages_[active[i].stage];
    bool turn = true;
    for (uint32_t u = 0; u < stage.use_count; ++u) turn = turn && !taken[stage.uses[u].resource];
    for (uint32_t u = 0; u < stage.use_count; ++u) {
      taken[stage.uses[u].resource] |= resources_[stage.uses[u].resource].in_order;
    }
    if (!turn) continue;
    wants.rising.push_back(i);
    for (uint32_t u = 0; u < stage.use_count; ++u) {
      const Use& use = stage.uses[u];
      wants.cost[use.resource] += use.seconds_per_byte;
      wants.directions[use.resource] |= static_cast<uint8_t>(use.direction);
    }
  }
  for (size_t r = 0; r < count; ++r) {
    if (wants.directions[r] == 3) wants.free[r] = resources_[r].mixed_efficiency;
  }
  return wants;
}

void EventGraph::share_out(std::vector<Active>& active, double now_s) {
  // Progressive filling: all rates rise together until a resource is full; what uses it stays
  // there, the others go on. Few are active at a time (slots x devices), so plain loops are
  // fastest.
  const size_t count = resources_.size();
  for (Active& entry : active) entry.rate = 0;
  Wants wants = wants_of(active);
  const std::vector<double> capacity = wants.free;
  double level = 0;
  while (!wants.rising.empty()) {
    double rise = kEver;
    for (size_t r = 0; r < count; ++r) {
      if (wants.cost[r] > 0) rise = std::min(rise, wants.free[r] / wants.cost[r]);
    }
    if (rise == kEver) {
      // Nothing holds these back: no uses, or links without limit.
      for (const uint32_t i : wants.rising) active[i].rate = rise;
      break;
    }
    level += rise;
    for (size_t r = 0; r < count; ++r) wants.free[r] -= rise * wants.cost[r];
    std::vector<uint32_t> still_rising;
    for (const uint32_t i : wants.rising) {
      const Stage& stage = stages_[active[i].stage];
      bool full = false;
      for (uint32_t u = 0; u < stage.use_count; ++u) {
        const Use& use = stage.uses[u];
        if (use.seconds_per_byte > 0 && wants.free[use.resource] <= 1e-12) full = true;
      }
      if (full) {
        active[i].rate = level;
      } else {
        still_rising.push_back(i);
      }
    }
    // Added up anew: subtraction would leave dust where every user of a resource has stopped.
    std::fill(wants.cost.begin(), wants.cost.end(), 0.0);
    for (const uint32_t i : still_rising) {
      const Stage& stage = stages_[active[i].stage];
      for (uint32_t u = 0; u < stage.use_count; ++u) {
        wants.cost[stage.uses[u].resource] += stage.uses[u].seconds_per_byte;
      }
    }
    wants.rising = std::move(still_rising);
  }
  for (size_t r = 0; r < count; ++r) {
    double used = capacity[r] - wants.free[r];
    if (wants.directions[r] == 3) used /= resources_[r].mixed_efficiency;
    auto& levels = resources_[r].levels;
    if (levels.empty() ? used > 0 : levels.back().second != used) levels.emplace_back(now_s, used);
  }
}

EventGraph::Progress EventGraph::begin() {
  Progress progress;
  progress.first_edge.assign(tasks_.size() + 1, 0);
  for (const auto& [before, after] : edges_) ++progress.first_edge[before + 1];
  for (size_t i = 1; i < progress.first_edge.size(); ++i) {
    progress.first_edge[i] += progress.first_edge[i - 1];
  }
  progress.successors.resize(edges_.size());
  std::vector<uint32_t> next(progress.first_edge.begin(), progress.first_edge.end() - 1);
  for (const auto& [before, after] : edges_) progress.successors[next[before]++] = after;
  times_.assign(tasks_.size(), {});
  progress.waiting.resize(tasks_.size());
  for (TaskIndex i = 0; i < tasks_.size(); ++i) {
    progress.waiting[i] = tasks_[i].waiting_for;
    if (progress.waiting[i] == 0) progress.ready.push_back(i);
  }
  return progress;
}

/// Bytes that the resource which binds a stage lets through at once after an idle time. What is
/// left of a resource's idle time may still be used by the next stage: a token bucket.
double EventGraph::caught_up(const Stage& stage, double now_s) {
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
}

void EventGraph::enter_stage(Active& entry, uint32_t stage, double now_s) {
  entry.stage = stage;
  entry.latency_left_s = stages_[stage].latency_s;
  entry.bytes_left = static_cast<double>(stages_[stage].bytes) - caught_up(stages_[stage], now_s);
}

void EventGraph::finish(Progress& progress, TaskIndex task) {
  times_[task].end_s = progress.now_s;
  ++progress.finished;
  for (uint32_t e = progress.first_edge[task]; e < progress.first_edge[task + 1]; ++e) {
    const TaskIndex successor = progress.successors[e];
    if (--progress.waiting[successor] == 0) progress.ready.push_back(successor);
  }
}

void EventGraph::start_ready(Progress& progress) {
  for (size_t i = 0; i < progress.ready.size(); ++i) {  // finish() may append
    const TaskIndex task = progress.ready[i];
    times_[task].start_s = progress.now_s;
    if (tasks_[task].stage_count == 0) {
      finish(progress, task);
      continue;
    }
    Active entry;
    entry.task = task;
    enter_stage(entry, tasks_[task].first_stage, progress.now_s);
    progress.active.push_back(entry);
  }
  progress.ready.clear();
}

/// To the next moment at which something ends.
void EventGraph::pass_time(Progress& progress) {
  std::vector<Active>& active = progress.active;
  const auto left_s = [](const Active& entry) {
    if (entry.latency_left_s > 0) return entry.latency_left_s;
    return entry.bytes_left > 0 ? entry.bytes_left / entry.rate : 0.0;
  };
  double passed_s = kEver;
  for (const Active& entry : active) passed_s = std::min(passed_s, left_s(entry));
  progress.now_s += passed_s;
  for (const Active& entry : active) {
    const Stage& stage = stages_[entry.stage];
    if (entry.latency_left_s > 0 || entry.bytes_left <= 0) continue;
    for (uint32_t u = 0; u < stage.use_count; ++u) {
      resources_[stage.uses[u].resource].used_until_s = progress.now_s;
    }
  }
  const double same_s = passed_s + kSameMoment * std::max(passed_s, 1e-6);
  size_t kept = 0;
  for (size_t i = 0; i < active.size(); ++i) {
    Active entry = active[i];
    const bool stage_over = left_s(entry) <= same_s;
    const Node& node = tasks_[entry.task];
    if (entry.latency_left_s > 0) {
      entry.latency_left_s = stage_over ? 0 : entry.latency_left_s - passed_s;
    } else if (!stage_over) {
      entry.bytes_left -= entry.rate * passed_s;
    } else if (entry.stage + 1 < node.first_stage + node.stage_count) {
      enter_stage(entry, entry.stage + 1, progress.now_s);
    } else {
      finish(progress, entry.task);
      continue;
    }
    active[kept++] = entry;
  }
  active.resize(kept);
}

void EventGraph::run() {
  Progress progress = begin();
  while (progress.finished < tasks_.size()) {
    start_ready(progress);
    if (progress.finished == tasks_.size()) break;
    SI_CHECK(!progress.active.empty(), "the tasks of a step wait for each other in a circle");
    share_out(progress.active, progress.now_s);
    pass_time(progress);
  }
  end_s_ = progress.now_s;
  for (Resource& resource : resources_) resource.levels.emplace_back(end_s_, 0.0);
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
