#include "smartinf/engine/checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/file_descriptor.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;
namespace fs = std::filesystem;

namespace {

/// Devices of a description at most; more is damage, and no reason to take memory.
constexpr uint64_t kDevicesMax = 65536;
/// Bytes of its text at most. What Python keeps of a model is some hundred bytes for each
/// parameter.
constexpr uint64_t kDescriptionBytesMax = uint64_t{64} << 20;

Status sync_path(const std::string& path, int flags) {
  const storage::FileDescriptor file(::open(path.c_str(), flags | O_CLOEXEC));
  if (!file.is_open() || ::fsync(file.get()) != 0) {
    return base::errno_status(errno, "cannot make the checkpoint durable", path);
  }
  return Status();
}

Status make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) == 0) return Status();
  return base::errno_status(errno, "cannot make the checkpoint's folder", path);
}

/// The writers of a checkpoint: this process, or several ranks, each the devices that it has. The
/// first one makes its folder and its description.
class Writers {
 public:
  explicit Writers(Collectives* ranks) : ranks_(ranks) {}

  bool first() const { return ranks_ == nullptr || ranks_->rank() == 0; }
  /// The first failure of any. A rank may have a larger share of the state than the others.
  Status all(const Status& mine) const {
    if (ranks_ == nullptr) return mine;
    SI_RETURN_IF_ERROR(ranks_->barrier_without_timeout());
    return all_ok(*ranks_, Channel::kControl, "checkpoint", mine);
  }
  /// The first one's, on all of them.
  Status tell(std::string& text) const {
    return ranks_ == nullptr ? Status() : broadcast(*ranks_, Channel::kControl, text, 0);
  }
  /// The sum over all of them.
  Result<uint64_t> sum(uint64_t mine) const {
    if (ranks_ == nullptr) return mine;
    SI_ASSIGN_OR_RETURN(const std::vector<uint64_t> each,
                        all_gather_values<uint64_t>(*ranks_, Channel::kControl, {&mine, 1}));
    return std::accumulate(each.begin(), each.end(), uint64_t{0});
  }

 private:
  Collectives* ranks_;  // null: there is one process
};

/// False when any of the devices here cannot be cloned; what was made is left to the caller.
Result<bool> clone_devices(const StoredRun& run, const fs::path& partial) {
  uint64_t shared_bytes = 0;
  for (size_t device = 0; device < run.devices.size(); ++device) {
    if (run.devices[device]->elsewhere()) continue;
    const std::string folder = device_folder(partial.string(), device);
    SI_RETURN_IF_ERROR(make_folder(folder));
    SI_ASSIGN_OR_RETURN(const uint64_t bytes, run.devices[device]->clone_to(folder));
    if (bytes == 0) return false;
    shared_bytes += bytes;
  }
  // A shared block that the run overwrites takes space anew: a step must not be the first to notice
  // that there is none.
  std::error_code error;
  const uint64_t free_bytes = fs::space(partial, error).available;
  if (!error && free_bytes < shared_bytes) {
    return Status(
        ErrorCode::kNoSpace,
        fmt::format("the checkpoint shares {} with the run, which takes as much again when "
                    "it goes on, and {} are free",
                    base::format_bytes(shared_bytes), base::format_bytes(free_bytes)),
        "Free space there, or keep checkpoints on another file system.",
        base::ErrorPlace{partial.string(), {}, {}, 0});
  }
  return true;
}

Status copy_devices(StoredRun& run, const fs::path& partial, const CheckpointOptions& options,
                    CheckpointSummary& summary) {
  std::vector<std::string> targets;
  for (size_t device = 0; device < run.devices.size(); ++device) {
    targets.push_back(device_folder(partial.string(), device));
  }
  ReshardOptions copy;
  copy.format = run.layout().format;
  copy.memory_budget_bytes = options.memory_budget_bytes;
  copy.scratch_memory = options.scratch_memory;
  // Never overwritten, so one slot will do; it is synced below.
  copy.durability = storage::Durability::kNone;
  copy.keep_run = true;
  copy.keep_places = std::any_of(run.devices.begin(), run.devices.end(),
                                 [](const auto& device) { return device->elsewhere(); }) ||
                     (run.tables != nullptr && !run.tables->whole());
  copy.names = run.description.devices;
  copy.progress = options.progress;
  SI_ASSIGN_OR_RETURN(const ReshardSummary copied,
                      reshard(run, sources_at(targets, options.ring), copy));
  summary.blocks_without_checksum = copied.blocks_without_checksum;
  return Status();
}

