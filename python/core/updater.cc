#include "python/core/updater.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <type_traits>
#include <utility>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/key_table.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/run_description.h"
#include "smartinf/kernels/update.h"

#include "python/core/arguments.h"
#include "python/core/checkpoint.h"
#include "python/core/errors.h"
#include "python/core/ranks.h"

namespace nb = nanobind;

namespace smartinf::python {
namespace {

using base::ErrorCode;
using base::Status;

/// A dict of options by name. What nobody has read when it is finished is an error, not a default.
class Given {
 public:
  Given(std::string what, const nb::dict& options) : what_(std::move(what)), options_(options) {}

  bool has(const char* key) {
    known_.push_back(key);
    return options_.contains(key);
  }
  template <typename T>
  void read(const char* key, T& value) {
    if (!has(key)) return;
    try {
      value = nb::cast<T>(options_[key]);
    } catch (const nb::cast_error&) {
      usage(what_ + "'s " + key + " is " + nb::cast<std::string>(nb::repr(options_[key])) +
            " and must be " + kind_of<T>());
    }
  }
  template <typename E>
  void choose(const char* key, E& value) {
    std::string name;
    read(key, name);
    if (options_.contains(key)) value = named<E>(key, name);
  }
  nb::dict dict(const char* key) { return nb::cast<nb::dict>(options_[key]); }

  void finish() const {
    for (const auto& [key, value] : options_) {
      const auto name = nb::cast<std::string>(nb::str(key));
      if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
      usage(what_ + " has the unknown option '" + name + "'" + base::did_you_mean(name, known_));
    }
  }

 private:
  template <typename T>
  static const char* kind_of() {
    if (std::is_same_v<T, bool>) return "True or False";
    if (std::is_integral_v<T>) return "a whole number, 0 or more";
    return std::is_floating_point_v<T> ? "a number" : "text";
  }

