// The values of plan_report.html.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/sim/plan_page.h"
#include "smartinf/sim/planner.h"
#include "smartinf/sim/template.h"

namespace smartinf::sim {
namespace {

using base::format_bytes;
using base::format_seconds;
using nlohmann::json;

json option_values(const Plan& plan) {
  constexpr double kLongest = 80;  // percent of a bar's space; the rest is for the seconds
  double longest_s = 0;
  for (const PlanOption& option : plan.options) {
    longest_s = std::max(longest_s, option.times.total_s);
  }
  const auto percent = [&](double seconds) {
    return fmt::format("{:.1f}", kLongest * seconds / longest_s);
  };
  json all = json::array();
  for (size_t i = 0; i < plan.options.size(); ++i) {
    const PlanOption& option = plan.options[i];
    const StepTimes& times = option.times;
    all.push_back(
        {{"label", fmt::format("{}: {}", method_words(option.options.method), option.label)},
         {"best", i == plan.recommended},
         {"forward_percent", percent(times.forward_s)},
         {"backward_percent", percent(times.backward_s)},
         {"update_percent", percent(times.update_s)},
         {"step", format_seconds(times.total_s)},
         {"tokens_per_s", fmt::format("{:.0f}", option.tokens_per_s)},
         {"bound_by", times.bound_by},
         {"exact", option.exact ? "yes" : "no"},
         {"few", wears_soon(option)},
         {"drives_last", drive_life_text(option.drive_life_days)},
         {"cost", option.cost_per_mtoken > 0 ? fmt::format("{:.2f}", option.cost_per_mtoken) : "-"},
         {"unfit", option.fits ? "" : "does not fit"}});
  }
  return all;
}

json memory_values(const Plan& plan) {
  json rows = json::array();
  const auto add = [&](const std::string& name, uint64_t on_gpu, uint64_t on_host,
                       uint64_t on_drive, const std::string& text, bool lacks, bool best) {
    rows.push_back({{"name", name},
                    {"on_gpu", format_bytes(on_gpu)},
                    {"on_host", format_bytes(on_host)},
                    {"on_drive", format_bytes(on_drive)},
                    {"text", text},
                    {"lacks", lacks},
                    {"best", best}});
  };
  for (const UseNeed& one : plan.uses) {
    const bool lacks = !one.shortfall.empty();
    add(use_name(one.use), one.need.gpu_bytes, one.need.host_bytes, one.need.drive_bytes,
        fit_text(one), lacks, one.use == plan.use);
  }
  add("there is", plan.machine.gpu.memory_bytes,
      host_limit_bytes(plan.machine, plan.best().options),
      plan.machine.devices.front().capacity_bytes, "", false, false);
  return rows;
}

json part_values(const MemoryNeed& need) {
  json all = json::array();
  const auto add = [&](const char* where, const std::vector<plan::MemoryPart>& parts) {
    std::vector<std::string> texts;
    for (const plan::MemoryPart& part : parts) {
      if (part.bytes > 0) {
        texts.push_back(fmt::format("{} {}", part.name, format_bytes(part.bytes)));
      }
    }
    if (texts.empty()) return;
    all.push_back({{"where", where}, {"text", fmt::format("{}", fmt::join(texts, ", "))}});
  };
  add("GPU", need.gpu_parts);
  add("host", need.host_parts);
  return all;
}

json overlap_values(const Plan& plan) {
  json all = json::array();
  for (const auto& [overlap, step_s] : plan.overlaps) {
    const char* meaning = "one after another";
    if (overlap == plan::Overlap::kLate) meaning = "the next forward";
    if (overlap == plan::Overlap::kEarly) meaning = "backward, too, while no gradient is clipped";
    all.push_back({{"name", base::enum_name(overlap)},
                   {"step", format_seconds(step_s)},
                   {"meaning", meaning},
                   {"best", overlap == plan.best().options.overlap}});
  }
  return all;
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

/// Step time of the recommended option against the number of devices of the first kind, in the
/// picture's coordinates.
void add_device_curve(const Plan& plan, json& values) {
  const uint32_t now = plan.machine.device_count();
  const uint32_t most = std::max(8u, 2 * now);
  std::vector<std::pair<uint32_t, double>> curve;
  Machine machine = plan.machine;
  machine.devices.resize(1);
  double top = 0;
  for (uint32_t n = 1; n <= most; n += most > 32 ? most / 16 : 1) {
    machine.devices.front().count = n;
    const auto times = simulate_step(plan.model, machine, plan.best().options);
    if (!times.ok()) continue;
    curve.emplace_back(n, times->total_s);
    top = std::max(top, times->total_s);
  }
  constexpr double kLeft = 96;
  constexpr double kWide = 610;
  constexpr double kHigh = 220;
  const double rule_s = round_step(top / 4);
  const int rules = static_cast<int>(std::ceil(top / rule_s));
  top = rule_s * rules;
  const auto text_of = [](double coordinate) { return fmt::format("{:.1f}", coordinate); };
  const auto x_of = [&](double n) { return kLeft + kWide * (n - 1) / std::max(1.0, most - 1.0); };
  const auto y_of = [&](double s) { return 20 + kHigh * (1 - s / top); };
  values["rules"] = values["points"] = json::array();
  for (int i = 0; i <= rules; ++i) {
    const double s = rule_s * i;
    values["rules"].push_back({{"left", text_of(kLeft)},
                               {"right", text_of(kLeft + kWide)},
                               {"y", text_of(y_of(s))},
                               {"text_x", text_of(kLeft - 6)},
                               {"text_y", text_of(y_of(s) + 4)},
                               {"text", i == 0 ? "0" : format_seconds(s)}});
  }
  std::string line;
  for (const auto& [n, s] : curve) {
    line += fmt::format("{:.1f},{:.1f} ", x_of(n), y_of(s));
    values["points"].push_back({{"devices", n},
                                {"x", text_of(x_of(n))},
                                {"y", text_of(y_of(s))},
                                {"mark", n == now ? "now" : "dot"},
                                {"radius", n == now ? 6 : 3}});
  }
  values["line"] = line;
}

std::string hardware_of(const Machine& machine) {
  std::string gpus = "no GPU";
  if (machine.gpu.name != "none") {
    gpus = machine.gpu.count > 1 ? fmt::format("{} x {}", machine.gpu.count, machine.gpu.name)
                                 : machine.gpu.name;
  }
  return fmt::format("{}, {} x {}", gpus, machine.device_count(), machine.devices.front().name);
}

}  // namespace

std::string plan_html(const Plan& plan) {
  const PlanOption& best = plan.best();
  const PlanResult result = plan_result(plan);
  const uint32_t micro_batches = best.options.accumulation;
  json values{
      {"model", plan.model.name},
      {"machine", plan.machine.name},
      {"headline", result.headline},
      {"bad", !plan.fits || wears_soon(best)},
      {"parameters", parameters_text(plan.model)},
      {"micro_batches",
       micro_batches == 1 ? "one micro batch" : fmt::format("{} micro batches", micro_batches)},
      {"batch", plan.model.batch},
      {"batches", plan.model.batch != 1},
      {"sequence", plan.model.sequence},
      {"hardware", hardware_of(plan.machine)},
      {"fits", plan.fits},
      {"gpu", plan.machine.gpu.name != "none"},
      {"use", use_name(plan.use)},
      {"label", best.label},
      {"step", format_seconds(best.times.total_s)},
      {"tokens_per_s", fmt::format("{:.0f}", best.tokens_per_s)},
      {"bound_by", best.times.bound_by},
      {"memory", memory_values(plan)},
      {"parts", part_values(best.need)},
      {"options", option_values(plan)},
      {"overlapped", plan.overlaps.size() > 1},
      {"overlaps", overlap_values(plan)},
      {"life_years", fmt::format("{:g}", plan.machine.price.life_years)},
      {"per_kwh", fmt::format("{:g}", plan.machine.price.per_kwh)}};
  values["remarks"] = values["methods"] = values["purchases"] = json::array();
  for (const std::string& remark : result.remarks) values["remarks"].push_back({{"text", remark}});
  for (const Method method :
       {Method::kBaseline, Method::kSmart, Method::kSmartOver, Method::kSmartComp}) {
    values["methods"].push_back(
        {{"name", method_name(method)}, {"meaning", method_meaning(method)}});
  }
  for (const Purchase& purchase : plan.purchases) {
    const bool faster = purchase.step_s > 0;
    values["purchases"].push_back(
        {{"what", purchase.what},
         {"step", faster ? format_seconds(purchase.step_s) : "-"},
         {"saved", faster ? fmt::format("{:.1f} %", 100 * purchase.saved) : "to fit at all"}});
  }
  add_device_curve(plan, values);
  return fill_template(plan_page(), values);
}

}  // namespace smartinf::sim