/// Checksum of all other members, whatever their order and the spaces between them.
std::string description_checksum(nlohmann::json others) {
  others.erase("checksum");
  const std::string text = others.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return fmt::format("{:016x}", base::checksum(std::as_bytes(std::span(text)), 0));
}

/// The description lies in a file that is complete before anything counts on it: the folder still
/// has another name.
Status write_description(nlohmann::ordered_json json, const std::string& folder) {
  json["created_seconds"] = std::time(nullptr);
  json["checksum"] = description_checksum(json);
  const std::string path = (fs::path(folder) / kCheckpointFile).string();
  const std::string text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() >= kDescriptionBytesMax) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("the checkpoint's description would take {}, and at most {} are read "
                    "again",
                    base::format_bytes(text.size()), base::format_bytes(kDescriptionBytesMax)),
        "Keep less with it.", base::ErrorPlace{folder, {}, {}, 0});
  }
  std::ofstream out(path);
  out << text << "\n";
  out.close();
  if (!out) return base::errno_status(errno, "cannot write the checkpoint's description", path);
  SI_RETURN_IF_ERROR(sync_path(path, O_RDONLY));
  return sync_path(folder, O_RDONLY | O_DIRECTORY);
}

nlohmann::ordered_json describe(const StoredRun& run, const CheckpointSummary& summary,
                                const std::string& trainer) {
  return {{"run", run.layout().run.to_string()},
          {"step", run.step},
          {"devices", run.devices.size()},
          {"device_names", run.description.devices},
          {"state_format", base::state_format_name(run.layout().format)},
          {"rule", kernels::update_rule_name(run.description.rule)},
          {"parameters", run.description.space.count()},
          {"state_bytes", summary.state_bytes},
          {"cloned", summary.cloned},
          {"trainer", trainer}};
}

/// Copies this process's devices, without a clone.
Status copy_and_sync(StoredRun& run, const fs::path& partial, const CheckpointOptions& options,
                     CheckpointSummary& summary) {
  std::error_code error;
  for (size_t device = 0; !summary.cloned && device < run.devices.size(); ++device) {
    if (run.devices[device]->elsewhere()) continue;
    fs::remove_all(device_folder(partial.string(), device), error);
  }
  if (!summary.cloned) SI_RETURN_IF_ERROR(copy_devices(run, partial, options, summary));
  for (size_t device = 0; device < run.devices.size(); ++device) {
    if (run.devices[device]->elsewhere()) continue;
    const fs::path folder = device_folder(partial.string(), device);
    fs::remove(folder / storage::kLockFileName, error);
    for (const std::string_view name : {storage::kStateFileName, storage::kRowFileName}) {
      const fs::path file = folder / name;
      if (name == storage::kRowFileName && !fs::exists(file, error)) continue;
      SI_RETURN_IF_ERROR(sync_path(file.string(), O_RDONLY));
    }
    SI_RETURN_IF_ERROR(sync_path(folder.string(), O_RDONLY | O_DIRECTORY));
  }
  return Status();
}

Status write_into(StoredRun& run, const fs::path& partial, const CheckpointOptions& options,
                  const Writers& writers, CheckpointSummary& summary) {
  const Result<bool> cloned = clone_devices(run, partial);
  SI_RETURN_IF_ERROR(writers.all(cloned.status()));
  SI_ASSIGN_OR_RETURN(const uint64_t not_cloned, writers.sum(*cloned ? 0 : 1));
  summary.cloned = not_cloned == 0;
  SI_RETURN_IF_ERROR(writers.all(copy_and_sync(run, partial, options, summary)));
  SI_ASSIGN_OR_RETURN(summary.blocks_without_checksum,
                      writers.sum(summary.blocks_without_checksum));
  if (!writers.first()) return Status();
  return write_description(describe(run, summary, options.trainer), partial.string());
}

