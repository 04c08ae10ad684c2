// `smartinf gc`: what dead runs have left behind: lists it, asks, deletes it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/units.h"
#include "smartinf/config/recipe.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/found_run.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/smallest_state.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/erase.h"
#include "smartinf/train/export.h"
#include "smartinf/train/run_folder.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/remote_flags.h"
#include "apps/smartinf/saved_cache.h"
#include "apps/smartinf/state_places.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Status;
namespace fs = std::filesystem;

/// Folders below the one named that are looked into: runs/ -> a run -> checkpoints -> step ->
/// device.
constexpr int kDepthMax = 5;
/// Time within which files that are being written are touched, also where locks are not to be had.
constexpr std::chrono::minutes kQuiet{10};
constexpr size_t kRunDigits = 8;  // of a run's id, as it is named
constexpr uintmax_t kRecipeBytesMax = uintmax_t{1} << 20;

struct GcFlags {
  std::vector<std::string> places;
  std::vector<std::string> runs;  // whose whole states are to be deleted
  bool states = false;
  bool caches = false;
  bool yes = false;
  bool json = false;
  serve::RemoteOptions remote;
};

enum class LeftoverKind : uint8_t {
  kCreating,    // a state that never got its name
  kUnfinished,  // a state that never got its first step
  kPartial,     // a checkpoint that was not completed
  kExport,      // an export that was not completed
  kCache,       // keys and values of a batch job
  kState,       // a whole state that no run's folder speaks of
};
const char* kind_text(LeftoverKind kind) {
  switch (kind) {
    case LeftoverKind::kCreating:
    case LeftoverKind::kUnfinished:
      return "interrupted creation";
    case LeftoverKind::kPartial:
      return "interrupted checkpoint";
    case LeftoverKind::kExport:
      return "interrupted export";
    case LeftoverKind::kCache:
      return "keys and values of a batch job";
    case LeftoverKind::kState:
      return "state without a run's folder";
  }
  return "?";
}

struct Leftover {
  LeftoverKind kind = LeftoverKind::kCreating;
  fs::path path;  // of the device's folder, or of the checkpoint
  uint64_t bytes = 0;
  std::string remark;
  std::string run = {};     // kState: its id
  std::string folder = {};  // kState: of the run, where it says so; gone
  bool deleted = false;
  Status failure = {};
};

/// Something that was found and stays, with the reason.
struct Kept {
  fs::path path;
  uint64_t bytes = 0;
  std::string why;
};

struct Findings {
  std::vector<Leftover> leftovers;
  std::vector<Kept> kept;
};

/// Devices that a run's folder or a recipe names, by their canonical path, with what names them.
using Named = std::map<std::string, std::string>;

/// Bytes that a file really takes: reserved space counts, holes do not.
uint64_t bytes_on_drive(const fs::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return 0;
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

uint64_t bytes_in(const fs::path& folder) {
  uint64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(folder, error)) {
    if (entry.is_regular_file(error)) bytes += bytes_on_drive(entry.path());
  }
  return bytes;
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// Whether somebody has the device open, and who. Makes no lock file where there is none.
Status in_use(const fs::path& device) {
  if (!is_there(device / storage::kLockFileName)) return Status();
  const auto lock = storage::lock_container(device.string());
  return lock.ok() ? Status() : lock.status();
}

std::string place_of(const fs::path& path) {
  if (serve::is_remote(path.string())) return path.string();
  std::error_code error;
  const fs::path found = fs::weakly_canonical(path, error);
  return error ? path.string() : found.string();
}

void collect_named(const fs::path& folder, int depth, Named& named) {
  const std::string by_run = "belongs to " + folder.string();
  const auto record = train::read_run_record(folder.string());
  if (record.ok() && *record) {
    for (const std::string& device : (*record)->devices) named.emplace(place_of(device), by_run);
  } else if (has_begun(folder.string())) {
    if (const auto run = load_run(folder.string()); run.ok()) {
      for (const auto& device : run->recipe.updater.devices) {
        named.emplace(place_of(device.path), by_run);
      }
    }
  }
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    std::error_code unknown;
    if (entry.is_symlink(unknown)) continue;
    if (entry.is_directory(unknown) && depth < kDepthMax) {
      collect_named(entry.path(), depth + 1, named);
    }
    if (entry.path().extension() != ".toml" || !entry.is_regular_file(unknown) ||
        entry.file_size(unknown) > kRecipeBytesMax) {
      continue;
    }
    // Other programs have .toml files, too: those are no recipes.
    const auto recipe = config::load_recipe(entry.path().string(), {});
    if (!recipe.ok()) continue;
    for (const auto& device : recipe->recipe.updater.devices) {
      named.emplace(place_of(device.path), "is named by the recipe " + entry.path().string());
    }
  }
}

