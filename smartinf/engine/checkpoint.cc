#include "smartinf/engine/checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <span>
#include <sstream>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <nlohmann/json.hpp>
#include <sys/ioctl.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/file_descriptor.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;
namespace fs = std::filesystem;

namespace {

std::string device_folder(const fs::path& checkpoint, size_t device) {
  return (checkpoint / fmt::format("device-{}", device)).string();
}

Status sync_path(const std::string& path, int flags) {
  const storage::FileDescriptor file(::open(path.c_str(), flags | O_CLOEXEC));
  if (!file.is_open() || ::fsync(file.get()) != 0) {
    return base::errno_status(errno, "cannot make the checkpoint durable", path);
  }
  return Status();
}

Status make_folder(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error) return Status();
  return base::errno_status(error.value(), "cannot make the checkpoint's folder", path.string(), {},
                            {}, "Name a folder that can be written to.");
}

/// Lets `to` share the blocks of an open file. False: this file system cannot, or not between these
/// two.
Result<bool> clone_file(int from, const std::string& to) {
  const storage::FileDescriptor made(
      ::open(to.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!made.is_open()) return base::errno_status(errno, "cannot make the checkpoint's file", to);
  // btrfs shares blocks only between files that agree on copy-on-write, which stores have off.
  int flags = 0;
  if (::ioctl(from, FS_IOC_GETFLAGS, &flags) == 0 && (flags & FS_NOCOW_FL) != 0) {
    int own = 0;
    if (::ioctl(made.get(), FS_IOC_GETFLAGS, &own) == 0) {
      own |= FS_NOCOW_FL;
      (void)::ioctl(made.get(), FS_IOC_SETFLAGS, &own);  // if it fails, so does the next
    }
  }
  if (::ioctl(made.get(), FICLONE, from) == 0) return true;
  const int why = errno;
  if (why == ENOSPC || why == EDQUOT || why == EIO) {
    return base::errno_status(why, "cannot clone the state", to);
  }
  if (::unlink(to.c_str()) != 0) return base::errno_status(errno, "cannot delete", to);
  return false;
}

/// False when any of the devices cannot be cloned; what was made is left to the caller.
Result<bool> clone_devices(const StoredRun& run, const fs::path& partial) {
  uint64_t shared_bytes = 0;
  for (const auto& reader : run.devices) shared_bytes += reader->geometry().container_bytes();
  for (size_t device = 0; device < run.devices.size(); ++device) {
    const storage::StateReader& reader = *run.devices[device];
    std::error_code error;
    if (!fs::is_regular_file(reader.file_path(), error)) return false;  // a block device
    const std::string folder = device_folder(partial, device);
    SI_RETURN_IF_ERROR(make_folder(folder));
    SI_ASSIGN_OR_RETURN(
        const bool cloned,
        clone_file(reader.descriptor(), (fs::path(folder) / storage::kStateFileName).string()));
    if (!cloned) return false;
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
    targets.push_back(device_folder(partial, device));
  }
  ReshardOptions copy;
  copy.format = run.layout().format;
  copy.memory_budget_bytes = options.memory_budget_bytes;
  copy.lent_memory = options.lent_memory;
  copy.ring = options.ring;
  // Never overwritten, so one slot will do; it is synced below.
  copy.durability = storage::Durability::kNone;
  copy.keep_run = true;
  copy.names = run.description.devices;
  copy.progress = options.progress;
  SI_ASSIGN_OR_RETURN(const ReshardSummary copied, reshard(run, targets, copy));
  summary.blocks_without_checksum = copied.blocks_without_checksum;
  return Status();
}

/// Of all other members, whatever their order and the spaces between them.
std::string description_checksum(nlohmann::json others) {
  others.erase("checksum");
  const std::string text = others.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return fmt::format("{:016x}", base::checksum(std::as_bytes(std::span(text)), 0));
}

Status write_description(const StoredRun& run, const fs::path& partial,
                         const CheckpointSummary& summary) {
  nlohmann::ordered_json json{{"run", run.layout().run.to_string()},
                              {"step", run.step},
                              {"created_seconds", std::time(nullptr)},
                              {"devices", run.devices.size()},
                              {"device_names", run.description.devices},
                              {"state_format", base::state_format_name(run.layout().format)},
                              {"rule", kernels::update_rule_name(run.description.rule)},
                              {"parameters", run.description.space.count()},
                              {"state_bytes", summary.state_bytes},
                              {"cloned", summary.cloned}};
  json["checksum"] = description_checksum(json);
  const std::string path = (partial / kCheckpointFile).string();
  std::ofstream out(path);
  out << json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  out.close();
  if (!out) return base::errno_status(errno, "cannot write the checkpoint's description", path);
  return sync_path(path, O_RDONLY);
}

Status write_into(StoredRun& run, const fs::path& partial, const CheckpointOptions& options,
                  CheckpointSummary& summary) {
  SI_ASSIGN_OR_RETURN(summary.cloned, clone_devices(run, partial));
  if (!summary.cloned) {
    std::error_code error;
    fs::remove_all(partial, error);
    SI_RETURN_IF_ERROR(make_folder(partial));
    SI_RETURN_IF_ERROR(copy_devices(run, partial, options, summary));
  }
  for (size_t device = 0; device < run.devices.size(); ++device) {
    const fs::path folder = device_folder(partial, device);
    std::error_code error;
    fs::remove(folder / storage::kLockFileName, error);
    SI_RETURN_IF_ERROR(sync_path((folder / storage::kStateFileName).string(), O_RDONLY));
    SI_RETURN_IF_ERROR(sync_path(folder.string(), O_RDONLY | O_DIRECTORY));
  }
  SI_RETURN_IF_ERROR(write_description(run, partial, summary));
  return sync_path(partial.string(), O_RDONLY | O_DIRECTORY);
}

void remove_older(const storage::RunId& run, const CheckpointOptions& options,
                  CheckpointSummary& summary) {
  if (options.keep == 0) return;
  std::vector<Checkpoint> ours = list_checkpoints(options.folder);
  std::erase_if(ours, [&](const Checkpoint& other) { return !(other.run == run); });
  // Never the one just written, even when a step was gone back to.
  std::erase_if(ours, [&](const Checkpoint& other) { return other.path == summary.path; });
  for (size_t i = 0; i + options.keep - 1 < ours.size(); ++i) {
    // First it stops being a checkpoint, so that a crash leaves no half of one.
    const std::string doomed = ours[i].path + std::string(kPartialSuffix);
    std::error_code error;
    fs::rename(ours[i].path, doomed, error);
    if (!error) fs::remove_all(doomed, error);
    if (error) {
      base::log(base::LogLevel::kWarning, fmt::format("{}: an old checkpoint cannot be deleted: {}",
                                                      ours[i].path, error.message()));
      continue;
    }
    summary.removed.push_back(ours[i].path);
  }
}

}  // namespace

