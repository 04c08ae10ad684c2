// Ranks that are threads of one process, for tests: a board on which each call lays its bytes until
// all ranks have come to it. With faults: a rank that dies, hangs or comes late at any of its
// calls.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/engine/ranks/collectives.h"

namespace smartinf::engine {

/// State that all ranks of one opening share; outlives what BoardRank gives out.
class Board {
 public:
  enum class Fault : uint8_t {
    kDies,   // its calls fail from here on, and those of the others
    kHangs,  // likewise, but for what the others hear
    kDeaf,   // it dies in the middle of the call: the others still get what they need of it
    kLate,   // 50 ms
  };

  explicit Board(uint32_t world) : world_(world), calls_(world, 0) {}

  /// A rank's `call`-th collective call, from 0 and of all channels together, does this.
  void fail_at(uint32_t rank, uint64_t call, Fault fault) { planned_ = {rank, call, fault}; }
  uint64_t calls(uint32_t rank) const {
    const std::lock_guard lock(mutex_);
    return calls_[rank];
  }
  /// From each rank to others, all together.
  uint64_t bytes_sent(Channel channel) const {
    const std::lock_guard lock(mutex_);
    return bytes_[static_cast<size_t>(channel)];
  }

 private:
  friend class BoardRank;
  struct Part {
    explicit Part(size_t ranks) : to(ranks), from(ranks) {}
    std::vector<std::span<const std::byte>> to;  // of each rank
    std::vector<std::span<std::byte>> from;
  };
  /// One call of all ranks, of a group, or of two.
  struct Call {
    std::string kind;
    std::vector<std::optional<Part>> parts;
    size_t came = 0;
    size_t waited = 0;
  };
  struct Planned {
    uint32_t rank = ~0u;
    uint64_t call = 0;
    Fault fault = Fault::kDies;
  };

  // mutex_ held.
  void fail(uint32_t rank, base::Status why) {
    if (failure_.ok()) failure_ = std::move(why).with_context(fmt::format("rank {}", rank));
    changed_.notify_all();
  }
  void carry_out(const Call& call, Channel channel) {
    for (size_t from = 0; from < call.parts.size(); ++from) {
      for (size_t to = 0; to < call.parts.size(); ++to) {
        const std::span<const std::byte> source = call.parts[from]->to[to];
        const std::span<std::byte> target = call.parts[to]->from[from];
        SI_CHECK(source.size() == target.size(), "ranks expect other sizes of each other");
        if (source.data() == target.data() || source.empty()) continue;
        std::memcpy(target.data(), source.data(), source.size());
        if (from != to) bytes_[static_cast<size_t>(channel)] += source.size();
      }
    }
  }

  const uint32_t world_;
  Planned planned_;
  mutable std::mutex mutex_;  // of everything below
  std::condition_variable changed_;
  std::vector<uint64_t> calls_;  // of each rank
  std::array<uint64_t, kChannels> bytes_{};
  base::Status failure_;
  std::map<std::string, std::map<uint64_t, Call>> under_way_;  // by line (BoardRank) and number
};

class BoardRank final : public Collectives {
 public:
  BoardRank(Board& board, uint32_t rank) : board_(board), rank_(rank), here_(rank) {
    for (uint32_t one = 0; one < board.world_; ++one) members_.push_back(one);
  }

  uint32_t rank() const override { return here_; }
  uint32_t world() const override { return static_cast<uint32_t>(members_.size()); }
  uint32_t rank_of_run(uint32_t rank) const override { return members_[rank]; }

  base::Result<std::shared_ptr<Collectives>> group(std::span<const uint32_t> ranks) override {
    if (!name_.empty()) return base::Status(base::ErrorCode::kUnsupported, "a group of a group");
    auto made = std::make_shared<BoardRank>(board_, rank_);
    made->name_ = fmt::format("group {}", ++groups_);
    made->members_.assign(ranks.begin(), ranks.end());
    const auto here = std::ranges::find(ranks, rank_);
    if (here == ranks.end()) return std::shared_ptr<Collectives>();
    made->here_ = static_cast<uint32_t>(here - ranks.begin());
    return std::shared_ptr<Collectives>(std::move(made));
  }
  Started send(Channel channel, std::span<const std::byte> bytes, uint32_t to) override {
    Board::Part part(2);
    part.to[1] = bytes;
    return start_pair(channel, here_, to, bytes.size(), std::move(part));
  }
  Started receive(Channel channel, std::span<std::byte> bytes, uint32_t from) override {
    Board::Part part(2);
    part.from[0] = bytes;
    return start_pair(channel, from, here_, bytes.size(), std::move(part));
  }

