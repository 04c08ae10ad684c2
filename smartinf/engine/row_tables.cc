#include "smartinf/engine/row_tables.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/row_pages.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/update.h"
#include "smartinf/plan/row_steps.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;
using storage::RowTableKind;

namespace {

csd::TableShape shape_of(const TableOptions& options) {
  csd::TableShape shape;
  shape.name = options.name;
  shape.kind = options.kind;
  shape.rule = options.rule.rule;
  shape.dim = options.dim;
  shape.rows = options.rows;
  shape.start = options.start;
  return shape;
}

uint64_t log_bytes(const std::vector<csd::TableShape>& tables, uint64_t devices,
                   uint64_t memory_bytes) {
  uint64_t home_bytes = 0;
  uint64_t record_bytes = 1;
  for (const csd::TableShape& table : tables) {
    if (table.kind != RowTableKind::kState) continue;
    record_bytes = std::max<uint64_t>(record_bytes, table.record_bytes());
    home_bytes += table.rows / devices * table.record_bytes();
  }
  return plan::row_log_bytes(home_bytes, record_bytes, memory_bytes);
}

/// Shares of rows are those of parameters.
std::vector<double> shares_of(const DeviceSet& set) {
  std::vector<double> elements(set.devices.size());
  for (const plan::Subgroup& subgroup : set.subgroups) {
    elements[set.owner[subgroup.id.value].value] += static_cast<double>(subgroup.count);
  }
  return elements;
}

/// What ranks have in common.
std::string call_of(const UpdaterOptions& options) {
  std::string text = "open tables:";
  for (const TableOptions& table : options.tables) {
    const auto& [rule, beta1, beta2, eps] = table.rule;
    text += fmt::format(" {} ({}, {} x {}, {}, {}, {}, {}, {}, {});", table.name,
                        base::enum_name(table.kind), table.rows, table.dim,
                        kernels::row_rule_name(rule), beta1, beta2, eps, table.start.deviation,
                        table.start.seed);
  }
  return text;
}

}  // namespace

Result<std::unique_ptr<RowTables>> RowTables::open(const UpdaterOptions& options,
                                                   const DeviceSet& set, DeviceWatch& watch) {
  std::unique_ptr<RowTables> made(new RowTables(set, watch));
  made->gradient_type_ = options.gradient_type;
  std::vector<double> shares = shares_of(set);
  SI_ASSIGN_OR_RETURN(made->ranks_, RowRanks::make(options, set, call_of(options), shares));
  if (made->ranks_ != nullptr) made->gradients_ = made->ranks_->make_parcels();
  const auto devices = made->device_count_ = static_cast<uint32_t>(shares.size());
  const std::vector<uint8_t> pattern = plan::row_pattern(shares);
  csd::OpenTables message;
  message.pattern = pattern;
  message.device_count = devices;
  message.create = set.fresh;
  for (const TableOptions& table : options.tables) {
    const csd::TableShape shape = shape_of(table);
    for (const csd::TableShape& other : message.tables) {
      if (other.name != shape.name) continue;
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("two tables have the name {}", shape.name),
                    "Give each table a name of its own.");
    }
    message.tables.push_back(shape);
    Table& one = made->tables_.emplace_back();
    one.options = table;
    SI_ASSIGN_OR_RETURN(one.placement,
                        plan::RowPlacement::make(table.rows, pattern,
                                                 base::records_per_page(shape.record_bytes())));
    one.places.resize(devices);
    one.sent_rows.resize(devices);
    one.sent_gradients.resize(devices);
  }
  const uint64_t sharing = set.devices.size();  // of the memory and the log
  message.log_bytes = options.table_log_bytes > 0 ? options.table_log_bytes / sharing
                                                  : log_bytes(message.tables, devices,
                                                              options.table_memory_bytes / sharing);
  for (uint32_t d = 0; d < devices; ++d) {
    message.device_index = d;
    if (csd::Device* const device = made->here(d)) made->replies_.submit(*device, message);
  }
  Status opened = made->wait_for_all();
  if (made->ranks_ != nullptr) opened = made->ranks_->all_ok("open tables", opened);
  SI_RETURN_IF_ERROR(opened);
  made->opening_ = std::move(message);
  return made;
}

