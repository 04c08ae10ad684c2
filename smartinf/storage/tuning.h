// Which transfer size and depth a drive likes, and what it can do at best. Measured, not guessed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

struct IoTuning {
  uint64_t io_bytes = uint64_t{4} << 20;
  uint32_t io_depth = 8;
  /// Rates with these transfers at once; 0: not measured.
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  /// Rate of the sync (MeasureOptions::sync): what was written, over the time of the sync behind
  /// it; 0: that took no time, or was not measured.
  double sync_bytes_per_second = 0;
  /// Rate of reads with nothing beside them (MeasureOptions::sync); 0: not measured.
  double reads_alone_bytes_per_second = 0;
};

struct MeasureOptions {
  RingOptions ring;
  uint64_t file_bytes = uint64_t{512} << 20;  // of the temporary file, half read and half written
  double seconds = 0.25;                      // per combination of size and depth
  /// For what is in flight; combinations that need more are not tried. At least 8 MiB are used.
  uint64_t memory_bytes = uint64_t{256} << 20;
  bool sync = false;  // measure the last two rates as well: some seconds more
};

/// Finds transfer size and depth by a short run (some seconds) with reads and writes overlapped, on
/// a temporary file in the directory `path` (made if missing). A block device is not written to: it
/// gets the defaults, with rates of 0. Errors: kNoSpace, kIo, and what a directory can get wrong.
/// The caller may go on with defaults.
base::Result<IoTuning> measure_io(const std::string& path, const MeasureOptions& options = {});

/// Keeps a tuning beside the state, in PATH/smartinf.tuning. Nothing is kept for a block device.
base::Status remember_tuning(const std::string& path, const IoTuning& tuning);
/// The tuning that was remembered beside the state or, where none lies there, in the nearest folder
/// above it on the same file system; nothing when there is none or it cannot be read.
std::optional<IoTuning> recall_tuning(const std::string& path);

struct DriveLimit {
  double seconds = 0;
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
};

/// How long a step's bytes take without any computing: reads every subgroup of the store at `path`
/// and writes it to its shadow slot, reads and writes overlapped as in a step, then syncs if the
/// store does. The state is not changed. Buffers stay within memory_bytes (at least one subgroup).
/// Opens and locks the store: nothing else may have it open.
base::Result<DriveLimit> drive_limit(const std::string& path, const StoreOptions& options,
                                     uint64_t memory_bytes);

}  // namespace smartinf::storage