void remove_older(const storage::RunId& run, const CheckpointOptions& options,
                  CheckpointSummary& summary) {
  if (options.keep == 0) return;
  std::vector<Checkpoint> ours = list_checkpoints(options.folder);
  std::erase_if(ours, [&](const Checkpoint& other) { return !(other.run == run); });
  // Never the one just written, even when a step was gone back to.
  std::erase_if(ours, [&](const Checkpoint& other) { return other.path == summary.path; });
  for (size_t i = 0; i + options.keep - 1 < ours.size(); ++i) {
    if (const Status gone = remove_checkpoint(ours[i].path, run); !gone.ok()) {
      base::log(base::LogLevel::kWarning,
                fmt::format("an old checkpoint cannot be deleted: {}", gone.to_string()));
      continue;
    }
    summary.removed.push_back(ours[i].path);
  }
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

/// Where the run's checkpoint of this step goes. True: it is there already.
Result<bool> choose_name(const StoredRun& run, const std::string& folder, std::string& path) {
  path = (fs::path(folder) / fmt::format("step-{:08}", run.step)).string();
  if (!fs::exists(path)) return false;
  Result<Checkpoint> there = read_checkpoint(path);
  // A restored run comes to the steps of the one before it again: both have their checkpoints.
  if (!there.ok() || !(there->run == run.layout().run)) {
    path += "-" + run.layout().run.to_string().substr(0, 8);
    if (!fs::exists(path)) return false;
    there = read_checkpoint(path);
    if (!there.ok()) return std::move(there).status();
  }
  if (there->run == run.layout().run && there->step == run.step) return true;
  return Status(ErrorCode::kAlreadyExists, "the folder holds a checkpoint of another run",
                "Name another folder.",
                base::ErrorPlace{path, {}, {}, 0});
}

}  // namespace

namespace {

/// The folder and the name, which the first of the writers sees to.
class CheckpointPlace {
 public:
  CheckpointPlace(const StoredRun& run, const CheckpointOptions& options,
                  CheckpointSummary& summary)
      : run_(run),
        options_(options),
        summary_(summary),
        named_(!options.path.empty()),
        path_(without_slash(options.path)) {}

  Status begin() {
    const std::string folder = named_ ? parent_folder(path_) : options_.folder;
    SI_RETURN_IF_ERROR(make_durable_folder(folder));
    SI_ASSIGN_OR_RETURN(const storage::FileDescriptor locked, lock());
    SI_RETURN_IF_ERROR(choose());
    if (summary_.existed) return Status();
    SI_ASSIGN_OR_RETURN(PartialCheckpoint partial,
                        PartialCheckpoint::begin(summary_.path, run_.layout().run, !named_));
    partial_.emplace(std::move(partial));
    return Status();
  }
  std::string partial_folder() const { return partial_ ? partial_->folder() : std::string(); }
  /// All of it is written.
  Status finish() {
    SI_ASSIGN_OR_RETURN(const storage::FileDescriptor locked, lock());
    SI_RETURN_IF_ERROR(choose());
    if (summary_.existed) return Status();
    SI_RETURN_IF_ERROR(partial_->name(summary_.path, options_.replace));
    if (!named_) remove_older(run_.layout().run, options_, summary_);
    return Status();
  }

 private:
  Status choose() {
    if (!named_) {
      SI_ASSIGN_OR_RETURN(summary_.existed, choose_name(run_, options_.folder, summary_.path));
      return Status();
    }
    summary_.path = path_;
    return check_place(summary_.path, options_.replace);
  }
  /// Locks the folder of checkpoints: who finds a name free takes it, and nobody else looks in
  /// between. A path that was given needs no such care, and copying neither: until it has its name
  /// a checkpoint is its process's own.
  Result<storage::FileDescriptor> lock() const {
    if (named_) return storage::FileDescriptor();
    return lock_checkpoints(options_.folder);
  }

