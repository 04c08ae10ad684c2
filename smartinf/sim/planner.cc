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

void judge_fit(Choice& choice, const Machine& machine) {
  const auto lacks = [&](const char* where, uint64_t need, uint64_t have) {
    if (have == 0 || need <= have) return;
    choice.fits = false;
    choice.shortfall += fmt::format("{}{} lacks {}", choice.shortfall.empty() ? "" : "; ", where,
                                    base::format_bytes(need - have));
  };
  if (machine.gpu.name != "none") lacks("GPU", choice.need.gpu_bytes, machine.gpu.memory_bytes);
  lacks("host", choice.need.host_bytes, machine.host.memory_bytes);
  for (const DeviceGroup& device : machine.devices) {
    lacks(device.name.c_str(), choice.need.drive_bytes, device.capacity_bytes);
  }
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
  if (options.hidden != Hidden::kNothing) {
    label += fmt::format(", hidden behind {}", hidden_name(options.hidden));
  }
  return label;
}

Result<Choice> try_one(const ModelShape& model, const Machine& machine,
                       const StepOptions& options) {
  Choice choice;
  choice.options = options;
  choice.label = label_of(options);
  SI_ASSIGN_OR_RETURN(choice.times, simulate_step(model, machine, options));
  choice.need = memory_need(model, machine, options);
  choice.exact = options.format == base::StateFormat::kF32 && options.method != Method::kSmartComp;
  choice.tokens_per_s =
      static_cast<double>(model.tokens() * machine.gpu.count) / choice.times.total_s;
  judge_fit(choice, machine);
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

/// Horizontal stacked bars of the three phases.
std::string bars(const std::vector<const Choice*>& choices) {
  constexpr int kRow = 30;
  constexpr int kLabel = 300;
  constexpr int kWidth = 560;
  double longest_s = 0;
  for (const Choice* choice : choices) longest_s = std::max(longest_s, choice->times.total_s);
  std::string svg =
      fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"seconds per step\">\n",
                  kLabel + kWidth + 90, kRow * static_cast<int>(choices.size()) + 8);
  int y = 4;
  for (const Choice* choice : choices) {
    svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", kLabel - 8,
                       y + 18, escaped(choice->label));
    double x = kLabel;
    const StepTimes& times = choice->times;
    for (const auto& [kind, seconds] :
         {std::pair{"f", times.forward_s}, std::pair{"b", times.backward_s},
          std::pair{"u", times.update_s}}) {
      const double width = kWidth * seconds / longest_s;
      svg +=
          fmt::format("<rect class=\"{}\" x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"20\"/>\n",
                      kind, x, y + 3, width);
      x += width;
    }
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\">{}</text>\n", x + 6, y + 18,
                       base::format_seconds(times.total_s));
    y += kRow;
  }
  return svg + "</svg>\n";
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
      "<svg viewBox=\"0 0 740 290\" role=\"img\" aria-label=\"step time by devices\">\n";
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
  return svg + "</svg>\n";
}

/// The trainer's process on a machine without a GPU, at its peak. state_bytes: the optimizer's part
/// of it. Tensors have pages of their own (train/tensor_memory.h), so what is free does not count.
uint64_t trainer_bytes(const ModelShape& model, const Machine& machine, const StepOptions& options,
                       uint64_t state_bytes, bool checkpoints) {
  // Measuring the drives takes this for a while (storage/tuning.cc), before torch has loaded all of
  // what training needs of it, which process_bytes holds.
  constexpr uint64_t kTuningBytes = 256 * base::kMiB;
  constexpr uint64_t kLoadedLaterBytes = 32 * base::kMiB;
  const uint64_t value_bytes = options.value_bytes;
  const uint64_t saved = model.layer_saved_bytes(options.value_bytes);
  const uint64_t backward = model.layer_backward_bytes(options.value_bytes);
  const uint64_t inputs = model.layers * model.checkpoint_bytes() * value_bytes / 2;
  const uint64_t kept = checkpoints ? inputs : model.layers * saved;
  // Backward begins: the logarithms of the chances, and gradients of them and of the logits, in
  // f32. What the logarithms were made of is gone.
  const uint64_t loss = kept + model.tokens() * model.vocabulary * 3 * 4;
  // Then the last layer's, with its values computed once more where they were not kept, and the
  // head's gradient; ...
  const uint64_t again = checkpoints ? saved : 0;
  const uint64_t last = kept + again + backward + value_bytes * model.vocabulary * model.hidden;
  // ...and the first layer's, with the gradients of all others.
  const uint64_t first = saved + backward + value_bytes * model.parameters();
  const uint64_t training =
      value_bytes * model.parameters() + state_bytes + std::max({loss, last, first});
  return machine.host.process_bytes + std::max(training, kTuningBytes - kLoadedLaterBytes);
}

