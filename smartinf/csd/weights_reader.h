// Serves ReadWeights beside everything else that the device does: the committed step's weights
// through slots of its own, those of the step in progress through the update that makes them.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/device_parts.h"
#include "smartinf/csd/device_step.h"

namespace smartinf::csd {

///   of the committed step      queued -> a slot: read, cast -> on the host link -> answered
///   of the step in progress    waiting --the update makes them--> taken, TransferHandler answers
///                              waiting --Commit--> queued
///                              waiting --Abort, failure--> answered
///
/// Subgroups are named by their index in the layout. Threads: the device's I/O thread.
class WeightsReader {
 public:
  WeightsReader(DeviceParts& parts, const DeviceStep& step) : parts_(parts), step_(step) {}

  /// `slots` outlive the reader's use.
  void set_slots(std::span<Slot> slots) { slots_ = slots; }
  /// Takes a ReadWeights and sees to its answer. step_failure: why the step in progress cannot be
  /// committed; committing: a Commit of it waits.
  void take(Command& command, const base::Status& step_failure, bool committing);

  /// A BeginStep of this step has come, or this step is in progress; 0: none is.
  void begin_step(base::StepNumber step) { next_step_ = step; }
  /// A commit or an abort was carried out. Who waited for what is committed now is served by reads.
  void end_step(bool aborted);
  /// Answers whoever waits for the step in progress with `status`.
  void fail_waiting(const base::Status& status);
  /// And whatever is not read yet.
  void cancel(const base::Status& status);
  /// The store cannot go on: see TransferHandler::abandon.
  void abandon(const base::Status& status);

  /// For an update. In the order in which they came: ReadWeights of the step in progress.
  const std::deque<Command*>& waiting() const { return waiting_; }
  /// Takes the waiting command for this subgroup, which the caller answers from now on; null: there
  /// is none.
  Command* take_waiting(uint32_t subgroup, base::DataType type);
  /// Whether what is read now lies where an update, or a write of state, of the subgroup writes.
  bool holds_back(uint32_t subgroup) const;
  /// The step in progress changes the subgroup from here on.
  void begin_change(uint32_t subgroup);

  /// Nothing of the committed step is queued or read.
  bool idle() const { return queued_.empty() && in_slots_ == 0; }
  bool answered_all() const { return idle() && waiting_.empty() && in_transit_.empty(); }
  /// The part of DeviceParts::transfers_in_flight that is this reader's.
  uint32_t transfers_in_flight() const { return transfers_; }

  void on_transfer(Transfer& transfer);
  void on_job(Job& job);
  void on_time(uint64_t now_ns);
  /// When on_time() will have something to do; ~0: nothing is on the link.
  uint64_t next_due_ns() const {
    return in_transit_.empty() ? ~uint64_t{0} : in_transit_.front().due_ns;
  }

 private:
  struct InTransit {
    uint64_t due_ns;
    Command* command;
  };
  base::Status check(const ReadWeights& read, bool committing) const;
  void start_reads();
  void cast(Slot& slot);
  void end(Slot& slot, base::Status status);

  DeviceParts& parts_;
  const DeviceStep& step_;
  std::span<Slot> slots_;
  std::deque<Command*> queued_;
  std::deque<Command*> waiting_;
  std::deque<InTransit> in_transit_;  // one direction of one link: due in order
  uint32_t in_slots_ = 0;
  uint32_t transfers_ = 0;
  base::StepNumber next_step_ = 0;  // whose BeginStep has come
  std::vector<uint8_t> changed_;    // by the step in progress
  base::Status abandoned_for_;      // ok: not abandoned
};

}  // namespace smartinf::csd
