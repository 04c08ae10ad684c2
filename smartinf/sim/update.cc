#include "smartinf/sim/update.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "smartinf/plan/state_cache.h"
#include "smartinf/sim/event_graph.h"

namespace smartinf::sim {
namespace {

using TaskIndex = EventGraph::TaskIndex;

constexpr uint64_t kSubgroupsMax = 1'000'000;

class UpdateGraph {
 public:
  explicit UpdateGraph(const UpdateShape& shape) : shape_(shape) {
    host_up_ = add_link("host link up");
    host_down_ = shape.host_shared_budget ? host_up_ : add_link("host link down");
    processors_ = graph_.add_resource("processors");
    host_thread_ = graph_.add_resource("host thread");
    for (uint32_t d = 0; d < shape.devices; ++d) {
      const uint32_t read = add_link("drive " + std::to_string(d));
      drives_.push_back({read, shape.shared_budget ? read : add_link("writes")});
    }
  }

  UpdateTimes run() {
    std::vector<std::vector<uint64_t>> subgroups(shape_.devices);  // elements of each
    uint64_t left = shape_.parameters;
    for (uint32_t d = 0; left > 0; d = (d + 1) % shape_.devices) {
      subgroups[d].push_back(std::min(left, shape_.subgroup_elements));
      left -= subgroups[d].back();
    }
    const bool compressed = shape_.select_params_per_s > 0;
    std::vector<TaskIndex> spilled(shape_.devices, EventGraph::kNone);
    const TaskIndex given = compressed ? take_in() : put_gradients(subgroups, spilled);
    const TaskIndex all_down = compressed ? send_selected(subgroups, given) : given;
    std::vector<TaskIndex> weights;
    std::vector<plan::CachedDevice> state;
    for (const std::vector<uint64_t>& of_device : subgroups) {
      state.push_back(
          {of_device.size(), bytes(shape_.master + shape_.moments, shape_.subgroup_elements), 1});
    }
    cached_ = plan::share_state_cache(state, shape_.state_cache_bytes, shape_.cached_writes_wait);
    for (uint32_t d = 0; d < shape_.devices; ++d) {
      const TaskIndex start = graph_.add_task({}, {all_down, spilled[d]});
      update_device(d, subgroups[d], start, weights);
    }
    graph_.run();

    UpdateTimes times;
    times.gradient_s = graph_.times(given).end_s;
    times.update_s = graph_.end_s() - times.gradient_s;
    for (const TaskIndex task : weights) {
      times.weights_s = std::max(times.weights_s, graph_.times(task).end_s - times.gradient_s);
    }
    return times;
  }

 private:
  struct Drive {
    uint32_t read = 0;
    uint32_t write = 0;
  };

  uint32_t add_link(std::string name) {
    const uint32_t link = graph_.add_resource(std::move(name), 1, shape_.link_catch_up_s);
    if (shape_.links_in_order) graph_.set_in_order(link);
    return link;
  }
  static uint64_t bytes(double per_parameter, uint64_t count) {
    return static_cast<uint64_t>(std::llround(per_parameter * static_cast<double>(count)));
  }

  /// Bytes, or parameters, through one resource.
  struct Passing {
    uint32_t resource = 0;
    double per_s = 0;  // 0: no limit
    uint64_t moved = 0;
  };
  // What is given to a resource by one queue passes in that order.
  enum Queue : uint32_t { kReads, kProcessor, kUp, kWrites, kGradients, kQueues };

  /// Through all of them, done when the last has let it pass. Links in a row do not wait for each
  /// other: each books its own time, as csd::Link does. What has no limit takes no time.
  TaskIndex pass(uint32_t device, Queue queue, std::initializer_list<Passing> all,
                 std::span<const TaskIndex> after) {
    std::vector<TaskIndex> parts;
    for (const Passing& one : all) {
      if (one.per_s <= 0 || one.moved == 0) continue;
      const TaskIndex part =
          graph_.add_task({Stage(one.moved, {{one.resource, 1 / one.per_s}})}, {});
      for (const TaskIndex before : after) graph_.add_dependency(part, before);
      const auto [last, first] = last_.try_emplace({device, queue, one.resource}, part);
      if (!first) {
        graph_.add_dependency(part, last->second);
        last->second = part;
      }
      parts.push_back(part);
    }
    if (parts.size() == 1) return parts.front();
    const TaskIndex done = graph_.add_task({}, {});
    for (const TaskIndex before : parts.empty() ? after : parts)
      graph_.add_dependency(done, before);
    return done;
  }

