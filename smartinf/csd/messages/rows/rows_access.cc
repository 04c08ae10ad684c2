#include "smartinf/csd/messages/rows/rows_access.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/linked_ring.h"
#include "smartinf/csd/messages/rows/table_layout.h"
#include "smartinf/csd/store_snapshot.h"
#include "smartinf/storage/leak_in_flight.h"
#include "smartinf/storage/row_commit.h"

namespace smartinf::csd {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using storage::RowTableKind;

// Rows that are read, or whose records are made, at once.
constexpr uint64_t kRowsAtOnce = 4096;
constexpr std::chrono::milliseconds kBetweenMerges{1};

Status refuse(std::string what) { return Status(ErrorCode::kInvalidArgument, std::move(what)); }

}  // namespace

RowsAccess::~RowsAccess() {
  {
    const std::lock_guard lock(queue_mutex_);
    closing_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void RowsAccess::serve(Command& command, Status refusal) {
  if (refusal.ok() && parts_.options.row_memory_bytes == 0) {
    refusal = Status(ErrorCode::kUnsupported, "the device was opened without memory for tables",
                     "Give it some (DeviceShare::row_memory_bytes).");
  }
  if (refusal.ok() && command.as<OpenTables>() != nullptr) {
    const std::lock_guard lock(work_mutex_);
    const storage::StoreState state = parts_.store->state();
    committed_record_ = storage::split_row_commit(parts_.store->client_metadata()).record;
    first_ = !state.complete;
  }
  if (!refusal.ok()) return parts_.complete(command, std::move(refusal));
  const std::lock_guard lock(queue_mutex_);
  commands_.push_back(&command);
  changed_.notify_one();
  if (thread_.joinable()) return;
  thread_ = std::jthread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "si-rows");
}

void RowsAccess::run() {
  bool merges = false;
  for (;;) {
    Command* command = nullptr;
    {
      std::unique_lock lock(queue_mutex_);
      const auto woken = [&] { return closing_ || !commands_.empty(); };
      if (merges) {
        changed_.wait_for(lock, kBetweenMerges, woken);
      } else {
        changed_.wait(lock, woken);
      }
      if (closing_) break;
      if (!commands_.empty()) {
        command = commands_.front();
        commands_.pop_front();
      }
    }
    while (steps_waiting_ > 0) std::this_thread::yield();
    Status status;
    {
      const std::lock_guard lock(work_mutex_);
      if (command != nullptr) {
        status = carry_out(*command);
      } else if (file_ != nullptr && !updating_ && file_->wants_merge()) {
        if (Status merged = file_->merge_some(); !merged.ok()) {
          step_failure_ = std::move(merged).with_context("merging the log of tables");
        }
      }
      merges = file_ != nullptr && !updating_ && step_failure_.ok() && file_->wants_merge();
    }
    if (command != nullptr) parts_.complete(*command, std::move(status));
  }
  for (Command* left : commands_) {
    parts_.complete(*left, Status(ErrorCode::kCancelled, "the device is closing"));
  }
}

Status RowsAccess::carry_out(const Command& command) {
  if (const auto* message = command.as<OpenTables>()) return open(*message);
  if (file_ == nullptr) return Status(ErrorCode::kFailedPrecondition, "the tables are not open");
  if (const auto* message = command.as<GatherRows>()) {
    pass_host_link(LinkDirection::kDown, base::TrafficKind::kGradient, message->rows.size());
    SI_RETURN_IF_ERROR(gather(*message));
    pass_host_link(LinkDirection::kUp, base::TrafficKind::kWeight, message->out.size());
    return Status();
  }
  if (const auto* message = command.as<PrefetchRows>()) {
    pass_host_link(LinkDirection::kDown, base::TrafficKind::kGradient, message->rows.size());
    return prefetch(*message);
  }
  if (const auto* message = command.as<UpdateRows>()) {
    pass_host_link(LinkDirection::kDown, base::TrafficKind::kGradient,
                   message->rows.size() + message->gradients.size());
    Status status = update(*message);
    if (!status.ok() && begun_ && step_failure_.ok()) step_failure_ = status;
    return status;
  }
  if (const auto* message = command.as<PutRows>()) {
    pass_host_link(LinkDirection::kDown, base::TrafficKind::kState,
                   message->rows.size() + message->values.size());
    return put(*message);
  }
  if (const auto* message = command.as<ScatterAddRows>()) {
    pass_host_link(LinkDirection::kDown, base::TrafficKind::kActivation,
                   message->rows.size() + message->values.size());
    return scatter_add(*message);
  }
  const auto& message = *command.as<ReadRecords>();
  SI_RETURN_IF_ERROR(read_records(message));
  pass_host_link(LinkDirection::kUp, base::TrafficKind::kState, message.records.size());
  return Status();
}

/// Counts the bytes, and waits until they have passed an emulated link.
void RowsAccess::pass_host_link(LinkDirection direction, base::TrafficKind kind, uint64_t bytes) {
  if (parts_.options.host_link_place == HostLinkPlace::kAtStore || bytes == 0) return;
  if (direction == LinkDirection::kUp) {
    parts_.host_traffic.add_up(kind, bytes);
  } else {
    parts_.host_traffic.add_down(kind, bytes);
  }
  Link* const link = parts_.options.links.host.get();
  if (link == nullptr) return;
  const uint64_t due_ns = link->book(direction, kind, bytes);
  const uint64_t now_ns = base::now_ns();
  if (due_ns > now_ns) std::this_thread::sleep_for(std::chrono::nanoseconds(due_ns - now_ns));
}

// ---- Opening.

Status RowsAccess::open(const OpenTables& message) {
  const LocalDeviceOptions& options = parts_.options;
  const bool replaces = file_ != nullptr && message.create && begun_ && !first_ && !updating_;
  if (file_ != nullptr && !replaces) {
    return Status(ErrorCode::kFailedPrecondition, "the tables are open already");
  }
  if (options.make_processor) {
    return Status(ErrorCode::kUnsupported,
                  "a device whose processor is not this machine's cores keeps no tables",
                  "Use processor = \"cpu\" for devices of a run with tables.");
  }
  if (options.store.durability == storage::Durability::kNone) {
    return Status(ErrorCode::kUnsupported, "tables are committed with every step",
                  "Use durability = \"step\" for a run with tables.");
  }
  if (message.create != first_ && !replaces) {
    return message.create
               ? Status(ErrorCode::kAlreadyExists, "the device holds the state of a run already")
               : Status(ErrorCode::kFailedPrecondition, "the device holds no committed step");
  }
  const RunTables asked{message.tables, message.pattern};
  SI_ASSIGN_OR_RETURN(DeviceTables here,
                      device_tables(asked, parts_.store->layout().run, message.device_index,
                                    message.device_count, message.log_bytes));
  const storage::RowFileLayout& layout = here.layout;
  if (replaces) return replace(layout);
  std::vector<Table> tables(message.tables.size());
  for (size_t i = 0; i < tables.size(); ++i) {
    tables[i].shape = message.tables[i];
    tables[i].record_bytes = layout.tables[i].record_bytes;
    tables[i].placement = std::move(here.placements[i]);
    tables[i].rows = layout.tables[i].rows;
    tables[i].steps_table = here.steps_tables[i];
  }
  SI_RETURN_IF_ERROR(storage::RowFile::check(layout));
  const storage::StoreOptions store = linked_store_options(options);
  std::unique_ptr<storage::RowFile> file;
  if (!message.create) {
    SI_ASSIGN_OR_RETURN(
        file, storage::open_row_file([&](std::string_view name) { return open_place(name, 0); },
                                     layout.run, committed_record_, store.watchdog, traffic_));
    const storage::RowFileLayout& there = file->layout();
    if (there.description != layout.description) {
      SI_ASSIGN_OR_RETURN(const RunTables held, run_tables_from_json(there.description));
      return Status(ErrorCode::kMismatch,
                    fmt::format("the device holds other tables ({}) than those that are asked for "
                                "({})",
                                text_of(held), text_of(asked)),
                    "Name the tables as the run was begun with, or start a new run in other "
                    "directories.");
    }
    if (there.device_index != layout.device_index || there.device_count != layout.device_count) {
      return Status(ErrorCode::kMismatch, "the device's tables are those of device " +
                                              std::to_string(there.device_index) + " of " +
                                              std::to_string(there.device_count));
    }
  }
  // A file keeps the log that it was made with.
  const uint64_t fixed =
      storage::RowFile::memory_bytes_max(file != nullptr ? file->layout() : layout);
  if (fixed > options.row_memory_bytes) {
    return Status(ErrorCode::kOutOfMemory,
                  "the tables need " + base::format_bytes(fixed) +
                      " of memory for where their rows are, and may take " +
                      base::format_bytes(options.row_memory_bytes),
                  "Allow more memory for tables, or a smaller log.");
  }
  uint64_t cached_bytes = 0;
  for (const Table& table : tables) {
    if (table.shape.kind != RowTableKind::kScratch) cached_bytes += table.rows * table.record_bytes;
  }
  for (Table& table : tables) {
    const bool cached = table.shape.kind != RowTableKind::kScratch;
    const double share = cached && cached_bytes > 0
                             ? static_cast<double>(table.rows * table.record_bytes) /
                                   static_cast<double>(cached_bytes)
                             : 0;
    const auto bytes =
        static_cast<uint64_t>(share * static_cast<double>(options.row_memory_bytes - fixed));
    // Above the table's own size memory is of no use.
    table.cache = std::make_unique<RowCache>(
        table.record_bytes,
        std::min(bytes, table.rows * RowCache::bytes_of_row(table.record_bytes)));
  }

  if (message.create) {
    SI_ASSIGN_OR_RETURN(auto made,
                        open_place(storage::kRowFileName, storage::RowFile::file_bytes(layout)));
    SI_ASSIGN_OR_RETURN(
        file, storage::RowFile::create(std::move(made), layout, store.watchdog, traffic_));
  }
  file_ = std::move(file);
  tables_ = std::move(tables);
  const Status read = read_steps();
  if (!read.ok()) file_.reset();
  return read;
}

Result<storage::CachePlace> RowsAccess::open_place(std::string_view name, uint64_t bytes) const {
  storage::StoreOptions store = linked_store_options(parts_.options);
  using storage::RowGeometry;
  store.ring.depth = std::max(store.ring.depth, RowGeometry::kReadsMax + RowGeometry::kChunks);
  return parts_.options.open_cache_place
             ? parts_.options.open_cache_place(name, store)
             : storage::open_cache_place(parts_.options.path, name, bytes, store);
}

/// Within a step that has updated no rows, OpenTables::create makes the tables anew: what is put
/// from then on takes the place of all that was there when the step is committed.
Status RowsAccess::replace(storage::RowFileLayout layout) {
  if (layout.description != file_->layout().description) {
    return refuse("other tables than those that are open");
  }
  if (parts_.options.open_cache_place) {
    return Status(ErrorCode::kUnsupported, "the drive has room for one file of tables");
  }
  layout.log_bytes = file_->layout().log_bytes;
  SI_ASSIGN_OR_RETURN(auto place,
                      open_place(storage::kNewRowFileName, storage::RowFile::file_bytes(layout)));
  SI_ASSIGN_OR_RETURN(next_file_, storage::RowFile::create(
                                      std::move(place), std::move(layout),
                                      linked_store_options(parts_.options).watchdog, traffic_));
  next_file_->begin_step(step_);
  updating_ = true;
  return Status();
}

/// The step that the new file is of is decided.
Status RowsAccess::take_replacement(base::StepNumber step) {
  SI_RETURN_IF_ERROR(next_file_->commit(step));
  SI_RETURN_IF_ERROR(next_file_->close());
  next_file_.reset();
  file_.reset();
  for (Table& table : tables_) {
    table.cache->clear();
    table.steps.clear();
    table.committed_steps = 0;
  }
  SI_ASSIGN_OR_RETURN(
      file_, storage::open_row_file([&](std::string_view name) { return open_place(name, 0); },
                                    parts_.store->layout().run, next_record_,
                                    linked_store_options(parts_.options).watchdog, traffic_));
  return Status();
}

Status RowsAccess::read_steps() {
  for (Table& table : tables_) {
    if (!table.shape.catches_up() || first_) continue;
    SI_ASSIGN_OR_RETURN(table.steps, csd::read_steps([&](auto rows, const auto& visit) {
                          return file_->read(table.steps_table, rows, visit);
                        }));
    table.committed_steps = table.steps.size();
  }
  return Status();
}

// ---- Rows.

Result<RowsAccess::Table*> RowsAccess::find(uint32_t table) {
  if (table < tables_.size()) return &tables_[table];
  return refuse("table " + std::to_string(table) + " of " + std::to_string(tables_.size()));
}

/// row_bytes: of `values` for each row.
Status RowsAccess::check_rows(const Table& table, std::span<const std::byte> rows,
                              size_t values_bytes, uint64_t row_bytes) {
  const std::span<const uint32_t> numbers = row_numbers(rows);
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] >= table.rows) {
      return refuse("row " + std::to_string(numbers[i]) + " of a table with " +
                    std::to_string(table.rows) + " rows here (" + table.shape.name +
                    "), in place " + std::to_string(i) + " of the message");
    }
    if (i > 0 && numbers[i - 1] >= numbers[i]) {
      return refuse("rows of a message that do not ascend");
    }
  }
  if (values_bytes != numbers.size() * row_bytes) return refuse("rows of another length");
  return Status();
}

