#include "smartinf/engine/stored_tables.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/row_pages.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/row_commit.h"
#include "smartinf/storage/row_format.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;
using storage::RowTableKind;

namespace {

constexpr uint32_t kDevicesMax = 256;  // plan::row_pattern()'s

/// Rows whose records are in memory at once, about.
uint64_t rows_at_once(uint64_t record_bytes) {
  const uint64_t in_page = base::records_per_page(record_bytes);
  return std::max<uint64_t>(1, 4 * base::kMiB / record_bytes / in_page) * in_page;
}

Status mismatch(const csd::Snapshot& device, std::string what) {
  return Status(ErrorCode::kMismatch, std::move(what), "Run smartinf inspect on each device.",
                base::ErrorPlace{device.name(), {}, {}, 0});
}

}  // namespace

Result<std::unique_ptr<StoredTables>> StoredTables::open(std::span<csd::Snapshot* const> devices) {
  std::unique_ptr<StoredTables> made(new StoredTables);
  size_t first = 0;  // of the devices here, among all that have rows
  bool without = false;
  for (size_t d = 0; d < devices.size(); ++d) {
    csd::Snapshot& device = *devices[d];
    if (device.elsewhere()) continue;
    const std::string record = storage::split_row_commit(device.client_metadata()).record;
    without = without || record.empty();
    if (record.empty()) continue;
    SI_ASSIGN_OR_RETURN(csd::RowSnapshot* const rows, device.tables());
    if (rows == nullptr) {
      return Status(ErrorCode::kUnsupported,
                    fmt::format("the run has rows of tables ({}), and this device cannot give a "
                                "copy of its own",
                                storage::tables_of_row_commit(record)),
                    "Copy, reshard and export runs with tables on the machine of their devices.",
                    base::ErrorPlace{device.name(), {}, {}, 0});
    }
    const storage::RowFileLayout& layout = rows->layout();
    if (made->any_ == nullptr) {
      SI_ASSIGN_OR_RETURN(made->tables_, csd::run_tables_from_json(layout.description));
      made->any_ = rows;
      if (std::ranges::max(made->tables_.chunks) >= layout.device_count ||
          layout.device_count > kDevicesMax) {
        return mismatch(device, "its tables have rows on a device that the run does not have");
      }
      first = layout.device_index - std::min<size_t>(d, layout.device_index);
      made->devices_.resize(layout.device_count);
    }
    if (layout.device_index != first + d || layout.device_index >= made->devices_.size() ||
        layout.device_count != made->devices_.size()) {
      return mismatch(device, fmt::format("its tables are those of device {} of {}",
                                          layout.device_index, layout.device_count));
    }
    made->log_bytes_ += layout.log_bytes;
    made->devices_[first + d] = rows;
    SI_ASSIGN_OR_RETURN(const csd::DeviceTables expected,
                        csd::device_tables(made->tables_, layout.run, layout.device_index,
                                           layout.device_count, layout.log_bytes));
    if (!(expected.layout == layout)) {
      return mismatch(device, "its tables are not those of the run's other devices");
    }
    if (made->any_ == rows) made->layout_ = expected;
  }
  if (made->any_ == nullptr) return std::unique_ptr<StoredTables>();
  if (without)
    return mismatch(*devices.front(), "some devices of the run have tables, others none");
  for (const uint32_t table : made->layout_.steps_tables) {
    auto& steps = made->steps_.emplace_back();
    if (table == 0) continue;
    SI_ASSIGN_OR_RETURN(steps, csd::read_steps([&](auto rows, const auto& visit) {
                          return made->any_->read(table, rows, visit);
                        }));
  }
  return made;
}

uint64_t StoredTables::bytes() const {
  uint64_t bytes = 0;
  for (const csd::TableShape& table : tables_.tables) {
    if (table.kind != RowTableKind::kScratch) bytes += table.rows * table.record_bytes();
  }
  return bytes;
}

