#include "apps/crashtest/flawed_ring.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "smartinf/storage/format.h"
#include "smartinf/storage/forwarding_ring.h"

namespace smartinf::crash {
namespace {

using base::Result;
using base::Status;
using storage::IoOp;
using storage::IoRequest;

class FlawedRing final : public storage::ForwardingRing {
 public:
  FlawedRing(std::unique_ptr<storage::Ring> inner, CommitFlaw flaw)
      : ForwardingRing(std::move(inner)), flaw_(flaw) {}

  Status submit(std::span<IoRequest* const> requests) override {
    std::vector<IoRequest*> passed;
    for (IoRequest* request : requests) {
      if (request->op == IoOp::kSync) {
        request->outcome = 0;
        pretended_.push_back(request);
      } else if (flaw_ == CommitFlaw::kSuperblockFirst && request->op == IoOp::kWrite &&
                 request->offset_bytes >= storage::kSuperblockAreaBytes) {
        Held& held = held_.emplace_back();
        held.bytes.assign(request->buffer.begin(), request->buffer.end());
        held.request.op = IoOp::kWrite;
        held.request.file = request->file;
        held.request.offset_bytes = request->offset_bytes;
        held.request.buffer = held.bytes;
        request->outcome = static_cast<int64_t>(request->buffer.size());
        pretended_.push_back(request);
      } else {
        if (flaw_ == CommitFlaw::kNoSync && request->op == IoOp::kWriteDurable) {
          request->op = IoOp::kWrite;
        }
        passed.push_back(request);
      }
    }
    passed_ += passed.size();
    return ForwardingRing::submit(passed);
  }

  Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    size_t count = 0;
    while (count < done.size() && !pretended_.empty()) {
      done[count++] = pretended_.back();
      pretended_.pop_back();
    }
    if (count > 0) return count;
    SI_ASSIGN_OR_RETURN(count, ForwardingRing::reap(done, wait));
    passed_ -= count;
    bool superblock = false;
    for (size_t i = 0; i < count; ++i) {
      superblock = superblock || done[i]->op == IoOp::kWriteDurable;
    }
    if (superblock && passed_ == 0) SI_RETURN_IF_ERROR(write_held());
    return count;
  }

 private:
  struct Held {
    std::vector<std::byte> bytes;
    IoRequest request;
  };

  Status write_held() {
    for (Held& held : held_) SI_RETURN_IF_ERROR(run(held.request));
    held_.clear();
    IoRequest sync;
    sync.op = IoOp::kSync;
    return run(sync);
  }

  Status run(IoRequest& request) {
    IoRequest* pointer = &request;
    SI_RETURN_IF_ERROR(ForwardingRing::submit({&pointer, 1}));
    for (size_t count = 0; count == 0;) {
      SI_ASSIGN_OR_RETURN(count, ForwardingRing::reap({&pointer, 1}, std::chrono::seconds(1)));
    }
    return Status();
  }

  CommitFlaw flaw_;
  size_t passed_ = 0;
  std::vector<IoRequest*> pretended_;
  std::deque<Held> held_;
};

}  // namespace

std::unique_ptr<storage::Ring> make_flawed_ring(std::unique_ptr<storage::Ring> inner,
                                                CommitFlaw flaw) {
  if (flaw == CommitFlaw::kNone) return inner;
  return std::make_unique<FlawedRing>(std::move(inner), flaw);
}

}  // namespace smartinf::crash
