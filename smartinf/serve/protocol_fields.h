// The members of what is sent, in the order in which they go: one description for both directions.
// Found by argument-dependent look-up, so they stand in the namespaces of their types.
#pragma once

#include "smartinf/csd/describe.h"
#include "smartinf/serve/frame.h"
#include "smartinf/serve/protocol.h"
#include "smartinf/storage/row_layout_fields.h"

namespace smartinf::serve::wire {

template <typename Wire>
void describe(Wire& wire, Hello& hello) {
  auto& [magic, version, purpose, device] = hello;
  wire(magic, version);
  // Bytes that another version puts behind it are not looked at.
  if constexpr (Wire::kReads) {
    if (version != kProtocolVersion) return wire.skip_rest();
  }
  wire(base::choice(purpose, Purpose::kNewState), device);
}
template <typename Wire>
void describe(Wire& wire, Welcome& welcome) {
  auto& [magic, version, outcome] = welcome;
  wire(magic, version);
  if constexpr (Wire::kReads) {
    if (version != kProtocolVersion) return wire.skip_rest();
  }
  wire(outcome);
}

// clang-format off
template <typename Wire> void describe(Wire& wire, Check& m) { auto& [memory_bytes, io_depth, repair, step] = m; wire(memory_bytes, io_depth, repair, step); }
template <typename Wire> void describe(Wire& wire, Peeked& m) { auto& [state] = m; wire(state); }
template <typename Wire> void describe(Wire& wire, Measured& m) { auto& [bytes_per_second] = m; wire(bytes_per_second); }
template <typename Wire> void describe(Wire& wire, Capable& m) { auto& [bytes] = m; wire(bytes); }
template <typename Wire> void describe(Wire& wire, Described& m) { auto& [place, drive, keeps_replaced] = m; wire(place, drive, keeps_replaced); }
template <typename Wire> void describe(Wire& wire, Progress& m) { auto& [blocks_done, blocks_total] = m; wire(blocks_done, blocks_total); }

template <typename Wire> void describe(Wire& wire, Attach& m) { auto& [session, received, create, share, wishes] = m; wire(session, received, create, share, wishes); }
template <typename Wire> void describe(Wire& wire, Vitals& m) { auto& [host, store, written_ever, cached_bytes] = m; wire(host, store, written_ever, cached_bytes); }
template <typename Wire> void describe(Wire& wire, Standing& m) { auto& [state, client_metadata, state_cache_bytes, cached_subgroups] = m; wire(state, client_metadata, state_cache_bytes, cached_subgroups); }
template <typename Wire> void describe(Wire& wire, Attached& m) { auto& [outcome, session, received, info, layout, standing, vitals] = m; wire(outcome, session, received, info, layout, standing, vitals); }

template <typename Wire> void describe(Wire& wire, RecoverTo& m) { auto& [step] = m; wire(step); }
template <typename Wire> void describe(Wire& wire, CacheState& m) { auto& [subgroups] = m; wire(subgroups); }

template <typename Wire> void describe(Wire& wire, CommandFrame& m) { auto& [payload_bytes, checksum, body] = m; wire(payload_bytes, checksum, body); }
template <typename Wire> void describe(Wire& wire, PieceFrame& m) { auto& [checksum] = m; wire(checksum); }
template <typename Wire> void describe(Wire& wire, AckFrame& m) { auto& [received] = m; wire(received); }
template <typename Wire> void describe(Wire& wire, Up& m) { auto& [number, body] = m; wire(number, body); }

template <typename Wire> void describe(Wire& wire, DataFrame& m) { auto& [command, place, offset_bytes, checksum] = m; wire(command, place, offset_bytes, checksum); }
template <typename Wire> void describe(Wire& wire, ReadyFrame& m) { auto& [command, subgroup, vitals] = m; wire(command, subgroup, vitals); }
template <typename Wire> void describe(Wire& wire, DoneFrame& m) { auto& [command, outcome, vitals, standing] = m; wire(command, outcome, vitals, standing); }
template <typename Wire> void describe(Wire& wire, VitalsFrame& m) { auto& [vitals] = m; wire(vitals); }
template <typename Wire> void describe(Wire& wire, ClosedFrame& m) { auto& [outcome] = m; wire(outcome); }
template <typename Wire> void describe(Wire& wire, Down& m) { auto& [number, received, body] = m; wire(number, received, body); }

template <typename Wire> void describe(Wire& wire, OpenSnapshot& m) { auto& [lock, session] = m; wire(base::choice(lock, storage::ReaderLock::kLeave), session); }
template <typename Wire> void describe(Wire& wire, SnapshotOpened& m) { auto& [outcome, state, layout, drive] = m; wire(outcome, state, layout, drive); }
template <typename Wire> void describe(Wire& wire, ChooseStep& m) { auto& [step] = m; wire(step); }
template <typename Wire> void describe(Wire& wire, ReadBlocks& m) { auto& [subgroup, plane, first, count] = m; wire(subgroup, plane, first, count); }
template <typename Wire> void describe(Wire& wire, ReadRows& m) { auto& [table, rows] = m; wire(table, rows); }
template <typename Wire> void describe(Wire& wire, SnapshotAnswer& m) { auto& [outcome, client_metadata, tables, blocks_without_checksum, checksum] = m; wire(outcome, client_metadata, tables, blocks_without_checksum, checksum); }
template <typename Wire> void describe(Wire& wire, CreateState& m) { auto& [layout, durability, replace] = m; wire(layout, base::choice(durability, storage::Durability::kNone), replace); }
template <typename Wire> void describe(Wire& wire, SubgroupPiece& m) { auto& [subgroup, offset_bytes, total_bytes, checksum] = m; wire(subgroup, offset_bytes, total_bytes, checksum); }
template <typename Wire> void describe(Wire& wire, WaitFor& m) { auto& [subgroup] = m; wire(subgroup); }
template <typename Wire> void describe(Wire& wire, PrepareState& m) { auto& [client_metadata] = m; wire(client_metadata); }
template <typename Wire> void describe(Wire& wire, CreateTables& m) { auto& [layout, sparse] = m; wire(layout, sparse); }
template <typename Wire> void describe(Wire& wire, PutTableRows& m) { auto& [table, rows, checksum] = m; wire(table, rows, checksum); }
template <typename Wire> void describe(Wire& wire, StateAnswer& m) { auto& [outcome] = m; wire(outcome); }
// clang-format on

/// A head as it is sent.
template <typename Message>
std::vector<std::byte> encode(const Message& message) {
  base::Encoder encoder;
  encoder(message);
  return seal_head(encoder.take());
}
/// Errors: kCorrupt.
template <typename Message>
base::Result<Message> decode(const InFrame& frame) {
  base::Decoder decoder(frame.head());
  Message message;
  decoder(message);
  if (decoder.done()) return message;
  return base::Status(base::ErrorCode::kCorrupt, "a message is not what belongs here",
                      "The other side does not keep to the protocol.");
}

}  // namespace smartinf::serve::wire
