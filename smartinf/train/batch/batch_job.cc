#include "smartinf/train/batch/batch_job.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/train/batch/answer.h"
#include "smartinf/train/batch/shared_prefixes.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using Tokens = std::vector<int64_t>;

Result<BatchPrompts> BatchPrompts::open(const std::string& path, const PromptDefaults& defaults) {
  BatchPrompts all;
  std::unordered_map<uint64_t, uint64_t> line_of_id;  // by checksum
  const auto visit = [&](uint64_t number, std::string_view text) {
    if (is_blank(text)) return Status();
    const PromptLine line = read_prompt_line(text, number, defaults);
    const auto id = base::checksum(std::as_bytes(std::span(line.id)));
    const auto [first, is_new] = line_of_id.emplace(id, number);
    if (!is_new) all.same_id.emplace(number, first->second);
    ++all.prompts;
    all.wrong += (!line.error.empty() || !is_new) ? 1 : 0;
    if (!line.error.empty()) return Status();
    all.needs_text = all.needs_text || line.needs_text();
    all.tokens_max = std::max(all.tokens_max, line.tokens_max);
    all.prompt_tokens_max = std::max<uint64_t>(all.prompt_tokens_max, line.tokens.size());
    if (!line.tokens.empty()) return Status();
    all.long_lines.emplace(line.text.size() + line.messages.size(), number);
    if (all.long_lines.size() > kLongLines) all.long_lines.erase(all.long_lines.begin());
    return Status();
  };
  SI_ASSIGN_OR_RETURN(all.file, PromptsFile::open(path, visit));
  all.defaults = defaults;
  return all;
}

Result<uint64_t> longest_sequence(const BatchPrompts& prompts, TextCoder* coder,
                                  uint64_t positions) {
  uint64_t longest = prompts.prompt_tokens_max;
  if (!prompts.long_lines.empty()) {
    longest = std::max(longest, prompts.long_lines.rbegin()->first / 2);
  }
  for (const auto& [bytes, number] : prompts.long_lines) {
    SI_ASSIGN_OR_RETURN(const std::string text, prompts.file->read(number));
    const Result<Tokens> tokens = coder->encode(read_prompt_line(text, number, prompts.defaults));
    if (tokens.ok()) {
      longest = std::max<uint64_t>(longest, tokens->size());
    } else if (tokens.status().code() != ErrorCode::kInvalidArgument) {
      return tokens.status();
    }
  }
  longest += prompts.tokens_max;
  return positions == 0 ? longest : std::min(longest, positions);
}

BatchJob::BatchJob(const BatchPrompts& prompts, JobFiles& files, TextCoder* coder,
                   SequenceDecoder& decoder, BatchOptions options)
    : prompts_(prompts),
      files_(files),
      coder_(coder),
      decoder_(decoder),
      options_(std::move(options)),
      admission_(options_.sequences) {
  progress_.prompts = prompts.prompts;
  progress_.answered = files.answers();
}

Status BatchJob::run(const std::function<void(const BatchProgress&)>& watch) {
  const Status ran = run_all(watch);
  if (ran.ok()) return files_.finish(options_.keep_journal);
  const bool stopped = ran.code() == ErrorCode::kCancelled;
  const Status saved = stopped ? save() : files_.save();
  return stopped && !saved.ok() ? saved : ran;
}

Status BatchJob::run_all(const std::function<void(const BatchProgress&)>& watch) {
  const auto note = [&] {
    progress_.answered = files_.answers();
    progress_.active = active_.size();
    progress_.shared_tokens = decoder_.shared_tokens();
    if (watch) watch(progress_);
  };
  while (true) {
    if (options_.stop.stop_requested()) {
      return Status(ErrorCode::kCancelled, "stopped; the same command goes on from here");
    }
    SI_RETURN_IF_ERROR(admit());
    note();
    if (active_.empty()) return Status();
    SI_RETURN_IF_ERROR(step());
    if (base::seconds_since(saved_ns_) >= options_.save_every_s) SI_RETURN_IF_ERROR(save());
    note();
  }
}

Status BatchJob::save() {
  SI_RETURN_IF_ERROR(files_.save());
  // The tokens are safe; keys and values can be computed again.
  if (const Status saved = decoder_.save(); !saved.ok() && !std::exchange(said_unsaved_, true)) {
    base::log(base::LogLevel::kWarning, saved.to_string());
  }
  saved_ns_ = base::now_ns();
  return Status();
}

Status BatchJob::admit() {
  const uint64_t begin_ns = base::now_ns();
  while (!options_.stop.stop_requested()) {
    const uint64_t left = waiting_.size() + prompts_.file->lines() - (next_line_ - 1);
    const uint64_t wave = admission_.wave(left);
    if (wave == 0) break;
    SI_RETURN_IF_ERROR(prepare(wave + options_.ahead));
    const uint64_t count = std::min<uint64_t>(wave, waiting_.size());
    if (count == 0) break;
    find_prefixes();
    SI_RETURN_IF_ERROR(try_wave(count));
  }
  progress_.prompt_seconds += base::seconds_since(begin_ns);
  return Status();
}

