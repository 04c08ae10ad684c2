// What a user can say about the engine and its devices. The recipe's [engine], [optimizer] and
// [[device]] tables map to these one to one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/state_format.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/plan/schedule.h"
#include "smartinf/storage/store.h"

namespace smartinf::engine {

enum class UpdateWhere : uint8_t {
  kDevice,  // SmartUpdate: state stays behind the host link
  kHost,    // the baseline: state crosses the host link both ways
};

/// A path with a rate in each direction, for emulation. Bytes per second; 0: as fast as it goes.
struct EmulatedLink {
  double up_bytes_per_s = 0;    // towards the host: reads of a drive, new weights
  double down_bytes_per_s = 0;  // away from it: writes, gradients
  bool shared_budget = false;   // both directions draw on one
  bool given() const { return up_bytes_per_s > 0 || down_bytes_per_s > 0; }
};

struct DeviceOptions {
  std::string path;             // directory or block device
  std::string name;             // in messages; empty: the path
  uint32_t threads = 0;         // processor threads; 0: the cores shared out among the devices
  double bandwidth = 0;         // relative, for placement; 0: measured at first use
  uint64_t capacity_bytes = 0;  // 0: what is free
  EmulatedLink internal_link;   // between store and processor
};

struct UpdaterOptions {
  std::vector<DeviceOptions> devices;
  kernels::RuleOptions rule;
  base::StateFormat format = base::StateFormat::kF32;
  UpdateWhere where = UpdateWhere::kDevice;
  plan::ScheduleVariant schedule = plan::ScheduleVariant::kOverlapped;
  base::DataType gradient_type = base::DataType::kBf16;  // on the host link
  uint64_t seed = 0;                                     // of stochastic rounding
  uint64_t memory_budget_bytes = uint64_t{512} << 20;    // slots; gradients and weights come on top
  uint64_t gradient_budget_bytes = ~uint64_t{0};         // above it gradients are spilled
  uint64_t subgroup_elements = 0;                        // 0: chosen from the budget
  storage::Durability durability = storage::Durability::kStep;
  bool checksums = true;
  storage::RingKind ring = storage::RingKind::kAuto;
  uint64_t io_bytes = 0;   // 0: measured at first use and remembered on the device
  uint32_t io_depth = 0;   // 0: likewise
  bool create = true;      // false: only open what exists
  EmulatedLink host_link;  // one for all devices
};

}  // namespace smartinf::engine
