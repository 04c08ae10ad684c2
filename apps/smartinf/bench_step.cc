// smartinf bench step: the optimizer step alone, on synthetic gradients, beside the time that the
// drives need for the same bytes. Steps and limit are timed in turn, so a busy machine slows both.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include "smartinf/base/thread_team.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/link.h"
#include "smartinf/csd/linked_ring.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/gradient_path.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/updater.h"
#include "smartinf/kernels/update.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/update.h"
#include "smartinf/sim/update_json.h"
#include "smartinf/storage/tuning.h"

#include "apps/smartinf/bench_step_flags.h"
#include "apps/smartinf/commands.h"
#include "apps/smartinf/median.h"
#include "apps/smartinf/synthetic_steps.h"
#include "apps/smartinf/trace_file.h"
#include "apps/smartinf/update_rate.h"

namespace smartinf::apps {
namespace {

using base::DataType;
using base::ErrorCode;
using base::StateFormat;
using base::Status;

std::atomic<bool> interrupted{false};
void on_interrupt(int) { interrupted = true; }

uint64_t rss_peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

/// Bytes that a subgroup takes on the drive for padding and block scales.
constexpr uint64_t kSlack = 256 * base::kKiB;

class StepBench {
 public:
  explicit StepBench(const StepOptions& options) : options_(options) {}

  Status run() {
    SI_RETURN_IF_ERROR(read_options());
    SI_RETURN_IF_ERROR(read_machine());
    auto steps = SyntheticSteps::make(params_, updater_.gradient_type, weights_type_);
    if (steps.status().code() == ErrorCode::kOutOfMemory) {
      const uint64_t bytes = base::data_type_bytes(weights_type_);
      return Status(ErrorCode::kOutOfMemory,
                    fmt::format("--params {:g}: the new weights, {} bytes each, take {} of memory, "
                                "which is not available",
                                options_.params, bytes, base::format_bytes(bytes * params_)),
                    "Give fewer parameters.");
    }
    SI_ASSIGN_OR_RETURN(steps_, std::move(steps));
    const Status measured = measure();
    if (!options_.keep && made_) {
      for (const auto& device :
           engine::sources_at(options_.devices, storage::RingKind::kAuto, options_.remote)) {
        const Status erased = device->erase();
        if (measured.ok()) SI_RETURN_IF_ERROR(erased);
      }
    }
    SI_RETURN_IF_ERROR(measured);
    if (updater_.trace != nullptr) {
      SI_RETURN_IF_ERROR(write_trace(options_.trace, *updater_.trace));
    }
    SI_RETURN_IF_ERROR(simulate());
    if (options_.json) {
      fmt::print("{}\n", row().dump());
    } else {
      print();
    }
    return Status();
  }

 private:
  Status read_options() {
    params_ = static_cast<uint64_t>(options_.params);
    updater_.rule.rule = *kernels::update_rule_from_name(options_.rule);
    updater_.format = options_.format.format();
    updater_.where = *base::enum_from_name<engine::UpdateWhere>(options_.where);
    updater_.schedule = *base::enum_from_name<plan::ScheduleVariant>(options_.schedule);
    updater_.durability = *base::enum_from_name<storage::Durability>(options_.durability);
    updater_.checksums = !options_.no_checksums;
    updater_.ring = *base::enum_from_name<storage::RingKind>(options_.ring);
    SI_ASSIGN_OR_RETURN(updater_.memory_budget_bytes, base::parse_bytes(options_.memory_budget));
    SI_ASSIGN_OR_RETURN(updater_.state_cache_bytes, base::parse_bytes(options_.state_cache));
    SI_ASSIGN_OR_RETURN(link_.up_bytes_per_s, base::parse_bytes(options_.internal_read));
    SI_ASSIGN_OR_RETURN(link_.down_bytes_per_s, base::parse_bytes(options_.internal_write));
    link_.shared_budget = options_.shared != "none";
    SI_ASSIGN_OR_RETURN(const uint64_t host_rate, base::parse_bytes(options_.host_link));
    updater_.host_link = {host_rate, host_rate, options_.shared == "all"};
    SI_ASSIGN_OR_RETURN(updater_.io_bytes, base::parse_bytes(options_.io_bytes));
    updater_.io_depth = options_.io_depth;
    updater_.subgroup_elements = options_.subgroup;
    const bool wide =
        options_.gradient.empty() ? options_.where == "host" : options_.gradient == "f32";
    updater_.gradient_type = wide ? DataType::kF32 : DataType::kBf16;
    weights_type_ = options_.weights == "f32" ? DataType::kF32 : DataType::kBf16;
    if (options_.spill) updater_.gradient_budget_bytes = 0;
    compress::CompressOptions& compress = updater_.compress;
    compress.density = options_.density;
    compress.error_feedback = options_.error_feedback;
    compress.residual_every = options_.residual_every;
    compress.values = options_.values.value_or(compress.default_values());
    if (!options_.trace.empty()) {
      updater_.trace = std::make_shared<csd::Trace>();
      SI_RETURN_IF_ERROR(write_trace(options_.trace, *updater_.trace));  // fails now, if it does
    }
    updater_.remote = options_.remote;
    std::vector<std::string> paths = options_.devices;
    for (uint32_t d = 0; d < options_.emulated; ++d) paths.push_back(fmt::format("device {}", d));
    for (const std::string& path : paths) {
      engine::DeviceOptions device;
      device.path = path;
      device.threads = options_.threads;
      device.processor = options_.processor;
      device.internal_link = link_;
      if (emulated()) device.bandwidth = 1;
      updater_.devices.push_back(device);
    }
    if (emulated()) emulate();
    return Status();
  }