/// A record as the last update has left it, from what is stored.
void RowsAccess::begin_record(const Table& table, uint32_t row, std::span<const std::byte> stored,
                              std::span<std::byte> record) const {
  if (!stored.empty()) {
    std::ranges::copy(stored, record.begin());
  } else if (table.shape.kind == RowTableKind::kState) {
    const auto number = static_cast<uint32_t>(&table - tables_.data());
    kernels::initial_record(
        table.shape.start, number,
        table.placement.global_row(static_cast<uint32_t>(file_->layout().device_index), row),
        table.shape.dim, record);
  } else {
    std::ranges::fill(record, std::byte{0});
  }
}

template <typename Visit>
Status RowsAccess::for_each_record(Table& table, std::span<const uint32_t> rows,
                                   std::span<const kernels::RowScalars> steps, plan::RowUse use,
                                   const Visit& visit) {
  std::vector<uint32_t> missing;
  std::vector<size_t> missing_at;
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::span<std::byte> record = table.cache->find(rows[i], use);
    if (record.empty()) {
      missing.push_back(rows[i]);
      missing_at.push_back(i);
    } else {
      bring_up(steps, record);
      visit(i, std::span<const std::byte>(record));
    }
  }
  if (missing.empty()) return Status();
  std::vector<std::byte> aside(table.record_bytes);
  const auto number = static_cast<uint32_t>(&table - tables_.data());
  return file_->read(number, missing, [&](size_t i, std::span<const std::byte> stored) {
    std::span<std::byte> record = table.cache->insert(missing[i], use);
    if (record.empty()) record = aside;
    begin_record(table, missing[i], stored, record);
    bring_up(steps, record);
    visit(missing_at[i], std::span<const std::byte>(record));
  });
}

