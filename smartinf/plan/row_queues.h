// Which rows of a table have a place in a cache of a fixed number of rows. The device keeps records
// by it, and the simulator counts by it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "smartinf/base/row_map.h"

namespace smartinf::plan {

/// What finds a row, or brings it.
enum class RowUse : uint8_t {
  kLookup,  // a use
  kOfStep,  // a use, unless it is one already: the row is kept until it is updated
  kBeside,  // none: reading ahead of a lookup, and the update behind one
};

/// Replacement is S3-FIFO (Yang et al., SOSP 2023): a new row waits in a small queue, from which
/// only a row that was used again, or was read ahead and waits for its use, goes on to the main
/// one; of the others the numbers are kept, and a row that comes back soon goes to the main queue
/// at once. Rows that are kept, because their update is to come, are not replaced. Threads: one.
class RowQueues {
 private:
  struct Slot {
    uint32_t row = 0;
    uint32_t next = base::RowMap::kNone;  // in its queue
    uint8_t uses = 0;                     // since it came, or since it was last spared
    bool there : 1 = false;
    bool kept : 1 = false;
    bool main : 1 = false;
    bool ahead : 1 = false;  // of the lookup that it was brought for
  };

 public:
  static constexpr uint32_t kNone = base::RowMap::kNone;
  /// Memory of a row: its slot with an entry of a map, at least half full, and half as many numbers
  /// of rows that left, with theirs.
  static constexpr uint64_t kBytesOfRow = sizeof(Slot) + 16 + (sizeof(uint32_t) + 16) / 2;

  explicit RowQueues(uint64_t rows)
      : slots_(rows), places_(rows), left_(rows / 2 + 1), left_at_(left_.size()) {}

  uint64_t capacity() const { return slots_.size(); }
  /// Slot of the row; kNone: it is not there.
  uint32_t find(uint32_t row, RowUse use) {
    const uint32_t place = places_.find(row);
    if (place == kNone) return kNone;
    Slot& slot = slots_[place];
    if (use == RowUse::kBeside || slot.kept) return place;
    if (!slot.ahead && slot.uses < kUsesMax) ++slot.uses;
    slot.ahead = false;
    set_kept(slot, use == RowUse::kOfStep);
    return place;
  }
  /// Slot for a row that is not there; kNone: all rows are kept.
  uint32_t insert(uint32_t row, RowUse use) {
    const uint32_t place = fresh_ < slots_.size() ? fresh_++ : replaced();
    if (place == kNone) return kNone;
    Slot& slot = slots_[place];
    slot = {};
    slot.row = row;
    slot.there = true;
    slot.main = left_at_.erase(row);
    slot.ahead = use == RowUse::kBeside;
    push(place);
    set_kept(slot, use == RowUse::kOfStep);
    places_.set(row, place);
    return place;
  }
  /// The row may be replaced again.
  void release(uint32_t row) {
    const uint32_t place = places_.find(row);
    if (place != kNone) set_kept(slots_[place], false);
  }
  void release_all() {
    if (small_.kept + main_.kept == 0) return;
    for (Slot& slot : slots_) slot.kept = false;
    small_.kept = main_.kept = 0;
  }
  /// The slot is used again when its turn comes.
  void erase(uint32_t row) {
    const uint32_t place = places_.find(row);
    if (place == kNone) return;
    set_kept(slots_[place], false);
    slots_[place].there = false;
    places_.erase(row);
  }
  void clear() {
    places_.clear();
    left_at_.clear();
    small_ = main_ = {};
    fresh_ = next_left_ = 0;
  }

 private:
  static constexpr uint8_t kUsesMax = 3;
  static constexpr uint64_t kPartsOfSmall = 20;  // the small queue is one of so many

  struct Queue {
    uint32_t head = kNone;
    uint32_t tail = kNone;
    uint64_t rows = 0;
    uint64_t kept = 0;
  };

  Queue& queue_of(const Slot& slot) { return slot.main ? main_ : small_; }
  void set_kept(Slot& slot, bool kept) {
    queue_of(slot).kept += (kept ? 1 : 0) - (slot.kept ? 1 : 0);
    slot.kept = kept;
  }
  void push(uint32_t place) {
    Queue& queue = queue_of(slots_[place]);
    slots_[place].next = kNone;
    (queue.rows == 0 ? queue.head : slots_[queue.tail].next) = place;
    queue.tail = place;
    ++queue.rows;
  }
  uint32_t pop(Queue& queue) {
    const uint32_t place = queue.head;
    queue.head = slots_[place].next;
    --queue.rows;
    return place;
  }
  /// A slot whose row has left; kNone: all are kept.
  uint32_t replaced() {
    for (;;) {
      const uint64_t small = small_.rows - small_.kept;
      const uint64_t main = main_.rows - main_.kept;
      if (small + main == 0) return kNone;
      const bool of_main = main > 0 && (small == 0 || small < slots_.size() / kPartsOfSmall);
      const uint32_t place = pop(of_main ? main_ : small_);
      Slot& slot = slots_[place];
      if (!slot.there) return place;
      if (slot.kept) {
        push(place);
      } else if (slot.uses > 0 || (slot.ahead && !of_main)) {
        slot.uses = of_main ? static_cast<uint8_t>(slot.uses - 1) : uint8_t{0};
        slot.main = true;
        push(place);
      } else {
        places_.erase(slot.row);
        if (!of_main) note_left(slot.row);
        return place;
      }
    }
  }
  void note_left(uint32_t row) {
    uint32_t& oldest = left_[next_left_];
    if (left_at_.find(oldest) == next_left_) left_at_.erase(oldest);
    oldest = row;
    left_at_.set(row, next_left_);
    next_left_ = (next_left_ + 1) % static_cast<uint32_t>(left_.size());
  }

  std::vector<Slot> slots_;
  uint32_t fresh_ = 0;  // slots from here on have had no row
  base::RowMap places_;
  Queue small_;
  Queue main_;
  std::vector<uint32_t> left_;  // rows that left the small queue, a ring
  base::RowMap left_at_;        // of them those that have not come back
  uint32_t next_left_ = 0;
};

}  // namespace smartinf::plan
