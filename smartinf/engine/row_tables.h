// Tables of which a step touches few rows, on the devices of a run (csd/messages/rows): rows are
// gathered for the forward, their gradients are added up in the order in which they come, and the
// devices update the rows that have one, in the step of the Updater that the tables belong to.
//
//   gather -> add_gradient ... -> Updater::finish_gradients -> start_update -> commit
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/row_map.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/messages/rows/rows.h"
#include "smartinf/engine/device_replies.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/options.h"
#include "smartinf/engine/ranks/row_ranks.h"
#include "smartinf/engine/stored_tables.h"
#include "smartinf/plan/row_schedule.h"

namespace smartinf::engine {

/// Ids are rows of a table, in any order, with repeats. Values are [ids][dim], of the type given.
/// Bits do not depend on the number of devices, the size of their caches, or the order of rows on
/// them, nor on the number of ranks. Threads: one at a time, that of the Updater's caller.
///
/// Where several ranks train together, each has the rows of its own devices, and all calls but
/// prefetch() and add_gradient() are collective (RowRanks).
///
/// Errors of all calls: kInvalidArgument for a row that the table has not, with its place among the
/// ids, before anything is sent; otherwise the device's, named.
class RowTables {
 public:
  /// Opens, or with set.fresh makes, the tables of options on the set's devices; `watch` outlives
  /// it, and the devices are destroyed before. Errors: kMismatch for other tables, both are named;
  /// kNoSpace; kOutOfMemory with what would do; kFailedPrecondition where ranks open other tables.
  static base::Result<std::unique_ptr<RowTables>> open(const UpdaterOptions& options,
                                                       const DeviceSet& set, DeviceWatch& watch);

  size_t count() const { return tables_.size(); }
  const TableOptions& table(size_t table) const { return tables_[table].options; }
  /// Errors: kNotFound with the names that there are.
  base::Result<size_t> find(const std::string& name) const;

  /// A hint: rows that will be gathered. Returns at once. Rows of other ranks' devices are left
  /// out.
  base::Status prefetch(size_t table, std::span<const int64_t> ids);
  /// keep: gradients of these rows will follow.
  base::Status gather(size_t table, std::span<const int64_t> ids, base::DataType type, void* out,
                      bool keep = true);
  /// Between begin_step() and finish_gradients(): adds to what the step's rows have so far.
  base::Status add_gradient(size_t table, std::span<const int64_t> ids, base::DataType type,
                            const void* gradient);
  /// Weights of distinct rows, before Updater::initialize(); of a scratch table at any time. Of
  /// several ranks, which give the same ids, rank 0's values count.
  base::Status put(size_t table, std::span<const int64_t> ids, std::span<const float> values);
  /// Adds to rows of a scratch table, in f32 and in the order of ids; those of rank 0 come first.
  base::Status scatter_add(size_t table, std::span<const int64_t> ids,
                           std::span<const float> values);
  /// Records of rows [first, first + count) in order, some at a time: weights and planes as
  /// kernels/row_rules.h lays them out. What `visit` returns ends the call.
  base::Status read_records(
      size_t table, uint64_t first, uint64_t count,
      const std::function<base::Status(uint64_t row, std::span<const std::byte> records)>& visit);

  /// The next Updater::edit_state() gives all tables the rows of `from`, in its own step; `from`
  /// lives until then. Each of several ranks reads the rows of its own devices. Devices need room
  /// for the rows twice. Errors: kMismatch for other tables, both are named.
  base::Status load_next(StoredTables& from);

  /// Rows of this process' devices that have a gradient in this step; those of other ranks after
  /// finish_gradients().
  uint64_t rows_of_step(size_t table) const { return tables_[table].rows.size(); }

  // For the Updater.
  /// What load_next() asked for, once; to be called after BeginStep.
  std::function<base::Status()> take_load();
  struct Found {
    double sum_of_squares = 0;
    bool finite = true;
    std::string first_bad;  // table and row of the first value that is not finite
  };
  /// Measures the sums as they will be sent, of all ranks. Again allowed after itself. mine: what
  /// this process has failed with so far, which then is the outcome on all ranks.
  base::Result<Found> finish_gradients(const base::Status& mine);
  /// The messages of an update, for each device of the set; they point to memory that stays until
  /// forget(). rates: of every table.
  std::vector<std::vector<csd::UpdateRows>> make_updates(std::span<const double> rates,
                                                         base::StepNumber number,
                                                         double gradient_scale);
  /// The step's gradients are not needed any more.
  void forget();

 private:
  struct Table {
    TableOptions options;
    plan::RowPlacement placement;
    // Gradients of this step: rows in the order in which they came, and their sums.
    std::vector<base::RowMap> places;  // by device: local row -> index below
    std::vector<uint64_t> rows;        // of the whole table
    std::vector<float> sums;           // [rows][dim]
    // What is sent: by device, rows ascending.
    std::vector<std::vector<uint32_t>> sent_rows;
    std::vector<std::vector<std::byte>> sent_gradients;
  };

  RowTables(const DeviceSet& set, DeviceWatch& watch) : set_(set), replies_(watch) {}

  /// Null for a device of another rank.
  csd::Device* here(size_t device) const;
  /// Rows of devices, by device, to out in that order; those of other ranks' devices are not there.
  base::Status gather_here(size_t table, const RowRanks::Rows& rows, base::DataType type, bool keep,
                           std::span<std::byte> out);
  void add_rows(Table& table, std::span<const int64_t> rows, base::DataType type,
                const void* gradient);
  base::Status share_gradients(const base::Status& mine);
  /// Adds rows with values to what goes to the ranks that have their devices.
  void pack(size_t table, std::span<const int64_t> ids, base::DataType type, const void* values,
            RowRanks::Parcels& parcels) const;

  base::Status check_ids(const Table& table, std::span<const int64_t> ids) const;
  template <typename Message>
  base::Status send_values(size_t table, std::span<const int64_t> ids,
                           std::span<const float> values, bool add);
  base::Status wait_for_all();
  base::Status load(StoredTables& from);
  base::Status load(StoredTables& from, size_t table);

  const DeviceSet& set_;
  std::unique_ptr<RowRanks> ranks_;  // null: one process
  uint32_t device_count_ = 0;        // of all ranks
  DeviceReplies replies_;
  csd::OpenTables opening_;  // as the devices were asked, but for their numbers
  StoredTables* load_from_ = nullptr;
  std::vector<Table> tables_;
  base::DataType gradient_type_ = base::DataType::kBf16;
  std::vector<std::vector<uint32_t>> prefetched_;  // rows of hints that were not answered
  RowRanks::Parcels gradients_;                    // of this step, for each rank
};

}  // namespace smartinf::engine