Status RowsAccess::gather(const GatherRows& message) {
  SI_ASSIGN_OR_RETURN(Table * table, find(message.table));
  const uint64_t row_out = table->shape.dim * base::data_type_bytes(message.type);
  SI_RETURN_IF_ERROR(check_rows(*table, message.rows, message.out.size(), row_out));
  const bool keep = message.keep && table->shape.kind == RowTableKind::kState;
  return for_each_record(*table, row_numbers(message.rows), table->steps,
                         keep ? plan::RowUse::kOfStep : plan::RowUse::kLookup,
                         [&](size_t i, std::span<const std::byte> record) {
                           kernels::read_weights(record, table->shape.dim, message.type,
                                                 message.out.data() + i * row_out);
                         });
}

Status RowsAccess::prefetch(const PrefetchRows& message) {
  SI_ASSIGN_OR_RETURN(Table * table, find(message.table));
  SI_RETURN_IF_ERROR(check_rows(*table, message.rows, 0, 0));
  if (table->cache->capacity() == 0) return Status();
  return for_each_record(*table, row_numbers(message.rows), table->steps, plan::RowUse::kBeside,
                         [](size_t, std::span<const std::byte>) {});
}

Status RowsAccess::update(const UpdateRows& message) {
  SI_ASSIGN_OR_RETURN(Table * table, find(message.table));
  const uint32_t dim = table->shape.dim;
  const size_t row_in = dim * base::data_type_bytes(message.gradient_type);
  SI_RETURN_IF_ERROR(check_rows(*table, message.rows, message.gradients.size(), row_in));
  if (table->shape.kind != RowTableKind::kState || message.scalars.rule != table->shape.rule) {
    return refuse("an update of " + text_of(table->shape) + " by the rule " +
                  std::string(kernels::row_rule_name(message.scalars.rule)));
  }
  if (!begun_ || first_) {
    return Status(ErrorCode::kFailedPrecondition, "rows are updated in a step only");
  }
  SI_RETURN_IF_ERROR(step_failure_);
  if (!updating_) {
    while (file_->must_merge(message.rows_of_step)) SI_RETURN_IF_ERROR(file_->merge_some());
    file_->begin_step(step_);
    updating_ = true;
  }
  const uint64_t caller_step = step_of(message.scalars);
  if (table->shape.catches_up() &&
      (table->steps.empty() || step_of(table->steps.back()) < caller_step)) {
    if (caller_step >= kStepsMax) {
      return Status(ErrorCode::kUnsupported,
                    "a table that catches up takes " + std::to_string(kStepsMax) + " steps");
    }
    table->steps.push_back(message.scalars);
    const auto row = static_cast<uint32_t>(caller_step);
    SI_RETURN_IF_ERROR(
        file_->append(table->steps_table, std::span(&row, 1), encode_step(message.scalars)));
  }
  // Records are brought up to the step before this one.
  const auto before =
      std::span(table->steps).first(table->steps.size() - (table->shape.catches_up() ? 1 : 0));
  const std::span<const uint32_t> rows = row_numbers(message.rows);
  std::vector<std::byte> records(std::min<uint64_t>(rows.size(), kRowsAtOnce) *
                                 table->record_bytes);
  std::vector<float> gradient(dim);
  for (uint64_t first = 0; first < rows.size(); first += kRowsAtOnce) {
    const auto some = rows.subspan(first, std::min<uint64_t>(kRowsAtOnce, rows.size() - first));
    const auto record_of = [&](size_t i) {
      return std::span(records).subspan(i * table->record_bytes, table->record_bytes);
    };
    SI_RETURN_IF_ERROR(for_each_record(*table, some, before, plan::RowUse::kBeside,
                                       [&](size_t i, std::span<const std::byte> record) {
                                         std::ranges::copy(record, record_of(i).begin());
                                       }));
    for (size_t i = 0; i < some.size(); ++i) {
      kernels::kernels().cast_to_f32(message.gradients.data() + (first + i) * row_in,
                                     message.gradient_type, gradient.data(), dim);
      kernels::update_record(message.scalars, gradient, record_of(i));
    }
    SI_RETURN_IF_ERROR(file_->append(message.table, some,
                                     std::span(records).first(some.size() * table->record_bytes)));
    for (size_t i = 0; i < some.size(); ++i) {
      const std::span<std::byte> cached = table->cache->find(some[i], plan::RowUse::kBeside);
      if (cached.empty()) continue;
      std::ranges::copy(record_of(i), cached.begin());
      table->cache->release(some[i]);
      table->updated.push_back(some[i]);
    }
  }
  return Status();
}

