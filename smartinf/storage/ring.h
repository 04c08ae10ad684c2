// The one narrow interface to the disk: caller-owned requests go in, completions come out. Kinds:
// uring (io_uring), threads (a pool of preadv/pwritev), memory (a twin without a disk) and faulty
// (a wrapper that misbehaves by seed). A ring does not split, resume or retry; the store above
// does.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"

namespace smartinf::storage {

enum class IoOp : uint8_t {
  kRead,
  kWrite,
  kWriteDurable,  // as if followed by a sync of these bytes (RWF_DSYNC)
  kSync,          // fdatasync of the file
};

/// A transfer. Owned by the caller and not moved between submit() and its completion.
struct IoRequest {
  IoOp op = IoOp::kRead;
  uint32_t file = 0;          // index from Ring::add_file
  uint64_t offset_bytes = 0;  // multiple of kIoAlignment on a direct file
  std::span<std::byte> buffer;
  base::TrafficKind kind = base::TrafficKind::kState;  // for the links that look at it
  void* owner = nullptr;  // the caller's own; the ring does not touch it

  /// Set at completion: bytes transferred (maybe fewer than asked for), or -errno.
  int64_t outcome = 0;

  // The ring's own while in flight.
  IoRequest* next = nullptr;
};

/// Threads: one thread at a time; add_file and register_memory only while nothing is in flight.
class Ring {
 public:
  virtual ~Ring() = default;

  virtual std::string_view name() const = 0;
  /// Requests that may be in flight at once. Submitting more is a bug.
  virtual uint32_t depth() const = 0;

  /// Makes an open descriptor known and returns its index. The ring does not own it.
  virtual base::Result<uint32_t> add_file(int descriptor, std::string path) = 0;
  /// Tells the ring where buffers lie, so that the kernel maps them once. A refusal (kOutOfMemory:
  /// RLIMIT_MEMLOCK, say) costs speed only: the ring works on without.
  virtual base::Status register_memory(std::span<std::byte> memory) = 0;

  /// Starts the requests. Never blocks for the transfer itself. What cannot be started is handed
  /// back by reap() with the reason.
  virtual base::Status submit(std::span<IoRequest* const> requests) = 0;

  /// Puts finished requests into `done` and returns how many. Waits up to `wait` for the first one.
  virtual base::Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) = 0;
};

enum class RingKind : uint8_t { kAuto, kUring, kThreads };
inline constexpr std::array<std::string_view, 3> kRingKindNames{"auto", "uring", "threads"};
constexpr base::EnumNames enum_names(RingKind) { return kRingKindNames; }

struct RingOptions {
  RingKind kind =
      RingKind::kAuto;  // kAuto: io_uring where it works, else threads (logged, with why)
  uint32_t depth = 64;
  uint32_t threads = 8;  // of the thread ring
};

base::Result<std::unique_ptr<Ring>> make_ring(const RingOptions& options);

/// Ok where io_uring works; otherwise why not (kernel without it, forbidden by seccomp or
/// sysctl...).
base::Status probe_uring();

}  // namespace smartinf::storage