Result<CheckpointSummary> write_checkpoint(StoredRun& run, const CheckpointOptions& options) {
  CheckpointSummary summary;
  summary.step = run.step;
  summary.state_bytes = run.state_bytes();
  fs::path path = fs::path(options.folder) / fmt::format("step-{:08}", run.step);
  if (fs::exists(path)) {
    const Result<Checkpoint> there = read_checkpoint(path.string());
    // A restored run comes to the steps of the one before it again: both have their checkpoints.
    if (!there.ok() || !(there->run == run.layout().run)) {
      path += "-" + run.layout().run.to_string().substr(0, 8);
    }
  }
  summary.path = path.string();
  if (fs::exists(path)) {
    SI_ASSIGN_OR_RETURN(const Checkpoint there, read_checkpoint(summary.path));
    if (!(there.run == run.layout().run) || there.step != run.step) {
      return Status(ErrorCode::kAlreadyExists, "the folder holds a checkpoint of another run",
                    "Name another folder, or delete it if it is not needed.",
                    base::ErrorPlace{summary.path, {}, {}, 0});
    }
    summary.existed = true;
    return summary;
  }
  SI_RETURN_IF_ERROR(make_folder(options.folder));
  const fs::path partial = summary.path + std::string(kPartialSuffix);
  std::error_code error;
  fs::remove_all(partial, error);  // of a crash
  SI_RETURN_IF_ERROR(make_folder(partial));
  Status status = write_into(run, partial, options, summary);
  if (status.ok()) {
    fs::rename(partial, path, error);
    if (error) {
      status = base::errno_status(error.value(), "cannot name the checkpoint", summary.path);
    }
  }
  if (!status.ok()) {
    fs::remove_all(partial, error);
    return status;
  }
  SI_RETURN_IF_ERROR(sync_path(options.folder, O_RDONLY | O_DIRECTORY));
  remove_older(run.layout().run, options, summary);
  return summary;
}

Result<CheckpointSummary> checkpoint_open_run(const std::vector<std::string>& paths,
                                              const CheckpointOptions& options) {
  SI_ASSIGN_OR_RETURN(StoredRun run, open_stored_run(paths, storage::ReaderLock::kLeave));
  return write_checkpoint(run, options);
}

Status check_checkpoint_folder(const std::string& folder) {
  SI_RETURN_IF_ERROR(make_folder(folder));
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

Result<Checkpoint> read_checkpoint(const std::string& path) {
  const std::string file = (fs::path(path) / kCheckpointFile).string();
  std::ifstream in(file);
  if (!in) {
    return Status(ErrorCode::kNotFound, "no checkpoint is here",
                  "Name its folder, e.g. runs/mine/checkpoints/step-00000100.",
                  base::ErrorPlace{path, {}, {}, 0});
  }
  std::stringstream text;
  text << in.rdbuf();
  const auto json = nlohmann::json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  const auto corrupt = [&] {
    return Status(ErrorCode::kCorrupt, "the checkpoint's description cannot be read",
                  "Its devices may be whole: name them one by one (device-0, device-1, ...).",
                  base::ErrorPlace{file, {}, {}, 0});
  };
  if (!json.is_object() || !json.contains("run") || !json["run"].is_string() ||
      !json.contains("step") || !json["step"].is_number_unsigned() || !json.contains("devices") ||
      !json["devices"].is_number_unsigned() || json["devices"].get<uint64_t>() > 65536 ||
      (json.contains("checksum") && json["checksum"] != description_checksum(json))) {
    return corrupt();
  }
  Checkpoint checkpoint;
  checkpoint.path = path;
  checkpoint.step = json["step"].get<uint64_t>();
  checkpoint.created_seconds = json.value("created_seconds", uint64_t{0});
  const auto digits = json["run"].get<std::string>();
  if (digits.size() != 2 * checkpoint.run.bytes.size() ||
      digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return corrupt();
  }
  for (size_t i = 0; i < checkpoint.run.bytes.size(); ++i) {
    checkpoint.run.bytes[i] = static_cast<uint8_t>(std::stoi(digits.substr(2 * i, 2), nullptr, 16));
  }
  for (size_t device = 0; device < json["devices"].get<uint64_t>(); ++device) {
    checkpoint.devices.push_back(device_folder(path, device));
  }
  return checkpoint;
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