/// Why a whole state stays; empty: nothing that is there speaks of it.
std::string claim_on(const fs::path& device, const storage::RunId& run, const StateOwner& owner,
                     const Named& named) {
  fs::path above =
      serve::is_remote(device.string()) ? fs::path() : fs::absolute(device).lexically_normal();
  for (int i = 0; i < kDepthMax && above.has_relative_path(); ++i) {
    if (is_run_folder(above.string()) || engine::is_checkpoint(above.string())) {
      return "belongs to " + above.string();
    }
    above = above.parent_path();
  }
  if (const auto by = named.find(place_of(device)); by != named.end()) return by->second;
  if (owner.folder.empty()) return {};
  const auto record = train::read_run_record(owner.folder);
  const bool its = record.ok() && *record && (*record)->run == run.to_string();
  return its ? "belongs to " + owner.folder : std::string();
}

/// Whether anything in a folder was written a short time ago.
bool is_fresh(const fs::path& folder) {
  const auto recent = [](const fs::path& path) {
    std::error_code error;
    const auto written = fs::last_write_time(path, error);
    return !error && fs::file_time_type::clock::now() - written < kQuiet;
  };
  if (recent(folder)) return true;
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(folder, error)) {
    if (recent(entry.path())) return true;
  }
  return false;
}

void look_at_state(const fs::path& device, const GcFlags& flags, const Named& named,
                   Findings& findings) {
  const bool remote = serve::is_remote(device.string());
  const engine::DeviceSources source =
      engine::sources_at({device.string()}, storage::RingKind::kAuto, flags.remote);
  const auto summary = source.front()->summarize();
  if (remote && summary.status().code() == ErrorCode::kNotFound) return;
  const uint64_t bytes = !remote ? bytes_on_drive(device / storage::kStateFileName) +
                                       bytes_on_drive(device / storage::kRowFileName)
                         : summary.ok() ? summary->container_bytes
                                        : 0;
  if (!summary.ok()) {
    findings.kept.push_back({device, bytes, "cannot be read (see smartinf fsck)"});
    return;
  }
  const storage::StoreState& state = summary->state;
  if (!state.initialized && !state.torn) {
    findings.leftovers.push_back({LeftoverKind::kUnfinished, device, bytes, ""});
    return;
  }
  const auto found = engine::find_run(source);
  const StateOwner owner = found ? owner_of(found->client_metadata) : StateOwner{};
  std::string what = fmt::format("run {}, step {}", state.run.to_string().substr(0, kRunDigits),
                                 found ? found->step : state.committed_step);
  const std::string claim = claim_on(device, state.run, owner, named);
  if (claim.empty() && owner.kind == StateOwner::Kind::kPython) what += ", written from Python";
  if (claim.empty() && !owner.folder.empty()) {
    what += fmt::format(", of the run in {}, which {}", owner.folder,
                        remote ? "is not on this machine" : "no longer exists");
  }
  const bool asked_for = flags.states || !flags.runs.empty();
  if (!claim.empty()) {
    findings.kept.push_back({device, bytes, what + ": " + claim});
  } else if (!asked_for) {
    findings.kept.push_back(
        {device, bytes, what + ": a complete state; --states also asks about it"});
  } else {
    findings.leftovers.push_back(
        {LeftoverKind::kState, device, bytes, what, state.run.to_string(), owner.folder});
  }
}