csd::Device* RowTables::here(size_t device) const {
  if (ranks_ == nullptr) return set_.devices[device].get();
  if (!ranks_->is_here(static_cast<uint32_t>(device))) return nullptr;
  return set_.devices[device - ranks_->first_device()].get();
}

Result<size_t> RowTables::find(const std::string& name) const {
  std::string names;
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (tables_[i].options.name == name) return i;
    names += (names.empty() ? "" : ", ") + tables_[i].options.name;
  }
  return Status(ErrorCode::kNotFound, fmt::format("there is no table {}", name),
                fmt::format("There are: {}.", names));
}

Status RowTables::wait_for_all() {
  Status result;
  while (replies_.owed() > 0) {
    Status status = replies_.next().status;
    if (result.ok()) result = std::move(status);
  }
  prefetched_.clear();
  return result;
}

Status RowTables::check_ids(const Table& table, std::span<const int64_t> ids) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && static_cast<uint64_t>(ids[i]) < table.options.rows) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("row {} in place {} of a batch, and the table {} has {} rows", ids[i],
                              i, table.options.name, table.options.rows),
                  "Check the ids that the batch is made of.");
  }
  return Status();
}

// ---- Rows up.

Status RowTables::prefetch(size_t number, std::span<const int64_t> ids) {
  const Table& table = tables_[number];
  SI_RETURN_IF_ERROR(check_ids(table, ids));
  while (replies_.owed() > 0) {  // answers of earlier hints that are there
    if (replies_.poll().command == nullptr) break;
  }
  if (replies_.owed() == 0) prefetched_.clear();
  plan::RowBatch batch = plan::RowBatch::make(table.placement, ids);
  for (size_t d = 0; d < batch.rows.size(); ++d) {
    csd::Device* const device = here(d);
    if (device == nullptr || batch.rows[d].empty()) continue;
    const std::vector<uint32_t>& rows = prefetched_.emplace_back(std::move(batch.rows[d]));
    for (size_t at = 0; at < rows.size(); at += csd::kRowsOfMessageMax) {
      const auto some =
          std::span(rows).subspan(at, std::min<size_t>(csd::kRowsOfMessageMax, rows.size() - at));
      replies_.submit(*device,
                      csd::PrefetchRows{static_cast<uint32_t>(number), csd::row_bytes(some)});
    }
  }
  return Status();
}

namespace {

/// Whether values in the order of a batch's ids are in that of its distinct rows.
bool in_order(const plan::RowBatch& batch) {
  for (size_t i = 0; i < batch.place.size(); ++i) {
    if (batch.place[i] != i) return false;
  }
  return true;
}

}  // namespace

Status RowTables::gather(size_t number, std::span<const int64_t> ids, base::DataType type,
                         void* out, bool keep) {
  const Table& table = tables_[number];
  const Status checked = check_ids(table, ids);
  if (ranks_ == nullptr) SI_RETURN_IF_ERROR(checked);
  const plan::RowBatch batch =
      plan::RowBatch::make(table.placement, checked.ok() ? ids : std::span<const int64_t>());
  const size_t row_out = table.options.dim * base::data_type_bytes(type);
  if (ranks_ == nullptr && in_order(batch)) {
    return gather_here(number, batch.rows, type, keep,
                       {static_cast<std::byte*>(out), ids.size() * row_out});
  }
  std::vector<std::byte> rows_out;
  if (ranks_ != nullptr) {
    const std::string call =
        fmt::format("rows of {} as {}", table.options.name, base::data_type_name(type));
    SI_ASSIGN_OR_RETURN(
        rows_out, ranks_->gather(call, checked, batch.rows, row_out,
                                 [&](const RowRanks::Rows& rows, std::span<std::byte> values) {
                                   return gather_here(number, rows, type, keep, values);
                                 }));
  } else {
    rows_out.resize(batch.distinct() * row_out);
    SI_RETURN_IF_ERROR(gather_here(number, batch.rows, type, keep, rows_out));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    std::memcpy(static_cast<std::byte*>(out) + i * row_out,
                rows_out.data() + size_t{batch.place[i]} * row_out, row_out);
  }
  return Status();
}

