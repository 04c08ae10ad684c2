#include "smartinf/train/spooled_buffers.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <c10/core/StreamGuard.h>

#include "smartinf/base/check.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using torch::Tensor;

SpooledBuffers::SpooledBuffers(engine::Spool& spool, const CopyStreams& streams, uint64_t buffers,
                               uint64_t bytes)
    : spool_(&spool), streams_(&streams), buffer_bytes_(base::round_up(bytes, base::kIoAlignment)) {
  const auto all = static_cast<int64_t>(buffers * buffer_bytes_);
  memory_N_ = torch::empty({all + static_cast<int64_t>(base::kIoAlignment)},
                           torch::dtype(torch::kUInt8).pinned_memory(beside()));
  const auto address = reinterpret_cast<uintptr_t>(memory_N_.data_ptr());
  memory_N_ = memory_N_.narrow(
      0, static_cast<int64_t>(base::round_up(address, base::kIoAlignment) - address), all);
  for (uint64_t i = 0; i < buffers; ++i) {
    buffers_.push_back({memory_N_.narrow(0, static_cast<int64_t>(i * buffer_bytes_),
                                         static_cast<int64_t>(buffer_bytes_)),
                        std::nullopt});
    if (beside()) buffers_.back().copied.emplace(streams.event());
  }
  for (auto buffer = static_cast<uint32_t>(buffers); buffer-- > 0;) free_.push_back(buffer);
}

SpooledBuffers::~SpooledBuffers() {
  for (Entry& entry : entries_) drop(entry);
  for (Buffer& buffer : buffers_) {
    if (buffer.copied) buffer.copied->synchronize();
  }
  spool_->retire(std::make_shared<Tensor>(std::move(memory_N_)));
}

std::span<std::byte> SpooledBuffers::memory() {
  return {static_cast<std::byte*>(memory_N_.data_ptr()), memory_N_.nbytes()};
}

void SpooledBuffers::begin(size_t units, size_t batches) {
  for (Entry& entry : entries_) drop(entry);
  batches_ = batches;
  entries_.assign(units * batches, Entry());
  writing_.clear();
  taken_ = nullptr;
  taken_count_ = next_read_ = 0;
  last_put_.reset();
  places_.clear();
}

void SpooledBuffers::put(size_t unit, size_t batch, std::span<const Part> parts) {
  Entry& entry = at(unit, batch);
  entry.buffer = take_buffer();
  Buffer& buffer = buffers_[*entry.buffer];
  const auto copy = [&] {
    for (const Part& part : parts) {
      buffer.bytes_N.narrow(0, static_cast<int64_t>(part.offset), part.bytes_N.numel())
          .copy_(part.bytes_N, /*non_blocking=*/true);
    }
  };
  if (!beside()) return copy();
  if (last_put_) buffers_[*last_put_].copied->synchronize();
  last_put_ = entry.buffer;
  const c10::Stream& down = streams_->down();
  const c10::Event made = streams_->done_so_far();
  const c10::StreamGuard guard(down);
  made.block(down);
  buffer.copied->block(down);  // up to the accelerator, of what it held before
  copy();
  for (const Part& part : parts) part.bytes_N.record_stream(down);  // the caller lets go of it
  buffer.copied->record(down);
}

Tensor SpooledBuffers::kept(size_t unit, size_t batch) {
  SI_CHECK(!beside(), "bytes are asked for in the host's memory");
  return buffers_[*at(unit, batch).buffer].bytes_N;
}

void SpooledBuffers::release(size_t unit, size_t batch) {
  at(unit, batch).released = true;
  write_out();
}

Tensor SpooledBuffers::take(size_t unit, size_t batch) {
  Entry& entry = at(unit, batch);
  if (taken_ != nullptr) drop(*taken_);
  taken_ = &entry;
  if (!entry.buffer.has_value()) read(entry);
  if (std::exchange(entry.reading, false)) wait_for(*entry.ticket);
  Buffer& buffer = buffers_[*entry.buffer];
  Tensor bytes_N = beside() ? to_accelerator(buffer) : buffer.bytes_N;
  read_ahead();
  return bytes_N;
}

