// Descriptions of devices, stores and commands for other processes (base/codec.h): for a server's
// client and between ranks. Found by argument-dependent look-up, so they stand in the namespaces of
// their types.
#pragma once

#include "smartinf/base/codec.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/device_source.h"
#include "smartinf/storage/check_store.h"
#include "smartinf/storage/summary.h"

namespace smartinf::kernels {

template <typename Wire>
void describe(Wire& wire, StepScalars& scalars) {
  auto& [rule, skip, nesterov, maximize, first_step, gradient_scale, lr, beta1, one_minus_beta1,
         beta2, one_minus_beta2, eps, decay_factor, weight_decay, step_size, dampening_factor,
         initial_variance, step, seed] = scalars;
  wire(base::choice(rule, UpdateRule::kLion), skip, nesterov, maximize, first_step, gradient_scale,
       lr, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay_factor, weight_decay,
       step_size, dampening_factor, initial_variance, step, seed);
}

template <typename Wire>
void describe(Wire& wire, RowScalars& scalars) {
  auto& [rule, step] = scalars;
  wire(base::choice(rule, RowRule::kAdamW), step);
}

}  // namespace smartinf::kernels

namespace smartinf::plan {

template <typename Wire>
void describe(Wire& wire, GroupSpan& span) {
  auto& [first, count, group] = span;
  wire(first, count, group);
}

}  // namespace smartinf::plan

namespace smartinf::compress {

template <typename Wire>
void describe(Wire& wire, MatrixLayout& matrix) {
  auto& [first, rows, columns, samples, range] = matrix;
  static_assert(sizeof range == sizeof(uint64_t));
  wire(first, rows, columns, samples, range);
}

}  // namespace smartinf::compress

namespace smartinf::storage {

template <typename Wire>
void describe(Wire& wire, RunId& run) {
  auto& [bytes] = run;
  wire(bytes);
}
template <typename Wire>
void describe(Wire& wire, StoredSubgroup& subgroup) {
  auto& [id, first_element, count] = subgroup;
  wire(id, first_element, count);
}
template <typename Wire>
void describe(Wire& wire, StoreState& state) {
  auto& [run, device_index, device_count, committed_step, prepared_step, initialized, complete,
         copied_step, torn] = state;
  wire(run, device_index, device_count, committed_step, prepared_step, initialized, complete,
       copied_step, torn);
}
template <typename Wire>
void describe(Wire& wire, StoreLayout& layout) {
  auto& [run, device_index, device_count, format, checksum_kind, planes, subgroups,
         gradient_spill_bytes, description, copied_step] = layout;
  wire(run, device_index, device_count, format, base::choice(checksum_kind, ChecksumKind::kXxh3));
  auto count = static_cast<uint8_t>(planes.size());
  wire(count);
  if constexpr (Wire::kReads) planes.resize(count);
  for (base::PlaneKind& plane : planes) wire(base::choice(plane, base::PlaneKind::kResidual));
  wire(subgroups, gradient_spill_bytes, description, copied_step);
}
template <typename Wire>
void describe(Wire& wire, StoreSummary& summary) {
  auto& [state, layout, file_path, container_bytes, format_version, slots, bytes_written_ever,
         created_seconds, superblock_copies, superblock_copies_damaged] = summary;
  wire(state, layout, file_path, container_bytes, format_version, slots, bytes_written_ever,
       created_seconds, superblock_copies, superblock_copies_damaged);
}
template <typename Wire>
void describe(Wire& wire, CheckReport& report) {
  auto& [state, checked_step, blocks_checked, blocks_without_checksum, bytes_read, faults,
         faults_repaired, state_lost, bytes_written_ever, created_seconds] = report;
  wire(state, checked_step, blocks_checked, blocks_without_checksum, bytes_read, faults,
       faults_repaired, state_lost, bytes_written_ever, created_seconds);
}
template <typename Wire>
void describe(Wire& wire, StoreFault& fault) {
  auto& [kind, status, costs_state, repaired] = fault;
  wire(base::choice(kind, FaultKind::kUnreadable), status, costs_state, repaired);
}

}  // namespace smartinf::storage

namespace smartinf::csd {

template <typename Wire>
void describe(Wire& wire, DeviceShare& share) {
  auto& [slot_memory_bytes, weight_read_slots, compressed_block_bytes, gradient_memory_bytes,
         spool_bytes, cache_memory_bytes, cache_bytes, row_memory_bytes, groups, matrices] = share;
  wire(slot_memory_bytes, weight_read_slots, compressed_block_bytes, gradient_memory_bytes,
       spool_bytes, cache_memory_bytes, cache_bytes, row_memory_bytes, groups, matrices);
}
template <typename Wire>
void describe(Wire& wire, SourceWishes& wishes) {
  auto& [gradient_type, schedule, durability, checksums] = wishes;
  wire(base::choice(gradient_type, base::DataType::kF16),
       base::choice(schedule, plan::ScheduleVariant::kOverlapped),
       base::choice(durability, storage::Durability::kNone), checksums);
}
template <typename Wire>
void describe(Wire& wire, DeviceInfo& info) {
  auto& [name, kind, ring, slots, memory_bytes, gradient_memory_bytes, gradients_spilled,
         updates_as_completed, threads, state_cache_bytes, cached_subgroups, spool_bytes,
         cache_memory_bytes, row_memory_bytes, weight_read_slots, of_other_rank, rank] = info;
  wire(name, kind, ring, slots, memory_bytes, gradient_memory_bytes, gradients_spilled,
       updates_as_completed, threads, state_cache_bytes, cached_subgroups, spool_bytes,
       cache_memory_bytes, row_memory_bytes, weight_read_slots, of_other_rank, rank);
}

}  // namespace smartinf::csd