  Started all_to_all(Channel channel, std::span<const std::byte> send,
                     std::span<const uint64_t> send_bytes, std::span<std::byte> receive,
                     std::span<const uint64_t> receive_bytes) override {
    Board::Part part(0);
    for (uint32_t rank = 0; rank < world(); ++rank) {
      part.to.push_back(send.first(send_bytes[rank]));
      send = send.subspan(send_bytes[rank]);
      part.from.push_back(receive.first(receive_bytes[rank]));
      receive = receive.subspan(receive_bytes[rank]);
    }
    SI_CHECK(send.empty() && receive.empty(), "memory that no rank's sizes account for");
    return start(channel, "all_to_all", std::move(part));
  }
  Started broadcast(Channel channel, std::span<std::byte> bytes, uint32_t root) override {
    Board::Part part(world());
    for (auto& to : part.to) to = here_ == root ? bytes : bytes.first(0);
    part.from[root] = bytes;
    return start(channel, fmt::format("broadcast of {} from {}", bytes.size(), root),
                 std::move(part));
  }
  Started all_gather(Channel channel, std::span<const std::byte> mine,
                     std::span<std::byte> all) override {
    Board::Part part(0);
    for (uint32_t rank = 0; rank < world(); ++rank) {
      part.to.push_back(mine);
      part.from.push_back(all.subspan(rank * mine.size(), mine.size()));
    }
    return start(channel, fmt::format("all_gather of {}", mine.size()), std::move(part));
  }
  base::Status barrier(Channel channel) override {
    auto started = start(channel, "barrier", Board::Part(world()));
    if (!started.ok()) return std::move(started).status();
    return (*started)->wait();
  }
  void failed(const base::Status& why) override {
    const std::lock_guard lock(board_.mutex_);
    board_.fail(rank_, why);
  }

 private:
  class Wait final : public Pending {
   public:
    Wait(Board& board, std::string line, uint64_t number, std::optional<uint32_t> deaf)
        : board_(board), line_(std::move(line)), number_(number), deaf_(deaf) {}
    base::Status wait() override {
      std::unique_lock lock(board_.mutex_);
      auto& calls = board_.under_way_[line_];
      Board::Call& call = calls.at(number_);
      const auto done = [&] { return call.came == call.parts.size(); };
      board_.changed_.wait(lock, [&] { return done() || !board_.failure_.ok(); });
      if (!done()) return board_.failure_;
      if (deaf_) {
        board_.fail(*deaf_, has_died());
        return board_.failure_;
      }
      if (++call.waited == call.parts.size()) calls.erase(number_);
      return base::Status();
    }

   private:
    Board& board_;
    const std::string line_;
    const uint64_t number_;
    const std::optional<uint32_t> deaf_;  // the rank, which dies here
  };
  static base::Status has_died() { return {base::ErrorCode::kIo, "has died"}; }

  Started start(Channel channel, std::string kind, Board::Part part) {
    return start(channel, "", here_, world(), std::move(kind), std::move(part));
  }
  Started start_pair(Channel channel, uint32_t from, uint32_t to, uint64_t bytes,
                     Board::Part part) {
    return start(channel, fmt::format("{}>{}", from, to), here_ == from ? 0 : 1, 2,
                 fmt::format("a message of {}", bytes), std::move(part));
  }
  /// among: the ranks of this that the call is of, `count` of which this is the one at `place`.
  Started start(Channel channel, std::string_view among, uint32_t place, uint32_t count,
                std::string kind, Board::Part part) {
    using enum Board::Fault;
    std::unique_lock lock(board_.mutex_);
    const Board::Planned& planned = board_.planned_;
    const uint64_t call_number = board_.calls_[rank_]++;
    std::optional<uint32_t> deaf;
    if (planned.rank == rank_ && planned.call == call_number) {
      if (planned.fault == kDeaf) {
        deaf = rank_;
      } else if (planned.fault == kLate) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        lock.lock();
      } else {
        board_.fail(rank_, planned.fault == kDies
                               ? has_died()
                               : base::Status(base::ErrorCode::kTimeout, "does not answer"));
      }
    }
    if (!board_.failure_.ok()) return board_.failure_;
    std::string line = fmt::format("{} {} {}", static_cast<int>(channel), name_, among);
    const uint64_t number = next_[line]++;
    Board::Call& call = board_.under_way_[line][number];
    if (call.came == 0) {
      call.kind = kind;
      call.parts.resize(count);
    }
    SI_CHECK(call.kind == kind, "ranks are at different calls of a channel");
    call.parts[place] = std::move(part);
    if (++call.came == count) {
      board_.carry_out(call, channel);
      board_.changed_.notify_all();
    }
    return std::unique_ptr<Pending>(std::make_unique<Wait>(board_, std::move(line), number, deaf));
  }

  Board& board_;
  const uint32_t rank_;            // of the run
  uint32_t here_;                  // among the members
  std::vector<uint32_t> members_;  // ranks of the run
  std::string name_;               // of a group
  uint32_t groups_ = 0;
  std::map<std::string, uint64_t> next_;  // call of each line; board_.mutex_ held
};

}  // namespace smartinf::engine
