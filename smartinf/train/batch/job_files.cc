#include "smartinf/train/batch/job_files.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/file.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/checkpoint_folder.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

static_assert(std::endian::native == std::endian::little, "numbers are stored as they are");

constexpr std::string_view kJournalMagic = "SIBATCH1";
constexpr size_t kHeaderBytesMax = 64 * base::kKiB;
// Records.
constexpr uint32_t kTokensRecord = 1;  // of a step
constexpr uint32_t kAnswerRecord = 2;
constexpr uint64_t kTokensOfStepMax = uint64_t{1} << 20;
struct TokenEntry {
  uint32_t line;
  uint32_t token;
};
using AnswerEntry = std::array<uint64_t, 4>;  // line, offset, bytes, checksum

template <typename T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
uint64_t sum_of(std::string_view text, uint64_t seed = 0) {
  return base::checksum(std::as_bytes(std::span(text)), seed);
}
template <typename T>
T value_at(std::string_view bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

std::string header_of(const JobIdentity& identity) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const auto& [name, value] : identity) json[name] = value;
  const std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::string header(kJournalMagic);
  header += bytes_of(uint64_t{text.size()});
  header += text;
  header += bytes_of(sum_of(header));
  return header;
}

/// The identity's JSON in what begins with a whole header; nothing where it does not.
std::string_view text_of_header(std::string_view bytes) {
  constexpr size_t kBefore = kJournalMagic.size() + 8;
  if (!bytes.starts_with(kJournalMagic) || bytes.size() < kBefore + 8) return {};
  const auto size = value_at<uint64_t>(bytes, kJournalMagic.size());
  if (size > bytes.size() - kBefore - 8) return {};
  if (value_at<uint64_t>(bytes, kBefore + size) != sum_of(bytes.substr(0, kBefore + size))) {
    return {};
  }
  return bytes.substr(kBefore, size);
}

Status write_at(int file, std::string_view text, uint64_t offset, const std::string& path) {
  while (!text.empty()) {
    const ssize_t written = ::pwrite(file, text.data(), text.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      return base::errno_status(errno, "cannot write", path, offset, text.size(),
                                "The same command goes on from here once it can be written");
    }
    offset += static_cast<uint64_t>(written);
    text.remove_prefix(static_cast<size_t>(written));
  }
  return Status();
}

Status sync_data(int file, const std::string& path) {
  if (::fdatasync(file) == 0) return Status();
  return base::errno_status(errno, "cannot make durable", path, {}, {},
                            "The same command goes on from what the drive has");
}

Status sync_folder_of(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  return engine::sync_folder(folder.empty() ? "." : folder.string());
}

}  // namespace

Result<std::unique_ptr<JobFiles>> JobFiles::lock(const std::string& answers, bool fresh) {
  std::unique_ptr<JobFiles> files(new JobFiles(answers, fresh));
  SI_RETURN_IF_ERROR(files->take_lock());
  SI_RETURN_IF_ERROR(files->look_at_what_is_there());
  return files;
}

JobFiles::~JobFiles() {
  struct stat info {};
  if (journal_file_ >= 0 && ::fstat(journal_file_, &info) == 0 && info.st_size == 0) {
    (void)::unlink(journal_path_.c_str());  // nothing was begun
  }
  if (answers_file_ >= 0) ::close(answers_file_);
  if (journal_file_ >= 0) ::close(journal_file_);
}

Status JobFiles::take_lock() {
  while (true) {
    SI_ASSIGN_OR_RETURN(journal_file_, base::open_regular_file(journal_path_, O_RDWR | O_CREAT,
                                                               "cannot open the journal"));
    if (::flock(journal_file_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) {
        return base::errno_status(errno, "cannot lock the journal", journal_path_, {}, {},
                                  "The file system must support locks (flock)");
      }
      ::close(std::exchange(journal_file_, -1));
      return Status(ErrorCode::kBusy, "another process writes these answers",
                    "Wait for it to end, or choose another --out", {answers_path_, {}, {}, 0});
    }
    // Whoever ends a job removes its journal, which may be the one that was opened here.
    struct stat locked {};
    struct stat there {};
    if (::fstat(journal_file_, &locked) == 0 && ::stat(journal_path_.c_str(), &there) == 0 &&
        locked.st_ino == there.st_ino && locked.st_dev == there.st_dev) {
      return Status();
    }
    ::close(std::exchange(journal_file_, -1));
  }
}

