#include "smartinf/csd/device_parts.h"

#include <utility>

#include "smartinf/base/clock.h"

namespace smartinf::csd {
namespace {

using Op = storage::SubgroupIo::Op;

const char* transfer_name(Op op) {
  switch (op) {
    case Op::kRead:
      return "read state";
    case Op::kWrite:
      return "write state";
    case Op::kReadGradient:
      return "read gradient";
    case Op::kWriteGradient:
      return "write gradient";
  }
  return "?";
}

}  // namespace

void DeviceParts::start(Transfer& transfer, SlotUser& user, Op op, uint32_t subgroup,
                        std::span<std::byte> buffer, uint32_t plane_mask) {
  const base::SubgroupId id = store->layout().subgroups[subgroup].id;
  const bool gradient = op == Op::kReadGradient || op == Op::kWriteGradient;
  transfer.user = &user;
  transfer.io.op = op;
  transfer.io.subgroup = id;
  transfer.io.buffer = buffer.first(gradient ? store->gradient_bytes(id) : store->extent_bytes(id));
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
  const bool read = transfer.io.op == Op::kRead || transfer.io.op == Op::kReadGradient;
  options.trace->record({transfer_name(transfer.io.op), read ? read_track : write_track,
                         transfer.io.subgroup.value, transfer.begin_ns, base::now_ns(),
                         transfer.io.buffer.size()});
}

void DeviceParts::complete(Command& command, base::Status status) const {
  command.replies->push(
      {&command, Completion::Event::kDone, {}, std::move(status).with_context(name)});
}

}  // namespace smartinf::csd
