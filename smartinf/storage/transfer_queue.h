// Transfers that are whole or failed: a ring with short transfers resumed, passing troubles retried
// within bounds, lasting ones turned into typed errors, and hanging requests named.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/storage/ring.h"

namespace smartinf::storage {

/// Owned by the caller and not moved between start() and completion; reusable afterwards.
struct Transfer {
  IoOp op = IoOp::kRead;
  bool spool = false;  // of TransferQueue::set_spool_file's file
  uint64_t offset_bytes = 0;
  std::span<std::byte> buffer;
  base::TrafficKind kind = base::TrafficKind::kState;
  void* owner = nullptr;  // the caller's own

  base::Status status;  // set at completion

  // The queue's own while in flight.
  IoRequest request;
  uint64_t done_bytes = 0;
  uint32_t retries = 0;
  uint32_t io_errors = 0;
  uint64_t started_ns = 0;
  Transfer* next = nullptr;
  Transfer* previous = nullptr;
};

/// Threads: one at a time.
class TransferQueue {
 public:
  /// Interruptions (EINTR, EAGAIN, no progress) are retried so often, each after a longer pause...
  static constexpr uint32_t kRetriesMax = 10;
  /// ...and failures of the medium so often at once. A failed sync never: the kernel may have
  /// dropped the data that it could not write, and a second sync would call that a success.
  static constexpr uint32_t kIoErrorsMax = 2;
  /// After so many watchdog periods without a completion a request is given up for lost.
  static constexpr uint32_t kWatchdogPeriodsMax = 5;

  /// `path` is for messages. The ring knows the file as `file`.
  TransferQueue(std::unique_ptr<Ring> ring, uint32_t file, std::string path, bool direct,
                std::chrono::nanoseconds watchdog);
  /// As close(), whose failure it logs.
  ~TransferQueue();
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  /// Where transfers of the spool go, direct or not as the others; before the first of them.
  void set_spool_file(uint32_t file, std::string path);

  /// Queues a transfer for the next submit(). Bound: ring depth in flight at once.
  void start(Transfer& transfer);
  /// Hands what start() queued to the ring.
  base::Status submit();
  /// Puts finished transfers into `done`, waiting up to `wait` for the first.
  /// Errors: kTimeout (a request hangs: named), or the ring's own failure.
  base::Result<size_t> finish(std::span<Transfer*> done, std::chrono::nanoseconds wait);

  /// Starts a transfer of [bytes.size()] and waits for it; nothing else is in flight. `memory`
  /// holds `bytes`. Errors: the transfer's; the queue's (failed() then), which takes `memory` for
  /// good.
  base::Status run(IoOp op, uint64_t offset_bytes, std::span<std::byte> bytes,
                   base::AlignedBuffer& memory);
  /// Waits for everything in flight, which belongs to the kernel until then, and is of no use
  /// afterwards. Errors: kTimeout (a request hangs: named) or the ring's own: then transfers and
  /// memory in flight may still be written to, and the caller must leak_in_flight() them.
  base::Status close();
  /// Whether finish() has failed: a request hangs, or the ring failed.
  bool failed() const { return !failure_.ok(); }

  uint32_t in_flight() const { return in_flight_; }
  uint32_t depth() const { return ring_->depth(); }
  Ring& ring() { return *ring_; }
  /// Gives the ring away; nothing is in flight, and the queue is of no further use.
  std::unique_ptr<Ring> release_ring();
  const std::string& path() const { return file_.path; }

 private:
  struct File {
    uint32_t index = 0;  // of the ring
    std::string path;    // for messages
  };
  const File& file_of(const Transfer& transfer) const {
    return transfer.spool ? spool_file_ : file_;
  }
  enum class Outcome { kFinished, kAgain };
  Outcome classify_completion(Transfer& transfer);
  void arm(Transfer& transfer);
  base::Status check_watchdog();
  base::Result<size_t> wait_for_some(std::span<Transfer*> done, std::chrono::nanoseconds wait);

  std::unique_ptr<Ring> ring_;
  File file_;
  File spool_file_;
  bool direct_;
  std::chrono::nanoseconds watchdog_;
  uint32_t in_flight_ = 0;
  base::Status failure_;  // what is in flight may never complete
  uint64_t watchdog_checked_ns_ = 0;
  Transfer* flying_ = nullptr;         // doubly linked, for the watchdog
  std::vector<IoRequest*> to_submit_;  // capacity: depth
  std::vector<IoRequest*> completed_;  // capacity: depth
};

}  // namespace smartinf::storage
