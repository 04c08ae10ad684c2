#include "smartinf/csd/weights_reader.h"

#include <algorithm>
#include <string>
#include <utility>

#include "smartinf/base/clock.h"

namespace smartinf::csd {
namespace {

using base::ErrorCode;
using base::Status;


std::string step_text(base::StepNumber step) { return "step " + std::to_string(step); }

}  // namespace

Status WeightsReader::check(const ReadWeights& read, bool committing) const {
  SI_RETURN_IF_ERROR(parts_.find(read.subgroup).status());
  if (slots_.empty()) {
    return Status(ErrorCode::kUnsupported, "the device has no memory for reading weights",
                  "Give it some read slots (LocalDeviceOptions::weight_read_slots).");
  }
  SI_RETURN_IF_ERROR(step_.lost());
  const storage::StoreState state = parts_.store->state();
  if (!state.complete) return out_of_order("there are no committed weights to read");
  if (read.step == state.committed_step) {
    if (!committing) return Status();
    return out_of_order("the weights of " + step_text(read.step) +
                        " make way for those of the step after it");
  }
  if (read.step != state.committed_step + 1 || read.step > next_step_) {
    return out_of_order("weights of " + step_text(read.step) + " are asked for, and " +
                        step_text(state.committed_step) + " is the committed one" +
                        (next_step_ > state.committed_step ? "" : "; no other has begun"));
  }
  for (const Command* other : waiting_) {
    if (other->as<ReadWeights>()->subgroup == read.subgroup) {
      return out_of_order("the weights of subgroup " + std::to_string(read.subgroup.value) +
                          " of " + step_text(read.step) + " are waited for already");
    }
  }
  return Status();
}

void WeightsReader::take(Command& command, const Status& step_failure, bool committing) {
  const ReadWeights& read = *command.as<ReadWeights>();
  Status status = check(read, committing);
  const bool committed = read.step == parts_.store->state().committed_step;
  if (status.ok() && !committed) status = step_failure;
  if (!status.ok()) return parts_.complete(command, std::move(status));
  (committed ? queued_ : waiting_).push_back(&command);
  start_reads();
}

void WeightsReader::end_step(bool aborted) {
  const base::StepNumber committed = parts_.store->state().committed_step;
  for (Command* command : std::exchange(waiting_, {})) {
    if (command->as<ReadWeights>()->step == committed) {
      queued_.push_back(command);
    } else if (aborted) {
      parts_.complete(*command, Status(ErrorCode::kCancelled, "the step was aborted"));
    } else {
      waiting_.push_back(command);
    }
  }
  if (aborted) next_step_ = 0;
  std::fill(changed_.begin(), changed_.end(), uint8_t{0});
  if (!step_.lost().ok()) return cancel(step_.lost());
  start_reads();
}

void WeightsReader::fail_waiting(const Status& status) {
  for (Command* command : std::exchange(waiting_, {})) parts_.complete(*command, status);
}

void WeightsReader::cancel(const Status& status) {
  fail_waiting(status);
  for (Command* command : std::exchange(queued_, {})) parts_.complete(*command, status);
}

Command* WeightsReader::take_waiting(uint32_t subgroup, base::DataType type) {
  const base::SubgroupId id = parts_.store->layout().subgroups[subgroup].id;
  const auto found = std::find_if(waiting_.begin(), waiting_.end(), [&](const Command* command) {
    const auto& read = *command->as<ReadWeights>();
    return read.subgroup == id && read.type == type;
  });
  if (found == waiting_.end()) return nullptr;
  Command* command = *found;
  waiting_.erase(found);
  return command;
}

bool WeightsReader::holds_back(uint32_t subgroup) const {
  // Else it is read from the live slot, and changed in another buffer and in the shadow slot.
  if (!parts_.cache.holds(subgroup) && !parts_.postpones_writes()) return false;
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return slot.state != SlotState::kFree && slot.subgroup == subgroup;
  });
}

