// A ring whose requests fail when a test says so: for what devices and updaters do then. (Faults by
// seed are storage's, faulty_ring.h.)
#pragma once

#include <atomic>
#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "smartinf/storage/forwarding_ring.h"

namespace smartinf::csd {

/// Fails, damages, loses or holds back chosen requests while it is armed.
struct Faults {
  /// kHoldWrites: they are done and nobody hears of it; afterwards of one at a time. kHoldReads:
  /// they begin when it is over.
  enum class What {
    kNothing,
    kFailReads,
    kFailWrites,
    kFlipReads,
    kDropWrites,
    kLoseAll,
    kHoldWrites,
    kHoldReads
  };
  std::atomic<What> what{What::kNothing};
  std::atomic<uint32_t> after{0};  // so many requests of that direction still pass
  std::atomic<uint32_t> done{0};
  base::TrafficKind kind = base::TrafficKind::kState;
};

class FaultRing final : public storage::ForwardingRing {
 public:
  FaultRing(std::unique_ptr<storage::Ring> inner, Faults& faults)
      : ForwardingRing(std::move(inner)), faults_(faults) {}
  base::Status submit(std::span<storage::IoRequest* const> requests) override {
    std::vector<storage::IoRequest*> passed;
    for (storage::IoRequest* request : requests) {
      // A write that the drive says it did, and did not.
      const bool dropped = faults_.what == Faults::What::kDropWrites &&
                           request->op == storage::IoOp::kWrite && request->kind == faults_.kind;
      if (dropped) {
        ++faults_.done;
        request->outcome = static_cast<int64_t>(request->buffer.size());
      }
      const bool held = faults_.what == Faults::What::kHoldReads &&
                        request->op == storage::IoOp::kRead && request->kind == faults_.kind;
      (dropped ? kept_ : held ? held_ : passed).push_back(request);
    }
    return ForwardingRing::submit(passed);
  }
  base::Result<size_t> reap(std::span<storage::IoRequest*> done,
                            std::chrono::nanoseconds wait) override {
    const bool holds = faults_.what == Faults::What::kHoldWrites;
    if (faults_.what != Faults::What::kHoldReads && !held_.empty()) {
      SI_RETURN_IF_ERROR(ForwardingRing::submit(std::exchange(held_, {})));
    }
    if (!holds && !kept_.empty() && !done.empty()) {
      done[0] = kept_.back();
      kept_.pop_back();
      return size_t{1};
    }
    SI_ASSIGN_OR_RETURN(size_t count, ForwardingRing::reap(done, wait));
    for (size_t i = 0; i < count;) {
      if (holds && done[i]->op == storage::IoOp::kWrite && done[i]->kind == faults_.kind) {
        kept_.push_back(done[i]);
        ++faults_.done;
        done[i] = done[--count];
        continue;
      }
      if (!treat(*done[i])) {
        done[i] = done[--count];  // lost: never completes
        continue;
      }
      ++i;
    }
    return count;
  }

 private:
  bool treat(storage::IoRequest& request) {
    using What = Faults::What;
    const What what = faults_.what;
    const bool read = request.op == storage::IoOp::kRead;
    const bool meant = what == What::kLoseAll || (what == What::kFailWrites) != read;
    if (what == What::kNothing || what == What::kDropWrites || what == What::kHoldWrites ||
        what == What::kHoldReads) {
      return true;
    }
    if (!meant || request.kind != faults_.kind) return true;
    if (faults_.after > 0) {
      --faults_.after;
      return true;
    }
    ++faults_.done;
    if (what == What::kLoseAll) return false;
    if (what == What::kFlipReads) {
      request.buffer[request.buffer.size() / 3] ^= std::byte{4};
    } else {
      request.outcome = -EIO;
    }
    return true;
  }

  Faults& faults_;
  std::vector<storage::IoRequest*> kept_;  // done, and not said
  std::vector<storage::IoRequest*> held_;  // not begun
};

}  // namespace smartinf::csd