  bool emulated() const { return options_.emulated > 0; }
  uint64_t device_count() const { return updater_.devices.size(); }

  /// Sets what a drive would decide and memory cannot (subgroups, size and depth of transfers), and
  /// the first device's speed.
  void emulate() {
    constexpr uint64_t kSubgroups = 48;  // filling and draining slots is a small part then
    if (updater_.subgroup_elements == 0) {
      updater_.subgroup_elements = base::round_up(
          base::divide_up(params_, device_count() * kSubgroups), base::kBlockElements);
    }
    if (updater_.io_bytes == 0) updater_.io_bytes = base::kMiB / 4;
    if (updater_.io_depth == 0) updater_.io_depth = 8;
    engine::DeviceOptions& first = updater_.devices.front();
    first.bandwidth = options_.slow_device;
    for (uint64_t* rate :
         {&first.internal_link.up_bytes_per_s, &first.internal_link.down_bytes_per_s}) {
      *rate = static_cast<uint64_t>(static_cast<double>(*rate) * options_.slow_device);
    }
  }

  /// The state in memory, made without links, or that would take longer than a step. Its pages are
  /// there before a step is timed.
  Status make_emulated() {
    // Two copies of the state, spilled gradients, metadata, and room for an uneven share.
    const uint64_t bytes =
        30 * (base::divide_up(params_, device_count()) + 2 * updater_.subgroup_elements) +
        32 * base::kMiB;
    for (size_t d = 0; d < device_count(); ++d) {
      SI_ASSIGN_OR_RETURN(auto drive, csd::EmulatedDrive::create(bytes));
      std::memset(drive->contents().data(), 0, drive->contents().size());
      drives_.push_back(std::move(drive));
    }
    engine::UpdaterOptions bare = updater_;
    bare.trace = nullptr;
    bare.host_link = {};
    for (engine::DeviceOptions& device : bare.devices) device.internal_link = {};
    SI_ASSIGN_OR_RETURN(const auto updater, open(bare));
    return steps_->initialize(*updater);
  }

  base::Result<std::unique_ptr<engine::Updater>> open(const engine::UpdaterOptions& options) const {
    if (!emulated()) return engine::Updater::open(options, steps_->space());
    return engine::Updater::open(options, steps_->space(),
                                 engine::emulated_sources(options, drives_));
  }

