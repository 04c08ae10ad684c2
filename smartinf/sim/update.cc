#include "smartinf/sim/update.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

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
    const TaskIndex all_down = put_gradients(subgroups);
    std::vector<TaskIndex> weights;
    for (uint32_t d = 0; d < shape_.devices; ++d) update_device(d, subgroups[d], all_down, weights);
    graph_.run();

    UpdateTimes times;
    times.gradient_s = graph_.times(all_down).end_s;
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
    return graph_.add_resource(std::move(name), 1, shape_.link_catch_up_s);
  }
  static uint64_t bytes(double per_parameter, uint64_t count) {
    return static_cast<uint64_t>(std::llround(per_parameter * static_cast<double>(count)));
  }

  struct Passing {
    uint32_t resource = 0;
    double per_s = 0;  // 0: no limit
    Direction direction = Direction::kNone;
  };
  /// Through all of them at once; what has no limit takes no time.
  static Stage through(uint64_t moved, std::initializer_list<Passing> all) {
    Stage stage;
    for (const Passing& one : all) {
      if (one.per_s > 0)
        stage.uses[stage.use_count++] = {one.resource, 1 / one.per_s, one.direction};
    }
    stage.bytes = stage.use_count > 0 ? moved : 0;
    return stage;
  }

  /// Over the host link one after another; where they are spilled, into the drives side by side.
  TaskIndex put_gradients(const std::vector<std::vector<uint64_t>>& subgroups) {
    std::vector<TaskIndex> last(subgroups.size(), EventGraph::kNone);
    TaskIndex before = EventGraph::kNone;
    for (uint32_t d = 0; d < subgroups.size(); ++d) {
      if (shape_.gradient_spilled) before = EventGraph::kNone;
      for (const uint64_t count : subgroups[d]) {
        before = graph_.add_task({put_gradient(d, bytes(shape_.gradient, count))}, {before});
      }
      last[d] = before;
    }
    const TaskIndex all_down = graph_.add_task({}, {});
    for (const TaskIndex task : last) graph_.add_dependency(all_down, task);
    return all_down;
  }
  Stage put_gradient(uint32_t device, uint64_t moved) const {
    // The host update's gradients are in host memory already: only a spill moves them.
    if (shape_.host_update) return shape_.gradient_spilled ? write(device, moved) : Stage();
    const Passing link{host_down_, shape_.host_down_bytes_per_s};
    if (!shape_.gradient_spilled) return through(moved, {link});
    return through(
        moved, {link, {drives_[device].write, shape_.drive_write_bytes_per_s, Direction::kWrite}});
  }
  Stage read(uint32_t device, uint64_t moved) const {
    const Passing drive{drives_[device].read, shape_.drive_read_bytes_per_s, Direction::kRead};
    if (!shape_.host_update) return through(moved, {drive});
    return through(moved, {drive, {host_up_, shape_.host_up_bytes_per_s}});
  }
  Stage write(uint32_t device, uint64_t moved) const {
    const Passing drive{drives_[device].write, shape_.drive_write_bytes_per_s, Direction::kWrite};
    if (!shape_.host_update) return through(moved, {drive});
    return through(moved, {drive, {host_down_, shape_.host_down_bytes_per_s}});
  }

  std::vector<Stage> stages(plan::TaskKind kind, uint32_t device, uint64_t count) const {
    switch (kind) {
      case plan::TaskKind::kReadGradient:
        return {read(device, bytes(shape_.gradient, count))};
      case plan::TaskKind::kReadState:
        return {read(device, bytes(shape_.master + shape_.moments, count))};
      case plan::TaskKind::kUpdate:
        return {through(count, {{processors_, shape_.update_params_per_s}})};
      case plan::TaskKind::kWriteWeights:
        if (shape_.host_update) return {};
        return {through(bytes(shape_.weight, count), {{host_up_, shape_.host_up_bytes_per_s}})};
      case plan::TaskKind::kWriteMaster:
        return {write(device, bytes(shape_.master, count))};
      case plan::TaskKind::kWriteMoments:
        return {write(device, bytes(shape_.moments, count))};
    }
    return {};
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
    // A drive takes its reads in order, and its writes; so do the processor and the way up.
    enum Queue { kReads, kProcessor, kUp, kWrites, kQueues };
    const auto queue_of = [](plan::TaskKind kind) {
      switch (kind) {
        case plan::TaskKind::kReadGradient:
        case plan::TaskKind::kReadState:
          return kReads;
        case plan::TaskKind::kUpdate:
          return kProcessor;
        case plan::TaskKind::kWriteWeights:
          return kUp;
        case plan::TaskKind::kWriteMaster:
        case plan::TaskKind::kWriteMoments:
          return kWrites;
      }
      return kWrites;
    };
    std::array<TaskIndex, kQueues> before_in;
    before_in.fill(start);
    std::vector<TaskIndex> index_of;
    for (const plan::Task& task : plan::make_schedule(input)) {
      TaskIndex& before = before_in[queue_of(task.kind)];
      const TaskIndex made =
          graph_.add_task(stages(task.kind, device, subgroups[task.subgroup]), {before});
      before = made;
      for (const uint32_t after : task.after) {
        if (after != plan::Task::kNone) graph_.add_dependency(made, index_of[after]);
      }
      if (task.kind == plan::TaskKind::kWriteWeights) weights.push_back(made);
      index_of.push_back(made);
    }
  }

  const UpdateShape& shape_;
  EventGraph graph_;
  uint32_t host_up_ = 0, host_down_ = 0, processors_ = 0;
  std::vector<Drive> drives_;
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