Status JobFiles::look_at_what_is_there() {
  if (fresh_) return Status();
  SI_ASSIGN_OR_RETURN(const base::DataFile journal, base::DataFile::open(journal_path_));
  found_.resize(std::min<uint64_t>(journal.size(), kHeaderBytesMax));
  SI_RETURN_IF_ERROR(journal.read(0, std::as_writable_bytes(std::span(found_))));
  const std::string_view text = text_of_header(found_);
  std::error_code error;
  const bool answers = std::filesystem::file_size(answers_path_, error) > 0 && !error;
  if (text.empty() && found_.empty() && answers) {
    return Status(ErrorCode::kAlreadyExists,
                  "there are answers, and no journal to go on from: the job is done, or they are "
                  "another program's",
                  "Choose another --out, or give --fresh to start over, which deletes them",
                  {answers_path_, {}, {}, 0});
  }
  // Of a power cut before the first answer. In between there is nothing: a header is one write.
  const bool torn = found_.find_first_not_of('\0') == std::string::npos;
  if (text.empty() && (answers || !torn)) {
    return Status(ErrorCode::kCorrupt, "the file is no journal, or a damaged one",
                  "Give --fresh to start over, which deletes it and the answers",
                  {journal_path_, {}, {}, 0});
  }
  fresh_ = text.empty();
  found_.resize(fresh_ ? 0 : kJournalMagic.size() + 8 + text.size() + 8);
  return Status();
}

Status JobFiles::start(const JobIdentity& identity, uint64_t lines, const JobIdentity& notes) {
  SI_CHECK(lines < std::numeric_limits<uint32_t>::max(), "a line's number has 32 bits");
  if (fresh_) {
    JobIdentity all = identity;
    all.insert(all.end(), notes.begin(), notes.end());
    found_ = header_of(all);
  } else {
    SI_RETURN_IF_ERROR(check_same(identity, notes));
  }
  if (found_.size() > kHeaderBytesMax) {
    return Status(ErrorCode::kInvalidArgument, "the names of the job's places are too long");
  }
  job_ = sum_of(header_of(identity));
  answered_.assign(lines, false);
  journal_bytes_ = found_.size();
  SI_ASSIGN_OR_RETURN(answers_file_, base::open_regular_file(answers_path_, O_RDWR | O_CREAT,
                                                             "cannot open the answers"));
  return fresh_ ? begin(found_) : go_on();
}

std::optional<std::string> JobFiles::found(const std::string& name) const {
  const nlohmann::json header = base::parse_json(text_of_header(found_));
  const auto there = header.is_object() ? header.find(name) : header.end();
  if (there == header.end() || !there->is_string()) return std::nullopt;
  return there->get<std::string>();
}

void JobFiles::forget() {
  if (fresh_) (void)::unlink(journal_path_.c_str());
}

Status JobFiles::begin(const std::string& header) {
  if (::ftruncate(journal_file_, 0) != 0) {
    return base::errno_status(errno, "cannot write", journal_path_);
  }
  if (::ftruncate(answers_file_, 0) != 0) {
    return base::errno_status(errno, "cannot write", answers_path_);
  }
  SI_RETURN_IF_ERROR(write_at(journal_file_, header, 0, journal_path_));
  SI_RETURN_IF_ERROR(sync_data(journal_file_, journal_path_));
  return sync_folder_of(answers_path_);
}

Status JobFiles::check_same(const JobIdentity& wanted, const JobIdentity& notes) const {
  const nlohmann::json found = base::parse_json(text_of_header(found_));
  std::string differ;
  const auto add = [&](const std::string& name, const std::string& now, const std::string& was) {
    differ += fmt::format("{}{} is {} and was {}", differ.empty() ? "" : ", ", name, now, was);
  };
  for (const auto& [name, value] : wanted) {
    const std::string was = this->found(name).value_or("not known");
    if (was != value) add(name, value, was);
  }
  for (const auto& [name, value] : found.items()) {
    const auto is_it = [&](const auto& one) { return one.first == name; };
    const bool known = std::ranges::any_of(wanted, is_it) || std::ranges::any_of(notes, is_it);
    if (!known) add(name, "not known", value.dump());
  }
  if (differ.empty()) return Status();
  return Status(ErrorCode::kMismatch, "the journal is of another job: " + differ,
                "Give what it was begun with to go on, choose another --out, or give --fresh to "
                "start over, which deletes its answers",
                {journal_path_, {}, {}, 0});
}

Status JobFiles::go_on() {
  SI_ASSIGN_OR_RETURN(const base::DataFile journal, base::DataFile::open(journal_path_));
  SI_ASSIGN_OR_RETURN(const base::DataFile answers, base::DataFile::open(answers_path_));
  std::string record;
  while (journal.size() - journal_bytes_ >= 16) {
    std::array<uint32_t, 2> head{};
    SI_RETURN_IF_ERROR(journal.read(journal_bytes_, std::as_writable_bytes(std::span(head))));
    const auto [kind, count] = head;
    if (kind != kTokensRecord && kind != kAnswerRecord) break;
    const uint64_t payload =
        count * (kind == kTokensRecord ? sizeof(TokenEntry) : sizeof(AnswerEntry));
    if (count > kTokensOfStepMax || journal.size() - journal_bytes_ < payload + 16) break;
    record.resize(payload + 16);
    SI_RETURN_IF_ERROR(journal.read(journal_bytes_, std::as_writable_bytes(std::span(record))));
    const auto checksum = value_at<uint64_t>(record, payload + 8);
    if (checksum != sum_of(std::string_view(record).substr(0, payload + 8),
                           base::mix_seed(job_, journal_bytes_))) {
      break;
    }
    take_record(kind, std::string_view(record).substr(8, payload), answers);
    journal_bytes_ += record.size();
  }
  SI_RETURN_IF_ERROR(cut(journal_file_, journal_path_, journal_bytes_));
  return cut(answers_file_, answers_path_, answers_bytes_);
}

