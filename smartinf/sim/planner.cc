#include "smartinf/sim/planner.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "smartinf/base/units.h"

namespace smartinf::sim {
namespace {

using base::Result;
using base::Status;

constexpr double kSecondsPerDay = 86400;

uint64_t share_of(uint64_t elements, const Machine& machine) {
  return base::divide_up(elements, std::max(1u, machine.device_count()));
}

/// What a device writes of its own share in one step, amplification included.
double written_per_device(const Choice& choice, const Machine& machine) {
  double amplification = 1;
  for (const DeviceGroup& device : machine.devices) {
    amplification = std::max(amplification, device.write_amplification);
  }
  return amplification * static_cast<double>(choice.times.bytes.drive_written) /
         machine.device_count();
}

/// What does not fit, and by how much; empty: all of it does.
std::string shortfall_of(const MemoryNeed& need, const Machine& machine) {
  std::string text;
  const auto lacks = [&](const std::string& where, uint64_t needed, uint64_t have) {
    if (have == 0 || needed <= have) return;
    text += fmt::format("{}{} lacks {}", text.empty() ? "" : "; ", where,
                        base::format_bytes(needed - have));
  };
  if (machine.gpu.name != "none") lacks("GPU memory", need.gpu_bytes, machine.gpu.memory_bytes);
  lacks("host memory", need.host_bytes, machine.host.memory_bytes);
  for (const DeviceGroup& device : machine.devices) {
    lacks(device.name, need.drive_bytes, device.capacity_bytes);
  }
  return text;
}

void judge_cost(Choice& choice, const Machine& machine) {
  double life_days = 0;
  for (const DeviceGroup& device : machine.devices) {
    if (device.endurance_bytes == 0) continue;
    const double per_day =
        written_per_device(choice, machine) * kSecondsPerDay / choice.times.total_s;
    const double days = static_cast<double>(device.endurance_bytes) / per_day;
    life_days = life_days == 0 ? days : std::min(life_days, days);
  }
  choice.drive_life_days = life_days;
  const Price& price = machine.price;
  double drives = 0;
  for (const DeviceGroup& device : machine.devices) drives += device.count * device.price;
  const double machine_price = price.host + price.gpu * machine.gpu.count;
  if (machine_price + drives + price.power_watts * price.per_kwh <= 0) return;
  const double life_s = price.life_years * 365 * kSecondsPerDay;
  // A drive that wears out sooner than the machine is bought again.
  const double drive_life_s = life_days > 0 ? std::min(life_s, life_days * kSecondsPerDay) : life_s;
  const double per_second = machine_price / life_s + drives / drive_life_s +
                            price.power_watts / 1000 * price.per_kwh / 3600;
  choice.cost_per_mtoken = per_second / choice.tokens_per_s * 1e6;
}

std::string label_of(const StepOptions& options) {
  std::string label(method_name(options.method));
  if (options.method == Method::kSmartComp) label += fmt::format(" {:.0f} %", 100 * options.ratio);
  label += fmt::format(", {} state", base::state_format_name(options.format));
  return label;
}

StepOptions options_for(StepOptions options, const TrainingUse& use) {
  options.weights_stay = true;
  options.release_gradients = use.release_gradients;
  options.overlap = Overlap::kNothing;  // neither program hides updates
  return options;
}

/// train computes on one GPU.
std::string beyond(const TrainingUse& use, const Machine& machine) {
  if (use.program != plan::TrainingProgram::kTrain || machine.gpu.count <= 1) return {};
  return "smartinf train computes on one GPU";
}

Result<Choice> try_one(const ModelShape& model, const Machine& machine, const StepOptions& options,
                       const TrainingUse& use) {
  Choice choice;
  choice.options = options_for(options, use);
  choice.label = label_of(options);
  SI_ASSIGN_OR_RETURN(choice.times, simulate_step(model, machine, choice.options));
  choice.need = memory_need(model, machine, options, use);
  choice.exact = options.format == base::StateFormat::kF32 && options.method != Method::kSmartComp;
  choice.tokens_per_s =
      static_cast<double>(model.tokens() * options.accumulation * machine.gpu.count) /
      choice.times.total_s;
  choice.shortfall = shortfall_of(choice.need, machine);
  if (choice.shortfall.empty()) choice.shortfall = beyond(use, machine);
  choice.fits = choice.shortfall.empty();
  judge_cost(choice, machine);
  return choice;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  }
  return out;
}

/// Stacked bars of the three phases, each below or beside its name.
std::string bars(const Plan& plan) {
  constexpr double kLongest = 80;  // percent; the rest is for the seconds
  double longest_s = 0;
  for (const Choice& choice : plan.choices) longest_s = std::max(longest_s, choice.times.total_s);
  std::string html;
  for (size_t i = 0; i < plan.choices.size(); ++i) {
    const StepTimes& times = plan.choices[i].times;
    html += fmt::format("<div class=\"way{}\"><div>{}{}</div><div class=\"bar\">",
                        i == plan.recommended ? " best" : "", escaped(plan.choices[i].label),
                        i == plan.recommended ? " (recommended)" : "");
    for (const auto& [kind, seconds] :
         {std::pair{"f", times.forward_s}, std::pair{"b", times.backward_s},
          std::pair{"u", times.update_s}}) {
      html += fmt::format("<span class=\"{}\" style=\"width:{:.1f}%\"></span>", kind,
                          kLongest * seconds / longest_s);
    }
    html += fmt::format("<em>{}</em></div></div>\n", base::format_seconds(times.total_s));
  }
  return html;
}

/// The least of 1, 2, 3, 5 times a power of ten (of minutes, from one on) that is not below.
double round_step(double seconds) {
  const double unit = seconds > 30 ? 60 : 1;
  const double power = unit * std::pow(10, std::floor(std::log10(seconds / unit)));
  for (const double factor : {1.0, 2.0, 3.0, 5.0}) {
    if (factor * power >= seconds) return factor * power;
  }
  return 10 * power;
}

/// Step time against the number of devices, all methods of the plan's kind.
std::string device_curve(const Plan& plan) {
  const Choice& best = plan.choices[plan.recommended];
  const uint32_t now = plan.machine.device_count();
  const uint32_t most = std::max(8u, 2 * now);
  std::vector<std::pair<uint32_t, double>> points;
  Machine machine = plan.machine;
  machine.devices.resize(1);
  double top = 0;
  for (uint32_t n = 1; n <= most; n += most > 32 ? most / 16 : 1) {
    machine.devices.front().count = n;
    const auto times = simulate_step(plan.model, machine, best.options);
    if (!times.ok()) continue;
    points.emplace_back(n, times->total_s);
    top = std::max(top, times->total_s);
  }
  constexpr double kLeft = 96;
  constexpr double kWide = 610;
  constexpr double kHigh = 220;
  const double rule_s = round_step(top / 4);
  const int rules = static_cast<int>(std::ceil(top / rule_s));
  top = rule_s * rules;
  const auto x_of = [&](double n) { return kLeft + kWide * (n - 1) / std::max(1.0, most - 1.0); };
  const auto y_of = [&](double s) { return 20 + kHigh * (1 - s / top); };
  std::string svg =
      "<div class=\"scroll\"><svg viewBox=\"0 0 740 290\" role=\"img\" aria-label=\"step time by "
      "devices\">\n";
  for (int i = 0; i <= rules; ++i) {
    const double s = rule_s * i;
    svg += fmt::format(
        "<line class=\"g\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/><text x=\"{3}\" "
        "y=\"{4:.1f}\" text-anchor=\"end\">{5}</text>\n",
        kLeft, kLeft + kWide, y_of(s), kLeft - 6, y_of(s) + 4,
        i == 0 ? "0" : base::format_seconds(s));
  }
  std::string line;
  for (const auto& [n, s] : points) {
    line += fmt::format("{:.1f},{:.1f} ", x_of(n), y_of(s));
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", x_of(n),
                       kHigh + 40, n);
    svg += fmt::format("<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\"/>\n",
                       n == now ? "now" : "dot", x_of(n), y_of(s), n == now ? 6 : 3);
  }
  svg += fmt::format("<polyline class=\"l\" points=\"{}\"/>\n", line);
  svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">devices</text>\n",
                     kLeft + kWide / 2, kHigh + 62);
  return svg + "</svg></div>\n";
}

