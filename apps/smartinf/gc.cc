// `smartinf gc`: what dead runs have left behind: lists it, asks, deletes it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/units.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/erase.h"
#include "smartinf/storage/summary.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/state_places.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Status;
namespace fs = std::filesystem;

/// Folders below the one named that are looked into: runs/ -> a run -> checkpoints -> step ->
/// device.
constexpr int kDepthMax = 5;
/// A checkpoint that is being written is touched more often than this.
constexpr std::chrono::minutes kQuiet{10};

struct GcFlags {
  std::vector<std::string> places;
  bool states = false;
  bool yes = false;
  bool json = false;
};

enum class LeftoverKind : uint8_t {
  kCreating,    // a state that never got its name
  kUnfinished,  // a state that never got its first step
  kPartial,     // a checkpoint that was not completed
  kState,       // a whole state that no run's folder speaks of
};
const char* kind_text(LeftoverKind kind) {
  switch (kind) {
    case LeftoverKind::kCreating:
    case LeftoverKind::kUnfinished:
      return "interrupted creation";
    case LeftoverKind::kPartial:
      return "interrupted checkpoint";
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
  bool deleted = false;
  Status failure;
};

/// What was found and stays, with why.
struct Kept {
  fs::path path;
  uint64_t bytes = 0;
  std::string why;
};

struct Findings {
  std::vector<Leftover> leftovers;
  std::vector<Kept> kept;
};

/// What a file really takes: reserved space counts, holes do not.
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

/// Whether a run's folder, or a checkpoint, is above the device.
bool belongs_to_run(const fs::path& device) {
  fs::path above = fs::absolute(device).lexically_normal();
  for (int i = 0; i < kDepthMax && above.has_relative_path(); ++i) {
    if (is_run_folder(above.string()) || engine::is_checkpoint(above.string())) return true;
    above = above.parent_path();
  }
  return false;
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

void look_at_state(const fs::path& device, const GcFlags& flags, Findings& findings) {
  const fs::path file = device / storage::kStateFileName;
  const uint64_t bytes = bytes_on_drive(file);
  const auto summary = storage::summarize(device.string());
  if (!summary.ok()) {
    findings.kept.push_back({device, bytes, "cannot be read (see smartinf fsck)"});
    return;
  }
  const storage::StoreState& state = summary->state;
  if (!state.initialized && !state.torn) {
    findings.leftovers.push_back({LeftoverKind::kUnfinished, device, bytes, "", false, Status()});
    return;
  }
  const std::string what =
      fmt::format("run {}, step {}", state.run.to_string().substr(0, 8), state.committed_step);
  if (belongs_to_run(device)) {
    findings.kept.push_back({device, bytes, what + ": belongs to the run or checkpoint around it"});
  } else if (!flags.states) {
    findings.kept.push_back({device, bytes, what + ": a whole state; --states offers it, too"});
  } else {
    findings.leftovers.push_back({LeftoverKind::kState, device, bytes, what, false, Status()});
  }
}

void look_at(const fs::path& folder, const GcFlags& flags, int depth, Findings& findings) {
  if (folder.string().ends_with(engine::kPartialSuffix) &&
      folder.filename().string().starts_with("step-")) {
    const uint64_t bytes = bytes_in(folder);
    if (is_fresh(folder)) {
      findings.kept.push_back({folder, bytes, "a checkpoint that may be being written just now"});
    } else {
      findings.leftovers.push_back({LeftoverKind::kPartial, folder, bytes, "", false, Status()});
    }
    return;
  }
  const bool creating = is_there(folder / storage::kCreatingFileName);
  const bool state = is_there(folder / storage::kStateFileName);
  if (creating || state) {
    if (const Status busy = in_use(folder); !busy.ok()) {
      findings.kept.push_back({folder, bytes_in(folder), busy.what()});
      return;
    }
  }
  if (creating) {
    findings.leftovers.push_back({LeftoverKind::kCreating, folder,
                                  bytes_on_drive(folder / storage::kCreatingFileName), "", false,
                                  Status()});
  }
  if (state) look_at_state(folder, flags, findings);
  if (depth == kDepthMax) return;
  std::error_code error;
  std::vector<fs::path> below;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.is_directory(error) && !entry.is_symlink(error)) below.push_back(entry.path());
  }
  std::sort(below.begin(), below.end());
  for (const fs::path& each : below) look_at(each, flags, depth + 1, findings);
}