  /// Only AdamW's kernel is timed; another rule is simulated from a machine file or not at all.
  Status read_machine() {
    const compress::CompressOptions& compress = updater_.compress;
    if (options_.machine.empty()) {
      if (updater_.rule.rule != kernels::UpdateRule::kAdamW) return Status();
      const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
      const auto count = static_cast<uint32_t>(device_count());
      const uint32_t threads = options_.threads == 0 ? cores : options_.threads * count;
      SI_ASSIGN_OR_RETURN(rates_.update_params_per_s,
                          measure_update_rate({updater_.format, updater_.checksums, compress},
                                              std::min(cores, threads)));
    } else {
      SI_ASSIGN_OR_RETURN(const sim::Machine machine, sim::load_machine(options_.machine));
      double bytes_per_s = 0;
      for (const sim::DeviceGroup* device : machine.each_device()) {
        if (device->kernel.clock_hz > 0) {
          return Status(ErrorCode::kUnsupported,
                        fmt::format("the devices of machine '{}' have no rate to take their "
                                    "processor for",
                                    options_.machine),
                        "Take a machine file with update_bytes_per_s, not one with "
                        "kernel_clock_hz.");
        }
        bytes_per_s += compress.on() ? device->decompress_bytes_per_s : device->update_bytes_per_s;
      }
      // As many of its devices as are timed here. By the bytes that come in: f32 state, and a bf16
      // gradient or the little there is of a compressed one.
      bytes_per_s *= static_cast<double>(device_count()) / machine.device_count();
      rates_.update_params_per_s = bytes_per_s / (compress.on() ? 12 : 14);
    }
    if (compress.on()) {
      SI_ASSIGN_OR_RETURN(const SelectRate select, measure_select_rate(compress));
      rates_.select_params_per_s = select.params_per_s;
      rates_.select_threads = select.threads;
    }
    return Status();
  }

  /// Drives of memory behind links, for the simulator.
  Status add_links(sim::UpdateShape& shape) const {
    shape.drive_read_bytes_per_s = static_cast<double>(link_.up_bytes_per_s);
    shape.drive_write_bytes_per_s = static_cast<double>(link_.down_bytes_per_s);
    shape.shared_budget = link_.shared_budget;
    shape.host_up_bytes_per_s = shape.host_down_bytes_per_s =
        static_cast<double>(updater_.host_link.up_bytes_per_s);
    shape.host_shared_budget = updater_.host_link.shared_budget;
    shape.link_catch_up_s = std::chrono::duration<double>(csd::Link::kCatchUp).count();
    shape.links_in_order = true;
    if (updater_.compress.on()) {
      shape.gradient = static_cast<double>(host_link_.down(base::TrafficKind::kGradient)) /
                       static_cast<double>(params_);
    }
    const auto devices = static_cast<uint32_t>(device_count());
    SI_ASSIGN_OR_RETURN(
        shape.copy_bytes_per_s,
        measure_copy_rate(std::min(devices, std::max(1u, std::thread::hardware_concurrency()))));
    // Gradients that are spilled are handed over by one thread.
    SI_ASSIGN_OR_RETURN(shape.gradient_params_per_s,
                        measure_gradient_rate(updater_.gradient_type,
                                              options_.spill ? 1 : engine::gradient_threads()));
    return Status();
  }

  /// The same update on the virtual clock: drives at the rate that this run found for the same
  /// bytes in the same order, or that emulated ones were given; processors and selection at the
  /// rate of their kernels. Not what has no such rate, nor unequal devices.
  Status simulate() {
    const bool links = emulated() && options_.slow_device == 1 && link_.up_bytes_per_s > 0 &&
                       link_.down_bytes_per_s > 0 && updater_.host_link.up_bytes_per_s > 0;
    if (rates_.update_params_per_s <= 0 || !(links || has_limit())) return Status();
    const StateBytes bytes = state_bytes_per_parameter(updater_.rule.rule, updater_.format);
    sim::UpdateShape shape = rates_;
    shape.parameters = params_;
    shape.devices = static_cast<uint32_t>(device_count());
    shape.subgroup_elements = subgroup_elements_;
    shape.slots = slots_;
    shape.schedule = updater_.schedule;
    shape.master = bytes.master;
    shape.moments = bytes.moments;
    shape.gradient = static_cast<double>(base::data_type_bytes(updater_.gradient_type));
    shape.host_update = updater_.where == engine::UpdateWhere::kHost;
    shape.gradient_spilled = options_.spill;
    shape.state_cache_bytes = updater_.state_cache_bytes;
    shape.cached_writes_wait = updater_.durability == storage::Durability::kNone;
    shape.weight = static_cast<double>(base::data_type_bytes(weights_type_));
    if (links) {
      SI_RETURN_IF_ERROR(add_links(shape));
    } else {
      shape.shared_budget = true;
      shape.drive_read_bytes_per_s = shape.drive_write_bytes_per_s =
          median(drive_rate_) / static_cast<double>(shape.devices);
    }
    SI_ASSIGN_OR_RETURN(simulated_, sim::simulate_update(shape));
    simulated_shape_ = shape;
    return Status();
  }

