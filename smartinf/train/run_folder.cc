#include "smartinf/train/run_folder.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <unistd.h>

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

Status write_all(int descriptor, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return base::errno_status(errno, "cannot write", path);
    text.remove_prefix(static_cast<size_t>(written));
  }
  return Status();
}

// Lines of a log that say their step. One that a kill cut short is none.
void for_each_line(const std::string& path,
                   const std::function<void(base::StepNumber, const nlohmann::json&,
                                            const std::string&)>& visit) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) continue;
    const auto step = json.find("step");
    if (step == json.end() || !step->is_number_unsigned()) continue;
    visit(step->get<base::StepNumber>(), json, line);
  }
}

}  // namespace

Result<RunFolder> RunFolder::open(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    return base::errno_status(error.value(), "train.run: cannot make the run's folder", path, {},
                              {}, "Choose another folder");
  }
  const std::string lock_path = path + "/lock";
  const int lock = ::open(lock_path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
  if (lock < 0) {
    return base::errno_status(errno, "train.run: cannot write in the run's folder", path, {}, {},
                              "Choose another folder");
  }
  RunFolder folder(path, lock);
  if (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
    base::ErrorPlace place;
    place.path = path;
    return Status(ErrorCode::kBusy, "train.run: another process works in this folder",
                  "Wait for it to end, or choose another folder", place);
  }
  return folder;
}

RunFolder::RunFolder(RunFolder&& other) noexcept
    : path_(std::move(other.path_)),
      lock_(std::exchange(other.lock_, -1)),
      log_(std::exchange(other.log_, -1)),
      validated_(other.validated_) {}

RunFolder& RunFolder::operator=(RunFolder&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(lock_, other.lock_);
  std::swap(log_, other.log_);
  std::swap(validated_, other.validated_);
  return *this;
}

RunFolder::~RunFolder() {
  if (log_ >= 0) ::close(log_);
  if (lock_ >= 0) ::close(lock_);
}

std::string RunFolder::file(std::string_view name) const { return path_ + "/" + std::string(name); }

Status RunFolder::keep_recipe(std::string_view text) const {
  return write_file(file(kRecipeFile), text);
}

base::StepNumber RunFolder::logged_step() const {
  base::StepNumber last = 0;
  for_each_line(file(kLogFile), [&](base::StepNumber step, const nlohmann::json&, const std::string&) {
    last = std::max(last, step);
  });
  return last;
}

Status RunFolder::keep_log_until(base::StepNumber step) {
  const std::string path = file(kLogFile);
  std::string kept;
  validated_.reset();
  for_each_line(path, [&](base::StepNumber of, const nlohmann::json& json, const std::string& line) {
    if (of > step) return;
    if (json.contains("validation_loss")) validated_ = of;
    kept += line + "\n";
  });
  SI_RETURN_IF_ERROR(write_file(path, kept));
  if (log_ >= 0) ::close(log_);
  log_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  return log_ >= 0 ? Status() : base::errno_status(errno, "cannot open the log", path);
}

Status RunFolder::append_validation(base::StepNumber step, double loss) {
  if (validated_ == step) return Status();
  validated_ = step;
  return append_log(nlohmann::ordered_json{{"step", step}, {"validation_loss", loss}}.dump());
}

Status RunFolder::append_log(std::string_view json_line) {
  SI_CHECK(log_ >= 0, "keep_log_until() opens the log");
  return write_all(log_, std::string(json_line) + "\n", file(kLogFile));
}

Status write_file(const std::string& path, std::string_view text) {
  const std::string partial = path + ".partial";
  const int out = ::open(partial.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  if (out < 0) return base::errno_status(errno, "cannot make the file", partial);
  Status status = write_all(out, text, partial);
  if (status.ok() && ::fsync(out) != 0) status = base::errno_status(errno, "cannot sync", partial);
  ::close(out);
  if (status.ok() && ::rename(partial.c_str(), path.c_str()) != 0) {
    status = base::errno_status(errno, "cannot rename to", path);
  }
  return status;
}

}  // namespace smartinf::train
