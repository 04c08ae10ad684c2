#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/sim/planner.h"

namespace smartinf::sim {
namespace {

std::string soon(double days) {
  if (days < 2) return fmt::format("in {:.0f} hours", std::max(1.0, 24 * days));
  if (days < 6) return fmt::format("in {:.0f} days", days);
  if (days < 10.5) return "in a week";
  if (days > 100) return fmt::format("in {:.0f} months", days / 30.4);
  return fmt::format("in {:.0f} weeks", days / 7);
}

/// The gain of overlapping, in the words of whoever turns it on.
std::string overlap_remark(const Plan& plan) {
  const auto seconds = [&](plan::Overlap wanted) {
    for (const auto& [overlap, step_s] : plan.overlaps) {
      if (overlap == wanted) return step_s;
    }
    return 0.0;
  };
  const double none_s = seconds(plan::Overlap::kNone);
  const double late_s = seconds(plan::Overlap::kLate);
  const double early_s = seconds(plan::Overlap::kEarly);
  if (late_s == 0) return {};
  if (none_s == 0) return {};  // a streamed model knows no other way
  const bool python = plan.use.program == plan::TrainingProgram::kPython;
  const auto setting = [&](std::string_view name) {
    return python ? fmt::format("overlap=\"{}\", model=model", name)
                  : fmt::format("optimizer.overlap = \"{}\"", name);
  };
  std::string text = fmt::format(
      "A step takes {} with {}: the update runs beside the next forward. "
      "With \"none\" it takes {}.",
      base::format_seconds(late_s), setting("late"), base::format_seconds(none_s));
  if (early_s > 0 && early_s < 0.99 * late_s) {
    text += fmt::format(
        " With \"early\" it takes {} if its gradient is not clipped, and longer than with \"late\" "
        "if it is. \"auto\"{} takes for each step the one of the two that the steps before speak "
        "for.",
        base::format_seconds(early_s), python ? "" : ", the default,");
  }
  return text;
}

/// The other parts of a step that do not stay in memory.
std::string streaming_remark(const Plan& plan) {
  const MemoryNeed& need = plan.best().need;
  if (!need.plan.streams) return {};
  std::string text =
      "The model is computed in units (groups of layers), and each unit does all micro batches of "
      "a step before the next one begins. Backward computes activations again from the inputs of "
      "the units.";
  if (plan.use.streamed) {
    text = fmt::format(
        "smartinf.from_pretrained(..., memory_budget=\"{}MB\") reads such a model. With several "
        "micro batches in a step a trainer that is also a smartinf.hf.StreamedTrainer lets each "
        "layer do all of them before the next layer begins; the figures are for it, and for "
        "gradient checkpointing.",
        base::divide_up(need.memory_budget, 1'000'000));
  }
  std::string less;
  const auto count = [&](const char* what, uint64_t part, uint64_t all) {
    if (part >= all) return;
    less += fmt::format("{}{} of {} {}", less.empty() ? " In memory stay " : " and ",
                        base::format_bytes(part), base::format_bytes(all), what);
  };
  const uint64_t gradients =
      uint64_t{plan.machine.software.gradient_bytes} * plan.model.parameters();
  const uint64_t inputs = need.plan.inputs_in_memory + need.plan.inputs_spooled;
  count("of gradients", need.plan.gradient_memory_bytes, gradients);
  count("of those inputs", need.plan.inputs_in_memory * need.plan.input_bytes,
        inputs * need.plan.input_bytes);
  return text + less + (less.empty() ? "" : "; the rest is on the devices meanwhile.");
}

}  // namespace

std::string streamed_text(const MemoryNeed& need) {
  if (!need.plan.streams) return {};
  const size_t from_devices = need.units_from_devices();
  const size_t from_host = need.units_from_host();
  if (from_devices == 0 && from_host == 0) {
    return fmt::format("all {} units {}, one after another", need.units.size(),
                       need.gpu_bytes > 0 ? "on the GPU" : "in memory");
  }
  if (from_devices == 0) {
    return fmt::format("{} of {} units from the host's memory", from_host, need.units.size());
  }
  return fmt::format("{} of {} units from the devices{}", from_devices, need.units.size(),
                     from_host == 0 ? "" : fmt::format(", {} from the host's memory", from_host));
}

std::string fit_text(const UseNeed& one) {
  if (!one.shortfall.empty()) return one.shortfall;
  const std::string streamed = streamed_text(one.need);
  return streamed.empty() ? "fits" : "fits: " + streamed;
}

std::string_view method_words(Method method) {
  switch (method) {
    case Method::kBaseline:
      return "the host updates";
    case Method::kSmart:
      return "devices update, part by part";
    case Method::kSmartOver:
      return "devices update, overlapped";
    case Method::kSmartComp:
      return "compressed gradients";
  }
  return "";
}

std::string parameters_text(const ModelShape& model) {
  const auto words = [](double count) {
    return count < 1e8 ? fmt::format("{:.2f} million", count / 1e6)
                       : fmt::format("{:.2f} billion", count / 1e9);
  };
  const auto all = static_cast<double>(model.parameters());
  std::string text = words(all) + " parameters";
  if (!model.counts) return text;
  double idle = 0;
  for (const model::LayerCount& layer : model.counts->layers)
    idle += static_cast<double>(layer.idle);
  if (idle > 0) text += fmt::format(", {} of them for each token", words(all - idle));
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

std::string PlanResult::text() const {
  return remarks.empty() ? headline : fmt::format("{} {}", headline, fmt::join(remarks, " "));
}

PlanResult plan_result(const Plan& plan) {
  const PlanOption& best = plan.best();
  PlanResult result;
  if (!plan.fits) {
    result.headline =
        fmt::format("It does not fit, with {}: {}.", use_name(plan.use), best.shortfall);
    result.remarks.push_back(
        plan.fitting.empty()
            ? "No setting makes it fit."
            : fmt::format("It would fit with {}.", fmt::join(plan.fitting, "; or with ")));
    return result;
  }
  const std::string streamed = streamed_text(best.need);
  result.headline = fmt::format("It fits, with {}{}{}.", use_name(plan.use),
                                streamed.empty() ? "" : ": ", streamed);
  if (std::string remark = streaming_remark(plan); !remark.empty()) {
    result.remarks.push_back(std::move(remark));
  }
  std::string others;
  for (const UseNeed& other : plan.uses) {
    if (other.shortfall.empty()) break;
    others += fmt::format("{}with {}: {}", others.empty() ? "" : "; ", use_name(other.use),
                          other.shortfall);
  }
  if (!others.empty()) result.remarks.push_back(fmt::format("It does not fit {}.", others));
  if (best.drive_life_days > 0 && best.drive_life_days < kYearDays) {
    std::string less;
    for (const WearLess& one : plan.wear_less) {
      less += fmt::format("{}{} in {}", less.empty() ? "" : ", ", one.how,
                          drive_life_text(one.drive_life_days));
    }
    result.remarks.push_back(fmt::format(
        "Training without a pause wears {} out {}{}.",
        plan.machine.device_count() == 1 ? "the drive" : "the drives", soon(best.drive_life_days),
        less.empty() ? "" : "; with less written for each token they last longer: " + less));
  }
  if (std::string overlap = overlap_remark(plan); !overlap.empty()) {
    result.remarks.push_back(std::move(overlap));
  }
  return result;
}

}  // namespace smartinf::sim