bool RowsAccess::writable(const Table& table) const {
  return table.shape.kind == RowTableKind::kScratch || first_ || next_file_ != nullptr;
}

Status RowsAccess::put(const PutRows& message) {
  SI_ASSIGN_OR_RETURN(Table * table, find(message.table));
  const uint64_t dim_bytes = table->shape.dim * sizeof(float);
  const uint64_t row = message.records ? table->record_bytes : dim_bytes;
  SI_RETURN_IF_ERROR(check_rows(*table, message.rows, message.values.size(), row));
  if (!writable(*table)) {
    return Status(ErrorCode::kFailedPrecondition,
                  "rows of " + table->shape.name + " are put before the first step is committed");
  }
  const std::span<const uint32_t> rows = row_numbers(message.rows);
  storage::RowFile& file = next_file_ != nullptr ? *next_file_ : *file_;
  if (row == table->record_bytes) return file.put(message.table, rows, message.values);
  std::vector<std::byte> records(std::min<uint64_t>(rows.size(), kRowsAtOnce) *
                                 table->record_bytes);
  for (uint64_t first = 0; first < rows.size(); first += kRowsAtOnce) {
    const auto some = rows.subspan(first, std::min<uint64_t>(kRowsAtOnce, rows.size() - first));
    std::ranges::fill(records, std::byte{0});
    for (size_t i = 0; i < some.size(); ++i) {
      std::memcpy(records.data() + i * table->record_bytes,
                  message.values.data() + (first + i) * dim_bytes, dim_bytes);
    }
    SI_RETURN_IF_ERROR(
        file.put(message.table, some, std::span(records).first(some.size() * table->record_bytes)));
  }
  return Status();
}