Status RowTables::gather_here(size_t number, const RowRanks::Rows& of_devices, base::DataType type,
                              bool keep, std::span<std::byte> out) {
  const size_t row_out = tables_[number].options.dim * base::data_type_bytes(type);
  size_t first = 0;
  for (size_t d = 0; d < of_devices.size(); ++d) {
    const std::span<const uint32_t> rows = of_devices[d];
    for (size_t at = 0; at < rows.size(); at += csd::kRowsOfMessageMax) {
      const auto some =
          rows.subspan(at, std::min<size_t>(csd::kRowsOfMessageMax, rows.size() - at));
      replies_.submit(
          *here(d), csd::GatherRows{static_cast<uint32_t>(number), type, keep, csd::row_bytes(some),
                                    out.subspan((first + at) * row_out, some.size() * row_out)});
    }
    first += rows.size();
  }
  return wait_for_all();
}

// ---- Gradients down.

Status RowTables::add_gradient(size_t number, std::span<const int64_t> ids, base::DataType type,
                               const void* gradient) {
  Table& table = tables_[number];
  SI_RETURN_IF_ERROR(check_ids(table, ids));
  if (table.options.kind != RowTableKind::kState) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("the table {} is not trained", table.options.name));
  }
  if (ranks_ == nullptr) {
    add_rows(table, ids, type, gradient);
    return Status();
  }
  pack(number, ids, type, gradient, gradients_);
  return Status();
}

void RowTables::pack(size_t number, std::span<const int64_t> ids, base::DataType type,
                     const void* values, RowRanks::Parcels& parcels) const {
  const Table& table = tables_[number];
  const size_t row_in = table.options.dim * base::data_type_bytes(type);
  const std::span all(static_cast<const std::byte*>(values), ids.size() * row_in);
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto row = static_cast<uint64_t>(ids[i]);
    ranks_->add_row(static_cast<uint32_t>(number), table.placement.device_of(row), row, type,
                    all.subspan(i * row_in, row_in), parcels);
  }
}

void RowTables::add_rows(Table& table, std::span<const int64_t> ids, base::DataType type,
                         const void* gradient) {
  std::vector<uint32_t> place(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto row = static_cast<uint64_t>(ids[i]);
    base::RowMap& places = table.places[table.placement.device_of(row)];
    const uint32_t local = table.placement.local_row(row);
    place[i] = places.find(local);
    if (place[i] != base::RowMap::kNone) continue;
    place[i] = static_cast<uint32_t>(table.rows.size());
    places.set(local, place[i]);
    table.rows.push_back(row);
  }
  table.sums.resize(table.rows.size() * table.options.dim, kernels::kNoGradient);
  kernels::add_rows(type, gradient, place, table.options.dim, table.sums);
}

Status RowTables::share_gradients(const Status& mine) {
  return ranks_->share("gradients of tables", mine, gradients_,
                       [&](uint32_t number, std::span<const int64_t> rows, base::DataType type,
                           const std::byte* gradient) -> Status {
                         if (number >= tables_.size())
                           return Status(ErrorCode::kCorrupt, "a gradient of no table");
                         SI_RETURN_IF_ERROR(check_ids(tables_[number], rows));
                         add_rows(tables_[number], rows, type, gradient);
                         return Status();
                       });
}

