// Which subgroup an update takes up next. Pure: no device, no time, no threads; the device says
// what has happened, and asks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace smartinf::plan {

/// Which subgroups of an update are taken up, and when.
enum class UpdateMode : uint8_t {
  /// All of them in their order, from their committed state, whatever the step has made of it
  /// before.
  kInOrder,
  /// Right after the step has begun, before any gradient: each subgroup when its gradient has
  /// become
  /// complete, the last one first when several are.
  kAsCompleted,
  /// In their order those that the step has not updated already.
  kRest,
  /// In their order, but one whose weights nobody has a place for only when somebody has asked for
  /// them, in the order in which they ask.
  kOnDemand,
};

class TakeOrder {
 public:
  static constexpr uint32_t kNone = ~0u;
  struct Entry {
    uint32_t subgroup = 0;  // below begin_step()'s number; each once
    bool at_once = true;    // on demand: need not be asked for
  };

  /// No gradient is complete and nothing is updated.
  void begin_step(size_t subgroups);
  /// A subgroup's gradient has become complete.
  void completed(uint32_t subgroup) { completed_.push_back(subgroup); }
  /// A subgroup's new state is written.
  void updated(uint32_t subgroup) { updated_[subgroup] = 1; }

  /// Begins an update of these entries. Returns how many of them it takes up, at most.
  size_t start(UpdateMode mode, std::vector<Entry> entries);
  /// The entry for the next place of a schedule, whose places in order are taken from any of them
  /// at most once; kNone: none can be taken up yet. asked: subgroups whose weights are waited for,
  /// the first one first.
  uint32_t take(uint32_t place, std::span<const uint32_t> asked);
  /// There are entries that may yet be taken up.
  bool open() const { return left_ > 0; }
  /// kAsCompleted takes up no more; false: another mode runs.
  bool stop();
  /// kOnDemand takes up what is left without being asked; false: another mode runs.
  bool release();
  /// The update has ended.
  void end() { left_ = 0; }

 private:
  uint32_t take_completed();
  uint32_t take_demanded(std::span<const uint32_t> asked);

  // State of the step, by subgroup.
  std::vector<uint32_t> completed_;  // and not taken up
  std::vector<uint8_t> updated_;
  // State of the update.
  UpdateMode mode_ = UpdateMode::kInOrder;
  std::vector<Entry> entries_;
  size_t left_ = 0;
  std::vector<uint32_t> places_;     // kInOrder, kRest: the entry of each
  std::vector<uint32_t> entry_for_;  // the others, by subgroup: not taken up, or kNone
  uint32_t next_ = 0;                // kOnDemand: the first that may not be taken up yet
};

}  // namespace smartinf::plan
