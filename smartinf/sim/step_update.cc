// The update within a step: what every device has to move, from which gradients and for which
// weights.
#include <algorithm>
#include <cmath>
#include <utility>

#include "smartinf/base/units.h"
#include "smartinf/compress/message.h"
#include "smartinf/sim/step_graph.h"

namespace smartinf::sim {
namespace {

/// a * b / c in whole numbers, without overflow.
uint64_t scaled(uint64_t a, uint64_t b, uint64_t c) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b / c);
}

/// Bytes of one rule's planes, by element count.
struct StateBytes {
  uint64_t master = 0;
  uint64_t moments = 0;
  uint64_t total() const { return master + moments; }
};

StateBytes state_bytes(kernels::UpdateRule rule, base::StateFormat format, uint64_t count) {
  StateBytes bytes;
  for (const base::PlaneKind kind : kernels::rule_planes(rule)) {
    (kind == base::PlaneKind::kMaster ? bytes.master : bytes.moments) +=
        base::encoded_bytes(base::plane_encoding(format, kind), count);
  }
  return bytes;
}

constexpr double kPairsOfRate = 0.01;  // of the elements, where a pipeline's rate was measured

}  // namespace

double state_bytes_per_parameter(kernels::UpdateRule rule, base::StateFormat format) {
  constexpr uint64_t kMany = uint64_t{1} << 24;
  return static_cast<double>(state_bytes(rule, format, kMany).total()) / static_cast<double>(kMany);
}

/// Compressed: Top-K of the whole, in (index, value) pairs of 8 bytes, or where this software's
/// host selects, as packed signs; else whole elements. Cut at running totals, so that pieces add
/// up to the whole exactly.
uint64_t StepGraph::gradient_bytes(uint64_t first, uint64_t count) const {
  if (!compressed()) return whole_gradient_bytes(count);
  // Bytes of a parameter: signs of 4 * ratio, each with the Rice code of its gap, or of all in a
  // bit each (docs/format.md).
  const double share = 4 * options_.ratio;
  const double sign_bytes = share < 1 ? share * (1 + 1.5 - std::log2(share)) / 8 : 1.0 / 8;
  const auto before = [&](uint64_t elements) {
    const auto all = static_cast<double>(elements);
    if (host_selects()) return static_cast<uint64_t>(std::floor(all * sign_bytes));
    return 8 * static_cast<uint64_t>(std::floor(all * options_.ratio / 2));
  };
  return before(first + count) - before(first);
}

/// Bytes of a range of gradients that wait on the drive: of each the same part. Cut at running
/// totals.
uint64_t StepGraph::spilled_bytes(uint64_t first, uint64_t count) const {
  if (!spilled()) return 0;
  if (machine_.software.gradient_spilled) return gradient_bytes(first, count);
  const uint64_t all = spilled_gradient_bytes(machine_, options_, elements_here_);
  return scaled(first + count, all, elements_here_) - scaled(first, all, elements_here_);
}

/// The part of [first, first + count) of the space that an owner holds, in its own elements.
/// Every owner holds the same fraction of every range, so that all have work from the first layer
/// on.
std::pair<uint64_t, uint64_t> StepGraph::local_range(const Owner& owner, uint64_t first,
                                                     uint64_t count) const {
  const uint64_t begin = scaled(first, owner.elements, parameters_);
  return {begin, scaled(first + count, owner.elements, parameters_) - begin};
}

/// Down; samples of the second moment come up.
bool StepGraph::sends_factors() const {
  return host_selects() && kernels::takes_factored_second_moment(options_.rule);
}

std::vector<UpdateDevice> StepGraph::make_devices() const {
  std::vector<UpdateDevice> devices;
  for (const Owner& owner : owners_) devices.push_back(make_device(owner));
  return devices;
}

/// Between the host and an owner.
std::vector<Use> StepGraph::uses_of_way(const Owner& owner, Way way) const {
  const bool up = way == Way::kUp;
  std::vector<Use> uses{{up ? owner.link_up : owner.link_down, cost(owner.link_bytes_per_s)},
                        {up ? owner.shared_up : owner.shared_down, cost(owner.shared_bytes_per_s)}};
  if (owner.cores_bytes_per_s > 0) uses.push_back({gpu_, cost(owner.cores_bytes_per_s)});
  return uses;
}

/// The drive's time, and that of the cores that compute for what it moves; share: bytes at the
/// drive for each byte of the stage.
void StepGraph::add_drive(std::vector<Use>& uses, const Owner& owner, Direction direction,
                          double seconds_per_byte, double share) const {
  uses.push_back({owner.drive, seconds_per_byte, direction});
  if (owner.drive_cores_s > 0) uses.push_back({gpu_, share * owner.drive_cores_s});
}

