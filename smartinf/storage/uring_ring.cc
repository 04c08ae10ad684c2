#include "smartinf/storage/uring_ring.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <liburing.h>
#include <sys/uio.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

/// The kernel takes at most this much as one registered buffer.
constexpr uint64_t kRegisteredBytesMax = base::kGiB;

/// So often a submission that the kernel puts off is tried again, each time after twice the pause:
/// 0.4 s in all.
constexpr uint32_t kSubmitRetriesMax = 12;
constexpr std::chrono::microseconds kSubmitPause{100};

Status setup_status(int system_errno) {
  std::string what = "io_uring cannot be used";
  std::string advice;
  switch (system_errno) {
    case ENOSYS:
      what = "this kernel has no io_uring";
      advice = "Use Linux 5.6 or newer.";
      break;
    case EPERM:
      what = "io_uring is forbidden here";
      advice =
          "A container's seccomp profile or the sysctl kernel.io_uring_disabled forbids it: run "
          "with "
          "--security-opt seccomp=unconfined, or set the sysctl to 0.";
      break;
    case ENOMEM:
      what = "no locked memory for io_uring";
      advice = "Raise the locked-memory limit (ulimit -l).";
      break;
    default:
      break;
  }
  return Status(ErrorCode::kUnsupported, std::move(what), std::move(advice),
                base::ErrorPlace{{}, {}, {}, system_errno});
}

class UringRing final : public Ring {
 public:
  explicit UringRing(uint32_t depth) : depth_(depth) {}
  ~UringRing() override {
    if (!ready_) return;
    // The kernel takes a ring apart some time later; what is registered would stay open till then,
    // and a block device refused to whoever opens it next.
    if (files_registered_) (void)io_uring_unregister_files(&ring_);
    if (buffers_registered_) (void)io_uring_unregister_buffers(&ring_);
    io_uring_queue_exit(&ring_);
  }
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  Status init() {
    const int code = io_uring_queue_init(depth_, &ring_, IORING_SETUP_CLAMP);
    if (code < 0) return setup_status(-code);
    ready_ = true;
    // Without it a wait with a time limit takes an entry of the submission queue (before 5.11).
    if ((ring_.features & IORING_FEAT_EXT_ARG) == 0) {
      return Status(ErrorCode::kUnsupported, "this kernel's io_uring is too old",
                    "Use Linux 5.11 or newer.");
    }
    if (ring_.sq.ring_entries < depth_) depth_ = ring_.sq.ring_entries;
    refused_.reserve(depth_);
    return Status();
  }

  std::string_view name() const override { return "io_uring"; }
  uint32_t depth() const override { return depth_; }

  Result<uint32_t> add_file(int descriptor, std::string /*path*/) override {
    files_.push_back(descriptor);
    if (files_registered_) (void)io_uring_unregister_files(&ring_);
    files_registered_ =
        io_uring_register_files(&ring_, files_.data(), static_cast<unsigned>(files_.size())) == 0;
    return static_cast<uint32_t>(files_.size() - 1);
  }

  Status register_memory(std::span<std::byte> memory) override {
    for (uint64_t at = 0; at < memory.size(); at += kRegisteredBytesMax) {
      const uint64_t length = std::min<uint64_t>(kRegisteredBytesMax, memory.size() - at);
      buffers_.push_back(iovec{memory.data() + at, length});
    }
    if (buffers_registered_) (void)io_uring_unregister_buffers(&ring_);
    const int code =
        io_uring_register_buffers(&ring_, buffers_.data(), static_cast<unsigned>(buffers_.size()));
    buffers_registered_ = code == 0;
    if (code == 0) return Status();
    return Status(
        ErrorCode::kOutOfMemory,
        fmt::format("io_uring cannot keep {} of buffers mapped ({}), and maps them at every "
                    "transfer",
                    base::format_bytes(memory.size()),
                    code == -ENOMEM ? "RLIMIT_MEMLOCK is too small" : std::strerror(-code)),
        "This costs a little speed; to avoid it raise the limit of locked memory (ulimit -l, or a "
        "file in /etc/security/limits.d)");
  }

