// `smartinf simulate`: a step of training, or of generation, on a virtual clock.
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/nearest.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/attention.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/plan_cluster.h"
#include "apps/smartinf/plan_table.h"
#include "apps/smartinf/sim_flags.h"
#include "apps/smartinf/trace_file.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using nlohmann::ordered_json;

struct SimulateFlags {
  SimFlags question;
  std::string sweep;
  std::string trace;
  bool list = false;
  bool print_machine = false;
  bool json = false;
};

ordered_json to_json(const SimQuestion& question, const sim::StepTimes& times) {
  const auto tokens =
      static_cast<double>(sim::step_tokens(question.model, question.machine, question.options));
  return {{"model", question.model.name},
          {"parameters", times.parameters},
          {"batch", question.model.batch},
          {"sequence", question.model.sequence},
          {"machine", question.machine.name},
          {"gpu", question.machine.gpu.name},
          {"gpus", question.machine.gpu.count},
          {"devices", question.machine.device_count()},
          {"accumulation", question.options.accumulation},
          {"ranks", question.options.ranks},
          {"machines", question.options.machines},
          {"method", sim::method_name(question.options.method)},
          {"ratio", question.options.ratio},
          {"optimizer", kernels::update_rule_name(question.options.rule)},
          {"state_format", base::state_format_name(question.options.format)},
          {"state_cache_bytes", question.options.state_cache_bytes},
          {"overlap", base::enum_name(question.options.overlap)},
          {"forward_s", times.forward_s},
          {"backward_s", times.backward_s},
          {"update_s", times.update_s},
          {"total_s", times.total_s},
          {"tokens_per_s", tokens / times.total_s},
          {"bound_by", times.bound_by},
          {"host_link_up_bytes", times.bytes.host_link_up},
          {"host_link_down_bytes", times.bytes.host_link_down},
          {"drive_read_bytes", times.bytes.drive_read},
          {"drive_written_bytes", times.bytes.drive_written},
          {"gpu_link_up_bytes", times.bytes.gpu_link_up},
          {"gpu_link_down_bytes", times.bytes.gpu_link_down},
          {"ranks_sent_bytes", times.bytes.ranks_sent},
          {"ranks_received_bytes", times.bytes.ranks_received},
          {"events", times.events}};
}

ordered_json to_json(const SimQuestion& question, const sim::GenerationTimes& times) {
  const sim::GenerationOptions& options = question.generation;
  return {{"model", question.model.name},
          {"parameters", question.model.parameters()},
          {"machine", question.machine.name},
          {"gpu", question.machine.gpu.name},
          {"devices", question.machine.device_count()},
          {"context", options.context},
          {"sequences", options.sequences},
          {"tokens", options.tokens},
          {"prefix", options.prefix},
          {"cache_format", base::enum_name(options.format)},
          {"cache_in", times.in_memory ? "memory" : "devices"},
          {"attention", base::enum_name(options.attention)},
          {"in_turn", base::enum_name(options.in_turn)},
          {"write_back", options.write_back},
          {"inputs", times.inputs},
          {"prefill_s", times.prefill_s},
          {"step_s", times.step_s},
          {"tokens_per_s", times.tokens_per_s},
          {"bound_by", times.bound_by},
          {"drive_read_bytes", times.traffic.read},
          {"drive_written_bytes", times.traffic.written},
          {"link_down_bytes", times.traffic.link_down},
          {"link_up_bytes", times.traffic.link_up},
          {"weights_read_bytes", times.weights_read},
          {"events", times.events}};
}

void print_phase(const char* name, double seconds, double total_s,
                 const std::vector<sim::Utilization>& busy) {
  std::string used;
  for (size_t i = 0; i < std::min<size_t>(busy.size(), 3); ++i) {
    used += fmt::format("{}{} {:.0f} %", i > 0 ? ", " : "", busy[i].resource, 100 * busy[i].share);
  }
  fmt::print("  {:<9} {:>10}  {:>3.0f} %   {}\n", name, base::format_seconds(seconds),
             100 * seconds / total_s, used);
}