void JobFiles::take_record(uint32_t kind, std::string_view payload, const base::DataFile& answers) {
  if (kind == kTokensRecord) {
    for (; !payload.empty(); payload.remove_prefix(sizeof(TokenEntry))) {
      const auto entry = value_at<TokenEntry>(payload, 0);
      const bool open = entry.line > 0 && entry.line <= answered_.size() && !answered(entry.line);
      if (open) tokens_[entry.line].push_back(entry.token);
    }
    return;
  }
  const auto entry = value_at<AnswerEntry>(payload, 0);
  // One whose text the drive has lost, and all behind it, are written again.
  if (!answer_is_there(entry, answers)) return;
  answers_bytes_ += entry[2];
  answered_[entry[0] - 1] = true;
  ++answers_;
  tokens_.erase(entry[0]);
}

bool JobFiles::answer_is_there(std::span<const uint64_t> record,
                               const base::DataFile& answers) const {
  const uint64_t line = record[0];
  const uint64_t bytes = record[2];
  if (line == 0 || line > answered_.size() || answered(line)) return false;
  if (record[1] != answers_bytes_ || bytes > answers.size() - std::min(answers.size(), record[1])) {
    return false;
  }
  std::string text(bytes, '\0');
  return answers.read(answers_bytes_, std::as_writable_bytes(std::span(text))).ok() &&
         sum_of(text) == record[3];
}

Status JobFiles::cut(int file, const std::string& path, uint64_t kept) {
  struct stat info {};
  if (::fstat(file, &info) != 0) return base::errno_status(errno, "cannot examine", path);
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size == kept) return Status();
  if (::ftruncate(file, static_cast<off_t>(kept)) != 0) {
    return base::errno_status(errno, "cannot write", path);
  }
  notices_.push_back(
      fmt::format("{}: {} behind its first {} bytes, which an interruption left, "
                  "were cut off and are made again",
                  path, base::format_bytes(size - kept), kept));
  return Status();
}

std::vector<int64_t> JobFiles::take_tokens(uint64_t line) {
  auto taken = tokens_.extract(line);
  return taken.empty() ? std::vector<int64_t>() : std::move(taken.mapped());
}

Status JobFiles::add_record(uint32_t kind, uint64_t count, std::string_view payload) {
  SI_CHECK(count <= kTokensOfStepMax, "a step has fewer tokens");
  std::string record(bytes_of(std::array{kind, static_cast<uint32_t>(count)}));
  record += payload;
  record += bytes_of(sum_of(record, base::mix_seed(job_, journal_bytes_)));
  SI_RETURN_IF_ERROR(write_at(journal_file_, record, journal_bytes_, journal_path_));
  journal_bytes_ += record.size();
  return Status();
}

Status JobFiles::add_tokens(std::span<const NewToken> tokens) {
  std::string payload;
  for (const NewToken& one : tokens) {
    payload +=
        bytes_of(TokenEntry{static_cast<uint32_t>(one.line), static_cast<uint32_t>(one.token)});
  }
  return add_record(kTokensRecord, tokens.size(), payload);
}

Status JobFiles::add_answer(uint64_t line, std::string_view text) {
  SI_CHECK(!answered(line), "a line has one answer");
  SI_RETURN_IF_ERROR(write_at(answers_file_, text, answers_bytes_, answers_path_));
  const AnswerEntry entry{line, answers_bytes_, text.size(), sum_of(text)};
  SI_RETURN_IF_ERROR(add_record(kAnswerRecord, 1, bytes_of(entry)));
  answers_bytes_ += text.size();
  answered_[line - 1] = true;
  ++answers_;
  return Status();
}

Status JobFiles::save() {
  SI_RETURN_IF_ERROR(sync_data(answers_file_, answers_path_));
  return sync_data(journal_file_, journal_path_);
}

Status JobFiles::finish(bool keep) {
  SI_RETURN_IF_ERROR(save());
  if (keep) return Status();
  if (::unlink(journal_path_.c_str()) != 0) {
    return base::errno_status(errno, "cannot remove the journal", journal_path_);
  }
  return sync_folder_of(answers_path_);
}

}  // namespace smartinf::train
