// Answers a file of prompts, many at once: whoever is done leaves, and the next one joins. An
// interrupted job goes on inside half-written answers, with the same bits.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <vector>

#include "smartinf/base/clock.h"
#include "smartinf/base/status.h"
#include "smartinf/train/batch/admission.h"
#include "smartinf/train/batch/job_files.h"
#include "smartinf/train/batch/prompt_line.h"
#include "smartinf/train/batch/prompts_file.h"
#include "smartinf/train/sequence_decoder.h"

namespace smartinf::train {

/// A model's tokens as text. Errors: kInvalidArgument for what is refused; others end the job.
class TextCoder {
 public:
  virtual ~TextCoder() = default;
  /// The tokens of a line's text or messages.
  virtual base::Result<std::vector<int64_t>> encode(const PromptLine& line) = 0;
  virtual base::Result<std::string> decode(std::span<const int64_t> tokens) = 0;
  /// The text that `made` adds behind the prompt's.
  virtual base::Result<std::string> continuation(std::span<const int64_t> prompt,
                                                 std::span<const int64_t> made) = 0;
};

/// A file of prompts, seen once from its beginning to its end.
struct BatchPrompts {
  static base::Result<BatchPrompts> open(const std::string& path, const PromptDefaults& defaults);

  std::optional<PromptsFile> file;  // always there
  PromptDefaults defaults;
  uint64_t prompts = 0;            // lines that are not blank
  uint64_t wrong = 0;              // of these those that name no prompt
  bool needs_text = false;         // of any line
  uint64_t tokens_max = 0;         // new ones, of any line
  uint64_t prompt_tokens_max = 0;  // of a line that is tokens
  /// Lines with the most of text, at most kLongLines, and how many bytes that is.
  std::multimap<uint64_t, uint64_t> long_lines;
  static constexpr size_t kLongLines = 32;
  std::unordered_map<uint64_t, uint64_t> same_id;  // by line an earlier one that has its id
};

/// Tokens of the longest sequence, prompt and new ones, for which memory is planned: of the longest
/// texts as the coder makes them, of others at most one for two bytes of the longest. positions: of
/// the model; 0: any number.
base::Result<uint64_t> longest_sequence(const BatchPrompts& prompts, TextCoder* coder,
                                        uint64_t positions);

struct BatchOptions {
  uint64_t vocabulary = 0;
  uint64_t positions = 0;  // of a sequence, at most; 0: any number
  uint64_t longest = 0;    // tokens of a sequence that there is memory for
  std::vector<int64_t> end_tokens;
  uint64_t sequences = 64;  // at once, at most
  uint64_t ahead = 64;      // prompts that wait beyond a wave, to find those that begin alike
  double save_every_s = 60;
  bool keep_journal = false;
  std::stop_token stop;
};

/// How far a job has come, since it was started this time where nothing else is said.
struct BatchProgress {
  uint64_t prompts = 0;   // in the file
  uint64_t answered = 0;  // ever
  uint64_t refused = 0;   // answered with an error
  uint64_t active = 0;    // now
  uint64_t lost = 0;      // sequences that were computed again
  uint64_t prompt_tokens = 0;
  uint64_t shared_tokens = 0;  // of them, not computed: other prompts begin with them
  uint64_t tokens = 0;
  double prompt_seconds = 0;
  double token_seconds = 0;
};

/// Threads: one caller.
class BatchJob {
 public:
  /// All of these outlive it. coder: null where no line needs text.
  BatchJob(const BatchPrompts& prompts, JobFiles& files, TextCoder* coder, SequenceDecoder& decoder,
           BatchOptions options);

  /// Until every line has an answer. watch: after each step and each wave of prompts. Errors:
  /// kCancelled; those of files, decoder and coder. Whatever it ends with, what was made is saved.
  base::Status run(const std::function<void(const BatchProgress&)>& watch = {});

 private:
  struct Sequence {
    PromptLine line;
    std::vector<int64_t> prompt;
    std::vector<int64_t> made;
    uint64_t made_max = 0;
    SequenceId prefix = 0;
    uint64_t prefix_tokens = 0;
    size_t lost_with = 0;  // tokens that it had when it was lost
    uint64_t lost = 0;     // times with so many
  };
  /// A sequence that is lost so often without a new token ends the job.
  static constexpr uint64_t kLostMax = 4;
  base::Status run_all(const std::function<void(const BatchProgress&)>& watch);
  base::Status admit();
  base::Status prepare(uint64_t count);
  base::Status prepare_line(uint64_t number);
  base::Result<std::vector<int64_t>> prompt_of(const PromptLine& line);
  void find_prefixes();
  base::Status try_wave(uint64_t count);
  base::Status step();
  base::Status take_lost();
  base::Result<bool> answer_if_done(const Sequence& one);
  base::Result<std::optional<std::string>> text_before_stop(const Sequence& one,
                                                            std::span<const int64_t> made);
  base::Status refuse(const PromptLine& line, std::string_view why);
  base::Status save();

  const BatchPrompts& prompts_;
  JobFiles& files_;
  TextCoder* coder_;
  SequenceDecoder& decoder_;
  BatchOptions options_;
  Admission admission_;
  BatchProgress progress_;
  uint64_t next_line_ = 1;
  std::deque<Sequence> waiting_;           // prepared: a wave, those ahead, and lost ones
  std::map<SequenceId, Sequence> active_;  // by line
  uint64_t saved_ns_ = base::now_ns();
  bool said_unsaved_ = false;  // that keys and values cannot be saved
};

}  // namespace smartinf::train