  Passing up(uint64_t moved) const { return {host_up_, shape_.host_up_bytes_per_s, moved}; }
  Passing down(uint64_t moved) const { return {host_down_, shape_.host_down_bytes_per_s, moved}; }

  TaskIndex take_in() {
    return pass(0, kGradients, {{host_thread_, shape_.intake_params_per_s, shape_.parameters}}, {});
  }
  /// A message is on the host link while the next one is made.
  TaskIndex send_selected(const std::vector<std::vector<uint64_t>>& subgroups, TaskIndex given) {
    std::vector<uint32_t> threads;
    for (uint32_t t = 0; t < std::max(1u, shape_.select_threads); ++t) {
      threads.push_back(graph_.add_resource("selecting"));
    }
    std::vector<TaskIndex> sent;
    for (const std::vector<uint64_t>& of_device : subgroups) {
      for (const uint64_t count : of_device) {
        const size_t ahead = 2 * threads.size();
        const TaskIndex room = sent.size() < ahead ? given : sent[sent.size() - ahead];
        const Passing select{threads[sent.size() % threads.size()], shape_.select_params_per_s,
                             count};
        const TaskIndex selected = pass(0, kGradients, {select}, {{given, room}});
        sent.push_back(pass(0, kGradients, {down(bytes(shape_.gradient, count))}, {{selected}}));
      }
    }
    const TaskIndex all = graph_.add_task({}, {});
    for (const TaskIndex one : sent) graph_.add_dependency(all, one);
    return all;
  }

  /// In the order of the parameter space, which goes from device to device. A gradient that will
  /// be spilled waits for a slot's buffer. spilled: by device, its last write.
  TaskIndex put_gradients(const std::vector<std::vector<uint64_t>>& subgroups,
                          std::vector<TaskIndex>& spilled) {
    const TaskIndex all_down = graph_.add_task({}, {});
    std::vector<std::vector<TaskIndex>> writes(shape_.devices);
    for (size_t i = 0; i < subgroups.front().size(); ++i) {
      for (uint32_t d = 0; d < shape_.devices; ++d) {
        if (i >= subgroups[d].size()) continue;
        const uint64_t count = subgroups[d][i];
        const TaskIndex buffer = i >= shape_.slots && shape_.gradient_spilled
                                     ? writes[d][i - shape_.slots]
                                     : EventGraph::kNone;
        const Passing host{host_thread_, shape_.intake_params_per_s, count};
        const TaskIndex taken = pass(0, kGradients, {host}, {{buffer}});
        // The host update's gradients are in host memory already: only a spill moves them.
        const TaskIndex put =
            shape_.host_update
                ? taken
                : pass(0, kGradients, {down(bytes(shape_.gradient, count))}, {{taken}});
        graph_.add_dependency(all_down, put);
        if (!shape_.gradient_spilled) continue;
        spilled[d] = out(d, shape_.gradient, count, {{put}});
        writes[d].push_back(spilled[d]);
      }
    }
    return all_down;
  }

  TaskIndex in(uint32_t device, double per_parameter, uint64_t count,
               std::span<const TaskIndex> after) {
    const uint64_t moved = bytes(per_parameter, count);
    const Passing drive{drives_[device].read, shape_.drive_read_bytes_per_s, moved};
    const Passing copy{processors_, shape_.copy_bytes_per_s, moved};
    if (!shape_.host_update) return pass(device, kReads, {drive, copy}, after);
    return pass(device, kReads, {drive, copy, up(moved)}, after);
  }
  TaskIndex out(uint32_t device, double per_parameter, uint64_t count,
                std::span<const TaskIndex> after) {
    const uint64_t moved = bytes(per_parameter, count);
    const Passing drive{drives_[device].write, shape_.drive_write_bytes_per_s, moved};
    const Passing copy{processors_, shape_.copy_bytes_per_s, moved};
    if (!shape_.host_update) return pass(device, kWrites, {drive, copy}, after);
    return pass(device, kWrites, {drive, copy, down(moved)}, after);
  }

