#include "smartinf/plan/rank_share.h"

#include <algorithm>
#include <vector>

namespace smartinf::plan {

uint32_t rank_of_device(size_t device, size_t devices, uint32_t world) {
  return static_cast<uint32_t>(device * world / devices);
}

DeviceSharing device_sharing(std::span<const uint32_t> rank_of, uint32_t world) {
  std::vector<uint64_t> devices(world);
  for (const uint32_t rank : rank_of) ++devices[rank < world ? rank : 0];
  const auto [least, most] = std::ranges::minmax(devices);
  return {most, least > 0};
}

uint64_t rank_bucket_bytes(uint64_t elements) {
  return std::min(kRankBucketBytes, elements * 2 * sizeof(float));
}

uint64_t rank_sum_elements(uint64_t elements) {
  return std::min(kRankSumElements, elements) + kRankPieceElements;
}

uint64_t rank_gradient_bytes(uint64_t elements, const RankExchange& exchange) {
  const uint64_t full = rank_bucket_bytes(elements);
  const uint64_t given = exchange.elements * exchange.sums * sizeof(float);
  const uint64_t bucket = std::min(full, given);
  // Ranks that get what others sum up get at most twice a bucket's bytes; their own stay.
  uint64_t received = std::min(2 * full, given * std::max(1u, exchange.ranks));
  if (exchange.ranks > 0) received -= received / exchange.ranks;
  const uint64_t buckets = given < full ? 1 : kRankBuckets;
  return bucket + buckets * (bucket + received) + rank_sum_elements(elements) * sizeof(float);
}

uint64_t rank_weight_bytes(const RankExchange& exchange) {
  return kRankSubgroupsInFlight *
         (exchange.subgroup_elements * exchange.value_bytes + kRankOutcomeBytes);
}

uint64_t rank_bytes(uint64_t elements, const RankExchange& exchange) {
  return rank_gradient_bytes(elements, exchange) + rank_weight_bytes(exchange);
}

}  // namespace smartinf::plan
