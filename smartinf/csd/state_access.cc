#include "smartinf/csd/state_access.h"

#include <algorithm>
#include <string>
#include <utility>

#include "smartinf/base/state_format.h"

namespace smartinf::csd {

using Op = storage::SubgroupIo::Op;

base::Status StateAccess::check(const Command& command) const {
  const auto found = parts_.index_of.find(command.subgroup);
  if (found == parts_.index_of.end()) {
    return base::Status(
        base::ErrorCode::kInvalidArgument,
        "subgroup " + std::to_string(command.subgroup.value) + " belongs to another device");
  }
  const uint64_t count = parts_.store->layout().subgroups[found->second].count;
  const bool inside = command.count > 0 && command.first < count &&
                      command.count <= count - command.first &&
                      command.first % base::kBlockElements == 0;
  const bool wanted = std::any_of(command.planes.begin(), command.planes.end(),
                                  [](const float* plane) { return plane != nullptr; });
  const bool whole = command.first == 0 && command.count == count;
  if (command.kind == CommandKind::kReadState ? !inside || !wanted : !whole) {
    return base::Status(base::ErrorCode::kInvalidArgument,
                        "elements " + std::to_string(command.first) + " and " +
                            std::to_string(command.count) + " following of subgroup " +
                            std::to_string(command.subgroup.value) + " cannot be transferred");
  }
  return base::Status();
}

bool StateAccess::try_start(Command& command) {
  if (in_flight_ > 0 && command.kind != kind_) return false;
  if (base::Status status = check(command); !status.ok()) {
    parts_.complete(command, std::move(status));
    return true;
  }
  const auto slot = std::find_if(parts_.slots.begin(), parts_.slots.end(),
                                 [](const Slot& s) { return s.user == nullptr; });
  if (slot == parts_.slots.end()) return false;
  slot->user = this;
  slot->command = &command;
  kind_ = command.kind;
  ++in_flight_;
  const uint32_t subgroup = parts_.index_of.at(command.subgroup);
  if (command.kind == CommandKind::kReadState) {
    uint32_t mask = 0;
    for (size_t plane = 0; plane < parts_.store->layout().planes.size(); ++plane) {
      if (command.planes[plane] != nullptr) mask |= 1u << plane;
    }
    slot->cached_mask = parts_.cache.current(subgroup) & mask;
    parts_.cache.count_hit(*parts_.store, subgroup, slot->cached_mask);
    if (slot->cached_mask == mask) {
      decode(*slot);
      return true;
    }
    slot->transferring = true;
    parts_.start(slot->state_in, *this, Op::kRead, subgroup, slot->extent,
                 mask & ~slot->cached_mask);
  } else {
    if (command.residual != nullptr &&
        parts_.options.host_link_place == HostLinkPlace::kAtProcessor) {
      // Its time on the link delays what comes behind it, not the write.
      const uint64_t bytes = command.count * sizeof(base::Bf16);
      parts_.host_traffic.add_down(base::TrafficKind::kState, bytes);
      if (Link* link = parts_.options.links.host.get(); link != nullptr) {
        link->book(LinkDirection::kDown, base::TrafficKind::kState, bytes);
      }
    }
    const PlaneBlocks planes(*parts_.store, subgroup, slot->extent);
    slot->encode.prepare(planes, command);
    parts_.processor->start(slot->encode, planes.blocks());
  }
  return true;
}

void StateAccess::decode(Slot& slot) {
  const uint32_t subgroup = parts_.index_of.at(slot.command->subgroup);
  const PlaneBlocks planes(*parts_.store, subgroup, slot.extent);
  const PlaneBlocks cached(*parts_.store, subgroup, parts_.cache.extent(subgroup),
                           slot.cached_mask);
  parts_.processor->start(slot.decode,
                          slot.decode.prepare(planes, cached, slot.cached_mask, *slot.command));
}

void StateAccess::on_transfer(Transfer& transfer) {
  Slot& slot = *transfer.slot;
  slot.transferring = false;
  if (!transfer.io.status.ok() || kind_ == CommandKind::kWriteState) {
    return answer(slot, transfer.io.status);
  }
  decode(slot);
}

void StateAccess::on_work(Slot& slot, BlockWork& work) {
  if (abandoned_) return answer(slot, abandoned_for_);
  if (!work.status().ok() || kind_ == CommandKind::kReadState) return answer(slot, work.status());
  slot.transferring = true;
  const uint32_t subgroup = parts_.index_of.at(slot.command->subgroup);
  parts_.cache.overwritten(subgroup, slot.command->plane_mask);
  parts_.start(slot.master_out, *this, Op::kWrite, subgroup, slot.extent, slot.command->plane_mask);
}

void StateAccess::answer(Slot& slot, base::Status status) {
  if (kind_ == CommandKind::kWriteState && !status.ok()) write_failure_ = status;
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