  Status measure() {
    for (int i = 0; i < options_.repeat; ++i) {
      SI_RETURN_IF_ERROR(time_step());
      SI_RETURN_IF_ERROR(time_limit());
      if (interrupted) return Status(ErrorCode::kCancelled, "stopped before the end");
      if (!options_.json) {
        fmt::print("run {}: update {}, of it weights after {}; drive alone {}\n", i + 1,
                   base::format_seconds(update_s_.back()), base::format_seconds(weights_s_.back()),
                   base::format_seconds(limit_s_.back()));
        std::fflush(stdout);
      }
    }
    return Status();
  }

  Status time_step() {
    if (emulated() && drives_.empty()) SI_RETURN_IF_ERROR(make_emulated());
    SI_ASSIGN_OR_RETURN(const auto updater, open(updater_));
    if (updater->fresh()) {
      made_ = true;
      SI_RETURN_IF_ERROR(steps_->initialize(*updater));
    }
    // Not counted: the first step after opening touches memory for the first time.
    SI_RETURN_IF_ERROR(steps_->step(*updater).status());
    if (interrupted) return Status(ErrorCode::kCancelled, "stopped before the end");
    const engine::UpdaterTraffic before = updater->traffic();
    SI_ASSIGN_OR_RETURN(const StepTimes times, steps_->step(*updater));
    const engine::UpdaterTraffic after = updater->traffic();
    update_s_.push_back(times.update_s);
    weights_s_.push_back(times.weights_s);
    gradient_s_.push_back(times.gradient_s);
    store_ = after.store.since(before.store);
    state_bytes_cached_ = after.since(before).state_bytes_cached;
    host_link_ = after.host_link.since(before.host_link);
    engine_memory_bytes_ = updater->memory_bytes();
    gradient_memory_bytes_ = updater->gradient_memory_bytes();
    state_cache_bytes_ = updater->state_cache_bytes();
    slots_ = updater->slots();
    subgroup_elements_ = updater->subgroup_elements();
    devices_ = updater->describe_devices();
    if (updater_.compress.residual_on_devices()) {
      // As a run's last step: the next round opens a state that lacks nothing.
      updater->compression()->write_residual();
      SI_RETURN_IF_ERROR(steps_->step(*updater).status());
    }
    return Status();
  }

  struct Moved {
    double bytes = 0;
    double seconds = 0;
  };
  /// The same bytes of device d's state without computing.
  base::Result<storage::DriveLimit> device_limit(size_t d, uint64_t memory_bytes) const {
    storage::StoreOptions store;
    store.ring.kind = updater_.ring;
    store.durability = updater_.durability;
    store.checksums = updater_.checksums;
    if (const auto tuned = storage::recall_tuning(options_.devices[d])) {
      store.io_bytes = tuned->io_bytes;
      store.io_depth = tuned->io_depth;
    }
    if (link_.given()) {
      csd::LinkOptions link{"drive",
                            static_cast<double>(link_.up_bytes_per_s),
                            static_cast<double>(link_.down_bytes_per_s),
                            link_.shared_budget,
                            {}};
      store.wrap_ring = [link = std::make_shared<csd::Link>(std::move(link))](
                            std::unique_ptr<storage::Ring> ring) {
        return csd::make_linked_ring(std::move(ring), {link});
      };
    }
    if (updater_.io_bytes != 0) store.io_bytes = updater_.io_bytes;
    if (updater_.io_depth != 0) store.io_depth = updater_.io_depth;
    return storage::drive_limit(options_.devices[d], store, memory_bytes);
  }
  /// Measures all devices at once.
  base::Result<Moved> move_state(uint64_t memory_bytes) const {
    const auto count = options_.devices.size();
    std::vector<base::Result<storage::DriveLimit>> limits(count, storage::DriveLimit{});
    base::ThreadTeam team(static_cast<uint32_t>(count), "si-measure");
    team.run(count, [&](uint32_t, size_t d) { limits[d] = device_limit(d, memory_bytes / count); });
    Moved moved;
    for (const auto& limit : limits) {
      SI_RETURN_IF_ERROR(limit.status());
      moved.bytes += static_cast<double>(limit->read_bytes + limit->written_bytes);
      moved.seconds = std::max(moved.seconds, limit->seconds);
    }
    return moved;
  }

