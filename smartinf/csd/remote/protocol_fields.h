// The members of what is sent, in the order in which they go: one description for both directions.
// Found by argument-dependent look-up, so they stand in the namespaces of their types.
#pragma once

#include "smartinf/csd/remote/frame.h"
#include "smartinf/csd/remote/protocol.h"

namespace smartinf::base {

template <typename Wire, typename Tag>
void describe(Wire& wire, Id<Tag>& id) {
  wire(id.value);
}
template <typename Wire>
void describe(Wire& wire, TrafficReading& traffic) {
  wire(traffic.up_bytes, traffic.down_bytes);
}

}  // namespace smartinf::base

namespace smartinf::kernels {

template <typename Wire>
void describe(Wire& wire, StepScalars& s) {
  wire(csd::wire::choice(s.rule, UpdateRule::kLion), s.skip, s.nesterov, s.maximize, s.first_step,
       s.gradient_scale, s.lr, s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2, s.eps,
       s.decay_factor, s.weight_decay, s.step_size, s.dampening_factor, s.initial_variance, s.step,
       s.seed);
}

}  // namespace smartinf::kernels

namespace smartinf::plan {

template <typename Wire>
void describe(Wire& wire, GroupSpan& span) {
  wire(span.first, span.count, span.group);
}

}  // namespace smartinf::plan

namespace smartinf::compress {

template <typename Wire>
void describe(Wire& wire, MatrixLayout& matrix) {
  uint64_t range = matrix.range;
  wire(matrix.first, matrix.rows, matrix.columns, matrix.samples, range);
  matrix.range = range;
}

}  // namespace smartinf::compress

namespace smartinf::storage {

template <typename Wire>
void describe(Wire& wire, RunId& run) {
  wire(run.bytes);
}
template <typename Wire>
void describe(Wire& wire, StoredSubgroup& subgroup) {
  wire(subgroup.id, subgroup.first_element, subgroup.count);
}
template <typename Wire>
void describe(Wire& wire, StoreState& s) {
  wire(s.run, s.device_index, s.device_count, s.committed_step, s.prepared_step, s.initialized,
       s.complete, s.copied_step, s.torn);
}
template <typename Wire>
void describe(Wire& wire, StoreLayout& layout) {
  wire(layout.run, layout.device_index, layout.device_count,
       csd::wire::choice(layout.format, base::StateFormat::kQ8),
       csd::wire::choice(layout.checksum_kind, ChecksumKind::kXxh3));
  auto planes = static_cast<uint8_t>(layout.planes.size());
  wire(planes);
  if constexpr (Wire::kReads) layout.planes.resize(planes);
  for (base::PlaneKind& plane : layout.planes) {
    wire(csd::wire::choice(plane, base::PlaneKind::kResidual));
  }
  wire(layout.subgroups, layout.gradient_spill_bytes, layout.description, layout.copied_step);
}
template <typename Wire>
void describe(Wire& wire, StoreSummary& s) {
  wire(s.state, s.layout, s.file_path, s.container_bytes, s.format_version, s.slots,
       s.bytes_written_ever, s.created_seconds, s.superblock_copies, s.superblock_copies_damaged);
}
template <typename Wire>
void describe(Wire& wire, CheckReport& r) {
  wire(r.state, r.checked_step, r.blocks_checked, r.blocks_without_checksum, r.bytes_read, r.faults,
       r.faults_repaired, r.state_lost, r.bytes_written_ever, r.created_seconds);
}
template <typename Wire>
void describe(Wire& wire, StoreFault& fault) {
  csd::wire::Outcome outcome(fault.status);
  wire(csd::wire::choice(fault.kind, FaultKind::kUnreadable), outcome, fault.costs_state,
       fault.repaired);
  if constexpr (Wire::kReads) fault.status = outcome.status();
}

}  // namespace smartinf::storage