/// Keys and values beside a state, which nobody has open. True: the state was made for them.
bool look_at_cache(const fs::path& device, const GcFlags& flags, Findings& findings) {
  const fs::path file = device / storage::kCacheFileName;
  if (!is_there(file)) return false;
  const auto source = engine::sources_at({device.string()}, storage::RingKind::kAuto);
  const auto summary = source.front()->summarize();
  const auto cache = saved_cache(device.string());
  const std::string what = cache.ok() && cache->file != nullptr
                               ? cache->file->identity().text + ", " + cache_text(*cache)
                               : "nothing that was saved";
  if (flags.caches) {
    findings.leftovers.push_back({LeftoverKind::kCache, device, bytes_on_drive(file), what});
  } else {
    findings.kept.push_back(
        {device, bytes_on_drive(file),
         "keys and values of " + what + "; --caches deletes them, and the job goes on without"});
  }
  return summary.ok() && engine::is_smallest(summary->layout);
}

/// A server shows what its device holds, and no files beside it. Errors: why it does not.
Status look_at_remote(const std::string& url, const GcFlags& flags, const Named& named,
                      Findings& findings) {
  const auto source =
      std::move(engine::sources_at({url}, storage::RingKind::kAuto, flags.remote).front());
  SI_RETURN_IF_ERROR(source->peek().status());
  // Reading needs the device to itself: it is the server that knows whether a client has it.
  const Status busy = source->snapshot(storage::ReaderLock::kTake).status();
  if (busy.code() == ErrorCode::kBusy) {
    findings.kept.push_back({url, 0, busy.what()});
  } else {
    look_at_state(url, flags, named, findings);
  }
  return Status();
}

/// False: it is something else, to be looked through.
bool look_at_partial(const fs::path& folder, Findings& findings) {
  if (!folder.string().ends_with(engine::kPartialSuffix)) return false;
  const uint64_t bytes = bytes_in(folder);
  LeftoverKind kind = LeftoverKind::kPartial;
  engine::PartialFolder state = engine::look_at_partial(folder.string());
  if (state == engine::PartialFolder::kForeign) {
    const train::PartialExport of_export = train::look_at_partial_export(folder.string());
    if (of_export == train::PartialExport::kForeign) {
      findings.kept.push_back({folder, bytes, "holds files that are not smartinf's"});
      return false;
    }
    kind = LeftoverKind::kExport;
    if (of_export == train::PartialExport::kLeftover) state = engine::PartialFolder::kLeftover;
    if (of_export == train::PartialExport::kInUse) state = engine::PartialFolder::kInUse;
  }
  // An export is always locked while it is written; checkpoints of earlier versions were not.
  if (state == engine::PartialFolder::kInUse ||
      (kind == LeftoverKind::kPartial && is_fresh(folder))) {
    findings.kept.push_back({folder, bytes, "was written to within the last ten minutes"});
  } else {
    findings.leftovers.push_back({kind, folder, bytes, ""});
  }
  return true;
}

void look_at(const fs::path& folder, const GcFlags& flags, int depth, const Named& named,
             Findings& findings) {
  if (look_at_partial(folder, findings)) return;
  const bool creating = is_there(folder / storage::kCreatingFileName);
  const bool state = is_there(folder / storage::kStateFileName);
  if (creating || state) {
    if (const Status busy = in_use(folder); !busy.ok()) {
      findings.kept.push_back({folder, bytes_in(folder), busy.what()});
      return;
    }
  }
  if (creating) {
    findings.leftovers.push_back(
        {LeftoverKind::kCreating, folder, bytes_on_drive(folder / storage::kCreatingFileName), ""});
  }
  if (state && !look_at_cache(folder, flags, findings)) {
    look_at_state(folder, flags, named, findings);
  }
  if (depth == kDepthMax) return;
  std::error_code error;
  std::vector<fs::path> below;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.is_directory(error) && !entry.is_symlink(error)) below.push_back(entry.path());
  }
  std::sort(below.begin(), below.end());
  for (const fs::path& each : below) look_at(each, flags, depth + 1, named, findings);
}

