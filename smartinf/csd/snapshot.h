// A device's whole state, moved as it is stored: read from a device that holds one, written onto a
// device that is to hold it. Checkpoints, restores and reshards are made of these two, so that no
// more than the device itself knows where its bytes lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/storage/row_layout.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

/// The tables of a snapshot (csd/messages/rows/table_layout.h). Threads: as the snapshot.
class RowSnapshot {
 public:
  virtual ~RowSnapshot() = default;

  virtual const storage::RowFileLayout& layout() const = 0;
  /// i: of the list of rows. record: as it is stored; empty for a row that was never written.
  using Visit = std::function<void(size_t i, std::span<const std::byte> record)>;
  /// Reads rows, distinct and ascending, each checked; visits come in any order. Errors: kCorrupt
  /// with table, rows and place; kIo.
  virtual base::Status read(uint32_t table, std::span<const uint32_t> rows, const Visit& visit) = 0;
  /// As Snapshot::clone_to(), of the rows alone.
  virtual base::Result<uint64_t> clone_to(const std::string& directory) = 0;
};

/// The state that a device holds, opened for reading. Changes nothing.
/// Threads: one at a time.
class Snapshot {
 public:
  virtual ~Snapshot() = default;

  /// Name of the device, as in messages.
  virtual const std::string& name() const = 0;
  virtual const storage::StoreState& state() const = 0;
  virtual const storage::StoreLayout& layout() const = 0;
  /// Name that tells one drive from another: copies stay on a drive where they can. Empty: not
  /// known.
  virtual std::string drive() const { return {}; }
  /// Another process has the device, and reads its blocks.
  virtual bool elsewhere() const { return false; }

  /// Once, before reading: the step that recovery over all devices decides on.
  /// Errors: kCorrupt when its metadata cannot be used; kInvalidArgument for another step.
  virtual base::Status choose_step(base::StepNumber step) = 0;
  /// With the record of the device's tables, if it has any (storage/row_commit.h).
  virtual std::string client_metadata() const = 0;
  /// After choose_step(): the tables of that step, for as long as the snapshot lives; null: it has
  /// none, or cannot give them (client_metadata() says which). Errors: kNotFound, the state's rows
  /// are not beside it; kMismatch, they are of another state; kCorrupt, kIo.
  virtual base::Result<RowSnapshot*> tables() { return static_cast<RowSnapshot*>(nullptr); }
  /// Reads blocks [first, first + count) of a plane as they are stored, each checked; `subgroup` is
  /// its position in the layout. out has exactly their bytes.
  /// Errors: kCorrupt for a block that is not what was written, kIo.
  virtual base::Status read_blocks(size_t subgroup, size_t plane, uint64_t first, uint64_t count,
                                   std::span<std::byte> out) = 0;
  /// Blocks that were read and could not be checked: written with checksums off.
  virtual uint64_t blocks_without_checksum() const = 0;

  /// Makes the state of a device in this directory, of the same run and step, which shares its
  /// blocks with this one until either is overwritten. The blocks are not read. Gives the bytes
  /// that are shared; 0: it cannot be done here, and nothing is left of the attempt.
  /// Errors: kNoSpace, kIo.
  virtual base::Result<uint64_t> clone_to(const std::string& directory) {
    (void)directory;
    return uint64_t{0};
  }
};

/// A subgroup on its way into a new state. The caller's own; not moved between start() and wait().
struct SubgroupWrite {
  size_t subgroup = 0;          // its position in the layout
  std::span<std::byte> memory;  // its planes, at storage::Geometry::plane_offset; page-aligned

  // The state's own while under way.
  storage::SubgroupIo io;
  bool under_way = false;
};

struct NewStateOptions {
  storage::Durability durability = storage::Durability::kStep;
  /// The state that the device holds makes room (NewState::take_place).
  bool replace = false;
};

/// A state that is brought onto a device, as step layout().copied_step. In this order: start() and
/// wait() for every subgroup, prepare(), commit(), close(), take_place(), finish(). Of several
/// devices each call is made for all of them before the next: the state is real everywhere or
/// nowhere. Threads: one at a time.
class NewState {
 public:
  /// Deletes what was made, unless finish() has been called.
  virtual ~NewState() = default;

  virtual const storage::StoreLayout& layout() const = 0;

  /// Starts writing a subgroup and returns. Its checksums are taken now.
  virtual void start(SubgroupWrite& write) = 0;
  /// Waits for a write that was started, and gives its outcome.
  virtual base::Status wait(SubgroupWrite& write) = 0;
  /// Makes room for tables; once, before put_rows(). sparse: only rows that are put take space.
  /// Errors: kUnsupported for a device that cannot; kNoSpace, kIo.
  virtual base::Status create_tables(storage::RowFileLayout layout, bool sparse) {
    (void)layout, (void)sparse;
    return base::Status(base::ErrorCode::kUnsupported,
                        "tables are not copied onto devices of other machines",
                        "Name directories of this machine.");
  }
  /// rows: of a table of that layout, distinct and ascending; records: [rows.size()][record_bytes].
  virtual base::Status put_rows(uint32_t table, std::span<const uint32_t> rows,
                                std::span<const std::byte> records) {
    (void)table, (void)rows, (void)records;
    return base::Status(base::ErrorCode::kFailedPrecondition, "a state without tables");
  }

  /// Makes all of it durable, with the step's client metadata.
  virtual base::Status prepare(const std::string& client_metadata) = 0;
  virtual base::Status commit() = 0;
  /// Waits for what is in flight; nothing is written afterwards. Asked for again, it has the same
  /// answer.
  /// Errors: kTimeout: a request hangs, and the memory of writes must not be freed.
  virtual base::Status close() = 0;

  /// Puts it where the replaced state was, which is kept until finish(). Nothing to do where the
  /// device held none, or could not hold both. Errors: kIo; it is not there then.
  virtual base::Status take_place() { return base::Status(); }
  /// Undoes take_place().
  virtual base::Status give_back() { return base::Status(); }
  /// Makes the state the device's own: it stays, and what it replaced is deleted.
  virtual base::Status finish() = 0;
};

}  // namespace smartinf::csd
