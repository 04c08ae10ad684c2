// Shares of several ranks of a run, and the memory in which each of them exchanges gradients and
// weights with the others: the same functions for the engine and for `smartinf plan`. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "smartinf/base/units.h"

namespace smartinf::plan {

/// The rank that drives a device, of `devices` in their order, where nobody says otherwise.
uint32_t rank_of_device(size_t device, size_t devices, uint32_t world);

/// Devices per rank: the most that one rank drives, and whether every rank drives one.
struct DeviceSharing {
  uint64_t most = 0;
  bool all_have_one = false;
};
/// rank_of: of each device.
DeviceSharing device_sharing(std::span<const uint32_t> rank_of, uint32_t world);

/// The part of a rank that drives `mine` of a run's devices, of bytes that are for all of them.
inline uint64_t share_of_devices(uint64_t bytes, uint64_t mine, uint64_t devices) {
  return bytes / devices * mine;
}

// ---- Gradients on their way to the ranks that have their state.

/// Buckets under way at once.
inline constexpr size_t kRankBuckets = 2;
/// Bytes that a rank sends at once, of all its sums. Some milliseconds of a fast network.
inline constexpr uint64_t kRankBucketBytes = 8 * base::kMiB;
/// In a run of so many parameters.
uint64_t rank_bucket_bytes(uint64_t elements);
/// Sums that are handed to the devices at once: some pieces for each thread.
inline constexpr uint64_t kRankSumElements = uint64_t{1} << 20;
/// The engine's kGradientPieceElements, which is asserted there.
inline constexpr uint64_t kRankPieceElements = uint64_t{1} << 17;
/// In a run of so many parameters, with the piece that goes beyond.
uint64_t rank_sum_elements(uint64_t elements);

// ---- Weights on their way from there.

/// Subgroups under way at once, and what each carries behind its weights.
inline constexpr size_t kRankSubgroupsInFlight = 4;
inline constexpr uint64_t kRankOutcomeBytes = 2048;

/// What a rank exchanges with others.
struct RankExchange {
  uint64_t elements = 0;  // whose gradients other ranks sum up as well, or get
  uint32_t sums = 2;      // of each, that a rank gives
  /// Ranks that sum up a gradient, with the one that gets it among them; 0: it is none of them.
  uint32_t ranks = 0;
  uint64_t subgroup_elements = 0;  // of a subgroup whose weights go, at most
  uint64_t value_bytes = sizeof(float);
};
/// The values of an open bucket; what is sent and received of those under way; sums. elements: of
/// the run.
uint64_t rank_gradient_bytes(uint64_t elements, const RankExchange& exchange);
uint64_t rank_weight_bytes(const RankExchange& exchange);
/// Bytes that a rank has in memory beside its devices' buffers, at most.
uint64_t rank_bytes(uint64_t elements, const RankExchange& exchange);

}  // namespace smartinf::plan