/// Takes lines until so many prompts wait, or there are no more.
Status BatchJob::prepare(uint64_t count) {
  while (waiting_.size() < count && next_line_ <= prompts_.file->lines()) {
    if (options_.stop.stop_requested()) return Status();
    const uint64_t number = next_line_++;
    if (!files_.answered(number)) SI_RETURN_IF_ERROR(prepare_line(number));
  }
  return Status();
}

Status BatchJob::prepare_line(uint64_t number) {
  SI_ASSIGN_OR_RETURN(const std::string text, prompts_.file->read(number));
  if (is_blank(text)) return Status();
  Sequence one;
  one.line = read_prompt_line(text, number, prompts_.defaults);
  if (!one.line.error.empty()) return refuse(one.line, one.line.error);
  if (const auto same = prompts_.same_id.find(number); same != prompts_.same_id.end()) {
    return refuse(one.line, fmt::format("line {} has the same id", same->second));
  }
  Result<Tokens> prompt = prompt_of(one.line);
  if (prompt.status().code() == ErrorCode::kInvalidArgument) {
    return refuse(one.line, prompt.status().what());
  }
  SI_ASSIGN_OR_RETURN(one.prompt, std::move(prompt));
  one.line.text = std::string();
  one.line.messages = std::string();
  one.made = files_.take_tokens(number);
  one.made_max = one.line.tokens_max;
  if (options_.positions != 0) {
    one.made_max = std::min(one.made_max, options_.positions - one.prompt.size());
  }
  if (one.prompt.size() + one.made_max > options_.longest) {
    return refuse(
        one.line,
        fmt::format("it may have {} tokens with its answer, and memory is planned for {}; "
                    "put it into a file of its own",
                    one.prompt.size() + one.made_max, options_.longest));
  }
  SI_ASSIGN_OR_RETURN(const bool done, answer_if_done(one));
  if (!done) waiting_.push_back(std::move(one));
  return Status();
}

/// Errors: kInvalidArgument: of the line.
Result<Tokens> BatchJob::prompt_of(const PromptLine& line) {
  const auto wrong = [](std::string why) {
    return Status(ErrorCode::kInvalidArgument, std::move(why));
  };
  Tokens tokens = line.tokens;
  if (tokens.empty()) {
    SI_ASSIGN_OR_RETURN(tokens, coder_->encode(line));
  }
  if (tokens.empty()) return wrong("the prompt is empty");
  for (const int64_t token : tokens) {
    if (token >= 0 && static_cast<uint64_t>(token) < options_.vocabulary) continue;
    return wrong(fmt::format("the prompt has token {}, and the model has {} tokens", token,
                             options_.vocabulary));
  }
  if (options_.positions == 0 || tokens.size() < options_.positions) return tokens;
  return wrong(fmt::format("the prompt has {} tokens, and the model knows {} positions",
                           tokens.size(), options_.positions));
}

/// Those that begin alike come to stand together.
void BatchJob::find_prefixes() {
  std::vector<std::span<const int64_t>> prompts;
  std::map<SequenceId, std::span<const int64_t>> kept;
  for (const Sequence& one : waiting_) prompts.push_back(one.prompt);
  for (const auto& [line, one] : active_) {
    if (one.prefix_tokens > 0) kept[one.prefix] = std::span(one.prompt).first(one.prefix_tokens);
  }
  std::vector<std::span<const int64_t>> beginnings;
  for (const auto& [id, tokens] : kept) beginnings.push_back(tokens);
  const std::vector<uint64_t> shared = shared_prefixes(prompts, beginnings, kPromptPart);
  std::map<SequenceId, std::deque<Sequence>> together;
  std::vector<SequenceId> order;
  for (size_t i = 0; i < shared.size(); ++i) {
    Sequence& one = waiting_[i];
    one.prefix_tokens = shared[i];
    one.prefix = one.line.number;
    if (shared[i] > 0) {
      const auto tokens = std::as_bytes(std::span(one.prompt).first(shared[i]));
      one.prefix = base::checksum(tokens) | kPrefixBit;
    }
    std::deque<Sequence>& group = together[one.prefix];
    if (group.empty()) order.push_back(one.prefix);
    group.push_back(std::move(one));
  }
  waiting_.clear();
  for (const SequenceId id : order) std::ranges::move(together[id], std::back_inserter(waiting_));
}

