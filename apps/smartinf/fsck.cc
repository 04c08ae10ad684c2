// `smartinf fsck`: reads everything that is on devices and says what is wrong with it.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/run_description.h"
#include "smartinf/engine/smallest_state.h"
#include "smartinf/serve/options.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/progress.h"
#include "apps/smartinf/remote_flags.h"
#include "apps/smartinf/saved_cache.h"
#include "apps/smartinf/saved_rows.h"
#include "apps/smartinf/state_places.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using storage::StoreFault;
using storage::StoreState;

struct FsckFlags {
  std::vector<std::string> places;
  bool repair = false;
  bool json = false;
  serve::RemoteOptions remote;
  std::string memory_budget = "256MiB";
};

/// Faults listed of each device; a drive that lost a gigabyte has thousands, and they say the same.
constexpr uint64_t kFaultsShownMax = 100;

struct CheckedDevice {
  std::string path;
  Status failure;  // failure of the check itself, which did not come to its end
  storage::CheckReport report;
  std::vector<StoreFault> faults;  // the first kFaultsShownMax
  SavedCache cache;                // keys and values beside the state
  Status cache_failure;            // of their check, which did not come to its end
  uint64_t cache_faults = 0;
  std::vector<std::string> cache_shown;  // of them, the first kFaultsShownMax
  bool has_tables = false;               // whose rows are beside the state
  Status rows_failure;                   // of their check, which did not come to its end
  uint64_t rows_bytes = 0;               // read
  uint64_t row_faults = 0;
  std::vector<std::string> rows_shown;  // of them, the first kFaultsShownMax
  uint64_t faults_that_stay() const { return report.faults - report.faults_repaired; }
};

/// The result of comparing the named devices with each other.
struct Agreement {
  std::optional<base::StepNumber> step;  // the step that recovery decides on
  Status problem;                        // they cannot be used together
  std::string note;                      // nothing is wrong, but the user should know
};

Agreement compare(const engine::DeviceSources& devices) {
  Agreement agreement;
  std::vector<StoreState> states;
  for (const auto& device : devices) {
    const auto state = device->peek();
    // Its own check says what is wrong with it.
    if (!state.ok() || !*state) return agreement;
    states.push_back(**state);
  }
  const Result<base::StepNumber> step = storage::recovery_step(states);
  if (step.ok()) {
    agreement.step = *step;
    return agreement;
  }
  if (step.status().code() == ErrorCode::kNotFound) {
    // Checked alone, a device is compared with what its own superblock says.
    agreement.note = step.status().what() +
                     ": it was not checked whether the devices belong together. " +
                     step.status().advice();
  } else if (step.status().code() == ErrorCode::kFailedPrecondition &&
             std::none_of(states.begin(), states.end(),
                          [](const StoreState& state) { return state.torn; })) {
    agreement.note = step.status().what() + ". " + step.status().advice();
  } else {
    agreement.problem = step.status();
  }
  return agreement;
}

/// The fault of the engine's description, which the store carries and does not look into: without
/// it no run opens.
std::optional<StoreFault> description_fault(engine::DeviceSource& source) {
  const auto store = source.summarize();
  if (!store.ok() || store->layout.description.empty() || engine::is_smallest(store->layout)) {
    return std::nullopt;
  }
  const auto run = engine::run_description_from_json(store->layout.description);
  if (run.ok()) return std::nullopt;
  return StoreFault{
      storage::FaultKind::kLayout,
      Status(run.status().code(), run.status().what(), "Restore a checkpoint (smartinf restore).",
             base::ErrorPlace{store->file_path, {}, {}, 0})};
}

