#include "smartinf/storage/transfer_queue.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <thread>

#include <fmt/format.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr uint64_t kStoodStillNs = 1'000'000'000;     // beyond two watchdog periods
constexpr std::chrono::microseconds kRetryPause{50};  // doubled with every retry
constexpr std::chrono::milliseconds kCloseWait{100};  // one look at the ring while closing

std::string_view verb(IoOp op) {
  switch (op) {
    case IoOp::kRead:
      return "read";
    case IoOp::kWrite:
    case IoOp::kWriteDurable:
      return "write";
    case IoOp::kSync:
      return "sync";
  }
  return "?";
}

std::string_view advice(int system_errno) {
  switch (system_errno) {
    case EIO:
      return "The drive reports a failed transfer: look at dmesg and at the drive's health "
             "(smartctl -a), and run smartinf fsck. The last committed step stands.";
    case ENOSPC:
    case EDQUOT:
      return "The space was reserved at the start, so the file system took it back (copy-on-write, "
             "a quota, a thin volume): free some space. The last committed step stands.";
    case EROFS:
      return "The file system went read-only, as after an error: look at dmesg. The last committed "
             "step stands.";
    case EINTR:
    case EAGAIN:
      return "The system kept putting the transfer off; try again when it is less busy.";
    default:
      return "Look at dmesg. The last committed step stands.";
  }
}

}  // namespace

TransferQueue::TransferQueue(std::unique_ptr<Ring> ring, uint32_t file, std::string path,
                             bool direct, std::chrono::nanoseconds watchdog)
    : ring_(std::move(ring)), file_{file, std::move(path)}, direct_(direct), watchdog_(watchdog) {
  to_submit_.reserve(ring_->depth());
  completed_.resize(ring_->depth());
}

void TransferQueue::set_spool_file(uint32_t file, std::string path) {
  spool_file_ = {file, std::move(path)};
}

std::unique_ptr<Ring> TransferQueue::release_ring() {
  SI_CHECK(in_flight_ == 0, "the ring is given away while transfers are in flight");
  return std::move(ring_);
}

TransferQueue::~TransferQueue() {
  if (const Status closed = close(); !closed.ok()) {
    base::log(base::LogLevel::kWarning,
              Status(closed)
                  .with_context("the store was closed before the transfer completed")
                  .to_string());
  }
}

Status TransferQueue::close() {
  if (ring_ == nullptr) return failure_;
  std::array<Transfer*, 32> done{};
  while (in_flight_ > 0 && failure_.ok()) (void)finish(done, kCloseWait);
  if (in_flight_ == 0) {
    ring_.reset();
    return Status();
  }
  leak_in_flight(std::move(ring_));
  return failure_;
}

Status TransferQueue::run(IoOp op, uint64_t offset_bytes, std::span<std::byte> bytes,
                          base::AlignedBuffer& memory) {
  SI_CHECK(in_flight_ == 0 && failure_.ok(), "run() while transfers are in flight");
  auto transfer = std::make_unique<Transfer>();
  transfer->op = op;
  transfer->offset_bytes = offset_bytes;
  transfer->buffer = bytes;
  transfer->kind = base::TrafficKind::kMetadata;
  start(*transfer);
  Transfer* done = nullptr;
  while (in_flight_ > 0) {
    const Result<size_t> count = finish({&done, 1}, watchdog_);
    if (count.ok()) continue;
    leak_in_flight(std::move(transfer));
    leak_in_flight(std::move(memory));
    return count.status();
  }
  return transfer->status;
}

void TransferQueue::start(Transfer& transfer) {
  SI_CHECK(in_flight_ < ring_->depth(), "more transfers than the ring's depth");
  transfer.status = Status();
  transfer.done_bytes = 0;
  transfer.retries = 0;
  transfer.io_errors = 0;
  transfer.started_ns = base::now_ns();
  transfer.previous = nullptr;
  transfer.next = flying_;
  if (flying_ != nullptr) flying_->previous = &transfer;
  flying_ = &transfer;
  ++in_flight_;
  arm(transfer);
}

void TransferQueue::arm(Transfer& transfer) {
  IoRequest& request = transfer.request;
  request.op = transfer.op;
  request.file = file_of(transfer).index;
  request.offset_bytes = transfer.offset_bytes + transfer.done_bytes;
  request.buffer = transfer.buffer.subspan(transfer.done_bytes);
  request.kind = transfer.kind;
  request.owner = &transfer;
  request.outcome = 0;
  to_submit_.push_back(&request);
}

Status TransferQueue::submit() {
  if (to_submit_.empty()) return Status();
  Status status = ring_->submit(to_submit_);
  to_submit_.clear();
  if (!status.ok() && failure_.ok()) failure_ = status;
  return status;
}