  const std::string what_;
  const nb::dict& options_;
  std::vector<std::string_view> known_;
};

void read_rule(Given& given, kernels::RuleOptions& rule) {
  given.read("beta1", rule.beta1);
  given.read("beta2", rule.beta2);
  given.read("eps", rule.eps);
  given.read("dampening", rule.dampening);
  given.read("nesterov", rule.nesterov);
  given.read("maximize", rule.maximize);
  given.read("lr_decay", rule.lr_decay);
  given.read("initial_accumulator_value", rule.initial_accumulator_value);
}

compress::CompressOptions read_compress(const nb::dict& options) {
  Given given("compress", options);
  compress::CompressOptions compress;
  given.read("density", compress.density);
  given.read("error_feedback", compress.error_feedback);
  compress.values = compress.default_values();
  given.choose("values", compress.values);
  given.read("residual_every", compress.residual_every);
  given.read("warmup_steps", compress.warmup_steps);
  given.finish();
  return compress;
}

plan::ParameterSpace parameter_space(const std::vector<std::string>& names,
                                     const std::vector<std::vector<uint64_t>>& shapes) {
  if (names.size() != shapes.size()) usage("as many names as shapes are needed");
  plan::ParameterSpace space;
  for (size_t i = 0; i < names.size(); ++i) {
    check(space.add(names[i], shapes[i], static_cast<uint32_t>(i)));
  }
  return space;
}

/// Memory as a memoryview of floats; the GIL is held. Writable also where only reading is meant,
/// because torch warns of buffers that are not; it is the engine's own copy in any case.
nb::object float_view(const float* data, uint64_t count) {
  auto* bytes = reinterpret_cast<char*>(const_cast<float*>(data));
  nb::object raw = nb::steal(
      PyMemoryView_FromMemory(bytes, static_cast<Py_ssize_t>(count * sizeof(float)), PyBUF_WRITE));
  if (!raw.is_valid()) throw nb::python_error();
  return raw.attr("cast")("f");
}

}  // namespace

nb::dict compress_options(const nb::dict& given) {
  const compress::CompressOptions compress = read_compress(given);
  nb::dict out;
  out["density"] = compress.density;
  out["error_feedback"] = compress.error_feedback;
  out["values"] = std::string(base::enum_name(compress.values));
  out["residual_every"] = compress.residual_every;
  out["warmup_steps"] = compress.warmup_steps;
  return out;
}

serve::RemoteOptions remote_options(const nb::dict& options) {
  Given given("remote", options);
  serve::RemoteOptions remote;
  given.read("certificate", remote.certificate);
  given.read("key", remote.key);
  given.read("ca", remote.ca);
  given.read("reconnect_seconds", remote.reconnect_seconds);
  given.read("deadline_seconds", remote.deadline_seconds);
  given.read("window_bytes", remote.window_bytes);
  given.finish();
  return remote;
}

engine::UpdaterOptions updater_options(const nb::dict& options_given) {
  Given given("the optimizer", options_given);
  engine::UpdaterOptions options;
  given.has("devices");
  for (const nb::handle entry : nb::cast<nb::list>(options_given["devices"])) {
    const auto device_given = nb::cast<nb::dict>(entry);
    Given device("a device", device_given);
    engine::DeviceOptions made;
    device.read("path", made.path);
    device.read("name", made.name);
    device.read("threads", made.threads);
    device.read("bandwidth", made.bandwidth);
    device.read("capacity_bytes", made.capacity_bytes);
    device.finish();
    options.devices.push_back(std::move(made));
  }
  given.choose("rule", options.rule.rule);
  read_rule(given, options.rule);
  given.choose("state_format", options.format.moments);
  given.choose("master", options.format.master);
  given.choose("where", options.where);
  given.choose("durability", options.durability);
  options.gradient_type = base::DataType::kF32;
  given.choose("gradient_type", options.gradient_type);
  given.read("seed", options.seed);
  given.read("memory_budget_bytes", options.memory_budget_bytes);
  given.read("gradient_budget_bytes", options.gradient_budget_bytes);
  given.read("gradient_room", options.gradient_room);
  given.read("state_cache_bytes", options.state_cache_bytes);
  given.read("subgroup_elements", options.subgroup_elements);
  given.read("stream_weights", options.stream_weights);
  given.read("spool_bytes", options.spool_bytes);
  given.read("io_bytes", options.io_bytes);
  given.read("io_depth", options.io_depth);
  given.read("checksums", options.checksums);
  if (given.has("tables")) {
    for (const nb::handle entry : nb::cast<nb::list>(options_given["tables"])) {
      const auto table_given = nb::cast<nb::dict>(entry);
      Given table("a table", table_given);
      engine::TableOptions made;
      table.read("name", made.name);
      table.read("rows", made.rows);
      table.read("dim", made.dim);
      table.choose("kind", made.kind);
      table.choose("rule", made.rule.rule);
      table.read("beta1", made.rule.beta1);
      table.read("beta2", made.rule.beta2);
      table.read("eps", made.rule.eps);
      table.read("deviation", made.start.deviation);
      made.start.seed = options.seed;
      table.finish();
      options.tables.push_back(std::move(made));
    }
  }
  given.read("table_memory_bytes", options.table_memory_bytes);
  given.read("table_log_bytes", options.table_log_bytes);
  options.pin_threads = false;  // the ranks of a job share the machine's cores
  given.read("create", options.create);
  if (given.has("compress")) options.compress = read_compress(given.dict("compress"));
  if (given.has("remote")) options.remote = remote_options(given.dict("remote"));
  if (given.has("ranks")) {
    options.peers = nb::cast<std::shared_ptr<PyRanks>>(options_given["ranks"]);
  }
  given.finish();
  return options;
}

std::optional<StoredState> stored_state(const engine::DeviceSources& sources) {
  for (const auto& source : sources) {
    const auto state = source->peek();
    if (!state.ok() || !*state) continue;
    const auto snapshot = source->snapshot(storage::ReaderLock::kLeave);
    if (!snapshot.ok()) continue;
    const auto run = engine::run_description_from_json((*snapshot)->layout().description);
    if (!run.ok()) continue;
    StoredState stored;
    for (const plan::ParameterRange& range : run->space.ranges()) {
      stored.parameters.emplace_back(range.name, range.shape);
    }
    stored.gradient_room = (*snapshot)->layout().gradient_spill_bytes > 0;
    for (const storage::StoredSubgroup& subgroup : (*snapshot)->layout().subgroups) {
      stored.subgroup_elements = std::max(stored.subgroup_elements, subgroup.count);
    }
    return stored;
  }
  return std::nullopt;
}

PyUpdater::PyUpdater(const nb::dict& options, const std::vector<std::string>& names,
                     const std::vector<std::vector<uint64_t>>& shapes)
    : PyWeightSource("optimizer", "Make a new one with resume=True to go on.") {
  const engine::UpdaterOptions made = updater_options(options);
  const plan::ParameterSpace space = parameter_space(names, shapes);
  rule_ = made.rule;
  caller().run([&] { updater_ = take(engine::Updater::open(made, space)); });
}

PyUpdater::~PyUpdater() {
  if (forked()) {
    // The threads that would have to be joined live in the parent. The memory goes with the
    // process.
    (void)updater_.release();
    return;
  }
  if (updater_ != nullptr) {
    const nb::gil_scoped_release released;
    if (spool_ != nullptr) spool_->close();
    updater_.reset();
  }
}

engine::Updater& PyUpdater::core() {
  check_process();
  if (updater_ == nullptr) throw closed();
  return *updater_;
}

const plan::ParameterRange& PyUpdater::range(size_t index) {
  const auto& ranges = core().space().ranges();
  if (index >= ranges.size()) usage("there is no range " + std::to_string(index));
  return ranges[index];
}

void PyUpdater::initialize(nb::callable provide, std::string client_metadata) {
  engine::Updater& updater = core();
  run([&] {
    const plan::ParameterSpace& space = updater.space();
    size_t current = ~size_t{0};
    const std::byte* values = nullptr;
    base::DataType type = base::DataType::kF32;
    const auto fill = [&](uint64_t first, std::span<float> out) {
      for (size_t i = space.index_at(first); !out.empty(); ++i) {
        const plan::ParameterRange& range = space.ranges()[i];
        if (i != current) {
          const nb::gil_scoped_acquire acquired;
          const auto [address, name] = nb::cast<std::pair<uintptr_t, std::string>>(provide(i));
          values = reinterpret_cast<const std::byte*>(address);
          type = data_type(name);
          current = i;
        }
        const uint64_t within = first - range.first;
        const uint64_t here = std::min<uint64_t>(out.size(), range.count - within);
        kernels::kernels().cast_to_f32(values + within * base::data_type_bytes(type), type,
                                       out.data(), here);
        out = out.subspan(here);
        first += here;
      }
      return base::Status();
    };
    check(updater.initialize(fill, client_metadata));
  });
}

void PyUpdater::read_state(uint32_t planes, nb::callable visit) {
  engine::Updater& updater = core();
  run([&] {
    check(updater.read_state(
        planes, [&](uint64_t first, std::span<const std::span<const float>> values) {
          uint64_t count = 0;
          for (const auto plane : values) count = std::max<uint64_t>(count, plane.size());
          const nb::gil_scoped_acquire acquired;
          nb::list views;
          for (const auto plane : values) {
            views.append(plane.empty() ? nb::none() : float_view(plane.data(), count));
          }
          visit(first, count, views);
          return Status();
        }));
  });
}

void PyUpdater::edit_state(nb::object edit, std::string client_metadata, uintptr_t residual,
                           const std::vector<std::array<float, 3>>& ahead) {
  engine::Updater& updater = core();
  std::exception_ptr raised;
  std::function<base::Result<bool>(uint64_t, std::span<const std::span<float>>)> visit;
  if (!edit.is_none()) {
    visit = [&](uint64_t first, std::span<const std::span<float>> values) -> base::Result<bool> {
      const uint64_t count = values.front().size();
      const nb::gil_scoped_acquire acquired;
      nb::list views;
      for (const auto plane : values) views.append(float_view(plane.data(), count));
      try {
        return nb::cast<bool>(edit(first, count, views));
      } catch (...) {
        // Raised once the edit has been aborted: the core knows failures, not exceptions.
        raised = std::current_exception();
        return Status(ErrorCode::kCancelled, "the edit raised an exception");
      }
    };
  }
  engine::CompressionState compression{reinterpret_cast<const base::Bf16*>(residual), {}};
  for (const auto& [lr, bias, eps] : ahead) compression.ahead.push_back({lr, bias, eps});
  run([&] {
    Status edited = updater.edit_state(visit, client_metadata, compression);
    if (raised) std::rethrow_exception(raised);
    check(std::move(edited));
  });
}

engine::CompressionState PyUpdater::compression_state() {
  const engine::Compression* compression = core().compression();
  return compression == nullptr ? engine::CompressionState() : compression->state();
}

std::vector<std::array<float, 3>> PyUpdater::step_ahead() {
  std::vector<std::array<float, 3>> rates;
  for (const kernels::StepAhead& one : compression_state().ahead) {
    rates.push_back({one.lr, one.bias, one.eps});
  }
  return rates;
}

uintptr_t PyUpdater::residual() {
  return reinterpret_cast<uintptr_t>(compression_state().residual);
}

nb::dict PyUpdater::compression() {
  const engine::Compression* compression = core().compression();
  const auto summary =
      compression == nullptr ? compress::CompressionSummary() : compression->summary();
  nb::dict out;
  out["elements"] = summary.elements;
  out["values"] = summary.values;
  out["bytes"] = summary.bytes;
  out["density"] = summary.density;
  out["residual_norm"] = summary.residual_norm;
  return out;
}

void PyUpdater::load_weights(const std::string& type, uintptr_t address,
                             const std::optional<PySpans>& kept) {
  engine::Updater& updater = core();
  const base::DataType out = data_type(type);
  run([&] {
    check(updater.load_weights(out, flat_sink(address, out, kept)));
    update_started_ = false;
  });
}

void PyUpdater::begin_step() {
  engine::Updater& updater = core();
  run([&] { check(updater.begin_step()); });
}

void PyUpdater::put_gradients(const std::vector<size_t>& ranges,
                              const std::vector<uintptr_t>& addresses,
                              const std::vector<std::string>& types) {
  engine::Updater& updater = core();
  if (addresses.size() != ranges.size() || types.size() != ranges.size()) {
    usage("an address and a type are needed for every range");
  }
  struct Piece {
    const plan::ParameterRange* range;
    const void* gradient;
    base::DataType type;
  };
  std::vector<Piece> pieces;
  for (size_t i = 0; i < ranges.size(); ++i) {
    pieces.push_back(
        {&range(ranges[i]), reinterpret_cast<const void*>(addresses[i]), data_type(types[i])});
  }
  run([&] {
    for (const Piece& piece : pieces) {
      check(
          updater.put_gradient(piece.range->first, piece.gradient, piece.type, piece.range->count));
    }
  });
}

void PyUpdater::put_gradient_part(size_t index, uint64_t first, uintptr_t address,
                                  const std::string& type, uint64_t count) {
  engine::Updater& updater = core();
  const plan::ParameterRange& whole = range(index);
  if (first > whole.count || count > whole.count - first) usage("a gradient beyond its range");
  const base::DataType given = data_type(type);
  const auto* gradient = reinterpret_cast<const void*>(address);
  run([&] { check(updater.put_gradient(whole.first + first, gradient, given, count)); });
}

void PyUpdater::skip_gradient(size_t index) {
  const plan::ParameterRange& skipped = range(index);
  check(core().skip_gradient(skipped.first, skipped.count));
}

std::tuple<double, bool, std::string> PyUpdater::finish_gradients(double unscale) {
  engine::Updater& updater = core();
  engine::GradientSummary summary;
  run([&] { summary = take(updater.finish_gradients(unscale)); });
  return {summary.norm, summary.finite, summary.first_bad};
}

engine::UpdateOptions PyUpdater::update_options(uint64_t number, double gradient_scale,
                                                const nb::list& groups) const {
  engine::UpdateOptions options;
  options.number = number;
  options.gradient_scale = gradient_scale;
  options.groups.reserve(groups.size());
  for (const nb::handle entry : groups) {
    kernels::GroupOptions group;
    if (entry.is_none()) {
      group.skip = true;
    } else {
      const auto group_given = nb::cast<nb::dict>(entry);
      Given given("a group", group_given);
      given.read("lr", group.lr);
      given.read("weight_decay", group.weight_decay);
      given.read("step", group.step);
      group.rule = rule_;
      read_rule(given, *group.rule);
      given.finish();
    }
    options.groups.push_back(std::move(group));
  }
  return options;
}

std::string PyUpdater::early_update_refusal() {
  const Status possible = core().early_update_possible();
  return possible.ok() ? std::string() : possible.to_string();
}

void PyUpdater::start_early_update(uint64_t number, double gradient_scale, const nb::list& groups,
                                   const std::string& type, uintptr_t address, double norm_max,
                                   const std::optional<PySpans>& kept) {
  engine::Updater& updater = core();
  const base::DataType out = data_type(type);
  const engine::UpdateOptions guess = update_options(number, gradient_scale, groups);
  run([&] {
    check(updater.start_early_update(guess, out, flat_sink(address, out, kept), norm_max));
  });
}

void PyUpdater::start_update(uint64_t number, double gradient_scale, const nb::list& groups,
                             const std::string& type, uintptr_t address,
                             const std::optional<PySpans>& kept,
                             const std::vector<double>& table_rates) {
  engine::Updater& updater = core();
  const base::DataType out = data_type(type);
  engine::UpdateOptions options = update_options(number, gradient_scale, groups);
  options.table_rates = table_rates;
  run([&] {
    check(updater.start_update(options, out, flat_sink(address, out, kept)));
    update_started_ = true;
  });
}

void PyUpdater::wait_weights(uint64_t first, uint64_t count) {
  engine::Updater& updater = core();
  if (first > updater.space().count() || count > updater.space().count() - first) {
    usage("weights outside the parameter space waited for");
  }
  run([&] { check(updater.wait_weights(first, count)); });
}

void PyUpdater::start_commit(std::string client_metadata) {
  engine::Updater& updater = core();
  run([&] { check(updater.start_commit(client_metadata)); });
}

void PyUpdater::wait_commit() {
  engine::Updater& updater = core();
  run([&] { check(updater.wait_commit()); });
}

void PyUpdater::abort() {
  engine::Updater& updater = core();
  run([&] { check(updater.abort()); });
}

engine::RowTables& PyUpdater::tables(size_t index) {
  engine::RowTables* const tables = core().tables();
  if (tables == nullptr || index >= tables->count()) {
    usage("there is no table " + std::to_string(index));
  }
  return *tables;
}

namespace {

std::span<const int64_t> ids_at(uintptr_t address, size_t count) {
  return {reinterpret_cast<const int64_t*>(address), count};
}

}  // namespace

void PyUpdater::prefetch_rows(size_t table, uintptr_t ids, size_t count) {
  engine::RowTables& all = tables(table);
  run([&] { check(all.prefetch(table, ids_at(ids, count))); });
}

void PyUpdater::gather_rows(size_t table, uintptr_t ids, size_t count, const std::string& type,
                            uintptr_t out, bool keep) {
  engine::RowTables& all = tables(table);
  const base::DataType as = data_type(type);
  run([&] {
    check(all.gather(table, ids_at(ids, count), as, reinterpret_cast<void*>(out), keep));
  });
}

void PyUpdater::add_row_gradient(size_t table, uintptr_t ids, size_t count, const std::string& type,
                                 uintptr_t gradient) {
  engine::RowTables& all = tables(table);
  const base::DataType as = data_type(type);
  run([&] {
    check(all.add_gradient(table, ids_at(ids, count), as, reinterpret_cast<const void*>(gradient)));
  });
}

void PyUpdater::put_rows(size_t table, uintptr_t ids, size_t count, uintptr_t values) {
  engine::RowTables& all = tables(table);
  const std::span given(reinterpret_cast<const float*>(values), count * all.table(table).dim);
  run([&] { check(all.put(table, ids_at(ids, count), given)); });
}

void PyUpdater::read_records(size_t table, uint64_t first, uint64_t count, nb::callable visit) {
  engine::RowTables& all = tables(table);
  run([&] {
    check(all.read_records(table, first, count, [&](uint64_t row, std::span<const std::byte> r) {
      const nb::gil_scoped_acquire acquired;
      visit(row, float_view(reinterpret_cast<const float*>(r.data()), r.size() / sizeof(float)));
      return Status();
    }));
  });
}

void PyUpdater::load_tables(const PyCheckpoint& from) {
  engine::RowTables* const tables = core().tables();
  engine::StoredTables* const stored = from.tables();
  if (tables == nullptr && stored == nullptr) return;
  if (tables == nullptr) {
    throw StatusError(Status(ErrorCode::kMismatch,
                             "the checkpoint has tables (" + csd::text_of(stored->tables()) +
                                 "), and this optimizer none",
                             "Call smartinf.move_tables() as when it was saved."));
  }
  if (stored == nullptr) {
    throw StatusError(
        Status(ErrorCode::kMismatch,
               "the checkpoint has no tables, and this optimizer has " + tables->table(0).name,
               "Use one that was saved after smartinf.move_tables()."));
  }
  check(tables->load_next(*stored));
}

void PyUpdater::save_checkpoint(const std::string& path, bool replace, std::string trainer,
                                nb::callable progress) {
  engine::Updater& updater = core();
  engine::CheckpointOptions options;
  options.path = path;
  options.replace = replace;
  options.trainer = std::move(trainer);
  options.progress = [&](uint64_t done, uint64_t total) {
    const nb::gil_scoped_acquire acquired;
    progress(done, total);
    return Status();
  };
  run([&] {
    check(updater.flush());
    take(engine::write_checkpoint(updater, options));
  });
}

nb::dict PyUpdater::traffic() {
  const engine::UpdaterTraffic all = core().traffic();
  const auto by_kind = [](const std::array<uint64_t, base::kTrafficKinds>& bytes) {
    nb::dict out;
    for (size_t kind = 0; kind < bytes.size(); ++kind) {
      const std::string name(base::traffic_kind_name(static_cast<base::TrafficKind>(kind)));
      out[nb::str(name.c_str())] = bytes[kind];
    }
    return out;
  };
  nb::dict out;
  out["host_up"] = by_kind(all.host_link.up_bytes);
  out["host_down"] = by_kind(all.host_link.down_bytes);
  out["read"] = by_kind(all.store.up_bytes);
  out["written"] = by_kind(all.store.down_bytes);
  nb::dict cached;
  cached["state"] = all.state_bytes_cached;
  out["cached"] = cached;
  return out;
}

std::shared_ptr<PySpool> PyUpdater::spool() {
  engine::Spool* const spool = core().spool();
  if (spool_ == nullptr && spool != nullptr) spool_ = std::make_shared<PySpool>(*spool);
  return spool_;
}

void PyUpdater::close() {
  if (updater_ == nullptr || forked()) return;
  Status outcome;
  if (spool_ != nullptr) {
    const nb::gil_scoped_release released;
    spool_->close();
  }
  // Another thread may be in a call, or wait for its turn with a reference to the updater.
  std::unique_ptr<engine::Updater> closing = std::move(updater_);
  try {
    run_last([&] {
      outcome = closing->wait_commit();
      closing.reset();
    });
  } catch (...) {
    updater_ = std::move(closing);  // a signal came before this call's turn
    throw;
  }
  check(std::move(outcome));
}

}  // namespace smartinf::python