  const StoredRun& run_;
  const CheckpointOptions& options_;
  CheckpointSummary& summary_;
  const bool named_;
  const std::string path_;
  std::optional<PartialCheckpoint> partial_;
};

/// Several ranks write into one folder, wherever they run.
Status check_seen(const std::string& folder) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return Status();
  return Status(ErrorCode::kNotFound, "the folder of the checkpoint is not to be seen here",
                "Name one that all ranks see, on a file system that their machines share.",
                base::ErrorPlace{folder, {}, {}, 0});
}

Result<CheckpointSummary> write_checkpoint(StoredRun& run, const CheckpointOptions& options,
                                           const Writers& writers) {
  CheckpointSummary summary;
  summary.step = run.step;
  summary.state_bytes = run.state_bytes();
  CheckpointPlace place(run, options, summary);
  SI_RETURN_IF_ERROR(writers.all(writers.first() ? place.begin() : Status()));
  std::string partial = place.partial_folder();
  SI_RETURN_IF_ERROR(writers.tell(partial));
  std::string existed = partial.empty() ? "yes" : "";
  if (existed.empty()) {
    SI_RETURN_IF_ERROR(writers.all(check_seen(partial)));
    SI_RETURN_IF_ERROR(writers.all(write_into(run, partial, options, writers, summary)));
    SI_RETURN_IF_ERROR(writers.all(writers.first() ? place.finish() : Status()));
    existed = summary.existed ? "yes" : "";
    SI_RETURN_IF_ERROR(writers.tell(existed));
  }
  SI_RETURN_IF_ERROR(writers.tell(summary.path));
  summary.existed = !existed.empty();
  return summary;
}

}  // namespace

Result<CheckpointSummary> write_checkpoint(StoredRun& run, const CheckpointOptions& options) {
  return write_checkpoint(run, options, Writers(nullptr));
}

Result<RanksCheckpoint> RanksCheckpoint::begin(const std::string& given, bool replace,
                                               const storage::RunId& run) {
  const std::string path = without_slash(given);
  const std::string folder = parent_folder(path);
  SI_RETURN_IF_ERROR(make_durable_folder(folder));
  SI_RETURN_IF_ERROR(check_place(path, replace));
  SI_ASSIGN_OR_RETURN(PartialCheckpoint partial, PartialCheckpoint::begin(path, run, false));
  return RanksCheckpoint(std::move(partial), path, replace);
}

Status RanksCheckpoint::finish(size_t ranks, const std::string& trainer) {
  nlohmann::ordered_json json{{"trainer", trainer}};
  for (size_t rank = 0; rank < ranks; ++rank) {
    SI_ASSIGN_OR_RETURN(const Checkpoint part, read_checkpoint(rank_folder(folder(), rank)));
    json["ranks"].push_back({{"run", part.run.to_string()}, {"step", part.step}});
  }
  SI_RETURN_IF_ERROR(write_description(std::move(json), folder()));
  return partial_.name(path_, replace_);
}

Result<CheckpointSummary> write_checkpoint(Updater& updater, CheckpointOptions options) {
  SI_ASSIGN_OR_RETURN(StoredRun run, updater.snapshot());
  options.scratch_memory = updater.scratch_memory();
  return write_checkpoint(run, options, Writers(updater.collectives().get()));
}