UpdateDevice StepGraph::make_device(const Owner& owner) const {
  const double write = owner.amplification / owner.write_bytes_per_s;
  std::vector<Use> up = uses_of_way(owner, Way::kUp);
  const std::vector<Use> down = uses_of_way(owner, Way::kDown);
  UpdateDevice device;
  device.bandwidth = 1 / (1 / owner.read_bytes_per_s + write);
  add_drive(device.read, owner, Direction::kRead, cost(owner.read_bytes_per_s));
  add_drive(device.write, owner, Direction::kWrite, write);
  device.down = down;
  device.down_latency_s = owner.latency_s;
  device.host_update = baseline();
  device.streams = owner.streams && !baseline();
  if (baseline()) {
    device.read.insert(device.read.end(), up.begin(), up.end());
    device.write.insert(device.write.end(), down.begin(), down.end());
    device.work = {{host_update_, cost(machine_.host.update_bytes_per_s)}};
  } else {
    device.work = {
        {owner.processor, owner.element_s > 0 ? owner.element_s : cost(owner.update_bytes_per_s)}};
    device.weights = {{up, owner.latency_s},
                      {{{host_copy_, cost(machine_.host.copy_bytes_per_s)}}}};
    if (owner.weights_bytes_per_s > 0) {
      up.push_back({owner.weights, cost(owner.weights_bytes_per_s)});
      up.push_back({host_weights_, cost(machine_.host.weights_bytes_per_s)});
      device.weights = {{up, owner.latency_s}};
    }
    if (sends_factors() && machine_.host.step_ahead_params_per_s > 0) {
      const Use ahead{host_ahead_, cost(machine_.host.step_ahead_params_per_s)};
      device.weights.push_back({{ahead}, 0, true});
    }
  }
  // All devices at once take all cores.
  if (owner.on_host_cores) device.work.push_back({gpu_, compute_unit_s_});
  uint64_t first = 0;
  for (const uint64_t end : owner.subgroup_ends) {
    device.subgroups.push_back(make_load(owner, first, end - first));
    first = end;
  }
  return device;
}

SubgroupLoad StepGraph::make_load(const Owner& owner, uint64_t first, uint64_t count) const {
  const StateBytes state = state_bytes(options_.rule, options_.format, count);
  SubgroupLoad load;
  load.elements = count;
  load.gradient = gradient_bytes(first, count);
  load.spilled = spilled_bytes(first, count);
  load.master = state.master;
  load.moments = state.moments;
  load.residual = residual_bytes(count);
  load.weights = weights_out(owner, first, count) * machine_.software.weight_bytes;
  if (!matrices_.empty()) {
    // Devices hold subgroups in turn: with several of them the place is near, not exact.
    const uint64_t place =
        std::min(scaled(first, parameters_, owner.elements), parameters_ - count);
    load.gradient += compress::factors_bytes(matrices_, place, count);
    load.weights += compress::samples_in(matrices_, place, count) * sizeof(base::Bf16);
  }
  load.work =
      owner.pipeline && !baseline() ? pipeline_work(owner, count) : state.total() + load.gradient;
  if (owner.element_s > 0 && !baseline()) load.work = count;
  if (baseline()) load.work += state.total();  // out again
  return load;
}

double StepGraph::pipeline_element_s(const FpgaPipeline& kernel) const {
  constexpr uint64_t kMany = uint64_t{1} << 24;
  PipelineElement element;
  element.planes = static_cast<uint32_t>(kernels::rule_planes(options_.rule).size());
  element.gradient_bytes =
      static_cast<double>(gradient_bytes(0, kMany)) / static_cast<double>(kMany);
  // Weights in f32 are the master weights.
  element.weights_bytes = machine_.software.weight_bytes == 2 ? 2 : 0;
  if (compressed()) {
    element.values = std::min(host_selects() ? 4 * options_.ratio : options_.ratio / 2, 1.0);
  }
  return pipeline_seconds(kernel, element);
}

/// The sync that ends a step, of the device that takes the longest: all begin when the last update
/// has ended. Inputs of units on the drives are scratch, and small.
double StepGraph::sync_s() const {
  double longest_s = 0;
  for (size_t d = 0; d < owners_.size(); ++d) {
    uint64_t bytes = 0;
    for (const SubgroupLoad& load : update_->devices()[d].subgroups) {
      bytes += load.spilled + load.master + load.moments + load.residual;
    }
    longest_s = std::max(longest_s, static_cast<double>(bytes) * owners_[d].sync_s_per_byte);
  }
  return longest_s;
}

/// In bytes of the rate that Adam has there.
uint64_t StepGraph::pipeline_work(const Owner& owner, uint64_t count) const {
  const auto elements = static_cast<double>(count);
  if (!compressed()) return 16 * count;
  double bytes = (12 + 8 * kPairsOfRate) * elements;
  if (owner.pairs_per_s > 0) {
    bytes += (options_.ratio / 2 - kPairsOfRate) * elements / owner.pairs_per_s *
             owner.update_bytes_per_s;
  }
  return static_cast<uint64_t>(std::max(bytes, 0.0));
}

