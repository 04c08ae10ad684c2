// Runs the schedule of plan/ on a device's slots: whatever may start is started at once, and only
// the store, the processor and the links make anything wait. The same handler serves SmartUpdate
// and host update; they differ in which links stand where.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/device_parts.h"
#include "smartinf/csd/weights_reader.h"
#include "smartinf/plan/schedule.h"
#include "smartinf/plan/take_order.h"

namespace smartinf::csd {

/// Threads: the device's I/O thread.
class TransferHandler {
 public:
  TransferHandler(DeviceParts& parts, WeightsReader& weights) : parts_(parts), weights_(weights) {}

  /// Forgets which gradients are complete and what was updated.
  void begin_step();
  /// The gradient of a subgroup (index in the layout) is there.
  void gradient_completed(uint32_t subgroup);
  /// Starts an Update command; its slots must be free. Answers it when all state is written, or
  /// after a failure when nothing is in flight any more.
  void start(Command& command);
  bool running() const { return command_ != nullptr; }
  /// Starts nothing more; the update ends as kCancelled.
  void cancel();
  /// An update of subgroups as their gradients become complete takes up no more of them.
  void stop();
  /// An update on demand takes up what is left without being asked.
  void finish_update();
  /// A ReadWeights has come or is done: what waits for that may begin.
  void weights_asked_or_read() { go_on(); }
  /// Why an update of the step failed: it cannot be prepared. Ok again after forget_failure().
  const base::Status& failure() const { return last_failure_; }
  void forget_failure() { last_failure_ = base::Status(); }
  /// The store cannot go on: its transfers are given up, the processor's work is waited for.
  void abandon(const base::Status& status);

  /// Says that weights have passed the host link, where their time has come.
  void on_time(uint64_t now_ns);
  /// When on_time() will have something to do; ~0: nothing is on the link.
  uint64_t next_due_ns() const {
    return in_transit_.empty() ? ~uint64_t{0} : in_transit_.front().due_ns;
  }

  void on_transfer(Transfer& transfer);
  void on_job(Job& job);

 private:
  struct InTransit {
    uint64_t due_ns;
    uint32_t task;
  };

  base::Status check(const Update& update) const;
  void make_plan(const Update& update);
  bool assign(uint32_t position);
  void begin(uint32_t task);
  void finish(uint32_t task);
  void go_on();
  void send_weights(uint32_t task);
  void weights_ready(uint32_t task);
  const SubgroupUpdate& entry_of(uint32_t task) const {
    return update_->updates[entries_[tasks_[task].subgroup]];
  }
  uint32_t subgroup_of(uint32_t task) const { return parts_.index_of.at(entry_of(task).subgroup); }
  void start_update(uint32_t task, Slot& slot, std::span<std::byte> extent);
  base::Status begin_in_cache(uint32_t subgroup);

  DeviceParts& parts_;
  WeightsReader& weights_;
  Command* command_ = nullptr;
  const Update* update_ = nullptr;  // its message
  base::Status failure_;            // of the update that runs
  base::Status last_failure_;       // the first one of the step
  bool abandoned_ = false;
  uint32_t transfers_ = 0;  // in flight
  uint32_t jobs_ = 0;       // in flight
  size_t unfinished_ = 0;   // tasks of the subgroups that were taken up

  plan::TakeOrder order_;
  std::vector<uint32_t> asked_;   // kept for its memory
  std::vector<uint32_t> parked_;  // tasks whose position has no subgroup yet

  // The schedule's subgroups are positions in the order in which they are taken up.
  static constexpr uint32_t kNone = plan::TakeOrder::kNone;
  std::vector<uint32_t> entries_;     // by position: in update_->updates; kNone: not taken up yet
  std::vector<uint32_t> tasks_left_;  // by position
  std::vector<Command*> served_;      // by position: the ReadWeights that it makes weights for

  // Kept from step to step, so that their memory is allocated once.
  std::vector<plan::Task> tasks_;
  std::vector<uint8_t> waits_;             // by task: how many it still waits for
  std::vector<uint32_t> dependents_from_;  // by task: where its dependents begin
  std::vector<uint32_t> dependents_;
  std::vector<uint32_t> ready_;  // to be started, in order
  size_t ready_next_ = 0;
  std::deque<InTransit> in_transit_;  // one direction of one link: due in order
};

}  // namespace smartinf::csd
