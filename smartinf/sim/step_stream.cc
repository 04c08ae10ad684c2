// Forward and backward where weights are streamed: unit after unit, each with all micro batches.
#include <algorithm>
#include <utility>

#include "smartinf/sim/step_graph.h"

namespace smartinf::sim {
/// From the first element on, those whose weights stay in memory.
uint64_t StepGraph::elements_in_memory() const {
  if (streamed_ == nullptr) return parameters_;
  const uint32_t units = streamed_->placement.in_memory;
  return units == 0 ? 0 : streamed_->units[units - 1].end();
}

/// Elements of an owner's range whose weights the update sends to the host: a late update all of
/// them, another one those that have a place there.
uint64_t StepGraph::weights_out(const Owner& owner, uint64_t first, uint64_t count) const {
  if (streamed_ == nullptr || options_.overlap == plan::Overlap::kLate) return count;
  const uint64_t end = local_range(owner, 0, elements_in_memory()).second;
  return std::clamp(end, first, first + count) - first;
}

/// Tasks after which a late update may take up each subgroup of a device; it makes weights as
/// forward has room for them.
std::vector<StepGraph::TaskIndex> StepGraph::asked_of(size_t d) const {
  const plan::UnitPlacement& placement = streamed_->placement;
  std::vector<TaskIndex> asked;
  for (const size_t u : units_of_subgroups(d)) {
    const bool at_once = u < placement.in_memory + placement.host_slots;
    asked.push_back(at_once ? kNone : weights_asked_[u]);
  }
  return asked;
}

/// Master weights of a unit, cast by the devices.
StepGraph::TaskIndex StepGraph::read_weights(const Unit& unit, TaskIndex before, TaskIndex room) {
  const TaskIndex all = graph_.add_task({}, {before, room});
  const base::Encoding encoding = base::plane_encoding(options_.format, base::PlaneKind::kMaster);
  for (size_t d = 0; d < owners_.size(); ++d) {
    const Owner& owner = owners_[d];
    const uint64_t count = local_range(owner, unit.first, unit.count).second;
    if (count == 0) continue;
    const uint64_t master = base::encoded_bytes(encoding, count);
    const uint64_t bytes = count * machine_.software.weight_bytes;
    const double share = static_cast<double>(master) / static_cast<double>(bytes);
    std::vector<Use> uses = uses_of_way(owner, Way::kUp);
    add_drive(uses, owner, Direction::kRead, share * cost(owner.read_bytes_per_s), share);
    std::vector<Stage> stages{Stage(bytes, uses, owner.latency_s),
                              Stage(bytes, {{host_copy_, cost(machine_.host.copy_bytes_per_s)}})};
    if (several()) stages.push_back(weights_stage(bytes));
    graph_.add_dependency(all, task(lane(d, UpdateGraph::kWeights), "weights " + unit.name,
                                    std::move(stages), {before, room}));
    pass_bytes_.drive_read += master;
    pass_bytes_.host_link_up += bytes;
  }
  return all;
}

double StepGraph::read_alone_s() {
  TaskIndex last = kNone;
  for (const Unit& unit : units_) last = read_weights(unit, last, kNone);
  graph_.run();
  return graph_.end_s();
}

double StepGraph::fetch_alone_s() const {
  const auto bytes = static_cast<double>(parameters_ * machine_.software.weight_bytes);
  return on_gpu() ? sharers_ * bytes / machine_.gpu.link_bytes_per_s : 0;
}

/// A unit's weights to where it computes; read: from the devices, if they do not stay in memory.
/// kNone: they are there.
StepGraph::TaskIndex StepGraph::bring(size_t u, Walk& walk, bool read) {
  const plan::UnitPlacement& placement = streamed_->placement;
  TaskIndex here = walk.start;
  if (u >= placement.in_memory && read) {
    here = walk.read = read_weights(units_[u], walk.read, walk.room(placement.host_slots));
  }
  if (!on_gpu()) return here;
  const bool stays = u < placement.on_accelerator;
  const TaskIndex room = stays ? walk.start : walk.room(placement.accelerator_slots);
  return walk.fetched = task(kFetching, "fetch " + units_[u].name, {fetch_stage(units_[u].count)},
                             {walk.fetched, here, room});
}

/// Inputs of a unit, of all micro batches, that are on the drives: those of the first units.
uint64_t StepGraph::spooled_inputs(size_t unit) const {
  const uint64_t before = (unit - 1) * options_.accumulation;
  const uint64_t spooled = streamed_->inputs_spooled;
  return std::min<uint64_t>(spooled - std::min(spooled, before), options_.accumulation);
}

StepGraph::TaskIndex StepGraph::spool(size_t unit, bool write, TaskIndex before, TaskIndex after) {
  const uint64_t all = spooled_inputs(unit) * streamed_->input_bytes;
  const TaskIndex done = graph_.add_task({}, {before, after});
  for (size_t d = 0; d < owners_.size() && all > 0; ++d) {
    // Whole ones on one device each; of many each has a part that is as large as its own.
    const Owner& owner = owners_[d];
    const auto part = [&](uint64_t elements) {
      return static_cast<uint64_t>(static_cast<unsigned __int128>(all) * elements / elements_here_);
    };
    uint64_t first = 0;
    for (size_t i = 0; i < d; ++i) first += owners_[i].elements;
    const uint64_t bytes = part(first + owner.elements) - part(first);
    std::vector<Use> uses = uses_of_way(owner, write ? Way::kDown : Way::kUp);
    if (write) {
      add_drive(uses, owner, Direction::kWrite, owner.amplification / owner.write_bytes_per_s);
      pass_bytes_.drive_written += bytes;
      pass_bytes_.host_link_down += bytes;
    } else {
      add_drive(uses, owner, Direction::kRead, cost(owner.read_bytes_per_s));
      pass_bytes_.drive_read += bytes;
      pass_bytes_.host_link_up += bytes;
    }
    const auto queue = write ? UpdateGraph::kWrites : UpdateGraph::kReads;
    graph_.add_dependency(done, task(lane(d, queue), "inputs of " + units_[unit].name,
                                     {Stage(bytes, uses, owner.latency_s)}, {before, after}));
  }
  return done;
}

/// Puts what the unit before has made away from where the model computes.
StepGraph::TaskIndex StepGraph::put_inputs(size_t unit, Walk& walk) {
  TaskIndex made = walk.computed.back();
  if (on_gpu() && !streamed_->inputs_near) {
    const uint64_t bytes = options_.accumulation * streamed_->input_bytes;
    pass_bytes_.gpu_link_up += bytes;
    made = task(kLeaving, "inputs of " + units_[unit].name,
                {Stage(bytes, {{gpu_up_, cost(machine_.gpu.link_bytes_per_s)}})},
                {made, walk.inputs_left});
  }
  return walk.inputs_left = spool(unit, true, walk.inputs_left, made);
}

/// And back, ahead of the unit that wants it.
StepGraph::TaskIndex StepGraph::get_inputs(size_t unit, Walk& walk) {
  constexpr size_t kAhead = 2;
  walk.inputs_read = spool(unit, false, walk.inputs_read, walk.room(kAhead));
  if (!on_gpu() || streamed_->inputs_near) return walk.inputs_read;
  const uint64_t bytes = options_.accumulation * streamed_->input_bytes;
  pass_bytes_.gpu_link_down += bytes;
  return walk.inputs_read = task(kFetching, "inputs of " + units_[unit].name,
                                 {Stage(bytes, {{gpu_down_, cost(machine_.gpu.link_bytes_per_s)}})},
                                 {walk.inputs_read});
}

StepGraph::TaskIndex StepGraph::stream_forward(TaskIndex start) {
  const plan::UnitPlacement& placement = streamed_->placement;
  const bool late = options_.overlap == plan::Overlap::kLate;
  if (on_gpu() && !overlapped() && placement.on_accelerator > 0) {
    const uint64_t resident = streamed_->units[placement.on_accelerator - 1].end();
    start = task(kFetching, "new weights", {fetch_stage(resident)}, {start});
  }
  Walk walk;
  walk.start = walk.read = walk.fetched = walk.inputs_left = start;
  // Weights that no update hands out are read when the step is committed.
  if (overlapped() && !late) {
    walk.read = graph_.add_task({}, {start});
    for (const TaskIndex end : update_ends_) graph_.add_dependency(walk.read, end);
  }
  TaskIndex written = start;  // inputs of two units before: their buffers are free
  for (size_t u = 0; u < units_.size(); ++u) {
    const bool fetched_before = on_gpu() && !overlapped() && u < placement.on_accelerator;
    if (!weights_asked_.empty()) {
      graph_.add_dependency(weights_asked_[u], walk.room(placement.host_slots));
    }
    const TaskIndex weights = fetched_before ? start : bring(u, walk, !late && !weights_given_);
    const TaskIndex before = walk.room(1);
    const TaskIndex free = std::exchange(written, walk.inputs_left);
    walk.computed.push_back(task(kComputing, "forward " + units_[u].name,
                                 {computing(options_.accumulation * units_[u].forward_s)},
                                 {weights, before, free}));
    if (overlapped()) {
      for (const TaskIndex up : weights_of(units_[u])) {
        graph_.add_dependency(on_gpu() ? weights : walk.computed.back(), up);
      }
    }
    if (u + 1 < units_.size()) put_inputs(u + 1, walk);
  }
  return graph_.add_task({}, {walk.computed.back(), walk.inputs_left});
}

StepGraph::TaskIndex StepGraph::stream_backward(TaskIndex start) {
  const plan::UnitPlacement& placement = streamed_->placement;
  Walk walk;
  walk.start = walk.fetched = walk.inputs_read = start;
  // Weights that no update hands out come from the commit on, and there is no room for gradients.
  const TaskIndex step_begun = walk.read = graph_.add_task({}, {start, committed_});
  std::vector<TaskIndex> last_write(owners_.size(), step_begun);
  TaskIndex left = step_begun;  // gradients of the unit before have left the GPU
  gradient_arrived_.assign(units_.size(), {});
  for (size_t u = units_.size(); u-- > 0;) {
    const bool there = on_gpu() && u < placement.on_accelerator;
    const TaskIndex weights = there ? start : bring(u, walk, true);
    const TaskIndex inputs = u > 0 ? get_inputs(u, walk) : start;
    walk.computed.push_back(task(kComputing, "backward " + units_[u].name,
                                 {computing(options_.accumulation * units_[u].backward_s)},
                                 {weights, inputs, walk.room(1), offload_waits() ? left : kNone}));
    left = hand_over(u, walk.computed.back(), left, last_write);
  }
  last_computed_ = walk.computed.back();
  const TaskIndex end = graph_.add_task({}, {walk.computed.back(), left, committed_});
  for (const TaskIndex write : last_write) graph_.add_dependency(end, write);
  return end;
}

}  // namespace smartinf::sim