DeviceSubgroups StepGraph::all_subgroups() const {
  DeviceSubgroups all(update_->devices().size());
  for (size_t d = 0; d < all.size(); ++d) {
    const auto count = static_cast<uint32_t>(update_->devices()[d].subgroups.size());
    for (uint32_t i = 0; i < count; ++i) all[d].push_back(i);
  }
  return all;
}

UpdateRun StepGraph::update_run() const {
  UpdateRun run;
  const bool slots_used = options_.method == Method::kSmartOver || compressed();
  run.schedule = slots_used ? machine_.software.overlapped : plan::ScheduleVariant::kNaive;
  run.slots = slots();
  run.gradient_spilled = spilled();
  // Weights that come from the devices are made as forward asks for them, each device's by itself.
  run.rounds = papers_stack() && !baseline() && streamed_ == nullptr;
  return run;
}

/// after: gradients are all there. begun: by device, what else comes first; or empty.
void StepGraph::update(TaskIndex after, DeviceSubgroups order,
                       const std::vector<TaskIndex>& begun) {
  if (host_selects()) {
    // Messages are all on their devices before the first subgroup is read (engine). Every so many
    // steps the residual goes along, here a share of it in each.
    after =
        update_->send_selected({{host_select_}}, cost(machine_.host.select_params_per_s), after);
  }
  if (several()) {
    // Agreements that all have all gradients, and on the norm of them.
    constexpr double kAgreements = 2;
    after = graph_.add_task({Stage(0, {}, kAgreements * exchange_.latency_s)}, {after});
  }
  if (!baseline() && machine_.software.update_start_s > 0) {
    after = graph_.add_task({Stage(0, {}, machine_.software.update_start_s)}, {after});
  }
  UpdateRun run = update_run();
  run.order = std::move(order);
  for (size_t d = 0; d < run.order.size(); ++d) {
    run.start.push_back(graph_.add_task({}, {after, begun.empty() ? kNone : begun[d]}));
    if (!weights_asked_.empty()) run.completed.push_back(asked_of(d));
  }
  // As the engine does from a step's first gradient on; the paper's stack does not.
  const bool engine = machine_.software.overlapped == plan::ScheduleVariant::kOverlapped;
  if (engine && !baseline() && begun.empty()) run.prefetch = gradient_arrived_.back();
  update_ends_ = update_->add(run);
  if (streams_committed() && sync_s() > 0) {
    const TaskIndex updated = graph_.add_task({}, {});
    for (const TaskIndex end : update_ends_) graph_.add_dependency(updated, end);
    update_ends_.assign(owners_.size(), task(lane(0, UpdateGraph::kWrites), "sync",
                                             {Stage(0, {}, sync_s())}, {updated}));
  }
  if (several()) broadcast_weights();
}

/// Each subgroup from when its gradient is complete. Its end, by device.
std::vector<StepGraph::TaskIndex> StepGraph::update_beside_backward(DeviceSubgroups order) {
  UpdateRun run = update_run();
  run.slots = plan::slots_as_completed(run.slots, spilled());
  run.order = std::move(order);
  run.start.assign(run.order.size(), kNone);
  for (size_t d = 0; d < run.order.size(); ++d) run.completed.push_back(gradients_completed(d));
  return update_->add(run);
}

/// Tasks after which each subgroup of a device has its gradient.
std::vector<StepGraph::TaskIndex> StepGraph::gradients_completed(size_t d) const {
  // Backward fills the space from its end: the subgroup is complete when the unit is that holds its
  // start.
  std::vector<TaskIndex> completed;
  for (const size_t u : units_of_subgroups(d)) completed.push_back(gradient_arrived_[u][d]);
  return completed;
}

/// The unit that holds the start of each subgroup of a device.
std::vector<size_t> StepGraph::units_of_subgroups(size_t d) const {
  std::vector<size_t> units;
  const Owner& owner = owners_[d];
  size_t u = 0;
  uint64_t first = 0;
  for (const uint64_t end : owner.subgroup_ends) {
    const uint64_t element = scaled(first, parameters_, owner.elements);
    while (u + 1 < units_.size() && units_[u + 1].first <= element) ++u;
    units.push_back(u);
    first = end;
  }
  return units;
}

/// Tasks of the update in this graph that a unit's forward needs.
std::vector<StepGraph::TaskIndex> StepGraph::weights_of(const Unit& unit) const {
  std::vector<TaskIndex> needed;
  for (size_t d = 0; d < owners_.size(); ++d) {
    const std::vector<TaskIndex>& up =
        several() ? weights_everywhere_[d] : update_->weights_up()[d];
    if (up.empty()) continue;
    const auto [first, count] = local_range(owners_[d], unit.first, unit.count);
    const std::vector<uint64_t>& ends = owners_[d].subgroup_ends;
    const uint64_t last = count > 0 ? first + count - 1 : first;
    auto i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), first) - ends.begin());
    for (; i < up.size() && (i == 0 || ends[i - 1] <= last); ++i) needed.push_back(up[i]);
  }
  return needed;
}

}  // namespace smartinf::sim
