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

uint64_t rank_gradient_bytes(uint64_t elements) {
  const uint64_t bucket = rank_bucket_bytes(elements);
  const uint64_t under_way = kRankBuckets * (bucket + 2 * bucket);
  return bucket + under_way + rank_sum_elements(elements) * sizeof(float);
}

uint64_t rank_weight_bytes(uint64_t subgroup_elements) {
  return kRankSubgroupsInFlight * (subgroup_elements * sizeof(float) + kRankOutcomeBytes);
}

uint64_t rank_bytes(uint64_t elements, uint64_t subgroup_elements) {
  return rank_gradient_bytes(elements) + rank_weight_bytes(subgroup_elements);
}

}  // namespace smartinf::plan