Status RowsAccess::scatter_add(const ScatterAddRows& message) {
  SI_ASSIGN_OR_RETURN(Table * table, find(message.table));
  SI_RETURN_IF_ERROR(check_rows(*table, message.rows, message.values.size(), table->record_bytes));
  if (table->shape.kind != RowTableKind::kScratch) {
    return Status(ErrorCode::kFailedPrecondition, "rows are added to in scratch tables only, and " +
                                                      table->shape.name + " is another");
  }
  const std::span<const uint32_t> rows = row_numbers(message.rows);
  std::vector<std::byte> records(message.values.size());
  SI_RETURN_IF_ERROR(
      file_->read(message.table, rows, [&](size_t i, std::span<const std::byte> stored) {
        const auto record =
            std::span(records).subspan(i * table->record_bytes, table->record_bytes);
        begin_record(*table, rows[i], stored, record);
        auto* sums = reinterpret_cast<float*>(record.data());
        const auto* values =
            reinterpret_cast<const float*>(message.values.data()) + i * table->shape.dim;
        for (uint32_t d = 0; d < table->shape.dim; ++d) sums[d] += values[d];
      }));
  return file_->put(message.table, rows, records);
}

Status RowsAccess::read_records(const ReadRecords& message) {
  SI_ASSIGN_OR_RETURN(Table * table, find(message.table));
  if (message.count > table->rows || message.first > table->rows - message.count ||
      message.records.size() != uint64_t{message.count} * table->record_bytes) {
    return refuse("rows that " + table->shape.name + " has not");
  }
  for (uint64_t first = 0; first < message.count; first += kRowsAtOnce) {
    std::vector<uint32_t> rows(std::min<uint64_t>(kRowsAtOnce, message.count - first));
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = message.first + static_cast<uint32_t>(first + i);
    }
    SI_RETURN_IF_ERROR(
        file_->read(message.table, rows, [&](size_t i, std::span<const std::byte> stored) {
          const auto record =
              message.records.subspan((first + i) * table->record_bytes, table->record_bytes);
          begin_record(*table, rows[i], stored, record);
          bring_up(table->steps, record);
        }));
  }
  return Status();
}