/// For each parameter, in this software's error feedback (engine/gradient_compressor.h): the step's
/// gradient and what earlier ones did not send, in host memory; of these the second is a plane of
/// the state, too.
constexpr uint64_t kResidualBytes = 2;
constexpr uint64_t kCompressionBytes = 2 + kResidualBytes;

/// What the engine keeps in the trainer's process: slots, staging, gradients that are not spilled,
/// cached state.
/// Subgroups are as small as give every device some, and staged as f32 twice
/// (engine/memory_plan.cc, csd/local_device.cc).
uint64_t engine_bytes(uint64_t parameters, const Machine& machine, const StepOptions& options) {
  constexpr uint64_t kSubgroupsPerDevice = 16;
  constexpr uint64_t kBudgetBytes = 512 * base::kMiB;
  constexpr uint64_t kSpillSlotsMax = 32;  // slots that also collect gradients are never too many
  const Software& software = machine.software;
  const uint64_t wanted =
      options.subgroup_elements != 0 ? options.subgroup_elements : software.subgroup_elements;
  const uint64_t elements = share_of(parameters, machine);
  const uint64_t some =
      base::round_up(base::divide_up(elements, kSubgroupsPerDevice), base::kBlockElements);
  const uint64_t size = std::min(wanted, some);
  const uint64_t staging = 2 * 4 * size;
  const uint64_t devices = std::max(1u, machine.device_count());
  const double state = state_bytes_per_parameter(options.optimizer, options.format);
  uint64_t slots = options.slots != 0 ? options.slots : software.slots;
  double each = state;
  uint64_t gradients = 0;
  if (host_selects(machine, options)) {
    gradients = kCompressionBytes * parameters;
    each += kResidualBytes;
  } else if (software.gradient_spilled) {
    each += software.gradient_bytes;
    const double fitting = static_cast<double>(kBudgetBytes - std::min(kBudgetBytes, staging)) /
                           (static_cast<double>(devices * size) * each);
    slots = std::clamp<uint64_t>(static_cast<uint64_t>(fitting), 1, kSpillSlotsMax);
  } else {
    gradients = software.gradient_bytes * parameters;
  }
  slots = std::min(slots, base::divide_up(elements, size));
  const auto buffers =
      staging + static_cast<uint64_t>(static_cast<double>(devices * slots * size) * each);
  const auto cache = std::min(options.state_cache_bytes,
                              static_cast<uint64_t>(state * static_cast<double>(parameters)));
  return gradients + cache + std::min(buffers, kBudgetBytes);
}

}  // namespace

