// Reads the state of one step out of a container, some blocks at a time and each of them checked:
// what checkpoints and resharding are made of. Changes nothing, and needs no memory for subgroups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

enum class ReaderLock : uint8_t {
  kTake,   // nobody else may have the device open
  kLeave,  // the caller knows that the step it reads is not being overwritten
};

/// Threads: one at a time.
class StateReader {
 public:
  /// Errors: kNotFound, kBusy (who has it), kCorrupt, kMismatch (version), kIo;
  /// kFailedPrecondition for a store whose creation was interrupted or that is torn.
  static base::Result<std::unique_ptr<StateReader>> open(const std::string& path, ReaderLock lock);
  /// The same of a container that is open. path: as the user named it.
  static base::Result<std::unique_ptr<StateReader>> open(ReadOnlyContainer container,
                                                         const std::string& path,
                                                         ContainerLock lock = {});

  const std::string& path() const { return path_; }
  const std::string& file_path() const { return container_.file_path; }
  int descriptor() const { return container_.file.get(); }  // below 0: it is no file
  const StoreState& state() const { return state_; }
  const StoreLayout& layout() const { return layout_; }
  const Geometry& geometry() const { return geometry_; }
  uint32_t slots() const { return superblock_.slots; }
  uint64_t bytes_written_ever() const { return superblock_.bytes_written_ever; }

  /// Once, before reading: the step that recovery over all devices decides on.
  /// Errors: kCorrupt when no copy of its table can be used; kInvalidArgument for another step.
  base::Status choose_step(base::StepNumber step);
  base::StepNumber step() const { return step_; }
  std::string client_metadata() const;

  /// Reads blocks [first, first + count) of a plane; `subgroup` is its position in the layout. out
  /// has exactly their bytes. Errors: kCorrupt for a block that is not what was written, kIo.
  base::Status read_blocks(size_t subgroup, size_t plane, uint64_t first, uint64_t count,
                           std::span<std::byte> out);
  /// Blocks that were read and could not be checked: written with checksums off.
  uint64_t blocks_without_checksum() const { return blocks_without_checksum_; }

 private:
  StateReader() = default;

  std::string path_;
  ContainerLock lock_;
  ReadOnlyContainer container_;
  Superblock superblock_{};
  StoreState state_;
  StoreLayout layout_;
  Geometry geometry_;
  base::StepNumber step_ = 0;
  std::vector<std::byte> table_;
  uint64_t blocks_without_checksum_ = 0;
};

}  // namespace smartinf::storage