/// A server knows only a moment after us that we have read what is there.
Status erase_when_free(csd::DeviceSource& source) {
  Status status = source.erase();
  for (int i = 0; i < 50 && status.code() == ErrorCode::kBusy; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    status = source.erase();
  }
  return status;
}

/// Takes the lock first and looks again: a run may have begun since.
Status remove(const Leftover& leftover, const serve::RemoteOptions& options) {
  const std::string path = leftover.path.string();
  const bool remote = serve::is_remote(path);
  if (leftover.kind == LeftoverKind::kPartial) return engine::remove_partial(path);
  if (leftover.kind == LeftoverKind::kExport) return train::remove_partial_export(path);
  if (leftover.kind == LeftoverKind::kCache) {
    const auto source = engine::sources_at({path}, storage::RingKind::kAuto);
    const auto summary = source.front()->summarize();
    const bool for_it = summary.ok() && engine::is_smallest(summary->layout);
    return for_it ? storage::erase_store(path) : storage::erase_cache(path);
  }
  std::optional<storage::ContainerLock> lock;  // a server's device has its own
  if (!remote) {
    SI_ASSIGN_OR_RETURN(lock, storage::lock_container(path));
  }
  fs::path file = leftover.path / storage::kCreatingFileName;
  if (leftover.kind != LeftoverKind::kCreating) {
    file = leftover.path / storage::kStateFileName;
    const auto source =
        std::move(engine::sources_at({path}, storage::RingKind::kAuto, options).front());
    SI_ASSIGN_OR_RETURN(const auto state, source->peek());
    const bool same = state && (leftover.kind == LeftoverKind::kUnfinished
                                    ? !state->initialized
                                    : state->run.to_string() == leftover.run);
    if (!same) {
      return Status(ErrorCode::kFailedPrecondition,
                    "it has changed since it was listed, and is not deleted", {},
                    base::ErrorPlace{path, {}, {}, 0});
    }
    if (remote) return erase_when_free(*source);
  }
  std::error_code error;
  // Rows of tables go with their state, and before it: without it nobody would find them.
  const bool with_rows = leftover.kind != LeftoverKind::kCreating ||
                         !is_there(leftover.path / storage::kStateFileName);
  for (const std::string_view name : {storage::kRowFileName, storage::kNewRowFileName}) {
    if (with_rows && !error) fs::remove(leftover.path / name, error);
  }
  if (!error) fs::remove(file, error);
  if (!error) return Status();
  return base::errno_status(error.value(), "cannot delete", file.string());
}

bool is_named(const GcFlags& flags, const std::string& run) {
  return std::any_of(flags.runs.begin(), flags.runs.end(),
                     [&](const std::string& name) { return run.starts_with(name); });
}

/// Errors: --delete-run with a run that is not there, or that something speaks of.
Status check_runs(const GcFlags& flags, const Findings& findings) {
  for (const std::string& name : flags.runs) {
    if (name.size() < kRunDigits) {
      return Status(ErrorCode::kInvalidArgument, "--delete-run " + name + " does not name a run",
                    "Give the first eight digits of its id; smartinf inspect shows it.");
    }
    if (std::any_of(findings.leftovers.begin(), findings.leftovers.end(),
                    [&](const Leftover& each) { return each.run.starts_with(name); })) {
      continue;
    }
    for (const Kept& each : findings.kept) {
      if (!each.why.starts_with("run " + name.substr(0, kRunDigits))) continue;
      return Status(ErrorCode::kFailedPrecondition,
                    fmt::format("--delete-run {}: {}: {}", name, each.path.string(), each.why),
                    "If you do not need what names it, delete that first.");
    }
    return Status(ErrorCode::kNotFound, "--delete-run " + name + ": no state of this run was found",
                  "smartinf gc --states lists the states that no folder or recipe names.");
  }
  return Status();
}

