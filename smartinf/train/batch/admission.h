// When sequences are taken into a decoder, and how many: as many as there is room for, which only
// the store of their keys and values knows, and in waves, so that weights that are read for the
// prompts are read for several of them. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

#include "smartinf/base/check.h"

namespace smartinf::train {

class Admission {
 public:
  /// most: sequences at once.
  explicit Admission(uint64_t most) : most_(most) {}

  uint64_t active() const { return active_; }

  /// How many sequences to take in now, of so many that wait; 0: none before one has left.
  uint64_t wave(uint64_t waiting) const {
    // A wave waits for an eighth of the room, where more prompts wait than that.
    const uint64_t room = full_ != 0 ? full_ : most_;
    const uint64_t free = room > active_ ? room - active_ : 0;
    if (active_ > 0 && free < std::min(std::max<uint64_t>(1, room / 8), waiting)) return 0;
    // Those that wait may be shorter than those that filled the room.
    const uint64_t some = smaller_ != 0 ? smaller_ : full_ != 0 ? 2 * free : waiting;
    return std::min({waiting, most_ - active_, some});
  }
  void taken_in(uint64_t count) {
    SI_CHECK(active_ + count <= most_, "more sequences than allowed");
    active_ += count;
    if (active_ > full_) full_ = 0;
  }
  /// There was no room for a wave of so many. False: for one alone there is none ever.
  bool refused(uint64_t count) {
    if (count == 1 && active_ == 0) {
      smaller_ = 0;
      return false;
    }
    smaller_ = count / 2;
    if (count == 1) full_ = active_;
    return true;
  }
  void left() {
    --active_;
    smaller_ = 0;
  }

 private:
  uint64_t most_;
  uint64_t active_ = 0;
  uint64_t smaller_ = 0;  // half of a wave that had no room; 0: none had
  uint64_t full_ = 0;     // sequences at which not one more had room; 0: not known
};

}  // namespace smartinf::train
