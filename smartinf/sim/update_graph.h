// The update of a step as a graph of tasks: the one builder behind `simulate` and `plan`, which
// surround it with forward and backward, and behind the benches, which hold it against the engine.
// The order of the work is plan::make_schedule's, as in the transfer handler.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string_view>
#include <tuple>
#include <vector>

#include "smartinf/plan/schedule.h"
#include "smartinf/sim/event_graph.h"

namespace smartinf::sim {

/// How a transfer passes through several links and drives.
enum class LinkLaw : uint8_t {
  kTogether,  // through all at once, at the rate of the slowest: what is wired in a row
  kBooked,    // each books its own time, and the last one ends the transfer: csd::Link
};

/// Load of one subgroup, in bytes where nothing else is said.
struct SubgroupLoad {
  uint64_t elements = 0;
  uint64_t gradient = 0;  // on the host link
  uint64_t spilled = 0;   // of it, read from the drive
  uint64_t master = 0;
  uint64_t moments = 0;
  uint64_t residual = 0;  // goes down with a message and is written with the moments
  uint64_t weights = 0;
  uint64_t work = 0;  // of the processor, in the unit of its rate
};

/// The way of new weights: resources that they pass one after another.
struct WeightsPass {
  std::vector<Use> uses;
  double latency_s = 0;
  bool per_element = false;  // instead of per byte
};

/// Owner of a share of the state: a device, or the host with all drives behind it. A Use whose
/// seconds_per_byte are 0 takes no time.
struct UpdateDevice {
  std::vector<SubgroupLoad> subgroups;  // in the order of the parameter space
  std::vector<Use> read;                // from the drive to the processor
  std::vector<Use> write;
  std::vector<Use> work;             // the processor
  std::vector<Use> down;             // messages of compressed gradients
  std::vector<WeightsPass> weights;  // empty: the host has them
  double down_latency_s = 0;
  double bandwidth = 1;      // relative, for the state cache
  bool host_update = false;  // state that is read and written crosses the host link
  bool streams = false;      // the processor works on state while that is read
};

/// One pass over subgroups of every device.
struct UpdateRun {
  plan::ScheduleVariant schedule = plan::ScheduleVariant::kOverlapped;
  uint32_t slots = 1;
  bool gradient_spilled = false;
  /// A round takes one subgroup of each device, and begins when all new weights of the last are up.
  bool rounds = false;
  /// Subgroups of each device that are updated, in the order in which they are taken.
  std::vector<std::vector<uint32_t>> order;
  std::vector<EventGraph::TaskIndex> start;  // by device: nothing of it begins before
  /// Tasks by device and subgroup: nothing of it begins before; kNone: it need not wait. Empty: as
  /// kNone.
  std::vector<std::vector<EventGraph::TaskIndex>> completed;
  /// Tasks by device, from which on the state may be read that finds a slot free at once. Empty:
  /// `start`.
  std::vector<EventGraph::TaskIndex> prefetch;
};

class UpdateGraph {
 public:
  using TaskIndex = EventGraph::TaskIndex;
  /// Queues of a device: what one of them gives to the device's resources passes in that order.
  enum Queue : uint32_t { kReads, kProcessor, kWeights, kWrites, kGradients, kSelection };
  using OnTask =
      std::function<void(TaskIndex, uint32_t device, Queue queue, std::string_view name)>;

  struct Bytes {
    uint64_t drive_read = 0;
    uint64_t drive_written = 0;
    uint64_t host_link_up = 0;
    uint64_t host_link_down = 0;
  };

  /// on_task hears of every task that it adds; may be empty.
  UpdateGraph(EventGraph& graph, LinkLaw law, std::vector<UpdateDevice> devices, OnTask on_task);

  /// State that stays in memory, of all devices together; writes_too: and is not written in a step.
  void cache_state(uint64_t budget_bytes, bool writes_too);

  /// Stages one after another by the law of links, behind what the queue was given before.
  TaskIndex pass(uint32_t device, Queue queue, std::string_view name, std::span<const Stage> stages,
                 std::span<const TaskIndex> after);

  /// Messages of compressed gradients: made by these resources in turn, each two ahead of the link,
  /// once `given` is done. The end of the last.
  TaskIndex send_selected(std::span<const uint32_t> threads, double seconds_per_element,
                          TaskIndex given);

  /// The end of it, by device. A subgroup may be in several runs: it is updated again.
  std::vector<TaskIndex> add(const UpdateRun& run);

  const std::vector<UpdateDevice>& devices() const { return devices_; }
  /// Tasks by device and subgroup, of the last run that it was in: when it has a slot and (of runs
  /// with `completed`) a gradient, and when its new weights are up.
  const std::vector<std::vector<TaskIndex>>& begun() const { return begun_; }
  const std::vector<std::vector<TaskIndex>>& weights_up() const { return weights_up_; }
  /// Moved by what was added so far.
  const Bytes& bytes() const { return bytes_; }

 private:
  TaskIndex booked(uint32_t device, Queue queue, std::string_view name,
                   std::span<const Stage> stages, std::span<const TaskIndex> after);
  TaskIndex round_end(size_t round, std::vector<TaskIndex>& ends);
  TaskIndex add_task(const plan::Task& task, uint32_t device, std::span<const TaskIndex> after);
  std::vector<Stage> stages_of(plan::TaskKind kind, const UpdateDevice& device,
                               const SubgroupLoad& load, bool cached);
  Stage read_stage(const UpdateDevice& device, uint64_t bytes);
  Stage write_stage(const UpdateDevice& device, uint64_t bytes);
  bool cached(uint32_t device, uint32_t subgroup) const;

  EventGraph& graph_;
  LinkLaw law_;
  std::vector<UpdateDevice> devices_;
  OnTask on_task_;
  std::vector<uint64_t> cached_;  // subgroups of each device
  bool cached_writes_wait_ = false;
  std::vector<std::vector<TaskIndex>> begun_;
  std::vector<std::vector<TaskIndex>> weights_up_;
  std::map<std::tuple<uint32_t, Queue, uint32_t>, TaskIndex> last_;  // by device, queue, resource
  Bytes bytes_;
};

}  // namespace smartinf::sim
