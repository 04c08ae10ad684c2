// `smartinf plan`: what training a model, or generating with it, needs of a machine.
#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/file.h"
#include "smartinf/base/units.h"
#include "smartinf/sim/planner.h"
#include "smartinf/train/options.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/plan_cluster.h"
#include "apps/smartinf/plan_distill.h"
#include "apps/smartinf/plan_generation.h"
#include "apps/smartinf/plan_table.h"
#include "apps/smartinf/python_script.h"
#include "apps/smartinf/sim_flags.h"

namespace smartinf::apps {
namespace {

using nlohmann::ordered_json;

constexpr std::array kMethods{sim::Method::kBaseline, sim::Method::kSmart, sim::Method::kSmartOver,
                              sim::Method::kSmartComp};

struct PlanFlags {
  SimFlags question;
  std::string model;
  std::string html;
  std::string recipe;
  std::string precision = "bf16";
  std::string with;
  std::string data;
  bool json = false;
};

/// The part of a run that stays in memory, and the part that streams; null where all weights stay
/// where the model computes.
ordered_json streaming_of(const sim::MemoryNeed& need) {
  const plan::TrainingPlan& plan = need.plan;
  if (!plan.streams) return nullptr;
  return {{"units", need.units.size()},
          {"units_on_gpu", need.gpu_bytes > 0 ? plan.placement.on_accelerator : 0},
          {"units_in_memory", plan.placement.in_memory},
          {"units_from_devices", need.units_from_devices()},
          {"gradients_in_memory_bytes", plan.gradient_memory_bytes},
          {"inputs_in_memory", plan.inputs_in_memory},
          {"inputs_on_devices", plan.inputs_spooled},
          {"input_bytes", plan.input_bytes},
          {"spool_bytes", plan.spool_bytes}};
}

ordered_json to_json(const sim::Plan& plan) {
  const sim::PlanOption& best = plan.best();
  ordered_json options = ordered_json::array();
  for (const sim::PlanOption& option : plan.options) {
    options.push_back({{"option", option.label},
                       {"overlap", base::enum_name(option.options.overlap)},
                       {"total_s", option.times.total_s},
                       {"forward_s", option.times.forward_s},
                       {"backward_s", option.times.backward_s},
                       {"update_s", option.times.update_s},
                       {"tokens_per_s", option.tokens_per_s},
                       {"bound_by", option.times.bound_by},
                       {"exact", option.exact},
                       {"fits", option.fits},
                       {"shortfall", option.shortfall},
                       {"drive_life_days", option.drive_life_days},
                       {"cost_per_mtoken", option.cost_per_mtoken}});
  }
  ordered_json overlaps = ordered_json::object();
  for (const auto& [overlap, step_s] : plan.overlaps) overlaps[base::enum_name(overlap)] = step_s;
  ordered_json next = ordered_json::array();
  for (const sim::Purchase& purchase : plan.purchases) {
    next.push_back(
        {{"what", purchase.what}, {"total_s", purchase.step_s}, {"saved", purchase.saved}});
  }
  ordered_json uses = ordered_json::array();
  for (const sim::UseNeed& one : plan.uses) {
    const auto parts = [](const std::vector<plan::MemoryPart>& all) {
      ordered_json bytes = ordered_json::object();
      for (const plan::MemoryPart& part : all) bytes[part.name] = part.bytes;
      return bytes;
    };
    uses.push_back({{"with", sim::use_name(one.use)},
                    {"fits", one.shortfall.empty()},
                    {"shortfall", one.shortfall},
                    {"streaming", streaming_of(one.need)},
                    {"gpu_bytes", one.need.gpu_bytes},
                    {"host_bytes", one.need.host_bytes},
                    {"memory_budget", one.need.memory_budget},
                    {"gradients_in_memory_bytes", one.need.plan.gradient_memory_bytes},
                    {"device_bytes", one.need.drive_bytes},
                    {"gpu_parts", parts(one.need.gpu_parts)},
                    {"host_parts", parts(one.need.host_parts)}});
  }
  // The host's memory with other settings of train, which cost no question of their own.
  const auto host_bytes = [&](bool recompute, bool in_memory) {
    sim::TrainingUse use = plan.use;
    use.recompute = recompute;
    use.in_memory = in_memory;
    return sim::memory_need(plan.model, plan.machine, best.options, use).host_bytes;
  };
  return {{"model", plan.model.name},
          {"parameters", plan.model.parameters()},
          {"machine", plan.machine.name},
          {"fits", plan.fits},
          {"result", sim::plan_result(plan).text()},
          {"with", sim::use_name(plan.use)},
          {"accumulation", best.options.accumulation},
          {"ranks", best.options.ranks},
          {"machines", best.options.machines},
          {"launch", sim::launch_line(best.options, "RECIPE")},
          {"uses", uses},
          {"recommended", best.label},
          {"streaming", streaming_of(best.need)},
          {"gpu_bytes", best.need.gpu_bytes},
          {"host_bytes", best.need.host_bytes},
          {"host_bytes_without_checkpoints", host_bytes(false, false)},
          {"memory_host_bytes", host_bytes(true, true)},
          {"memory_host_bytes_without_checkpoints", host_bytes(false, true)},
          {"device_bytes", best.need.drive_bytes},
          {"total_s", best.times.total_s},
          {"overlap", base::enum_name(best.options.overlap)},
          {"overlap_total_s", overlaps},
          {"tokens_per_s", best.tokens_per_s},
          {"bound_by", best.times.bound_by},
          {"host_link_up_bytes", best.times.bytes.host_link_up},
          {"host_link_down_bytes", best.times.bytes.host_link_down},
          {"drive_read_bytes", best.times.bytes.drive_read},
          {"drive_written_bytes", best.times.bytes.drive_written},
          {"ranks_sent_bytes", best.times.bytes.ranks_sent},
          {"ranks_received_bytes", best.times.bytes.ranks_received},
          {"drive_life_days", best.drive_life_days},
          {"cost_per_mtoken", best.cost_per_mtoken},
          {"options", options},
          {"buy_next", next}};
}

/// plan.html with the plan in it, and with what only a picture wants.
std::string to_html(const sim::Plan& plan, const std::optional<TablePlan>& table) {
  ordered_json all = to_json(plan);
  all["table"] = table ? to_json(*table) : ordered_json(false);
  const sim::PlanResult result = sim::plan_result(plan);
  const sim::Machine& machine = plan.machine;
  all["headline"] = result.headline;
  all["remarks"] = result.remarks;
  all["parameters_text"] = sim::parameters_text(plan.model);
  all["batch"] = plan.model.batch;
  all["sequence"] = plan.model.sequence;
  all["gpu"] = machine.gpu.name;
  all["gpus"] = machine.gpu.count;
  all["devices"] = machine.device_count();
  all["device"] = machine.devices.front().name;
  all["there_is"] = {{"gpu_bytes", machine.gpu.memory_bytes},
                     {"host_bytes", sim::host_limit_bytes(machine, plan.best().options)},
                     {"device_bytes", machine.devices.front().capacity_bytes}};
  all["price"] = {{"life_years", machine.price.life_years}, {"per_kwh", machine.price.per_kwh}};
  for (size_t i = 0; i < plan.uses.size(); ++i) {
    all["uses"][i]["text"] = sim::fit_text(plan.uses[i]);
    all["uses"][i]["device_bytes"] = plan.uses[i].need.drive_bytes;
  }
  for (size_t i = 0; i < plan.options.size(); ++i) {
    const sim::PlanOption& option = plan.options[i];
    all["options"][i]["best"] = i == plan.recommended;
    all["options"][i]["wears_soon"] = sim::wears_soon(option);
    all["options"][i]["label"] =
        fmt::format("{}: {}", sim::method_words(option.options.method), option.label);
  }
  for (const sim::Method method : kMethods) {
    all["methods"][sim::method_name(method)] = sim::method_meaning(method);
  }
  // The recommended option's step with more devices of the first kind, and with fewer.
  const uint32_t most = std::max(8u, 2 * machine.device_count());
  sim::Machine changed = machine;
  changed.devices.resize(1);
  for (uint32_t n = 1; n <= most; n += most > 32 ? most / 16 : 1) {
    changed.devices.front().count = n;
    const auto times = sim::simulate_step(plan.model, changed, plan.best().options);
    if (times.ok()) all["by_devices"].push_back({{"devices", n}, {"total_s", times->total_s}});
  }
  return page_with(std::string(plan_page()), all);
}

void print_plan(const sim::Plan& plan) {
  const sim::PlanOption& best = plan.best();
  const bool gpu = plan.machine.gpu.name != "none";
  const auto [ranks, machines] = std::pair(best.options.ranks, best.options.machines);
  const sim::PlanResult result = sim::plan_result(plan);
  fmt::print("{}: {} on {}{} ({}, {} x {}){}\n{}\n", plan.model.name,
             sim::parameters_text(plan.model), machines > 1 ? fmt::format("{} x ", machines) : "",
             plan.machine.name, gpu ? plan.machine.gpu.name : "no GPU", plan.machine.device_count(),
             plan.machine.devices.front().name,
             ranks > 1 ? fmt::format(", {} ranks; memory and bytes of one", ranks) : "",
             result.headline);
  for (const std::string& remark : result.remarks) fmt::print("- {}\n", remark);
  fmt::print("\n");
  size_t longest = 32;
  for (const sim::UseNeed& one : plan.uses) {
    longest = std::max(longest, sim::use_name(one.use).size());
  }
  fmt::print("  {:<{}} {:>10} {:>10} {:>10}\n", "memory, at most", longest, gpu ? "GPU" : "",
             "host", "each drive");
  const auto row = [&](std::string_view mark, const std::string& name, uint64_t on_gpu,
                       uint64_t on_host, uint64_t on_drive, const std::string& text) {
    fmt::print("{} {:<{}} {:>10} {:>10} {:>10}  {}\n", mark, name, longest,
               gpu ? base::format_bytes(on_gpu) : "", base::format_bytes(on_host),
               base::format_bytes(on_drive), text);
  };
  for (const sim::UseNeed& one : plan.uses) {
    row(one.use == plan.use ? "*" : " ", sim::use_name(one.use), one.need.gpu_bytes,
        one.need.host_bytes, one.need.drive_bytes, sim::fit_text(one));
  }
  row(" ", "there is", plan.machine.gpu.memory_bytes,
      sim::host_limit_bytes(plan.machine, best.options),
      plan.machine.devices.front().capacity_bytes, "");
  const auto parts = [](const char* where, const std::vector<plan::MemoryPart>& all) {
    if (!all.empty()) fmt::print("  {}: {}\n", where, parts_text(all));
  };
  parts("GPU", best.need.gpu_parts);
  parts("host", best.need.host_parts);
  fmt::print("\n  {:<31} {:<8} {:<7} {:>9} {:>9} {:>6} {:>11} {:>8}  {}\n", "how", "--method",
             "state", "step", "tokens/s", "exact", "drives last", "cost/Mt", "bound by");
  for (size_t i = 0; i < plan.options.size(); ++i) {
    const sim::PlanOption& option = plan.options[i];
    std::string how(sim::method_words(option.options.method));
    if (option.options.method == sim::Method::kSmartComp) {
      how += fmt::format(", {:.0f} %", 100 * option.options.ratio);
    }
    fmt::print("{} {:<31} {:<8} {:<7} {:>9} {:>9.1f} {:>6} {:>11} {:>8}  {}{}\n",
               i == plan.recommended ? "*" : " ", how, sim::method_name(option.options.method),
               base::state_format_name(option.options.format),
               base::format_seconds(option.times.total_s), option.tokens_per_s,
               option.exact ? "yes" : "no", sim::drive_life_text(option.drive_life_days),
               option.cost_per_mtoken > 0 ? fmt::format("{:.2f}", option.cost_per_mtoken) : "-",
               option.times.bound_by, option.fits ? "" : "; does not fit");
  }
  fmt::print("\n");
  for (const sim::Method method : kMethods) {
    fmt::print("  {:<9} {}\n", sim::method_name(method), sim::method_meaning(method));
  }
  fmt::print(
      "  exact     the same bits as training with an optimizer state of 32 bit in memory\n"
      "  cost/Mt   of a million tokens, in the currency of the machine file's prices\n");
  if (!plan.fits) {
    fmt::print("\nwhat to buy, for it to fit at all\n");
    for (const sim::Purchase& purchase : plan.purchases) fmt::print("  {}\n", purchase.what);
    return;
  }
  fmt::print("\nwhat to buy next (saved of the step marked *)\n");
  for (const sim::Purchase& purchase : plan.purchases) {
    fmt::print("  {:>6.1f} %  {}\n", 100 * purchase.saved, purchase.what);
  }
}

int run_plan(const PlanFlags& flags) {
  SimFlags question_flags = flags.question;
  if (const auto model = question_flags.find(kGenerateFlag); model != question_flags.end()) {
    for (const auto& [given, what] :
         {std::pair(!flags.model.empty(), "MODEL"), std::pair(!flags.html.empty(), "--html"),
          std::pair(!flags.recipe.empty(), "--recipe"), std::pair(!flags.with.empty(), "--with"),
          std::pair(flags.precision != "bf16", "--precision")}) {
      if (!given) continue;
      return report(base::Status(base::ErrorCode::kInvalidArgument,
                                 fmt::format("{} is given with --generate MODEL", what),
                                 "It is for a plan of training."),
                    kExitUsage);
    }
    return run_generation_plan(question_flags, flags.json);
  }
  if (!flags.model.empty()) question_flags["model"] = flags.model;
  if (question_flags.contains(kClusterFlag)) {
    if (!flags.with.empty()) {
      return report(
          base::Status(base::ErrorCode::kInvalidArgument, "--with is given with --cluster",
                       "A cluster is planned for `smartinf train`."),
          kExitUsage);
    }
    return run_cluster(question_flags, flags.precision == "f32" ? 4 : 2, false,
                       {flags.html, flags.recipe, flags.data, {}, flags.json});
  }
  if (question_flags.find("machine") == question_flags.end()) {
    question_flags["machine"] = "workstation-gen4";
  }
  auto question = apply_sim_flags(question_flags);
  if (!question.ok()) return report(question.status(), kExitUsage);
  question->options.value_bytes = flags.precision == "f32" ? 4 : 2;
  const auto given = [&](const char* name) { return question_flags.count(name) > 0; };
  const bool requested = given("method") || given("state-format") || given("master");
  // Asked for a format only, and nothing there can update: the host does.
  if (!given("method") && !question->machine.can_update()) {
    question->options.method = sim::Method::kBaseline;
  }
  sim::PlanRequest request;
  request.options = question->options;
  request.requested = requested;
  if (given("overlap")) request.overlap = question->options.overlap;
  if (flags.with == "train") request.program = plan::TrainingProgram::kTrain;
  if (flags.with == "python") request.program = plan::TrainingProgram::kPython;
  const auto plan = sim::make_plan(question->model, question->machine, request);
  if (!plan.ok()) return report(plan.status(), kExitUsage);
  std::optional<TablePlan> table;
  if (question->table) {
    auto planned = plan_table(*question, plan->best().options, plan->best().times);
    if (!planned.ok()) return report(planned.status(), kExitUsage);
    table = std::move(*planned);
  }
  if (!flags.html.empty()) {
    const base::Status written =
        base::write_text_file(flags.html, to_html(*plan, table), "cannot write the report");
    if (!written.ok()) return report(written);
  }
  if (flags.json) {
    ordered_json json = to_json(*plan);
    if (table) json["table"] = to_json(*table);
    fmt::print("{}\n", json.dump(2));
  } else {
    print_plan(*plan);
    if (table) print_table(*table, question->machine);
    const sim::StepOptions& options = plan->best().options;
    if (plan->fits && options.ranks > 1) {
      const std::string recipe = flags.recipe.empty() ? "RECIPE" : flags.recipe;
      fmt::print("\nstart it with\n  {}\n", sim::launch_line(options, recipe));
    }
  }
  std::fflush(stdout);  // before what may be wrong with the recipe
  if (!flags.recipe.empty()) {
    const auto recipe = sim::plan_recipe(*plan, flags.data);
    if (!recipe.ok()) return report(recipe.status());
    const base::Status written =
        base::write_text_file(flags.recipe, *recipe, "cannot write the recipe");
    if (!written.ok()) return report(written);
  }
  return kExitDone;
}

}  // namespace

void add_plan(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("plan",
                                         "Predict what training a model takes on a machine, or "
                                         "generating with it: memory, time, drive "
                                         "life, what to buy");
  auto flags = std::make_shared<PlanFlags>();
  command
      ->add_option("MODEL", flags->model,
                   "Model: a preset, a model's folder, or a Hugging Face config.json")
      ->type_name("MODEL");
  add_sim_flags(*command, flags->question);
  command->add_option("--html", flags->html, "HTML report to write")->type_name("FILE");
  command
      ->add_option("--recipe", flags->recipe,
                   "Recipe to write, of the recommended option, for train")
      ->type_name("FILE");
  command
      ->add_option("--data", flags->data,
                   "Tokens or texts that the recipe trains with [to be filled in]")
      ->type_name("FILE");
  command
      ->add_option(
          "--precision", flags->precision,
          "Type of weights and activations, for memory and the recipe; times are always those of "
          "16 bits [bf16]")
      ->check(CLI::IsMember({"bf16", "f32"}))
      ->type_name("bf16|f32");
  command
      ->add_option("--with", flags->with,
                   "Program that trains: `smartinf train` or the Python package [the first that "
                   "fits]")
      ->check(CLI::IsMember({"train", "python"}))
      ->type_name("train|python");
  command->add_flag("--json", flags->json, "Print one JSON object");
  command->footer(
      "The mark * is beside the fastest option that changes no bits, or the one that --method and\n"
      "--state-format name, with the first program that fits. --batch is the micro batch.\n\n"
      "Examples:\n"
      "  smartinf plan llama3-8B --batch 1 --accumulation 64 --html plan.html\n"
      "  smartinf plan ./Qwen3-8B --machine my.toml --recipe train.toml\n"
      "  smartinf plan ./config.json --parameters 13015864320 --with python\n"
      "  smartinf plan llama3-8B --gpu H100 --method su+o+c --ratio 0.02 --recipe train.toml\n"
      "  smartinf plan llama3-8B --gpu H100 --gpus 2 --ranks 4 --machines 2 --machine my.toml\n"
      "  smartinf plan gpt2-33.0B --machine smartssd-a5000 --json\n"
      "  smartinf plan llama3-8B --accumulation 64 --table 3.2e8x160 --table-ids 8 --table-zipf 1\n"
      "  smartinf plan llama3-8B --cluster cluster.toml --tokens-per-step 65536 --recipe "
      "train.toml\n"
      "  smartinf plan --generate ./Qwen3-0.6B --context 32768 --sequences 64 --machine my.toml");
  add_plan_distill(*command, run);
  command->callback([flags, command, &run] {
    if (!command->get_subcommands().empty()) return;  // which has set `run`
    run = [flags] { return run_plan(*flags); };
  });
}

}  // namespace smartinf::apps