/// Takes in the first `count` of those that wait, if there is room for them.
Status BatchJob::try_wave(uint64_t count) {
  std::vector<SequenceInput> inputs;
  uint64_t tokens = 0;
  for (size_t i = 0; i < count; ++i) {
    const Sequence& one = waiting_[i];
    inputs.push_back({one.line.number, one.prompt, one.made, one.prompt.size() + one.made_max,
                      one.prefix, one.prefix_tokens});
    tokens += one.prompt.size();
  }
  const Status taken = decoder_.admit(inputs);
  if (taken.code() == ErrorCode::kNoSpace || taken.code() == ErrorCode::kOutOfMemory) {
    if (admission_.refused(count)) return Status();
    SI_RETURN_IF_ERROR(refuse(waiting_.front().line, taken.to_string()));
    waiting_.pop_front();
    return Status();
  }
  SI_RETURN_IF_ERROR(taken);
  admission_.taken_in(count);
  progress_.prompt_tokens += tokens;
  for (size_t i = 0; i < count; ++i) {
    active_.emplace(waiting_.front().line.number, std::move(waiting_.front()));
    waiting_.pop_front();
  }
  return take_lost();
}

/// Lost sequences are taken in again, before all others.
Status BatchJob::take_lost() {
  const std::vector<LostSequence> lost = decoder_.take_lost();
  for (const LostSequence& one : lost) {
    Sequence& sequence = active_.at(one.id);
    if (std::exchange(sequence.lost_with, sequence.made.size()) != sequence.made.size()) {
      sequence.lost = 0;
    }
    if (++sequence.lost == kLostMax) return one.why;
    waiting_.push_front(std::move(sequence));
    active_.erase(one.id);
    admission_.left();
  }
  if (!lost.empty()) {
    progress_.lost += lost.size();
    base::log(base::LogLevel::kWarning, fmt::format("{} of the sequences are computed again: {}",
                                                    lost.size(), lost.front().why.to_string()));
  }
  return Status();
}

Status BatchJob::step() {
  const uint64_t begin_ns = base::now_ns();
  std::vector<JobFiles::NewToken> made;
  SI_RETURN_IF_ERROR(decoder_.step([&](SequenceId id, std::span<const float> logits) {
    Sequence& one = active_.at(id);
    const int64_t token = choose_token(logits, one.line.sampling, one.made.size());
    one.made.push_back(token);
    made.push_back({id, token});
    return token;
  }));
  SI_RETURN_IF_ERROR(files_.add_tokens(made));
  progress_.tokens += made.size();
  for (const JobFiles::NewToken& token : made) {
    SI_ASSIGN_OR_RETURN(const bool done, answer_if_done(active_.at(token.line)));
    if (!done) continue;
    decoder_.release(token.line);
    active_.erase(token.line);
    admission_.left();
  }
  progress_.token_seconds += base::seconds_since(begin_ns);
  return take_lost();
}

/// Whether a sequence is at its end follows from its tokens alone, so that a job that goes on later
/// ends it at the same one.
Result<bool> BatchJob::answer_if_done(const Sequence& one) {
  if (one.made.empty()) return false;
  const bool ended =
      std::ranges::find(options_.end_tokens, one.made.back()) != options_.end_tokens.end();
  const std::span<const int64_t> tokens =
      std::span(one.made).first(one.made.size() - (ended ? 1 : 0));
  SI_ASSIGN_OR_RETURN(std::optional<std::string> text, text_before_stop(one, tokens));
  const bool stopped = ended || text.has_value();
  if (!stopped && one.made.size() < one.made_max) return false;
  if (!text && one.line.needs_text()) {
    SI_ASSIGN_OR_RETURN(text, coder_->continuation(one.prompt, tokens));
  }
  const Answer answer{text ? std::string_view(*text) : std::string_view(), tokens, stopped,
                      one.prompt.size()};
  SI_RETURN_IF_ERROR(
      files_.add_answer(one.line.number, answer_line(one.line, answer, files_.job())));
  return true;
}

/// The text in front of a stop text; nothing where there is none.
Result<std::optional<std::string>> BatchJob::text_before_stop(const Sequence& one,
                                                              std::span<const int64_t> made) {
  std::optional<std::string> none;
  if (one.line.stop.empty()) return none;
  const auto first_stop = [&](std::string_view text) {
    size_t first = text.npos;
    for (const std::string& stop : one.line.stop) first = std::min(first, text.find(stop));
    return first;
  };
  // A stop text that the last token ends has a token for each of its bytes at most. What stands in
  // front of it may be shown otherwise where a text begins.
  constexpr size_t kInFront = 8;
  size_t longest = 0;
  for (const std::string& stop : one.line.stop) longest = std::max(longest, stop.size());
  SI_ASSIGN_OR_RETURN(const std::string end,
                      coder_->decode(made.last(std::min(made.size(), longest + kInFront))));
  if (first_stop(end) == end.npos) return none;
  SI_ASSIGN_OR_RETURN(std::string text, coder_->continuation(one.prompt, made));
  const size_t first = first_stop(text);
  if (first == text.npos) return none;
  text.resize(first);
  return std::optional(std::move(text));
}

Status BatchJob::refuse(const PromptLine& line, std::string_view why) {
  ++progress_.refused;
  return files_.add_answer(line.number, error_line(line, why, files_.job()));
}

}  // namespace smartinf::train