std::string use_name(const TrainingUse& use) {
  if (use.program == plan::TrainingProgram::kTrain) return "smartinf train";
  return use.release_gradients ? "Python, release_gradients=True" : "Python";
}

MemoryNeed memory_need(const ModelShape& model, const Machine& machine, const StepOptions& options,
                       const TrainingUse& use) {
  // Python with torch and transformers beside what the machine file says of a program with torch.
  constexpr uint64_t kTransformersBytes = 330'000'000;
  constexpr uint64_t kProcessBytes = 420'000'000;  // where the machine file says nothing
  // Assumed: CUDA's libraries as a process has them in the host's memory.
  constexpr uint64_t kCudaHostBytes = 1'500'000'000;
  const Software& software = machine.software;
  const uint64_t parameters = model.parameters();
  const bool python = use.program == plan::TrainingProgram::kPython;
  const bool compressed_here = host_selects(machine, options);
  plan::TrainingMemoryInput input;
  input.model = model.training_model();
  input.program = use.program;
  input.gpu = machine.gpu.name != "none";
  input.value_bytes = options.value_bytes;
  input.recompute = use.recompute;
  input.accumulation = options.accumulation;
  input.release_gradients = use.release_gradients;
  // Master, momentum and variance, and all gradients once more, in f32.
  input.optimizer_bytes =
      use.in_memory ? 16 * parameters : engine_bytes(parameters, machine, options);
  input.process_bytes =
      machine.host.process_bytes != 0 ? machine.host.process_bytes : kProcessBytes;
  if (python) input.process_bytes += kTransformersBytes;
  if (input.gpu) input.process_bytes += kCudaHostBytes;
  const plan::TrainingMemory memory = plan::training_memory(input);
  MemoryNeed need;
  need.gpu_bytes = memory.accelerator_bytes;
  need.gpu_parts = memory.accelerator;
  // Of several ranks each has a flat buffer of all weights and a process; they share the rest.
  const uint64_t more_ranks = python ? machine.gpu.count - 1 : 0;
  need.host_bytes =
      memory.host_bytes + more_ranks * (input.value_bytes * parameters + input.process_bytes);
  need.host_parts = memory.host;
  if (more_ranks > 0) {
    need.host_parts.push_back({"the other ranks", need.host_bytes - memory.host_bytes});
  }
  const double state = state_bytes_per_parameter(options.optimizer, options.format);
  double kept = 2 * (state + (compressed_here ? kResidualBytes : 0));
  if (software.gradient_spilled && !compressed_here) kept += software.gradient_bytes;
  need.drive_bytes =
      static_cast<uint64_t>(kept * static_cast<double>(share_of(parameters, machine)));
  return need;
}