void WeightsReader::begin_change(uint32_t subgroup) {
  changed_.resize(parts_.store->layout().subgroups.size());
  changed_[subgroup] = 1;
}

void WeightsReader::start_reads() {
  for (Slot& slot : slots_) {
    if (slot.state != SlotState::kFree) continue;
    while (slot.state == SlotState::kFree && !queued_.empty()) {
      slot.command = queued_.front();
      queued_.pop_front();
      slot.subgroup = parts_.index_of.at(slot.command->as<ReadWeights>()->subgroup);
      slot.update_ns = base::now_ns();
      if (parts_.postpones_writes() && !changed_.empty() && changed_[slot.subgroup] != 0) {
        parts_.complete(*std::exchange(slot.command, nullptr),
                        out_of_order("with durability \"none\" " + step_text(step_.number()) +
                                     " overwrites the committed weights of the subgroup"));
        continue;
      }
      ++in_slots_;
      slot.cached_mask = parts_.cache.current(slot.subgroup) & kMasterMask;
      parts_.cache.count_hit(*parts_.store, slot.subgroup, slot.cached_mask);
      if (slot.cached_mask != 0) {
        cast(slot);
        continue;
      }
      slot.state = SlotState::kReadingWeights;
      ++transfers_;
      slot.state_in.io.priority = storage::IoPriority::kWeights;
      parts_.start(slot.state_in, storage::SubgroupIo::Op::kRead, slot.subgroup, slot.extent,
                   kMasterMask);
    }
  }
}

void WeightsReader::cast(Slot& slot) {
  const auto& read = *slot.command->as<ReadWeights>();
  const std::span<std::byte> extent =
      slot.cached_mask != 0 ? parts_.cache.extent(slot.subgroup) : slot.extent;
  slot.state = SlotState::kCasting;
  slot.job.work = CastJob{PlaneBlocks(*parts_.store, slot.subgroup, extent, slot.cached_mask),
                          read.weights_out, read.type};
  parts_.processor->start(slot.job);
}

void WeightsReader::on_transfer(Transfer& transfer) {
  --transfers_;
  if (transfer.io.status.ok()) return cast(*transfer.slot);
  end(*transfer.slot, transfer.io.status);
  start_reads();
}

void WeightsReader::on_job(Job& job) {
  Slot& slot = *job.slot;
  Status status = abandoned_for_.ok() ? job.status : abandoned_for_;
  if (status.ok()) {
    const auto& read = *slot.command->as<ReadWeights>();
    const uint64_t count = parts_.store->layout().subgroups[slot.subgroup].count;
    const uint64_t due = parts_.send_weights(read.subgroup, slot.update_ns,
                                             count * base::data_type_bytes(read.type));
    // Answered later.
    if (due > 0) in_transit_.push_back({due, std::exchange(slot.command, nullptr)});
  }
  end(slot, std::move(status));
  start_reads();
}

void WeightsReader::end(Slot& slot, Status status) {
  --in_slots_;
  if (abandoned_for_.ok()) slot.state = SlotState::kFree;
  if (slot.command != nullptr) {
    parts_.complete(*std::exchange(slot.command, nullptr), std::move(status));
  }
}

void WeightsReader::on_time(uint64_t now_ns) {
  while (!in_transit_.empty() && in_transit_.front().due_ns <= now_ns) {
    parts_.complete(*in_transit_.front().command, Status());
    in_transit_.pop_front();
  }
}

void WeightsReader::abandon(const Status& status) {
  abandoned_for_ = status;
  transfers_ = 0;
  cancel(status);
  // Commands at the processor are answered when it is done with them; the drive may still write
  // into the others' slots, which are never used again.
  for (Slot& slot : slots_) {
    if (slot.state == SlotState::kReadingWeights && slot.command != nullptr) end(slot, status);
  }
}

}  // namespace smartinf::csd