  /// Another machine's drives cannot be read without its processors, and memory is no drive: 0, and
  /// the share of it too.
  bool has_limit() const {
    return !emulated() && std::ranges::none_of(options_.devices, [](const std::string& path) {
      return serve::is_remote(path);
    });
  }
  Status time_limit() {
    if (!has_limit()) {
      limit_s_.push_back(0);
      drive_rate_.push_back(0);
      return Status();
    }
    // In as much memory as the step: a drive may be faster into buffers that the caches hold.
    const StateBytes bytes = state_bytes_per_parameter(updater_.rule.rule, updater_.format);
    const auto subgroup_bytes = static_cast<uint64_t>(
        std::ceil((bytes.master + bytes.moments) * static_cast<double>(subgroup_elements_)));
    const uint64_t count = options_.devices.size();
    SI_ASSIGN_OR_RETURN(const Moved most, move_state(slots_ * count * (subgroup_bytes + kSlack)));
    // Spilled gradients are read in a step and not here: scale by what a step moves.
    const double moved = static_cast<double>(store_.up_total() + store_.down_total() -
                                             store_.down(base::TrafficKind::kGradient));
    limit_s_.push_back(most.seconds * moved / most.bytes);
    Moved as_scheduled = most;
    if (updater_.schedule == plan::ScheduleVariant::kNaive) {
      // Reads and writes in turn, one subgroup after another: another rate than both at once.
      SI_ASSIGN_OR_RETURN(as_scheduled, move_state(1));
    }
    drive_rate_.push_back(as_scheduled.bytes / as_scheduled.seconds);
    return Status();
  }

  nlohmann::ordered_json row() const {
    const auto [update_min, update_max] = std::minmax_element(update_s_.begin(), update_s_.end());
    const auto [limit_min, limit_max] = std::minmax_element(limit_s_.begin(), limit_s_.end());
    const double update_s = median(update_s_);
    const double limit_s = median(limit_s_);
    nlohmann::ordered_json row = {
        {"params", params_},
        {"devices", device_count()},
        {"where", options_.where},
        {"rule", options_.rule},
        {"state_format", base::state_format_name(updater_.format)},
        {"gradient", base::data_type_name(updater_.gradient_type)},
        {"spill", options_.spill},
        {"density", options_.density},
        {"values", compress::value_encoding_name(updater_.compress.values)},
        {"error_feedback", options_.error_feedback},
        {"residual_every", options_.residual_every},
        {"durability", options_.durability},
        {"checksums", updater_.checksums},
        {"schedule", options_.schedule},
        {"isa", kernels::kernels().isa()},
        {"threads", std::thread::hardware_concurrency()},
        {"repeat", options_.repeat},
        {"update_s", update_s},
        {"update_s_min", *update_min},
        {"update_s_max", *update_max},
        {"weights_s", median(weights_s_)},
        {"gradient_s", median(gradient_s_)},
        {"bytes_read", store_.up_total()},
        {"bytes_written", store_.down_total()},
        {"state_bytes_cached", state_bytes_cached_},
        {"state_cache_bytes", state_cache_bytes_},
        {"host_bytes_up", host_link_.up_total()},
        {"host_bytes_down", host_link_.down_total()},
        {"host_gradient_bytes_down", host_link_.down(base::TrafficKind::kGradient)},
        {"host_metadata_bytes", host_link_.up(base::TrafficKind::kMetadata) +
                                    host_link_.down(base::TrafficKind::kMetadata)},
        {"drive_limit_s", limit_s},
        {"drive_limit_s_min", *limit_min},
        {"drive_limit_s_max", *limit_max},
        {"share_of_limit", limit_s / update_s},
        {"memory_budget_bytes", updater_.memory_budget_bytes},
        {"engine_memory_bytes", engine_memory_bytes_},
        {"gradient_memory_bytes", gradient_memory_bytes_},
        {"rss_peak_bytes", rss_peak_bytes()},
        {"slots", slots_},
        {"subgroup_elements", subgroup_elements_},
    };
    if (simulated_) {
      row["simulated_s"] = simulated_->update_s;
      row["simulated_total_s"] = simulated_->total_s();
      row["simulated_ratio"] = simulated_->update_s / update_s;
      row["simulated_shape"] = nlohmann::json(simulated_shape_);
      row["update_params_per_s"] = rates_.update_params_per_s;
      if (rates_.select_params_per_s > 0) {
        row["select_params_per_s"] = rates_.select_params_per_s;
      }
    }
    return row;
  }

