// Snapshots and new states of devices that keep their state in a store (storage/store.h).
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/storage/row_file.h"
#include "smartinf/storage/state_reader.h"

namespace smartinf::csd {

/// Opens the tables that a commit record is of, to be read.
using OpenTablesToRead = std::function<base::Result<std::unique_ptr<RowSnapshot>>(
    const storage::RunId& run, const std::string& record)>;
/// Snapshot of what the reader has opened. name: of the device. tables: null: none can be read.
std::unique_ptr<Snapshot> make_snapshot(std::unique_ptr<storage::StateReader> reader,
                                        std::string name, OpenTablesToRead tables);

/// The tables beside the state in a directory. Errors: storage::open_rows_to_read's.
base::Result<std::unique_ptr<RowSnapshot>> open_stored_tables(const std::string& directory,
                                                              const storage::RunId& run,
                                                              const std::string& record);
/// RowSnapshot::clone_to() of a file, which nobody writes to meanwhile.
base::Result<uint64_t> clone_rows(const std::string& file, const std::string& directory);

/// A new state in a store that was created for it. How it takes its place, and how it is deleted,
/// is for the kind of device to say.
class StoreNewState : public NewState {
 public:
  ~StoreNewState() override;

  const storage::StoreLayout& layout() const override { return store_->layout(); }
  base::Status create_tables(storage::RowFileLayout layout, bool sparse) override;
  base::Status put_rows(uint32_t table, std::span<const uint32_t> rows,
                        std::span<const std::byte> records) override;
  void start(SubgroupWrite& write) override;
  base::Status wait(SubgroupWrite& write) override;
  base::Status prepare(const std::string& client_metadata) override;
  base::Status commit() override;
  base::Status close() override;

 protected:
  /// Begins the step that is copied. directory: of the store; empty: it has no room for tables.
  StoreNewState(std::unique_ptr<storage::Store> store, std::string directory);
  bool has_tables() const { return has_tables_; }

 private:
  std::unique_ptr<storage::Store> store_;  // null: closed, as closed_ says
  const std::string directory_;
  base::TrafficCounter rows_traffic_;
  std::unique_ptr<storage::RowFile> rows_;
  bool has_tables_ = false;
  base::Status closed_;
};

}  // namespace smartinf::csd
