// All devices of a run opened for reading at the step that recovery decides on: where checkpoints
// and resharding read from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/run_description.h"
#include "smartinf/engine/stored_tables.h"

namespace smartinf::engine {

/// Threads: one at a time.
struct StoredRun {
  std::vector<std::unique_ptr<csd::Snapshot>> devices;  // in the run's order
  RunDescription description;
  base::StepNumber step = 0;
  std::string client_metadata;           // without the record of tables
  std::unique_ptr<StoredTables> tables;  // null: it has none

  const storage::StoreLayout& layout() const { return devices.front()->layout(); }
  /// Elements of the largest subgroup.
  uint64_t subgroup_elements() const;
  /// Bytes that the planes of one state and rows of tables take on all devices.
  uint64_t state_bytes() const;

  /// A subgroup of the whole run and where it is; ascending by first element, without gaps.
  struct Piece {
    uint64_t first = 0;
    uint64_t count = 0;
    size_t device = 0;
    size_t subgroup = 0;  // its position in that device's layout
  };
  std::vector<Piece> pieces;
  /// The piece that holds an element. element < description.space.count().
  const Piece& at(uint64_t element) const;
};

/// Puts the devices of one run together, given in any order. Errors: kNotFound for one that is
/// missing, kMismatch for devices of different runs, kCorrupt when they do not hold every parameter
/// once; StoredTables::open()'s.
base::Result<StoredRun> join_snapshots(std::vector<std::unique_ptr<csd::Snapshot>> devices);
/// The same of devices that are not open. Errors: and those of DeviceSource::snapshot (named).
base::Result<StoredRun> open_stored_run(const DeviceSources& sources, storage::ReaderLock lock);

/// Elements of a run's planes as numbers, every block checked. Memory: one block of each plane.
/// Threads: one at a time.
class ElementReader {
 public:
  explicit ElementReader(StoredRun& run);

  /// Elements [first, first + out.size()) of the layout's plane `plane`. Cheap where calls go
  /// through a plane in order, however small their pieces. Errors: of Snapshot::read_blocks().
  base::Status read(size_t plane, uint64_t first, std::span<float> out);
  /// Reads everything, for its checksums only.
  base::Status check();

 private:
  struct Block {
    uint64_t first = 0;  // of the elements in values
    std::vector<float> values;
  };
  base::Status fetch(size_t plane, uint64_t element);

  StoredRun& run_;
  std::vector<Block> blocks_;  // of each plane the last one read
  std::vector<std::byte> encoded_;
};

}  // namespace smartinf::engine
