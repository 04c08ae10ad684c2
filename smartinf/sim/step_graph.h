// A step as a graph of tasks: forward and backward around the update (update_graph.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "smartinf/compress/matrix_layout.h"
#include "smartinf/sim/event_graph.h"
#include "smartinf/sim/one_rank.h"
#include "smartinf/sim/step.h"
#include "smartinf/sim/update_graph.h"

namespace smartinf::sim {

/// Seconds a byte.
inline double cost(double bytes_per_s) { return 1.0 / bytes_per_s; }

/// Subgroups by device.
using DeviceSubgroups = std::vector<std::vector<uint32_t>>;

/// Runs once: one of the four. The arguments outlive it and have been checked.
class StepGraph {
 public:
  /// exchange: of one of several ranks (one_rank()), whose machine and options the others are.
  StepGraph(const ModelShape& model, const Machine& machine, const StepOptions& options,
            const Exchange& exchange);

  /// Forward, backward and update one after another.
  StepTimes run_apart();
  /// Numbers that an overlapped step needs to know of its parts: subgroups that an update beside
  /// backward has begun when that ends; the forward pass with nothing beside it. committed_s, here
  /// and below: how long after backward's beginning the commit of the step before ends.
  DeviceSubgroups begun_in_backward(double committed_s);
  /// overlap: of the step that it is part of. A late update gives weights without a read.
  double forward_alone_s(plan::Overlap overlap);
  /// In the steady state it does not matter where the circle is cut: here before backward, so that
  /// the update's end meets the next forward inside the graph.
  StepTimes run_overlapped(const DeviceSubgroups& begun, double forward_alone_s,
                           double committed_s);
  /// All weights from the devices, alone.
  double read_alone_s();
  /// After run_overlapped(): how long after the step's end its own commit ends.
  double commit_after_step_s() const;
  /// Of a micro batch, alone.
  std::pair<double, double> forward_and_backward_s() const;
  double sync_s() const;
  /// All weights to the GPU, alone; 0 without one.
  double fetch_alone_s() const;

 private:
  using TaskIndex = EventGraph::TaskIndex;
  static constexpr TaskIndex kNone = EventGraph::kNone;

  /// One fetch-and-compute unit: embedding, a layer, or the head.
  struct Unit {
    uint64_t first = 0;  // element in the parameter space
    uint64_t count = 0;
    double forward_s = 0;
    double backward_s = 0;
    std::string name;
  };

  /// Owner of a share of the state: a device, or for the baseline all drives as one RAID0.
  struct Owner {
    double read_bytes_per_s = 0;
    double write_bytes_per_s = 0;
    double burst_bytes_per_s = 0;
    uint64_t burst_bytes = 0;
    double link_bytes_per_s = 0;
    double shared_bytes_per_s = 0;  // of the host's link or the network, which all pass
    double cores_bytes_per_s = 0;   // of the cores that compute; 0: they have no part in it
    double drive_cores_s = 0;       // of theirs, for a byte that the drive moves
    double sync_s_per_byte = 0;     // of what the step has written
    double latency_s = 0;
    double update_bytes_per_s = 0;
    bool pipeline = false;
    double element_s = 0;  // of the processor, where it is counted in elements
    double pairs_per_s = 0;
    double weights_bytes_per_s = 0;
    uint32_t weights = 0;
    double amplification = 1;
    bool streams = false;
    bool on_host_cores = false;
    uint64_t elements = 0;
    std::vector<uint64_t> subgroup_ends;  // in its own elements
    // Resources.
    uint32_t drive = 0, link_up = 0, link_down = 0, processor = 0, shared_up = 0, shared_down = 0;
    uint64_t written_in_burst = 0;
  };

  /// Units one after another, where weights are streamed.
  struct Walk {
    TaskIndex start = kNone;
    std::vector<TaskIndex> computed;  // in the order of the walk
    TaskIndex read = kNone;           // the last unit's weights from the devices
    TaskIndex fetched = kNone;        // and to the GPU
    TaskIndex inputs_read = kNone;
    TaskIndex inputs_left = kNone;