CheckedDevice check(engine::DeviceSource& source, const FsckFlags& flags, uint64_t memory_bytes,
                    std::optional<base::StepNumber> step, Progress& progress) {
  CheckedDevice device;
  device.path = source.name();
  storage::CheckOptions options;
  options.memory_bytes = memory_bytes;
  options.repair = flags.repair;
  options.step = step;
  options.progress = [&](uint64_t done, uint64_t total) { return progress(done, total); };
  progress.rename("checking " + device.path);
  const auto visit = [&](const StoreFault& fault) {
    if (device.faults.size() >= kFaultsShownMax) return;
    device.faults.push_back(fault);
    if (flags.json) return;
    progress.clear();
    std::printf("%s: %s: %s\n", fault.repaired ? "repaired" : "damaged",
                std::string(storage::fault_kind_name(fault.kind)).c_str(),
                fault.status.to_string().c_str());
  };
  Result<storage::CheckReport> report = source.check(options, visit);
  progress.clear();
  if (report.ok() && report->state.initialized && !report->state_lost) {
    if (const auto fault = description_fault(source)) {
      visit(*fault);
      ++report->faults;
      report->state_lost = true;
    }
  }
  if (report.ok()) {
    device.report = *report;
  } else {
    device.failure = report.status();
  }
  return device;
}

/// Keys and values that a batch job has saved there.
void check_cache(CheckedDevice& device, const FsckFlags& flags, Progress& progress) {
  Result<SavedCache> cache = saved_cache(device.path);
  if (!cache.ok()) {
    device.cache_failure = cache.status();
    return;
  }
  device.cache = std::move(*cache);
  if (device.cache.file == nullptr) return;
  const auto lock = storage::lock_container(device.path);
  if (!lock.ok()) {
    device.cache_failure = lock.status();
    return;
  }
  progress.rename("checking keys and values of " + device.path);
  device.cache_failure = device.cache.file->verify(
      [&](uint64_t done, uint64_t total) { return progress(done, total); },
      [&](const Status& found) {
        if (++device.cache_faults > kFaultsShownMax) return;
        device.cache_shown.push_back(found.to_string());
        if (flags.json) return;
        progress.clear();
        std::printf("damaged: keys and values: %s\n", device.cache_shown.back().c_str());
      });
  progress.clear();
}

void print_cache(const CheckedDevice& device) {
  if (!device.cache_failure.ok()) {
    std::printf("%s: keys and values: not checked: %s\n", device.path.c_str(),
                device.cache_failure.to_string().c_str());
    return;
  }
  if (device.cache.file == nullptr) return;
  std::printf("%s: keys and values: %s checked: %s\n", device.path.c_str(),
              cache_text(device.cache).c_str(),
              device.cache_faults == 0
                  ? "sound"
                  : fmt::format("{} blocks damaged; when the job goes on, it computes their "
                                "sequences again",
                                device.cache_faults)
                        .c_str());
}

/// Rows of the tables of the state there, of the step that was checked.
void check_rows(CheckedDevice& device, const FsckFlags& flags, Progress& progress) {
  if (serve::is_remote(device.path) || !device.report.state.initialized ||
      device.report.state_lost || device.report.state.torn) {
    return;
  }
  const auto lock = storage::lock_container(device.path);
  if (!lock.ok()) {
    device.rows_failure = lock.status();
    return;
  }
  const auto rows = open_saved_rows(device.path, device.report.checked_step);
  device.has_tables = !rows.ok() || *rows != nullptr;
  if (rows.ok() && *rows == nullptr) return;
  const auto show = [&](const Status& found) {
    if (++device.row_faults > kFaultsShownMax) return;
    device.rows_shown.push_back(found.to_string());
    if (flags.json) return;
    progress.clear();
    std::printf("damaged: rows of tables: %s\n", device.rows_shown.back().c_str());
  };
  if (rows.status().code() == ErrorCode::kCorrupt) return show(rows.status());
  device.rows_failure = rows.status();
  if (!rows.ok()) return;
  progress.rename("checking rows of tables of " + device.path);
  device.rows_failure = (*rows)->verify(
      [&](uint64_t done, uint64_t total) {
        device.rows_bytes = done;
        return progress(done, total);
      },
      show);
  progress.clear();
}

void print_rows(const CheckedDevice& device) {
  if (!device.rows_failure.ok()) {
    std::printf("%s: rows of tables: not checked: %s\n", device.path.c_str(),
                device.rows_failure.to_string().c_str());
  } else if (device.has_tables) {
    std::printf("%s: rows of tables: %s checked: %s\n", device.path.c_str(),
                base::format_bytes(device.rows_bytes).c_str(),
                device.row_faults == 0
                    ? "sound"
                    : fmt::format("{} pages damaged: put a copy of the devices' directories in "
                                  "place of all of them",
                                  device.row_faults)
                          .c_str());
  }
}

