// `smartinf plan`: what a model needs of a machine, and which way of running it to take.
#include <cstdio>
#include <fstream>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/sim/planner.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/sim_flags.h"

namespace smartinf::apps {
namespace {

using nlohmann::ordered_json;

struct PlanFlags {
  SimFlags question;
  std::string model;
  std::string html;
  std::string recipe;
  std::string precision = "bf16";
  bool json = false;
};

base::Status write_text(const std::string& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.flush();
  if (!file) return base::errno_status(errno, "cannot write", path);
  return {};
}

void print_json(const sim::Plan& plan) {
  const sim::Choice& best = plan.choices[plan.recommended];
  ordered_json ways = ordered_json::array();
  for (const sim::Choice& choice : plan.choices) {
    ways.push_back({{"way", choice.label},
                    {"total_s", choice.times.total_s},
                    {"forward_s", choice.times.forward_s},
                    {"backward_s", choice.times.backward_s},
                    {"update_s", choice.times.update_s},
                    {"tokens_per_s", choice.tokens_per_s},
                    {"bound_by", choice.times.bound_by},
                    {"exact", choice.exact},
                    {"fits", choice.fits},
                    {"shortfall", choice.shortfall},
                    {"drive_life_days", choice.drive_life_days},
                    {"cost_per_mtoken", choice.cost_per_mtoken}});
  }
  ordered_json next = ordered_json::array();
  for (const sim::Purchase& purchase : plan.purchases) {
    next.push_back(
        {{"what", purchase.what}, {"total_s", purchase.step_s}, {"saved", purchase.saved}});
  }
  const ordered_json all{
      {"model", plan.model.name},
      {"parameters", plan.model.parameters()},
      {"machine", plan.machine.name},
      {"fits", plan.fits},
      {"recommended", best.label},
      {"gpu_bytes", best.need.gpu_bytes},
      {"host_bytes", best.need.host_bytes},
      {"host_bytes_without_checkpoints", best.need.host_bytes_without_checkpoints},
      {"memory_host_bytes", best.need.memory_host_bytes},
      {"memory_host_bytes_without_checkpoints", best.need.memory_host_bytes_without_checkpoints},
      {"device_bytes", best.need.drive_bytes},
      {"total_s", best.times.total_s},
      {"tokens_per_s", best.tokens_per_s},
      {"bound_by", best.times.bound_by},
      {"drive_life_days", best.drive_life_days},
      {"cost_per_mtoken", best.cost_per_mtoken},
      {"ways", ways},
      {"buy_next", next}};
  fmt::print("{}\n", all.dump(2));
}

void print_plan(const sim::Plan& plan) {
  const sim::Choice& best = plan.choices[plan.recommended];
  fmt::print("{}: {:.2f} B parameters on {} ({}, {} x {})\n", plan.model.name,
             static_cast<double>(plan.model.parameters()) / 1e9, plan.machine.name,
             plan.machine.gpu.name, plan.machine.device_count(), plan.machine.devices.front().name);
  fmt::print("needs  GPU {}, host {}, each device {}\n", base::format_bytes(best.need.gpu_bytes),
             base::format_bytes(best.need.host_bytes), base::format_bytes(best.need.drive_bytes));
  if (best.need.host_bytes_without_checkpoints > 0) {
    fmt::print("       host {} without checkpoint_activations; {} and {} with where = \"memory\"\n",
               base::format_bytes(best.need.host_bytes_without_checkpoints),
               base::format_bytes(best.need.memory_host_bytes),
               base::format_bytes(best.need.memory_host_bytes_without_checkpoints));
  }
  fmt::print("{}\n\n", plan.fits ? "it fits" : "IT DOES NOT FIT: " + best.shortfall);
  fmt::print("  {:<36} {:>9} {:>9} {:>6} {:>10} {:>8}  {}\n", "way", "step", "tokens/s", "exact",
             "drive life", "cost/Mt", "bound by");
  for (size_t i = 0; i < plan.choices.size(); ++i) {
    const sim::Choice& choice = plan.choices[i];
    fmt::print("{} {:<36} {:>9} {:>9.1f} {:>6} {:>10} {:>8}  {}{}\n",
               i == plan.recommended ? "*" : " ", choice.label,
               base::format_seconds(choice.times.total_s), choice.tokens_per_s,
               choice.exact ? "yes" : "no",
               choice.drive_life_days > 0 ? fmt::format("{:.0f} d", choice.drive_life_days) : "-",
               choice.cost_per_mtoken > 0 ? fmt::format("{:.2f}", choice.cost_per_mtoken) : "-",
               choice.times.bound_by, choice.fits ? "" : " (does not fit)");
  }
  fmt::print("\nwhat to buy next (for the way marked *)\n");
  for (const sim::Purchase& purchase : plan.purchases) {
    fmt::print("  {:>6.1f} %  {}\n", 100 * purchase.saved, purchase.what);
  }
}

int run_plan(const PlanFlags& flags) {
  SimFlags question_flags = flags.question;
  if (!flags.model.empty()) question_flags["model"] = flags.model;
  if (question_flags.find("machine") == question_flags.end()) {
    question_flags["machine"] = "workstation-gen4";
  }
  auto question = apply_sim_flags(question_flags);
  if (!question.ok()) return report(question.status(), kExitUsage);
  question->options.value_bytes = flags.precision == "f32" ? 4 : 2;
  const auto given = [&](const char* name) { return question_flags.count(name) > 0; };
  const bool asked = given("method") || given("state-format") || given("hide");
  // Asked for a format only, and nothing there can update: the host does.
  if (!given("method") && !question->machine.can_update()) {
    question->options.method = sim::Method::kBaseline;
  }
  const auto plan = sim::make_plan(question->model, question->machine, question->options, asked);
  if (!plan.ok()) return report(plan.status(), kExitUsage);
  if (!flags.html.empty()) {
    const base::Status written = write_text(flags.html, sim::plan_html(*plan));
    if (!written.ok()) return report(written);
  }
  if (!flags.recipe.empty()) {
    const auto recipe = sim::plan_recipe(*plan);
    if (!recipe.ok()) return report(recipe.status());
    const base::Status written = write_text(flags.recipe, *recipe);
    if (!written.ok()) return report(written);
  }
  if (flags.json) {
    print_json(*plan);
  } else {
    print_plan(*plan);
  }
  return kExitDone;
}

}  // namespace

void add_plan(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "plan", "What a model needs of a machine: bytes, seconds, drive life, what to buy");
  auto flags = std::make_shared<PlanFlags>();
  command->add_option("MODEL", flags->model, "Preset or a Hugging Face config.json")
      ->type_name("MODEL");
  add_sim_flags(*command, flags->question);
  command->add_option("--html", flags->html, "Also write a report that opens in any browser")
      ->type_name("FILE");
  command->add_option("--recipe", flags->recipe, "Write the recommended way as a recipe for train")
      ->type_name("FILE");
  command
      ->add_option(
          "--precision", flags->precision,
          "Of weights and activations, for the trainer's memory on a machine without a GPU "
          "and the recipe; seconds stay those of 16 bit")
      ->check(CLI::IsMember({"bf16", "f32"}))
      ->capture_default_str();
  command->add_flag("--json", flags->json, "Print one JSON object");
  command->footer(
      "The machine is workstation-gen4 unless --machine names another or a TOML file. Marked and\n"
      "recommended is the fastest way that changes no bits, or the one that --method,\n"
      "--state-format and --hide name.\n\n"
      "Examples:\n"
      "  smartinf plan llama3-8B --machine workstation-gen5 --html plan.html\n"
      "  smartinf plan ./config.json --machine my.toml --recipe train.toml\n"
      "  smartinf plan llama3-8B --method su+o+c --ratio 0.02 --recipe train.toml\n"
      "  smartinf plan gpt2-33.0B --machine smartssd-a5000 --json");
  command->callback([flags, &run] { run = [flags] { return run_plan(*flags); }; });
}

}  // namespace smartinf::apps