/// Takes the lock first and looks again: a run may have begun since.
Status remove(const Leftover& leftover) {
  std::error_code error;
  if (leftover.kind == LeftoverKind::kPartial) {
    fs::remove_all(leftover.path, error);
    if (!error) return Status();
    return base::errno_status(error.value(), "cannot delete", leftover.path.string());
  }
  if (leftover.kind == LeftoverKind::kState) return storage::erase_store(leftover.path.string());
  SI_ASSIGN_OR_RETURN(const auto lock, storage::lock_container(leftover.path.string()));
  fs::path file = leftover.path / storage::kCreatingFileName;
  if (leftover.kind == LeftoverKind::kUnfinished) {
    file = leftover.path / storage::kStateFileName;
    SI_ASSIGN_OR_RETURN(const auto state, storage::Store::peek(leftover.path.string()));
    if (state.initialized) {
      return Status(ErrorCode::kFailedPrecondition, "it has been completed since: left alone");
    }
  }
  fs::remove(file, error);
  if (!error) return Status();
  return base::errno_status(error.value(), "cannot delete", file.string());
}

bool ask(uint64_t bytes) {
  if (isatty(STDIN_FILENO) == 0) {
    std::printf("nothing was deleted; --yes does it\n");
    return false;
  }
  std::printf("Delete them (%s)? [y/N] ", base::format_bytes(bytes).c_str());
  std::fflush(stdout);
  std::string answer;
  std::getline(std::cin, answer);
  return answer == "y" || answer == "Y" || answer == "yes";
}

nlohmann::ordered_json to_json(const Findings& findings) {
  auto leftovers = nlohmann::ordered_json::array();
  for (const Leftover& leftover : findings.leftovers) {
    leftovers.push_back({{"path", leftover.path.string()},
                         {"kind", kind_text(leftover.kind)},
                         {"bytes", leftover.bytes},
                         {"remark", leftover.remark},
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
  for (const std::string& place : flags.places) {
    std::error_code error;
    if (!fs::is_directory(place, error)) {
      return report(Status(ErrorCode::kInvalidArgument, "not a folder",
                           "Name a folder: runs, a run, a device's directory. A block device is "
                           "wiped with wipefs.",
                           base::ErrorPlace{place, {}, {}, 0}),
                    kExitUsage);
    }
    look_at(place, flags, 0, findings);
  }
  uint64_t bytes = 0;
  for (const Leftover& leftover : findings.leftovers) bytes += leftover.bytes;
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
    if (findings.leftovers.empty()) std::printf("nothing to clean up\n");
  }
  bool failed = false;
  if (!findings.leftovers.empty() && (flags.yes || (!flags.json && ask(bytes)))) {
    uint64_t freed = 0;
    for (Leftover& leftover : findings.leftovers) {
      leftover.failure = remove(leftover);
      leftover.deleted = leftover.failure.ok();
      failed = failed || !leftover.deleted;
      if (leftover.deleted) freed += leftover.bytes;
      if (!leftover.deleted && !flags.json) report(leftover.failure);
    }
    if (!flags.json) std::printf("%s freed\n", base::format_bytes(freed).c_str());
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
  CLI::App* command = app.add_subcommand("gc", "Clean up what dead runs have left behind");
  auto flags = std::make_shared<GcFlags>();
  command->add_option("path", flags->places, "Folders to look through")
      ->required()
      ->type_name("PATH...");
  command->add_flag("--states", flags->states,
                    "Offer whole states, too, that are neither in a run's folder nor in a "
                    "checkpoint");
  command->add_flag("--yes", flags->yes, "Delete without asking");
  command->add_flag("--json", flags->json, "Print one JSON object; deletes with --yes only");
  command->footer(
      "Finds creations and checkpoints that were interrupted. What a process uses is left alone,\n"
      "and so is a state with a committed step, unless --states asks for it.\n\n"
      "Examples:\n"
      "  smartinf gc runs /mnt/a /mnt/b\n"
      "  smartinf gc /mnt/a --states\n"
      "  smartinf gc runs --yes");
  command->callback([flags, &run] { run = [flags] { return run_gc(*flags); }; });
}

}  // namespace smartinf::apps