void print_device(const CheckedDevice& device) {
  if (!device.failure.ok()) {
    std::printf("%s: not checked: %s\n", device.path.c_str(), device.failure.to_string().c_str());
    return;
  }
  const storage::CheckReport& report = device.report;
  if (report.faults > device.faults.size()) {
    std::printf("%s: %llu further faults are not listed\n", device.path.c_str(),
                static_cast<unsigned long long>(report.faults - device.faults.size()));
  }
  std::string verdict = "sound";
  if (report.state_lost) {
    verdict = fmt::format("{} faults; the state is lost: restore a checkpoint (smartinf restore)",
                          report.faults);
  } else if (device.faults_that_stay() > 0) {
    verdict = fmt::format(
        "{} faults, no state lost: smartinf fsck --repair writes the damaged "
        "copies anew",
        device.faults_that_stay());
  } else if (report.faults > 0) {
    verdict = fmt::format("{} faults, all repaired", report.faults);
  } else if (!report.state.initialized) {
    verdict = "nothing to check: the creation of the state was interrupted";
  }
  std::printf(
      "%s: step %llu, %llu blocks of state checked%s, %s read: %s\n", device.path.c_str(),
      static_cast<unsigned long long>(report.checked_step),
      static_cast<unsigned long long>(report.blocks_checked),
      report.blocks_without_checksum == 0
          ? ""
          : fmt::format(", {} that have no checksum skipped", report.blocks_without_checksum)
                .c_str(),
      base::format_bytes(report.bytes_read).c_str(), verdict.c_str());
}

nlohmann::ordered_json to_json(const StoreFault& fault) {
  nlohmann::ordered_json json{{"kind", storage::fault_kind_name(fault.kind)},
                              {"what", fault.status.what()},
                              {"advice", fault.status.advice()},
                              {"file", fault.status.place().path}};
  if (fault.status.place().offset_bytes) json["offset"] = *fault.status.place().offset_bytes;
  if (fault.status.place().length_bytes) json["length"] = *fault.status.place().length_bytes;
  json["costs_state"] = fault.costs_state;
  json["repaired"] = fault.repaired;
  return json;
}

nlohmann::ordered_json to_json(const CheckedDevice& device) {
  nlohmann::ordered_json json{{"device", device.path}};
  if (!device.failure.ok()) {
    json["error"] = device.failure.to_string();
    return json;
  }
  const storage::CheckReport& report = device.report;
  json["run"] = report.state.run.to_string();
  json["device_index"] = report.state.device_index;
  json["device_count"] = report.state.device_count;
  json["initialized"] = report.state.initialized;
  json["checked_step"] = report.checked_step;
  json["blocks_checked"] = report.blocks_checked;
  json["blocks_without_checksum"] = report.blocks_without_checksum;
  json["bytes_read"] = report.bytes_read;
  json["faults_found"] = report.faults;
  json["faults_repaired"] = report.faults_repaired;
  json["state_lost"] = report.state_lost;
  json["faults"] = nlohmann::ordered_json::array();
  for (const StoreFault& fault : device.faults) json["faults"].push_back(to_json(fault));
  if (!device.cache_failure.ok()) {
    json["keys_and_values"] = {{"error", device.cache_failure.to_string()}};
  } else if (device.cache.file != nullptr) {
    json["keys_and_values"] = {{"sequences", device.cache.sequences},
                               {"bytes_read", device.cache.saved_bytes},
                               {"faults_found", device.cache_faults},
                               {"faults", device.cache_shown}};
  }
  if (!device.rows_failure.ok()) {
    json["rows"] = {{"error", device.rows_failure.to_string()}};
  } else if (device.has_tables) {
    json["rows"] = {{"bytes_read", device.rows_bytes},
                    {"faults_found", device.row_faults},
                    {"faults", device.rows_shown}};
  }
  return json;
}

