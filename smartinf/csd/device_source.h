// How the engine and the commands get at a device that is not open: look, check, measure, create,
// open, erase, and its state as a whole. One source per entry of the recipe's [[device]] list. The
// engine makes those of this machine (engine/local_source.h); those of others speak to a server,
// which has such sources itself (remote/).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/schedule.h"
#include "smartinf/storage/check_store.h"
#include "smartinf/storage/state_reader.h"
#include "smartinf/storage/store.h"
#include "smartinf/storage/summary.h"

namespace smartinf::csd {

/// Share of the engine's memory for one device, for as long as it is open.
struct DeviceShare {
  uint64_t slot_memory_bytes = 0;       // at most so much for slots of both kinds
  uint32_t weight_read_slots = 0;       // LocalDeviceOptions::weight_read_slots
  uint64_t compressed_block_bytes = 0;  // above 0: gradients come compressed
  uint64_t gradient_memory_bytes = 0;   // at most so much for gradients; the rest is spilled
  uint64_t spool_bytes = 0;             // room for the spool
  uint64_t cache_memory_bytes = 0;      // for keys and values; 0: the device keeps none
  uint64_t cache_bytes = ~uint64_t{0};  // room for them on the drive, at most
  uint64_t row_memory_bytes = 0;        // for tables; 0: the device keeps none
  std::vector<plan::GroupSpan> groups;  // of the whole parameter space
  std::vector<compress::MatrixLayout> matrices;  // of it too, where compression needs them
};

/// Options of a device that the engine asks for besides, where somebody else makes its source.
struct SourceWishes {
  base::DataType gradient_type = base::DataType::kBf16;
  plan::ScheduleVariant schedule = plan::ScheduleVariant::kOverlapped;
  storage::Durability durability = storage::Durability::kStep;
  bool checksums = true;
};

/// Threads: one at a time.
class DeviceSource {
 public:
  virtual ~DeviceSource() = default;

  /// As in messages: the recipe's name, or the path.
  virtual const std::string& name() const = 0;
  /// Name that tells one place from another, e.g. the canonical path.
  virtual std::string place() const = 0;
  /// The rank that drives it, of several.
  virtual uint32_t rank() const { return 0; }

  /// State of the device; nullopt: nothing of ours. Nothing is changed.
  /// Errors: kInvalidArgument (a plain file), kCorrupt, kIo.
  virtual base::Result<std::optional<storage::StoreState>> peek() = 0;
  /// All that it says of itself, for people. Locks and changes nothing; a run may be going
  /// meanwhile. Errors: kNotFound, kCorrupt, kMismatch (version), kIo.
  virtual base::Result<storage::StoreSummary> summarize();
  /// Reads everything and hands what is wrong to `visit`; see storage::check_store.
  virtual base::Result<storage::CheckReport> check(
      const storage::CheckOptions& options,
      const std::function<void(const storage::StoreFault&)>& visit);

  /// Its state, opened for reading. With storage::ReaderLock::kLeave nobody may be writing the step
  /// after the next meanwhile. Errors: kNotFound, kBusy, kCorrupt, kMismatch (version), kIo;
  /// kFailedPrecondition where no step was ever completed, or none that can be used is left.
  virtual base::Result<std::unique_ptr<Snapshot>> snapshot(storage::ReaderLock lock);
  /// A new state on it, copied from elsewhere.
  /// Errors: kAlreadyExists (with options.replace off), kNoSpace, kBusy, kIo.
  virtual base::Result<std::unique_ptr<NewState>> create_state(const storage::StoreLayout& layout,
                                                               const NewStateOptions& options);
  /// Whether a state that create_state() replaces is there until the new one is whole.
  virtual bool keeps_replaced() const { return false; }
  /// As Snapshot::drive(), of what would be made there.
  virtual std::string drive() const { return {}; }

  /// Bytes per second of a step's traffic, for placement: the user's number, or measured at first
  /// use.
  virtual base::Result<double> bandwidth() = 0;
  /// Bytes that a new state may take there.
  virtual base::Result<uint64_t> capacity_bytes() = 0;

  virtual base::Result<std::unique_ptr<Device>> create(const storage::StoreLayout& layout,
                                                       const DeviceShare& share) = 0;
  virtual base::Result<std::unique_ptr<Device>> open(const DeviceShare& share) = 0;
  /// Removes the state that is there, to start an interrupted creation over. Not while it is open.
  virtual base::Status erase() = 0;
};

using DeviceSources = std::vector<std::unique_ptr<DeviceSource>>;

}  // namespace smartinf::csd
