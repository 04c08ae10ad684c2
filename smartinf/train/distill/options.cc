#include "smartinf/train/distill/options.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "smartinf/train/run_log.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

constexpr uint32_t kStageMost = 1 << 16;  // blocks or ranks of a stage

double median_of(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace

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

Result<Quantising> parse_quantising(std::string_view text) {
  Quantising made;
  constexpr std::string_view kBegin = "int4";
  constexpr std::string_view kGroup = ",group=";
  const Status wrong(ErrorCode::kInvalidArgument, fmt::format("student.quantise is \"{}\"", text),
                     "Write \"int4\", or \"int4,group=64\" with a multiple of 8 up to 1024");
  if (!text.starts_with(kBegin)) return wrong;
  text.remove_prefix(kBegin.size());
  if (text.empty()) return made;
  if (!text.starts_with(kGroup)) return wrong;
  text.remove_prefix(kGroup.size());
  const char* const end = text.data() + text.size();
  const auto [behind, error] = std::from_chars(text.data(), end, made.group);
  const bool whole = error == std::errc() && behind == end;
  if (!whole || made.group == 0 || made.group % 8 != 0 || made.group > 1024) return wrong;
  return made;
}

std::optional<std::vector<plan::BlockStage>> parse_stages(std::string_view text) {
  std::vector<plan::BlockStage> stages;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](uint32_t& into) {
    const auto [behind, error] = std::from_chars(at, end, into);
    at = behind;
    return error == std::errc() && into > 0 && into <= kStageMost;
  };
  do {
    plan::BlockStage stage;
    uint32_t blocks = 0;
    if (!number(blocks)) return std::nullopt;
    if (at < end && *at == 'x' && (++at, !number(stage.ranks))) return std::nullopt;
    stage.first = stages.empty() ? 0 : stages.back().end;
    stage.end = stage.first + blocks;
    stages.push_back(stage);
  } while (at < end && *at++ == ',');
  if (at < end || text.back() == ',') return std::nullopt;
  return stages;
}

std::string stages_text(std::span<const plan::BlockStage> stages) {
  std::string text;
  for (const plan::BlockStage& stage : stages) {
    text += fmt::format("{}{}{}", text.empty() ? "" : ",", stage.end - stage.first,
                        stage.ranks > 1 ? fmt::format("x{}", stage.ranks) : "");
  }
  return text;
}

Result<MeasuredBlocks> measured_blocks(const std::string& run) {
  SI_ASSIGN_OR_RETURN(const std::vector<LogRow> rows, read_log(run));
  MeasuredBlocks measured;
  /// Of a block's steps: teacher, forward and backward, update.
  std::map<uint64_t, std::array<std::vector<double>, 3>> by_block;
  for (const LogRow& row : rows) {
    if (!row.values.contains("block") || !row.values.contains("teacher_s")) continue;
    const auto value = [&](const char* name) { return row.values[name].get<double>(); };
    measured.micro_batches = row.values.value("micro_batches", uint64_t{1});
    const double all = static_cast<double>(measured.micro_batches) /
                       row.values.value("own_micro_batches", double{1});
    auto& [teacher, student, update] = by_block[row.values["block"].get<uint64_t>()];
    teacher.push_back(value("teacher_s") * all);
    student.push_back((value("forward_s") + value("backward_s")) * all);
    update.push_back(value("update_s"));
  }
  for (auto& [block, times] : by_block) {
    if (block != measured.blocks.size()) break;
    plan::BlockCost& cost = measured.blocks.emplace_back();
    cost.teacher_s = median_of(times[0]);
    cost.student_s = median_of(times[1]);
    cost.update_s = median_of(times[2]);
  }
  if (!by_block.empty() && measured.blocks.size() == by_block.size()) return measured;
  return Status(ErrorCode::kFailedPrecondition, run + ": its log has no steps of each layer",
                "Let smartinf distill make some steps of each first: --train.steps 5");
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
  const int given =
      int{!options.student.empty()} + int{!options.prune.empty()} + int{!options.quantise.empty()};
  if (given != 1) {
    return wrong(given == 0 ? "none of student.from, student.prune and student.quantise is given"
                            : "more than one of student.from, student.prune and student.quantise "
                              "is given",
                 "Name a student's folder, what stays of the teacher: student.prune = "
                 "\"ffn=0.5,heads=0.75\", or how it is rounded: student.quantise = \"int4\"");
  }
  if (options.whole_steps > 0 && (options.top_k == 0 || !options.quantise.empty())) {
    return wrong(
        "distill.whole_steps is set, for which the student learns the teacher's logits and "
        "changes its weights",
        options.top_k == 0 ? "Set distill.top_k" : "Leave it out with student.quantise");
  }
  if (!options.quantise.empty()) return parse_quantising(options.quantise).status();
  return parse_pruning(options.prune).status();
}

}  // namespace smartinf::train