std::string answer_to(const std::string& question) {
  std::printf("%s", question.c_str());
  std::fflush(stdout);
  std::string answer;
  std::getline(std::cin, answer);
  return answer;
}

/// A state that is whole is deleted only by its run's name.
bool ask_for_run(const std::vector<Leftover>& leftovers, const std::string& run) {
  std::vector<std::string> devices;
  std::string folder;
  uint64_t bytes = 0;
  for (const Leftover& each : leftovers) {
    if (each.run != run) continue;
    devices.push_back(each.path.string());
    bytes += each.bytes;
    folder = fs::path(each.folder).filename().string();
  }
  const std::string digits = run.substr(0, kRunDigits);
  const std::string answer = answer_to(
      fmt::format("The state of run {} on {} ({}) is complete. To delete it, type the first {} "
                  "digits of its id{}: ",
                  digits, fmt::join(devices, ", "), base::format_bytes(bytes), kRunDigits,
                  folder.empty() ? "" : fmt::format(", or the name of its folder ({})", folder)));
  return answer == digits || (!folder.empty() && answer == folder);
}

/// Which of the leftovers go: as the flags say, or as the user does.
std::vector<Leftover*> choose(Findings& findings, const GcFlags& flags) {
  const bool asking = !flags.json && isatty(STDIN_FILENO) != 0;
  std::vector<Leftover*> doomed;
  std::map<std::string, bool> runs;
  uint64_t bytes = 0;
  bool left = false;
  for (Leftover& each : findings.leftovers) {
    if (each.kind != LeftoverKind::kState) {
      bytes += each.bytes;
      doomed.push_back(&each);
    }
  }
  if (!doomed.empty() && !flags.yes) {
    const std::string answer =
        asking ? answer_to(fmt::format("Delete what was interrupted ({})? [y/N] ",
                                       base::format_bytes(bytes)))
               : "";
    if (answer != "y" && answer != "Y" && answer != "yes") {
      doomed.clear();
      left = true;
    }
  }
  for (Leftover& each : findings.leftovers) {
    if (each.kind != LeftoverKind::kState) continue;
    if (!runs.contains(each.run)) {
      runs[each.run] = is_named(flags, each.run) ||
                       (asking && flags.runs.empty() && ask_for_run(findings.leftovers, each.run));
    }
    if (runs[each.run]) doomed.push_back(&each);
  }
  if (!flags.json && !asking) {
    if (left) std::printf("nothing was deleted; use --yes to delete what was interrupted\n");
    for (const auto& [run, wanted] : runs) {
      if (wanted) continue;
      std::printf(
          "the state of run %s is complete, and was not deleted; use --delete-run %s to delete "
          "it\n",
          run.substr(0, kRunDigits).c_str(), run.substr(0, kRunDigits).c_str());
    }
  }
  return doomed;
}

nlohmann::ordered_json to_json(const Findings& findings) {
  auto leftovers = nlohmann::ordered_json::array();
  for (const Leftover& leftover : findings.leftovers) {
    leftovers.push_back({{"path", leftover.path.string()},
                         {"kind", kind_text(leftover.kind)},
                         {"bytes", leftover.bytes},
                         {"remark", leftover.remark},
                         {"run", leftover.run},
                         {"deleted", leftover.deleted},
                         {"failure", leftover.failure.to_string()}});
  }
  auto kept = nlohmann::ordered_json::array();
  for (const Kept& each : findings.kept) {
    kept.push_back({{"path", each.path.string()}, {"bytes", each.bytes}, {"why", each.why}});
  }
  return {{"leftovers", leftovers}, {"kept", kept}};
}