    /// When there is room for what is to come, with so many places.
    TaskIndex room(size_t places) const {
      return computed.size() < places ? start : computed[computed.size() - places];
    }
  };

  // Lanes of a trace; those of devices follow, four each.
  enum Lane : uint32_t {
    kComputing,
    kFetching,
    kLeaving,
    kExchanging,
    kSelecting,
    kCopying,
    kDevices = 8
  };
  static uint32_t lane(size_t device, UpdateGraph::Queue queue);

  struct Label {
    TaskIndex task = 0;
    uint32_t lane = 0;
    std::string name;
  };

  bool baseline() const { return options_.method == Method::kBaseline; }
  bool compressed() const { return options_.method == Method::kSmartComp; }
  bool host_selects() const { return sim::host_selects(machine_, options_); }
  bool on_gpu() const { return machine_.gpu.name != "none"; }
  bool papers_stack() const {
    return machine_.software.overlapped == plan::ScheduleVariant::kPaper;
  }
  bool overlapped() const { return options_.overlap != plan::Overlap::kNone; }
  bool several() const { return exchange_.ranks > 1; }
  bool spilled() const { return spilled_gradient_bytes(machine_, options_, elements_here_) > 0; }
  uint32_t slots() const { return options_.slots != 0 ? options_.slots : machine_.software.slots; }
  /// Backward stands still while a layer's gradients leave.
  bool offload_waits() const {
    return machine_.software.offload_waits || streamed_ != nullptr ||
           (resident_ != nullptr && resident_->gradients == GradientsLeave::kAsCompleted);
  }
  Stage computing(double seconds) const;
  uint64_t whole_gradient_bytes(uint64_t count) const {
    return count * machine_.software.gradient_bytes;
  }
  uint64_t gradient_bytes(uint64_t first, uint64_t count) const;
  uint64_t residual_bytes(uint64_t count) const {
    return host_selects() && options_.residual_every > 0 ? 2 * count / options_.residual_every : 0;
  }

  void make_units();
  void make_resources();
  void make_owners();
  void share_out();
  void deal_subgroups(uint64_t wanted);
  std::vector<UpdateDevice> make_devices() const;
  bool sends_factors() const;
  UpdateDevice make_device(const Owner& owner) const;
  enum class Way : uint8_t { kUp, kDown };
  std::vector<Use> uses_of_way(const Owner& owner, Way way) const;
  void add_drive(std::vector<Use>& uses, const Owner& owner, Direction direction,
                 double seconds_per_byte, double share = 1) const;
  uint64_t pipeline_work(const Owner& owner, uint64_t count) const;
  double pipeline_element_s(const FpgaPipeline& kernel) const;
  SubgroupLoad make_load(const Owner& owner, uint64_t first, uint64_t count) const;
  uint64_t spilled_bytes(uint64_t first, uint64_t count) const;
  void commit_before(double committed_s);
  /// Weights come from the devices when the step is committed, and no update hands them out.
  bool streams_committed() const {
    return streamed_ != nullptr && options_.overlap != plan::Overlap::kLate &&
           streamed_->placement.in_memory < streamed_->units.size();
  }