namespace smartinf::csd {

template <typename Wire>
void describe(Wire& wire, BeginStep& message) {
  wire(message.step);
}
template <typename Wire>
void describe(Wire& wire, Prefetch& message) {
  wire(message.subgroups);
}
template <typename Wire>
void describe(Wire& wire, Prepare& message) {
  wire(message.step, message.client_metadata);
}
template <typename Wire>
void describe(Wire& wire, Commit& message) {
  wire(message.step);
}
template <typename Wire>
void describe(Wire& wire, Abort& message) {
  wire(message.step);
}
template <typename Wire>
void describe(Wire&, StopUpdate&) {}
template <typename Wire>
void describe(Wire&, Flush&) {}
template <typename Wire>
void describe(Wire&, FinishUpdate&) {}
template <typename Wire>
void describe(Wire& wire, DeviceShare& share) {
  wire(share.slot_memory_bytes, share.weight_read_slots, share.compressed_block_bytes,
       share.gradient_memory_bytes, share.spool_bytes, share.groups, share.matrices);
}
template <typename Wire>
void describe(Wire& wire, SourceWishes& wishes) {
  wire(wire::choice(wishes.gradient_type, base::DataType::kF16),
       wire::choice(wishes.schedule, plan::ScheduleVariant::kOverlapped),
       wire::choice(wishes.durability, storage::Durability::kNone), wishes.checksums);
}
template <typename Wire>
void describe(Wire& wire, DeviceInfo& info) {
  wire::Outcome early(info.updates_as_completed);
  wire(info.kind, info.ring, info.slots, info.memory_bytes, info.gradient_memory_bytes,
       info.gradients_spilled, early, info.threads, info.state_cache_bytes, info.cached_subgroups,
       info.spool_bytes, info.weight_read_slots);
  if constexpr (Wire::kReads) info.updates_as_completed = early.status();
}

}  // namespace smartinf::csd

