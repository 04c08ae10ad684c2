// smartinf bench rows: steps of a table on devices of which each touches few rows, beside reading
// as many pages at random and writing as many bytes of log with nothing else.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/row_pages.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/updater.h"
#include "smartinf/kernels/row_rules.h"
#include "smartinf/kernels/update.h"
#include "smartinf/serve/options.h"
#include "smartinf/sim/row_ids.h"
#include "smartinf/sim/row_tables.h"
#include "smartinf/storage/row_format.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/median.h"
#include "apps/smartinf/row_rates.h"

namespace smartinf::apps {
namespace {

struct RowsOptions {
  double rows = 1e6;
  uint32_t dim = 64;
  uint64_t batch = 100'000;  // ids of a step; without zipf all different
  double zipf = 0;
  kernels::RowRule rule = kernels::RowRule::kSparseAdam;
  uint64_t memory_bytes = 256 * base::kMiB;
  uint64_t log_bytes = 0;
  base::DataType gradient_type = base::DataType::kBf16;
  std::vector<std::string> devices;
  uint32_t repeat = 5;
  uint32_t warm_up = 1;
  bool json = false;

  uint64_t row_count() const { return static_cast<uint64_t>(rows); }
};

struct Measured {
  std::vector<double> step_s, gather_s, between_s, alone_s, alone_read_s, read_bytes, log_bytes,
      up_bytes, down_bytes, rows;
  // Of lookups alone; and with what merges between steps.
  std::vector<double> lookup_bytes, all_read_bytes, written_bytes;
  sim::Machine machine;  // as it was found to be
  sim::RowTimes simulated;
};

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}
double mean(const std::vector<double>& values) {
  return sum(values) / static_cast<double>(values.size());
}

base::Status fill(engine::RowTables& tables, const RowsOptions& options) {
  constexpr uint64_t kRowsAtOnce = 1 << 16;
  std::vector<float> values(kRowsAtOnce * options.dim);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251) * 0x1p-12f;
  std::vector<int64_t> ids;
  for (uint64_t row = 0; row < options.row_count(); row += kRowsAtOnce) {
    const uint64_t some = std::min(kRowsAtOnce, options.row_count() - row);
    ids.resize(some);
    for (uint64_t i = 0; i < some; ++i) ids[i] = static_cast<int64_t>(row + i);
    SI_RETURN_IF_ERROR(tables.put(0, ids, std::span(values).first(some * options.dim)));
  }
  return {};
}

/// The steps' page reads and log writes with nothing else, on all drives at once.
base::Status measure_alone(const RowsOptions& options, uint64_t record_bytes, Measured& measured) {
  const uint64_t page = base::page_bytes(record_bytes);
  const auto devices = options.devices.size();
  const uint64_t pages_here = base::row_pages(options.row_count() / devices, record_bytes);
  std::vector<PagesAlone> alone(devices);
  for (size_t d = 0; d < devices; ++d) {
    const std::filesystem::path folder(options.devices[d]);
    SI_RETURN_IF_ERROR(alone[d].open((folder / storage::kRowFileName).string(),
                                     (folder / "bench.log").string(), page, pages_here));
  }
  const auto everywhere = [&](std::vector<double>& times, const auto& work) -> base::Status {
    std::vector<base::Status> outcomes(devices);
    const uint64_t begin_ns = base::now_ns();
    {
      std::vector<std::jthread> threads;
      for (size_t d = 0; d < devices; ++d) {
        threads.emplace_back([&, d] { outcomes[d] = work(alone[d]); });
      }
    }
    times.push_back(base::seconds_since(begin_ns));
    for (const base::Status& status : outcomes) SI_RETURN_IF_ERROR(status);
    return {};
  };
  std::vector<double> writes_s, page_writes_s, syncs_s;
  double pages = 0, log_bytes = 0, page_writes = 0;
  for (size_t i = 0; i < measured.step_s.size(); ++i) {
    const auto reads = static_cast<uint64_t>(measured.read_bytes[i]) / page / devices;
    const auto log = static_cast<uint64_t>(measured.log_bytes[i]) / devices;
    SI_RETURN_IF_ERROR(
        everywhere(measured.alone_read_s, [&](PagesAlone& one) { return one.read(reads); }));
    SI_RETURN_IF_ERROR(everywhere(writes_s, [&](PagesAlone& one) { return one.write(log); }));
    SI_RETURN_IF_ERROR(
        everywhere(syncs_s, [&](PagesAlone& one) { return one.write_pages(1, log); }));
    SI_RETURN_IF_ERROR(
        everywhere(page_writes_s, [&](PagesAlone& one) { return one.write_pages(reads, log); }));
    measured.alone_s.push_back(measured.alone_read_s.back() + writes_s.back());
    pages += static_cast<double>(reads);
    log_bytes += static_cast<double>(log);
    page_writes += static_cast<double>(reads);
  }
  measured.machine.devices.resize(devices);
  for (size_t d = 0; d < devices; ++d) {
    sim::DeviceGroup& device = measured.machine.devices[d];
    device.name = options.devices[d];
    device.page_reads_per_s = pages / sum(measured.alone_read_s);
    device.page_writes_per_s = page_writes / sum(page_writes_s);
    device.write_bytes_per_s = log_bytes / sum(writes_s);
    device.sync_s = median(syncs_s);
  }
  return {};
}

