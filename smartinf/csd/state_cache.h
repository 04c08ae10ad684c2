// The state of some subgroups in this machine's memory, beside the drive: their updates read it
// there, change it in place and write it from there. What is in it is as the drive has it, block
// for block with the same checksums, or newer where the store holds it back (Store::hold).
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/slot.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

struct DeviceParts;

/// Subgroups are named by their index in the layout. Threads: allocate() before the device's I/O
/// thread has a command, the rest on that thread; the readings from any.
///
///   what happened                    planes here      drive
///   opened                           none             all
///   update of step s                 none, then s     s - 1, s once written (or held back)
///   commit(s)                        s counts         s
///   abort(s)                     none             s - 1
///   a write from elsewhere           all but those    as written
class StateCache {
 public:
  /// Room for all planes but a residual, which updates do not touch. Not made known to the ring:
  /// that would pin it all for as long as the device is open. Errors: kOutOfMemory.
  base::Status allocate(const storage::Store& store, std::span<const uint32_t> subgroups);

  bool holds(uint32_t subgroup) const { return !entry_of_.empty() && entry_of_[subgroup] != kNone; }
  /// Its planes as in an extent; empty when it is not cached.
  std::span<std::byte> extent(uint32_t subgroup) const;
  /// Planes whose committed contents are here.
  uint32_t current(uint32_t subgroup) const;
  /// Planes whose newest contents are here only.
  uint32_t unwritten(uint32_t subgroup) const;

  /// The planes are changed from here on, until updated() says that they are whole again.
  void begin_update(uint32_t subgroup);
  /// held: the store holds them back (Store::hold).
  void updated(uint32_t subgroup, uint32_t plane_mask, bool held);
  /// The store got other contents for these planes than lie here.
  void overwritten(uint32_t subgroup, uint32_t plane_mask);
  /// Marks the subgroup's planes as being on the drive as well.
  void flushed(uint32_t subgroup);

  void commit();
  /// Forgets what the step in progress changed.
  void abort();
  /// Forgets everything: what is here and what is on the drive is of no step.
  void drop();

  uint64_t memory_bytes() const { return memory_.size(); }
  uint32_t subgroups() const { return static_cast<uint32_t>(entries_.size()); }
  /// Cached subgroups with planes that are unwritten.
  std::vector<uint32_t> all_unwritten() const;

  /// Counts planes that a read found here.
  void count_hit(const storage::Store& store, uint32_t subgroup, uint32_t plane_mask);
  uint64_t hit_bytes() const { return hit_bytes_.load(std::memory_order_relaxed); }

  /// For a device that goes while the drive may still read or write there.
  base::AlignedBuffer take_memory() { return std::move(memory_); }

 private:
  static constexpr uint32_t kNone = ~0u;
  struct Entry {
    uint32_t subgroup = 0;
    std::span<std::byte> extent;
    uint32_t planes = 0;     // whose contents are whole
    uint32_t unwritten = 0;  // of them, those that the drive does not have
    bool in_step = false;    // changed by the step in progress
  };
  Entry* find(uint32_t subgroup);
  const Entry* find(uint32_t subgroup) const;

  base::AlignedBuffer memory_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> entry_of_;  // by subgroup; empty when nothing is cached
  std::atomic<uint64_t> hit_bytes_{0};
};

/// Brings to the drive what only the cache has, through the slots' transfers.
/// Threads: the device's I/O thread.
class StateFlush {
 public:
  explicit StateFlush(DeviceParts& parts) : parts_(parts) {}

  /// Between steps, with all slots free. Answers the command, if there is one, at the end.
  void start(Command* command);
  bool running() const { return running_; }
  /// Status of the last flush.
  const base::Status& status() const { return status_; }
  /// The store cannot go on: see TransferHandler::abandon.
  void abandon(const base::Status& status);

  void on_transfer(Transfer& transfer);

 private:
  void write_next(Slot& slot);
  void end_if_done();

  DeviceParts& parts_;
  Command* command_ = nullptr;
  bool running_ = false;
  base::Status status_;
  std::vector<uint32_t> left_;  // subgroups to be written, the next one last
  uint32_t in_flight_ = 0;
};

}  // namespace smartinf::csd
