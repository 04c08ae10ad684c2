// Bytes of units and micro batches between forward and backward, in a fixed number of buffers; what
// has no room there is on the devices.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/spool.h"

namespace smartinf::train {

/// Backward goes from the last unit to the first, so the bytes of the first units are wanted last,
/// and are the ones that are written to the devices.
///
/// Threads: one caller. Errors: StatusError of the devices.
class SpooledBuffers {
 public:
  /// Buffers beyond those that cannot be written: what is on its way.
  static constexpr uint64_t kOnTheirWay = 4;

  /// All memory is allocated here: `buffers` of at most `bytes` each, at least kOnTheirWay. `spool`
  /// outlives this. Errors: kOutOfMemory.
  static base::Result<SpooledBuffers> make(engine::Spool& spool, uint64_t buffers, uint64_t bytes);
  SpooledBuffers(SpooledBuffers&&) = default;
  SpooledBuffers& operator=(SpooledBuffers&&) = delete;
  ~SpooledBuffers();

  uint64_t bytes_max() const { return buffer_bytes_; }

  /// A pass begins; what was kept before is dropped.
  void begin(size_t units, size_t batches);
  /// A buffer to be filled. At most as many as there are beyond kOnTheirWay stay unreleased.
  std::span<std::byte> put(size_t unit, size_t batch);
  /// It is filled and not read before take(): it may leave memory.
  void release(size_t unit, size_t batch);
  /// In backward, which begins with the first call: batch after batch of the last unit, then of the
  /// one before; those that were not put may be left out. There until the next call, and not kept
  /// any longer.
  std::span<std::byte> take(size_t unit, size_t batch);

 private:
  SpooledBuffers(engine::Spool& spool, base::AlignedBuffer memory, uint64_t buffer_bytes);

  struct Entry {
    std::optional<uint32_t> buffer;
    std::optional<engine::Spool::Ticket> ticket;
    bool released = false;
    bool writing = false;
    bool reading = false;
  };
  Entry& at(size_t unit, size_t batch) { return entries_[unit * batches_ + batch]; }
  Entry& in_backward(size_t use);
  uint32_t take_buffer();
  void write_out();
  void finish_write();
  void read(Entry& entry);
  void read_ahead();
  void drop(Entry& entry);
  std::span<std::byte> bytes_of(uint32_t buffer) {
    return memory_.bytes().subspan(buffer * buffer_bytes_, buffer_bytes_);
  }

  engine::Spool* spool_;
  base::AlignedBuffer memory_;
  uint64_t buffer_bytes_;
  std::vector<uint32_t> free_;  // buffers

  size_t batches_ = 0;
  std::vector<Entry> entries_;  // by unit and batch
  std::deque<Entry*> writing_;  // oldest first
  Entry* taken_ = nullptr;      // by the last take()
  size_t next_read_ = 0;        // in backward's order
};

}  // namespace smartinf::train
