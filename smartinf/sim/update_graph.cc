#include "smartinf/sim/update_graph.h"

#include <algorithm>
#include <string>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/plan/state_cache.h"

namespace smartinf::sim {
namespace {

using plan::TaskKind;
using TaskIndex = EventGraph::TaskIndex;

constexpr uint32_t kAnyResource = ~0u;

UpdateGraph::Queue queue_of(TaskKind kind) {
  switch (kind) {
    case TaskKind::kReadGradient:
    case TaskKind::kReadState:
      return UpdateGraph::kReads;
    case TaskKind::kUpdate:
      return UpdateGraph::kProcessor;
    case TaskKind::kWriteWeights:
      return UpdateGraph::kWeights;
    case TaskKind::kWriteMaster:
    case TaskKind::kWriteMoments:
      return UpdateGraph::kWrites;
  }
  return UpdateGraph::kReads;
}

}  // namespace

UpdateGraph::UpdateGraph(EventGraph& graph, LinkLaw law, std::vector<UpdateDevice> devices,
                         OnTask on_task)
    : graph_(graph),
      law_(law),
      devices_(std::move(devices)),
      on_task_(std::move(on_task)),
      cached_(devices_.size(), 0) {
  for (const UpdateDevice& device : devices_) {
    begun_.emplace_back(device.subgroups.size(), EventGraph::kNone);
    weights_up_.emplace_back(device.subgroups.size(), EventGraph::kNone);
  }
}

void UpdateGraph::cache_state(uint64_t budget_bytes, bool writes_too) {
  std::vector<plan::CachedDevice> shares;
  for (const UpdateDevice& device : devices_) {
    plan::CachedDevice share{device.subgroups.size(), 0, device.bandwidth};
    for (const SubgroupLoad& load : device.subgroups) {
      share.subgroup_bytes = std::max(share.subgroup_bytes, load.master + load.moments);
    }
    shares.push_back(share);
  }
  cached_ = plan::share_state_cache(shares, budget_bytes, writes_too);
  cached_writes_wait_ = writes_too;
}

bool UpdateGraph::cached(uint32_t device, uint32_t subgroup) const {
  return plan::stays_in_memory(subgroup, cached_[device], devices_[device].subgroups.size());
}

TaskIndex UpdateGraph::pass(uint32_t device, Queue queue, std::string_view name,
                            std::span<const Stage> stages, std::span<const TaskIndex> after) {
  if (law_ == LinkLaw::kBooked) return booked(device, queue, name, stages, after);
  const TaskIndex task = graph_.add_task({stages.begin(), stages.end()}, {});
  if (on_task_) on_task_(task, device, queue, name);
  for (const TaskIndex before : after) graph_.add_dependency(task, before);
  const auto [last, first] = last_.try_emplace({device, queue, kAnyResource}, task);
  if (!first) graph_.add_dependency(task, std::exchange(last->second, task));
  return task;
}

/// Links in a row do not wait for each other, and what has no limit takes no time.
TaskIndex UpdateGraph::booked(uint32_t device, Queue queue, std::string_view name,
                              std::span<const Stage> stages, std::span<const TaskIndex> after) {
  std::vector<TaskIndex> parts;
  for (const Stage& stage : stages) {
    for (uint32_t u = 0; u < stage.use_count; ++u) {
      const Use& use = stage.uses[u];
      if (use.seconds_per_byte <= 0 || stage.bytes == 0) continue;
      const TaskIndex part = graph_.add_task({Stage(stage.bytes, {use})}, {});
      if (on_task_) on_task_(part, device, queue, name);
      for (const TaskIndex before : after) graph_.add_dependency(part, before);
      const auto [last, first] = last_.try_emplace({device, queue, use.resource}, part);
      if (!first) graph_.add_dependency(part, std::exchange(last->second, part));
      parts.push_back(part);
    }
  }
  if (parts.size() == 1) return parts.front();
  const TaskIndex done = graph_.add_task({}, {});
  if (!parts.empty()) after = parts;
  for (const TaskIndex before : after) graph_.add_dependency(done, before);
  return done;
}

TaskIndex UpdateGraph::send_selected(std::span<const uint32_t> threads, double seconds_per_element,
                                     TaskIndex given) {
  const size_t ahead = 2 * threads.size();
  std::vector<TaskIndex> sent;
  for (uint32_t d = 0; d < devices_.size(); ++d) {
    const UpdateDevice& device = devices_[d];
    for (const SubgroupLoad& load : device.subgroups) {
      const uint64_t bytes = load.gradient + load.residual;
      const auto thread = static_cast<uint32_t>(sent.size() % threads.size());
      const TaskIndex room = sent.size() < ahead ? given : sent[sent.size() - ahead];
      const Stage select(load.elements, {{threads[thread], seconds_per_element}});
      const TaskIndex selected = pass(thread, kSelection, "select", {&select, 1}, {{given, room}});
      const Stage down(bytes, device.down, device.down_latency_s);
      sent.push_back(pass(d, kGradients, "gradient", {&down, 1}, {{selected}}));
      bytes_.host_link_down += bytes;
    }
  }
  const TaskIndex all = graph_.add_task({}, {given});
  for (const TaskIndex one : sent) graph_.add_dependency(all, one);
  return all;
}

std::vector<TaskIndex> UpdateGraph::add(const UpdateRun& run) {
  std::vector<TaskIndex> ends, rounds;
  for (uint32_t d = 0; d < devices_.size(); ++d) {
    ends.push_back(graph_.add_task({}, {run.start[d]}));
    if (run.order[d].empty()) continue;
    plan::ScheduleInput input;
    input.variant = run.schedule;
    input.order = run.order[d];
    input.subgroups = static_cast<uint32_t>(run.order[d].size());
    input.slots = std::min(run.slots, input.subgroups);
    input.gradient_spilled = run.gradient_spilled;
    input.has_moments = devices_[d].subgroups.front().moments > 0;
    for (const uint32_t subgroup : run.order[d]) begun_[d][subgroup] = EventGraph::kNone;
    std::vector<TaskIndex> made;
    std::vector<size_t> round_of(devices_[d].subgroups.size());
    for (size_t i = 0; i < run.order[d].size(); ++i) round_of[run.order[d][i]] = i;
    for (const plan::Task& task : plan::make_schedule(input)) {
      const bool ahead = !run.prefetch.empty() && task.kind == TaskKind::kReadState &&
                         task.after.front() == plan::Task::kNone;
      std::vector<TaskIndex> after{ahead ? run.prefetch[d] : run.start[d]};
      for (const uint32_t before : task.after) {
        if (before != plan::Task::kNone) after.push_back(made[before]);
      }
      if (!run.completed.empty()) {
        TaskIndex& begun = begun_[d][task.subgroup];
        if (begun == EventGraph::kNone) {
          begun = graph_.add_task({}, {run.completed[d][task.subgroup]});
          for (const TaskIndex before : after) graph_.add_dependency(begun, before);
        }
        after.push_back(begun);
      }
      const size_t round = round_of[task.subgroup];
      if (run.rounds && round > 0 && queue_of(task.kind) == kReads) {
        after.push_back(round_end(round - 1, rounds));
      }
      made.push_back(add_task(task, d, after));
      if (run.rounds && task.kind == TaskKind::kWriteWeights) {
        graph_.add_dependency(round_end(round, rounds), made.back());
      }
      graph_.add_dependency(ends.back(), made.back());
    }
  }
  return ends;
}

/// A task that ends with a round; ends: of the rounds that have one.
TaskIndex UpdateGraph::round_end(size_t round, std::vector<TaskIndex>& ends) {
  while (ends.size() <= round) ends.push_back(graph_.add_task({}, {}));
  return ends[round];
}

TaskIndex UpdateGraph::add_task(const plan::Task& task, uint32_t device,
                                std::span<const TaskIndex> after) {
  const bool in_memory = cached(device, task.subgroup);
  const std::vector<Stage> stages =
      stages_of(task.kind, devices_[device], devices_[device].subgroups[task.subgroup], in_memory);
  const TaskIndex made =
      pass(device, queue_of(task.kind), plan::task_kind_name(task.kind), stages, after);
  if (task.kind == TaskKind::kWriteWeights) weights_up_[device][task.subgroup] = made;
  return made;
}

std::vector<Stage> UpdateGraph::stages_of(TaskKind kind, const UpdateDevice& device,
                                          const SubgroupLoad& load, bool cached) {
  switch (kind) {
    case TaskKind::kReadGradient:
      return {read_stage(device, load.spilled)};
    case TaskKind::kReadState: {
      const uint64_t state = load.master + load.moments;
      if (cached && device.streams) return {Stage(load.work, device.work)};
      if (cached) return {};
      if (!device.streams) return {read_stage(device, state)};
      Stage along = read_stage(device, state);
      for (const Use& use : device.work) {
        along.add({use.resource, static_cast<double>(load.work) / static_cast<double>(state) *
                                     use.seconds_per_byte});
      }
      return {along};
    }
    case TaskKind::kUpdate:
      if (device.streams) return {};
      return {Stage(load.work, device.work)};
    case TaskKind::kWriteWeights: {
      std::vector<Stage> stages;
      for (const WeightsPass& part : device.weights) {
        stages.emplace_back(part.per_element ? load.elements : load.weights, part.uses,
                            part.latency_s);
      }
      if (!stages.empty()) bytes_.host_link_up += load.weights;
      return stages;
    }
    case TaskKind::kWriteMaster:
      if (cached && cached_writes_wait_) return {};
      return {write_stage(device, load.master)};
    case TaskKind::kWriteMoments:
      if (cached && cached_writes_wait_) return {};
      return {write_stage(device, load.moments + load.residual)};
  }
  return {};
}

Stage UpdateGraph::read_stage(const UpdateDevice& device, uint64_t bytes) {
  bytes_.drive_read += bytes;
  if (device.host_update) bytes_.host_link_up += bytes;
  return {bytes, device.read};
}

Stage UpdateGraph::write_stage(const UpdateDevice& device, uint64_t bytes) {
  bytes_.drive_written += bytes;
  if (device.host_update) bytes_.host_link_down += bytes;
  return {bytes, device.write};
}

}  // namespace smartinf::sim