  void print() const {
    const auto [update_min, update_max] = std::minmax_element(update_s_.begin(), update_s_.end());
    const double update_s = median(update_s_);
    const double limit_s = median(limit_s_);
    for (const std::string& line : devices_) fmt::print("{}\n", line);
    if (simulated_) {
      fmt::print("simulated      {}: {:.2f} of the measured update\n",
                 base::format_seconds(simulated_->update_s), simulated_->update_s / update_s);
    }
    fmt::print(
        "update         {} ({} to {}), new weights after {}\n"
        "drive alone    {}\n"
        "on the drive   {} read, {} written in a step{}\n"
        "host link      {} up, {} down\n"
        "gradients      {} to give them and find their norm\n"
        "memory         {} at most; engine {} of {}, gradients {}, state cache {}\n",
        base::format_seconds(update_s), base::format_seconds(*update_min),
        base::format_seconds(*update_max), base::format_seconds(median(weights_s_)),
        has_limit() ? fmt::format("{}: the update runs at {:.1f} % of it",
                                  base::format_seconds(limit_s), 100 * limit_s / update_s)
                    : "not measured: there is none here",
        base::format_bytes(store_.up_total()), base::format_bytes(store_.down_total()),
        state_bytes_cached_ == 0
            ? ""
            : fmt::format(", {} were in memory", base::format_bytes(state_bytes_cached_)),
        base::format_bytes(host_link_.up_total()), base::format_bytes(host_link_.down_total()),
        base::format_seconds(median(gradient_s_)), base::format_bytes(rss_peak_bytes()),
        base::format_bytes(engine_memory_bytes_), base::format_bytes(updater_.memory_budget_bytes),
        base::format_bytes(gradient_memory_bytes_), base::format_bytes(state_cache_bytes_));
  }

  const StepOptions options_;
  uint64_t params_ = 0;
  DataType weights_type_ = DataType::kBf16;
  engine::UpdaterOptions updater_;
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives_;  // of emulated devices
  std::unique_ptr<SyntheticSteps> steps_;
  bool made_ = false;  // the state on the devices is this benchmark's
  std::vector<double> update_s_;
  std::vector<double> weights_s_;
  std::vector<double> gradient_s_;
  std::vector<double> limit_s_;
  base::TrafficReading store_;  // of one step
  base::TrafficReading host_link_;
  uint64_t engine_memory_bytes_ = 0;
  uint64_t gradient_memory_bytes_ = 0;
  uint64_t state_cache_bytes_ = 0;
  uint64_t state_bytes_cached_ = 0;  // in one step
  engine::EmulatedLink link_;        // of each drive
  std::vector<double> drive_rate_;  // as scheduled: bytes per second of all drives, both directions
  sim::UpdateShape rates_;          // of processors and selection; 0: not known
  uint32_t slots_ = 0;              // of each device
  uint64_t subgroup_elements_ = 0;
  std::optional<sim::UpdateTimes> simulated_;
  sim::UpdateShape simulated_shape_;
  std::vector<std::string> devices_;
};

}  // namespace

void add_bench_step(CLI::App& bench, Run& run) {
  auto options = std::make_shared<StepOptions>();
  CLI::App* command = bench.add_subcommand(
      "step", "Time the optimizer step alone, in turn with the drives' time for the same bytes");
  add_step_flags(*command, *options);
  command->footer(
      "Examples:\n"
      "  smartinf bench step --params 2e8 --device /mnt/nvme0/bench\n"
      "  smartinf bench step --params 1e9 --device a --device b --spill --json\n"
      "  smartinf bench step --device a --where host --spill     # as ZeRO-Infinity does\n"
      "  smartinf bench step --emulated 4 --params 1e7 --internal-read 75MB --internal-write 40MB "
      "--host-link 160MB");
  command->callback([options, &run] {
    run = [options] {
      std::signal(SIGINT, on_interrupt);
      const Status status = StepBench(*options).run();
      return status.ok() ? kExitDone : report(status);
    };
  });
}

}  // namespace smartinf::apps