  TaskIndex run_task(plan::TaskKind kind, uint32_t device, uint64_t count, bool cached,
                     std::span<const TaskIndex> after) {
    using plan::TaskKind;
    const bool written = kind == TaskKind::kWriteMaster || kind == TaskKind::kWriteMoments;
    if (cached && (kind == TaskKind::kReadState || (written && shape_.cached_writes_wait))) {
      return pass(device, written ? kWrites : kReads, {}, after);
    }
    switch (kind) {
      case plan::TaskKind::kReadGradient:
        return in(device, shape_.gradient, count, after);
      case plan::TaskKind::kReadState:
        return in(device, shape_.master + shape_.moments, count, after);
      case plan::TaskKind::kUpdate:
        return pass(device, kProcessor, {{processors_, shape_.update_params_per_s, count}}, after);
      case plan::TaskKind::kWriteWeights:
        if (shape_.host_update) return pass(device, kUp, {}, after);
        return pass(device, kUp, {up(bytes(shape_.weight, count))}, after);
      case plan::TaskKind::kWriteMaster:
        return out(device, shape_.master, count, after);
      case plan::TaskKind::kWriteMoments:
        return out(device, shape_.moments, count, after);
    }
    return EventGraph::kNone;
  }

  void update_device(uint32_t device, const std::vector<uint64_t>& subgroups, TaskIndex start,
                     std::vector<TaskIndex>& weights) {
    if (subgroups.empty()) return;
    plan::ScheduleInput input;
    input.variant = shape_.schedule;
    input.subgroups = static_cast<uint32_t>(subgroups.size());
    input.slots = std::min(shape_.slots, input.subgroups);
    input.gradient_spilled = shape_.gradient_spilled;
    input.has_moments = shape_.moments > 0;
    std::vector<TaskIndex> made;
    for (const plan::Task& task : plan::make_schedule(input)) {
      std::vector<TaskIndex> after{start};
      for (const uint32_t before : task.after) {
        if (before != plan::Task::kNone) after.push_back(made[before]);
      }
      const bool cached = plan::stays_in_memory(task.subgroup, cached_[device], subgroups.size());
      made.push_back(run_task(task.kind, device, subgroups[task.subgroup], cached, after));
      if (task.kind == plan::TaskKind::kWriteWeights) weights.push_back(made.back());
    }
  }

  const UpdateShape& shape_;
  EventGraph graph_;
  uint32_t host_up_ = 0, host_down_ = 0, processors_ = 0, host_thread_ = 0;
  std::vector<Drive> drives_;
  std::vector<uint64_t> cached_;  // subgroups of each device that stay in memory
  std::map<std::tuple<uint32_t, Queue, uint32_t>, TaskIndex> last_;  // by device, queue, resource
};

}  // namespace

base::Result<UpdateTimes> simulate_update(const UpdateShape& shape) {
  const auto wrong = [](const char* what) {
    return base::Status(base::ErrorCode::kInvalidArgument, what, "Give at least 1");
  };
  if (shape.parameters == 0) return wrong("an update of no parameters");
  if (shape.devices == 0) return wrong("an update on no devices");
  if (shape.slots == 0) return wrong("devices without slots");
  if (shape.subgroup_elements == 0) return wrong("subgroups without elements");
  if (shape.parameters / shape.subgroup_elements >= kSubgroupsMax) {
    return base::Status(base::ErrorCode::kInvalidArgument,
                        "more than a million subgroups cannot be simulated",
                        "Choose larger subgroups");
  }
  return UpdateGraph(shape).run();
}

}  // namespace smartinf::sim
