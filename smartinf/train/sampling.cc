#include "smartinf/train/sampling.h"

#include <fmt/format.h>

namespace smartinf::train {

base::Status validate(const Sampling& sampling) {
  const auto wrong = [](const char* flag, double value, const char* advice) {
    return base::Status(base::ErrorCode::kInvalidArgument, fmt::format("{} is {}", flag, value),
                        advice);
  };
  if (!(sampling.temperature >= 0 && sampling.temperature <= 100)) {
    return wrong("--temperature", sampling.temperature, "Choose a number from 0 to 100.");
  }
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
    return wrong("--top-p", sampling.top_p, "Choose a number above 0, up to 1.");
  }
  return base::Status();
}

}  // namespace smartinf::train
