#include "smartinf/sim/step.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "smartinf/plan/schedule.h"
#include "smartinf/plan/state_cache.h"
#include "smartinf/sim/event_graph.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using TaskIndex = EventGraph::TaskIndex;

constexpr TaskIndex kNone = EventGraph::kNone;
constexpr double kInstant = 1e-12;  // seconds per "byte" of stages that are given in time
constexpr uint32_t kPrefetchLayers = 2;

/// a * b / c in whole numbers, without overflow.
uint64_t scaled(uint64_t a, uint64_t b, uint64_t c) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b / c);
}

/// Bytes of one optimizer's planes, by element count.
struct StateBytes {
  uint64_t master = 0;
  uint64_t moments = 0;
  uint64_t total() const { return master + moments; }
};

uint64_t moment_planes(Optimizer optimizer) { return optimizer == Optimizer::kAdam ? 2 : 1; }

StateBytes state_bytes(Optimizer optimizer, base::StateFormat format, uint64_t count) {
  using base::PlaneKind;
  StateBytes bytes;
  bytes.master = base::encoded_bytes(base::plane_encoding(format, PlaneKind::kMaster), count);
  bytes.moments = moment_planes(optimizer) *
                  base::encoded_bytes(base::plane_encoding(format, PlaneKind::kMomentum), count);
  return bytes;
}

/// What owns a share of the state: a device, or for the baseline all drives as one RAID0.
struct Owner {
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double burst_bytes_per_s = 0;
  uint64_t burst_bytes = 0;
  double link_bytes_per_s = 0;
  double latency_s = 0;
  double update_bytes_per_s = 0;
  double amplification = 1;
  double peer_efficiency = 1;
  bool streams = false;
  uint64_t elements = 0;
  uint32_t drive = 0, link_up = 0, link_down = 0, processor = 0;  // resources
  uint64_t written_in_burst = 0;
};

/// One fetch-and-compute unit: embedding, a layer, or the head.
struct Unit {
  uint64_t first = 0;  // element in the parameter space
  uint64_t count = 0;
  double forward_s = 0;
  double backward_s = 0;
  std::string name;
};

class StepGraph {
 public:
  StepGraph(const ModelShape& model, const Machine& machine, const StepOptions& options)
      : model_(model), machine_(machine), options_(options), parameters_(model.parameters()) {
    make_units();
    make_resources();
    share_out();
  }

  StepTimes run() {
    TaskIndex forward_end = kNone;
    TaskIndex backward_end = kNone;
    const bool apart = options_.overlap == Overlap::kNothing;
    StepTimes times;
    double forward_alone_s = 0;
    if (apart) {
      forward_end = forward(kNone);
      backward_end = backward(forward_end);
      update(backward_end);
    } else {
      // In the steady state it does not matter where the circle is cut: here before backward, so
      // that the update's end meets the next forward inside the graph.
      StepOptions alone = options_;
      alone.overlap = Overlap::kNothing;
      StepGraph only_forward(model_, machine_, alone);
      only_forward.forward(kNone);
      only_forward.graph_.run();
      forward_alone_s = only_forward.graph_.end_s();
      backward_end = backward(kNone);
      const bool hides_backward =
          options_.overlap == Overlap::kBackward || options_.overlap == Overlap::kBoth;
      const TaskIndex updated = update(hides_backward ? kNone : backward_end);
      const bool hides_forward =
          options_.overlap == Overlap::kForward || options_.overlap == Overlap::kBoth;
      const TaskIndex start = graph_.add_task({}, {backward_end, hides_forward ? kNone : updated});
      forward(start);
    }
    graph_.run();
    times.total_s = graph_.end_s();
    times.parameters = parameters_;
    times.events = graph_.task_count();
    times.bytes = bytes_;
    const double backward_end_s = graph_.times(backward_end).end_s;
    if (apart) {
      times.forward_s = graph_.times(forward_end).end_s;
      times.backward_s = backward_end_s - times.forward_s;
      times.update_s = times.total_s - backward_end_s;
      times.forward = utilizations(0, times.forward_s);
      times.backward = utilizations(times.forward_s, backward_end_s);
      times.update = utilizations(backward_end_s, times.total_s);
    } else {
      times.forward_s = forward_alone_s;
      times.backward_s = backward_end_s;
      times.update_s = std::max(0.0, times.total_s - backward_end_s - forward_alone_s);
      times.backward = utilizations(0, backward_end_s);
      times.update = utilizations(backward_end_s, times.total_s);
      times.forward = times.update;
    }
    const std::vector<Utilization>* longest = &times.update;
    if (times.backward_s > times.update_s) longest = &times.backward;
    if (times.forward_s > std::max(times.backward_s, times.update_s)) longest = &times.forward;
    times.bound_by = longest->empty() ? "nothing" : longest->front().resource;
    if (options_.trace) times.spans = spans();
    return times;
  }