Result<RowTables::Found> RowTables::finish_gradients(const Status& mine) {
  struct Norm {
    uint64_t row = 0;
    double sum_of_squares = 0;
    uint64_t finite = 0;
  };
  SI_RETURN_IF_ERROR(ranks_ != nullptr ? share_gradients(mine) : mine);
  Found found;
  const size_t value = base::data_type_bytes(gradient_type_);
  const kernels::KernelTable& kernels = kernels::kernels();
  for (Table& table : tables_) {
    const size_t dim = table.options.dim;
    const size_t row_in = dim * value;
    // In the order of the table's rows, whichever device has them: places of a device ascend too.
    std::vector<uint32_t> order(table.rows.size());
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::sort(order, {}, [&](uint32_t i) { return table.rows[i]; });
    std::vector<Norm> norms;
    for (size_t d = 0; d < table.places.size(); ++d) {
      table.sent_rows[d].clear();
      table.sent_gradients[d].clear();
      table.sent_rows[d].reserve(table.places[d].size());
      table.sent_gradients[d].reserve(table.places[d].size() * row_in);
    }
    for (const uint32_t i : order) {
      const uint32_t device = table.placement.device_of(table.rows[i]);
      table.sent_rows[device].push_back(table.placement.local_row(table.rows[i]));
      std::vector<std::byte>& sent = table.sent_gradients[device];
      sent.resize(sent.size() + row_in);
      std::byte* const at = sent.data() + sent.size() - row_in;
      kernels.cast_from_f32(table.sums.data() + i * dim, at, gradient_type_, dim);
      const auto norm = kernels.partial_norm(at, gradient_type_, dim);
      norms.push_back({table.rows[i], norm.sum_of_squares, norm.finite ? 1u : 0u});
    }
    if (ranks_ != nullptr) {
      SI_ASSIGN_OR_RETURN(norms, ranks_->gather_all("norms of tables", Status(), norms));
      std::ranges::sort(norms, {}, &Norm::row);
    }
    for (const Norm& norm : norms) {
      found.sum_of_squares += norm.sum_of_squares;
      if (norm.finite != 0 || !found.finite) continue;
      found.finite = false;
      found.first_bad = fmt::format("{}, row {}", table.options.name, norm.row);
    }
  }
  return found;
}

std::vector<std::vector<csd::UpdateRows>> RowTables::make_updates(std::span<const double> rates,
                                                                  base::StepNumber number,
                                                                  double gradient_scale) {
  std::vector<std::vector<csd::UpdateRows>> messages(set_.devices.size());
  const size_t first = ranks_ == nullptr ? 0 : ranks_->first_device();
  std::vector<uint64_t> rows_of_step(messages.size());
  for (const Table& table : tables_) {
    for (size_t d = 0; d < messages.size(); ++d) {
      rows_of_step[d] += table.sent_rows[first + d].size();
    }
  }
  for (size_t t = 0; t < tables_.size(); ++t) {
    const Table& table = tables_[t];
    if (table.options.kind != RowTableKind::kState) continue;
    csd::UpdateRows message;
    message.table = static_cast<uint32_t>(t);
    message.gradient_type = gradient_type_;
    message.scalars =
        kernels::make_row_scalars(table.options.rule, rates[t], number, gradient_scale);
    const size_t row_in = table.options.dim * base::data_type_bytes(gradient_type_);
    for (size_t d = 0; d < messages.size(); ++d) {
      if (here(first + d) == nullptr) continue;
      message.rows_of_step = rows_of_step[d];
      const std::span<const uint32_t> rows = table.sent_rows[first + d];
      const std::span<const std::byte> gradients = table.sent_gradients[first + d];
      // A table that catches up is told of steps without rows, too.
      if (rows.empty() && shape_of(table.options).catches_up()) messages[d].push_back(message);
      for (size_t at = 0; at < rows.size(); at += csd::kRowsOfMessageMax) {
        const size_t some = std::min<size_t>(csd::kRowsOfMessageMax, rows.size() - at);
        message.rows = csd::row_bytes(rows.subspan(at, some));
        message.gradients = gradients.subspan(at * row_in, some * row_in);
        messages[d].push_back(message);
      }
      message.rows = message.gradients = {};
    }
  }
  return messages;
}

void RowTables::forget() {
  for (Table& table : tables_) {
    for (base::RowMap& places : table.places) places.clear();
    table.rows.clear();
    table.sums.clear();
    for (auto& rows : table.sent_rows) rows.clear();
    for (auto& gradients : table.sent_gradients) gradients.clear();
  }
  if (ranks_ != nullptr) gradients_ = ranks_->make_parcels();
}

// ---- Whole tables, and scratch.

namespace {

/// Values in the order of a batch's distinct rows; of one that comes again the last, or the sum.
std::vector<float> by_row(const plan::RowBatch& batch, std::span<const float> values, size_t dim,
                          bool add) {
  std::vector<float> ordered(batch.distinct() * dim, kernels::kNoGradient);
  if (add) {
    kernels::add_rows(base::DataType::kF32, values.data(), batch.place, dim, ordered);
    return ordered;
  }
  for (size_t i = 0; i < batch.place.size(); ++i) {
    std::copy_n(values.data() + i * dim, dim, ordered.data() + size_t{batch.place[i]} * dim);
  }
  return ordered;
}

}  // namespace

