#include "smartinf/sim/update.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "smartinf/sim/event_graph.h"
#include "smartinf/sim/update_graph.h"

namespace smartinf::sim {
namespace {

using TaskIndex = EventGraph::TaskIndex;

constexpr uint64_t kSubgroupsMax = 1'000'000;

/// An update and the gradients that come before it.
class UpdateAlone {
 public:
  explicit UpdateAlone(const UpdateShape& shape)
      : shape_(shape), update_(graph_, LinkLaw::kBooked, make_devices(), {}) {
    update_.cache_state(shape.state_cache_bytes, shape.cached_writes_wait);
  }

  UpdateTimes run() {
    UpdateRun all;
    all.schedule = shape_.schedule;
    all.slots = shape_.slots;
    all.gradient_spilled = shape_.gradient_spilled;
    std::vector<TaskIndex> spilled(shape_.devices, EventGraph::kNone);
    const bool compressed = shape_.select_params_per_s > 0;
    const TaskIndex given = compressed ? take_all() : put_gradients(spilled);
    const TaskIndex all_down =
        compressed
            ? update_.send_selected(selecting_threads(), cost(shape_.select_params_per_s), given)
            : given;
    for (uint32_t d = 0; d < shape_.devices; ++d) {
      all.start.push_back(graph_.add_task({}, {all_down, spilled[d]}));
      auto& order = all.order.emplace_back();
      for (uint32_t i = 0; i < update_.devices()[d].subgroups.size(); ++i) order.push_back(i);
    }
    update_.add(all);
    graph_.run();

    UpdateTimes times;
    times.gradient_s = graph_.times(given).end_s;
    times.update_s = graph_.end_s() - times.gradient_s;
    for (const std::vector<TaskIndex>& of_device : update_.weights_up()) {
      for (const TaskIndex task : of_device) {
        times.weights_s = std::max(times.weights_s, graph_.times(task).end_s - times.gradient_s);
      }
    }
    return times;
  }

 private:
  static double cost(double per_s) { return per_s > 0 ? 1 / per_s : 0; }
  static uint64_t bytes(double per_parameter, uint64_t count) {
    return static_cast<uint64_t>(std::llround(per_parameter * static_cast<double>(count)));
  }

  uint32_t add_link(std::string name) {
    const uint32_t link = graph_.add_resource(std::move(name), 1, shape_.link_catch_up_s);
    if (shape_.links_in_order) graph_.set_in_order(link);
    return link;
  }

  std::vector<UpdateDevice> make_devices() {
    const Use up{add_link("host link up"), cost(shape_.host_up_bytes_per_s)};
    const uint32_t down = shape_.host_shared_budget ? up.resource : add_link("host link down");
    host_down_ = {down, cost(shape_.host_down_bytes_per_s)};
    const uint32_t processors = graph_.add_resource("processors");
    const Use copy{processors, cost(shape_.copy_bytes_per_s)};
    host_thread_ = {graph_.add_resource("host thread"), cost(shape_.gradient_params_per_s)};
    std::vector<UpdateDevice> devices(shape_.devices);
    for (uint32_t d = 0; d < shape_.devices; ++d) {
      UpdateDevice& device = devices[d];
      const uint32_t read = add_link("drive " + std::to_string(d));
      const uint32_t write = shape_.shared_budget ? read : add_link("writes");
      device.read = {{read, cost(shape_.drive_read_bytes_per_s)}, copy};
      device.write = {{write, cost(shape_.drive_write_bytes_per_s)}, copy};
      device.work = {{processors, cost(shape_.update_params_per_s)}};
      device.down = {host_down_};
      device.host_update = shape_.host_update;
      if (shape_.host_update) {
        device.read.push_back(up);
        device.write.push_back(host_down_);
      } else {
        device.weights = {{{up}}};
      }
    }
    uint64_t left = shape_.parameters;
    for (uint32_t d = 0; left > 0; d = (d + 1) % shape_.devices) {
      const uint64_t count = std::min(left, shape_.subgroup_elements);
      left -= count;
      SubgroupLoad load;
      load.elements = load.work = count;
      load.gradient = load.spilled = bytes(shape_.gradient, count);
      load.master = bytes(shape_.master, count);
      load.moments = bytes(shape_.moments, count);
      load.weights = bytes(shape_.weight, count);
      devices[d].subgroups.push_back(load);
    }
    return devices;
  }

  std::vector<uint32_t> selecting_threads() {
    std::vector<uint32_t> threads;
    for (uint32_t t = 0; t < std::max(1u, shape_.select_threads); ++t) {
      threads.push_back(graph_.add_resource("selecting"));
    }
    return threads;
  }

  TaskIndex pass(uint64_t moved, const Use& use, std::span<const TaskIndex> after) {
    const Stage stage(moved, {use});
    return update_.pass(0, UpdateGraph::kGradients, "gradient", {&stage, 1}, after);
  }
  TaskIndex take_all() { return pass(shape_.parameters, host_thread_, {}); }

  /// In the order of the parameter space, which goes from device to device. A gradient that will
  /// be spilled waits for a slot's buffer. spilled: by device, its last write.
  TaskIndex put_gradients(std::vector<TaskIndex>& spilled) {
    const TaskIndex all_down = graph_.add_task({}, {});
    std::vector<std::vector<TaskIndex>> writes(shape_.devices);
    for (size_t i = 0; i < update_.devices().front().subgroups.size(); ++i) {
      for (uint32_t d = 0; d < shape_.devices; ++d) {
        const UpdateDevice& device = update_.devices()[d];
        if (i >= device.subgroups.size()) continue;
        const SubgroupLoad& load = device.subgroups[i];
        const TaskIndex buffer = i >= shape_.slots && shape_.gradient_spilled
                                     ? writes[d][i - shape_.slots]
                                     : EventGraph::kNone;
        const TaskIndex taken = pass(load.elements, host_thread_, {{buffer}});
        // The host update's gradients are in host memory already: only a spill moves them.
        const TaskIndex put =
            shape_.host_update ? taken : pass(load.gradient, host_down_, {{taken}});
        graph_.add_dependency(all_down, put);
        if (!shape_.gradient_spilled) continue;
        const Stage write(load.gradient, device.write);
        spilled[d] = update_.pass(d, UpdateGraph::kWrites, "gradient", {&write, 1}, {{put}});
        writes[d].push_back(spilled[d]);
      }
    }
    return all_down;
  }

  const UpdateShape& shape_;
  EventGraph graph_;
  Use host_down_;
  Use host_thread_;
  UpdateGraph update_;
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
  return UpdateAlone(shape).run();
}

}  // namespace smartinf::sim
