#include "smartinf/csd/state_prefetch.h"

#include <algorithm>

namespace smartinf::csd {
namespace {

// Enough to fill a drive's queue (a subgroup is some transfers), and few enough that an update
// which comes meanwhile does not wait long for them.
constexpr uint32_t kReadsInFlight = 3;

}  // namespace

base::Status StatePrefetch::start(std::span<const base::SubgroupId> subgroups) {
  subgroups_.clear();
  next_ = 0;
  // One after another, everything goes through one slot.
  const bool naive = parts_.options.schedule == plan::ScheduleVariant::kNaive;
  const size_t slots = naive ? 1 : parts_.slots.size();
  for (const base::SubgroupId id : subgroups.first(std::min(subgroups.size(), slots))) {
    SI_ASSIGN_OR_RETURN(const uint32_t subgroup, parts_.find(id));
    subgroups_.push_back(subgroup);
  }
  start_reads();
  return base::Status();
}

void StatePrefetch::forget() {
  for (Slot& slot : parts_.slots) slot.prefetched.reset();
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
