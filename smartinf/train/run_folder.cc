#include "smartinf/train/run_folder.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/checkpoint_folder.h"
#include "smartinf/engine/options.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
namespace fs = std::filesystem;

namespace {

/// Bytes of lines that wait for room on the disk: those of some ten thousand steps.
constexpr size_t kPendingBytesMax = size_t{16} << 20;
/// Bytes of one line, at most. A longer one is not ours, and no reason to take memory.
constexpr size_t kLineBytesMax = size_t{16} << 20;
constexpr uint64_t kRecordBytesMax = uint64_t{1} << 20;

/// Takes what was written off the front of `text`.
Status write_all(int descriptor, std::string_view& text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return base::errno_status(errno, "cannot write", path);
    text.remove_prefix(static_cast<size_t>(written));
  }
  return Status();
}

/// Whether a file ends within a line, as after a kill.
bool ends_in_a_line(const std::string& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return false;
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in || in.tellg() <= 0) return false;
  in.seekg(-1, std::ios::end);
  return in.get() != '\n';
}

/// The first of log.jsonl.1, log.jsonl.2, ... that is not there.
std::string free_name(const std::string& path) {
  std::error_code error;
  for (uint32_t number = 1;; ++number) {
    std::string name = fmt::format("{}.{}", path, number);
    if (!fs::exists(fs::symlink_status(name, error))) return name;
  }
}

/// As others find it from any working directory; what lies in the folder is named from there.
std::string in_record(const std::string& device, const fs::path& folder) {
  if (engine::is_remote(device)) return device;
  const fs::path path = fs::absolute(device).lexically_normal();
  const fs::path within = path.lexically_relative(fs::absolute(folder).lexically_normal());
  return within.empty() || *within.begin() == ".." ? path.string() : within.string();
}

}  // namespace

void for_each_line(
    const std::string& path,
    const std::function<void(base::StepNumber, const nlohmann::json&, const std::string&)>& visit) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return;
  std::ifstream in(path, std::ios::binary);
  std::string line;
  bool too_long = false;
  const auto end_line = [&] {
    const nlohmann::json json = base::parse_json(too_long ? std::string_view() : line);
    const auto step = json.is_object() ? json.find("step") : json.end();
    if (json.is_object() && step != json.end() && step->is_number_unsigned()) {
      visit(step->get<base::StepNumber>(), json, line);
    }
    line.clear();
    too_long = false;
  };
  std::vector<char> piece(64 * base::kKiB);
  while (in) {
    in.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    std::string_view rest(piece.data(), static_cast<size_t>(in.gcount()));
    while (!rest.empty()) {
      const size_t end = rest.find('\n');
      line += rest.substr(0, end);
      too_long = too_long || line.size() > kLineBytesMax;
      if (too_long) line.clear();
      if (end != std::string_view::npos) end_line();
      rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    }
  }
  if (!line.empty()) end_line();
}

Result<std::optional<RunRecord>> read_run_record(const std::string& folder) {
  const std::string path = folder + "/" + std::string(kRunFile);
  const Result<std::string> text =
      base::read_text_file(path, "cannot read the run's record", kRecordBytesMax);
  if (text.status().code() == ErrorCode::kNotFound) return std::optional<RunRecord>();
  SI_RETURN_IF_ERROR(text.status());
  const nlohmann::json json = base::parse_json(*text);
  RunRecord record;
  bool sound = json.is_object() && json.contains("run") && json["run"].is_string() &&
               json.contains("devices") && json["devices"].is_array();
  if (sound) record.run = json["run"].get<std::string>();
  for (size_t i = 0; sound && i < json["devices"].size(); ++i) {
    sound = json["devices"][i].is_string();
    if (sound) {
      const auto device = json["devices"][i].get<std::string>();
      record.devices.push_back(engine::is_remote(device) ? device
                                                         : (fs::path(folder) / device).string());
    }
  }
  if (sound) return std::optional(std::move(record));
  return Status(ErrorCode::kCorrupt, "the file that names the run of this folder is damaged",
                "Remove the file; `smartinf train` then says what to do.",
                base::ErrorPlace{path, {}, {}, 0});
}

base::StepNumber logged_step(const std::string& folder) {
  base::StepNumber last = 0;
  for_each_line(folder + "/" + std::string(kLogFile),
                [&](base::StepNumber step, const nlohmann::json&, const std::string&) {
                  last = std::max(last, step);
                });
  return last;
}

Result<RunFolder> RunFolder::open(const std::string& path) {
  // Durably: the state may lie elsewhere, and must not outlive the folder that knows it.
  SI_RETURN_IF_ERROR(engine::make_durable_folder(path).with_context("train.run"));
  const std::string lock_path = path + "/lock";
  const int lock = ::open(lock_path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NONBLOCK, 0644);
  if (lock < 0) {
    return base::errno_status(errno, "train.run: cannot write in the run's folder", path, {}, {},
                              "Choose another folder");
  }
  RunFolder folder(path, lock);
  if (::flock(lock, LOCK_EX | LOCK_NB) == 0) return folder;
  if (errno != EWOULDBLOCK) {
    return base::errno_status(errno, "train.run: cannot lock the run's folder", lock_path, {}, {},
                              "The file system must support locks (flock): choose another folder");
  }
  return Status(ErrorCode::kBusy, "train.run: another process uses this folder",
                "Wait for it to end, or choose another folder", base::ErrorPlace{path, {}, {}, 0});
}