TransferQueue::Outcome TransferQueue::classify_completion(Transfer& transfer) {
  const int64_t outcome = transfer.request.outcome;
  const uint64_t asked = transfer.request.buffer.size();
  if (outcome >= 0 && (transfer.op == IoOp::kSync || static_cast<uint64_t>(outcome) == asked)) {
    transfer.done_bytes = transfer.buffer.size();
    return Outcome::kFinished;
  }

  const auto fail = [&](int system_errno, std::string what, std::string_view how) {
    transfer.status = base::errno_status(system_errno, std::move(what), file_of(transfer).path,
                                         transfer.request.offset_bytes, asked, std::string(how));
    return Outcome::kFinished;
  };

  if (outcome > 0) {
    SI_CHECK(static_cast<uint64_t>(outcome) < asked, "a ring transferred more than was asked for");
    // A direct transfer can only be resumed on a boundary; what lies behind it is moved again.
    uint64_t progress = static_cast<uint64_t>(outcome);
    if (direct_) progress -= progress % base::kIoAlignment;
    transfer.done_bytes += progress;
    if (progress > 0) return Outcome::kAgain;
  } else if (outcome == 0) {
    if (transfer.op == IoOp::kRead) {
      transfer.status =
          Status(ErrorCode::kCorrupt, "the file ends before its contents",
                 "Another program has made it shorter. Restore it from a checkpoint.",
                 base::ErrorPlace{file_of(transfer).path, transfer.request.offset_bytes, asked, 0});
      return Outcome::kFinished;
    }
  } else {
    const int system_errno = static_cast<int>(-outcome);
    const bool passing = system_errno == EINTR || system_errno == EAGAIN;
    const std::string what = fmt::format("cannot {}", verb(transfer.op));
    if (!passing) {
      const bool medium = system_errno == EIO && transfer.op != IoOp::kSync;
      if (!medium || transfer.io_errors >= kIoErrorsMax) {
        return fail(system_errno, what, advice(system_errno));
      }
      ++transfer.io_errors;
      base::log(base::LogLevel::kWarning,
                fmt::format("{} at offset {}, length {}: {} failed (I/O error), trying again",
                            file_of(transfer).path, transfer.request.offset_bytes, asked,
                            verb(transfer.op)));
      return Outcome::kAgain;
    }
    if (transfer.retries >= kRetriesMax) {
      return fail(system_errno, fmt::format("{} after {} attempts", what, transfer.retries + 1),
                  advice(system_errno));
    }
  }
  // No progress, no lasting failure: pause and try again.
  if (transfer.retries >= kRetriesMax) {
    return fail(EIO,
                fmt::format("a {} made no progress after {} attempts", verb(transfer.op),
                            transfer.retries + 1),
                advice(EIO));
  }
  std::this_thread::sleep_for(kRetryPause * (1u << transfer.retries));
  ++transfer.retries;
  return Outcome::kAgain;
}

Result<size_t> TransferQueue::finish(std::span<Transfer*> done, std::chrono::nanoseconds wait) {
  SI_RETURN_IF_ERROR(failure_);
  Result<size_t> count = wait_for_some(done, wait);
  if (!count.ok()) failure_ = count.status();
  return count;
}

Result<size_t> TransferQueue::wait_for_some(std::span<Transfer*> done,
                                            std::chrono::nanoseconds wait) {
  SI_RETURN_IF_ERROR(submit());
  size_t finished = 0;
  const uint64_t start_ns = base::now_ns();
  while (finished == 0 && in_flight_ > 0 && !done.empty()) {
    const auto spent = std::chrono::nanoseconds(base::now_ns() - start_ns);
    const auto left = wait > spent ? wait - spent : std::chrono::nanoseconds(0);
    // Woken at least once in a watchdog period, so that a hanging request is noticed.
    const size_t room = std::min(done.size(), completed_.size());
    SI_ASSIGN_OR_RETURN(const size_t count,
                        ring_->reap({completed_.data(), room}, std::min(left, watchdog_)));
    for (size_t i = 0; i < count; ++i) {
      auto* transfer = static_cast<Transfer*>(completed_[i]->owner);
      if (classify_completion(*transfer) == Outcome::kAgain) {
        arm(*transfer);
        continue;
      }
      if (transfer->previous != nullptr) transfer->previous->next = transfer->next;
      if (transfer->next != nullptr) transfer->next->previous = transfer->previous;
      if (flying_ == transfer) flying_ = transfer->next;
      --in_flight_;
      done[finished++] = transfer;
    }
    SI_RETURN_IF_ERROR(submit());
    SI_RETURN_IF_ERROR(check_watchdog());
    if (count == 0 && left.count() == 0) break;
  }
  return finished;
}

Status TransferQueue::check_watchdog() {
  const uint64_t now = base::now_ns();
  const auto period = static_cast<uint64_t>(watchdog_.count());
  const uint64_t unseen = now - watchdog_checked_ns_;
  if (flying_ == nullptr || unseen < period / 2) return Status();
  watchdog_checked_ns_ = now;
  if (unseen > 2 * period + kStoodStillNs) {
    // The process was stopped, or did not wait: an answer may be there and not yet looked at.
    for (Transfer* transfer = flying_; transfer != nullptr; transfer = transfer->next) {
      transfer->started_ns = std::min(now, transfer->started_ns + unseen);
    }
    return Status();
  }
  for (const Transfer* transfer = flying_; transfer != nullptr; transfer = transfer->next) {
    const uint64_t age = now - transfer->started_ns;
    if (age < period) continue;
    Status status(
        ErrorCode::kTimeout,
        fmt::format("a {} has had no answer for {}", verb(transfer->op),
                    base::format_seconds(static_cast<double>(age) * 1e-9)),
        "The drive or the path to it hangs: look at dmesg. The last committed step stands.",
        base::ErrorPlace{file_of(*transfer).path, transfer->request.offset_bytes,
                         transfer->request.buffer.size(), 0});
    if (age >= period * kWatchdogPeriodsMax) return status;
    base::log(base::LogLevel::kWarning, status.to_string());
  }
  return Status();
}

}  // namespace smartinf::storage