void print_times(const SimQuestion& question, const sim::StepTimes& times) {
  const sim::Machine& machine = question.machine;
  fmt::print("{}, {:.2f} B parameters, batch {} x {} tokens, {} on {} ({}{}, {} x {})\n",
             question.model.name, static_cast<double>(times.parameters) / 1e9, question.model.batch,
             question.model.sequence, sim::method_name(question.options.method), machine.name,
             machine.gpu.count > 1 ? fmt::format("{} x ", machine.gpu.count) : "", machine.gpu.name,
             machine.device_count(), machine.devices.front().name);
  print_phase("forward", times.forward_s, times.total_s, times.forward);
  print_phase("backward", times.backward_s, times.total_s, times.backward);
  print_phase("update", times.update_s, times.total_s, times.update);
  fmt::print("  {:<9} {:>10}          {:.0f} tokens/s, bound by {}\n", "step",
             base::format_seconds(times.total_s),
             static_cast<double>(sim::step_tokens(question.model, machine, question.options)) /
                 times.total_s,
             times.bound_by);
  fmt::print(
      "  host link {} up, {} down; drives {} read, {} written; GPU link {} up, {} down\n",
      base::format_bytes(times.bytes.host_link_up), base::format_bytes(times.bytes.host_link_down),
      base::format_bytes(times.bytes.drive_read), base::format_bytes(times.bytes.drive_written),
      base::format_bytes(times.bytes.gpu_link_up), base::format_bytes(times.bytes.gpu_link_down));
  if (question.options.ranks == 1) return;
  fmt::print("  that is one of {} ranks; to the others {} sent, {} received\n",
             question.options.ranks, base::format_bytes(times.bytes.ranks_sent),
             base::format_bytes(times.bytes.ranks_received));
}

void print_times(const SimQuestion& question, const sim::GenerationTimes& times) {
  const sim::GenerationOptions& options = question.generation;
  fmt::print(
      "{}, {} prompts of {} tokens at once on {} ({}, {} x {}), keys and values in {} in {}\n",
      question.model.name, options.sequences, options.context, question.machine.name,
      question.machine.gpu.name == "none" ? "no GPU" : question.machine.gpu.name,
      question.machine.device_count(), question.machine.devices.front().name,
      base::enum_name(options.format), times.in_memory ? "memory" : "devices");
  fmt::print("  prompts   {:>10}\n", base::format_seconds(times.prefill_s));
  print_phase("step", times.step_s, times.step_s, times.busy);
  fmt::print("            {:.1f} tokens/s, bound by {}\n", times.tokens_per_s, times.bound_by);
  fmt::print("  in a step: drives {} read, {} written, {} of weights; links {} down, {} up\n",
             base::format_bytes(times.traffic.read), base::format_bytes(times.traffic.written),
             base::format_bytes(times.weights_read), base::format_bytes(times.traffic.link_down),
             base::format_bytes(times.traffic.link_up));
}

/// "devices=1..10" or "method=su,su+o" into the flag and its values.
constexpr int64_t kSweepMax = 10'000;