RunFolder::RunFolder(RunFolder&& other) noexcept
    : path_(std::move(other.path_)),
      lock_(std::exchange(other.lock_, -1)),
      log_(std::exchange(other.log_, -1)),
      pending_(std::move(other.pending_)),
      pending_lost_(other.pending_lost_),
      validated_(other.validated_) {}

RunFolder& RunFolder::operator=(RunFolder&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(lock_, other.lock_);
  std::swap(log_, other.log_);
  std::swap(pending_, other.pending_);
  std::swap(pending_lost_, other.pending_lost_);
  std::swap(validated_, other.validated_);
  return *this;
}

RunFolder::~RunFolder() {
  if (log_ >= 0) {
    close_log();
    ::close(log_);
  }
  if (lock_ >= 0) ::close(lock_);
}

std::string RunFolder::file(std::string_view name) const { return path_ + "/" + std::string(name); }

Status RunFolder::keep_recipe(std::string_view text) const {
  if (lock_ < 0) return Status();
  return base::write_text_file(file(kRecipeFile), text, "cannot write the recipe");
}

Status RunFolder::keep_run_record(const RunRecord& record) const {
  if (lock_ < 0) return Status();
  nlohmann::ordered_json json{{"run", record.run}, {"devices", nlohmann::ordered_json::array()}};
  for (const std::string& device : record.devices) {
    json["devices"].push_back(in_record(device, path_));
  }
  const std::string text =
      json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  if (const auto there =
          base::read_text_file(file(kRunFile), "cannot read the run's record", kRecordBytesMax);
      there.ok() && *there == text) {
    return Status();
  }
  return base::write_text_file(file(kRunFile), text, "cannot write the run's record");
}

void RunFolder::remove_run_record() const {
  if (lock_ >= 0) ::unlink(file(kRunFile).c_str());
}

Result<RunFolder::LogCut> RunFolder::keep_log_until(base::StepNumber step) {
  LogCut cut;
  if (lock_ < 0) return cut;
  const std::string path = file(kLogFile);
  std::string kept;
  std::string behind;
  validated_.reset();
  for_each_line(path, [&](base::StepNumber of, const nlohmann::json& json,
                          const std::string& line) {
    cut.last = std::max(cut.last, of);
    const bool validation = json.contains("validation_loss") || json.contains("evaluation_loss");
    if (of <= step && validation) validated_ = of;
    (of > step ? behind : kept) += line + "\n";
  });
  if (cut.last > step + 1) {
    cut.kept_in = free_name(path);
    SI_RETURN_IF_ERROR(base::write_text_file(cut.kept_in, behind, "cannot keep the log's end"));
  }
  // On a full disk a log that needs no change can still be gone on with.
  if (!behind.empty() || ends_in_a_line(path))
    SI_RETURN_IF_ERROR(base::write_text_file(path, kept, "cannot write the log"));
  if (log_ >= 0) ::close(log_);
  log_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0644);
  if (log_ < 0) return base::errno_status(errno, "cannot open the log", path);
  return cut;
}

Result<std::string> RunFolder::set_log_aside() const {
  const std::string path = file(kLogFile);
  std::error_code error;
  if (lock_ < 0 || !fs::exists(path, error)) return std::string();
  std::string name = free_name(path);
  if (::rename(path.c_str(), name.c_str()) != 0) {
    return base::errno_status(errno, "cannot rename the log", path);
  }
  SI_RETURN_IF_ERROR(engine::sync_folder(path_));
  return name;
}

void RunFolder::append_validation(base::StepNumber step, std::string_view json_line) {
  if (validated_ == step) return;
  validated_ = step;
  append_log(json_line);
}

Status RunFolder::write_pending() {
  // The rest of a line that was written in part follows on it.
  std::string_view left = pending_;
  const Status written = write_all(log_, left, file(kLogFile));
  pending_.erase(0, pending_.size() - left.size());
  return written;
}

void RunFolder::append_log(std::string_view json_line) {
  if (lock_ < 0) return;
  SI_CHECK(log_ >= 0, "keep_log_until() opens the log");
  const bool waiting = !pending_.empty();
  if (pending_.size() + json_line.size() < kPendingBytesMax) {
    pending_ += json_line;
    pending_ += '\n';
  } else {
    pending_lost_ = true;
  }
  const Status written = write_pending();
  if (written.ok() || waiting) return;
  base::log(base::LogLevel::kWarning,
            fmt::format("{}; the run goes on, and the line is written with a later one",
                        written.to_string()));
}

void RunFolder::close_log() {
  const Status written = pending_.empty() ? Status() : write_pending();
  if (written.ok() && !pending_lost_) return;
  base::log(base::LogLevel::kWarning,
            fmt::format("lines of this run are missing in {}{}", file(kLogFile),
                        written.ok() ? "" : ": " + written.to_string()));
  pending_.clear();
  pending_lost_ = false;
}

}  // namespace smartinf::train
