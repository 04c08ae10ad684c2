#include "smartinf/train/run_choice.h"

#include <filesystem>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "smartinf/train/position.h"
#include "smartinf/train/run_folder.h"

namespace smartinf::train {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
namespace fs = std::filesystem;

constexpr size_t kDigits = 8;  // of a run's id, in messages and flags

bool same_folder(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::weakly_canonical(a, error) == fs::weakly_canonical(b, error);
}

std::string digits(const engine::FoundRun& found) {
  return found.run.to_string().substr(0, kDigits);
}

/// "d/a and d/b hold run 0a1b2c3d at step 14".
std::string describe(const engine::FoundRun& found, const std::vector<std::string>& devices) {
  return fmt::format("{} hold{} run {} at step {}", fmt::join(devices, ", "),
                     devices.size() == 1 ? "s" : "", digits(found), found.step);
}

/// "; that run's folder is runs/own".
std::string whereabouts(const std::string& from) {
  if (from.empty()) return {};
  std::error_code error;
  const bool there = fs::is_directory(from, error);
  return fmt::format("; that run's folder {} {}", there ? "is" : "was", from);
}

std::string ways_out(const engine::FoundRun& found, const std::string& from) {
  std::error_code error;
  const bool there = !from.empty() && fs::is_directory(from, error);
  return fmt::format(
      "{}ake it over into this folder (--take-over {}), or discard it and start a new run "
      "(--start-over {}), or name other devices",
      there ? fmt::format("Go on with it where it is (--train.run {}), t", from) : "T",
      digits(found), digits(found));
}

/// Errors: another run than the one that was named is there.
Status check_name(const std::string& flag, const std::string& name,
                  const std::optional<engine::FoundRun>& found,
                  const std::vector<std::string>& devices) {
  if (name.size() < kDigits) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("--{} {} does not name a run", flag, name),
                  "Give the first eight digits of its id; smartinf inspect shows it");
  }
  if (!found) {
    return Status(ErrorCode::kNotFound,
                  fmt::format("--{} {}: {} hold{} no state", flag, name, fmt::join(devices, ", "),
                              devices.size() == 1 ? "s" : ""),
                  "Leave the flag out, or name the devices of the run");
  }
  if (found->run.to_string().starts_with(name)) return Status();
  return Status(ErrorCode::kMismatch,
                fmt::format("--{} {}: {}", flag, name, describe(*found, devices)),
                "Name that run, or leave the flag out");
}

}  // namespace

Result<RunStart> choose_run(const std::string& folder, const std::vector<std::string>& devices,
                            std::optional<engine::FoundRun> on_devices, const RunChoice& choice) {
  RunStart start;
  start.found = std::move(on_devices);
  if (!choice.start_over.empty()) {
    SI_RETURN_IF_ERROR(check_name("start-over", choice.start_over, start.found, devices));
    start.discard = true;
    return start;
  }
  if (!choice.take_over.empty()) {
    SI_RETURN_IF_ERROR(check_name("take-over", choice.take_over, start.found, devices));
  }
  if (!start.found) return start;
  const engine::FoundRun& found = *start.found;
  // A state that this trainer cannot go on with is reported when it is opened.
  if (const auto position = Position::from_json(found.client_metadata); position.ok()) {
    start.from = position->folder;
  }
  SI_ASSIGN_OR_RETURN(const std::optional<RunRecord> record, read_run_record(folder));
  const base::StepNumber logged = logged_step(folder);
  const bool here = !start.from.empty() && same_folder(start.from, folder);
  if (record && record->run == found.run.to_string()) {
    if (logged >= found.step || here || start.from.empty()) return start;
    // Lines may be missing for want of room on the disk, and a folder may be moved; but where
    // another folder has this run as well, it is the other's log that has the steps.
    const auto other = read_run_record(start.from);
    if (!other.ok() || !*other || (*other)->run != record->run) return start;
    if (choice.take_over.empty()) {
      return Status(ErrorCode::kMismatch,
                    fmt::format("train.run: {} ends at step {}, but {}: that run was resumed in {}",
                                folder, logged, describe(found, devices), start.from),
                    ways_out(found, start.from));
    }
  }
  if (!choice.take_over.empty()) {
    start.taken_over = true;
    // A restored state comes back to the folder whose checkpoint it was.
    start.own_log = here && logged >= found.step;
    return start;
  }
  if (record) {
    return Status(ErrorCode::kMismatch,
                  fmt::format("train.run: {} is the folder of run {}, but {}{}", folder,
                              record->run.substr(0, kDigits), describe(found, devices),
                              whereabouts(start.from)),
                  ways_out(found, here ? "" : start.from));
  }
  // A folder of a version that kept no record is known by its log: the last line is of the step
  // that the devices hold, or of the one after it, whose commit was lost.
  const bool fits = logged > 0 && (logged == found.step || logged == found.step + 1);
  if (fits && (start.from.empty() || here)) return start;
  const std::string log =
      logged == 0 ? "has trained nothing" : fmt::format("has trained {} steps", logged);
  return Status(ErrorCode::kMismatch,
                fmt::format("train.run: {} {}, but {}{}", folder, log, describe(found, devices),
                            whereabouts(start.from)),
                ways_out(found, here ? "" : start.from));
}

}  // namespace smartinf::train