int run_gc(const GcFlags& flags) {
  Findings findings;
  Named named;
  for (const std::string& place : flags.places) collect_named(place, 0, named);
  for (const std::string& place : flags.places) {
    if (serve::is_remote(place)) {
      const Status looked = look_at_remote(place, flags, named, findings);
      if (!looked.ok()) return report(looked);
      continue;
    }
    std::error_code error;
    if (!fs::is_directory(place, error)) {
      return report(Status(ErrorCode::kInvalidArgument, "not a folder",
                           "Name a folder: runs, a run, a device's directory. To wipe a block "
                           "device use wipefs.",
                           base::ErrorPlace{place, {}, {}, 0}),
                    kExitUsage);
    }
    look_at(place, flags, 0, named, findings);
  }
  if (const Status runs = check_runs(flags, findings); !runs.ok()) {
    return report(runs, runs.code() == ErrorCode::kInvalidArgument ? kExitUsage : kExitFailed);
  }
  if (!flags.json) {
    for (const Kept& each : findings.kept) {
      std::printf("kept      %10s  %s: %s\n", base::format_bytes(each.bytes).c_str(),
                  each.path.c_str(), each.why.c_str());
    }
    for (const Leftover& leftover : findings.leftovers) {
      std::printf("leftover  %10s  %s: %s%s%s\n", base::format_bytes(leftover.bytes).c_str(),
                  leftover.path.c_str(), kind_text(leftover.kind),
                  leftover.remark.empty() ? "" : ", ", leftover.remark.c_str());
    }
    if (findings.leftovers.empty()) std::printf("there is nothing to delete\n");
  }
  bool failed = false;
  const std::vector<Leftover*> doomed = choose(findings, flags);
  uint64_t freed = 0;
  for (Leftover* leftover : doomed) {
    leftover->failure = remove(*leftover, flags.remote);
    leftover->deleted = leftover->failure.ok();
    failed = failed || !leftover->deleted;
    if (leftover->deleted) freed += leftover->bytes;
    if (!leftover->deleted && !flags.json) report(leftover->failure);
  }
  if (!doomed.empty() && !flags.json) {
    std::printf("%s freed\n", base::format_bytes(freed).c_str());
  }
  if (flags.json) {
    std::printf(
        "%s\n",
        to_json(findings).dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  }
  return failed ? kExitFailed : kExitDone;
}

}  // namespace

void add_gc(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("gc", "Delete what interrupted runs have left");
  auto flags = std::make_shared<GcFlags>();
  command->add_option("path", flags->places, "Folders to search, and devices of other machines")
      ->required()
      ->type_name("PATH...");
  command->add_flag(
      "--states", flags->states,
      "Also ask about complete states that no folder of a run, checkpoint or recipe names; "
      "each is deleted only when you enter the id of its run");
  command->add_flag("--caches", flags->caches,
                    "Also keys and values of batch jobs, done or not, that are not running");
  command->add_flag("--yes", flags->yes, "Delete what was interrupted, without asking");
  command
      ->add_option(
          "--delete-run", flags->runs,
          "Delete the complete state of this run without asking, if no folder or recipe names "
          "it; RUN is the first 8 digits of the run's id")
      ->type_name("RUN")
      ->expected(1);
  command->add_flag(
      "--json", flags->json,
      "Print one JSON object, and ask nothing: delete with --yes or --delete-run only");
  add_remote_flags(*command, flags->remote);
  command->footer(
      "The command finds interrupted creations, checkpoints and exports. It never deletes files\n"
      "that a process has locked or that are not smartinf's. A state with a committed step is\n"
      "deleted only if no folder or recipe names it, and if you name its run.\n\n"
      "Examples:\n"
      "  smartinf gc runs /mnt/a /mnt/b\n"
      "  smartinf gc /mnt/a --states\n"
      "  smartinf gc runs grpc://nas:7443/fast0 --states\n"
      "  smartinf gc runs --yes\n"
      "  smartinf gc /mnt/a --delete-run 0a1b2c3d");
  command->callback([flags, &run] { run = [flags] { return run_gc(*flags); }; });
}

}  // namespace smartinf::apps