int run_fsck(FsckFlags& flags) {
  const Result<uint64_t> memory_bytes = memory_budget(flags.memory_budget);
  if (!memory_bytes.ok()) return report(memory_bytes.status(), kExitUsage);
  const Result<std::vector<std::string>> places = devices_of(flags.places, &flags.remote);
  if (!places.ok()) return report(places.status());
  const Interrupt interrupt("stopping; press Ctrl-C again to stop at once");
  const engine::DeviceSources sources =
      engine::sources_at(*places, storage::RingKind::kAuto, flags.remote);
  const Agreement agreement = compare(sources);

  Progress progress("checking", interrupt.token());
  std::vector<CheckedDevice> devices;
  bool sound = agreement.problem.ok();
  for (const auto& source : sources) {
    devices.push_back(check(*source, flags, *memory_bytes, agreement.step, progress));
    CheckedDevice& device = devices.back();
    if (device.failure.code() == ErrorCode::kCancelled) return report(device.failure);
    if (!flags.json) print_device(device);
    if (device.failure.ok()) check_cache(device, flags, progress);
    if (device.cache_failure.code() == ErrorCode::kCancelled) return report(device.cache_failure);
    if (!flags.json) print_cache(device);
    if (device.failure.ok()) check_rows(device, flags, progress);
    if (device.rows_failure.code() == ErrorCode::kCancelled) return report(device.rows_failure);
    if (!flags.json) print_rows(device);
    sound = sound && device.failure.ok() && device.faults_that_stay() == 0 &&
            !device.report.state_lost && !device.report.state.torn && device.cache_failure.ok() &&
            device.cache_faults == 0 && device.rows_failure.ok() && device.row_faults == 0;
  }
  if (flags.json) {
    nlohmann::ordered_json json{{"sound", sound}};
    json["step"] = agreement.step ? nlohmann::ordered_json(*agreement.step) : nullptr;
    json["problem"] = agreement.problem.ok() ? "" : agreement.problem.to_string();
    json["note"] = agreement.note;
    json["devices"] = nlohmann::ordered_json::array();
    for (const CheckedDevice& device : devices) json["devices"].push_back(to_json(device));
    std::printf("%s\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    const bool lost = std::any_of(devices.begin(), devices.end(), [](const CheckedDevice& device) {
      return !device.failure.ok() || device.report.state_lost || device.report.state.torn ||
             device.row_faults > 0;
    });
    if (agreement.step && !lost) {
      std::printf("the run resumes after step %llu\n",
                  static_cast<unsigned long long>(*agreement.step));
    } else if (agreement.step) {
      std::printf("the run cannot be resumed with these devices\n");
    }
    if (!agreement.note.empty()) std::printf("%s\n", agreement.note.c_str());
    if (!agreement.problem.ok()) {
      std::printf("the devices do not belong together: %s\n",
                  agreement.problem.to_string().c_str());
    }
  }
  return sound ? kExitDone : kExitFailed;
}

}  // namespace

void add_fsck(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("fsck", "Check every block of the state on devices");
  auto flags = std::make_shared<FsckFlags>();
  command
      ->add_option("device", flags->places,
                   "Devices, if possible all devices of a run, or the run's folder")
      ->required()
      ->type_name("DEVICE...");
  command->add_flag("--repair", flags->repair,
                    "Write damaged copies of superblock, layout and tables anew from intact ones; "
                    "state is never written");
  command
      ->add_option("--memory-budget", flags->memory_budget, "Memory for blocks in flight [256MiB]")
      ->type_name("SIZE");
  command->add_flag("--json", flags->json, "Print one JSON object");
  add_remote_flags(*command, flags->remote);
  command->footer(
      "Every block is read and compared with its checksum. The devices are locked meanwhile, so "
      "no\n"
      "run can use them. Exit code 0: nothing is damaged, or all is repaired; 1: damage is "
      "left.\n\n"
      "Examples:\n"
      "  smartinf fsck runs/quickstart\n"
      "  smartinf fsck /mnt/a /mnt/b --repair\n"
      "  smartinf fsck /dev/nvme1n1 --json");
  command->callback([flags, &run] { run = [flags] { return run_fsck(*flags); }; });
}

}  // namespace smartinf::apps
