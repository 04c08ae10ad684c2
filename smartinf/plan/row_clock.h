// Which rows of a table have a place in a cache of a fixed number of rows. The device keeps records
// by it, and the simulator counts by it.
#pragma once

#include <cstdint>
#include <vector>

#include "smartinf/base/row_map.h"

namespace smartinf::plan {

/// Replacement is CLOCK: a row that was found since the hand passed is left for another round. Rows
/// that are kept, because their update is to come, are not replaced. Threads: one.
class RowClock {
 private:
  struct Slot {
    uint32_t row = 0;
    bool used = false;
    bool found = false;
    bool kept = false;
  };

 public:
  static constexpr uint32_t kNone = base::RowMap::kNone;
  /// Memory of a row: its slot, and an entry of the map, at least half full.
  static constexpr uint64_t kBytesOfRow = sizeof(Slot) + 16;

  explicit RowClock(uint64_t rows) : slots_(rows), places_(rows) {}

  uint64_t capacity() const { return slots_.size(); }
  /// Slot of the row; kNone: it is not there.
  uint32_t find(uint32_t row, bool keep) {
    const uint32_t slot = places_.find(row);
    if (slot == kNone) return kNone;
    slots_[slot].found = true;
    set_kept(slots_[slot], keep || slots_[slot].kept);
    return slot;
  }
  /// Slot for a row that is not there; kNone: all rows are kept.
  uint32_t insert(uint32_t row, bool keep) {
    const uint32_t slot = free_slot();
    if (slot == kNone) return kNone;
    slots_[slot] = {row, true, false, false};
    set_kept(slots_[slot], keep);
    places_.set(row, slot);
    return slot;
  }
  /// The row may be replaced again.
  void release(uint32_t row) {
    const uint32_t slot = places_.find(row);
    if (slot != kNone) set_kept(slots_[slot], false);
  }
  void release_all() {
    if (kept_ == 0) return;
    for (Slot& slot : slots_) slot.kept = false;
    kept_ = 0;
  }
  void erase(uint32_t row) {
    const uint32_t slot = places_.find(row);
    if (slot == kNone) return;
    set_kept(slots_[slot], false);
    slots_[slot].used = false;
    places_.erase(row);
  }
  void clear() {
    places_.clear();
    slots_.assign(slots_.size(), Slot{});
    kept_ = 0;
  }

 private:
  void set_kept(Slot& slot, bool kept) {
    kept_ += (kept ? 1 : 0) - (slot.kept ? 1 : 0);
    slot.kept = kept;
  }
  uint32_t free_slot() {
    if (kept_ == slots_.size()) return kNone;
    for (;;) {
      const auto at = static_cast<uint32_t>(hand_);
      hand_ = (hand_ + 1) % slots_.size();
      Slot& slot = slots_[at];
      if (!slot.used) return at;
      if (slot.kept) continue;
      if (slot.found) {
        slot.found = false;
        continue;
      }
      places_.erase(slot.row);
      return at;
    }
  }

  std::vector<Slot> slots_;
  base::RowMap places_;
  uint64_t kept_ = 0;
  uint64_t hand_ = 0;
};

}  // namespace smartinf::plan
