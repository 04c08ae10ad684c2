// Records of a table's rows in a fixed amount of memory: the cache of a device that gathers rows,
// not pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/row_map.h"

namespace smartinf::csd {

/// Replacement is CLOCK: a row that was found since the hand passed is left for another round. Rows
/// that are kept, because their update is to come, are not replaced. Threads: one.
class RowCache {
 private:
  struct Slot {
    uint32_t row = 0;
    bool used = false;
    bool found = false;
    bool kept = false;
  };

 public:
  RowCache(uint32_t record_bytes, uint64_t memory_bytes)
      : record_bytes_(record_bytes),
        slots_(memory_bytes / bytes_of_row(record_bytes)),
        places_(slots_.size()),
        records_(slots_.size() * record_bytes) {}

  uint64_t capacity() const { return slots_.size(); }
  /// Memory of a row with what finds it.
  static uint64_t bytes_of_row(uint32_t record_bytes) {
    return record_bytes + sizeof(Slot) + 16;  // an entry of the map, at least half full
  }

  /// Null: the row is not there.
  std::span<std::byte> find(uint32_t row, bool keep) {
    const uint32_t slot = places_.find(row);
    if (slot == base::RowMap::kNone) return {};
    slots_[slot].found = true;
    set_kept(slots_[slot], keep || slots_[slot].kept);
    return record(slot);
  }
  /// Room for the record of a row that is not there; empty: all rows are kept.
  std::span<std::byte> insert(uint32_t row, bool keep) {
    const uint32_t slot = free_slot();
    if (slot == base::RowMap::kNone) return {};
    slots_[slot] = {row, true, false, false};
    set_kept(slots_[slot], keep);
    places_.set(row, slot);
    return record(slot);
  }
  /// The row may be replaced again.
  void release(uint32_t row) {
    const uint32_t slot = places_.find(row);
    if (slot != base::RowMap::kNone) set_kept(slots_[slot], false);
  }
  void release_all() {
    if (kept_ == 0) return;
    for (Slot& slot : slots_) slot.kept = false;
    kept_ = 0;
  }
  void erase(uint32_t row) {
    const uint32_t slot = places_.find(row);
    if (slot == base::RowMap::kNone) return;
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
  std::span<std::byte> record(uint32_t slot) {
    return std::span(records_).subspan(uint64_t{slot} * record_bytes_, record_bytes_);
  }
  void set_kept(Slot& slot, bool kept) {
    kept_ += (kept ? 1 : 0) - (slot.kept ? 1 : 0);
    slot.kept = kept;
  }
  uint32_t free_slot() {
    if (kept_ == slots_.size()) return base::RowMap::kNone;
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

  const uint32_t record_bytes_;
  std::vector<Slot> slots_;
  base::RowMap places_;
  std::vector<std::byte> records_;
  uint64_t kept_ = 0;
  uint64_t hand_ = 0;
};

}  // namespace smartinf::csd
