#include "smartinf/csd/device_parts.h"

#include <algorithm>
#include <string>
#include <utility>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/device_space.h"
#include "smartinf/plan/memory_plan.h"

namespace smartinf::csd {
namespace {

using Op = storage::SubgroupIo::Op;

const char* transfer_name(Op op) {
  switch (op) {
    case Op::kRead:
      return "read state";
    case Op::kWrite:
    case Op::kFlush:
      return "write state";
    case Op::kReadGradient:
      return "read gradient";
    case Op::kWriteGradient:
      return "write gradient";
    case Op::kReadSpool:  // SpoolAccess
    case Op::kWriteSpool:
      break;
  }
  return "?";
}

}  // namespace

void DeviceParts::start(Transfer& transfer, Op op, uint32_t subgroup, std::span<std::byte> buffer,
                        uint32_t plane_mask) {
  const base::SubgroupId id = store->layout().subgroups[subgroup].id;
  const bool gradient = op == Op::kReadGradient || op == Op::kWriteGradient;
  transfer.io.op = op;
  transfer.io.subgroup = id;
  // A cached extent ends with the planes that updates need.
  transfer.io.buffer = gradient ? buffer.first(store->gradient_bytes(id)) : buffer;
  transfer.io.plane_mask = plane_mask;
  transfer.io.owner = &transfer;
  transfer.io.status = base::Status();
  transfer.begin_ns = base::now_ns();
  ++transfers_in_flight;
  store->start(transfer.io);
}

void DeviceParts::finished(const Transfer& transfer) {
  --transfers_in_flight;
  if (options.trace == nullptr) return;
  const storage::SubgroupIo& io = transfer.io;
  const bool read = io.op == Op::kRead || io.op == Op::kReadGradient;
  const bool gradient = io.op == Op::kReadGradient || io.op == Op::kWriteGradient;
  uint64_t bytes = gradient ? io.buffer.size() : 0;
  for (size_t plane = 0; !gradient && plane < store->layout().planes.size(); ++plane) {
    if ((io.plane_mask >> plane & 1u) == 0) continue;
    bytes += base::round_up(store->plane_bytes(io.subgroup, plane), base::kIoAlignment);
  }
  options.trace->record({transfer_name(io.op), read ? read_track : write_track, io.subgroup.value,
                         transfer.begin_ns, base::now_ns(), bytes,
                         gradient ? base::TrafficKind::kGradient : base::TrafficKind::kState});
}

void DeviceParts::record_host(LinkDirection direction, base::TrafficKind kind,
                              base::SubgroupId subgroup, uint64_t begin_ns, uint64_t bytes) const {
  if (options.trace == nullptr || options.links.host != nullptr) return;
  options.trace->record({base::traffic_kind_name(kind).data(),
                         direction == LinkDirection::kUp ? up_track : down_track, subgroup.value,
                         begin_ns, base::now_ns(), bytes, kind});
}

uint64_t DeviceParts::send_weights(base::SubgroupId subgroup, uint64_t begin_ns, uint64_t bytes) {
  if (options.host_link_place != HostLinkPlace::kAtProcessor) return 0;
  host_traffic.add_up(base::TrafficKind::kWeight, bytes);
  record_host(LinkDirection::kUp, base::TrafficKind::kWeight, subgroup, begin_ns, bytes);
  Link* link = options.links.host.get();
  return link == nullptr ? 0 : link->book(LinkDirection::kUp, base::TrafficKind::kWeight, bytes);
}

base::Result<uint32_t> DeviceParts::find(base::SubgroupId subgroup) const {
  const auto found = index_of.find(subgroup);
  if (found != index_of.end()) return found->second;
  return of_another_device(subgroup);
}

base::Status DeviceParts::updates_as_completed() const {
  const auto unsupported = [](const char* why, const char* instead) {
    return base::Status(base::ErrorCode::kUnsupported, why, instead);
  };
  if (gradients->compressed()) {
    return unsupported("compressed gradients are complete only when backward has ended",
                       "Update when all gradients are there.");
  }
  if (store->durability() == storage::Durability::kNone) {
    return unsupported("with durability \"none\" an update overwrites the committed state",
                       "Update when all gradients are there, or use durability \"step\".");
  }
  if (slots_as_completed().empty()) {
    return unsupported("beside gradients that are spilled there is memory for few subgroups only",
                       "Update when all gradients are there, or raise the memory budget so that it "
                       "has room for eight.");
  }
  return base::Status();
}

void DeviceParts::complete(Command& command, base::Status status) const {
  command.replies->push(
      {&command, Completion::Event::kDone, {}, std::move(status).with_context(name)});
}

void DeviceParts::add_tracks() {
  if (options.trace == nullptr) return;
  Trace& trace = *options.trace;
  read_track = trace.add_track({name, "read"});
  write_track = trace.add_track({name, "write"});
  step_track = trace.add_track({name, "step", "step"});
  if (options.links.host == nullptr && options.host_link_place == HostLinkPlace::kAtProcessor) {
    up_track = trace.add_track({name + " host link", "up"});
    down_track = trace.add_track({name + " host link", "down"});
  }
}

base::Status allocate_slots(DeviceParts& parts, DeviceSlots& slots) {
  const LocalDeviceOptions& options = parts.options;
  const uint64_t extent_bytes = base::round_up(parts.store->extent_bytes_max(), base::kIoAlignment);
  const uint64_t slot_bytes = extent_bytes + parts.gradients->buffer_bytes();
  uint64_t master_bytes = 0;
  for (const storage::StoredSubgroup& subgroup : parts.store->layout().subgroups) {
    master_bytes = std::max(master_bytes, parts.store->plane_offset(subgroup.id, 1));
  }
  master_bytes = base::round_up(master_bytes, base::kIoAlignment);
  const uint64_t weights_bytes = options.weight_read_slots * master_bytes;
  plan::DeviceSlotsInput input;
  input.memory_bytes = options.memory_bytes - std::min(options.memory_bytes, weights_bytes);
  input.slot_bytes = slot_bytes;
  input.subgroups = parts.store->layout().subgroups.size();
  input.slots = options.slots;
  input.in_flight_bytes = options.store.io_bytes * options.store.io_depth;
  input.gradients_spilled = parts.gradients->buffer_bytes() > 0;
  const uint64_t count = plan::device_slots(input);
  if (count == 0) {
    return base::Status(base::ErrorCode::kOutOfMemory,
                        "a subgroup needs " + base::format_bytes(slot_bytes + weights_bytes) +
                            " and the budget is " + base::format_bytes(options.memory_bytes),
                        "Raise the memory budget or make subgroups smaller.");
  }
  SI_ASSIGN_OR_RETURN(slots.memory, parts.processor->allocate(count * slot_bytes + weights_bytes));
  const std::span<std::byte> all = slots.memory->bytes();
  slots.scratch = all.first(count * slot_bytes);
  slots.slots = std::vector<Slot>(count);
  slots.weights = std::vector<Slot>(options.weight_read_slots);
  std::vector<std::span<std::byte>> gradients;
  for (size_t i = 0; i < count; ++i) {
    Slot& slot = slots.slots[i];
    const std::span<std::byte> bytes = slots.scratch.subspan(i * slot_bytes, slot_bytes);
    slot.extent = bytes.first(extent_bytes);
    slot.gradient = bytes.subspan(extent_bytes);
    if (!slot.gradient.empty()) gradients.push_back(slot.gradient);
  }
  for (size_t i = 0; i < slots.weights.size(); ++i) {
    slots.weights[i].extent = all.subspan(slots.scratch.size() + i * master_bytes, master_bytes);
  }
  for (std::vector<Slot>* some : {&slots.slots, &slots.weights}) {
    for (Slot& slot : *some) {
      for (Transfer* transfer : {&slot.state_in, &slot.gradient_in, &slot.master_out,
                                 &slot.moments_out, &slot.gradient_out}) {
        transfer->slot = &slot;
      }
      slot.job.slot = &slot;
    }
  }
  parts.slots = slots.slots;
  parts.gradients->set_scratch(std::move(gradients));
  if (const base::Status mapped = parts.store->register_memory(all); !mapped.ok()) {
    base::log(base::LogLevel::kWarning, "device " + parts.name + ": " + mapped.to_string());
  }
  return base::Status();
}

}  // namespace smartinf::csd
