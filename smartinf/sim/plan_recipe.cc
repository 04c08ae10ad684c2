#include <algorithm>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/plan/rank_share.h"
#include "smartinf/sim/cluster_plan.h"
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

/// Where a device of a machine is: the file's own name where that is a path.
std::string device_path(const DeviceGroup& group, uint32_t of_group, uint32_t of_machine) {
  if (!group.name.starts_with('/')) return fmt::format("/mnt/drive-{}/smartinf", of_machine);
  return group.count == 1 ? group.name : fmt::format("{}-{}", group.name, of_group);
}

/// The [[device]] tables of some machines, one after another, each with the rank that drives it.
class DevicesText {
 public:
  /// ranks: of the machine; of one rank in all none is named.
  void add(const Machine& machine, uint32_t ranks, bool alone) {
    remote_ = remote_ || machine.has_remote();
    uint32_t device = 0;  // of the machine
    for (const DeviceGroup& group : machine.devices) {
      for (uint32_t d = 0; d < group.count; ++d, ++device) {
        text_ +=
            fmt::format("\n[[device]]\npath = \"{}\"\n",
                        group.remote ? fmt::format("grpc://server-{}:7443/drive-{}", server_, d)
                                     : device_path(group, d, device));
        if (alone) continue;
        text_ +=
            fmt::format("rank = {}\n",
                        first_rank_ + plan::rank_of_device(device, machine.device_count(), ranks));
      }
      server_ += group.remote ? 1 : 0;
    }
    first_rank_ += ranks;
  }
  std::string text() const {
    return (remote_ ? "\n[remote]\ncertificate = \"client.crt\"\nkey = \"client.key\"\nca = "
                      "\"ca.crt\"\n"
                    : "") +
           text_;
  }

 private:
  std::string text_;
  bool remote_ = false;
  uint32_t first_rank_ = 0;
  uint32_t server_ = 0;
};

std::string torchrun_line(uint32_t boxes, std::string_view node, std::string_view host,
                          uint32_t ranks, std::string_view recipe) {
  const std::string nodes =
      boxes == 1 ? ""
                 : fmt::format("--nnodes {} --node-rank {} --master-addr {} --master-port 29500 ",
                               boxes, node, host);
  return fmt::format("torchrun {}--no-python --nproc-per-node {} smartinf train {}", nodes, ranks,
                     recipe);
}

}  // namespace

std::string launch_line(const StepOptions& options, std::string_view recipe) {
  if (options.ranks == 1) return {};
  return torchrun_line(options.machines, "N", "HOST", options.ranks / options.machines, recipe) +
         (options.machines == 1 ? "" : " (on each machine, N from 0; HOST is the first)");
}

std::vector<std::string> cluster_launch(const ClusterPlan& plan, const ClusterOption& option,
                                        std::string_view recipe) {
  std::vector<std::string> lines;
  const auto boxes = static_cast<uint32_t>(option.order.size());
  const Box& first = plan.cluster.boxes[option.order.front()];
  if (boxes == 1 && first.ranks == 1) return {fmt::format("smartinf train {}", recipe)};
  for (uint32_t node = 0; node < boxes; ++node) {
    lines.push_back(torchrun_line(boxes, std::to_string(node), first.name,
                                  plan.cluster.boxes[option.order[node]].ranks, recipe));
  }
  return lines;
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

/// What of a recipe follows from a plan, whatever it is for.
struct RecipeParts {
  const ModelShape& model;
  const StepOptions& options;
  const MemoryNeed& need;
  const Machine& machine;
  std::string head;    // comments
  std::string limits;  // of [memory]
  std::string more;    // sections
  std::string devices;
  std::string data;  // empty: to be filled in
  bool recompute = true;
  bool overlap = false;  // it was asked for
};

std::string recipe_text(const RecipeParts& parts) {
  const StepOptions& options = parts.options;
  const bool keys = parts.model.folder.empty() && keys_say(parts.model);
  std::string data = parts.data;
  if (data.empty()) data = keys ? "tokens.bin" : "chats.jsonl";
  std::string text = fmt::format(
      "{}\n{}\n[data]\npaths = [\"{}\"]\nsequence = {}\n\n"
      "[train]\nprecision = \"{}\"\nmicro_batch = {}\naccumulation = {}\n"
      "\n[memory]\n{}activations = \"{}\"\n\n",
      parts.head, model_text(parts.model), data, parts.model.sequence,
      options.value_bytes == 4 ? "f32" : "bf16", parts.model.batch, options.accumulation,
      parts.limits, parts.recompute ? "recompute" : "keep");
  text +=
      fmt::format("[optimizer]\nwhere = \"{}\"\nrule = \"{}\"\nformat = \"{}\"\nmaster = \"{}\"\n",
                  options.method == Method::kBaseline ? "host" : "device",
                  kernels::update_rule_name(options.rule), base::enum_name(options.format.moments),
                  base::enum_name(options.format.master));
  if (parts.overlap) text += fmt::format("overlap = \"{}\"\n", base::enum_name(options.overlap));
  if (options.method == Method::kSmartComp) {
    // A sign with its index counts as one byte, against 4 of an f32 gradient (StepOptions::ratio).
    text += fmt::format("\n[compress]\ndensity = {}\nresidual_every = {}\n",
                        std::min(1.0, 4 * options.ratio), options.residual_every);
  }
  std::string engine;
  if (options.method == Method::kSmart) engine += "schedule = \"naive\"\n";
  if (options.subgroup_elements != 0) {
    engine += fmt::format("subgroup_elements = {}\n", options.subgroup_elements);
  }
  const bool compressed = options.method == Method::kSmartComp;
  if ((parts.need.plan.streams && !parts.need.of_stage) ||
      (parts.machine.software.gradient_spilled && !compressed)) {
    engine += fmt::format("gradient_budget = {}\n", parts.need.plan.gradient_memory_bytes);
  }
  if (!engine.empty()) text += "\n[engine]\n" + engine;
  return text + parts.more + parts.devices;
}

}  // namespace