/// For each parameter, in this software's error feedback (engine/gradient_compressor.h): the step's
/// gradient and what earlier ones did not send, in host memory; of these the second is a plane of
/// the state, too.
constexpr uint64_t kResidualBytes = 2;
constexpr uint64_t kCompressionBytes = 2 + kResidualBytes;

/// What the engine keeps in the trainer's process: slots, staging, gradients that are not spilled.
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
  return staging + gradients +
         static_cast<uint64_t>(static_cast<double>(devices * slots * size) * each);
}

}  // namespace

MemoryNeed memory_need(const ModelShape& model, const Machine& machine,
                       const StepOptions& options) {
  MemoryNeed need;
  const Software& software = machine.software;
  const uint64_t parameters = model.parameters();
  const uint64_t largest =
      std::max({model.layer_parameters(), model.embedding_parameters(), model.head_parameters()});
  // Weights of the unit at work and of the next; gradients of one; its activations; checkpoints of
  // all layers; logits and their gradient in f32.
  const bool gpu = machine.gpu.name != "none";
  const uint64_t working =
      2 * 2 * largest + 2 * largest + static_cast<uint64_t>(model.layer_activation_bytes()) +
      model.layers * model.checkpoint_bytes() + 2 * 4 * model.tokens() * model.vocabulary;
  need.gpu_bytes = gpu ? working : 0;
  const uint64_t subgroup =
      options.subgroup_elements != 0 ? options.subgroup_elements : software.subgroup_elements;
  const uint32_t slots = options.slots != 0 ? options.slots : software.slots;
  const double state = state_bytes_per_parameter(options.optimizer, options.format);
  const uint64_t elements = share_of(parameters, machine);
  const auto slot_bytes =
      static_cast<uint64_t>(static_cast<double>(std::min(subgroup, elements)) * (state + 4));
  // On the CPU the processors of local drives are in the trainer's process.
  if (!gpu && model.gated) {
    const uint64_t engine = engine_bytes(parameters, machine, options);
    need.host_bytes = trainer_bytes(model, machine, options, engine, true);
    need.host_bytes_without_checkpoints = trainer_bytes(model, machine, options, engine, false);
    // Master, momentum and variance, and all gradients once more, in f32.
    need.memory_host_bytes = trainer_bytes(model, machine, options, 16 * parameters, true);
    need.memory_host_bytes_without_checkpoints =
        trainer_bytes(model, machine, options, 16 * parameters, false);
  } else {
    need.host_bytes = 2 * parameters + (gpu ? 0 : working);
  }
  const bool whole = need.host_bytes_without_checkpoints > 0;
  const bool compressed_here = host_selects(machine, options);
  if (!whole && compressed_here) {
    need.host_bytes += kCompressionBytes * parameters;
  } else if (!whole && !software.gradient_spilled) {
    need.host_bytes +=
        options.method == Method::kSmartComp
            ? static_cast<uint64_t>(4 * options.ratio * static_cast<double>(parameters))
            : software.gradient_bytes * parameters;
  }
  if (!whole && options.method == Method::kBaseline) need.host_bytes += slots * slot_bytes;
  double kept = 2 * (state + (compressed_here ? kResidualBytes : 0));
  if (software.gradient_spilled && !compressed_here) kept += software.gradient_bytes;
  need.drive_bytes = static_cast<uint64_t>(kept * static_cast<double>(elements));
  return need;
}

