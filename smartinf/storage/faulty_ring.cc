#include "smartinf/storage/faulty_ring.h"

#include <algorithm>
#include <cerrno>
#include <random>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/state_format.h"
#include "smartinf/storage/forwarding_ring.h"

namespace smartinf::storage {
namespace {

using base::Result;
using base::Status;

constexpr uint32_t kDelayReapsMax = 5;

class FaultyRing final : public ForwardingRing {
 public:
  FaultyRing(std::unique_ptr<Ring> inner, const FaultOptions& options, FaultCounts* counts)
      : ForwardingRing(std::move(inner)),
        options_(options),
        counts_(counts != nullptr ? *counts : own_counts_),
        random_(options.seed),
        twins_(depth()) {
    for (Twin& twin : twins_) free_.push_back(&twin);
  }

  Status submit(std::span<IoRequest* const> requests) override {
    std::vector<IoRequest*> passed;
    for (IoRequest* request : requests) {
      ++counts_.requests;
      SI_CHECK(!free_.empty(), "more requests than the ring's depth");
      Twin& twin = *free_.back();
      free_.pop_back();
      twin.original = request;
      twin.delay = 0;
      twin.flip = false;
      twin.request = IoRequest();
      twin.request.op = request->op;
      twin.request.file = request->file;
      twin.request.offset_bytes = request->offset_bytes;
      twin.request.buffer = request->buffer;
      twin.request.kind = request->kind;
      twin.request.owner = &twin;
      if (const int64_t outcome = spoil(twin); outcome != kPass) {
        twin.request.outcome = outcome;
        held_.push_back(&twin);
      } else {
        passed.push_back(&twin.request);
      }
    }
    return ForwardingRing::submit(passed);
  }

  Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    std::vector<IoRequest*> finished(twins_.size());
    // Requests that are held back here are due soon: the inner ring is not waited for.
    const auto patience = held_.empty() ? wait : std::chrono::nanoseconds(0);
    SI_ASSIGN_OR_RETURN(const size_t count, ForwardingRing::reap(finished, patience));
    for (size_t i = 0; i < count; ++i) held_.push_back(static_cast<Twin*>(finished[i]->owner));
    size_t given = 0;
    for (size_t i = 0; i < held_.size();) {
      Twin& twin = *held_[i];
      if (given == done.size() || twin.delay > 0) {
        if (twin.delay > 0) --twin.delay;
        ++i;
        continue;
      }
      held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
      twin.original->outcome = twin.request.outcome;
      if (twin.flip && twin.request.op == IoOp::kRead && twin.request.outcome > 0) {
        flip_bit(twin.original->buffer.first(static_cast<size_t>(twin.request.outcome)));
      }
      done[given++] = twin.original;
      free_.push_back(&twin);
    }
    return given;
  }

 private:
  struct Twin {
    IoRequest request;  // what the inner ring sees
    IoRequest* original = nullptr;
    base::AlignedBuffer copy;  // of data damaged on its way to the drive
    uint32_t delay = 0;        // in reaps
    bool flip = false;         // damage what was read
  };
  static constexpr int64_t kPass = ~int64_t{0} << 32;  // no outcome looks like it

  bool chance(double probability) {
    return probability > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < probability;
  }

  void flip_bit(std::span<std::byte> bytes) {
    const uint64_t bit = random_() % (bytes.size() * 8);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }

  /// Changes the request, or gives the outcome with which it ends without reaching the drive.
  int64_t spoil(Twin& twin) {
    IoRequest& request = twin.request;
    if (request.op != IoOp::kSync && request.offset_bytes < options_.from_offset_bytes)
      return kPass;
    const bool writes = request.op == IoOp::kWrite || request.op == IoOp::kWriteDurable;
    const uint64_t length = request.buffer.size();
    if (chance(options_.delayed)) {
      twin.delay = 1 + static_cast<uint32_t>(random_() % kDelayReapsMax);
      ++counts_.visible;
    }
    const auto fail = [&](int system_errno) {
      ++counts_.visible;
      return -static_cast<int64_t>(system_errno);
    };
    if (chance(options_.interrupted)) return fail(EINTR);
    if (chance(options_.try_again)) return fail(EAGAIN);
    if (chance(options_.io_error)) return fail(EIO);
    if (writes && chance(options_.no_space)) return fail(ENOSPC);
    if (writes && chance(options_.lost)) {
      ++counts_.silent;
      return static_cast<int64_t>(length);
    }
    if (request.op == IoOp::kSync) return kPass;
    if (length > base::kIoAlignment && chance(options_.short_transfer)) {
      ++counts_.visible;
      // On a boundary, as direct transfers are cut; sometimes nothing at all.
      const uint64_t units = length / base::kIoAlignment;
      const uint64_t kept = (1 + random_() % (units - 1)) * base::kIoAlignment;
      request.buffer = request.buffer.first(kept);
    }
    if (chance(options_.misdirected)) {
      ++counts_.silent;
      const bool down = request.offset_bytes >= 2 * base::kIoAlignment + options_.from_offset_bytes;
      if (down) request.offset_bytes -= base::kIoAlignment;
    }
    if (chance(options_.flipped_bit)) {
      ++counts_.silent;
      if (writes) {
        auto copy = base::AlignedBuffer::allocate(request.buffer.size());
        SI_CHECK(copy.ok(), "no memory for a damaged copy");
        twin.copy = std::move(*copy);
        const std::span<std::byte> damaged = twin.copy.bytes().first(request.buffer.size());
        std::copy(request.buffer.begin(), request.buffer.end(), damaged.begin());
        flip_bit(damaged);
        request.buffer = damaged;
      } else {
        twin.flip = true;
      }
    }
    return kPass;
  }

  FaultOptions options_;
  FaultCounts own_counts_;
  FaultCounts& counts_;
  std::mt19937_64 random_;
  std::vector<Twin> twins_;
  std::vector<Twin*> free_;
  std::vector<Twin*> held_;  // finished, not handed out
};

}  // namespace

std::unique_ptr<Ring> make_faulty_ring(std::unique_ptr<Ring> inner, const FaultOptions& options,
                                       FaultCounts* counts) {
  return std::make_unique<FaultyRing>(std::move(inner), options, counts);
}

}  // namespace smartinf::storage