  TaskIndex task(uint32_t lane, const std::string& name, std::vector<Stage> stages,
                 std::initializer_list<TaskIndex> after);
  TaskIndex forward(TaskIndex start);
  TaskIndex backward(TaskIndex start);
  TaskIndex stream_forward(TaskIndex start);
  TaskIndex stream_backward(TaskIndex start);
  TaskIndex bring(size_t unit, Walk& walk, bool read);
  TaskIndex read_weights(const Unit& unit, TaskIndex before, TaskIndex room);
  TaskIndex put_inputs(size_t unit, Walk& walk);
  TaskIndex get_inputs(size_t unit, Walk& walk);
  uint64_t spooled_inputs(size_t unit) const;
  TaskIndex spool(size_t unit, bool write, TaskIndex before, TaskIndex after);
  uint64_t elements_in_memory() const;
  uint64_t weights_out(const Owner& owner, uint64_t first, uint64_t count) const;
  std::vector<TaskIndex> asked_of(size_t d) const;
  TaskIndex earlier_passes(TaskIndex start, const char* phase, double Unit::*seconds);
  Stage fetch_stage(uint64_t count);
  Stage exchange_stage(uint64_t sent, uint64_t received);
  TaskIndex exchange_gradient(size_t unit, TaskIndex left);
  TaskIndex buckets_free(TaskIndex left) const;
  Stage weights_stage(uint64_t bytes);
  void broadcast_weights();
  TaskIndex hand_over(size_t unit, TaskIndex computed, TaskIndex left,
                      std::vector<TaskIndex>& last_write);
  TaskIndex offload(const Unit& unit, TaskIndex computed, TaskIndex before);
  TaskIndex store_gradient(const Unit& unit, size_t d, TaskIndex arrived, TaskIndex before);
  std::pair<uint64_t, uint64_t> local_range(const Owner& owner, uint64_t first,
                                            uint64_t count) const;

  UpdateRun update_run() const;
  void update(TaskIndex after, DeviceSubgroups order, const std::vector<TaskIndex>& begun);
  std::vector<TaskIndex> update_beside_backward(DeviceSubgroups order);
  std::vector<TaskIndex> gradients_completed(size_t d) const;
  std::vector<size_t> units_of_subgroups(size_t d) const;
  DeviceSubgroups all_subgroups() const;
  std::vector<TaskIndex> weights_of(const Unit& unit) const;

  double end_of_backward_s(TaskIndex backward_end) const;
  void finish(StepTimes& times) const;
  std::vector<Utilization> utilizations(double from_s, double to_s) const;
  std::vector<Span> spans() const;

  const ModelShape& model_;
  const Machine& machine_;
  const StepOptions& options_;
  const Exchange& exchange_;
  const ResidentStep* resident_;  // null: it is another kind, likewise
  const StreamedStep* streamed_;
  uint64_t parameters_;
  uint64_t elements_here_ = 0;  // of all owners
  EventGraph graph_;
  std::vector<Unit> units_;
  std::vector<Owner> owners_;
  std::vector<compress::MatrixLayout> matrices_;  // where messages have factors of them
  uint32_t gpu_ = 0, gpu_up_ = 0, gpu_down_ = 0;
  uint32_t host_up_ = 0, host_down_ = 0, host_copy_ = 0, host_weights_ = 0, host_update_ = 0;
  uint32_t host_select_ = 0, host_ahead_ = 0;
  uint32_t network_out_ = 0, network_in_ = 0, near_ = 0;  // to other ranks; remote devices', too
  double sharers_ = 1;
  double compute_unit_s_ = 0;  // of computing, for what a "byte" of it stands
  std::vector<std::vector<TaskIndex>> gradient_arrived_;  // by unit, by owner
  bool weights_given_ = false;                            // without a read in forward
  std::vector<TaskIndex> weights_asked_;                  // by unit: forward has room for them
  TaskIndex committed_ = kNone;         // the end of the last step's commit; kNone: it has ended
  TaskIndex last_computed_ = kNone;     // of backward
  std::vector<TaskIndex> update_ends_;  // by owner
  /// Exchange between several ranks: gradients of units on their way, in backward's order, with
  /// what is sent of them; by owner and subgroup, when all ranks have its new weights.
  std::vector<std::pair<TaskIndex, uint64_t>> exchanged_;
  std::vector<std::vector<TaskIndex>> weights_everywhere_;
  std::vector<Label> labels_;
  StepBytes pass_bytes_;               // of forward and backward
  std::optional<UpdateGraph> update_;  // from the end of the constructor on
};

}  // namespace smartinf::sim
