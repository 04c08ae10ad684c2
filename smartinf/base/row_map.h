// Map from rows of a table to numbers, in 8 bytes an entry over three quarters full: for the places
// of rows in a log or a cache, of which there are many.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace smartinf::base {

/// Open addressing with linear probing; grows by doubling. Values are below kNone. Threads: one.
class RowMap {
 public:
  static constexpr uint32_t kNone = ~uint32_t{0};

  /// Room for so many rows without growing.
  explicit RowMap(uint64_t rows = 0) { reserve(rows); }

  static uint64_t memory_bytes(uint64_t rows) { return slots_for(rows) * sizeof(Entry); }
  uint64_t size() const { return size_; }

  void reserve(uint64_t rows) {
    if (slots_for(rows) > entries_.size()) rehash(slots_for(rows));
  }
  /// kNone: the row is not there.
  uint32_t find(uint32_t row) const {
    const Entry& entry = entries_[slot_of(row)];
    return entry.value;
  }
  /// In place of what the row had.
  void set(uint32_t row, uint32_t value) {
    size_t slot = slot_of(row);
    if (entries_[slot].value == kNone) {
      if ((size_ + 1) * 4 > entries_.size() * 3) {
        rehash(entries_.size() * 2);
        slot = slot_of(row);
      }
      ++size_;
    }
    entries_[slot] = {row, value};
  }
  /// Whether the row was there.
  bool erase(uint32_t row) {
    size_t hole = slot_of(row);
    if (entries_[hole].value == kNone) return false;
    --size_;
    // Entries behind it that would not be found any more move up.
    for (size_t next = (hole + 1) & mask(); entries_[next].value != kNone;
         next = (next + 1) & mask()) {
      const size_t home = home_of(entries_[next].row);
      if (((next - home) & mask()) < ((next - hole) & mask())) continue;
      entries_[hole] = entries_[next];
      hole = next;
    }
    entries_[hole].value = kNone;
    return true;
  }
  void clear() {
    entries_.assign(entries_.size(), Entry{});
    size_ = 0;
  }
  /// visit(row, value), in no order.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const Entry& entry : entries_) {
      if (entry.value != kNone) visit(entry.row, entry.value);
    }
  }

 private:
  struct Entry {
    uint32_t row = 0;
    uint32_t value = kNone;
  };
  static uint64_t slots_for(uint64_t rows) { return std::bit_ceil(rows + rows / 3 + 8); }
  size_t mask() const { return entries_.size() - 1; }
  size_t home_of(uint32_t row) const {
    return static_cast<size_t>((row * uint64_t{0x9e3779b97f4a7c15}) >> 20) & mask();
  }
  size_t slot_of(uint32_t row) const {
    size_t slot = home_of(row);
    while (entries_[slot].value != kNone && entries_[slot].row != row) slot = (slot + 1) & mask();
    return slot;
  }
  void rehash(uint64_t slots) {
    std::vector<Entry> old(slots);
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.value != kNone) entries_[slot_of(entry.row)] = entry;
    }
  }

  std::vector<Entry> entries_;
  uint64_t size_ = 0;
};

}  // namespace smartinf::base
