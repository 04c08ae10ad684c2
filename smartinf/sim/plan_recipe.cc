#include <algorithm>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/plan/rank_share.h"
#include "smartinf/sim/one_rank.h"
#include "smartinf/sim/planner.h"

namespace smartinf::sim {

using base::Result;
using base::Status;

namespace {

/// The limits that the plan was made with.
std::string limits_text(const Machine& machine, const StepOptions& options) {
  std::string text;
  const uint64_t host = host_limit_bytes(machine, options);
  if (host > 0) text += fmt::format("host = {}\n", host);
  if (machine.gpu.name != "none" && machine.gpu.memory_bytes > 0) {
    text += fmt::format("accelerator = {}\n", machine.gpu.memory_bytes);
  }
  return text;
}

/// The [[device]] tables of all machines, each with the rank that drives it.
std::string devices_text(const Machine& machine, const StepOptions& options) {
  std::string text;
  if (machine.has_remote()) {
    text += "\n[remote]\ncertificate = \"client.crt\"\nkey = \"client.key\"\nca = \"ca.crt\"\n";
  }
  const uint32_t ranks = options.ranks / options.machines;
  for (uint32_t m = 0, server = 0; m < options.machines; ++m) {
    uint32_t device = 0;  // of the machine
    for (const DeviceGroup& group : machine.devices) {
      for (uint32_t d = 0; d < group.count; ++d, ++device) {
        text += group.remote
                    ? fmt::format("\n[[device]]\npath = \"grpc://server-{}:7443/drive-{}\"\n",
                                  server, d)
                    : fmt::format("\n[[device]]\npath = \"/mnt/drive-{}/smartinf\"\n", device);
        if (options.ranks == 1) continue;
        text += fmt::format(
            "rank = {}\n", m * ranks + plan::rank_of_device(device, machine.device_count(), ranks));
      }
      server += group.remote ? 1 : 0;
    }
  }
  return text;
}

}  // namespace

std::string launch_line(const StepOptions& options, std::string_view recipe) {
  if (options.ranks == 1) return {};
  const uint32_t ranks = options.ranks / options.machines;
  if (options.machines == 1) {
    return fmt::format("torchrun --no-python --nproc-per-node {} smartinf train {}", ranks, recipe);
  }
  return fmt::format(
      "torchrun --nnodes {} --node-rank N --master-addr HOST --master-port 29500 --no-python "
      "--nproc-per-node {} smartinf train {} (on each machine, N from 0; HOST is the first)",
      options.machines, ranks, recipe);
}

Status check_train_can(const ModelShape& model) {
  if (model.architecture) return {};
  const bool known = !model.train_lacks.ok();
  return Status(
      base::ErrorCode::kUnsupported,
      fmt::format("`smartinf train` does not take {}: {}", model.name,
                  known ? model.train_lacks.what() : "its form is known by its size only"),
      fmt::format("Train it from Python (docs/trainer.md){}.",
                  known && !model.train_lacks.advice().empty()
                      ? "; or: " + model.train_lacks.advice()
                      : ""));
}

bool keys_say(const ModelShape& model) {
  if (!model.architecture) return false;
  const model::Architecture& given = *model.architecture;
  const bool plain =
      given.family == model::Family::kLlama || given.family == model::Family::kMistral;
  return plain && !given.qkv_bias && !given.output_bias && !given.mlp_bias &&
         given.activation == model::Activation::kSilu && given.query_width() == given.width &&
         given.rope.scaling == model::Rope::Scaling::kNone &&
         std::ranges::all_of(given.windows, [](uint32_t window) { return window == 0; });
}

namespace {

std::string model_text(const ModelShape& model) {
  if (!model.folder.empty()) return fmt::format("[model]\nfrom = \"{}\"\n", model.folder);
  if (!keys_say(model)) {
    return fmt::format(
        "[model]\nfrom = \"model\"  # a folder with the config.json of {}, its weights and its "
        "tokenizer\n"
        "# init = \"random\"  # from the beginning; then no weights are needed\n",
        model.name);
  }
  const model::Architecture& shape = *model.architecture;
  return fmt::format(
      "# In place of these keys, from = \"FOLDER\" takes such a model, with its weights, from a\n"
      "# folder of Hugging Face's form.\n"
      "[model]\nlayers = {}\nwidth = {}\nheads = {}\nkv_heads = {}\nmlp_width = {}\n"
      "vocabulary = {}\ntied_head = {}\nrope_base = {}\nnorm_eps = {}\ninit_std = {}\n",
      shape.layers, shape.width, shape.heads, shape.kv_heads, shape.mlp_width, shape.vocabulary,
      shape.tied_head, shape.rope.base, shape.norm_eps, shape.init_std);
}

}  // namespace

Result<std::string> plan_recipe(const Plan& plan) {
  const ModelShape& model = plan.model;
  SI_RETURN_IF_ERROR(check_train_can(model));
  TrainingUse train;
  train.recompute = plan.use.recompute;
  const PlanOption& best = plan.best();
  const MemoryNeed need = memory_need(model, plan.machine, best.options, train);
  const std::string shortfall = shortfall_of(need, plan.machine, best.options, train);
  if (!shortfall.empty()) {
    return Status(base::ErrorCode::kOutOfMemory,
                  fmt::format("no recipe: `smartinf train` would not fit: {}", shortfall),
                  "What else would fit stands in the plan.");
  }
  const std::string streamed = streamed_text(need);
  std::string launch = launch_line(best.options, "RECIPE");
  if (!launch.empty()) launch = "# Start it with " + launch + "\n";
  std::string text = fmt::format(
      "# {} on {}, as `smartinf plan` recommends: {}, {} a step{}.\n"
      "# Fill in the data and the path of each device.\n{}\n{}\n",
      model.name, plan.machine.name, best.label, base::format_seconds(best.times.total_s),
      streamed.empty() ? "" : "; " + streamed, launch, model_text(model));
  const bool keys = model.folder.empty() && keys_say(model);
  text += fmt::format(
      "[data]\npaths = [\"{}\"]\nsequence = {}\n\n"
      "[train]\nprecision = \"{}\"\nmicro_batch = {}\naccumulation = {}\n"
      "\n[memory]\n{}activations = \"{}\"\n\n",
      keys ? "tokens.bin" : "chats.jsonl", model.sequence,
      best.options.value_bytes == 4 ? "f32" : "bf16", model.batch, best.options.accumulation,
      limits_text(plan.machine, best.options), plan.use.recompute ? "recompute" : "keep");
  text += fmt::format(
      "[optimizer]\nwhere = \"{}\"\nrule = \"{}\"\nformat = \"{}\"\nmaster = \"{}\"\n",
      best.options.method == Method::kBaseline ? "host" : "device",
      kernels::update_rule_name(best.options.rule), base::enum_name(best.options.format.moments),
      base::enum_name(best.options.format.master));
  if (plan.overlap_asked) {
    text += fmt::format("overlap = \"{}\"\n", base::enum_name(best.options.overlap));
  }
  if (best.options.method == Method::kSmartComp) {
    // A sign with its index counts as one byte, against 4 of an f32 gradient (StepOptions::ratio).
    text += fmt::format("\n[compress]\ndensity = {}\nresidual_every = {}\n",
                        std::min(1.0, 4 * best.options.ratio), best.options.residual_every);
  }
  std::string engine;
  if (best.options.method == Method::kSmart) engine += "schedule = \"naive\"\n";
  if (best.options.subgroup_elements != 0) {
    engine += fmt::format("subgroup_elements = {}\n", best.options.subgroup_elements);
  }
  const bool compressed = best.options.method == Method::kSmartComp;
  if (need.plan.streams || (plan.machine.software.gradient_spilled && !compressed)) {
    engine += fmt::format("gradient_budget = {}\n", need.plan.gradient_memory_bytes);
  }
  if (!engine.empty()) text += "\n[engine]\n" + engine;
  return text + devices_text(plan.machine, best.options);
}

}  // namespace smartinf::sim