 private:
  bool baseline() const { return options_.method == Method::kBaseline; }
  bool compressed() const { return options_.method == Method::kSmartComp; }
  bool host_selects() const { return sim::host_selects(machine_, options_); }
  bool on_gpu() const { return machine_.gpu.name != "none"; }

  static Stage seconds_on(uint32_t resource, double seconds) {
    return Stage(static_cast<uint64_t>(std::llround(seconds / kInstant)), {{resource, kInstant}});
  }
  static double cost(double bytes_per_s) { return 1.0 / bytes_per_s; }

  uint64_t whole_gradient_bytes(uint64_t count) const {
    return count * machine_.software.gradient_bytes;
  }
  /// Compressed: Top-K of the whole, in (index, value) pairs of 8 bytes, or where this software's
  /// host selects, as packed signs; else whole elements. Cut at running totals, so that pieces add
  /// up to the whole exactly.
  uint64_t gradient_bytes(uint64_t first, uint64_t count) const {
    if (!compressed()) return whole_gradient_bytes(count);
    const auto before = [&](uint64_t elements) {
      const auto all = static_cast<double>(elements);
      if (host_selects()) return static_cast<uint64_t>(std::floor(all * sign_bytes()));
      return 8 * static_cast<uint64_t>(std::floor(all * options_.ratio / 2));
    };
    return before(first + count) - before(first);
  }
  /// Of a parameter: signs of 4 * ratio, each with the Rice code of its gap, or of all in a bit
  /// each (docs/format.md).
  double sign_bytes() const {
    const double share = 4 * options_.ratio;
    return share < 1 ? share * (1 + 1.5 - std::log2(share)) / 8 : 1.0 / 8;
  }

  void make_units() {
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
    // Backward: twice the products, after the layer is computed again from its checkpoint.
    for (uint64_t l = 0; l < model_.layers; ++l) {
      add(fmt::format("layer {}", l), model_.layer_parameters(), layer_s, 3 * layer_s);
    }
    // Logits in 16 bit, their softmax and its gradient in 32 bit.
    const double logits_bytes =
        12.0 * static_cast<double>(model_.tokens()) * static_cast<double>(model_.vocabulary);
    const double head_s =
        model_.head_forward_flops() / products_per_s + logits_bytes / gpu.memory_bytes_per_s;
    add("head", model_.head_parameters(), head_s, 2 * head_s);
  }

  void make_resources() {
    const Gpu& gpu = machine_.gpu;
    gpu_ = graph_.add_resource(on_gpu() ? "GPU" : "cores");
    gpu_up_ = graph_.add_resource("GPU link up");
    gpu_down_ = graph_.add_resource("GPU link down");
    host_up_ = graph_.add_resource("host link up");
    host_down_ = graph_.add_resource("host link down");
    host_copy_ = graph_.add_resource("host copies");
    host_update_ = graph_.add_resource("host update");
    host_select_ = graph_.add_resource("host selection");
    host_ahead_ = graph_.add_resource("host step-ahead");
    // Several GPUs: each fetches all weights and keeps its own batch (data parallel, ZeRO-3).
    // Behind one link their fetches add up.
    sharers_ = gpu.links_shared || gpu.link_is_host_link ? gpu.count : 1;
    for (const DeviceGroup* device : machine_.each_device()) {
      if (baseline() && !owners_.empty()) {
        Owner& raid = owners_.front();
        raid.read_bytes_per_s += device->read_bytes_per_s;
        raid.write_bytes_per_s += device->write_bytes_per_s;
        raid.burst_bytes_per_s += device->read_bytes_per_s;
        raid.burst_bytes += device->burst_bytes;
        raid.link_bytes_per_s += device->link_bytes_per_s;
        continue;
      }
      Owner owner;
      owner.read_bytes_per_s = device->read_bytes_per_s;
      owner.write_bytes_per_s = device->write_bytes_per_s;
      owner.burst_bytes_per_s = device->read_bytes_per_s;
      owner.burst_bytes = device->burst_bytes;
      owner.link_bytes_per_s = device->link_bytes_per_s;
      owner.latency_s = device->latency_s;
      owner.amplification = device->write_amplification;
      owner.peer_efficiency = device->peer_efficiency;
      owner.streams = device->update_streams && options_.method != Method::kSmart;
      owner.update_bytes_per_s =
          compressed() ? device->decompress_bytes_per_s : device->update_bytes_per_s;
      owner.drive = graph_.add_resource("drives", device->mixed_efficiency);
      owner.link_up = graph_.add_resource("device links up");
      owner.link_down = graph_.add_resource("device links down");
      owner.processor = graph_.add_resource("processors");
      owners_.push_back(owner);
    }
  }

