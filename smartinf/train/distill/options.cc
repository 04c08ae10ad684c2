#include "smartinf/train/distill/options.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include <fmt/format.h>

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

Result<Pruning> parse_pruning(std::string_view whole) {
  std::string_view text = whole;
  const auto wrong_share = [&] {
    return Status(ErrorCode::kInvalidArgument, fmt::format("student.prune is \"{}\"", whole),
                  "Write the shares that stay, above 0 and at most 1: \"ffn=0.5,heads=0.75\"");
  };
  Pruning pruning;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    const size_t sign = part.find('=');
    const std::string_view name = part.substr(0, sign);
    double* const share =
        name == "ffn" ? &pruning.ffn : (name == "heads" ? &pruning.heads : nullptr);
    if (share == nullptr || sign == std::string_view::npos) return wrong_share();
    const std::string_view number = part.substr(sign + 1);
    const char* const end = number.data() + number.size();
    const auto [behind, error] = std::from_chars(number.data(), end, *share);
    if (error != std::errc() || behind != end || !(*share > 0 && *share <= 1)) {
      return wrong_share();
    }
  }
  return pruning;
}

Status validate(const DistillOptions& options) {
  const auto wrong = [](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  if (options.teacher.empty()) {
    return wrong("teacher.from is not given",
                 "Name the teacher's folder, as transformers' save_pretrained() or smartinf export "
                 "writes it");
  }
  if (options.student.empty() == options.prune.empty()) {
    return wrong(options.student.empty() ? "neither student.from nor student.prune is given"
                                         : "student.from and student.prune are both given",
                 "Name a student's folder, or what stays of the teacher: "
                 "student.prune = \"ffn=0.5,heads=0.75\"");
  }
  return parse_pruning(options.prune).status();
}

}  // namespace smartinf::train
