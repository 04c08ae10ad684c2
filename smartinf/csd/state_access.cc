#include "smartinf/csd/state_access.h"

#include <algorithm>
#include <string>
#include <utility>

#include "smartinf/base/state_format.h"

namespace smartinf::csd {

using Op = storage::SubgroupIo::Op;

base::Status StateAccess::check(base::SubgroupId subgroup, uint64_t first, uint64_t count,
                                bool whole) const {
  SI_ASSIGN_OR_RETURN(const uint32_t index, parts_.find(subgroup));
  const uint64_t all = parts_.store->layout().subgroups[index].count;
  const bool inside =
      count > 0 && first < all && count <= all - first && first % base::kBlockElements == 0;
  if (whole ? count != all : !inside) {
    return base::Status(base::ErrorCode::kInvalidArgument,
                        "elements " + std::to_string(first) + " and " + std::to_string(count) +
                            " following of subgroup " + std::to_string(subgroup.value) +
                            " cannot be transferred");
  }
  return base::Status();
}

bool StateAccess::try_start(Command& command) {
  const ReadState* read = command.as<ReadState>();
  const WriteState* write = command.as<WriteState>();
  const bool writes = write != nullptr;
  if (in_flight_ > 0 && writes != writes_) return false;
  const base::SubgroupId subgroup = writes ? write->subgroup : read->subgroup;
  const bool wanted = writes || std::any_of(read->planes.begin(), read->planes.end(),
                                            [](const float* plane) { return plane != nullptr; });
  base::Status status = writes ? check(subgroup, 0, write->count, true)
                               : check(subgroup, read->first, wanted ? read->count : 0, false);
  if (!status.ok()) {
    parts_.complete(command, std::move(status));
    return true;
  }
  // From the last one on: what has been prefetched lies in the first ones.
  const auto slot = std::find_if(parts_.slots.rbegin(), parts_.slots.rend(),
                                 [](const Slot& s) { return s.state == SlotState::kFree; });
  if (slot == parts_.slots.rend()) return false;
  slot->prefetched.reset();
  slot->command = &command;
  slot->subgroup = parts_.index_of.at(subgroup);
  writes_ = writes;
  ++in_flight_;
  if (writes) {
    start_write(*slot, *write);
  } else {
    start_read(*slot, *read);
  }
  return true;
}

void StateAccess::start_read(Slot& slot, const ReadState& read) {
  uint32_t mask = 0;
  for (size_t plane = 0; plane < parts_.store->layout().planes.size(); ++plane) {
    if (read.planes[plane] != nullptr) mask |= 1u << plane;
  }
  slot.cached_mask = parts_.cache.current(slot.subgroup) & mask;
  parts_.cache.count_hit(*parts_.store, slot.subgroup, slot.cached_mask);
  if (slot.cached_mask == mask) return decode(slot, read);
  slot.state = SlotState::kReading;
  parts_.start(slot.state_in, Op::kRead, slot.subgroup, slot.extent, mask & ~slot.cached_mask);
}

void StateAccess::start_write(Slot& slot, const WriteState& write) {
  if (write.residual != nullptr && parts_.options.host_link_place == HostLinkPlace::kAtProcessor) {
    // Its time on the link delays what comes behind it, not the write.
    const uint64_t bytes = write.count * sizeof(base::Bf16);
    parts_.host_traffic.add_down(base::TrafficKind::kState, bytes);
    if (Link* link = parts_.options.links.host.get(); link != nullptr) {
      link->book(LinkDirection::kDown, base::TrafficKind::kState, bytes);
    }
  }
  slot.state = SlotState::kEncoding;
  slot.job.work = EncodeJob{PlaneBlocks(*parts_.store, slot.subgroup, slot.extent), &write};
  parts_.processor->start(slot.job);
}

void StateAccess::decode(Slot& slot, const ReadState& read) {
  const PlaneBlocks planes(*parts_.store, slot.subgroup, slot.extent);
  const PlaneBlocks cached(*parts_.store, slot.subgroup, parts_.cache.extent(slot.subgroup),
                           slot.cached_mask);
  slot.state = SlotState::kDecoding;
  slot.job.work = DecodeJob{planes, cached, slot.cached_mask, &read};
  parts_.processor->start(slot.job);
}

void StateAccess::on_transfer(Transfer& transfer) {
  Slot& slot = *transfer.slot;
  if (!transfer.io.status.ok() || slot.state == SlotState::kWriting)
    return answer(slot, transfer.io.status);
  decode(slot, *slot.command->as<ReadState>());
}

void StateAccess::on_job(Job& job) {
  Slot& slot = *job.slot;
  if (abandoned_) return answer(slot, abandoned_for_);
  if (!job.status.ok() || slot.state == SlotState::kDecoding) return answer(slot, job.status);
  slot.state = SlotState::kWriting;
  const uint32_t planes = slot.command->as<WriteState>()->plane_mask;
  parts_.cache.overwritten(slot.subgroup, planes);
  parts_.start(slot.master_out, Op::kWrite, slot.subgroup, slot.extent, planes);
}

void StateAccess::answer(Slot& slot, base::Status status) {
  if (writes_ && !status.ok()) write_failure_ = status;
  --in_flight_;
  if (!abandoned_) slot.state = SlotState::kFree;
  parts_.complete(*std::exchange(slot.command, nullptr), std::move(status));
}

void StateAccess::abandon(const base::Status& status) {
  abandoned_ = true;
  abandoned_for_ = status;
  // Commands whose transfer is lost are answered here, those at the processor when it is done with
  // them.
  for (Slot& slot : parts_.slots) {
    const bool at_drive = slot.state == SlotState::kReading || slot.state == SlotState::kWriting;
    if (at_drive && slot.command != nullptr) answer(slot, status);
  }
}

}  // namespace smartinf::csd