namespace {

bool fits(const ModelShape& model, const Machine& machine, const StepOptions& options,
          const TrainingUse& use) {
  return beyond(use, machine).empty() &&
         shortfall_of(memory_need(model, machine, options, use), machine).empty();
}

/// Settings, then smaller models, that would make it fit, each alone where one is enough.
std::vector<std::string> ways_out_of(const Plan& plan, const StepOptions& options) {
  std::vector<std::string> ways;
  const Machine& machine = plan.machine;
  const auto smaller_batch = [&](const TrainingUse& use) -> uint64_t {
    ModelShape smaller = plan.model;
    for (uint64_t batch = plan.model.batch; batch >= 1; batch /= 2) {
      smaller.batch = batch;
      if (fits(smaller, machine, options, use)) return batch;
    }
    return 0;
  };
  std::vector<TrainingUse> uses{plan.use};
  for (const UseNeed& other : plan.uses) {
    if (use_name(other.use) != use_name(plan.use)) uses.push_back(other.use);
  }
  for (TrainingUse use : uses) {
    for (const bool recompute : {plan.use.recompute, true}) {
      use.recompute = recompute;
      const uint64_t batch = smaller_batch(use);
      if (batch == 0) continue;
      std::string way = use_name(use);
      if (use.recompute != plan.use.recompute) way += ", activations computed twice";
      if (batch != plan.model.batch) way += fmt::format(", a micro batch of {}", batch);
      ways.push_back(std::move(way));
      break;
    }
  }
  if (!ways.empty()) return ways;
  ModelShape smaller = plan.model;
  smaller.batch = 1;
  while (smaller.layers > 1 && !fits(smaller, machine, options, uses.back())) --smaller.layers;
  if (fits(smaller, machine, options, uses.back())) {
    ways.push_back(
        fmt::format("{}, a micro batch of 1 and {} of the {} layers ({:.2f} billion "
                    "parameters)",
                    use_name(uses.back()), smaller.layers, plan.model.layers,
                    static_cast<double>(smaller.parameters()) / 1e9));
  }
  return ways;
}

}  // namespace

Status check_train_can(const ModelShape& model) {
  std::vector<std::string> lacks = model.beyond_train;
  if (!model.gated && lacks.empty()) lacks.push_back("another form than Llama's");
  if (model.gated && model.head_size * model.heads != model.hidden) {
    lacks.push_back(fmt::format("heads of {} that together are not the width", model.head_size));
  }
  if (lacks.empty()) return {};
  return Status(
      base::ErrorCode::kUnsupported,
      fmt::format("{} has what `smartinf train` has not: {}", model.name, fmt::join(lacks, ", ")),
      "Train it from Python (docs/trainer.md), or plan a model of the plain Llama form.");
}

