// Which device owns which subgroup.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/rank_span.h"

namespace smartinf::plan {

struct DeviceCapacity {
  double bandwidth = 1;           // relative; measured bytes per second of the step's traffic
  uint64_t elements_max = ~0ull;  // elements that fit on it
  uint32_t rank = 0;              // that drives it
};

/// owner[i] is the device of subgroup i. Elements are shared out in proportion to bandwidth; a
/// device that is full passes the rest to the others. Subgroups of a device are spread over the
/// whole space, so that every device has work from the first layer on. The same arguments give the
/// same owners on every machine.
///
/// `previous`, when not empty, is an earlier placement of the same subgroups (entries beyond
/// `devices` are of devices that are gone): the shares are those of a fresh placement, and no more
/// subgroups change hands than that takes.
///
/// Errors: kNoSpace with how much is missing; kInvalidArgument for no device or a rate that is not
/// positive.
base::Result<std::vector<base::DeviceId>> place(std::span<const Subgroup> subgroups,
                                                std::span<const DeviceCapacity> devices,
                                                std::span<const base::DeviceId> previous = {});

/// The subgroups, cut in front of the first block that ranks of different stages compute with, and
/// behind it: what one of them sends the other for it is for no more than a block's elements.
std::vector<Subgroup> cut_by_stage(std::span<const Subgroup> subgroups,
                                   std::span<const RankSpan> stages);

/// place(), where each subgroup goes to the devices of the ranks that compute with most of it (the
/// last such span's). Errors also: kInvalidArgument where these have none.
base::Result<std::vector<base::DeviceId>> place_by_stage(std::span<const Subgroup> subgroups,
                                                         std::span<const DeviceCapacity> devices,
                                                         std::span<const RankSpan> stages);

}  // namespace smartinf::plan