Result<Plan> make_plan(const ModelShape& model, const Machine& machine,
                       const StepOptions& base_options, bool asked) {
  Plan plan;
  plan.model = model;
  plan.machine = machine;
  bool can_decompress = true;
  for (const DeviceGroup& device : machine.devices) {
    can_decompress = can_decompress && device.decompress_bytes_per_s > 0;
  }
  const auto add = [&](Method method, base::StateFormat format, Hidden hidden) -> Status {
    StepOptions options = base_options;
    options.method = method;
    options.format = format;
    options.hidden = hidden;
    SI_ASSIGN_OR_RETURN(Choice choice, try_one(model, machine, options));
    plan.choices.push_back(std::move(choice));
    return {};
  };
  using base::StateFormat;
  SI_RETURN_IF_ERROR(add(Method::kBaseline, StateFormat::kF32, Hidden::kNothing));
  if (machine.can_update()) {
    SI_RETURN_IF_ERROR(add(Method::kSmart, StateFormat::kF32, Hidden::kNothing));
    for (const StateFormat format : {StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8}) {
      SI_RETURN_IF_ERROR(add(Method::kSmartOver, format, Hidden::kNothing));
    }
    SI_RETURN_IF_ERROR(add(Method::kSmartOver, StateFormat::kF32, Hidden::kForward));
  }
  if (can_decompress) {
    SI_RETURN_IF_ERROR(add(Method::kSmartComp, StateFormat::kF32, Hidden::kNothing));
  }
  const auto is_asked = [&](const Choice& choice) {
    return choice.options.method == base_options.method &&
           choice.options.format == base_options.format &&
           choice.options.hidden == base_options.hidden;
  };
  if (asked && std::none_of(plan.choices.begin(), plan.choices.end(), is_asked)) {
    SI_RETURN_IF_ERROR(add(base_options.method, base_options.format, base_options.hidden));
  }
  std::stable_sort(plan.choices.begin(), plan.choices.end(), [](const Choice& a, const Choice& b) {
    if (a.fits != b.fits) return a.fits;
    return a.times.total_s < b.times.total_s;
  });
  // Unless asked for, what changes no bits; the faster inexact ones stand beside it in the list.
  for (size_t i = 0; i < plan.choices.size(); ++i) {
    if (asked ? is_asked(plan.choices[i]) : plan.choices[i].exact) {
      plan.recommended = i;
      break;
    }
  }
  const Choice& best = plan.choices[plan.recommended];
  plan.fits = best.fits;

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
  if (!model.gated) {
    return Status(
        base::ErrorCode::kUnsupported,
        fmt::format("no recipe for {}: train trains models of the Llama form", model.name),
        "Plan a llama3-* or qwen* model, or a config.json of that form.");
  }
  if (model.head_size * model.heads != model.hidden) {
    return Status(base::ErrorCode::kUnsupported,
                  fmt::format("no recipe for {}: {} heads of {} are not its width {}", model.name,
                              model.heads, model.head_size, model.hidden),
                  "train needs heads x head size = width.");
  }
  const Choice& best = plan.choices[plan.recommended];
  std::string text = fmt::format(
      "# {} on {}, as `smartinf plan` recommends: {}, {} a step.\n"
      "# Fill in the data and the path of each device.\n\n"
      "[model]\nlayers = {}\nwidth = {}\nheads = {}\nkv_heads = {}\nmlp_width = {}\n"
      "vocabulary = {}\ntied_head = {}\n\n",
      model.name, plan.machine.name, best.label, base::format_seconds(best.times.total_s),
      model.layers, model.hidden, model.heads, model.kv_heads, model.feed_forward, model.vocabulary,
      model.tied);
  text += fmt::format(
      "[data]\npaths = [\"tokens.bin\"]\nsequence = {}\n\n"
      "[train]\nprecision = \"{}\"\nmicro_batch = {}\ncheckpoint_activations = true\n\n",
      model.sequence, plan.choices[plan.recommended].options.value_bytes == 4 ? "f32" : "bf16",
      model.batch);
  const char* rule = best.options.optimizer == Optimizer::kAdam          ? "adamw"
                     : best.options.optimizer == Optimizer::kSgdMomentum ? "sgd"
                                                                         : "adagrad";
  text += fmt::format("[optimizer]\nwhere = \"{}\"\nrule = \"{}\"\nformat = \"{}\"\n",
                      best.options.method == Method::kBaseline ? "host" : "device", rule,
                      base::state_format_name(best.options.format));
  if (best.options.method == Method::kSmartComp) {
    text += fmt::format("\n[compress]\ncodec = \"topk\"\nratio = {}\nkeep_every = {}\n",
                        best.options.ratio, best.options.keep_every);
  }
  if (best.options.method == Method::kSmart) text += "\n[engine]\nschedule = \"naive\"\n";
  for (uint32_t d = 0; d < plan.machine.device_count(); ++d) {
    text += fmt::format("\n[[device]]\npath = \"/mnt/drive-{}/smartinf\"\n", d);
  }
  return text;
}

