#include "smartinf/train/unit_inputs.h"

#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using torch::Tensor;

base::Result<UnitInputs> UnitInputs::make(engine::Spool& spool, torch::Device accelerator,
                                          uint64_t buffers, uint64_t input_bytes) {
  UnitInputs made;
  made.spool_ = &spool;
  made.buffer_bytes_ = base::round_up(input_bytes, base::kIoAlignment);
  const uint64_t bytes = buffers * made.buffer_bytes_;
  if (accelerator.is_cpu()) {
    SI_ASSIGN_OR_RETURN(made.memory_, base::AlignedBuffer::allocate(bytes));
    made.bytes_ = made.memory_.bytes();
  } else {
    made.pinned_ = torch::empty({static_cast<int64_t>(bytes + base::kIoAlignment)},
                                torch::dtype(torch::kUInt8).pinned_memory(true));
    const auto begin = reinterpret_cast<uintptr_t>(made.pinned_.data_ptr());
    made.bytes_ = {reinterpret_cast<std::byte*>(base::round_up(begin, base::kIoAlignment)), bytes};
    for (uint64_t i = 0; i < buffers; ++i) made.copied_.emplace_back(accelerator.type());
  }
  for (auto buffer = static_cast<uint32_t>(buffers); buffer-- > 0;) made.free_.push_back(buffer);
  return made;
}

UnitInputs::~UnitInputs() {
  for (Entry& entry : entries_) drop(entry);
}

void UnitInputs::begin(size_t units, size_t batches) {
  for (Entry& entry : entries_) drop(entry);
  batches_ = batches;
  entries_.assign(units * batches, Entry());
  writing_.clear();
  taken_ = nullptr;
  next_read_ = 0;
}

/// The current stream was given one.
void UnitInputs::copy_started(uint32_t buffer) {
  if (copied_.empty()) return;
  const c10::impl::VirtualGuardImpl device(options_.device().type());
  copied_[buffer].record(device.getStream(options_.device()));
}

void UnitInputs::wait_copied(uint32_t buffer) {
  if (!copied_.empty()) copied_[buffer].synchronize();
}

Tensor UnitInputs::tensor_in(uint32_t buffer) {
  return torch::from_blob(bytes_of(buffer).data(), sizes_, options_.device(torch::kCPU));
}

void UnitInputs::put(size_t unit, size_t batch, Tensor input) {
  Entry& entry = at(unit, batch);
  if (spool_ != nullptr) {
    sizes_ = input.sizes().vec();
    options_ = input.options();
    entry.buffer = take_buffer();
    Tensor copy = tensor_in(*entry.buffer);
    copy.copy_(input, /*non_blocking=*/true);
    copy_started(*entry.buffer);
    if (input.is_cpu()) input = std::move(copy);
  }
  entry.made = std::move(input);
}

Tensor UnitInputs::get(size_t unit, size_t batch) {
  Entry& entry = at(unit, batch);
  if (spool_ == nullptr) return entry.made;
  entry.used = true;
  write_out();
  return std::exchange(entry.made, Tensor());
}

Tensor UnitInputs::take(size_t unit, size_t batch) {
  Entry& entry = at(unit, batch);
  if (spool_ == nullptr) return std::exchange(entry.made, Tensor());
  if (taken_ != nullptr) drop(*taken_);
  taken_ = &entry;
  entry.made = Tensor();
  if (!entry.buffer.has_value()) read(entry);
  if (std::exchange(entry.reading, false)) throw_if_error(spool_->wait(*entry.ticket));
  read_ahead();
  const Tensor input = tensor_in(*entry.buffer).to(options_.device(), /*non_blocking=*/true);
  copy_started(*entry.buffer);
  return input;
}

/// The use-th input that backward takes.
UnitInputs::Entry& UnitInputs::in_backward(size_t use) {
  const size_t units = entries_.size() / batches_;
  return at(units - 1 - use / batches_, use % batches_);
}

uint32_t UnitInputs::take_buffer() {
  if (free_.empty()) finish_write();
  const uint32_t buffer = free_.back();
  free_.pop_back();
  return buffer;
}

/// Where few buffers are free, inputs that are wanted last make room.
void UnitInputs::write_out() {
  for (Entry& entry : entries_) {
    if (free_.size() + writing_.size() >= kOnTheirWay) return;
    if (!entry.used || !entry.buffer.has_value() || entry.writing) continue;
    wait_copied(*entry.buffer);
    auto ticket = spool_->put(bytes_of(*entry.buffer));
    throw_if_error(ticket.status());
    entry.ticket = *ticket;
    entry.writing = true;
    writing_.push_back(&entry);
  }
}

/// Waits for the oldest one.
void UnitInputs::finish_write() {
  SI_CHECK(!writing_.empty(), "more inputs in memory than there are buffers");
  Entry& entry = *writing_.front();
  writing_.pop_front();
  entry.writing = false;
  throw_if_error(spool_->wait(*entry.ticket));
  free_.push_back(*std::exchange(entry.buffer, std::nullopt));
}

void UnitInputs::read(Entry& entry) {
  entry.buffer = take_buffer();
  entry.reading = true;
  throw_if_error(spool_->start_get(*entry.ticket, bytes_of(*entry.buffer)));
}

void UnitInputs::read_ahead() {
  for (; next_read_ < entries_.size(); ++next_read_) {
    Entry& entry = in_backward(next_read_);
    if (entry.buffer.has_value() || !entry.ticket.has_value()) continue;  // here, or was taken
    if (free_.empty()) return;
    read(entry);
  }
}

/// Waits for what is under way.
void UnitInputs::drop(Entry& entry) {
  entry.made = Tensor();
  if (entry.writing) std::erase(writing_, &entry);
  if (entry.ticket.has_value()) spool_->drop(*entry.ticket);
  entry.ticket.reset();
  entry.writing = entry.reading = false;
  if (!entry.buffer.has_value()) return;
  wait_copied(*entry.buffer);
  free_.push_back(*std::exchange(entry.buffer, std::nullopt));
}

}  // namespace smartinf::train
