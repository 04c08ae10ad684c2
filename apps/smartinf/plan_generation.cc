#include "apps/smartinf/plan_generation.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/kernels/attention.h"
#include "smartinf/sim/planner.h"

#include "apps/smartinf/commands.h"

namespace smartinf::apps {
namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

/// A word of a command line.
std::string quoted(const std::string& word) {
  constexpr std::string_view kPlain = "-_./:=+,@%";
  const auto plain = [&](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || kPlain.find(c) != kPlain.npos;
  };
  if (!word.empty() && std::ranges::all_of(word, plain)) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

/// The command that the plan is of, and remarks on what in it is to be filled in.
struct Command {
  std::string line;  // empty: there is none
  std::vector<std::string> remarks;
};

Command command_of(const sim::GenerationPlan& plan, const SimFlags& flags) {
  Command command;
  if (plan.machine.gpu.name != "none") {
    command.remarks.push_back(
        "`smartinf generate --cache` computes on CPUs: these are the times of a GPU that computes "
        "beside such devices, and no command does that yet.");
    return command;
  }
  std::vector<std::string> words{"smartinf",      "generate", plan.model.folder, "--batch",
                                 "prompts.jsonl", "--out",    "answers.jsonl"};
  if (plan.model.folder.empty()) {
    words[2] = "FOLDER";
    command.remarks.push_back("FOLDER is the model's, with its weights.");
  }
  const auto add = [&](const std::string& flag, const std::string& value) {
    words.push_back(flag);
    words.push_back(value);
  };
  add("--tokens", std::to_string(plan.options.tokens));
  add("--sequences", std::to_string(plan.together));
  bool unknown = false;
  for (const sim::DeviceGroup& group : plan.machine.devices) {
    if (plan.need.in_memory) break;
    std::error_code error;
    const bool named = group.count == 1 && !group.remote && fs::is_directory(group.name, error);
    for (uint32_t i = 0; i < group.count; ++i) {
      add("--cache", named ? (fs::path(group.name) / "kv").string()
                           : (group.remote ? "grpc://HOST:PORT/NAME" : "DIR"));
    }
    unknown = unknown || !named;
  }
  if (unknown) {
    command.remarks.push_back(
        "Each --cache names one of the devices, which a file of `smartinf calibrate` knows.");
  }
  const bool f32 = plan.options.value_bytes() == 4;
  add("--type", f32 ? "f32" : "bf16");
  if (plan.options.format == kernels::CacheFormat::kQ8) add("--cache-format", "q8");
  if (const auto memory = flags.find("memory"); memory != flags.end()) {
    add("--memory", memory->second);
  }
  std::vector<std::string> shown;
  for (const std::string& word : words) shown.push_back(quoted(word));
  command.line = fmt::format("{}", fmt::join(shown, " "));
  return command;
}

ordered_json to_json(const sim::GenerationPlan& plan, const Command& command) {
  const auto parts = [](const std::vector<plan::MemoryPart>& all) {
    ordered_json bytes = ordered_json::object();
    for (const plan::MemoryPart& part : all) bytes[part.name] = part.bytes;
    return bytes;
  };
  return {{"model", plan.model.name},
          {"parameters", plan.model.parameters()},
          {"machine", plan.machine.name},
          {"context", plan.options.context},
          {"sequences", plan.options.sequences},
          {"tokens", plan.options.tokens},
          {"prefix", plan.options.prefix},
          {"cache_format", base::enum_name(plan.options.format)},
          {"cache_in", plan.need.in_memory ? "memory" : "devices"},
          {"together", plan.together},
          {"held_by", plan.held_by},
          {"tokens_per_s", plan.times.tokens_per_s},
          {"step_s", plan.times.step_s},
          {"prefill_s", plan.prefill_s},
          {"decode_s", plan.decode_s},
          {"bound_by", plan.times.bound_by},
          {"gpu_bytes", plan.need.gpu_bytes},
          {"host_bytes", plan.need.host_bytes},
          {"gpu_parts", parts(plan.need.gpu_parts)},
          {"host_parts", parts(plan.need.host_parts)},
          {"cache_bytes", plan.need.cache_bytes},
          {"device_bytes", plan.need.drive_bytes},
          {"drive_read_bytes", plan.read_bytes},
          {"drive_written_bytes", plan.written_bytes},
          {"step_weights_read_bytes", plan.times.weights_read},
          {"step_link_down_bytes", plan.times.traffic.link_down},
          {"step_link_up_bytes", plan.times.traffic.link_up},
          {"requests_until_worn", plan.requests_until_worn},
          {"tokens_until_worn", plan.tokens_until_worn},
          {"drive_life_days", plan.life_days},
          {"enough_devices", plan.drives},
          {"next_bound", plan.next_bound},
          {"next_tokens_per_s", plan.next_tokens_per_s},
          {"command", command.line}};
}

void print_parts(const char* where, uint64_t all, const std::vector<plan::MemoryPart>& parts) {
  if (all == 0) return;
  fmt::print("  {:<8} {:>10}: {}\n", where, base::format_bytes(all), parts_text(parts));
}

void print_plan(const sim::GenerationPlan& plan, const Command& command) {
  const sim::GenerationOptions& options = plan.options;
  const sim::GenerationTimes& times = plan.times;
  const sim::DeviceGroup& device = plan.machine.devices.front();
  const std::string drives = plan.machine.device_count() == 1 ? "drive" : "drives";
  fmt::print(
      "{}: {} on {} ({}, {} x {})\n{} prompts of {} tokens, {} new tokens each; keys and "
      "values in {}, in {}\n\n",
      plan.model.name, sim::parameters_text(plan.model), plan.machine.name,
      plan.machine.gpu.name == "none" ? "no GPU" : plan.machine.gpu.name,
      plan.machine.device_count(), device.name, options.sequences, options.context, options.tokens,
      base::enum_name(options.format), plan.need.in_memory ? "memory" : "devices");
  fmt::print(
      "  prompts  {:>10}\n  answers  {:>10}: {:.1f} tokens/s, {} of {} prompts at once, a "
      "step takes {}\n  limited by {}\n\n",
      base::format_seconds(plan.prefill_s), base::format_seconds(plan.decode_s), times.tokens_per_s,
      plan.together, options.sequences, base::format_seconds(times.step_s), times.bound_by);
  if (!plan.held_by.empty()) {
    fmt::print("- There is no room for more at once: {}.\n",
               plan.held_by == "drives" ? "the " + drives + " would be full" : "memory is short");
  }
  if (times.weights_read > 0) {
    fmt::print("- Weights do not fit in memory: {} of them are read for every step.\n",
               base::format_bytes(times.weights_read));
  }
  if (plan.drives > plan.machine.devices.front().count) {
    fmt::print(
        "- {} such devices would make {:.1f} tokens/s; from there on {} limit, and more "
        "devices bring nothing.\n",
        plan.drives, plan.next_tokens_per_s, plan.next_bound);
  } else if (plan.drives > 0 && plan.drives < plan.machine.devices.front().count) {
    fmt::print("- {} such {} enough: {} limit.\n", plan.drives,
               plan.drives == 1 ? "device is" : "devices are", plan.next_bound);
  }
  for (const std::string& remark : command.remarks) fmt::print("- {}\n", remark);
  fmt::print("\nmemory, at most\n");
  print_parts("GPU", plan.need.gpu_bytes, plan.need.gpu_parts);
  print_parts("host", plan.need.host_bytes, plan.need.host_parts);
  if (!plan.need.in_memory) {
    fmt::print("\n{}\n", drives);
    fmt::print(
        "  room     {:>10} of keys and values on the one that has most{}\n",
        base::format_bytes(plan.need.drive_bytes),
        device.capacity_bytes == 0 ? "" : ", of " + base::format_bytes(device.capacity_bytes));
    fmt::print("  read     {:>10} in the whole job\n  written  {:>10}\n",
               base::format_bytes(plan.read_bytes), base::format_bytes(plan.written_bytes));
    if (plan.tokens_until_worn > 0) {
      fmt::print(
          "  life     {:.3g} tokens with those of prompts, {:.3g} prompts; day and night {}\n",
          plan.tokens_until_worn, plan.requests_until_worn, sim::drive_life_text(plan.life_days));
    } else {
      fmt::print("  life     not known: device.endurance_bytes in the machine file says it\n");
    }
  }
  if (!command.line.empty()) fmt::print("\nstart it with\n  {}\n", command.line);
}

}  // namespace

int run_generation_plan(const SimFlags& flags, bool json) {
  const auto question = apply_sim_flags(flags);
  if (!question.ok()) return report(question.status(), kExitUsage);
  const auto plan = sim::plan_generation(question->model, question->machine, question->generation);
  if (!plan.ok()) return report(plan.status(), kExitUsage);
  const Command command = command_of(*plan, flags);
  if (json) {
    fmt::print("{}\n", to_json(*plan, command).dump(2));
  } else {
    print_plan(*plan, command);
  }
  return kExitDone;
}

}  // namespace smartinf::apps