namespace smartinf::csd::wire {

template <typename Wire>
void describe(Wire& wire, Hello& hello) {
  wire(hello.magic, hello.version);
  // What another version says behind it is not looked at.
  if constexpr (Wire::kReads) {
    if (hello.version != kProtocolVersion) return wire.skip_rest();
  }
  wire(choice(hello.purpose, Purpose::kNewState), hello.device);
}
template <typename Wire>
void describe(Wire& wire, Outcome& outcome) {
  wire(choice(outcome.code, base::kErrorCodeLast), outcome.what, outcome.advice, outcome.path,
       outcome.offset_bytes, outcome.length_bytes, outcome.system_errno);
}
template <typename Wire>
void describe(Wire& wire, Welcome& welcome) {
  wire(welcome.magic, welcome.version);
  if constexpr (Wire::kReads) {
    if (welcome.version != kProtocolVersion) return wire.skip_rest();
  }
  wire(welcome.outcome);
}

// clang-format off
template <typename Wire> void describe(Wire&, Peek&) {}
template <typename Wire> void describe(Wire&, Summarize&) {}
template <typename Wire> void describe(Wire& wire, Check& m) { wire(m.memory_bytes, m.io_depth, m.repair, m.step); }
template <typename Wire> void describe(Wire&, Measure&) {}
template <typename Wire> void describe(Wire&, Capacity&) {}
template <typename Wire> void describe(Wire&, Describe&) {}
template <typename Wire> void describe(Wire&, Erase&) {}
template <typename Wire> void describe(Wire& wire, Peeked& m) { wire(m.state); }
template <typename Wire> void describe(Wire& wire, Measured& m) { wire(m.bytes_per_second); }
template <typename Wire> void describe(Wire& wire, Capable& m) { wire(m.bytes); }
template <typename Wire> void describe(Wire& wire, Described& m) { wire(m.place, m.drive, m.keeps_replaced); }
template <typename Wire> void describe(Wire&, Erased&) {}
template <typename Wire> void describe(Wire& wire, Progress& m) { wire(m.blocks_done, m.blocks_total); }

template <typename Wire> void describe(Wire& wire, Attach& m) { wire(m.session, m.received, m.create, m.share, m.wishes); }
template <typename Wire> void describe(Wire& wire, Vitals& m) { wire(m.host, m.store, m.written_ever, m.cached_bytes); }
template <typename Wire> void describe(Wire& wire, Standing& m) { wire(m.state, m.client_metadata, m.state_cache_bytes, m.cached_subgroups); }
template <typename Wire> void describe(Wire& wire, Attached& m) { wire(m.outcome, m.session, m.received, m.info, m.layout, m.standing, m.vitals); }

template <typename Wire> void describe(Wire& wire, Gradient& m) { wire(m.subgroup, m.first, m.count, choice(m.type, base::DataType::kF16)); }
template <typename Wire> void describe(Wire& wire, CompressedGradient& m) { wire(m.subgroup); }
template <typename Wire> void describe(Wire& wire, WeightsWanted& m) { wire(m.subgroup, m.weights, m.samples); }
template <typename Wire> void describe(Wire& wire, UpdateWanted& m) {
  wire(choice(m.weights_type, base::DataType::kF16), m.scalars, m.updates, m.as_completed, m.keep_updated, m.weights_on_demand);
}
template <typename Wire> void describe(Wire& wire, StateWanted& m) { wire(m.subgroup, m.first, m.count, m.planes); }
template <typename Wire> void describe(Wire& wire, StateGiven& m) { wire(m.subgroup, m.count, m.planes, m.plane_mask, m.residual); }
template <typename Wire> void describe(Wire& wire, ReadWanted& m) { wire(m.subgroup, m.step, choice(m.type, base::DataType::kF16)); }
template <typename Wire> void describe(Wire& wire, SpoolGiven& m) { wire(m.offset_bytes); }
template <typename Wire> void describe(Wire& wire, SpoolWanted& m) { wire(m.offset_bytes, m.bytes); }
template <typename Wire> void describe(Wire& wire, RecoverTo& m) { wire(m.step); }
template <typename Wire> void describe(Wire& wire, CacheState& m) { wire(m.subgroups); }

template <typename Wire> void describe(Wire& wire, CommandFrame& m) { wire(m.payload_bytes, m.checksum, m.body); }
template <typename Wire> void describe(Wire& wire, PieceFrame& m) { wire(m.checksum); }
template <typename Wire> void describe(Wire& wire, AckFrame& m) { wire(m.received); }
template <typename Wire> void describe(Wire&, ByeFrame&) {}
template <typename Wire> void describe(Wire& wire, Up& m) { wire(m.number, m.body); }

template <typename Wire> void describe(Wire& wire, DataFrame& m) { wire(m.command, choice(m.target, Target::kSpool), m.subgroup, m.offset_bytes, m.checksum); }
template <typename Wire> void describe(Wire& wire, ReadyFrame& m) { wire(m.command, m.subgroup, m.vitals); }
template <typename Wire> void describe(Wire& wire, DoneFrame& m) { wire(m.command, m.outcome, m.vitals, m.standing); }
template <typename Wire> void describe(Wire& wire, VitalsFrame& m) { wire(m.vitals); }
template <typename Wire> void describe(Wire& wire, ClosedFrame& m) { wire(m.outcome); }
template <typename Wire> void describe(Wire& wire, Down& m) { wire(m.number, m.body); }

template <typename Wire> void describe(Wire& wire, OpenSnapshot& m) { wire(choice(m.lock, storage::ReaderLock::kLeave), m.session); }
template <typename Wire> void describe(Wire& wire, SnapshotOpened& m) { wire(m.outcome, m.state, m.layout, m.drive); }
template <typename Wire> void describe(Wire& wire, ChooseStep& m) { wire(m.step); }
template <typename Wire> void describe(Wire& wire, ReadBlocks& m) { wire(m.subgroup, m.plane, m.first, m.count); }
template <typename Wire> void describe(Wire& wire, SnapshotAnswer& m) { wire(m.outcome, m.client_metadata, m.blocks_without_checksum, m.checksum); }
template <typename Wire> void describe(Wire& wire, CreateState& m) { wire(m.layout, choice(m.durability, storage::Durability::kNone), m.replace); }
template <typename Wire> void describe(Wire& wire, SubgroupPiece& m) { wire(m.subgroup, m.offset_bytes, m.total_bytes, m.checksum); }
template <typename Wire> void describe(Wire& wire, WaitFor& m) { wire(m.subgroup); }
template <typename Wire> void describe(Wire& wire, PrepareState& m) { wire(m.client_metadata); }
template <typename Wire> void describe(Wire&, CommitState&) {}
template <typename Wire> void describe(Wire&, CloseState&) {}
template <typename Wire> void describe(Wire&, TakePlace&) {}
template <typename Wire> void describe(Wire&, GiveBack&) {}
template <typename Wire> void describe(Wire&, Finish&) {}
template <typename Wire> void describe(Wire& wire, StateAnswer& m) { wire(m.outcome); }
// clang-format on

/// A head as it is sent.
template <typename Message>
std::vector<std::byte> encode(const Message& message) {
  Writer writer;
  writer(message);
  return seal_head(writer.take());
}
/// Errors: kCorrupt.
template <typename Message>
base::Result<Message> decode(const InFrame& frame) {
  Reader reader(frame.head());
  Message message;
  reader(message);
  if (reader.done()) return message;
  return base::Status(base::ErrorCode::kCorrupt, "a message is not what belongs here",
                      "The other side does not keep to the protocol.");
}

}  // namespace smartinf::csd::wire
