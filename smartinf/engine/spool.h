// Bytes that leave memory for an updater's devices and come back within this process: what a step
// keeps for its own end. They belong to no step of the state; nothing of them is left afterwards.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/engine/device_replies.h"

namespace smartinf::engine {

/// Threads: one at a time, not necessarily the one that calls the updater. Any number of puts and
/// gets may be in flight. Each span lies on one device whole; together they fill the devices
/// evenly. Memory is that of the caller, aligned to base::kIoAlignment and of a size that is a
/// multiple of it. After an error a device may still read or write it, for as long as the process
/// lives: who frees it gives it to retire().
class Spool {
 public:
  /// Ticket that put() returns; used up by drop().
  struct Ticket {
    uint64_t value = 0;
    friend bool operator==(Ticket, Ticket) = default;
  };
  struct Counts {
    uint64_t put_bytes = 0;
    uint64_t got_bytes = 0;     // from devices
    uint64_t copied_bytes = 0;  // wanted back before wait(): from the caller's own memory
    uint64_t used_bytes_max = 0;
  };

  /// devices: with DeviceInfo::spool_bytes, which nobody else uses. They and `watch` are destroyed
  /// before this and after this, in that order.
  Spool(std::span<const std::unique_ptr<csd::Device>> devices, DeviceWatch& watch);
  Spool(const Spool&) = delete;
  Spool& operator=(const Spool&) = delete;

  /// Starts to write. `data` stays as it is until wait() or drop() of the ticket has returned.
  /// Errors: kNoSpace (with what is needed and free), kInvalidArgument.
  base::Result<Ticket> put(std::span<const std::byte> data);
  /// Waits for the put, or for the get that was started last. Errors: the device's, named; of a
  /// get, it can be started again.
  base::Status wait(Ticket ticket);
  /// Whether wait() would return at once.
  bool settled(Ticket ticket);
  /// Starts to read all of it into `out`, which is complete when wait() returns. Before the put has
  /// been waited for it is copied from `data` at once, and wait() waits for nothing; the put goes
  /// on, and `data` stays until drop(). Errors: kInvalidArgument (another size), of the put;
  /// kFailedPrecondition, the last get was not waited for.
  base::Status start_get(Ticket ticket, std::span<std::byte> out);
  /// Its space is free. Waits for what is under way.
  void drop(Ticket ticket);
  /// Frees memory of puts and gets that were waited for or dropped; after an error it is kept until
  /// the process ends.
  void retire(std::shared_ptr<void> memory);

  uint64_t size_bytes() const { return size_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }
  const Counts& counts() const { return counts_; }

 private:
  /// The spool of one device.
  struct Area {
    csd::Device* device = nullptr;
    uint64_t size_bytes = 0;
    uint64_t free_bytes = 0;
    std::map<uint64_t, uint64_t> holes;  // offset -> bytes; no two of them touch
  };
  struct Span {
    size_t area = 0;
    uint64_t offset_bytes = 0;
    std::span<const std::byte> data;    // of the put
    const csd::Command* put = nullptr;  // under way
    const csd::Command* get = nullptr;  // likewise
    base::Status put_status;
    base::Status get_status;
    bool waited = false;  // for the put: `data` is not there any more
    bool got = false;     // a get was started
  };

  /// Where [bytes] fit: the emptiest device that has a hole for them.
  base::Result<Span> allocate(uint64_t bytes);
  void free(const Span& span);
  Span& span_of(Ticket ticket);
  /// Notes a device's answer.
  void take(csd::Completion&& done);
  /// Takes answers until the command has its own.
  void wait_for(const csd::Command* const& command);

  DeviceReplies replies_;
  std::vector<Area> areas_;
  std::unordered_map<uint64_t, Span> spans_;                     // by ticket
  std::unordered_map<const csd::Command*, uint64_t> under_way_;  // -> ticket
  uint64_t next_ticket_ = 1;
  uint64_t size_bytes_ = 0;
  uint64_t used_bytes_ = 0;
  bool failed_ = false;  // a device may still use memory that was in its hands
  Counts counts_;
};

}  // namespace smartinf::engine