base::Result<Measured> measure(engine::Updater& updater, const RowsOptions& options,
                               uint64_t record_bytes) {
  const uint64_t log_page = base::row_log_page_bytes(record_bytes);
  engine::RowTables& tables = *updater.tables();
  const uint64_t dense = updater.space().count();
  const std::vector<base::Bf16> dense_gradient(dense);
  std::vector<base::Bf16> dense_weights(dense);
  const size_t value = base::data_type_bytes(options.gradient_type);
  std::vector<std::byte> rows(options.batch * options.dim * value);
  std::vector<float> gradient(options.batch * options.dim);
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 241) * 0x1p-14f;
  sim::RowIds numbers(options.row_count(), options.zipf, options.zipf == 0);
  Measured measured;
  engine::UpdaterTraffic ended = updater.traffic();
  for (uint32_t i = 0; i < options.repeat + options.warm_up; ++i) {
    const std::vector<int64_t> ids = numbers.next(options.batch);
    const engine::UpdaterTraffic before = updater.traffic();
    const uint64_t begin_ns = base::now_ns();
    SI_RETURN_IF_ERROR(tables.gather(0, ids, options.gradient_type, rows.data()));
    const double gather_s = base::seconds_since(begin_ns);
    const uint64_t gathered_ns = base::now_ns();
    const engine::UpdaterTraffic gathered = updater.traffic().since(before);
    SI_RETURN_IF_ERROR(updater.begin_step());
    SI_RETURN_IF_ERROR(
        updater.put_gradient(0, dense_gradient.data(), base::DataType::kBf16, dense));
    SI_RETURN_IF_ERROR(tables.add_gradient(0, ids, base::DataType::kF32, gradient.data()));
    SI_RETURN_IF_ERROR(updater.finish_gradients(1).status());
    const uint64_t distinct = tables.rows_of_step(0);
    engine::UpdateOptions update;
    update.groups = {{.lr = 1e-3}};
    const double between_s = base::seconds_since(gathered_ns);
    SI_RETURN_IF_ERROR(updater.start_update(update, base::DataType::kBf16, [&](uint64_t first) {
      return dense_weights.data() + first;
    }));
    SI_RETURN_IF_ERROR(updater.commit(""));
    const double step_s = base::seconds_since(begin_ns);
    const engine::UpdaterTraffic now = updater.traffic();
    const engine::UpdaterTraffic moved = now.since(before);
    const engine::UpdaterTraffic all = now.since(std::exchange(ended, now));
    if (i < options.warm_up) continue;
    measured.step_s.push_back(step_s);
    measured.gather_s.push_back(gather_s);
    measured.between_s.push_back(between_s);
    measured.rows.push_back(static_cast<double>(distinct));
    measured.log_bytes.push_back(static_cast<double>(
        base::divide_up(distinct, base::records_per_row_log_page(log_page, record_bytes)) *
        log_page));
    const auto state_read = [](const engine::UpdaterTraffic& traffic) {
      return static_cast<double>(traffic.store.up(base::TrafficKind::kState));
    };
    measured.read_bytes.push_back(state_read(moved));
    measured.lookup_bytes.push_back(state_read(gathered));
    measured.all_read_bytes.push_back(state_read(all));
    measured.written_bytes.push_back(static_cast<double>(all.store.down_total()));
    measured.up_bytes.push_back(static_cast<double>(moved.host_link.up_total()));
    measured.down_bytes.push_back(static_cast<double>(moved.host_link.down_total()));
  }
  SI_RETURN_IF_ERROR(measure_alone(options, record_bytes, measured));
  time_rows({options.row_count(), options.dim, options.batch, options.rule, options.gradient_type,
             options.memory_bytes},
            measured.machine);
  sim::RowTable table;
  table.rows = options.row_count();
  table.dim = options.dim;
  table.rule = options.rule;
  table.value_bytes = static_cast<uint32_t>(value);
  table.memory_bytes = options.memory_bytes;
  table.log_bytes = options.log_bytes;
  table.ids = options.batch;
  table.zipf = options.zipf;
  table.distinct = options.zipf == 0;
  SI_ASSIGN_OR_RETURN(measured.simulated, sim::simulate_rows(table, measured.machine,
                                                             {options.warm_up, options.repeat,
                                                              mean(measured.between_s)}));
  return measured;
}