/// Into the place that is not computed with. What was taken before has been started on the current
/// stream.
Tensor SpooledBuffers::to_accelerator(Buffer& buffer) {
  const c10::Stream current = streams_->current();
  const c10::Stream& up = streams_->up();
  if (places_.empty()) {
    for (int i = 0; i < 2; ++i) {
      places_.push_back({torch::empty({buffer.bytes_N.numel()},
                                      torch::dtype(torch::kUInt8).device(streams_->device())),
                         streams_->event()});
      places_.back().used.record(current);  // by whoever had the memory before
    }
  } else {
    places_[(taken_count_ - 1) % 2].used.record(current);
  }
  Place& place = places_[taken_count_++ % 2];
  {
    const c10::StreamGuard guard(up);
    place.used.block(up);
    buffer.copied->block(up);  // down from the accelerator, where it has stayed in memory
    place.bytes_N.copy_(buffer.bytes_N, /*non_blocking=*/true);
    buffer.copied->record(up);
  }
  buffer.copied->block(current);
  return place.bytes_N;
}

/// The use-th entry in the order of backward.
SpooledBuffers::Entry& SpooledBuffers::in_backward(size_t use) {
  const size_t units = entries_.size() / batches_;
  return at(units - 1 - use / batches_, use % batches_);
}

uint32_t SpooledBuffers::take_buffer() {
  if (free_.empty() && writing_.empty()) {
    const auto oldest = std::ranges::find_if(
        entries_, [](const Entry& entry) { return entry.released && entry.buffer.has_value(); });
    SI_CHECK(oldest != entries_.end(), "more is held in memory than there are buffers");
    write(*oldest);
  }
  if (free_.empty()) finish_write();
  const uint32_t buffer = free_.back();
  free_.pop_back();
  return buffer;
}

std::span<std::byte> SpooledBuffers::for_devices(uint32_t buffer) {
  if (buffers_[buffer].copied) buffers_[buffer].copied->synchronize();
  return {static_cast<std::byte*>(buffers_[buffer].bytes_N.data_ptr()), buffer_bytes_};
}

/// Where few buffers are free, what is wanted last makes room, as soon as it is there.
void SpooledBuffers::write_out() {
  for (Entry& entry : entries_) {
    if (free_.size() + writing_.size() >= kOnTheirWay) return;
    if (!entry.released || !entry.buffer.has_value() || entry.writing) continue;
    if (const auto& copied = buffers_[*entry.buffer].copied; copied && !copied->query()) return;
    write(entry);
  }
}

void SpooledBuffers::write(Entry& entry) {
  auto ticket = spool_->put(for_devices(*entry.buffer));
  throw_if_error(ticket.status());
  entry.ticket = *ticket;
  entry.writing = true;
  writing_.push_back(&entry);
}

/// Waits for the oldest one.
void SpooledBuffers::finish_write() {
  Entry& entry = *writing_.front();
  writing_.pop_front();
  entry.writing = false;
  wait_for(*entry.ticket);
  free_.push_back(*std::exchange(entry.buffer, std::nullopt));
}

void SpooledBuffers::read(Entry& entry) {
  entry.buffer = take_buffer();
  entry.reading = true;
  throw_if_error(spool_->start_get(*entry.ticket, for_devices(*entry.buffer)));
}

void SpooledBuffers::read_ahead() {
  for (; next_read_ < entries_.size(); ++next_read_) {
    Entry& entry = in_backward(next_read_);
    if (entry.buffer.has_value() || !entry.ticket.has_value()) continue;  // here, or was taken
    if (free_.empty()) return;
    read(entry);
  }
}

void SpooledBuffers::wait_for(engine::Spool::Ticket ticket) {
  const uint64_t begin_ns = base::now_ns();
  const base::Status status = spool_->wait(ticket);
  waited_s_ += base::seconds_since(begin_ns);
  throw_if_error(status);
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