/// Sends values of rows as Message, a bounded number of rows at a time.
template <typename Message>
Status RowTables::send_values(size_t number, std::span<const int64_t> ids,
                              std::span<const float> values, bool add) {
  const Table& table = tables_[number];
  SI_RETURN_IF_ERROR(check_ids(table, ids));
  const size_t dim = table.options.dim;
  const plan::RowBatch batch = plan::RowBatch::make(table.placement, ids);
  std::vector<float> ordered;
  if (add || !in_order(batch)) values = ordered = by_row(batch, values, dim, add);
  size_t first = 0;
  for (size_t d = 0; d < batch.rows.size(); ++d) {
    const std::span<const uint32_t> rows = batch.rows[d];
    for (size_t at = 0; at < rows.size(); at += csd::kRowsOfMessageMax) {
      const size_t some = std::min<size_t>(csd::kRowsOfMessageMax, rows.size() - at);
      Message message;
      message.table = static_cast<uint32_t>(number);
      message.rows = csd::row_bytes(rows.subspan(at, some));
      message.values = std::as_bytes(values.subspan((first + at) * dim, some * dim));
      if (csd::Device* const device = here(d)) replies_.submit(*device, message);
    }
    first += rows.size();
  }
  return wait_for_all();
}

Status RowTables::put(size_t table, std::span<const int64_t> ids, std::span<const float> values) {
  if (ranks_ == nullptr) return send_values<csd::PutRows>(table, ids, values, false);
  const std::string call = fmt::format("rows of {} put ({:016x}, {})", tables_[table].options.name,
                                       base::checksum(std::as_bytes(ids)), values.size());
  std::vector<float> same(values.begin(), values.end());
  SI_RETURN_IF_ERROR(ranks_->broadcast(call, check_ids(tables_[table], ids),
                                       std::as_writable_bytes(std::span(same))));
  return ranks_->all_ok(call, send_values<csd::PutRows>(table, ids, same, false));
}

Status RowTables::scatter_add(size_t number, std::span<const int64_t> ids,
                              std::span<const float> values) {
  if (ranks_ == nullptr) return send_values<csd::ScatterAddRows>(number, ids, values, true);
  const Table& table = tables_[number];
  const std::string call = fmt::format("values added to rows of {}", table.options.name);
  const Status checked = check_ids(table, ids);
  RowRanks::Parcels parcels = ranks_->make_parcels();
  if (checked.ok()) pack(number, ids, base::DataType::kF32, values.data(), parcels);
  std::vector<int64_t> rows;
  std::vector<float> of_rows;
  SI_RETURN_IF_ERROR(ranks_->share(
      call, checked, parcels,
      [&](uint32_t, std::span<const int64_t> some, base::DataType, const std::byte* of_some) {
        rows.insert(rows.end(), some.begin(), some.end());
        of_rows.resize(rows.size() * table.options.dim);
        const size_t bytes = some.size() * table.options.dim * sizeof(float);
        std::memcpy(of_rows.data() + of_rows.size() - bytes / sizeof(float), of_some, bytes);
        return Status();
      }));
  return ranks_->all_ok(call, send_values<csd::ScatterAddRows>(number, rows, of_rows, true));
}

