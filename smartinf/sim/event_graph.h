// A virtual clock. Work is a graph of tasks; a task is a few stages one after another; a stage
// moves bytes through resources that it shares with whatever else is moving. The clock jumps from
// one completion to the next, so a step of a 33 B-parameter model costs milliseconds.
//
// It knows nothing of training: update_graph.h and step_graph.h build graphs.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace smartinf::sim {

/// Effect of a stage on a resource; a drive loses rate while both are in flight on it.
enum class Direction : uint8_t { kNone, kRead, kWrite };

/// A share of one resource's time, in proportion to the bytes that a stage moves.
struct Use {
  uint32_t resource = 0;
  double seconds_per_byte = 0;  // 1 / rate when alone on it
  Direction direction = Direction::kNone;
};

/// Bytes through all of `uses` at once, at the rate of the slowest, after a fixed latency. A
/// resource that is given twice is used for both times together.
struct Stage {
  static constexpr size_t kUsesMax = 5;
  uint64_t bytes = 0;
  double latency_s = 0;
  std::array<Use, kUsesMax> uses;
  uint32_t use_count = 0;

  Stage() = default;
  Stage(uint64_t stage_bytes, std::span<const Use> stage_uses, double stage_latency_s = 0);
  Stage(uint64_t stage_bytes, std::initializer_list<Use> stage_uses, double stage_latency_s = 0)
      : Stage(stage_bytes, std::span(stage_uses.begin(), stage_uses.size()), stage_latency_s) {}
  void add(const Use& use);
};

struct TaskTimes {
  double start_s = 0;
  double end_s = 0;
};

class EventGraph {
 public:
  using TaskIndex = uint32_t;
  static constexpr TaskIndex kNone = ~0u;

  /// mixed_efficiency: what is left of the resource's rate while reads and writes are both in
  /// flight on it, in (0, 1]. catch_up_s: after an idle time a stage that it binds has so much of
  /// the time behind it already, at most the idle time: csd::Link's token bucket.
  uint32_t add_resource(std::string name, double mixed_efficiency = 1, double catch_up_s = 0);
  /// Stages pass one after another, in the order in which they come, instead of sharing it.
  void set_in_order(uint32_t resource) { resources_[resource].in_order = true; }

  /// A task that starts when all of `after` are done (kNone is skipped). Tasks without stages take
  /// no time: barriers.
  TaskIndex add_task(std::vector<Stage> stages, std::initializer_list<TaskIndex> after);
  void add_dependency(TaskIndex task, TaskIndex after);

  /// Runs the whole graph from time 0. Resources are shared max-min fairly in bytes per second, as
  /// queues that take commands of equal size in turn do. Deterministic: the same graph gives the
  /// same bits. A cycle is a bug (SI_CHECK).
  void run();

  // After run():
  const TaskTimes& times(TaskIndex task) const { return times_[task]; }
  double end_s() const { return end_s_; }
  size_t task_count() const { return tasks_.size(); }
  const std::string& resource_name(uint32_t resource) const { return resources_[resource].name; }
  size_t resource_count() const { return resources_.size(); }
  /// Seconds of the resource's own time used between two moments.
  double busy_s(uint32_t resource, double from_s, double to_s) const;

 private:
  struct Resource {
    std::string name;
    double mixed_efficiency = 1;
    double catch_up_s = 0;
    bool in_order = false;
    double used_until_s = -std::numeric_limits<double>::infinity();
    // Utilization as steps: from moment, level. Bound: one entry per event.
    std::vector<std::pair<double, double>> levels;
  };
  struct Node {
    uint32_t first_stage = 0;
    uint32_t stage_count = 0;
    uint32_t waiting_for = 0;
  };
  struct Active {
    TaskIndex task = 0;
    uint32_t stage = 0;
    double latency_left_s = 0;
    double bytes_left = 0;
    double rate = 0;
  };

  /// Demands by resource, and the active stages whose rates are still to be found.
  struct Wants {
    std::vector<double> free;
    std::vector<double> cost;
    std::vector<uint8_t> directions;
    std::vector<uint32_t> rising;
  };
  /// Progress of a run: successors by task, and where it stands.
  struct Progress {
    std::vector<uint32_t> first_edge;
    std::vector<TaskIndex> successors;
    std::vector<uint32_t> waiting;  // for so many tasks, by task
    std::vector<TaskIndex> ready;
    std::vector<Active> active;
    size_t finished = 0;
    double now_s = 0;
  };

  Wants wants_of(const std::vector<Active>& active) const;
  void share_out(std::vector<Active>& active, double now_s);
  Progress begin();
  double caught_up(const Stage& stage, double now_s);
  void enter_stage(Active& entry, uint32_t stage, double now_s);
  void finish(Progress& progress, TaskIndex task);
  void start_ready(Progress& progress);
  void pass_time(Progress& progress);

  std::vector<Resource> resources_;
  std::vector<Node> tasks_;
  std::vector<Stage> stages_;
  std::vector<std::pair<TaskIndex, TaskIndex>> edges_;  // before, after
  std::vector<TaskTimes> times_;
  double end_s_ = 0;
};

}  // namespace smartinf::sim