Result<std::pair<std::string, std::vector<std::string>>> parse_sweep(const std::string& text) {
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  const std::vector<std::string_view> names = sim_flag_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    const std::string_view nearest = base::nearest_name(name, names);
    return Status(ErrorCode::kInvalidArgument, fmt::format("--sweep: there is no flag '{}'", name),
                  nearest.empty() ? fmt::format("Known: {}.", fmt::join(names, ", "))
                                  : fmt::format("Did you mean {}?", nearest));
  }
  const Status wrong(ErrorCode::kInvalidArgument, fmt::format("--sweep {} has no values", text),
                     "Write e.g. devices=1..10 or method=baseline,su+o.");
  if (equals == std::string::npos || equals + 1 == text.size()) return wrong;
  const std::string values = text.substr(equals + 1);
  std::vector<std::string> list;
  const size_t dots = values.find("..");
  if (dots != std::string::npos) {
    int64_t from = 0;
    int64_t to = 0;
    const char* begin = values.data();
    const auto low = std::from_chars(begin, begin + dots, from);
    const auto high = std::from_chars(begin + dots + 2, begin + values.size(), to);
    const bool whole = low.ec == std::errc() && high.ec == std::errc() && low.ptr == begin + dots &&
                       high.ptr == begin + values.size();
    if (!whole || to < from) return wrong;
    if (to - from >= kSweepMax) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("--sweep {} has too many values", text),
                    fmt::format("Give at most {}.", kSweepMax));
    }
    for (int64_t value = from; value <= to; ++value) list.push_back(std::to_string(value));
    return std::make_pair(name, list);
  }
  size_t start = 0;
  while (start <= values.size()) {
    const size_t comma = std::min(values.find(',', start), values.size());
    if (comma == start) return wrong;
    list.push_back(values.substr(start, comma - start));
    start = comma + 1;
  }
  return std::make_pair(name, list);
}

Result<ordered_json> row_of(const SimQuestion& question, bool generates) {
  if (generates) {
    SI_ASSIGN_OR_RETURN(
        const sim::GenerationTimes times,
        sim::simulate_generation(question.model, question.machine, question.generation));
    return to_json(question, times);
  }
  SI_ASSIGN_OR_RETURN(const sim::StepTimes times,
                      sim::simulate_step(question.model, question.machine, question.options));
  ordered_json row = to_json(question, times);
  if (!question.table) return row;
  SI_ASSIGN_OR_RETURN(const TablePlan table, plan_table(question, question.options, times));
  const ordered_json of_table = to_json(table);
  for (const auto& [name, value] : of_table.items()) {
    row[name == "total_s" ? "with_table_s" : "table_" + name] = value;
  }
  return row;
}

int run_sweep(const SimulateFlags& flags) {
  const auto sweep = parse_sweep(flags.sweep);
  if (!sweep.ok()) return report(sweep.status(), kExitUsage);
  bool headed = flags.json;
  for (const std::string& value : sweep->second) {
    SimFlags one = flags.question;
    one[sweep->first] = value;
    const auto question = apply_sim_flags(one);
    if (!question.ok()) return report(question.status(), kExitUsage);
    const auto row = row_of(*question, one.contains(kGenerateFlag));
    if (!row.ok()) return report(row.status(), kExitUsage);
    if (flags.json) {
      fmt::print("{}\n", row->dump());
      continue;
    }
    std::string names = fmt::format("{:>16}", sweep->first);
    std::string values = fmt::format("{:>16}", value);
    for (const char* name : {"forward_s", "backward_s", "update_s", "total_s", "with_table_s",
                             "prefill_s", "step_s", "tokens_per_s"}) {
      if (!row->contains(name)) continue;
      names += fmt::format(" {:>12}", name);
      values += fmt::format(" {:>12.3f}", (*row)[name].get<double>());
    }
    if (!headed) fmt::print("{}  bound by\n", names);
    headed = true;
    fmt::print("{}  {}\n", values, (*row)["bound_by"].get<std::string>());
  }
  return kExitDone;
}

int run_list() {
  fmt::print("models:   {}\n", fmt::join(sim::model_preset_names(), " "));
  fmt::print("machines: {}\n", fmt::join(sim::machine_preset_names(), " "));
  fmt::print("GPUs:     {}\n", fmt::join(sim::gpu_preset_names(), " "));
  return kExitDone;
}

