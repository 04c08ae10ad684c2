#include "smartinf/train/spooled_buffers.h"

#include <algorithm>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

base::Result<SpooledBuffers> SpooledBuffers::make(engine::Spool& spool, uint64_t buffers,
                                                  uint64_t bytes) {
  const uint64_t buffer_bytes = base::round_up(bytes, base::kIoAlignment);
  SI_ASSIGN_OR_RETURN(base::AlignedBuffer memory,
                      base::AlignedBuffer::allocate(buffers * buffer_bytes));
  return SpooledBuffers(spool, std::move(memory), buffer_bytes);
}

SpooledBuffers::SpooledBuffers(engine::Spool& spool, base::AlignedBuffer memory,
                               uint64_t buffer_bytes)
    : spool_(&spool), memory_(std::move(memory)), buffer_bytes_(buffer_bytes) {
  const uint64_t buffers = memory_.size() / buffer_bytes;
  for (auto buffer = static_cast<uint32_t>(buffers); buffer-- > 0;) free_.push_back(buffer);
}

SpooledBuffers::~SpooledBuffers() {
  for (Entry& entry : entries_) drop(entry);
  spool_->retire(std::move(memory_));
}

void SpooledBuffers::begin(size_t units, size_t batches) {
  for (Entry& entry : entries_) drop(entry);
  batches_ = batches;
  entries_.assign(units * batches, Entry());
  writing_.clear();
  taken_ = nullptr;
  next_read_ = 0;
}

std::span<std::byte> SpooledBuffers::put(size_t unit, size_t batch) {
  Entry& entry = at(unit, batch);
  entry.buffer = take_buffer();
  return bytes_of(*entry.buffer);
}

void SpooledBuffers::release(size_t unit, size_t batch) {
  at(unit, batch).released = true;
  write_out();
}

std::span<std::byte> SpooledBuffers::take(size_t unit, size_t batch) {
  Entry& entry = at(unit, batch);
  if (taken_ != nullptr) drop(*taken_);
  taken_ = &entry;
  if (!entry.buffer.has_value()) read(entry);
  if (std::exchange(entry.reading, false)) throw_if_error(spool_->wait(*entry.ticket));
  read_ahead();
  return bytes_of(*entry.buffer);
}

/// The use-th entry in the order of backward.
SpooledBuffers::Entry& SpooledBuffers::in_backward(size_t use) {
  const size_t units = entries_.size() / batches_;
  return at(units - 1 - use / batches_, use % batches_);
}

uint32_t SpooledBuffers::take_buffer() {
  if (free_.empty()) finish_write();
  const uint32_t buffer = free_.back();
  free_.pop_back();
  return buffer;
}

/// Where few buffers are free, what is wanted last makes room.
void SpooledBuffers::write_out() {
  for (Entry& entry : entries_) {
    if (free_.size() + writing_.size() >= kOnTheirWay) return;
    if (!entry.released || !entry.buffer.has_value() || entry.writing) continue;
    auto ticket = spool_->put(bytes_of(*entry.buffer));
    throw_if_error(ticket.status());
    entry.ticket = *ticket;
    entry.writing = true;
    writing_.push_back(&entry);
  }
}

/// Waits for the oldest one.
void SpooledBuffers::finish_write() {
  SI_CHECK(!writing_.empty(), "more is held in memory than there are buffers");
  Entry& entry = *writing_.front();
  writing_.pop_front();
  entry.writing = false;
  throw_if_error(spool_->wait(*entry.ticket));
  free_.push_back(*std::exchange(entry.buffer, std::nullopt));
}

void SpooledBuffers::read(Entry& entry) {
  entry.buffer = take_buffer();
  entry.reading = true;
  throw_if_error(spool_->start_get(*entry.ticket, bytes_of(*entry.buffer)));
}

void SpooledBuffers::read_ahead() {
  for (; next_read_ < entries_.size(); ++next_read_) {
    Entry& entry = in_backward(next_read_);
    if (entry.buffer.has_value() || !entry.ticket.has_value()) continue;  // here, or was taken
    if (free_.empty()) return;
    read(entry);
  }
}

/// Waits for what is under way.
void SpooledBuffers::drop(Entry& entry) {
  if (entry.writing) std::erase(writing_, &entry);
  if (entry.ticket.has_value()) spool_->drop(*entry.ticket);
  entry.ticket.reset();
  entry.writing = entry.reading = false;
  if (entry.buffer.has_value()) free_.push_back(*std::exchange(entry.buffer, std::nullopt));
}

}  // namespace smartinf::train
