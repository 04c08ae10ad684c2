// smartinf plan distill: how a distillation's layers divide among ranks, by the times that a run of
// it has measured. Nothing is run.
#include "apps/smartinf/plan_distill.h"

#include <algorithm>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/plan/block_stages.h"
#include "smartinf/train/distill/options.h"

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
        draw(block.update_s * stage.ranks, 'u');
      }
      draw((stage.seconds - at / kWidth * slowest) * stage.ranks, '-');
      fmt::print("rank {:>2}  layers {:>3} to {:>3}{}  {:<56}  {:.3g} s\n", rank, stage.first + 1,
                 stage.end, stage.ranks > 1 ? fmt::format(" (1 of {})", stage.ranks) : "", bar,
                 stage.seconds);
    }
  }
}

int run_plan_distill(const PlanDistillFlags& flags) {
  Result<train::MeasuredBlocks> measured = train::measured_blocks(flags.run);
  if (!measured.ok()) return report(measured.status());
  std::vector<plan::BlockCost>& blocks = measured->blocks;
  plan::BlockRanks ranks{.ranks = flags.ranks, .micro_batches = measured->micro_batches};
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
  for (plan::BlockCost& block : blocks) {
    block.memory_bytes = of_block;
    block.gradient_bytes = gradients;
  }
  const Result<std::vector<plan::BlockStage>> stages = plan::divide_blocks(blocks, ranks);
  if (!stages.ok()) return report(stages.status());
  double slowest = 0;
  double busy = 0;
  double alone = 0;
  for (const plan::BlockStage& stage : *stages) {
    slowest = std::max(slowest, stage.seconds);
    busy += stage.seconds * stage.ranks;
  }
  for (const plan::BlockCost& block : blocks) {
    alone += block.teacher_s + block.student_s + block.update_s;
  }
  const double idle = 1 - busy / (slowest * flags.ranks);
  if (flags.json) {
    nlohmann::ordered_json line{{"step_s", slowest},
                                {"alone_s", alone},
                                {"idle_share", idle},
                                {"distill.stages", train::stages_text(*stages)}};
    for (const plan::BlockStage& stage : *stages) {
      line["stages"].push_back({{"first", stage.first},
                                {"end", stage.end},
                                {"ranks", stage.ranks},
                                {"seconds", stage.seconds}});
    }
    fmt::print("{}\n", line.dump());
    return kExitDone;
  }
  print_timeline(blocks, *stages, slowest);
  fmt::print(
      "a step: {:.3g} s, on one rank {:.3g} s ({:.2f} times); ranks are idle for {:.1f} %\n"
      "t: the teacher's layer, s: the student's, u: its update, -: between ranks\n"
      "run it so: --distill.stages {}\n",
      slowest, alone, alone / slowest, 100 * idle, train::stages_text(*stages));
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
      "Several ranks may share layers: each computes some micro batches of a step.\n\n"
      "Example:\n"
      "  smartinf plan distill runs/distill --ranks 4");
  command->callback([flags, &run] { run = [flags] { return run_plan_distill(*flags); }; });
}

}  // namespace smartinf::apps