Status check_checkpoint_folder(const std::string& folder) {
  SI_RETURN_IF_ERROR(make_durable_folder(folder));
  // Not access(): that says nothing of a file system that is mounted read-only or over its quota.
  const std::string probe = (fs::path(folder) / fmt::format("probe{}", kPartialSuffix)).string();
  const storage::FileDescriptor made(::open(probe.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!made.is_open() || ::unlink(probe.c_str()) != 0) {
    return base::errno_status(errno, "checkpoints cannot be written here", folder, {}, {},
                              "Name a folder that can be written to.");
  }
  return Status();
}

bool is_checkpoint(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(fs::path(path) / kCheckpointFile, error) &&
         !path.ends_with(kPartialSuffix);
}

namespace {

bool read_run_and_step(const nlohmann::json& json, Checkpoint& out) {
  if (!json.is_object() || !json.contains("run") || !json["run"].is_string() ||
      !json.contains("step") || !json["step"].is_number_unsigned()) {
    return false;
  }
  out.step = json["step"].get<uint64_t>();
  const auto digits = json["run"].get<std::string>();
  if (digits.size() != 2 * out.run.bytes.size() ||
      digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return false;
  }
  for (size_t i = 0; i < out.run.bytes.size(); ++i) {
    out.run.bytes[i] = static_cast<uint8_t>(std::stoi(digits.substr(2 * i, 2), nullptr, 16));
  }
  return true;
}

Status not_together(const std::string& path, std::string what) {
  return Status(ErrorCode::kMismatch, "the checkpoint was put together from others: " + what,
                "Use another checkpoint.", base::ErrorPlace{path, {}, {}, 0});
}

/// Reads what the description says of each of several ranks, and each one's own.
Status read_ranks(const nlohmann::json& ranks, Checkpoint& checkpoint) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    Checkpoint said;
    if (!read_run_and_step(ranks[rank], said)) {
      return Status(ErrorCode::kCorrupt, "the checkpoint's description names no run of a rank",
                    "Use another checkpoint.", base::ErrorPlace{checkpoint.path, {}, {}, 0});
    }
    SI_ASSIGN_OR_RETURN(Checkpoint part, read_checkpoint(rank_folder(checkpoint.path, rank)));
    if (!(part.run == said.run) || part.step != said.step || !part.ranks.empty()) {
      return not_together(part.path, fmt::format("it is of step {} of run {}, and step {} of run "
                                                 "{} belongs here",
                                                 part.step, part.run.to_string().substr(0, 8),
                                                 said.step, said.run.to_string().substr(0, 8)));
    }
    checkpoint.ranks.push_back(std::move(part));
  }
  checkpoint.step = checkpoint.ranks.front().step;
  return Status();
}

}  // namespace

Result<Checkpoint> read_checkpoint(const std::string& path) {
  const std::string file = (fs::path(path) / kCheckpointFile).string();
  const Result<std::string> text =
      base::read_text_file(file, "cannot read the checkpoint's description", kDescriptionBytesMax);
  if (text.status().code() == ErrorCode::kNotFound) {
    return Status(ErrorCode::kNotFound, "no checkpoint is here",
                  is_checkpoint(path + std::string(kReplacedSuffix))
                      ? "It was being replaced; the one before it is beside it, and whole: " +
                            path + std::string(kReplacedSuffix)
                      : "Name its folder, e.g. runs/mine/checkpoints/step-00000100.",
                  base::ErrorPlace{path, {}, {}, 0});
  }
  SI_RETURN_IF_ERROR(text.status());
  const nlohmann::json json = base::parse_json(*text);
  const auto corrupt = [&] {
    return Status(ErrorCode::kCorrupt, "the checkpoint's description cannot be read",
                  "Its devices may be whole: name them one by one (device-0, device-1, ...).",
                  base::ErrorPlace{file, {}, {}, 0});
  };
  // Descriptions of the first versions have no checksum.
  if (!json.is_object() ||
      (json.contains("checksum") && json["checksum"] != description_checksum(json))) {
    return corrupt();
  }
  Checkpoint checkpoint;
  checkpoint.path = path;
  if (const auto created = json.find("created_seconds"); created != json.end()) {
    if (!created->is_number_unsigned()) return corrupt();
    checkpoint.created_seconds = created->get<uint64_t>();
  }
  if (const auto trainer = json.find("trainer"); trainer != json.end()) {
    if (!trainer->is_string()) return corrupt();
    checkpoint.trainer = trainer->get<std::string>();
  }
  if (json.contains("ranks")) {
    const nlohmann::json& ranks = json["ranks"];
    if (!ranks.is_array() || ranks.empty() || ranks.size() > kDevicesMax) return corrupt();
    SI_RETURN_IF_ERROR(read_ranks(ranks, checkpoint));
    return checkpoint;
  }
  if (!read_run_and_step(json, checkpoint) || !json.contains("devices") ||
      !json["devices"].is_number_unsigned() || json["devices"].get<uint64_t>() == 0 ||
      json["devices"].get<uint64_t>() > kDevicesMax) {
    return corrupt();
  }
  for (size_t device = 0; device < json["devices"].get<uint64_t>(); ++device) {
    checkpoint.devices.push_back(device_folder(path, device));
  }
  return checkpoint;
}

