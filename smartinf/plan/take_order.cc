#include "smartinf/plan/take_order.h"

#include <algorithm>
#include <utility>

namespace smartinf::plan {

void TakeOrder::begin_step(size_t subgroups) {
  completed_.clear();
  updated_.assign(subgroups, 0);
}

size_t TakeOrder::start(UpdateMode mode, std::vector<Entry> entries) {
  mode_ = mode;
  entries_ = std::move(entries);
  places_.clear();
  entry_for_.assign(updated_.size(), kNone);
  next_ = 0;
  for (uint32_t i = 0; i < entries_.size(); ++i) {
    const uint32_t subgroup = entries_[i].subgroup;
    if (mode_ == UpdateMode::kRest && updated_[subgroup] != 0) continue;
    places_.push_back(i);
    entry_for_[subgroup] = i;
  }
  return left_ = places_.size();
}

uint32_t TakeOrder::take(uint32_t place, std::span<const uint32_t> asked) {
  if (!open()) return kNone;
  uint32_t entry = kNone;
  switch (mode_) {
    case UpdateMode::kInOrder:
    case UpdateMode::kRest:
      entry = places_[place];
      break;
    case UpdateMode::kAsCompleted:
      entry = take_completed();
      break;
    case UpdateMode::kOnDemand:
      entry = take_demanded(asked);
      break;
  }
  if (entry == kNone) return kNone;
  entry_for_[entries_[entry].subgroup] = kNone;
  --left_;
  return entry;
}

/// The one whose gradient became complete last. What is left at the end of backward is then spread
/// over all layers, and not the first ones that forward waits for.
uint32_t TakeOrder::take_completed() {
  uint32_t entry = kNone;
  while (entry == kNone && !completed_.empty()) {
    entry = entry_for_[completed_.back()];  // kNone: is not in this update
    completed_.pop_back();
  }
  return entry;
}

/// The one that was asked for first, unless one before it, in the update's order, need not be asked
/// for.
uint32_t TakeOrder::take_demanded(std::span<const uint32_t> asked) {
  const auto left = [&](uint32_t entry) { return entry_for_[entries_[entry].subgroup] == entry; };
  while (next_ < entries_.size() && !(left(next_) && entries_[next_].at_once)) ++next_;
  const uint32_t first = next_ < entries_.size() ? next_ : kNone;
  for (const uint32_t subgroup : asked) {
    if (const uint32_t entry = entry_for_[subgroup]; entry != kNone) return std::min(first, entry);
  }
  return first;
}

bool TakeOrder::stop() {
  if (mode_ != UpdateMode::kAsCompleted || !open()) return false;
  left_ = 0;
  return true;
}

bool TakeOrder::release() {
  if (mode_ != UpdateMode::kOnDemand) return false;
  for (Entry& entry : entries_) entry.at_once = true;
  next_ = 0;
  return true;
}

}  // namespace smartinf::plan
