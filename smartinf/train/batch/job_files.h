// What a batch job keeps: its answers, a line each, and beside them the journal of every token that
// was made, from which an interrupted job goes on (docs/format.md). Both only grow; what a crash
// has left half-written is cut off at the next start and made again.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "smartinf/base/data_file.h"
#include "smartinf/base/status.h"

namespace smartinf::train {

/// What a job is of, each thing by a name that people know. Another job differs in one of them.
using JobIdentity = std::vector<std::pair<std::string, std::string>>;

/// Threads: one caller.
class JobFiles {
 public:
  /// Locks the journal, which is at the answers' path with ".journal". fresh: what an earlier job
  /// left there will be deleted. Errors: kBusy (another process does it), kAlreadyExists (answers
  /// without a journal), kCorrupt (a journal without a whole beginning, beside answers), kIo.
  static base::Result<std::unique_ptr<JobFiles>> lock(const std::string& answers, bool fresh);
  /// First of all: begins a job of so many lines, or finds what an earlier start of the same one
  /// has left. Errors: kMismatch with what differs; kNoSpace, kIo.
  /// notes: kept with a job that is begun; another start may have others.
  base::Status start(const JobIdentity& identity, uint64_t lines, const JobIdentity& notes = {});
  /// A value or a note of the job, before start() of the one that was found; nothing where it has
  /// none.
  std::optional<std::string> found(const std::string& name) const;
  /// After start(), where nothing was made since: a job that it has begun is not there any more.
  void forget();
  JobFiles(const JobFiles&) = delete;
  JobFiles& operator=(const JobFiles&) = delete;
  ~JobFiles();

  /// A number of the job, which follows from its identity.
  uint64_t job() const { return job_; }
  bool answered(uint64_t line) const { return answered_.at(line - 1); }
  uint64_t answers() const { return answers_; }
  /// Tokens that an earlier start made for a line that has no answer yet; they are forgotten here.
  std::vector<int64_t> take_tokens(uint64_t line);
  /// Lines for which there are such tokens.
  uint64_t begun() const { return tokens_.size(); }
  /// What was cut off, for people.
  const std::vector<std::string>& notices() const { return notices_; }

  struct NewToken {
    uint64_t line;
    int64_t token;
  };
  // Both reach the operating system before they return. Errors: kNoSpace, kIo: the same command
  // goes on later.
  base::Status add_tokens(std::span<const NewToken> tokens);
  /// text: with its newline, the only one.
  base::Status add_answer(uint64_t line, std::string_view text);
  /// What was added survives a power cut. Errors: kIo.
  base::Status save();
  /// All is answered: saves, and removes the journal unless it is to be kept.
  base::Status finish(bool keep);

 private:
  JobFiles(std::string answers, bool fresh)
      : answers_path_(std::move(answers)),
        journal_path_(answers_path_ + ".journal"),
        fresh_(fresh) {}
  base::Status take_lock();
  base::Status look_at_what_is_there();
  base::Status begin(const std::string& header);
  base::Status check_same(const JobIdentity& wanted, const JobIdentity& notes) const;
  base::Status go_on();
  void take_record(uint32_t kind, std::string_view payload, const base::DataFile& answers);
  bool answer_is_there(std::span<const uint64_t> record, const base::DataFile& answers) const;
  base::Status cut(int file, const std::string& path, uint64_t kept);
  base::Status add_record(uint32_t kind, uint64_t count, std::string_view payload);

  std::string answers_path_;
  std::string journal_path_;
  bool fresh_;         // also where nothing is there
  std::string found_;  // the journal's header; empty: none is there
  int answers_file_ = -1;
  int journal_file_ = -1;                            // locked
  uint64_t job_ = 0;                                 // checksum of a header of its identity
  uint64_t answers_bytes_ = 0;                       // of whole answers
  uint64_t journal_bytes_ = 0;                       // of whole records
  std::vector<bool> answered_;                       // by line
  uint64_t answers_ = 0;                             // of answered_
  std::map<uint64_t, std::vector<int64_t>> tokens_;  // by line, before take_tokens()
  std::vector<std::string> notices_;
};

}  // namespace smartinf::train
