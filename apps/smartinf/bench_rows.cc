// smartinf bench rows: steps of a table on devices of which each touches few rows, beside reading
// as many pages at random and writing as many bytes of log with nothing else.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/row_pages.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/updater.h"
#include "smartinf/serve/options.h"
#include "smartinf/storage/file_descriptor.h"
#include "smartinf/storage/ring.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/median.h"

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

/// Ranks of Zipf's law, 1 to n. Source: Hörmann and Derflinger 1996 (rejection-inversion).
class Zipf {
 public:
  Zipf(uint64_t n, double exponent)
      : n_(n),
        exponent_(exponent),
        first_(integral(1.5) - 1),
        last_(integral(static_cast<double>(n) + 0.5)),
        squeeze_(2 - inverse(integral(2.5) - density(2))) {}

  uint64_t operator()(std::mt19937_64& random) const {
    std::uniform_real_distribution<double> uniform(0, 1);
    for (;;) {
      const double u = last_ + uniform(random) * (first_ - last_);
      const double x = inverse(u);
      const double k = std::clamp(std::round(x), 1.0, static_cast<double>(n_));
      if (k - x <= squeeze_ || u >= integral(k + 0.5) - density(k)) {
        return static_cast<uint64_t>(k);
      }
    }
  }

 private:
  bool logarithmic() const { return std::abs(exponent_ - 1) < 1e-9; }
  double density(double x) const { return std::pow(x, -exponent_); }
  double integral(double x) const {
    return logarithmic() ? std::log(x) : (std::pow(x, 1 - exponent_) - 1) / (1 - exponent_);
  }
  double inverse(double y) const {
    return logarithmic() ? std::exp(y) : std::pow(1 + y * (1 - exponent_), 1 / (1 - exponent_));
  }

  uint64_t n_;
  double exponent_, first_, last_, squeeze_;
};

/// Row numbers of a step. Ranks are scattered over the table, as hashed ids are.
class Ids {
 public:
  explicit Ids(const RowsOptions& options)
      : options_(options), zipf_(options.row_count(), options.zipf) {}

  std::vector<int64_t> next() {
    std::vector<int64_t> ids;
    std::unordered_set<uint64_t> seen;
    while (ids.size() < options_.batch) {
      if (options_.zipf > 0) {
        ids.push_back(scattered(zipf_(random_)));
      } else if (const uint64_t row = random_() % options_.row_count(); seen.insert(row).second) {
        ids.push_back(static_cast<int64_t>(row));
      }
    }
    return ids;
  }

 private:
  int64_t scattered(uint64_t rank) const {
    // A large prime times the rank is another row for every rank, unless it divides the rows.
    constexpr uint64_t kPrime = 2'654'435'761;
    return static_cast<int64_t>(
        static_cast<uint64_t>(static_cast<__uint128_t>(rank) * kPrime % options_.row_count()));
  }

  const RowsOptions& options_;
  std::mt19937_64 random_{1};
  Zipf zipf_;
};

/// Reads pages of a device's file of tables at random, and writes a file from its start on.
class Alone {
 public:
  static constexpr uint32_t kReads = 64;
  static constexpr uint64_t kWriteBytes = base::kMiB;