Result<Plan> make_plan(const ModelShape& model, const Machine& machine,
                       const PlanRequest& request) {
  using plan::TrainingProgram;
  const StepOptions& base_options = request.options;
  const bool requested = request.requested;
  Plan plan;
  plan.model = model;
  plan.machine = machine;
  const auto consider_use = [&](TrainingProgram program, bool release) {
    if (request.program.value_or(program) != program) return;
    UseNeed one;
    one.use = {program, release, request.recompute, false};
    one.need = memory_need(model, machine, base_options, one.use);
    one.shortfall = shortfall_of(one.need, machine);
    if (one.shortfall.empty()) one.shortfall = beyond(one.use, machine);
    plan.uses.push_back(std::move(one));
  };
  if (request.program == TrainingProgram::kTrain || check_train_can(model).ok()) {
    consider_use(TrainingProgram::kTrain, false);
  }
  consider_use(TrainingProgram::kPython, false);
  consider_use(TrainingProgram::kPython, true);
  const auto fitting = std::find_if(plan.uses.begin(), plan.uses.end(),
                                    [](const UseNeed& one) { return one.shortfall.empty(); });
  plan.use = (fitting != plan.uses.end() ? *fitting : plan.uses.front()).use;
  bool can_decompress = true;
  for (const DeviceGroup& device : machine.devices) {
    can_decompress = can_decompress && device.decompress_bytes_per_s > 0;
  }
  const auto add = [&](Method method, base::StateFormat format) -> Status {
    StepOptions options = base_options;
    options.method = method;
    options.format = format;
    SI_ASSIGN_OR_RETURN(Choice choice, try_one(model, machine, options, plan.use));
    plan.choices.push_back(std::move(choice));
    return {};
  };
  using base::StateFormat;
  SI_RETURN_IF_ERROR(add(Method::kBaseline, StateFormat::kF32));
  if (machine.can_update()) {
    SI_RETURN_IF_ERROR(add(Method::kSmart, StateFormat::kF32));
    for (const StateFormat format : {StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8}) {
      SI_RETURN_IF_ERROR(add(Method::kSmartOver, format));
    }
  }
  if (can_decompress) {
    SI_RETURN_IF_ERROR(add(Method::kSmartComp, StateFormat::kF32));
  }
  const auto is_requested = [&](const Choice& choice) {
    return choice.options.method == base_options.method &&
           choice.options.format == base_options.format;
  };
  if (requested && std::none_of(plan.choices.begin(), plan.choices.end(), is_requested)) {
    SI_RETURN_IF_ERROR(add(base_options.method, base_options.format));
  }
  std::stable_sort(plan.choices.begin(), plan.choices.end(), [](const Choice& a, const Choice& b) {
    if (a.fits != b.fits) return a.fits;
    return a.times.total_s < b.times.total_s;
  });
  // Unless asked for, what changes no bits; the faster inexact ones stand beside it in the list.
  for (size_t i = 0; i < plan.choices.size(); ++i) {
    if (requested ? is_requested(plan.choices[i]) : plan.choices[i].exact) {
      plan.recommended = i;
      break;
    }
  }
  const Choice& best = plan.choices[plan.recommended];
  plan.fits = best.fits;
  for (UseNeed& one : plan.uses) {
    one.need = memory_need(model, machine, best.options, one.use);
    one.shortfall = shortfall_of(one.need, machine);
    if (one.shortfall.empty()) one.shortfall = beyond(one.use, machine);
  }
  if (!plan.fits) {
    plan.ways_out = ways_out_of(plan, best.options);
    const auto more = [&](const std::string& what, uint64_t needed, uint64_t have) {
      if (have == 0 || needed <= have) return;
      plan.purchases.push_back({fmt::format("{} of {} instead of {}", what,
                                            base::format_bytes(needed), base::format_bytes(have)),
                                0, 0});
    };
    if (machine.gpu.name != "none") {
      more("a GPU with memory", best.need.gpu_bytes, machine.gpu.memory_bytes);
    }
    more("host memory", best.need.host_bytes, machine.host.memory_bytes);
    for (const DeviceGroup& device : machine.devices) {
      more("drives with space", best.need.drive_bytes, device.capacity_bytes);
    }
    return plan;
  }

  const auto consider = [&](std::string what, const Machine& changed,
                            const StepOptions& options) -> Status {
    SI_ASSIGN_OR_RETURN(const StepTimes times, simulate_step(model, changed, options));
    plan.purchases.push_back(
        {std::move(what), times.total_s, 1 - times.total_s / best.times.total_s});
    return {};
  };
  Machine changed = machine;
  changed.devices.front().count += 1;
  SI_RETURN_IF_ERROR(
      consider(fmt::format("one more {}", machine.devices.front().name), changed, best.options));
  changed = machine;
  changed.devices.front().count *= 2;
  SI_RETURN_IF_ERROR(consider(fmt::format("twice as many {}", machine.devices.front().name),
                              changed, best.options));
  changed = machine;
  changed.host.link_bytes_per_s *= 2;
  SI_RETURN_IF_ERROR(consider("a host link twice as fast", changed, best.options));
  changed = machine;
  changed.gpu.peak_flops *= 2;
  changed.gpu.memory_bytes_per_s *= 2;
  const bool gpu = machine.gpu.name != "none";
  SI_RETURN_IF_ERROR(consider(gpu ? "a GPU twice as fast, same link" : "cores twice as fast",
                              changed, best.options));
  changed = machine;
  changed.gpu.link_bytes_per_s *= 2;
  if (gpu) SI_RETURN_IF_ERROR(consider("a GPU link twice as fast", changed, best.options));
  if (can_decompress) {
    StepOptions compressed = best.options;
    compressed.method = Method::kSmartComp;
    SI_RETURN_IF_ERROR(
        consider("compressed gradients (nothing to buy, not exact)", machine, compressed));
  }
  std::erase_if(plan.purchases, [](const Purchase& purchase) { return purchase.saved < 0.001; });
  std::stable_sort(plan.purchases.begin(), plan.purchases.end(),
                   [](const Purchase& a, const Purchase& b) { return a.saved > b.saved; });
  return plan;
}

