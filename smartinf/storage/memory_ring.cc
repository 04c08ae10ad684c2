#include "smartinf/storage/memory_ring.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace smartinf::storage {

using base::Result;
using base::Status;

void MemoryDisk::settle(CutFate fate, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (const Write& write : unsynced_) {
    const bool kept = write.durable || fate == CutFate::kKept ||
                      (fate == CutFate::kWhole && (random() & 1u) != 0);
    for (uint64_t at = 0; at < write.bytes.size(); at += kSectorBytes) {
      const bool sector_kept = kept || (fate == CutFate::kTorn && (random() & 1u) != 0);
      if (!sector_kept) continue;
      const uint64_t length = std::min<uint64_t>(kSectorBytes, write.bytes.size() - at);
      std::memcpy(durable_.data() + write.offset_bytes + at, write.bytes.data() + at, length);
    }
  }
  unsynced_.clear();
  visible_ = durable_;
}

class MemoryRing final : public Ring {
 public:
  MemoryRing(MemoryDisk& disk, PowerSupply& power, uint32_t depth, uint64_t seed)
      : disk_(disk), power_(power), depth_(depth), random_(seed) {}

  std::string_view name() const override { return "memory"; }
  uint32_t depth() const override { return depth_; }
  Result<uint32_t> add_file(int /*descriptor*/, std::string /*path*/) override {
    return uint32_t{0};
  }
  base::Status register_memory(std::span<std::byte> /*memory*/) override { return base::Status(); }

  Status submit(std::span<IoRequest* const> requests) override {
    SI_CHECK(in_flight_.size() + requests.size() <= depth_, "more requests than the ring's depth");
    for (IoRequest* request : requests) {
      in_flight_.push_back(request);
      if (!power_.pass()) continue;
      if (request->op == IoOp::kSync) {
        for (MemoryDisk::Write& write : disk_.unsynced_) {
          write.covered = write.covered || write.request == nullptr;
        }
      } else if (request->op != IoOp::kRead) {
        disk_.unsynced_.push_back(
            {request, request->offset_bytes, {request->buffer.begin(), request->buffer.end()}});
      }
    }
    return Status();
  }

  Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds /*wait*/) override {
    // Some, not all, so that what is submitted next meets requests still in flight.
    size_t count = in_flight_.empty() ? 0 : 1 + random_() % in_flight_.size();
    count = std::min(count, done.size());
    for (size_t i = 0; i < count; ++i) {
      const size_t chosen = random_() % in_flight_.size();
      IoRequest* request = in_flight_[chosen];
      in_flight_[chosen] = in_flight_.back();
      in_flight_.pop_back();
      request->outcome = power_.pass() ? complete(*request) : -ESHUTDOWN;
      done[i] = request;
    }
    return count;
  }

 private:
  int64_t complete(IoRequest& request) {
    const uint64_t length = request.buffer.size();
    if (request.op == IoOp::kSync) {
      std::erase_if(disk_.unsynced_, [&](const MemoryDisk::Write& write) {
        if (write.covered) {
          std::memcpy(disk_.durable_.data() + write.offset_bytes, write.bytes.data(),
                      write.bytes.size());
        }
        return write.covered;
      });
      return 0;
    }
    if (request.offset_bytes >= disk_.visible_.size()) {
      return request.op == IoOp::kRead ? 0 : -ENOSPC;
    }
    const uint64_t moved = std::min<uint64_t>(length, disk_.visible_.size() - request.offset_bytes);
    if (request.op == IoOp::kRead) {
      std::memcpy(request.buffer.data(), disk_.visible_.data() + request.offset_bytes, moved);
      return static_cast<int64_t>(moved);
    }
    std::memcpy(disk_.visible_.data() + request.offset_bytes, request.buffer.data(), moved);
    const auto write =
        std::find_if(disk_.unsynced_.begin(), disk_.unsynced_.end(),
                     [&](const MemoryDisk::Write& one) { return one.request == &request; });
    SI_CHECK(write != disk_.unsynced_.end(), "a write that was never submitted");
    write->request = nullptr;
    write->bytes.resize(moved);
    write->durable = request.op == IoOp::kWriteDurable;
    return static_cast<int64_t>(moved);
  }

  MemoryDisk& disk_;
  PowerSupply& power_;
  const uint32_t depth_;
  std::mt19937_64 random_;
  std::vector<IoRequest*> in_flight_;
};

std::unique_ptr<Ring> make_memory_ring(MemoryDisk& disk, PowerSupply& power, uint32_t depth,
                                       uint64_t seed) {
  return std::make_unique<MemoryRing>(disk, power, depth, seed);
}

Container memory_container(std::string name, MemoryDisk& disk, std::unique_ptr<Ring> ring) {
  Container container;
  container.path = name;
  container.file_path = std::move(name);
  container.direct = true;
  container.size_bytes = disk.contents().size();
  container.ring = std::move(ring);
  return container;
}

}  // namespace smartinf::storage