  base::Status open(const std::string& device, uint64_t page_bytes) {
    page_bytes_ = page_bytes;
    path_ = (std::filesystem::path(device) / storage::kRowFileName).string();
    written_ = (std::filesystem::path(device) / "bench.log").string();
    file_ = storage::FileDescriptor(::open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    if (!file_.is_open()) return base::errno_status(errno, "cannot read", path_);
    log_ = storage::FileDescriptor(
        ::open(written_.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0666));
    if (!log_.is_open()) return base::errno_status(errno, "cannot write", written_);
    std::error_code error;
    pages_ = std::filesystem::file_size(path_, error) / page_bytes;
    SI_ASSIGN_OR_RETURN(ring_, storage::make_ring({.depth = kReads}));
    SI_ASSIGN_OR_RETURN(read_file_, ring_->add_file(file_.get(), path_));
    SI_ASSIGN_OR_RETURN(write_file_, ring_->add_file(log_.get(), written_));
    SI_ASSIGN_OR_RETURN(
        memory_, base::AlignedBuffer::allocate(std::max(kReads * page_bytes, 8 * kWriteBytes)));
    (void)ring_->register_memory(memory_.bytes());
    return {};
  }
  ~Alone() {
    std::error_code error;
    std::filesystem::remove(written_, error);
  }

  base::Status read(uint64_t pages) {
    return move(storage::IoOp::kRead, read_file_, kReads, page_bytes_, pages,
                [&](uint64_t) { return random_() % pages_ * page_bytes_; });
  }
  base::Status write(uint64_t bytes) {
    SI_RETURN_IF_ERROR(move(storage::IoOp::kWrite, write_file_, 8, kWriteBytes,
                            base::divide_up(bytes, kWriteBytes),
                            [](uint64_t i) { return i * kWriteBytes; }));
    return move(storage::IoOp::kSync, write_file_, 1, 0, 1, [](uint64_t) { return 0; });
  }

 private:
  template <typename OffsetOf>
  base::Status move(storage::IoOp op, uint32_t file, uint32_t depth, uint64_t bytes, uint64_t count,
                    const OffsetOf& offset_of) {
    uint64_t begun = 0;
    uint32_t in_flight = 0;
    const auto start = [&](storage::IoRequest& request) -> base::Status {
      request.offset_bytes = offset_of(begun++);
      storage::IoRequest* const one = &request;
      ++in_flight;
      return ring_->submit({&one, 1});
    };
    for (uint32_t i = 0; i < depth && begun < count; ++i) {
      requests_[i] = {};
      requests_[i].op = op;
      requests_[i].file = file;
      requests_[i].buffer = memory_.bytes().subspan(i * bytes, bytes);
      SI_RETURN_IF_ERROR(start(requests_[i]));
    }
    while (in_flight > 0) {
      std::array<storage::IoRequest*, kReads> done{};
      SI_ASSIGN_OR_RETURN(const size_t reaped, ring_->reap(done, std::chrono::seconds(1)));
      for (size_t i = 0; i < reaped; ++i) {
        --in_flight;
        if (done[i]->outcome < 0) {
          return base::errno_status(static_cast<int>(-done[i]->outcome), "a transfer failed",
                                    path_);
        }
        if (begun < count) SI_RETURN_IF_ERROR(start(*done[i]));
      }
    }
    return {};
  }

  std::string path_, written_;
  storage::FileDescriptor file_, log_;
  uint64_t page_bytes_ = 0, pages_ = 0;
  uint32_t read_file_ = 0, write_file_ = 0;
  base::AlignedBuffer memory_;
  std::array<storage::IoRequest, kReads> requests_;
  std::mt19937_64 random_{2};
  std::unique_ptr<storage::Ring> ring_;  // destroyed first
};

struct Measured {
  std::vector<double> step_s, gather_s, alone_s, alone_read_s, read_bytes, written_bytes, up_bytes,
      down_bytes, rows;
};

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

base::Result<Measured> measure(engine::Updater& updater, const RowsOptions& options,
                               uint64_t record_bytes) {
  const uint64_t page = base::page_bytes(record_bytes);
  Alone alone;
  SI_RETURN_IF_ERROR(alone.open(options.devices.front(), page));
  engine::RowTables& tables = *updater.tables();
  const uint64_t dense = updater.space().count();
  const std::vector<base::Bf16> dense_gradient(dense);
  std::vector<base::Bf16> dense_weights(dense);
  const size_t value = base::data_type_bytes(options.gradient_type);
  std::vector<std::byte> rows(options.batch * options.dim * value);
  std::vector<float> gradient(options.batch * options.dim);
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 241) * 0x1p-14f;
  Ids numbers(options);
  Measured measured;
  for (uint32_t i = 0; i < options.repeat + options.warm_up; ++i) {
    const std::vector<int64_t> ids = numbers.next();
    const engine::UpdaterTraffic before = updater.traffic();
    const uint64_t begin_ns = base::now_ns();
    SI_RETURN_IF_ERROR(tables.gather(0, ids, options.gradient_type, rows.data()));
    const double gather_s = base::seconds_since(begin_ns);
    SI_RETURN_IF_ERROR(updater.begin_step());
    SI_RETURN_IF_ERROR(
        updater.put_gradient(0, dense_gradient.data(), base::DataType::kBf16, dense));
    SI_RETURN_IF_ERROR(tables.add_gradient(0, ids, base::DataType::kF32, gradient.data()));
    SI_RETURN_IF_ERROR(updater.finish_gradients(1).status());
    const uint64_t distinct = tables.rows_of_step(0);
    engine::UpdateOptions update;
    update.groups = {{.lr = 1e-3}};
    SI_RETURN_IF_ERROR(updater.start_update(update, base::DataType::kBf16, [&](uint64_t first) {
      return dense_weights.data() + first;
    }));
    SI_RETURN_IF_ERROR(updater.commit(""));
    const double step_s = base::seconds_since(begin_ns);
    const engine::UpdaterTraffic moved = updater.traffic().since(before);
    if (i < options.warm_up) continue;
    const uint64_t read = moved.store.up(base::TrafficKind::kState);
    const uint64_t log = base::divide_up(distinct, base::records_per_page(record_bytes + 8)) * page;
    const uint64_t alone_ns = base::now_ns();
    SI_RETURN_IF_ERROR(alone.read(read / page));
    measured.alone_read_s.push_back(base::seconds_since(alone_ns));
    SI_RETURN_IF_ERROR(alone.write(log));
    measured.alone_s.push_back(base::seconds_since(alone_ns));
    measured.step_s.push_back(step_s);
    measured.gather_s.push_back(gather_s);
    measured.rows.push_back(static_cast<double>(distinct));
    measured.read_bytes.push_back(static_cast<double>(read));
    measured.written_bytes.push_back(static_cast<double>(moved.store.down_total()));
    measured.up_bytes.push_back(static_cast<double>(moved.host_link.up_total()));
    measured.down_bytes.push_back(static_cast<double>(moved.host_link.down_total()));
  }
  return measured;
}

