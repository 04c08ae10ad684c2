// The line that answers a prompt, in the form of the prompt's line. The same answer is the same
// text, whenever it is made: nothing in it is of a time or of chance.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "smartinf/train/batch/prompt_line.h"

namespace smartinf::train {

struct Answer {
  std::string_view text;            // of a line that needs_text()
  std::span<const int64_t> tokens;  // new ones, without an end token
  bool stopped = false;             // by an end token or a stop text; else there may be no more
  uint64_t prompt_tokens = 0;
};

/// JSON with a newline. job: a number of the job's own, of which the ids in OpenAI's form are made.
std::string answer_line(const PromptLine& line, const Answer& answer, uint64_t job);
/// For a line that gets no answer.
std::string error_line(const PromptLine& line, std::string_view why, uint64_t job);

}  // namespace smartinf::train