  void share_out() {
    // In proportion to the rate at which a device moves a step's state; equal devices get equal
    // shares to within an element.
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
      const uint64_t until =
          d + 1 == owners_.size()
              ? parameters_
              : static_cast<uint64_t>(std::llround(static_cast<double>(parameters_) * sum / total));
      owners_[d].elements = until - given;
      given = until;
    }
  }

  TaskIndex task(uint32_t lane, const std::string& name, std::vector<Stage> stages,
                 std::initializer_list<TaskIndex> after) {
    const TaskIndex index = graph_.add_task(std::move(stages), after);
    if (options_.trace) labels_.push_back({index, lane, name});
    return index;
  }

  Stage fetch_stage(uint64_t count) {
    const uint64_t bytes = 2 * count * machine_.gpu.count;
    bytes_.gpu_link_down += bytes;
    const double own = cost(machine_.gpu.link_bytes_per_s) * sharers_ / machine_.gpu.count;
    if (!machine_.gpu.link_is_host_link) return Stage(bytes, {{gpu_down_, own}});
    return Stage(bytes, {{gpu_down_, own}, {host_down_, cost(machine_.host.link_bytes_per_s)}});
  }

  /// `subgroup_ready`, when not empty, holds back each unit's fetch until its weights are new.
  TaskIndex forward(TaskIndex start) {
    std::vector<TaskIndex> computed;
    if (options_.weights_stay && on_gpu()) {
      start = task(1, "new weights", {fetch_stage(parameters_)}, {start});
    }
    start = earlier_passes(start, "forward", &Unit::forward_s);
    TaskIndex fetched = start;
    for (size_t u = 0; u < units_.size(); ++u) {
      if (on_gpu() && !options_.weights_stay) {
        const TaskIndex room = u >= kPrefetchLayers ? computed[u - kPrefetchLayers] : start;
        fetched =
            task(1, "fetch " + units_[u].name, {fetch_stage(units_[u].count)}, {fetched, room});
        for (const TaskIndex weights : weights_of(units_[u]))
          graph_.add_dependency(fetched, weights);
      }
      const TaskIndex before = computed.empty() ? start : computed.back();
      computed.push_back(task(0, "forward " + units_[u].name,
                              {seconds_on(gpu_, units_[u].forward_s)}, {fetched, before}));
      if (!on_gpu()) {
        for (const TaskIndex weights : weights_of(units_[u])) {
          graph_.add_dependency(computed.back(), weights);
        }
      }
    }
    return computed.back();
  }

  /// Of the micro batches before the last one: computing, one after another.
  TaskIndex earlier_passes(TaskIndex start, const char* phase, double Unit::*seconds) {
    const double passes = options_.accumulation - 1.0;
    if (passes == 0) return start;
    double each_s = 0;
    for (const Unit& unit : units_) each_s += unit.*seconds;
    return task(0, fmt::format("{} of earlier micro batches", phase),
                {seconds_on(gpu_, passes * each_s)}, {start});
  }

  TaskIndex backward(TaskIndex start) {
    start = earlier_passes(start, "backward", &Unit::backward_s);
    const bool together = options_.weights_stay && !options_.release_gradients;
    if (options_.weights_stay && !together && on_gpu() && options_.accumulation > 1) {
      // Their gradients go to the host as well, where they are added up.
      const uint64_t bytes = (options_.accumulation - 1) * whole_gradient_bytes(parameters_);
      bytes_.gpu_link_up += bytes;
      start = task(2, "gradients of earlier micro batches",
                   {Stage(bytes, {{gpu_up_, cost(machine_.gpu.link_bytes_per_s)}}),
                    Stage(bytes, {{host_copy_, cost(machine_.host.copy_bytes_per_s)}})},
                   {start});
    }
    std::vector<TaskIndex> computed;
    std::vector<TaskIndex> last_write(owners_.size(), start);
    TaskIndex fetched = start;
    TaskIndex left = start;  // gradients of the unit before have left the GPU
    gradient_arrived_.assign(units_.size(), {});
    for (size_t u = units_.size(); u-- > 0;) {
      const Unit& unit = units_[u];
      const size_t done = computed.size();
      if (on_gpu() && !options_.weights_stay) {
        const TaskIndex room = done >= kPrefetchLayers ? computed[done - kPrefetchLayers] : start;
        fetched = task(1, "fetch " + unit.name, {fetch_stage(unit.count)}, {fetched, room});
      }
      const TaskIndex before = computed.empty() ? start : computed.back();
      computed.push_back(task(0, "backward " + unit.name, {seconds_on(gpu_, unit.backward_s)},
                              {fetched, before, machine_.software.offload_waits ? left : kNone}));
      if (!together) left = hand_over(u, computed.back(), left, last_write);
    }
    for (size_t u = units_.size(); together && u-- > 0;) {
      left = hand_over(u, computed.back(), left, last_write);
    }
    const TaskIndex end = graph_.add_task({}, {computed.back(), left});
    for (const TaskIndex write : last_write) graph_.add_dependency(end, write);
    return end;
  }

  /// A unit's gradients to the host and to the owners of their state; when they have left the GPU.
  TaskIndex hand_over(size_t u, TaskIndex computed, TaskIndex left,
                      std::vector<TaskIndex>& last_write) {
    left = offload(units_[u], computed, left);
    for (size_t d = 0; d < owners_.size(); ++d) {
      last_write[d] = store_gradient(units_[u], d, left, last_write[d]);
    }
    gradient_arrived_[u] = last_write;
    return left;
  }

  /// Gradients of a unit: compressed on the GPU if it selects, to the host, into a pinned buffer.
  TaskIndex offload(const Unit& unit, TaskIndex computed, TaskIndex before) {
    const Gpu& gpu = machine_.gpu;
    TaskIndex last = computed;
    if (compressed() && !host_selects()) {
      const double bytes = 4.0 * static_cast<double>(unit.count) / gpu.count;
      last = task(0, "select " + unit.name,
                  {seconds_on(gpu_, bytes * gpu.select_passes / gpu.memory_bytes_per_s)}, {last});
    }
    const uint64_t bytes =
        host_selects() ? whole_gradient_bytes(unit.count) : gradient_bytes(unit.first, unit.count);
    if (on_gpu()) {
      // Each GPU sends its share of the sum; sums of several GPUs cross the links once more.
      const uint64_t moved = bytes + 2 * unit.count * (gpu.count - 1);
      bytes_.gpu_link_up += moved;
      const double own = cost(gpu.link_bytes_per_s) * sharers_ / gpu.count;
      Stage up(moved, {{gpu_up_, own}});
      if (gpu.link_is_host_link) {
        up = Stage(moved, {{gpu_up_, own}, {host_up_, cost(machine_.host.link_bytes_per_s)}});
      }
      last = task(2, "gradient " + unit.name, {up}, {last, before});
    }
    return task(5, "copy " + unit.name,
                {Stage(bytes, {{host_copy_, cost(machine_.host.copy_bytes_per_s)}})},
                {last, before});
  }

  TaskIndex store_gradient(const Unit& unit, size_t d, TaskIndex arrived, TaskIndex before) {
    Owner& owner = owners_[d];
    const auto [first, count] = local_range(owner, unit.first, unit.count);
    const uint64_t bytes = gradient_bytes(first, count);
    const bool spilled = machine_.software.gradient_spilled;
    if (host_selects()) return arrived;  // from where they are compressed when all are there
    if (baseline() && !spilled) return arrived;  // they are where the update wants them
    bytes_.host_link_down += bytes;
    const double link = cost(owner.link_bytes_per_s);
    const double host = cost(machine_.host.link_bytes_per_s);
    if (!spilled) {
      return task(lane(d, 0), "gradient " + unit.name,
                  {Stage(bytes, {{owner.link_down, link}, {host_down_, host}}, owner.latency_s)},
                  {arrived, before});
    }
    bytes_.drive_written += bytes;
    // The drive's cache takes the first bytes of a step at the rate of its bus.
    const uint64_t fast = std::min(bytes, owner.burst_bytes - owner.written_in_burst);
    owner.written_in_burst += fast;
    const double seconds = static_cast<double>(fast) / owner.burst_bytes_per_s +
                           static_cast<double>(bytes - fast) * write_cost(owner);
    const double per_byte = bytes > 0 ? seconds / static_cast<double>(bytes) : 0;
    return task(lane(d, 0), "gradient " + unit.name,
                {Stage(bytes,
                       {{owner.drive, per_byte, Direction::kWrite},
                        {owner.link_down, link},
                        {host_down_, host}},
                       owner.latency_s)},
                {arrived, before});
  }

  static double write_cost(const Owner& owner) {
    return owner.amplification / owner.write_bytes_per_s;
  }

  /// The part of [first, first + count) of the space that an owner holds, in its own elements.
  /// Every owner holds the same fraction of every range, so that all have work from the first layer
  /// on.
  std::pair<uint64_t, uint64_t> local_range(const Owner& owner, uint64_t first,
                                            uint64_t count) const {
    const uint64_t begin = scaled(first, owner.elements, parameters_);
    return {begin, scaled(first + count, owner.elements, parameters_) - begin};
  }

  /// All tasks of the update. after: kNone lets subgroups start as their gradients arrive.
  TaskIndex update(TaskIndex after) {
    const Software& software = machine_.software;
    const uint64_t wanted =
        options_.subgroup_elements != 0 ? options_.subgroup_elements : software.subgroup_elements;
    const bool early = after == kNone;
    const TaskIndex end = graph_.add_task({}, {after});
    weights_ready_.assign(owners_.size(), {});
    // Messages are all on their devices before the first subgroup is read (engine).
    const TaskIndex begin = host_selects() ? send_all(after, wanted) : after;
    const std::vector<uint64_t> cached = cached_subgroups(wanted);
    for (size_t d = 0; d < owners_.size(); ++d) {
      const Owner& owner = owners_[d];
      if (owner.elements == 0) continue;
      plan::ScheduleInput input;
      input.variant = plan::ScheduleVariant::kNaive;
      if (options_.method == Method::kSmartOver || options_.method == Method::kSmartComp) {
        input.variant = early ? plan::ScheduleVariant::kEarly : software.overlapped;
      }
      input.subgroups = static_cast<uint32_t>((owner.elements + wanted - 1) / wanted);
      input.slots = options_.slots != 0 ? options_.slots : software.slots;
      input.gradient_spilled = software.gradient_spilled && !host_selects();
      const uint64_t each = (owner.elements + input.subgroups - 1) / input.subgroups;
      subgroup_elements_ = each;
      weights_ready_[d].assign(input.subgroups, kNone);

      const std::vector<plan::Task> schedule = plan::make_schedule(input);
      std::vector<TaskIndex> made(schedule.size(), kNone);
      std::array<TaskIndex, 4> last_in_lane{kNone, kNone, kNone, kNone};
      for (size_t i = 0; i < schedule.size(); ++i) {
        const plan::Task& planned = schedule[i];
        const uint64_t first = std::min(planned.subgroup * each, owner.elements);
        const uint64_t count = std::min(each, owner.elements - first);
        const size_t queue = queue_of(planned.kind);
        const bool in_memory = planned.kind == plan::TaskKind::kReadState &&
                               plan::stays_in_memory(planned.subgroup, cached[d], input.subgroups);
        made[i] = task(lane(d, queue), std::string(plan::task_kind_name(planned.kind)),
                       in_memory ? stages_in_memory(owner, first, count)
                                 : stages_of(planned.kind, owner, first, count),
                       {begin, last_in_lane[queue]});
        last_in_lane[queue] = made[i];
        for (const uint32_t before : planned.after) {
          if (before != plan::Task::kNone) graph_.add_dependency(made[i], made[before]);
        }
        if (early && planned.kind == plan::TaskKind::kUpdate) wait_for_gradient(made[i], d, first);
        if (early && planned.kind == plan::TaskKind::kReadGradient) {
          wait_for_gradient(made[i], d, first);
        }
        if (planned.kind == plan::TaskKind::kWriteWeights) {
          weights_ready_[d][planned.subgroup] = made[i];
        }
        graph_.add_dependency(end, made[i]);
      }
    }
    return end;
  }

  /// What the host selects and packs goes down, subgroup by subgroup, once all gradients are there
  /// (after, or kNone): their norm and their squares are those of all. Every so many steps what is
  /// held back goes along, here a share of it in each. The end of it.
  TaskIndex send_all(TaskIndex after, uint64_t subgroup) {
    const TaskIndex end = graph_.add_task({}, {after});
    for (size_t d = 0; d < owners_.size(); ++d) {
      const Owner& owner = owners_[d];
      // The last unit whose gradients arrive is the first.
      const TaskIndex arrived = after == kNone ? gradient_arrived_.front()[d] : after;
      TaskIndex selected = kNone;
      TaskIndex sent = kNone;
      for (uint64_t first = 0; first < owner.elements; first += subgroup) {
        const uint64_t count = std::min(subgroup, owner.elements - first);
        const uint64_t bytes = gradient_bytes(first, count) + residual_bytes(count);
        bytes_.host_link_down += bytes;
        selected = task(4, "select",
                        {Stage(count, {{host_select_, cost(machine_.host.select_params_per_s)}})},
                        {arrived, selected});
        sent = task(lane(d, 0), "gradient",
                    {Stage(bytes,
                           {{owner.link_down, cost(owner.link_bytes_per_s)},
                            {host_down_, cost(machine_.host.link_bytes_per_s)}},
                           owner.latency_s)},
                    {selected, sent});
      }
      graph_.add_dependency(end, sent);
    }
    return end;
  }
  uint64_t residual_bytes(uint64_t count) const {
    return host_selects() && options_.residual_every > 0 ? 2 * count / options_.residual_every : 0;
  }

  /// Of each owner, as the engine shares out its cache.
  std::vector<uint64_t> cached_subgroups(uint64_t wanted) const {
    std::vector<plan::CachedDevice> devices;
    for (const Owner& owner : owners_) {
      const uint64_t subgroups = (owner.elements + wanted - 1) / wanted;
      const uint64_t each = subgroups > 0 ? (owner.elements + subgroups - 1) / subgroups : 0;
      devices.push_back({subgroups, state_bytes(options_.optimizer, options_.format, each).total(),
                         1 / (1 / owner.read_bytes_per_s + write_cost(owner))});
    }
    return plan::share_state_cache(devices, options_.state_cache_bytes, false);
  }
  /// Of state that need not be read: where the processor works along with reading, its work stays.
  std::vector<Stage> stages_in_memory(const Owner& owner, uint64_t first, uint64_t count) const {
    if (baseline() || !owner.streams) return {};
    const uint64_t in = state_bytes(options_.optimizer, options_.format, count).total() +
                        gradient_bytes(first, count);
    return {Stage(in, {{owner.processor, cost(owner.update_bytes_per_s)}})};
  }

  /// Reads, processor, weights and writes of a device each go in the schedule's order.
  static size_t queue_of(plan::TaskKind kind) {
    switch (kind) {
      case plan::TaskKind::kReadGradient:
      case plan::TaskKind::kReadState:
        return 0;
      case plan::TaskKind::kUpdate:
        return 1;
      case plan::TaskKind::kWriteWeights:
        return 2;
      case plan::TaskKind::kWriteMaster:
      case plan::TaskKind::kWriteMoments:
        return 3;
    }
    return 0;
  }
  static uint32_t lane(size_t owner, size_t queue) {
    return static_cast<uint32_t>(8 + 4 * owner + queue);
  }

  /// Local element `first` is the subgroup's start; backward fills the space from its end, so the
  /// subgroup is complete when the unit that holds its start is.
  void wait_for_gradient(TaskIndex waiting, size_t d, uint64_t first) {
    const uint64_t element = scaled(first, parameters_, owners_[d].elements);
    size_t u = 0;
    while (u + 1 < units_.size() && units_[u + 1].first <= element) ++u;
    graph_.add_dependency(waiting, gradient_arrived_[u][d]);
  }

  /// What a unit's forward needs when the update ran in this graph.
  std::vector<TaskIndex> weights_of(const Unit& unit) const {
    std::vector<TaskIndex> needed;
    for (size_t d = 0; d < weights_ready_.size(); ++d) {
      const auto [first, count] = local_range(owners_[d], unit.first, unit.count);
      if (weights_ready_[d].empty()) continue;
      const uint64_t each =
          (owners_[d].elements + weights_ready_[d].size() - 1) / weights_ready_[d].size();
      const uint64_t last = count > 0 ? first + count - 1 : first;
      for (uint64_t s = first / each; s <= std::min(last / each, weights_ready_[d].size() - 1);
           ++s) {
        needed.push_back(weights_ready_[d][s]);
      }
    }
    return needed;
  }

  std::vector<Stage> stages_of(plan::TaskKind kind, const Owner& owner, uint64_t first,
                               uint64_t count) {
    const StateBytes state = state_bytes(options_.optimizer, options_.format, count);
    const double peer = baseline() ? 1 : 1 / owner.peer_efficiency;
    const double read = peer * cost(owner.read_bytes_per_s);
    const double link = cost(owner.link_bytes_per_s);
    const double host = cost(machine_.host.link_bytes_per_s);
    const auto from_drive = [&](uint64_t bytes) -> std::vector<Stage> {
      bytes_.drive_read += bytes;
      if (!baseline() && owner.streams && kind == plan::TaskKind::kReadState) {
        // The processor's whole work on the subgroup goes along with reading its state.
        const double along = static_cast<double>(state.total() + gradient_bytes(first, count)) /
                             static_cast<double>(bytes) * cost(owner.update_bytes_per_s);
        return {Stage(bytes, {{owner.drive, read, Direction::kRead}, {owner.processor, along}})};
      }
      if (!baseline()) return {Stage(bytes, {{owner.drive, read, Direction::kRead}})};
      bytes_.host_link_up += bytes;
      return {Stage(
          bytes, {{owner.drive, read, Direction::kRead}, {owner.link_up, link}, {host_up_, host}})};
    };
    const auto to_drive = [&](uint64_t bytes) -> std::vector<Stage> {
      bytes_.drive_written += bytes;
      const double write = peer * write_cost(owner);
      if (!baseline()) return {Stage(bytes, {{owner.drive, write, Direction::kWrite}})};
      bytes_.host_link_down += bytes;
      return {Stage(
          bytes,
          {{owner.drive, write, Direction::kWrite}, {owner.link_down, link}, {host_down_, host}})};
    };
    switch (kind) {
      case plan::TaskKind::kReadGradient:
        return from_drive(gradient_bytes(first, count));
      case plan::TaskKind::kReadState:
        return from_drive(state.total());
      case plan::TaskKind::kUpdate: {
        const uint64_t in = state.total() + gradient_bytes(first, count);
        if (baseline()) {
          return {
              Stage(in + state.total(), {{host_update_, cost(machine_.host.update_bytes_per_s)}})};
        }
        if (owner.streams) return {};
        return {Stage(in, {{owner.processor, cost(owner.update_bytes_per_s)}})};
      }
      case plan::TaskKind::kWriteWeights: {
        if (baseline()) return {};  // the host has them
        const uint64_t bytes = count * machine_.software.weight_bytes;
        bytes_.host_link_up += bytes;
        std::vector<Stage> stages{
            Stage(bytes, {{owner.link_up, link}, {host_up_, host}}, owner.latency_s),
            Stage(bytes, {{host_copy_, cost(machine_.host.copy_bytes_per_s)}})};
        if (host_selects() && options_.optimizer == Optimizer::kAdam &&
            machine_.host.step_ahead_params_per_s > 0) {
          stages.push_back(
              Stage(count, {{host_ahead_, cost(machine_.host.step_ahead_params_per_s)}}));
        }
        return stages;
      }
      case plan::TaskKind::kWriteMaster:
        return to_drive(state.master);
      case plan::TaskKind::kWriteMoments:
        return to_drive(state.moments + residual_bytes(count));
    }
    return {};
  }

  /// By kind of resource, that of the busiest; the drives of a group stand for each other.
  std::vector<Utilization> utilizations(double from_s, double to_s) const {
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

  std::vector<Span> spans() const {
    static constexpr std::array<const char*, 8> kLanes{
        "GPU", "GPU link down", "GPU link up", "", "host selection", "host copies", "", ""};
    static constexpr std::array<const char*, 4> kQueues{"reads", "update", "weights", "writes"};
    std::vector<Span> all;
    for (const Label& label : labels_) {
      const TaskTimes& when = graph_.times(label.task);
      if (when.end_s <= when.start_s) continue;
      std::string lane_name;
      if (label.lane < 8) {
        lane_name = label.lane == 0 && !on_gpu() ? "cores" : kLanes[label.lane];
      } else {
        const uint32_t owner = (label.lane - 8) / 4;
        const char* queue = kQueues[(label.lane - 8) % 4];
        lane_name = baseline() ? fmt::format("RAID0 {}", queue)
                               : fmt::format("device {:02} {}", owner, queue);
      }
      all.push_back({std::move(lane_name), label.name, when.start_s, when.end_s});
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const Span& a, const Span& b) { return a.start_s < b.start_s; });
    return all;
  }

  struct Label {
    TaskIndex task = 0;
    uint32_t lane = 0;
    std::string name;
  };

  const ModelShape& model_;
  const Machine& machine_;
  const StepOptions& options_;
  uint64_t parameters_;
  EventGraph graph_;
  std::vector<Unit> units_;
  std::vector<Owner> owners_;
  uint32_t gpu_ = 0, gpu_up_ = 0, gpu_down_ = 0;
  uint32_t host_up_ = 0, host_down_ = 0, host_copy_ = 0, host_update_ = 0;
  uint32_t host_select_ = 0, host_ahead_ = 0;
  double sharers_ = 1;
  uint64_t subgroup_elements_ = 0;
  std::vector<std::vector<TaskIndex>> gradient_arrived_;  // by unit, by owner
  std::vector<std::vector<TaskIndex>> weights_ready_;     // by owner, by subgroup
  std::vector<Label> labels_;
  StepBytes bytes_;
};

}  // namespace

