// The part of a device's parameter space that both ends of a message know: what a message may name,
// and how much memory it points to.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/csd/device_source.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

/// kInvalidArgument, with the subgroup's number.
base::Status of_another_device(base::SubgroupId subgroup);

class DeviceSpace {
 public:
  /// share: what the device was opened with. spool_bytes: of the opened device.
  DeviceSpace(storage::StoreLayout layout, const DeviceShare& share, uint64_t spool_bytes);

  const storage::StoreLayout& layout() const { return layout_; }
  /// Null for a subgroup of another device.
  const storage::StoredSubgroup* find(base::SubgroupId subgroup) const;
  /// Elements of a subgroup; 0: of another device.
  uint64_t elements(base::SubgroupId subgroup) const;
  uint32_t groups() const { return groups_; }
  const std::vector<compress::MatrixLayout>& matrices() const { return matrices_; }
  uint64_t spool_bytes() const { return spool_bytes_; }

 private:
  storage::StoreLayout layout_;
  std::vector<compress::MatrixLayout> matrices_;
  uint32_t groups_ = 1;
  uint64_t spool_bytes_ = 0;
  std::unordered_map<base::SubgroupId, size_t> index_;
};

}  // namespace smartinf::csd
