// smartinf plan distill: how a distillation's layers divide among ranks, by the times that a run of
// it has measured. Nothing is run.
#include "apps/smartinf/plan_distill.h"

#include <algorithm>
#include <map>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/plan/block_stages.h"
#include "smartinf/train/run_log.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

struct PlanDistillFlags {
  std::string run;
  uint32_t ranks = 2;
  std::string link_text;
  std::string memory_text;
  std::string block_memory_text;
  std::string activations_text;
  std::string gradients_text;
  bool json = false;
};

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// Medians over the steps in the log, by block.
Result<std::vector<plan::BlockCost>> measured(const std::string& run) {
  SI_ASSIGN_OR_RETURN(const std::vector<train::LogRow> rows, train::read_log(run));
  std::map<uint64_t, std::pair<std::vector<double>, std::vector<double>>> by_block;
  for (const train::LogRow& row : rows) {
    if (!row.values.contains("block") || !row.values.contains("teacher_s")) continue;
    auto& [teacher, student] = by_block[row.values["block"].get<uint64_t>()];
    teacher.push_back(row.values["teacher_s"].get<double>());
    student.push_back(row.values["seconds"].get<double>());
  }
  std::vector<plan::BlockCost> blocks;
  for (const auto& [block, times] : by_block) {
    if (block != blocks.size()) break;
    blocks.push_back({median_of(times.first), median_of(times.second), 0, 0});
  }
  if (!blocks.empty() && blocks.size() == by_block.size()) return blocks;
  return Status(ErrorCode::kFailedPrecondition, run + ": its log has no steps of each layer",
                "Let smartinf distill make some steps of each first: --train.steps 5");
}

/// A line for each rank of `width` columns; a column is a share of the slowest stage.
void print_timeline(std::span<const plan::BlockCost> blocks,
                    std::span<const plan::BlockStage> stages, double slowest) {
  constexpr double kWidth = 56;
  uint32_t rank = 0;
  for (const plan::BlockStage& stage : stages) {
    for (uint32_t replica = 0; replica < stage.ranks; ++replica, ++rank) {
      std::string bar;
      double at = 0;
      const auto draw = [&](double seconds, char with) {
        at += seconds / stage.ranks / slowest * kWidth;
        while (static_cast<double>(bar.size()) + 0.5 < at) bar += with;
      };
      for (const plan::BlockCost& block : blocks.subspan(stage.first, stage.end - stage.first)) {
        draw(block.teacher_s, 't');
        draw(block.student_s, 's');
      }
      draw((stage.seconds - at / kWidth * slowest) * stage.ranks, '-');
      fmt::print("rank {:>2}  layers {:>3} to {:>3}{}  {:<56}  {:.3g} s\n", rank, stage.first + 1,
                 stage.end, stage.ranks > 1 ? fmt::format(" (1 of {})", stage.ranks) : "", bar,
                 stage.seconds);
    }
  }
}

int run_plan_distill(const PlanDistillFlags& flags) {
  Result<std::vector<plan::BlockCost>> blocks = measured(flags.run);
  if (!blocks.ok()) return report(blocks.status());
  plan::BlockRanks ranks{.ranks = flags.ranks};
  const auto bytes = [](const std::string& text, uint64_t& into) {
    if (text.empty()) return Status();
    const Result<uint64_t> parsed = base::parse_bytes(text);
    if (parsed.ok()) into = *parsed;
    return parsed.status();
  };
  uint64_t link = 0;
  uint64_t of_block = 0;
  uint64_t gradients = 0;
  for (const Status& parsed :
       {bytes(flags.link_text, link), bytes(flags.memory_text, ranks.memory_bytes),
        bytes(flags.block_memory_text, of_block), bytes(flags.gradients_text, gradients),
        bytes(flags.activations_text, ranks.activation_bytes)}) {
    if (!parsed.ok()) return report(parsed, kExitUsage);
  }
  ranks.link_bytes_per_s = static_cast<double>(link);
  for (plan::BlockCost& block : *blocks) {
    block.memory_bytes = of_block;
    block.gradient_bytes = gradients;
  }
  const Result<std::vector<plan::BlockStage>> stages = plan::divide_blocks(*blocks, ranks);
  if (!stages.ok()) return report(stages.status());
  double slowest = 0;
  double busy = 0;
  double alone = 0;
  for (const plan::BlockStage& stage : *stages) {
    slowest = std::max(slowest, stage.seconds);
    busy += stage.seconds * stage.ranks;
  }
  for (const plan::BlockCost& block : *blocks) alone += block.teacher_s + block.student_s;
  const double idle = 1 - busy / (slowest * flags.ranks);
  if (flags.json) {
    nlohmann::ordered_json line{{"step_s", slowest}, {"alone_s", alone}, {"idle_share", idle}};
    for (const plan::BlockStage& stage : *stages) {
      line["stages"].push_back({{"first", stage.first},
                                {"end", stage.end},
                                {"ranks", stage.ranks},
                                {"seconds", stage.seconds}});
    }
    fmt::print("{}\n", line.dump());
    return kExitDone;
  }
  print_timeline(*blocks, *stages, slowest);
  fmt::print(
      "a step: {:.3g} s, on one rank {:.3g} s ({:.2f} times); ranks are idle for {:.1f} %\n"
      "t: the teacher's layer, s: the student's, -: between ranks\n",
      slowest, alone, alone / slowest, 100 * idle);
  return kExitDone;
}

}  // namespace

void add_plan_distill(CLI::App& plan, Run& run) {
  CLI::App* command = plan.add_subcommand(
      "distill", "Divide the layers of a distillation among ranks, by times that a run measured");
  auto flags = std::make_shared<PlanDistillFlags>();
  command
      ->add_option("RUN", flags->run, "Folder of the run, which has made some steps of each layer")
      ->required()
      ->type_name("RUN");
  command->add_option("--ranks", flags->ranks, "Number of ranks [2]")
      ->check(CLI::Range(1u, 4096u))
      ->type_name("N");
  command->add_option("--memory", flags->memory_text, "Memory of each rank [no limit]")
      ->type_name("SIZE");
  command->add_option("--layer-memory", flags->block_memory_text, "What a layer takes of it")
      ->type_name("SIZE");
  command->add_option("--link", flags->link_text, "Rate between two ranks, per second [no limit]")
      ->type_name("SIZE");
  command
      ->add_option("--activations", flags->activations_text,
                   "Bytes of a step that go from one layer to the next")
      ->type_name("SIZE");
  command
      ->add_option("--gradients", flags->gradients_text,
                   "Bytes of a layer's gradient, which ranks that share it add up")
      ->type_name("SIZE");
  command->add_flag("--json", flags->json, "Print one JSON object");
  command->footer(
      "Several ranks may share a stage; smartinf distill itself gives each rank layers of its "
      "own.\n\n"
      "Example:\n"
      "  smartinf plan distill runs/distill --ranks 4");
  command->callback([flags, &run] { run = [flags] { return run_plan_distill(*flags); }; });
}

}  // namespace smartinf::apps
