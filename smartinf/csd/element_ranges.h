// Which elements of a subgroup have come: ranges that may come in any order, and each element once.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace smartinf::csd {

/// Threads: one at a time.
class ElementRanges {
 public:
  /// Parameters are put one by one, so that a subgroup has fewer gaps than parameters.
  static constexpr size_t kGapsMax = size_t{1} << 16;

  /// False, and nothing changed: some of them are there already, or there are too many gaps.
  bool add(uint64_t first, uint64_t count) {
    if (count == 0) return true;
    auto next = ends_.lower_bound(first);
    auto last = next == ends_.begin() ? ends_.end() : std::prev(next);
    if (last != ends_.end() && last->second > first) return false;
    if (next != ends_.end() && next->first - first < count) return false;
    const bool joins_last = last != ends_.end() && last->second == first;
    const bool joins_next = next != ends_.end() && next->first - first == count;
    if (!joins_last && !joins_next && ends_.size() >= kGapsMax) return false;
    const uint64_t end = joins_next ? next->second : first + count;
    if (joins_next) ends_.erase(next);
    if (joins_last) {
      last->second = end;
    } else {
      ends_.emplace(first, end);
    }
    return true;
  }
  /// Nothing has come.
  void clear() { ends_.clear(); }
  /// [0, count) has come as a whole, and nothing else.
  bool covers(uint64_t count) const {
    return ends_.size() == 1 && ends_.begin()->first == 0 && ends_.begin()->second == count;
  }

 private:
  std::map<uint64_t, uint64_t> ends_;  // of ranges that do not touch, by their first element
};

}  // namespace smartinf::csd