Result<std::string> plan_recipe(const Plan& plan) {
  const ModelShape& model = plan.model;
  SI_RETURN_IF_ERROR(check_train_can(model));
  const TrainingUse train{plan::TrainingProgram::kTrain, false, plan.use.recompute, false};
  const MemoryNeed need =
      memory_need(model, plan.machine, plan.choices[plan.recommended].options, train);
  std::string shortfall = shortfall_of(need, plan.machine);
  if (shortfall.empty()) shortfall = beyond(train, plan.machine);
  if (!shortfall.empty()) {
    return Status(base::ErrorCode::kOutOfMemory,
                  fmt::format("no recipe: `smartinf train` would not fit: {}", shortfall),
                  "What else would fit stands in the plan.");
  }
  const Choice& best = plan.choices[plan.recommended];
  std::string text = fmt::format(
      "# {} on {}, as `smartinf plan` recommends: {}, {} a step.\n"
      "# Fill in the data and the path of each device.\n\n"
      "[model]\nlayers = {}\nwidth = {}\nheads = {}\nkv_heads = {}\nmlp_width = {}\n"
      "vocabulary = {}\ntied_head = {}\nrope_base = {}\nnorm_eps = {}\ninit_std = {}\n\n",
      model.name, plan.machine.name, best.label, base::format_seconds(best.times.total_s),
      model.layers, model.hidden, model.heads, model.kv_heads, model.feed_forward, model.vocabulary,
      model.tied, model.rope_base, model.norm_eps, model.init_std);
  text += fmt::format(
      "[data]\npaths = [\"tokens.bin\"]\nsequence = {}\n\n"
      "[train]\nprecision = \"{}\"\nmicro_batch = {}\naccumulation = {}\n"
      "checkpoint_activations = {}\n\n",
      model.sequence, plan.choices[plan.recommended].options.value_bytes == 4 ? "f32" : "bf16",
      model.batch, best.options.accumulation, plan.use.recompute);
  const char* rule = best.options.optimizer == Optimizer::kAdam          ? "adamw"
                     : best.options.optimizer == Optimizer::kSgdMomentum ? "sgd"
                                                                         : "adagrad";
  text += fmt::format("[optimizer]\nwhere = \"{}\"\nrule = \"{}\"\nformat = \"{}\"\n",
                      best.options.method == Method::kBaseline ? "host" : "device", rule,
                      base::state_format_name(best.options.format));
  if (best.options.method == Method::kSmartComp) {
    // The ratio counts a sign with its index as one byte, against 4 of a gradient.
    text += fmt::format("\n[compress]\ndensity = {}\nresidual_every = {}\n",
                        std::min(1.0, 4 * best.options.ratio), best.options.residual_every);
  }
  const bool spilled =
      plan.machine.software.gradient_spilled && best.options.method != Method::kSmartComp;
  if (best.options.method == Method::kSmart || spilled) {
    text += fmt::format("\n[engine]\n{}{}",
                        best.options.method == Method::kSmart ? "schedule = \"naive\"\n" : "",
                        spilled ? "gradient_budget = 0\n" : "");
  }
  for (uint32_t d = 0; d < plan.machine.device_count(); ++d) {
    text += fmt::format("\n[[device]]\npath = \"/mnt/drive-{}/smartinf\"\n", d);
  }
  return text;
}

std::string_view method_meaning(Method method) {
  switch (method) {
    case Method::kBaseline:
      return "the host's processor updates; all state crosses the host link both ways";
    case Method::kSmart:
      return "each device updates its own share of the state, one part after another";
    case Method::kSmartOver:
      return "the same with reading, updating and writing at the same time";
    case Method::kSmartComp:
      return "the same with compressed gradients; what is not sent is added to the next gradient";
  }
  return "";
}

std::string drive_life_text(double days) {
  if (days <= 0) return "-";
  if (days < 2) return fmt::format("{:.0f} hours", 24 * days);
  if (days < 730) return fmt::format("{:.0f} days", days);
  return fmt::format("{:.1f} years", days / 365);
}

namespace {

std::string soon(double days) {
  if (days < 2) return fmt::format("in {:.0f} hours", std::max(1.0, 24 * days));
  if (days < 6) return fmt::format("in {:.0f} days", days);
  if (days < 10.5) return "in a week";
  return fmt::format("in {:.0f} weeks", days / 7);
}

}  // namespace