std::string plan_html(const Plan& plan) {
  const Choice& best = plan.choices[plan.recommended];
  std::vector<const Choice*> shown;
  for (const Choice& choice : plan.choices) shown.push_back(&choice);
  const Machine& machine = plan.machine;
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0} on {1}</title>\n<style>\n"
      "body{{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 "
      "1em;color:#222}}\n"
      "table{{border-collapse:collapse;width:100%;font-size:14px}}"
      "td,th{{padding:.35em .6em;border-bottom:1px solid #ddd;text-align:right}}"
      "td:first-child,th:first-child{{text-align:left}} td:nth-child(2){{white-space:nowrap}}\n"
      "tr.best{{background:#eaf3fb;font-weight:600}} .no{{color:#b3261e}}\n"
      "svg{{width:100%;height:auto;font-size:13px}} .f{{fill:#a1d99b}} .b{{fill:#9ecae1}} "
      ".u{{fill:#fdae6b}} .g{{stroke:#e3e3e3}} .l{{fill:none;stroke:#3182bd;stroke-width:2}} "
      ".dot{{fill:#3182bd}} .now{{fill:#e6550d}}\n"
      ".key span{{display:inline-block;width:.9em;height:.9em;margin:0 .3em 0 1em}}\n"
      "</style></head><body>\n<h1>{0} on {1}</h1>\n",
      escaped(plan.model.name), escaped(machine.name));
  html += fmt::format(
      "<p>{:.2f} billion parameters, {} x {} tokens in a step; {}{}, {} x {}.</p>\n",
      static_cast<double>(plan.model.parameters()) / 1e9, plan.model.batch, plan.model.sequence,
      machine.gpu.count > 1 ? fmt::format("{} x ", machine.gpu.count) : "",
      escaped(machine.gpu.name), machine.device_count(), escaped(machine.devices.front().name));
  html += plan.fits ? fmt::format(
                          "<p><b>It fits.</b> Recommended: {}, {} a step, {:.0f} tokens/s, bound "
                          "by {}.</p>\n",
                          escaped(best.label), base::format_seconds(best.times.total_s),
                          best.tokens_per_s, escaped(best.times.bound_by))
                    : fmt::format("<p class=\"no\"><b>It does not fit:</b> {}.</p>\n",
                                  escaped(best.shortfall));
  html += fmt::format(
      "<h2>Where the bytes lie</h2>\n<table><tr><th></th><th>needed</th><th>there</th></tr>"
      "<tr><td>GPU</td><td>{}</td><td>{}</td></tr><tr><td>host</td><td>{}</td><td>{}</td></tr>"
      "<tr><td>each device</td><td>{}</td><td>{}</td></tr></table>\n",
      base::format_bytes(best.need.gpu_bytes), base::format_bytes(machine.gpu.memory_bytes),
      base::format_bytes(best.need.host_bytes), base::format_bytes(machine.host.memory_bytes),
      base::format_bytes(best.need.drive_bytes),
      base::format_bytes(machine.devices.front().capacity_bytes));
  html +=
      "<h2>Seconds in a step</h2>\n<p class=\"key\"><span class=\"f\" "
      "style=\"background:#a1d99b\"></span>forward<span "
      "style=\"background:#9ecae1\"></span>backward"
      "<span style=\"background:#fdae6b\"></span>update that nothing hides</p>\n";
  html += bars(shown);
  html +=
      "<table><tr><th>way</th><th>step</th><th>tokens/s</th><th>bound by</th><th>exact</th>"
      "<th>drives last</th><th>cost / M tokens</th><th></th></tr>\n";
  for (size_t i = 0; i < plan.choices.size(); ++i) {
    const Choice& choice = plan.choices[i];
    html += fmt::format(
        "<tr{}><td>{}</td><td>{}</td><td>{:.0f}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td class=\"no\">{}</td></tr>\n",
        i == plan.recommended ? " class=\"best\"" : "", escaped(choice.label),
        base::format_seconds(choice.times.total_s), choice.tokens_per_s,
        escaped(choice.times.bound_by), choice.exact ? "yes" : "no",
        choice.drive_life_days > 0 ? fmt::format("{:.0f} days", choice.drive_life_days) : "-",
        choice.cost_per_mtoken > 0 ? fmt::format("{:.2f}", choice.cost_per_mtoken) : "-",
        escaped(choice.shortfall));
  }
  html += "</table>\n<h2>More devices</h2>\n" + device_curve(plan);
  html += "<h2>What to buy next</h2>\n<table><tr><th></th><th>step</th><th>saved</th></tr>\n";
  for (const Purchase& purchase : plan.purchases) {
    html +=
        fmt::format("<tr><td>{}</td><td>{}</td><td>{:.1f} %</td></tr>\n", escaped(purchase.what),
                    base::format_seconds(purchase.step_s), 100 * purchase.saved);
  }
  html +=
      "</table>\n<p>Simulated by smartinf; docs/simulator.md says how, and how well.</p>\n"
      "</body></html>\n";
  return html;
}

}  // namespace smartinf::sim