void print(const RowsOptions& options, const Measured& measured) {
  const double step = median(measured.step_s);
  const double alone = median(measured.alone_s);
  const double rows = median(measured.rows);
  const sim::RowTimes& simulated = measured.simulated;
  if (options.json) {
    nlohmann::ordered_json json;
    json["rows"] = options.row_count();
    json["dim"] = options.dim;
    json["rule"] = kernels::row_rule_name(options.rule);
    json["batch"] = options.batch;
    json["zipf"] = options.zipf;
    json["devices"] = options.devices.size();
    json["memory_bytes"] = options.memory_bytes;
    json["step_s"] = step;
    json["step_s_all"] = measured.step_s;
    json["alone_s"] = alone;
    json["alone_s_all"] = measured.alone_s;
    json["gather_s"] = median(measured.gather_s);
    json["alone_read_s"] = median(measured.alone_read_s);
    json["rows_of_step"] = rows;
    json["read_bytes"] = mean(measured.all_read_bytes);
    json["lookup_read_bytes"] = mean(measured.lookup_bytes);
    json["written_bytes"] = mean(measured.written_bytes);
    json["link_up_bytes"] = mean(measured.up_bytes);
    json["link_down_bytes"] = mean(measured.down_bytes);
    json["step_mean_s"] = mean(measured.step_s);
    json["gather_mean_s"] = mean(measured.gather_s);
    json["simulated_s"] = simulated.step_s;
    json["simulated_gather_s"] = simulated.gather_s;
    json["simulated_merge_s"] = simulated.merge_s;
    json["simulated_read_bytes"] = simulated.read_bytes;
    json["simulated_written_bytes"] = simulated.written_bytes;
    const sim::DeviceGroup& device = measured.machine.devices.front();
    json["device"] = {{"page_reads_per_s", device.page_reads_per_s},
                      {"page_writes_per_s", device.page_writes_per_s},
                      {"write_bytes_per_s", device.write_bytes_per_s},
                      {"sync_s", device.sync_s},
                      {"page_s", device.page_s},
                      {"row_s", device.row_s},
                      {"row_bytes_per_s", device.row_bytes_per_s},
                      {"host_row_s", measured.machine.host.row_s}};
    fmt::print("{}\n", json.dump());
    return;
  }
  fmt::print("{} rows of {} by {}; a step of {} ids touches {:.0f} rows\n", options.row_count(),
             options.dim, kernels::row_rule_name(options.rule), options.batch, rows);
  fmt::print("step {:.3f} s, {:.2f} of the same page reads and log writes alone ({:.3f} s)\n", step,
             step / alone, alone);
  fmt::print("rows were gathered in {:.3f} s; their pages alone were read in {:.3f} s\n",
             median(measured.gather_s), median(measured.alone_read_s));
  const auto bytes = [](const std::vector<double>& values) {
    return base::format_bytes(static_cast<uint64_t>(mean(values)));
  };
  fmt::print("read {}, {} of it to look rows up; written {}; over the link {} up, {} down\n",
             bytes(measured.all_read_bytes), bytes(measured.lookup_bytes),
             bytes(measured.written_bytes), bytes(measured.up_bytes), bytes(measured.down_bytes));
  fmt::print("in the mean {:.3f} s; simulated {:.3f} s\n", mean(measured.step_s), simulated.step_s);
}

