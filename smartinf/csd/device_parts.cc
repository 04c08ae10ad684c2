#include "smartinf/csd/device_parts.h"

#include <utility>

#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"

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

}  // namespace smartinf::csd
