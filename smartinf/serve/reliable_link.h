// Protocol by which the frames of a session come each once and in order, over connections that
// break: a pure object, the same at both ends. Each side numbers its frames from 1 and keeps them
// until the other one says that they have come; after a break both say how far they are, and go on
// from there.
//
//   sender    put -> next -> ... acknowledge        after a break: resume
//   receiver  take -> ack                           its resume point: received()
//
// It does not send, wait or lock: all of that is the caller's. Threads: one at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "smartinf/base/check.h"

namespace smartinf::serve::wire {

template <typename Frame>
class ReliableLink {
 public:
  // ---- What is sent.

  /// Numbers a frame and keeps it. Returns its number.
  uint64_t put(Frame frame) {
    kept_.push_back(std::move(frame));
    return last();
  }
  /// The number of the last frame that was put; 0: none was.
  uint64_t last() const { return first_ + kept_.size() - 1; }
  /// Not acknowledged. Bound: the caller's.
  size_t kept() const { return kept_.size(); }

  bool has_next() const { return next_ <= last(); }
  struct Numbered {
    uint64_t number;
    const Frame& frame;  // until the next call
  };
  /// The next one to be sent, once on each connection.
  Numbered next() {
    SI_CHECK(has_next(), "nothing is to be sent");
    sent_ = std::max(sent_, next_);
    const uint64_t number = next_++;
    return {number, kept_[static_cast<size_t>(number - first_)]};
  }
  /// All frames up to this number have come. Returns those that are let go, so that a caller
  /// destroys them outside of its lock. Nothing: it was said of a frame that was never sent.
  [[nodiscard]] std::optional<std::vector<Frame>> acknowledge(uint64_t number) {
    if (number > sent_) return std::nullopt;
    std::vector<Frame> gone;
    for (; first_ <= number; ++first_) {
      gone.push_back(std::move(kept_.front()));
      kept_.pop_front();
    }
    next_ = std::max(next_, first_);
    return gone;
  }
  /// A new connection, at whose other end all frames up to this number have come: those behind it
  /// are sent again. Nothing: as of acknowledge(), or of a frame that was let go already.
  [[nodiscard]] std::optional<std::vector<Frame>> resume(uint64_t number) {
    if (number + 1 < first_) return std::nullopt;
    auto gone = acknowledge(number);
    if (gone) next_ = first_;
    return gone;
  }

  /// The other side is gone: nothing is sent any more, and nothing kept.
  void give_up() {
    sent_ = last();
    first_ = next_ = sent_ + 1;
    kept_.clear();
  }

  // ---- What comes.

  /// kAgain: the frame came before the break. kGap: one before it is missing.
  enum class Came : uint8_t { kNew, kAgain, kGap };
  Came take(uint64_t number, uint64_t bytes) {
    if (number <= received_) return Came::kAgain;
    if (number != received_ + 1) return Came::kGap;
    received_ = number;
    unsaid_bytes_ += bytes;
    return Came::kNew;
  }
  /// The last one that came.
  uint64_t received() const { return received_; }
  /// Whether so much came since the last ack() that the other side, which keeps it, is to be told.
  bool ack_due() const { return unsaid_bytes_ >= kAckBytes || received_ - said_ >= kAckFrames; }
  /// Acknowledges what has come: the other side is told it, and it is not due any more.
  uint64_t ack() {
    unsaid_bytes_ = 0;
    return said_ = received_;
  }

 private:
  static constexpr uint64_t kAckBytes = uint64_t{4} << 20;
  static constexpr uint64_t kAckFrames = 64;

  std::deque<Frame> kept_;
  uint64_t first_ = 1;  // of kept_
  uint64_t next_ = 1;   // to be sent
  uint64_t sent_ = 0;   // the last that ever was
  uint64_t received_ = 0;
  uint64_t said_ = 0;  // of it, to the other side
  uint64_t unsaid_bytes_ = 0;
};

}  // namespace smartinf::serve::wire