  Status submit(std::span<IoRequest* const> requests) override {
    SI_CHECK(in_flight_ + refused_.size() + requests.size() <= depth_,
             "more requests than the ring's depth");
    size_t submitted = 0;
    for (IoRequest* request : refusal_ == 0 ? requests : std::span<IoRequest* const>()) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      SI_CHECK(entry != nullptr, "more requests than the ring's depth");
      prepare(*entry, *request);
    }
    for (uint32_t tries = 0; refusal_ == 0 && submitted < requests.size();) {
      const int code = io_uring_submit(&ring_);
      if (code > 0) {
        submitted += static_cast<size_t>(code);
        continue;
      }
      // The kernel is short of memory, or a signal came in between: it passes, or it does not.
      const bool passing = code == -EINTR || code == -EAGAIN || code == -EBUSY;
      if (passing && tries < kSubmitRetriesMax) {
        std::this_thread::sleep_for(kSubmitPause * (1u << tries++));
        continue;
      }
      // Requests that it did not take stay in the queue between it and us, so nothing can be added
      // any more.
      refusal_ = code == 0 ? EIO : -code;
      base::log(
          base::LogLevel::kWarning,
          fmt::format(
              "io_uring accepts no more requests ({}); engine.ring = \"threads\" does not use it",
              std::strerror(refusal_)));
    }
    in_flight_ += static_cast<uint32_t>(submitted);
    for (IoRequest* request : requests.subspan(submitted)) {
      request->outcome = -refusal_;
      refused_.push_back(request);
    }
    return Status();
  }

  Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    if (!refused_.empty()) {
      const size_t count = std::min(done.size(), refused_.size());
      std::copy(refused_.end() - static_cast<std::ptrdiff_t>(count), refused_.end(), done.begin());
      refused_.resize(refused_.size() - count);
      return count;
    }
    if (done.empty() || in_flight_ == 0) return size_t{0};
    std::array<io_uring_cqe*, 64> entries{};
    const unsigned want = static_cast<unsigned>(std::min(done.size(), entries.size()));
    unsigned count = io_uring_peek_batch_cqe(&ring_, entries.data(), want);
    if (count == 0 && wait.count() > 0) {
      __kernel_timespec limit{wait.count() / 1'000'000'000, wait.count() % 1'000'000'000};
      io_uring_cqe* first = nullptr;
      const int code = io_uring_wait_cqe_timeout(&ring_, &first, &limit);
      if (code < 0 && code != -ETIME && code != -EINTR && code != -EAGAIN) {
        return base::errno_status(-code, "io_uring cannot be waited on", {}, {}, {},
                                  "Run again with engine.ring = \"threads\".");
      }
      count = io_uring_peek_batch_cqe(&ring_, entries.data(), want);
    }
    for (unsigned i = 0; i < count; ++i) {
      auto* request = static_cast<IoRequest*>(io_uring_cqe_get_data(entries[i]));
      request->outcome = entries[i]->res;
      done[i] = request;
    }
    io_uring_cq_advance(&ring_, count);
    in_flight_ -= count;
    return static_cast<size_t>(count);
  }

 private:
  /// Index of the registered buffer that holds all of `bytes`, or -1.
  int registered_buffer(std::span<const std::byte> bytes) const {
    if (!buffers_registered_) return -1;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const auto* begin = static_cast<const std::byte*>(buffers_[i].iov_base);
      if (bytes.data() >= begin && bytes.data() + bytes.size() <= begin + buffers_[i].iov_len) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  void prepare(io_uring_sqe& entry, IoRequest& request) {
    SI_CHECK(request.file < files_.size(), "a file the ring does not know");
    const int file = files_registered_ ? static_cast<int>(request.file) : files_[request.file];
    const auto length = static_cast<unsigned>(request.buffer.size());
    const int buffer = request.op == IoOp::kSync ? -1 : registered_buffer(request.buffer);
    switch (request.op) {
      case IoOp::kRead:
        if (buffer >= 0) {
          io_uring_prep_read_fixed(&entry, file, request.buffer.data(), length,
                                   request.offset_bytes, buffer);
        } else {
          io_uring_prep_read(&entry, file, request.buffer.data(), length, request.offset_bytes);
        }
        break;
      case IoOp::kWrite:
      case IoOp::kWriteDurable:
        if (buffer >= 0) {
          io_uring_prep_write_fixed(&entry, file, request.buffer.data(), length,
                                    request.offset_bytes, buffer);
        } else {
          io_uring_prep_write(&entry, file, request.buffer.data(), length, request.offset_bytes);
        }
        if (request.op == IoOp::kWriteDurable) entry.rw_flags |= RWF_DSYNC;
        break;
      case IoOp::kSync:
        io_uring_prep_fsync(&entry, file, IORING_FSYNC_DATASYNC);
        break;
    }
    if (files_registered_) entry.flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(&entry, &request);
  }

  io_uring ring_{};
  bool ready_ = false;
  uint32_t depth_;
  uint32_t in_flight_ = 0;           // requests that the kernel has
  int refusal_ = 0;                  // errno with which it refused a request for good
  std::vector<IoRequest*> refused_;  // to be handed back; capacity: depth
  std::vector<int> files_;
  bool files_registered_ = false;
  std::vector<iovec> buffers_;
  bool buffers_registered_ = false;
};

}  // namespace

Result<std::unique_ptr<Ring>> make_uring_ring(uint32_t depth) {
  auto ring = std::make_unique<UringRing>(depth);
  SI_RETURN_IF_ERROR(ring->init());
  return std::unique_ptr<Ring>(std::move(ring));
}

}  // namespace smartinf::storage