std::string plan_verdict(const Plan& plan) {
  const Choice& best = plan.choices[plan.recommended];
  if (!plan.fits) {
    std::string text =
        fmt::format("It does not fit, with {}: {}.", use_name(plan.use), best.shortfall);
    if (plan.ways_out.empty()) return text + " No setting makes it fit.";
    return text + fmt::format(" It would fit with {}.", fmt::join(plan.ways_out, "; or with "));
  }
  std::string text = fmt::format("It fits, with {}.", use_name(plan.use));
  for (const UseNeed& other : plan.uses) {
    if (other.shortfall.empty()) break;
    text += fmt::format(" ({}: {}.)", use_name(other.use), other.shortfall);
  }
  if (best.drive_life_days > 0 && best.drive_life_days < kFewDays) {
    text += fmt::format(
        " Training without a pause wears {} out {}. More micro batches in a step (accumulation) "
        "wear less; a smaller state format writes less for each token.",
        plan.machine.device_count() == 1 ? "the drive" : "the drives", soon(best.drive_life_days));
  }
  return text;
}

std::string plan_html(const Plan& plan) {
  const Choice& best = plan.choices[plan.recommended];
  const Machine& machine = plan.machine;
  const bool gpu = machine.gpu.name != "none";
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0} on {1}</title>\n<style>\n"
      "body{{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 "
      "1em;color:#222}}\n"
      ".scroll{{overflow-x:auto}} .scroll td,.scroll th{{white-space:nowrap}} "
      "table{{border-collapse:collapse;width:100%;font-size:14px}}"
      "td,th{{padding:.35em .6em;border-bottom:1px solid #ddd;text-align:right}}"
      "td:first-child,th:first-child,td.text{{text-align:left}}\n"
      "tr.best{{background:#eaf3fb;font-weight:600}} .no{{color:#b3261e}}\n"
      ".verdict{{font-size:17px;border-left:4px solid #31a354;padding:.3em .8em}}"
      ".verdict.no{{border-color:#b3261e}}\n"
      ".way{{display:grid;grid-template-columns:15em 1fr;gap:.2em .8em;padding:.25em .4em}}"
      ".way.best{{background:#eaf3fb;font-weight:600}} .bar{{display:flex;align-items:center}}"
      ".bar span{{height:20px}} .bar em{{font-style:normal;margin-left:.4em;white-space:nowrap}}\n"
      "svg{{width:100%;min-width:560px;height:auto;font-size:13px}} .f{{background:#a1d99b}} "
      ".b{{background:#9ecae1}} .u{{background:#fdae6b}} .g{{stroke:#e3e3e3}} "
      ".l{{fill:none;stroke:#3182bd;stroke-width:2}} .dot{{fill:#3182bd}} .now{{fill:#e6550d}}\n"
      ".key span{{display:inline-block;width:.9em;height:.9em;margin:0 .3em 0 1em}}\n"
      "@media (max-width:640px){{.way{{grid-template-columns:1fr}} body{{margin:1em auto}}}}\n"
      "</style></head><body>\n<h1>{0} on {1}</h1>\n",
      escaped(plan.model.name), escaped(machine.name));
  const bool worn = best.drive_life_days > 0 && best.drive_life_days < kFewDays;
  html += fmt::format("<p class=\"verdict{}\"><b>{}</b></p>\n", plan.fits && !worn ? "" : " no",
                      escaped(plan_verdict(plan)));
  html += fmt::format(
      "<p>{:.2f} billion parameters; {} of {} sequences of {} tokens in a step; {}, {} x {}.</p>\n",
      static_cast<double>(plan.model.parameters()) / 1e9,
      best.options.accumulation == 1 ? "one micro batch"
                                     : fmt::format("{} micro batches", best.options.accumulation),
      plan.model.batch, plan.model.sequence,
      !gpu ? "no GPU"
           : (machine.gpu.count > 1 ? fmt::format("{} x ", machine.gpu.count) : "") +
                 escaped(machine.gpu.name),
      machine.device_count(), escaped(machine.devices.front().name));
  if (plan.fits) {
    html += fmt::format("<p>Recommended: {}, {} a step, {:.0f} tokens/s, bound by {}.</p>\n",
                        escaped(best.label), base::format_seconds(best.times.total_s),
                        best.tokens_per_s, escaped(best.times.bound_by));
  }
  html += "<h2>Memory</h2>\n<div class=\"scroll\"><table><tr><th></th>";
  if (gpu) html += "<th>GPU</th>";
  html += "<th>host</th><th>each drive</th><th></th></tr>\n";
  const auto memory_row = [&](const std::string& name, uint64_t on_gpu, uint64_t on_host,
                              uint64_t on_drive, const std::string& text, bool marked) {
    html += fmt::format("<tr{}><td>{}</td>", marked ? " class=\"best\"" : "", escaped(name));
    if (gpu) html += fmt::format("<td>{}</td>", base::format_bytes(on_gpu));
    html += fmt::format("<td>{}</td><td>{}</td><td class=\"text{}\">{}</td></tr>\n",
                        base::format_bytes(on_host), base::format_bytes(on_drive),
                        text == "fits" || text.empty() ? "" : " no", escaped(text));
  };
  for (const UseNeed& one : plan.uses) {
    memory_row(use_name(one.use), one.need.gpu_bytes, one.need.host_bytes, one.need.drive_bytes,
               one.shortfall.empty() ? "fits" : one.shortfall,
               use_name(one.use) == use_name(plan.use));
  }
  memory_row("there is", machine.gpu.memory_bytes, machine.host.memory_bytes,
             machine.devices.front().capacity_bytes, "", false);
  html += "</table></div>\n<p>At the peak, with " + escaped(use_name(plan.use)) + ":";
  const auto parts = [&](const char* where, const std::vector<plan::MemoryPart>& all) {
    if (all.empty()) return;
    html += fmt::format(" {}:", where);
    const char* between = " ";
    for (const plan::MemoryPart& part : all) {
      if (part.bytes == 0) continue;
      html += fmt::format("{}{} {}", between, part.name, base::format_bytes(part.bytes));
      between = ", ";
    }
    html += ".";
  };
  parts("GPU", best.need.gpu_parts);
  parts("host", best.need.host_parts);
  html +=
      "</p>\n<h2>Seconds in a step</h2>\n<p class=\"key\"><span class=\"f\"></span>forward<span "
      "class=\"b\"></span>backward<span class=\"u\"></span>update</p>\n";
  html += bars(plan);
  html +=
      "<div class=\"scroll\"><table><tr><th>how</th><th>step</th><th>tokens/s</th><th>bound by</th>"
      "<th>exact</th><th>drives last</th><th>cost of a million tokens</th><th></th></tr>\n";
  for (size_t i = 0; i < plan.choices.size(); ++i) {
    const Choice& choice = plan.choices[i];
    const bool few = choice.drive_life_days > 0 && choice.drive_life_days < kFewDays;
    html += fmt::format(
        "<tr{}><td>{}</td><td>{}</td><td>{:.0f}</td><td>{}</td><td>{}</td><td{}>{}</td><td>{}</td>"
        "<td class=\"no\">{}</td></tr>\n",
        i == plan.recommended ? " class=\"best\"" : "", escaped(choice.label),
        base::format_seconds(choice.times.total_s), choice.tokens_per_s,
        escaped(choice.times.bound_by), choice.exact ? "yes" : "no", few ? " class=\"no\"" : "",
        drive_life_text(choice.drive_life_days),
        choice.cost_per_mtoken > 0 ? fmt::format("{:.2f}", choice.cost_per_mtoken) : "-",
        choice.fits ? "" : "does not fit");
  }
  html += "</table></div>\n<ul>\n";
  for (const Method method :
       {Method::kBaseline, Method::kSmart, Method::kSmartOver, Method::kSmartComp}) {
    html += fmt::format("<li><b>{}</b>: {}</li>\n", method_name(method), method_meaning(method));
  }
  html +=
      "<li><b>exact</b>: the same bits as training with an optimizer state of 32 bit in memory; "
      "bf16 "
      "and q8 round momentum and variance, compression sends a part of each gradient</li>\n";
  html += fmt::format(
      "<li><b>drives last</b>: the endurance that they are rated for over what a step writes, "
      "training without a pause</li>\n<li><b>cost</b>: in the currency of the machine file's "
      "prices "
      "(the files that come with smartinf assume US dollars): machine and GPU over {:g} years, "
      "drives "
      "over their life, power at {:g} a kWh</li>\n</ul>\n",
      machine.price.life_years, machine.price.per_kwh);
  html += "<h2>More devices</h2>\n" + device_curve(plan);
  html += "<h2>What to buy next</h2>\n";
  if (!plan.fits) html += "<p>What lacks, before anything makes it faster:</p>\n";
  html += "<div class=\"scroll\"><table><tr><th></th><th>step</th><th>saved</th></tr>\n";
  for (const Purchase& purchase : plan.purchases) {
    html += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td></tr>\n", escaped(purchase.what),
        purchase.step_s > 0 ? base::format_seconds(purchase.step_s) : "-",
        purchase.step_s > 0 ? fmt::format("{:.1f} %", 100 * purchase.saved) : "to fit at all");
  }
  html +=
      "</table></div>\n<p>Simulated by smartinf; docs/simulator.md says how, and how well.</p>\n"
      "</body></html>\n";
  return html;
}

}  // namespace smartinf::sim
