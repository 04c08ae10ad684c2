#include "smartinf/sim/step_graph.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"

namespace smartinf::sim {
namespace {

constexpr double kInstant = 1e-12;  // seconds per "byte" of stages that are given in time
constexpr uint32_t kPrefetchLayers = 2;

}  // namespace

uint32_t StepGraph::lane(size_t device, UpdateGraph::Queue queue) {
  if (queue == UpdateGraph::kSelection) return kSelecting;
  const uint32_t of_device = queue == UpdateGraph::kGradients ? 0 : static_cast<uint32_t>(queue);
  return kDevices + 4 * static_cast<uint32_t>(device) + of_device;
}

StepGraph::StepGraph(const ModelShape& model, const Machine& machine, const StepOptions& options,
                     const Exchange& exchange)
    : model_(model),
      machine_(machine),
      options_(options),
      exchange_(exchange),
      resident_(options.resident()),
      streamed_(options.streamed()),
      parameters_(model.parameters()) {
  make_units();
  make_resources();
  make_owners();
  share_out();
  if (sends_factors()) matrices_ = compress::matrix_layouts(model_.space());
  update_.emplace(
      graph_, LinkLaw::kTogether, make_devices(),
      [this](TaskIndex task, uint32_t device, UpdateGraph::Queue queue, std::string_view name) {
        if (options_.trace) labels_.push_back({task, lane(device, queue), std::string(name)});
      });
  update_->cache_state(options.state_cache_bytes, false);
}

StepTimes StepGraph::run_apart() {
  // Commits the step before, beside this one's computing; or at the end of each.
  if (!streams_committed()) commit_before(sync_s());
  const TaskIndex forward_end = forward(kNone);
  const TaskIndex backward_end = backward(forward_end);
  update(backward_end, all_subgroups(), {});
  graph_.run();
  StepTimes times;
  times.total_s = graph_.end_s();
  const double backward_end_s = end_of_backward_s(backward_end);
  times.forward_s = graph_.times(forward_end).end_s;
  times.backward_s = backward_end_s - times.forward_s;
  times.update_s = times.total_s - backward_end_s;
  times.forward = utilizations(0, times.forward_s);
  times.backward = utilizations(times.forward_s, backward_end_s);
  times.update = utilizations(backward_end_s, times.total_s);
  finish(times);
  return times;
}

double StepGraph::forward_alone_s(plan::Overlap overlap) {
  weights_given_ = overlap == plan::Overlap::kLate;
  forward(kNone);
  graph_.run();
  return graph_.end_s();
}

DeviceSubgroups StepGraph::begun_in_backward(double committed_s) {
  commit_before(committed_s);
  const TaskIndex backward_end = backward(kNone);
  DeviceSubgroups all = all_subgroups();
  // Backward completes gradients from the end of the space on.
  for (std::vector<uint32_t>& order : all) std::reverse(order.begin(), order.end());
  update_beside_backward(all);
  graph_.run();
  const double end_s = graph_.times(backward_end).end_s;
  for (size_t d = 0; d < all.size(); ++d) {
    std::vector<double> begun_s;
    for (const uint32_t subgroup : all[d]) {
      begun_s.push_back(graph_.times(update_->begun()[d][subgroup]).end_s);
    }
    std::sort(begun_s.begin(), begun_s.end());
    begun_s.erase(std::lower_bound(begun_s.begin(), begun_s.end(), end_s), begun_s.end());
    // Whenever one begins it is the one, of those that are complete, that became so last.
    const std::vector<TaskIndex> completed = gradients_completed(d);
    DeviceSubgroups::value_type begun, waiting;
    auto next = all[d].begin();
    for (const double now_s : begun_s) {
      while (next != all[d].end() && graph_.times(completed[*next]).end_s <= now_s) {
        waiting.push_back(*next++);
      }
      begun.push_back(waiting.back());
      waiting.pop_back();
    }
    all[d] = std::move(begun);
  }
  return all;
}

StepTimes StepGraph::run_overlapped(const DeviceSubgroups& begun, double forward_alone_s,
                                    double committed_s) {
  commit_before(committed_s);
  const TaskIndex backward_end = backward(kNone);
  DeviceSubgroups rest = all_subgroups();
  std::vector<TaskIndex> early_end;
  if (!begun.empty()) {
    early_end = update_beside_backward(begun);
    for (size_t d = 0; d < rest.size() && !options_.wrong_guess; ++d) {
      std::erase_if(rest[d], [&](uint32_t subgroup) {
        return std::find(begun[d].begin(), begun[d].end(), subgroup) != begun[d].end();
      });
    }
  }
  if (streamed_ != nullptr && options_.overlap == plan::Overlap::kLate) {
    for (size_t u = 0; u < units_.size(); ++u) weights_asked_.push_back(graph_.add_task({}, {}));
  }
  update(backward_end, std::move(rest), early_end);
  forward(backward_end);
  graph_.run();
  StepTimes times;
  times.total_s = graph_.end_s();
  times.forward_s = forward_alone_s;
  times.backward_s = end_of_backward_s(backward_end);
  times.update_s = std::max(0.0, times.total_s - times.backward_s - forward_alone_s);
  times.backward = utilizations(0, times.backward_s);
  times.update = utilizations(times.backward_s, times.total_s);
  times.forward = times.update;
  finish(times);
  return times;
}

/// The commit of the step before ends so long after the graph's beginning.
void StepGraph::commit_before(double committed_s) {
  if (committed_s > 0) committed_ = graph_.add_task({Stage(0, {}, committed_s)}, {});
}

double StepGraph::commit_after_step_s() const {
  double end_s = 0;
  for (const TaskIndex end : update_ends_) end_s = std::max(end_s, graph_.times(end).end_s);
  if (!streams_committed()) end_s += sync_s();  // else it is in the graph
  return std::max(0.0, end_s - graph_.end_s());
}

/// Without what backward's gradients wait for the commit when it has made all of them: that is
/// the update's.
double StepGraph::end_of_backward_s(TaskIndex backward_end) const {
  const double end_s = graph_.times(backward_end).end_s;
  if (committed_ == kNone) return end_s;
  const double computed_s = graph_.times(last_computed_).end_s;
  return end_s - std::max(0.0, graph_.times(committed_).end_s - computed_s);
}

void StepGraph::finish(StepTimes& times) const {
  times.parameters = parameters_;
  times.events = graph_.task_count();
  times.bytes = pass_bytes_;
  times.bytes.drive_read += update_->bytes().drive_read;
  times.bytes.drive_written += update_->bytes().drive_written;
  times.bytes.host_link_up += update_->bytes().host_link_up;
  times.bytes.host_link_down += update_->bytes().host_link_down;
  const std::vector<Utilization>* longest = &times.update;
  if (times.backward_s > times.update_s) longest = &times.backward;
  if (times.forward_s > std::max(times.backward_s, times.update_s)) longest = &times.forward;
  times.bound_by = longest->empty() ? "nothing" : longest->front().resource;
  if (options_.trace) times.spans = spans();
}

std::pair<double, double> StepGraph::forward_and_backward_s() const {
  std::pair<double, double> sum;
  for (const Unit& unit : units_) {
    sum.first += unit.forward_s;
    sum.second += unit.backward_s;
  }
  return sum;
}

/// Where the update runs on the cores that compute, one "byte" of both takes the same time, so that
/// the two have equal shares where both want more.
Stage StepGraph::computing(double seconds) const {
  return Stage(static_cast<uint64_t>(std::llround(seconds / compute_unit_s_)),
               {{gpu_, compute_unit_s_}});
}

void StepGraph::make_units() {
  const Gpu& gpu = machine_.gpu;
  const double products_per_s = gpu.peak_flops * gpu.product_efficiency;
  const auto between_s = [&](double bytes) {
    return bytes * gpu.activation_passes / gpu.memory_bytes_per_s;
  };
  uint64_t first = 0;
  const auto add = [&](std::string name, uint64_t count, double forward_s, double backward_s) {
    units_.push_back({first, count, forward_s, backward_s, std::move(name)});
    first += count;
  };
  add("embedding", model_.embedding_parameters(), 0, 0);
  const double layer_s =
      model_.layer_forward_flops() / products_per_s + between_s(model_.layer_activation_bytes());
  // Backward: twice the products, after the layer is computed again from its checkpoint or not.
  const double layer_back_s = (options_.recompute ? 3 : 2) * layer_s;
  if (streamed_ != nullptr) {
    for (const plan::Unit& unit : streamed_->units) {
      if (unit.layers == 0) continue;
      add(fmt::format("layers from {}", unit.first_layer), unit.count, unit.layers * layer_s,
          unit.layers * layer_back_s);
    }
  }
  for (uint64_t l = 0; l < model_.layers && streamed_ == nullptr; ++l) {
    add(fmt::format("layer {}", l), model_.layer_parameters(), layer_s, layer_back_s);
  }
  // Logits in 16 bit, their softmax and its gradient in 32 bit.
  const double logits_bytes =
      12.0 * static_cast<double>(model_.tokens()) * static_cast<double>(model_.vocabulary);
  const double head_s =
      model_.head_forward_flops() / products_per_s + logits_bytes / gpu.memory_bytes_per_s;
  add("head", model_.head_parameters(), head_s, 2 * head_s);
}

void StepGraph::make_resources() {
  const Gpu& gpu = machine_.gpu;
  gpu_ = graph_.add_resource(on_gpu() ? "GPU" : "cores");
  gpu_up_ = graph_.add_resource("GPU link up");
  gpu_down_ = graph_.add_resource("GPU link down");
  host_up_ = graph_.add_resource("host link up");
  host_down_ = graph_.add_resource("host link down");
  host_copy_ = graph_.add_resource("host copies");
  host_weights_ = graph_.add_resource("host's new weights");
  host_update_ = graph_.add_resource("host update");
  host_select_ = graph_.add_resource("host selection");
  host_ahead_ = graph_.add_resource("host step-ahead");
  network_out_ = graph_.add_resource("network out");
  network_in_ = graph_.add_resource("network in");
  near_ = graph_.add_resource("other ranks here");
  // Several GPUs: each fetches all weights and keeps its own batch (data parallel, ZeRO-3).
  // Behind one link their fetches add up.
  sharers_ = gpu.links_shared || gpu.link_is_host_link ? gpu.count : 1;
}

void StepGraph::make_owners() {
  const DeviceGroup* before = nullptr;
  // Drives of the RAID0 have the same part of its bytes each.
  const double sharing = baseline() ? machine_.device_count() : 1;
  for (const DeviceGroup* device : machine_.each_device()) {
    const bool same_server = device->remote && std::exchange(before, device) == device;
    const double sync_s_per_byte =
        device->sync_bytes_per_s > 0 ? cost(device->sync_bytes_per_s) / sharing : 0;
    if (baseline() && !owners_.empty()) {
      Owner& raid = owners_.front();
      raid.read_bytes_per_s += device->read_bytes_per_s;
      raid.write_bytes_per_s += device->write_bytes_per_s;
      raid.sync_s_per_byte = std::max(raid.sync_s_per_byte, sync_s_per_byte);
      raid.burst_bytes_per_s += device->read_bytes_per_s;
      raid.burst_bytes += device->burst_bytes;
      if (!same_server) raid.link_bytes_per_s += device->link_bytes_per_s;
      continue;
    }
    Owner owner;
    owner.read_bytes_per_s = device->read_bytes_per_s;
    owner.write_bytes_per_s = device->write_bytes_per_s;
    owner.burst_bytes_per_s = device->read_bytes_per_s;
    owner.burst_bytes = device->burst_bytes;
    owner.sync_s_per_byte = sync_s_per_byte;
    owner.link_bytes_per_s = device->link_bytes_per_s;
    owner.latency_s = device->latency_s + (device->remote ? machine_.network.latency_s : 0);
    owner.amplification = device->write_amplification;
    owner.streams = device->update_streams && options_.method != Method::kSmart;
    owner.update_bytes_per_s =
        compressed() ? device->decompress_bytes_per_s : device->update_bytes_per_s;
    owner.weights_bytes_per_s = device->weights_bytes_per_s;
    owner.weights = graph_.add_resource("new weights");
    owner.pipeline = device->pipeline;
    if (device->kernel.clock_hz > 0) owner.element_s = pipeline_element_s(device->kernel);
    owner.pairs_per_s = device->pairs_per_s;
    owner.drive = graph_.add_resource("drives", device->mixed_efficiency);
    owner.link_up = same_server ? owners_.back().link_up : graph_.add_resource("device links up");
    owner.link_down =
        same_server ? owners_.back().link_down : graph_.add_resource("device links down");
    owner.shared_up = device->remote ? network_in_ : host_up_;
    owner.shared_down = device->remote ? network_out_ : host_down_;
    owner.shared_bytes_per_s =
        device->remote ? machine_.network.bytes_per_s : machine_.host.link_bytes_per_s;
    if (device->remote && !on_gpu()) owner.cores_bytes_per_s = machine_.network.cores_bytes_per_s;
    owner.processor = graph_.add_resource("processors");
    owner.on_host_cores = device->on_host_cores && !on_gpu();
    if (owner.on_host_cores && device->cores_bytes_per_s > 0) {
      owner.drive_cores_s = 1 / device->cores_bytes_per_s;
    }
    owners_.push_back(owner);
  }
  compute_unit_s_ = kInstant;
  if (owners_.front().on_host_cores) {
    compute_unit_s_ =
        cost(baseline() ? machine_.host.update_bytes_per_s
                        : owners_.front().update_bytes_per_s * static_cast<double>(owners_.size()));
  }
}

void StepGraph::share_out() {
  const uint64_t wanted = options_.subgroup_elements != 0 ? options_.subgroup_elements
                                                          : machine_.software.subgroup_elements;
  if (papers_stack() && !baseline()) {
    deal_subgroups(wanted);
    elements_here_ = parameters_;
    return;
  }
  // In proportion to the rate at which a device moves a step's state; equal devices get equal
  // shares to within an element. Of several ranks the others' devices have the rest.
  elements_here_ =
      several()
          ? static_cast<uint64_t>(std::llround(static_cast<double>(parameters_) * exchange_.share))
          : parameters_;
  double total = 0;
  std::vector<double> weights;
  for (const Owner& owner : owners_) {
    weights.push_back(1 / (1 / owner.read_bytes_per_s + 1 / owner.write_bytes_per_s));
    total += weights.back();
  }
  double sum = 0;
  uint64_t given = 0;
  for (size_t d = 0; d < owners_.size(); ++d) {
    sum += weights[d];
    const uint64_t until = d + 1 == owners_.size()
                               ? elements_here_
                               : static_cast<uint64_t>(std::llround(
                                     static_cast<double>(elements_here_) * sum / total));
    Owner& owner = owners_[d];
    owner.elements = until - given;
    given = until;
    const uint64_t subgroups = base::divide_up(owner.elements, wanted);
    const uint64_t each = subgroups > 0 ? base::divide_up(owner.elements, subgroups) : 0;
    for (uint64_t end = 0; end < owner.elements;) {
      end = std::min(end + each, owner.elements);
      owner.subgroup_ends.push_back(end);
    }
  }
}

/// As the paper's stack does (docs/simulator.md): a subgroup takes whole matrices until it has the
/// wanted size, however much more that is, and subgroups are dealt to the devices in turn. What is
/// no matrix is the last one. A matrix that a device's memory does not hold is cut into equal
/// parts.
void StepGraph::deal_subgroups(uint64_t wanted) {
  uint64_t count = 0, dealt = 0, turn = 0;
  const auto deal = [&] {
    if (count == 0) return;
    Owner& owner = owners_[turn++ % owners_.size()];
    owner.elements += count;
    owner.subgroup_ends.push_back(owner.elements);
    dealt += std::exchange(count, 0);
  };
  const double element_bytes =
      state_bytes_per_parameter(options_.rule, options_.format) + machine_.software.gradient_bytes;
  const auto memory = static_cast<double>(machine_.devices.front().memory_bytes);
  const uint64_t fits =
      memory > 0 ? std::max(static_cast<uint64_t>(memory / element_bytes), wanted) : parameters_;
  const plan::ParameterSpace space = model_.space();
  for (const plan::ParameterRange& range : space.ranges()) {
    if (range.shape.size() == 1) continue;
    const uint64_t parts = base::divide_up(range.count, fits);
    for (uint64_t part = 0; part < parts; ++part) {
      count += range.count * (part + 1) / parts - range.count * part / parts;
      if (count >= wanted) deal();
    }
  }
  deal();
  count = parameters_ - dealt;
  deal();
}

StepGraph::TaskIndex StepGraph::task(uint32_t lane, const std::string& name,
                                     std::vector<Stage> stages,
                                     std::initializer_list<TaskIndex> after) {
  const TaskIndex index = graph_.add_task(std::move(stages), after);
  if (options_.trace) labels_.push_back({index, lane, name});
  return index;
}

Stage StepGraph::fetch_stage(uint64_t count) {
  const uint64_t bytes = 2 * count * machine_.gpu.count;
  pass_bytes_.gpu_link_down += bytes;
  const double own = cost(machine_.gpu.link_bytes_per_s) * sharers_ / machine_.gpu.count;
  if (!machine_.gpu.link_is_host_link) return Stage(bytes, {{gpu_down_, own}});
  return Stage(bytes, {{gpu_down_, own}, {host_down_, cost(machine_.host.link_bytes_per_s)}});
}

/// Overlapped, each unit waits for its own new weights, in the first micro batch.
StepGraph::TaskIndex StepGraph::forward(TaskIndex start) {
  if (streamed_ != nullptr) return stream_forward(start);
  std::vector<TaskIndex> computed;
  const bool fetches = on_gpu() && (resident_ == nullptr || overlapped());
  if (resident_ != nullptr && on_gpu() && !overlapped()) {
    start = task(kFetching, "new weights", {fetch_stage(parameters_)}, {start});
  }
  if (!overlapped()) start = earlier_passes(start, "forward", &Unit::forward_s);
  TaskIndex fetched = start;
  for (size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = units_[u];
    if (fetches) {
      const bool room_needed = resident_ == nullptr && u >= kPrefetchLayers;
      const TaskIndex room = room_needed ? computed[u - kPrefetchLayers] : start;
      fetched = task(kFetching, "fetch " + unit.name, {fetch_stage(unit.count)}, {fetched, room});
    }
    const TaskIndex before = computed.empty() ? start : computed.back();
    computed.push_back(
        task(kComputing, "forward " + unit.name, {computing(unit.forward_s)}, {fetched, before}));
    if (!overlapped()) continue;
    for (const TaskIndex weights : weights_of(unit)) {
      graph_.add_dependency(fetches ? fetched : computed.back(), weights);
    }
  }
  return overlapped() ? earlier_passes(computed.back(), "forward", &Unit::forward_s)
                      : computed.back();
}

/// Computing of all micro batches but one, one after another.
StepGraph::TaskIndex StepGraph::earlier_passes(TaskIndex start, const char* phase,
                                               double Unit::*seconds) {
  const double passes = options_.accumulation - 1.0;
  if (passes == 0) return start;
  double each_s = 0;
  for (const Unit& unit : units_) each_s += unit.*seconds;
  return task(kComputing, fmt::format("{} of earlier micro batches", phase),
              {computing(passes * each_s)}, {start});
}

StepGraph::TaskIndex StepGraph::backward(TaskIndex start) {
  if (streamed_ != nullptr) return stream_backward(start);
  start = earlier_passes(start, "backward", &Unit::backward_s);
  const bool together = resident_ != nullptr && resident_->gradients == GradientsLeave::kTogether;
  const bool every_pass =
      resident_ != nullptr && resident_->gradients == GradientsLeave::kEveryPass;
  if (every_pass && on_gpu() && options_.accumulation > 1) {
    // Their gradients go to the host as well, where they are added up.
    const uint64_t bytes = (options_.accumulation - 1) * whole_gradient_bytes(parameters_);
    pass_bytes_.gpu_link_up += bytes;
    start = task(kLeaving, "gradients of earlier micro batches",
                 {Stage(bytes, {{gpu_up_, cost(machine_.gpu.link_bytes_per_s)}}),
                  Stage(bytes, {{host_copy_, cost(machine_.host.copy_bytes_per_s)}})},
                 {start});
  }
  std::vector<TaskIndex> computed;
  // Gradients go to the devices from the commit on; until then one process keeps them.
  const TaskIndex step_begun = graph_.add_task({}, {start, committed_});
  std::vector<TaskIndex> last_write(owners_.size(), step_begun);
  TaskIndex fetched = start;
  TaskIndex left =
      several() ? step_begun : start;  // gradients of the unit before have left the GPU
  gradient_arrived_.assign(units_.size(), {});
  for (size_t u = units_.size(); u-- > 0;) {
    const Unit& unit = units_[u];
    const size_t done = computed.size();
    if (on_gpu() && resident_ == nullptr) {
      const TaskIndex room = done >= kPrefetchLayers ? computed[done - kPrefetchLayers] : start;
      fetched = task(kFetching, "fetch " + unit.name, {fetch_stage(unit.count)}, {fetched, room});
    }
    const TaskIndex before = computed.empty() ? start : computed.back();
    computed.push_back(task(kComputing, "backward " + unit.name, {computing(unit.backward_s)},
                            {fetched, before, offload_waits() ? left : kNone}));
    if (!together) left = hand_over(u, computed.back(), left, last_write);
  }
  for (size_t u = units_.size(); together && u-- > 0;) {
    left = hand_over(u, computed.back(), left, last_write);
  }
  last_computed_ = computed.back();
  const TaskIndex end = graph_.add_task({}, {computed.back(), left, committed_});
  for (const TaskIndex write : last_write) graph_.add_dependency(end, write);
  return end;
}

/// A unit's gradients to the host and to the owners of their state; when they have left the GPU.
StepGraph::TaskIndex StepGraph::hand_over(size_t u, TaskIndex computed, TaskIndex left,
                                          std::vector<TaskIndex>& last_write) {
  left = offload(units_[u], computed, left);
  const TaskIndex here = several() ? exchange_gradient(u, left) : left;
  for (size_t d = 0; d < owners_.size(); ++d) {
    last_write[d] = store_gradient(units_[u], d, here, last_write[d]);
  }
  gradient_arrived_[u] = last_write;
  return several() ? buckets_free(left) : left;
}

/// Gradients of a unit: compressed on the GPU if it selects, to the host, into a pinned buffer.
StepGraph::TaskIndex StepGraph::offload(const Unit& unit, TaskIndex computed, TaskIndex before) {
  const Gpu& gpu = machine_.gpu;
  TaskIndex last = computed;
  if (compressed() && !host_selects()) {
    const double bytes = 4.0 * static_cast<double>(unit.count) / gpu.count;
    last = task(kComputing, "select " + unit.name,
                {computing(bytes * gpu.select_passes / gpu.memory_bytes_per_s)}, {last});
  }
  const uint64_t bytes =
      host_selects() ? whole_gradient_bytes(unit.count) : gradient_bytes(unit.first, unit.count);
  if (on_gpu()) {
    // Each GPU sends its share of the sum; sums of several GPUs cross the links once more.
    const uint64_t moved = bytes + 2 * unit.count * (gpu.count - 1);
    pass_bytes_.gpu_link_up += moved;
    const double own = cost(gpu.link_bytes_per_s) * sharers_ / gpu.count;
    Stage up(moved, {{gpu_up_, own}});
    if (gpu.link_is_host_link) {
      up = Stage(moved, {{gpu_up_, own}, {host_up_, cost(machine_.host.link_bytes_per_s)}});
    }
    last = task(kLeaving, "gradient " + unit.name, {up}, {last, before});
  }
  return task(kCopying, "copy " + unit.name,
              {Stage(bytes, {{host_copy_, cost(machine_.host.copy_bytes_per_s)}})}, {last, before});
}

StepGraph::TaskIndex StepGraph::store_gradient(const Unit& unit, size_t d, TaskIndex arrived,
                                               TaskIndex before) {
  if (host_selects()) return arrived;  // from where they are compressed when all are there
  if (baseline() && !spilled()) return arrived;  // they are where the update wants them
  Owner& owner = owners_[d];
  const auto [first, count] = local_range(owner, unit.first, unit.count);
  const uint64_t bytes = gradient_bytes(first, count);
  pass_bytes_.host_link_down += bytes;
  std::vector<Use> uses = uses_of_way(owner, Way::kDown);
  if (const uint64_t spill = spilled_bytes(first, count); spill > 0) {
    pass_bytes_.drive_written += spill;
    // The drive's cache takes the first bytes of a step at the rate of its bus.
    const uint64_t fast = std::min(spill, owner.burst_bytes - owner.written_in_burst);
    owner.written_in_burst += fast;
    const double seconds =
        static_cast<double>(fast) / owner.burst_bytes_per_s +
        static_cast<double>(spill - fast) * (owner.amplification / owner.write_bytes_per_s);
    const auto all = static_cast<double>(bytes);
    add_drive(uses, owner, Direction::kWrite, seconds / all, static_cast<double>(spill) / all);
  }
  return task(lane(d, UpdateGraph::kGradients), "gradient " + unit.name,
              {Stage(bytes, uses, owner.latency_s)}, {arrived, before});
}

/// Utilization by kind of resource, that of the busiest; the drives of a group stand for each
/// other.
std::vector<Utilization> StepGraph::utilizations(double from_s, double to_s) const {
  std::vector<Utilization> all;
  if (to_s <= from_s) return all;
  for (uint32_t r = 0; r < graph_.resource_count(); ++r) {
    const double share = graph_.busy_s(r, from_s, to_s) / (to_s - from_s);
    const std::string& name = graph_.resource_name(r);
    const auto known = std::find_if(
        all.begin(), all.end(), [&](const Utilization& entry) { return entry.resource == name; });
    if (known == all.end()) {
      all.push_back({name, share});
    } else {
      known->share = std::max(known->share, share);
    }
  }
  std::erase_if(all, [](const Utilization& entry) { return entry.share < 1e-6; });
  std::stable_sort(all.begin(), all.end(),
                   [](const Utilization& a, const Utilization& b) { return a.share > b.share; });
  return all;
}

std::vector<Span> StepGraph::spans() const {
  static constexpr std::array<const char*, 8> kLanes{
      "GPU", "GPU link down", "GPU link up", "other ranks", "host selection", "host copies", "",
      ""};
  static constexpr std::array<const char*, 4> kQueues{"reads", "update", "weights", "writes"};
  std::vector<Span> all;
  for (const Label& label : labels_) {
    const TaskTimes& when = graph_.times(label.task);
    if (when.end_s <= when.start_s) continue;
    std::string lane_name;
    if (label.lane < kDevices) {
      lane_name = label.lane == kComputing && !on_gpu() ? "cores" : kLanes[label.lane];
    } else {
      const uint32_t owner = (label.lane - kDevices) / 4;
      const char* queue = kQueues[(label.lane - kDevices) % 4];
      lane_name = baseline() ? fmt::format("RAID0 {}", queue)
                             : fmt::format("device {:02} {}", owner, queue);
    }
    all.push_back({std::move(lane_name), label.name, when.start_s, when.end_s});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Span& a, const Span& b) { return a.start_s < b.start_s; });
  return all;
}

}  // namespace smartinf::sim
