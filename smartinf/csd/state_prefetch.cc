#include "smartinf/csd/state_prefetch.h"

#include <algorithm>

namespace smartinf::csd {
namespace {

// Enough to fill a drive's queue (a subgroup is some transfers), and few enough that an update
// which comes meanwhile does not wait long for them.
constexpr uint32_t kReadsInFlight = 3;

}  // namespace

void StatePrefetch::start(std::span<const base::SubgroupId> subgroups) {
  for (Slot& slot : parts_.slots) slot.prefetched.reset();
  subgroups_.clear();
  // One after another, everything goes through one slot.
  const bool naive = parts_.options.schedule == plan::ScheduleVariant::kNaive;
  const size_t slots = naive ? 1 : parts_.slots.size();
  for (const base::SubgroupId id : subgroups.first(std::min(subgroups.size(), slots))) {
    subgroups_.push_back(parts_.index_of.at(id));
  }
  next_ = 0;
  start_reads();
}

void StatePrefetch::start_reads() {
  for (; next_ < subgroups_.size() && in_flight_ < kReadsInFlight; ++next_) {
    Slot& slot = parts_.slots[next_];
    const uint32_t subgroup = subgroups_[next_];
    if (slot.state != SlotState::kFree || parts_.cache.holds(subgroup)) continue;
    slot.state = SlotState::kPrefetching;
    slot.subgroup = subgroup;
    ++in_flight_;
    parts_.start(slot.state_in, storage::SubgroupIo::Op::kRead, subgroup, slot.extent,
                 parts_.state_mask());
  }
}

void StatePrefetch::on_transfer(Transfer& transfer) {
  Slot& slot = *transfer.slot;
  slot.state = SlotState::kFree;
  --in_flight_;
  if (transfer.io.status.ok()) slot.prefetched = slot.subgroup;
  start_reads();
}

}  // namespace smartinf::csd
