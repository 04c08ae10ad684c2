// Looks at everything a store holds and says what is wrong with it: the library under fsck.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "smartinf/base/status.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

enum class FaultKind : uint8_t {
  kContainer,   // too short, or without any superblock that can be used
  kSuperblock,  // one of its copies
  kLayout,      // one of the copies, or all
  kTable,       // likewise, of the step that was checked
  kBlock,       // state that is not what was written
  kUnreadable,  // state that the drive does not give back
};
std::string_view fault_kind_name(FaultKind kind);

struct StoreFault {
  FaultKind kind = FaultKind::kContainer;
  base::Status status;      // the fault, its place, and what can be done
  bool costs_state = true;  // false: another copy serves, nothing is lost
  bool repaired = false;
};

struct CheckOptions {
  RingOptions ring;
  uint64_t memory_bytes = uint64_t{64} << 20;  // for blocks; tables and layout come on top
  uint32_t io_depth = 8;
  /// Writes damaged copies of superblock, layout and table anew from good ones. Never touches
  /// state.
  bool repair = false;
  /// The step to check: the one that recovery over all devices decides on. Without it the prepared
  /// one, which is whole whatever the other devices say.
  std::optional<base::StepNumber> step;
  /// Called now and then with how many of the blocks are done; a failure it returns ends the check.
  std::function<base::Status(uint64_t blocks_done, uint64_t blocks_total)> progress;
};

struct CheckReport {
  StoreState state;
  base::StepNumber checked_step = 0;
  uint64_t blocks_checked = 0;
  uint64_t blocks_without_checksum = 0;  // written with checksums off: cannot be checked
  uint64_t bytes_read = 0;
  uint64_t faults = 0;
  uint64_t faults_repaired = 0;
  bool state_lost = false;  // some fault costs state
  uint64_t bytes_written_ever = 0;
  uint64_t created_seconds = 0;
};

/// Checks the store at `path` and hands each fault to `visit` as it is found. Locks the store
/// meanwhile. Memory: options.memory_bytes at most for state (at least 1 MiB), and the metadata of
/// one step. Errors: kNotFound, kBusy, and an I/O failure that keeps it from going on; faults are
/// not errors.
base::Result<CheckReport> check_store(const std::string& path, const CheckOptions& options,
                                      const std::function<void(const StoreFault&)>& visit);

/// The same on a container that is open already.
base::Result<CheckReport> check_container(Container container, const CheckOptions& options,
                                          const std::function<void(const StoreFault&)>& visit);

}  // namespace smartinf::storage