Status RowTables::read_records(
    size_t number, uint64_t first, uint64_t count,
    const std::function<Status(uint64_t, std::span<const std::byte>)>& visit) {
  const Table& table = tables_[number];
  const uint64_t record = shape_of(table.options).record_bytes();
  if (first > table.options.rows || count > table.options.rows - first) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("rows {} to {} of the table {}, which has {}", first, first + count,
                              table.options.name, table.options.rows));
  }
  // Rows of a device that follow each other in the table do so on the device.
  const uint64_t at_once = std::max<uint64_t>(1, 4 * base::kMiB / record);
  std::vector<std::byte> records;
  std::vector<std::vector<std::byte>> of_device(device_count_);
  Status visited;
  for (uint64_t begin = first; begin < first + count; begin += at_once) {
    const uint64_t end = std::min(begin + at_once, first + count);
    std::vector<uint32_t> first_row(device_count_, base::RowMap::kNone);
    std::vector<uint32_t> rows(device_count_);
    for (uint64_t row = begin; row < end; ++row) {
      const uint32_t d = table.placement.device_of(row);
      if (rows[d]++ == 0) first_row[d] = table.placement.local_row(row);
    }
    for (size_t d = 0; d < rows.size(); ++d) {
      of_device[d].resize(rows[d] * record);
      csd::Device* const device = here(d);
      if (rows[d] == 0 || device == nullptr) continue;
      replies_.submit(*device, csd::ReadRecords{static_cast<uint32_t>(number), first_row[d],
                                                rows[d], of_device[d]});
    }
    Status read = wait_for_all();
    if (ranks_ != nullptr) {
      if (!visited.ok()) read = visited;
      SI_RETURN_IF_ERROR(
          ranks_->share_records(fmt::format("records of {}", table.options.name), read, of_device));
    }
    SI_RETURN_IF_ERROR(read);
    records.resize((end - begin) * record);
    for (uint64_t row = begin; row < end; ++row) {
      const uint32_t d = table.placement.device_of(row);
      std::memcpy(records.data() + (row - begin) * record,
                  of_device[d].data() + (table.placement.local_row(row) - first_row[d]) * record,
                  record);
    }
    visited = visit(begin, records);
    if (ranks_ == nullptr) SI_RETURN_IF_ERROR(visited);
  }
  return ranks_ == nullptr ? visited : ranks_->all_ok("records of a table", visited);
}

// ---- Rows of a checkpoint.

Status RowTables::load_next(StoredTables& from) {
  const csd::RunTables ours{opening_.tables, from.tables().chunks};
  if (csd::to_json(ours) != csd::to_json(from.tables())) {
    return Status(ErrorCode::kMismatch,
                  fmt::format("the checkpoint has other tables ({}) than the run ({})",
                              csd::text_of(from.tables()), csd::text_of(ours)),
                  "Name the tables as they were when it was made.");
  }
  load_from_ = &from;
  return Status();
}

std::function<Status()> RowTables::take_load() {
  StoredTables* const from = std::exchange(load_from_, nullptr);
  if (from == nullptr) return nullptr;
  return [this, from] { return load(*from); };
}

Status RowTables::load(StoredTables& from) {
  csd::OpenTables message = opening_;
  message.create = true;
  for (uint32_t d = 0; d < device_count_; ++d) {
    message.device_index = d;
    if (csd::Device* const device = here(d)) replies_.submit(*device, message);
  }
  SI_RETURN_IF_ERROR(wait_for_all());
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (tables_[t].options.kind != RowTableKind::kScratch) SI_RETURN_IF_ERROR(load(from, t));
  }
  return Status();
}

/// Rows of the devices here, as many at a time as a message has at most.
Status RowTables::load(StoredTables& from, size_t number) {
  const Table& table = tables_[number];
  const uint64_t bytes = shape_of(table.options).record_bytes();
  std::vector<std::vector<uint32_t>> rows(device_count_);
  std::vector<std::vector<std::byte>> records(device_count_);
  const auto send = [&](size_t least) {
    for (size_t d = 0; d < rows.size(); ++d) {
      if (rows[d].size() < least) continue;
      replies_.submit(*here(d), csd::PutRows{static_cast<uint32_t>(number), /*records=*/true,
                                             csd::row_bytes(rows[d]), records[d]});
      if (Status sent = wait_for_all(); !sent.ok()) return sent;
      rows[d].clear();
      records[d].clear();
    }
    return Status();
  };
  const auto take = [&](uint64_t first, std::span<const std::byte> some) {
    for (uint64_t row = first; !some.empty(); ++row, some = some.subspan(bytes)) {
      const uint32_t d = table.placement.device_of(row);
      rows[d].push_back(table.placement.local_row(row));
      records[d].insert(records[d].end(), some.begin(),
                        some.begin() + static_cast<ptrdiff_t>(bytes));
      if (rows[d].size() < csd::kRowsOfMessageMax) continue;
      if (Status sent = send(csd::kRowsOfMessageMax); !sent.ok()) return sent;
    }
    return Status();
  };
  SI_RETURN_IF_ERROR(
      from.read(number, 0, table.options.rows, /*initial=*/false, take,
                [&](uint64_t row) { return here(table.placement.device_of(row)) != nullptr; }));
  return send(1);
}

}  // namespace smartinf::engine