void print(const RowsOptions& options, const Measured& measured) {
  const double step = median(measured.step_s);
  const double alone = median(measured.alone_s);
  const double rows = median(measured.rows);
  const auto mean = [](const std::vector<double>& values) {
    double sum = 0;
    for (const double value : values) sum += value;
    return sum / static_cast<double>(values.size());
  };
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
    json["read_bytes"] = mean(measured.read_bytes);
    json["written_bytes"] = mean(measured.written_bytes);
    json["link_up_bytes"] = mean(measured.up_bytes);
    json["link_down_bytes"] = mean(measured.down_bytes);
    fmt::print("{}\n", json.dump());
    return;
  }
  fmt::print("{} rows of {} by {}; a step of {} ids touches {:.0f} rows\n", options.row_count(),
             options.dim, kernels::row_rule_name(options.rule), options.batch, rows);
  fmt::print("step {:.3f} s, {:.2f} of the same page reads and log writes alone ({:.3f} s)\n", step,
             step / alone, alone);
  fmt::print("rows were gathered in {:.3f} s; their pages alone were read in {:.3f} s\n",
             median(measured.gather_s), median(measured.alone_read_s));
  fmt::print("read {}, written {}; over the link {} up, {} down\n",
             base::format_bytes(static_cast<uint64_t>(mean(measured.read_bytes))),
             base::format_bytes(static_cast<uint64_t>(mean(measured.written_bytes))),
             base::format_bytes(static_cast<uint64_t>(mean(measured.up_bytes))),
             base::format_bytes(static_cast<uint64_t>(mean(measured.down_bytes))));
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