// ---- Steps, on the device's thread.

/// The lock of a thread that goes from message to message, ahead of its next one.
std::unique_lock<std::mutex> RowsAccess::between_messages() {
  ++steps_waiting_;
  std::unique_lock lock(work_mutex_);
  --steps_waiting_;
  return lock;
}

void RowsAccess::begin_step(base::StepNumber step) {
  const auto lock = between_messages();
  step_ = step;
  begun_ = true;
}

Result<std::string> RowsAccess::prepare(base::StepNumber step) {
  const auto lock = between_messages();
  // Tables that nobody has opened stay as they are.
  if (file_ == nullptr) {
    return storage::split_row_commit(parts_.store->client_metadata()).record;
  }
  SI_RETURN_IF_ERROR(step_failure_);
  if (!updating_) {
    file_->begin_step(step);
    updating_ = true;
  }
  Result<std::string> record = (next_file_ != nullptr ? next_file_ : file_)->prepare(step);
  if (next_file_ != nullptr && record.ok()) next_record_ = *record;
  if (!record.ok()) step_failure_ = record.status();
  return record;
}

Status RowsAccess::commit(base::StepNumber step) {
  const auto lock = between_messages();
  begun_ = updating_ = first_ = false;
  if (file_ == nullptr) return Status();
  for (Table& table : tables_) {
    table.updated.clear();
    table.cache->release_all();
    table.committed_steps = table.steps.size();
  }
  if (next_file_ != nullptr) return take_replacement(step);
  return file_->commit(step);
}