int run_simulate(const SimulateFlags& flags) {
  if (flags.list) return run_list();
  if (flags.question.contains(kClusterFlag)) {
    if (!flags.sweep.empty() || flags.print_machine) {
      return report(Status(ErrorCode::kInvalidArgument,
                           fmt::format("{} is given with --cluster",
                                       flags.print_machine ? "--print-machine" : "--sweep"),
                           "It is for a machine alone."),
                    kExitUsage);
    }
    return run_cluster(flags.question, 2, true, {{}, {}, {}, flags.trace, flags.json});
  }
  if (!flags.sweep.empty()) return run_sweep(flags);
  auto question = apply_sim_flags(flags.question);
  if (!question.ok()) return report(question.status(), kExitUsage);
  if (flags.print_machine) {
    fmt::print("{}", sim::machine_to_toml(question->machine));
    return kExitDone;
  }
  if (flags.question.contains(kGenerateFlag)) {
    if (!flags.trace.empty()) {
      return report(Status(ErrorCode::kInvalidArgument, "--trace is given with --generate",
                           "It is for a training step."),
                    kExitUsage);
    }
    const auto times =
        sim::simulate_generation(question->model, question->machine, question->generation);
    if (!times.ok()) return report(times.status(), kExitUsage);
    if (flags.json) {
      fmt::print("{}\n", to_json(*question, *times).dump());
    } else {
      print_times(*question, *times);
    }
    return kExitDone;
  }
  question->options.trace = !flags.trace.empty();
  const auto times = sim::simulate_step(question->model, question->machine, question->options);
  if (!times.ok()) return report(times.status(), kExitUsage);
  if (!flags.trace.empty()) {
    const Status written = write_spans(flags.trace, times->spans);
    if (!written.ok()) return report(written);
  }
  if (flags.json) {
    const auto row = row_of(*question, false);
    if (!row.ok()) return report(row.status(), kExitUsage);
    fmt::print("{}\n", row->dump());
    return kExitDone;
  }
  print_times(*question, *times);
  if (!question->table) return kExitDone;
  const auto table = plan_table(*question, question->options, *times);
  if (!table.ok()) return report(table.status(), kExitUsage);
  print_table(*table, question->machine);
  return kExitDone;
}

}  // namespace

void add_simulate(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("simulate",
                         "Predict the time of a step of training, or of generation, on a described "
                         "machine");
  auto flags = std::make_shared<SimulateFlags>();
  add_sim_flags(*command, flags->question);
  command
      ->add_option("--sweep", flags->sweep,
                   "Flag to vary, with its values: devices=1..10, method=baseline,su+o")
      ->type_name("FLAG=VALUES");
  command
      ->add_option("--trace", flags->trace, "Chrome trace of the step to write (ui.perfetto.dev)")
      ->type_name("FILE");
  command->add_flag("--list", flags->list, "List the known models, machines and GPUs");
  command->add_flag("--print-machine", flags->print_machine,
                    "Print the complete machine as a TOML file");
  command->add_flag("--json", flags->json,
                    "Print one flat JSON object; with --sweep one for each line");
  command->footer(
      "The rates of the smartssd machines are fitted to the Smart-Infinity paper "
      "(docs/simulator.md).\n\n"
      "Examples:\n"
      "  smartinf simulate --model gpt2-16.6B --devices 10 --method su+o+c\n"
      "  smartinf simulate --model gpt2-4.0B --sweep devices=1..10 --method su+o\n"
      "  smartinf simulate --model llama3-8B --machine workstation-gen5 --overlap early\n"
      "  smartinf simulate --model gpt2-4.0B --method su+o --trace step.json\n"
      "  smartinf simulate --model llama3-1B --cluster cluster.toml --tokens-per-step 65536\n"
      "  smartinf simulate --generate llama3-8B --context 32768 --sweep devices=1..8");
  add_simulate_memory(*command, run);
  command->callback([flags, command, &run] {
    if (!command->get_subcommands().empty()) return;  // which has set `run`
    run = [flags] { return run_simulate(*flags); };
  });
}

}  // namespace smartinf::apps