std::string_view method_name(Method method) {
  switch (method) {
    case Method::kBaseline:
      return "baseline";
    case Method::kSmart:
      return "su";
    case Method::kSmartOver:
      return "su+o";
    case Method::kSmartComp:
      return "su+o+c";
  }
  return "?";
}

std::vector<std::string_view> method_names() { return {"baseline", "su", "su+o", "su+o+c"}; }

std::optional<Method> method_from_name(std::string_view name) {
  for (const auto method :
       {Method::kBaseline, Method::kSmart, Method::kSmartOver, Method::kSmartComp}) {
    if (method_name(method) == name) return method;
  }
  return std::nullopt;
}

std::string_view optimizer_name(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::kAdam:
      return "adam";
    case Optimizer::kSgdMomentum:
      return "sgd-momentum";
    case Optimizer::kAdagrad:
      return "adagrad";
  }
  return "?";
}

std::vector<std::string_view> optimizer_names() { return {"adam", "sgd-momentum", "adagrad"}; }

std::optional<Optimizer> optimizer_from_name(std::string_view name) {
  if (name == "adamw") return Optimizer::kAdam;
  if (name == "sgd") return Optimizer::kSgdMomentum;
  for (const auto optimizer : {Optimizer::kAdam, Optimizer::kSgdMomentum, Optimizer::kAdagrad}) {
    if (optimizer_name(optimizer) == name) return optimizer;
  }
  return std::nullopt;
}

