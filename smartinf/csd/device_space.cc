#include "smartinf/csd/device_space.h"

#include <algorithm>
#include <string>
#include <utility>

namespace smartinf::csd {

base::Status of_another_device(base::SubgroupId subgroup) {
  return base::Status(base::ErrorCode::kInvalidArgument,
                      "subgroup " + std::to_string(subgroup.value) + " belongs to another device");
}

DeviceSpace::DeviceSpace(storage::StoreLayout layout, const DeviceShare& share,
                         uint64_t spool_bytes)
    : layout_(std::move(layout)), matrices_(share.matrices), spool_bytes_(spool_bytes) {
  for (size_t i = 0; i < layout_.subgroups.size(); ++i) index_[layout_.subgroups[i].id] = i;
  for (const plan::GroupSpan& span : share.groups) groups_ = std::max(groups_, span.group + 1);
}

const storage::StoredSubgroup* DeviceSpace::find(base::SubgroupId subgroup) const {
  const auto found = index_.find(subgroup);
  return found == index_.end() ? nullptr : &layout_.subgroups[found->second];
}

uint64_t DeviceSpace::elements(base::SubgroupId subgroup) const {
  const storage::StoredSubgroup* found = find(subgroup);
  return found == nullptr ? 0 : found->count;
}

}  // namespace smartinf::csd