Result<std::string> plan_recipe(const Plan& plan, const std::string& data) {
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
  DevicesText devices;
  for (uint32_t m = 0; m < best.options.machines; ++m) {
    devices.add(plan.machine, best.options.ranks / best.options.machines, best.options.ranks == 1);
  }
  RecipeParts parts{model,
                    best.options,
                    need,
                    plan.machine,
                    {},
                    {},
                    {},
                    devices.text(),
                    data,
                    plan.use.recompute,
                    plan.overlap_asked};
  parts.head = fmt::format(
      "# {} on {}, as `smartinf plan` recommends: {}, {} a step{}.\n"
      "# Fill in the data and the path of each device.\n{}",
      model.name, plan.machine.name, best.label, base::format_seconds(best.times.total_s),
      streamed.empty() ? "" : "; " + streamed, launch);
  parts.limits = limits_text(plan.machine, best.options);
  return recipe_text(parts);
}

Result<std::string> cluster_recipe(const ClusterPlan& plan, const ClusterOption& option,
                                   const std::string& data) {
  SI_RETURN_IF_ERROR(check_train_can(plan.model));
  ModelShape model = plan.model;
  model.batch = option.micro_batch;
  StepOptions options = plan.options;
  options.accumulation = option.accumulation;
  const uint32_t ranks = option.pipeline * option.replicas;
  const Box& first = plan.cluster.boxes[option.order.front()];
  DevicesText devices;
  uint64_t host = 0, gpu = 0;  // equal on all ranks; 0: each takes what is free
  for (const RankNeed& rank : option.ranks) {
    host =
        &rank == &option.ranks.front() || host == rank.host_limit_bytes ? rank.host_limit_bytes : 0;
    gpu = &rank == &option.ranks.front() || gpu == rank.gpu_limit_bytes ? rank.gpu_limit_bytes : 0;
  }
  std::string names;
  for (const uint32_t box : option.order) {
    const Box& one = plan.cluster.boxes[box];
    devices.add(one.machine, one.ranks, ranks == 1);
    names += (names.empty() ? "" : ", ") + one.name;
  }
  RecipeParts parts{model,          options, option.ranks.front().need, first.machine, {}, {}, {},
                    devices.text(), data,    option.recompute};
  parts.head =
      fmt::format("# {} on {}, as `smartinf plan` recommends: {}, {} a step.\n", model.name, names,
                  option_text(plan, option), base::format_seconds(option.step_s));
  const std::vector<std::string> lines = cluster_launch(plan, option, "RECIPE");
  for (size_t i = 0; i < lines.size(); ++i) {
    parts.head += fmt::format("# on {}: {}\n", plan.cluster.boxes[option.order[i]].name, lines[i]);
  }
  if (host > 0) parts.limits += fmt::format("host = {}\n", host);
  if (gpu > 0) parts.limits += fmt::format("accelerator = {}\n", gpu);
  if (option.pipeline > 1) {
    std::string compress;
    parts.more = fmt::format("\n[ranks]\npipeline = {}\n", option.pipeline);
    if (option.chunks > 1) parts.more += fmt::format("chunks = {}\n", option.chunks);
    if (option.form) {
      parts.more += fmt::format("cluster = \"{}\"\n", plan.cluster.origin);
      compress = fmt::format("\n[compress]\npipeline = \"{}\"\npipeline_when = \"exposed\"\n",
                             option.compression);
    }
    if (option.uneven) parts.more += fmt::format("split = \"{}\"\n", split_text(plan, option));
    parts.more += compress;
  }
  return recipe_text(parts);
}

}  // namespace smartinf::sim