Status RowsAccess::abort(base::StepNumber step) {
  const auto lock = between_messages();
  const bool updating = std::exchange(updating_, false);
  begun_ = false;
  if (file_ == nullptr) return Status();
  for (Table& table : tables_) {
    for (const uint32_t row : table.updated) table.cache->erase(row);
    table.updated.clear();
    table.cache->release_all();
    // Rows were brought up to the step that is forgotten.
    if (updating && table.shape.catches_up()) {
      table.cache->clear();
      table.steps.resize(table.committed_steps);
    }
  }
  step_failure_ = Status();
  if (next_file_ != nullptr) {
    const std::string path = next_file_->path();
    SI_RETURN_IF_ERROR(next_file_->close());
    next_file_.reset();
    std::error_code error;
    std::filesystem::remove(path, error);
    return Status();
  }
  return updating ? file_->abort(step) : Status();
}

// ---- Copies.

namespace {

/// The rows of an open device, between its messages.
class OpenRows final : public RowSnapshot {
 public:
  using Locked = std::function<std::unique_lock<std::mutex>()>;
  OpenRows(storage::RowFile& file, Locked locked) : file_(file), locked_(std::move(locked)) {}

  const storage::RowFileLayout& layout() const override { return file_.layout(); }
  Status read(uint32_t table, std::span<const uint32_t> rows, const Visit& visit) override {
    const auto lock = locked_();
    return file_.read(table, rows, visit);
  }
  Result<uint64_t> clone_to(const std::string& directory) override {
    const auto lock = locked_();
    return clone_rows(file_.path(), directory);
  }

 private:
  storage::RowFile& file_;
  const Locked locked_;
};

}  // namespace

std::unique_ptr<RowSnapshot> RowsAccess::rows_snapshot() {
  const auto lock = between_messages();
  if (file_ == nullptr) return nullptr;
  return std::make_unique<OpenRows>(*file_, [this] { return between_messages(); });
}

}  // namespace smartinf::csd