std::string_view overlap_name(Overlap overlap) {
  switch (overlap) {
    case Overlap::kNothing:
      return "none";
    case Overlap::kForward:
      return "forward";
    case Overlap::kBackward:
      return "backward";
    case Overlap::kBoth:
      return "both";
  }
  return "?";
}

std::vector<std::string_view> overlap_names() { return {"none", "forward", "backward", "both"}; }

std::optional<Overlap> overlap_from_name(std::string_view name) {
  for (const auto overlap :
       {Overlap::kNothing, Overlap::kForward, Overlap::kBackward, Overlap::kBoth}) {
    if (overlap_name(overlap) == name) return overlap;
  }
  return std::nullopt;
}

double state_bytes_per_parameter(Optimizer optimizer, base::StateFormat format) {
  constexpr uint64_t kMany = uint64_t{1} << 24;
  return static_cast<double>(state_bytes(optimizer, format, kMany).total()) /
         static_cast<double>(kMany);
}

Result<StepTimes> simulate_step(const ModelShape& model, const Machine& machine,
                                const StepOptions& options) {
  SI_RETURN_IF_ERROR(check_model(model));
  SI_RETURN_IF_ERROR(check_machine(machine));
  const auto invalid = [](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  if (!(options.ratio > 0 && options.ratio <= 1)) {
    return invalid(fmt::format("the compression ratio is {}", options.ratio),
                   "It is compressed bytes over f32 bytes: above 0 and at most 1.");
  }
  const uint64_t wanted = options.subgroup_elements != 0 ? options.subgroup_elements
                                                         : machine.software.subgroup_elements;
  if (model.parameters() / wanted > 1'000'000) {
    return invalid(
        fmt::format("subgroups of {} elements cut the model into more than a million", wanted),
        "Give larger subgroups.");
  }
  if (options.accumulation == 0 || options.accumulation > 1'000'000) {
    return invalid(fmt::format("{} micro batches in a step", options.accumulation),
                   "Give a number from 1 to a million.");
  }
  if (options.slots > 1024 || machine.software.slots > 1024) {
    return invalid("more than 1024 slots", "Give fewer.");
  }
  if (options.method != Method::kBaseline) {
    for (const DeviceGroup& device : machine.devices) {
      const bool comp = options.method == Method::kSmartComp;
      if ((comp ? device.decompress_bytes_per_s : device.update_bytes_per_s) <= 0) {
        return Status(ErrorCode::kUnsupported,
                      fmt::format("device '{}' has no processor to {}", device.name,
                                  comp ? "decompress and update with" : "update with"),
                      fmt::format("Set device.{}_bytes_per_s in the machine file, or use --method "
                                  "baseline.",
                                  comp ? "decompress" : "update"));
      }
    }
  }
  return StepGraph(model, machine, options).run();
}

}  // namespace smartinf::sim