Status StoredTables::fetch(size_t table, Batch& batch) {
  const plan::RowPlacement& placement = layout_.placements[table];
  const uint64_t bytes = tables_.tables[table].record_bytes();
  batch.records.resize(batch.rows.size() * bytes);
  batch.written.assign(batch.rows.size(), false);
  std::vector<std::vector<uint32_t>> rows(devices_.size());
  std::vector<std::vector<size_t>> places(devices_.size());
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    const uint32_t device = placement.device_of(batch.rows[i]);
    rows[device].push_back(placement.local_row(batch.rows[i]));
    places[device].push_back(i);
  }
  for (size_t d = 0; d < rows.size(); ++d) {
    if (rows[d].empty()) continue;
    if (devices_[d] == nullptr) {
      return Status(ErrorCode::kUnsupported,
                    fmt::format("rows of the table {} are on devices of another rank (device {} of "
                                "{})",
                                tables_.tables[table].name, d, devices_.size()),
                    "Take what all ranks have together, as a checkpoint of theirs.");
    }
    SI_RETURN_IF_ERROR(devices_[d]->read(
        static_cast<uint32_t>(table), rows[d], [&](size_t i, std::span<const std::byte> record) {
          if (record.empty()) return;
          batch.written[places[d][i]] = true;
          std::ranges::copy(
              record, batch.records.begin() + static_cast<std::ptrdiff_t>(places[d][i] * bytes));
        }));
  }
  return Status();
}

Status StoredTables::read(size_t table, uint64_t first, uint64_t count, bool initial,
                          const Visit& visit, const Wanted& wanted) {
  const csd::TableShape& shape = tables_.tables[table];
  SI_CHECK(first <= shape.rows && count <= shape.rows - first, "rows that the table does not have");
  const uint64_t bytes = shape.record_bytes();
  Batch batch;
  for (uint64_t begin = first; begin < first + count;) {
    batch.rows.clear();
    for (; begin < first + count && batch.rows.size() < rows_at_once(bytes); ++begin) {
      if (!wanted || wanted(begin)) batch.rows.push_back(begin);
    }
    SI_RETURN_IF_ERROR(fetch(table, batch));
    const std::span<std::byte> records = batch.records;
    for (size_t i = 0; i < batch.rows.size(); ++i) {
      const auto record = records.subspan(i * bytes, bytes);
      if (batch.written[i]) {
        csd::bring_up(steps_[table], record);
      } else if (initial && shape.kind == RowTableKind::kState) {
        kernels::initial_record(shape.start, static_cast<uint32_t>(table), batch.rows[i], shape.dim,
                                record);
      } else if (initial) {
        std::ranges::fill(record, std::byte{0});
      }
    }
    for (size_t i = 0; i < batch.rows.size();) {
      size_t end = i;
      while (end < batch.rows.size() && (initial || batch.written[end]) &&
             batch.rows[end] == batch.rows[i] + (end - i)) {
        ++end;
      }
      if (end > i) {
        SI_RETURN_IF_ERROR(visit(batch.rows[i], records.subspan(i * bytes, (end - i) * bytes)));
      }
      i = std::max(end, i + 1);
    }
  }
  return Status();
}

Status StoredTables::copy_to(const csd::DeviceTables& device, csd::NewState& to,
                             const std::function<Status(uint64_t)>& progress) {
  uint64_t done_bytes = 0;
  Batch batch;
  std::vector<uint32_t> rows;
  for (uint32_t t = 0; t < tables_.tables.size(); ++t) {
    if (tables_.tables[t].kind == RowTableKind::kScratch) continue;
    const uint64_t bytes = tables_.tables[t].record_bytes();
    const uint64_t here = device.layout.tables[t].rows;
    // Whole pages, so that none is written twice.
    for (uint64_t first = 0; first < here; first += batch.rows.size()) {
      batch.rows.clear();
      for (uint64_t row = first; row < std::min(here, first + rows_at_once(bytes)); ++row) {
        batch.rows.push_back(device.placements[t].global_row(device.layout.device_index,
                                                             static_cast<uint32_t>(row)));
      }
      SI_RETURN_IF_ERROR(fetch(t, batch));
      rows.clear();
      for (size_t i = 0; i < batch.rows.size(); ++i) {
        if (!batch.written[i]) continue;
        std::copy_n(batch.records.begin() + static_cast<std::ptrdiff_t>(i * bytes), bytes,
                    batch.records.begin() + static_cast<std::ptrdiff_t>(rows.size() * bytes));
        rows.push_back(static_cast<uint32_t>(first + i));
      }
      const auto records = std::span(batch.records).first(rows.size() * bytes);
      if (!rows.empty()) SI_RETURN_IF_ERROR(to.put_rows(t, rows, records));
      done_bytes += batch.rows.size() * bytes;
      SI_RETURN_IF_ERROR(progress(done_bytes));
    }
    if (device.steps_tables[t] == 0) continue;
    // Every device has the scalars of all steps.
    for (const kernels::RowScalars& scalars : steps_[t]) {
      const auto row = static_cast<uint32_t>(scalars.step.step);
      SI_RETURN_IF_ERROR(
          to.put_rows(device.steps_tables[t], std::span(&row, 1), csd::encode_step(scalars)));
    }
  }
  return Status();
}

}  // namespace smartinf::engine