base::Status bench_rows(const RowsOptions& options) {
  engine::UpdaterOptions engine;
  for (const std::string& path : options.devices) {
    if (serve::is_remote(path)) {
      return {base::ErrorCode::kUnsupported, "--device " + path + " is another machine's",
              "Run smartinf bench rows there."};
    }
    engine::DeviceOptions& device = engine.devices.emplace_back();
    device.path = path;
    device.bandwidth = 1;
  }
  if (options.zipf == 0 && options.batch > options.row_count() / 2) {
    return {base::ErrorCode::kInvalidArgument, "--batch is more than half of --rows",
            "Give fewer ids to a step, or --zipf."};
  }
  engine.memory_budget_bytes = 64 * base::kMiB;
  engine.gradient_type = options.gradient_type;
  engine.table_memory_bytes = options.memory_bytes;
  engine.table_log_bytes = options.log_bytes;
  engine::TableOptions& table = engine.tables.emplace_back();
  table.name = "rows";
  table.rows = options.row_count();
  table.dim = options.dim;
  table.rule.rule = options.rule;
  plan::ParameterSpace space;
  SI_RETURN_IF_ERROR(space.add("dense", {options.devices.size(), base::kBlockElements}, 0));
  engine.subgroup_elements = base::kBlockElements;
  for (const auto& source : engine::local_sources(engine)) {
    SI_ASSIGN_OR_RETURN(const auto state, source->peek());
    if (!state || !state->initialized) continue;
    return {base::ErrorCode::kAlreadyExists,
            "--device " + source->name() + " holds a state already",
            "Name a directory that is empty or not there, or delete it, if it is of a run of this "
            "command that was interrupted."};
  }
  SI_ASSIGN_OR_RETURN(auto updater, engine::Updater::open(engine, space));
  const base::Result<Measured> measured = [&]() -> base::Result<Measured> {
    SI_RETURN_IF_ERROR(fill(*updater->tables(), options));
    SI_RETURN_IF_ERROR(updater->initialize(
        [](uint64_t, std::span<float> out) {
          std::ranges::fill(out, 0.0f);
          return base::Status();
        },
        ""));
    return measure(*updater, options, kernels::record_bytes(options.rule, options.dim));
  }();
  updater.reset();
  base::Status erased;
  for (const auto& source : engine::local_sources(engine)) {
    base::Status status = source->erase();
    if (erased.ok()) erased = std::move(status);
  }
  SI_RETURN_IF_ERROR(measured.status());
  print(options, *measured);
  return erased;
}

}  // namespace

void add_bench_rows(CLI::App& bench, Run& run) {
  auto options = std::make_shared<RowsOptions>();
  auto rule = std::make_shared<std::string>(kernels::row_rule_name(options->rule));
  auto type = std::make_shared<std::string>("bf16");
  auto memory = std::make_shared<std::string>("256MiB");
  auto log = std::make_shared<std::string>();
  CLI::App* command = bench.add_subcommand(
      "rows",
      "Time steps of a table on drives that touch few of its rows, beside the same page reads and "
      "log writes alone");
  command->add_option("--rows", options->rows, "Rows of the table")
      ->check(CLI::Range(1e3, 4e9))
      ->capture_default_str();
  command->add_option("--dim", options->dim, "Values of a row")
      ->check(CLI::Range(1u, 65536u))
      ->capture_default_str();
  command->add_option("--batch", options->batch, "Ids of a step; without --zipf all different")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 26))
      ->capture_default_str();
  command
      ->add_option("--zipf", options->zipf, "Exponent of Zipf's law for the ids; 0: all rows alike")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str();
  command->add_option("--rule", *rule, "Update rule of the rows")
      ->check(CLI::IsMember(base::enum_name_list<kernels::RowRule>()))
      ->capture_default_str();
  command->add_option("--gradient-type", *type, "Type of gradients and rows on the link")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}))
      ->capture_default_str();
  command->add_option("--memory", *memory, "Memory for where rows are and for a cache of rows")
      ->capture_default_str();
  command->add_option("--log", *log, "Room on the drives for rows on their way home [chosen]");
  command
      ->add_option("--device", options->devices,
                   "Folder on a drive, which is made where it is not there; may be repeated")
      ->required()
      ->allow_extra_args(false)
      ->type_name("DIR");
  command
      ->add_option("--repeat", options->repeat, "Number of steps, of which the median is reported")
      ->check(CLI::Range(1u, 100000u))
      ->capture_default_str();
  command->add_option("--warm-up", options->warm_up, "Steps before those")
      ->check(CLI::Range(0u, 100000u))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print one JSON object");
  command->footer(
      "Examples:\n"
      "  smartinf bench rows --rows 4e7 --dim 64 --device /nvme0/bench\n"
      "  smartinf bench rows --rows 4e7 --dim 64 --zipf 1.0 --memory 1.6GB --device /nvme0/bench");
  command->callback([options, rule, type, memory, log, &run] {
    options->rule = *kernels::row_rule_from_name(*rule);
    options->gradient_type = *base::enum_from_name<base::DataType>(*type);
    run = [options, memory, log] {
      const base::Status status = [&]() -> base::Status {
        SI_ASSIGN_OR_RETURN(options->memory_bytes, base::parse_bytes(*memory));
        if (!log->empty()) {
          SI_ASSIGN_OR_RETURN(options->log_bytes, base::parse_bytes(*log));
        }
        return bench_rows(*options);
      }();
      if (status.ok()) return kExitDone;
      fmt::print(stderr, "smartinf bench rows: {}\n", status.to_string());
      return kExitFailed;
    };
  });
}

}  // namespace smartinf::apps
