#include "smartinf/csd/transfer_handler.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/message.h"

namespace smartinf::csd {
namespace {

using plan::Task;
using plan::TaskKind;
using Op = storage::SubgroupIo::Op;

/// The planes that an update reads and writes.
uint32_t rule_mask(const Update& update) {
  return (1u << kernels::rule_planes(update.scalars.front().rule).size()) - 1;
}

}  // namespace

void TransferHandler::start(Command& command) {
  command_ = &command;
  update_ = command.as<Update>();
  failure_ = check(*update_);
  unfinished_ = 0;
  if (failure_.ok()) make_plan(*update_);
  go_on();
}

void TransferHandler::begin_step() { order_.begin_step(parts_.store->layout().subgroups.size()); }

void TransferHandler::gradient_completed(uint32_t subgroup) {
  order_.completed(subgroup);
  go_on();
}

base::Status TransferHandler::check(const Update& update) const {
  uint64_t groups = 1;
  for (const plan::GroupSpan& span : parts_.options.groups) {
    groups = std::max(groups, uint64_t{span.group} + 1);
  }
  if (update.scalars.size() < groups) {
    return base::Status(base::ErrorCode::kInvalidArgument,
                        "an update for " + std::to_string(update.scalars.size()) + " of " +
                            std::to_string(groups) + " parameter groups");
  }
  const bool as_completed = update.mode == plan::UpdateMode::kAsCompleted;
  if (as_completed) SI_RETURN_IF_ERROR(parts_.updates_as_completed());
  const auto kinds = kernels::rule_planes(update.scalars.front().rule);
  if (!std::ranges::equal(kinds, parts_.store->layout().state_planes())) {
    return base::Status(base::ErrorCode::kMismatch,
                        "the rule " +
                            std::string(kernels::update_rule_name(update.scalars.front().rule)) +
                            " keeps other planes than this device holds",
                        "Use the update rule that the run was created with.");
  }
  for (const SubgroupUpdate& entry : update.updates) {
    SI_ASSIGN_OR_RETURN(const uint32_t subgroup, parts_.find(entry.subgroup));
    if (!as_completed && !parts_.gradients->complete(subgroup)) {
      return base::Status(
          base::ErrorCode::kFailedPrecondition,
          "the gradient of subgroup " + std::to_string(entry.subgroup.value) + " is not complete");
    }
  }
  return base::Status();
}

void TransferHandler::make_plan(const Update& update) {
  std::vector<plan::TakeOrder::Entry> entries;
  for (const SubgroupUpdate& entry : update.updates) {
    entries.push_back({parts_.index_of.at(entry.subgroup), entry.weights_out != nullptr});
  }
  entries_.assign(order_.start(update.mode, std::move(entries)), kNone);
  plan::ScheduleInput input;
  input.variant = parts_.options.schedule;
  input.subgroups = static_cast<uint32_t>(entries_.size());
  input.gradient_spilled = parts_.gradients->buffer_bytes() > 0;
  const std::span<Slot> slots = update.mode == plan::UpdateMode::kAsCompleted
                                    ? parts_.slots_as_completed()
                                    : std::span<Slot>(parts_.slots);
  input.slots = static_cast<uint32_t>(slots.size());
  input.has_moments = rule_mask(update) != kMasterMask;
  // The command's order is the order wanted, for every variant.
  std::vector<uint32_t> order(input.subgroups);
  std::iota(order.begin(), order.end(), 0u);
  input.order = order;
  tasks_ = plan::make_schedule(input);

  waits_.assign(tasks_.size(), 0);
  dependents_from_.assign(tasks_.size() + 1, 0);
  for (size_t i = 0; i < tasks_.size(); ++i) {
    for (const uint32_t before : tasks_[i].after) {
      if (before == Task::kNone) continue;
      ++waits_[i];
      ++dependents_from_[before + 1];
    }
  }
  std::partial_sum(dependents_from_.begin(), dependents_from_.end(), dependents_from_.begin());
  dependents_.resize(dependents_from_.back());
  std::vector<uint32_t> next(dependents_from_.begin(), dependents_from_.end() - 1);
  for (uint32_t i = 0; i < tasks_.size(); ++i) {
    for (const uint32_t before : tasks_[i].after) {
      if (before != Task::kNone) dependents_[next[before]++] = i;
    }
  }
  tasks_left_.assign(entries_.size(), 0);
  for (const Task& task : tasks_) ++tasks_left_[task.subgroup];
  served_.assign(entries_.size(), nullptr);
  parked_.clear();
  ready_.clear();
  ready_next_ = 0;
  for (uint32_t i = 0; i < tasks_.size(); ++i) {
    if (waits_[i] == 0) ready_.push_back(i);
  }
  for (Slot& slot : slots) {
    SI_CHECK(slot.state == SlotState::kFree, "an update's slots are in use");
    slot.state = SlotState::kUpdating;
  }
}

/// Chooses the subgroup for a position that has none. False: there is none yet.
bool TransferHandler::assign(uint32_t position) {
  if (entries_[position] != kNone) return true;
  asked_.clear();
  if (update_->mode == plan::UpdateMode::kOnDemand) {
    for (const Command* command : weights_.waiting()) {
      const auto& read = *command->as<ReadWeights>();
      if (read.type == update_->weights_type) asked_.push_back(parts_.index_of.at(read.subgroup));
    }
  }
  entries_[position] = order_.take(position, asked_);
  if (entries_[position] == kNone) return false;
  unfinished_ += tasks_left_[position];
  return true;
}

void TransferHandler::go_on() {
  if (!running()) return;
  if (failure_.ok()) {
    for (const uint32_t task : std::exchange(parked_, {})) ready_.push_back(task);
  }
  while (failure_.ok() && ready_next_ < ready_.size()) begin(ready_[ready_next_++]);
  const bool nothing_in_flight = transfers_ == 0 && jobs_ == 0 && in_transit_.empty();
  if (!nothing_in_flight || (failure_.ok() && (unfinished_ > 0 || order_.open()))) return;
  // After abandon() the drive may still write into slots: they are never used again.
  for (Slot& slot : parts_.slots) {
    if (slot.state == SlotState::kUpdating && !abandoned_) slot.state = SlotState::kFree;
  }
  ready_.clear();
  ready_next_ = 0;
  Command& done = *std::exchange(command_, nullptr);
  order_.end();
  const base::Status outcome = std::exchange(failure_, base::Status());
  if (last_failure_.ok()) last_failure_ = outcome;
  for (Command* read : served_) {
    if (read != nullptr) parts_.complete(*read, outcome);
  }
  served_.clear();
  if (!outcome.ok()) weights_.fail_waiting(outcome);
  parts_.complete(done, outcome);
}

void TransferHandler::begin(uint32_t index) {
  const Task& task = tasks_[index];
  if (!assign(task.subgroup)) return parked_.push_back(index);
  Slot& slot = parts_.slots[task.slot.value];
  const uint32_t subgroup = subgroup_of(index);
  const bool changes = task.kind == TaskKind::kReadState || task.kind == TaskKind::kUpdate;
  if (changes && weights_.holds_back(subgroup)) return parked_.push_back(index);
  // A cached subgroup is read into, updated in and written from memory of its own.
  const bool cached = parts_.cache.holds(subgroup);
  const std::span<std::byte> extent = cached ? parts_.cache.extent(subgroup) : slot.extent;
  const auto transfer = [&](Transfer& which, Op op, std::span<std::byte> buffer, uint32_t mask) {
    which.task = index;
    ++transfers_;
    parts_.start(which, op, subgroup, buffer, mask);
  };
  switch (task.kind) {
    case TaskKind::kReadGradient:
      if (parts_.gradients->in_memory(subgroup)) return finish(index);
      return transfer(slot.gradient_in, Op::kReadGradient, slot.gradient, ~0u);
    case TaskKind::kReadState: {
      const uint32_t wanted = rule_mask(*update_);
      slot.cached_mask = 0;
      if (std::exchange(slot.prefetched, std::nullopt) == subgroup) return finish(index);
      slot.cached_mask = parts_.cache.current(subgroup) & wanted;
      parts_.cache.count_hit(*parts_.store, subgroup, slot.cached_mask);
      if (slot.cached_mask == wanted) return finish(index);
      return transfer(slot.state_in, Op::kRead, extent, wanted & ~slot.cached_mask);
    }
    case TaskKind::kUpdate:
      if (cached) {
        if (failure_ = begin_in_cache(subgroup); !failure_.ok()) return;
      }
      return start_update(index, slot, extent);
    case TaskKind::kWriteWeights:
      return send_weights(index);
    case TaskKind::kWriteMaster:
      if (parts_.cache.unwritten(subgroup) != 0) return finish(index);
      return transfer(slot.master_out, Op::kWrite, extent, kMasterMask);
    case TaskKind::kWriteMoments:
      if (parts_.cache.unwritten(subgroup) != 0) return finish(index);
      return transfer(slot.moments_out, Op::kWrite, extent, rule_mask(*update_) & ~kMasterMask);
  }
}

void TransferHandler::start_update(uint32_t task, Slot& slot, std::span<std::byte> extent) {
  const uint32_t subgroup = subgroup_of(task);
  const SubgroupUpdate& entry = entry_of(task);
  const GradientMemory& gradients = *parts_.gradients;
  UpdateJob job;
  job.planes = PlaneBlocks(*parts_.store, subgroup, extent, slot.cached_mask);
  if (gradients.compressed()) {
    job.gradient.compressed = gradients.message(subgroup);
  } else if (gradients.in_memory(subgroup)) {
    job.gradient = {gradients.data(subgroup), gradients.type(), {}, nullptr, subgroup};
  } else {
    job.gradient = {slot.gradient.data(), gradients.type(), {}, &gradients, subgroup};
  }
  job.scalars = update_->scalars;
  job.groups = parts_.options.groups;
  job.matrices = parts_.options.matrices;
  job.weights_out = entry.weights_out;
  job.weights_type = update_->weights_type;
  if (job.weights_out == nullptr && update_->mode != plan::UpdateMode::kAsCompleted) {
    // Not one that is done again after an early update: its result stays.
    Command* read = weights_.take_waiting(subgroup, update_->weights_type);
    served_[tasks_[task].subgroup] = read;
    if (read != nullptr) job.weights_out = read->as<ReadWeights>()->weights_out;
  }
  weights_.begin_change(subgroup);
  job.samples_out = entry.samples_out;
  slot.job.work = job;
  slot.task = task;
  slot.update_ns = base::now_ns();
  ++jobs_;
  parts_.processor->start(slot.job);
}

/// Before a block of it is changed: what lies there may be the only copy of the committed state.
base::Status TransferHandler::begin_in_cache(uint32_t subgroup) {
  if (parts_.postpones_writes()) {
    SI_RETURN_IF_ERROR(
        parts_.store->hold(parts_.store->layout().subgroups[subgroup].id, rule_mask(*update_)));
  }
  parts_.cache.begin_update(subgroup);
  return base::Status();
}

void TransferHandler::finish(uint32_t task) {
  --unfinished_;
  if (--tasks_left_[tasks_[task].subgroup] == 0) order_.updated(subgroup_of(task));
  for (uint32_t i = dependents_from_[task]; i < dependents_from_[task + 1]; ++i) {
    if (--waits_[dependents_[i]] == 0) ready_.push_back(dependents_[i]);
  }
}

void TransferHandler::send_weights(uint32_t task) {
  const SubgroupUpdate& entry = entry_of(task);
  const bool sent = entry.weights_out != nullptr || served_[tasks_[task].subgroup] != nullptr;
  if (!sent) return weights_ready(task);
  const storage::StoredSubgroup& subgroup = parts_.store->layout().subgroups[subgroup_of(task)];
  uint64_t bytes = subgroup.count * base::data_type_bytes(update_->weights_type);
  if (entry.samples_out != nullptr) {
    bytes += compress::samples_in(parts_.options.matrices, subgroup.first_element, subgroup.count) *
             sizeof(base::Bf16);
  }
  // The weights left block by block while the update ran.
  const uint64_t due =
      parts_.send_weights(entry.subgroup, parts_.slots[tasks_[task].slot.value].update_ns, bytes);
  if (due == 0) return weights_ready(task);
  in_transit_.push_back({due, task});
}

void TransferHandler::weights_ready(uint32_t task) {
  command_->replies->push(
      {command_, Completion::Event::kWeightsReady, entry_of(task).subgroup, {}});
  if (Command* read = std::exchange(served_[tasks_[task].subgroup], nullptr); read != nullptr) {
    parts_.complete(*read, base::Status());
  }
  finish(task);
}

void TransferHandler::on_time(uint64_t now_ns) {
  if (in_transit_.empty()) return;
  while (!in_transit_.empty() && in_transit_.front().due_ns <= now_ns) {
    const uint32_t task = in_transit_.front().task;
    in_transit_.pop_front();
    weights_ready(task);
  }
  go_on();
}

void TransferHandler::on_transfer(Transfer& transfer) {
  --transfers_;
  if (!transfer.io.status.ok()) {
    if (failure_.ok()) failure_ = transfer.io.status;
  } else {
    finish(transfer.task);
  }
  go_on();
}

void TransferHandler::on_job(Job& job) {
  --jobs_;
  if (!job.status.ok()) {
    if (failure_.ok()) failure_ = job.status;
  } else {
    const uint32_t task = job.slot->task;
    if (const uint32_t subgroup = subgroup_of(task); parts_.cache.holds(subgroup)) {
      parts_.cache.updated(subgroup, rule_mask(*update_), parts_.postpones_writes());
    }
    finish(task);
  }
  go_on();
}

void TransferHandler::cancel() {
  if (!running()) return;
  if (failure_.ok()) {
    failure_ = base::Status(base::ErrorCode::kCancelled, "the update was stopped");
  }
  go_on();
}

void TransferHandler::stop() {
  if (running() && order_.stop()) go_on();
}

void TransferHandler::finish_update() {
  if (running() && order_.release()) go_on();
}

void TransferHandler::abandon(const base::Status& status) {
  abandoned_ = true;
  transfers_ = 0;
  if (!running()) return;
  failure_ = status;
  go_on();
}

}  // namespace smartinf::csd