Status check_devices(const Checkpoint& checkpoint) {
  std::vector<storage::StoreState> states;
  const DeviceSources sources = sources_at(checkpoint.devices);
  for (size_t device = 0; device < sources.size(); ++device) {
    const std::string& path = checkpoint.devices[device];
    const auto found = sources[device]->peek();
    if (!found.ok() || !*found || !(*found)->initialized) continue;
    const std::optional<storage::StoreState>& state = *found;
    if (!(state->run == checkpoint.run)) {
      return not_together(path, fmt::format("the device is of run {}, and the description of run "
                                            "{}",
                                            state->run.to_string().substr(0, 8),
                                            checkpoint.run.to_string().substr(0, 8)));
    }
    if (state->device_index != device || state->device_count != checkpoint.devices.size()) {
      return not_together(path, fmt::format("the device is number {} of {}, and number {} of {} "
                                            "belongs here",
                                            state->device_index, state->device_count, device,
                                            checkpoint.devices.size()));
    }
    if (state->committed_step != checkpoint.step && state->prepared_step != checkpoint.step) {
      return not_together(path, fmt::format("the device holds step {}, and the description is of "
                                            "step {}",
                                            state->committed_step, checkpoint.step));
    }
    states.push_back(*state);
  }
  if (states.size() != checkpoint.devices.size()) return Status();
  const Result<base::StepNumber> step = storage::recovery_step(states);
  if (step.ok() && *step == checkpoint.step) return Status();
  return not_together(checkpoint.path,
                      step.ok() ? fmt::format("the devices hold step {}, and the description is of "
                                              "step {}",
                                              *step, checkpoint.step)
                                : step.status().what());
}

Result<StoredRun> open_checkpoint(const Checkpoint& checkpoint) {
  SI_RETURN_IF_ERROR(check_one_rank(checkpoint));
  SI_RETURN_IF_ERROR(check_devices(checkpoint));
  return open_stored_run(sources_at(checkpoint.devices), storage::ReaderLock::kLeave);
}

Status check_one_rank(const Checkpoint& checkpoint) {
  if (checkpoint.ranks.empty()) return Status();
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("a checkpoint that {} ranks have written together", checkpoint.ranks.size()),
      fmt::format("Name one rank's part ({}, ...), or load all of it from Python "
                  "(load_checkpoint).",
                  checkpoint.ranks.front().path),
      base::ErrorPlace{checkpoint.path, {}, {}, 0});
}

Status refuse_checkpoint_device(const std::string& device) {
  std::error_code error;
  fs::path absolute = fs::weakly_canonical(device, error);
  if (error || !is_checkpoint(absolute.parent_path().string())) return Status();
  return Status(ErrorCode::kFailedPrecondition, "this device is part of a checkpoint",
                fmt::format("Training would change it. Bring it back onto other devices: smartinf "
                            "restore {} --device DIR",
                            absolute.parent_path().string()),
                base::ErrorPlace{device, {}, {}, 0});
}

std::vector<Checkpoint> list_checkpoints(const std::string& folder) {
  std::vector<Checkpoint> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (!is_checkpoint(entry.path().string())) continue;
    if (auto checkpoint = read_checkpoint(entry.path().string()); checkpoint.ok()) {
      found.push_back(std::move(*checkpoint));
    }
  }
  std::sort(found.begin(), found.end(),
            [](const Checkpoint& a, const Checkpoint& b) { return a.step < b.step; });
  return found;
}

}  // namespace smartinf::engine
