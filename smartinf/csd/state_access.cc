#include "smartinf/csd/state_access.h"

#include <algorithm>
#include <string>
#include <utility>

#include "smartinf/base/state_format.h"

namespace smartinf::csd {

using Op = storage::SubgroupIo::Op;

base::Status StateAccess::check(base::SubgroupId subgroup, uint64_t first, uint64_t count,
                                bool whole) const {
  const auto found = parts_.index_of.find(subgroup);
  if (found == parts_.index_of.end()) {
    return base::Status(
        base::ErrorCode::kInvalidArgument,
        "subgroup " + std::to_string(subgroup.value) + " belongs to another device");
  }
  const uint64_t all = parts_.store->layout().subgroups[found->second].count;
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
  const auto slot = std::find_if(parts_.slots.begin(), parts_.slots.end(),
                                 [](const Slot& s) { return s.user == nullptr; });
  if (slot == parts_.slots.end()) return false;
  slot->user = this;
  slot->command = &command;
  slot->task = parts_.index_of.at(subgroup);
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
  slot.cached_mask = parts_.cache.current(slot.task) & mask;
  parts_.cache.count_hit(*parts_.store, slot.task, slot.cached_mask);
  if (slot.cached_mask == mask) return decode(slot, read);
  slot.transferring = true;
  parts_.start(slot.state_in, *this, Op::kRead, slot.task, slot.extent, mask & ~slot.cached_mask);
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
  const PlaneBlocks planes(*parts_.store, slot.task, slot.extent);
  slot.encode.prepare(planes, write);
  parts_.processor->start(slot.encode, planes.blocks());
}

void StateAccess::decode(Slot& slot, const ReadState& read) {
  const PlaneBlocks planes(*parts_.store, slot.task, slot.extent);
  const PlaneBlocks cached(*parts_.store, slot.task, parts_.cache.extent(slot.task),
                           slot.cached_mask);
  parts_.processor->start(slot.decode, slot.decode.prepare(planes, cached, slot.cached_mask, read));
}

void StateAccess::on_transfer(Transfer& transfer) {
  Slot& slot = *transfer.slot;
  slot.transferring = false;
  if (!transfer.io.status.ok() || writes_) return answer(slot, transfer.io.status);
  decode(slot, *slot.command->as<ReadState>());
}

void StateAccess::on_work(Slot& slot, BlockWork& work) {
  if (abandoned_) return answer(slot, abandoned_for_);
  if (!work.status().ok() || !writes_) return answer(slot, work.status());
  slot.transferring = true;
  const uint32_t planes = slot.command->as<WriteState>()->plane_mask;
  parts_.cache.overwritten(slot.task, planes);
  parts_.start(slot.master_out, *this, Op::kWrite, slot.task, slot.extent, planes);
}

void StateAccess::answer(Slot& slot, base::Status status) {
  if (writes_ && !status.ok()) write_failure_ = status;
  --in_flight_;
  if (!abandoned_) slot.user = nullptr;
  parts_.complete(*std::exchange(slot.command, nullptr), std::move(status));
}

void StateAccess::abandon(const base::Status& status) {
  abandoned_ = true;
  abandoned_for_ = status;
  // Those whose transfer is lost are answered here, those at the processor when it is done with
  // them.
  for (Slot& slot : parts_.slots) {
    if (slot.user == this && slot.transferring) answer(slot, status);
  }
}

}  // namespace smartinf::csd
