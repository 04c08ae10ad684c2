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
  return fmt::format("in {:.0f} weeks", days / 7);
}

/// What overlapping brings, in the words of whoever turns it on.
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
  const bool python = plan.use.program == plan::TrainingProgram::kPython;
  std::string text = fmt::format(
      "A step takes {} with the update beside the next forward ({}) and {} with nothing beside it.",
      base::format_seconds(late_s),
      python ? "overlap=\"late\", model=model" : "optimizer.overlap = \"late\"",
      base::format_seconds(none_s));
  if (early_s > 0 && early_s < 0.99 * late_s) {
    text += fmt::format(" While no gradient is clipped, \"early\" takes {}; \"auto\"{} chooses.",
                        base::format_seconds(early_s), python ? "" : ", the default,");
  }
  return text;
}

/// What else of a step does not stay in memory.
std::string streaming_remark(const Plan& plan) {
  const MemoryNeed& need = plan.best().need;
  if (!need.plan.streams) return {};
  const auto share = [](uint64_t part, uint64_t all) {
    return part >= all ? "all"
                       : fmt::format("{} of {}", base::format_bytes(part), base::format_bytes(all));
  };
  const uint64_t gradients =
      uint64_t{plan.machine.software.gradient_bytes} * plan.model.parameters();
  const uint64_t inputs = need.plan.inputs_in_memory + need.plan.inputs_spooled;
  const bool all_stay = need.units_from_devices() + need.units_from_host() == 0;
  return fmt::format(
      "{} computes activations again; in memory stay of gradients {} and of the units' inputs {}.",
      all_stay
          ? "Each unit (a group of layers) does all micro batches before the next one, so that "
            "the GPU has the gradients of one unit at a time. Backward"
          : "Weights of units (groups of layers) that do not stay are brought for forward and "
            "again for backward, which",
      share(need.plan.gradient_memory_bytes, gradients),
      share(need.plan.inputs_in_memory * need.plan.input_bytes, inputs * need.plan.input_bytes));
}

}  // namespace

std::string streamed_text(const MemoryNeed& need) {
  if (!need.plan.streams) return {};
  const size_t from_devices = need.units_from_devices();
  const size_t from_host = need.units_from_host();
  if (from_devices == 0 && from_host == 0) {
    return fmt::format("all {} units on the GPU, one after another", need.units.size());
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
  if (wears_soon(best)) {
    result.remarks.push_back(fmt::format(
        "Training without a pause wears {} out {}. More micro batches in a step (accumulation) "
        "wear less; a smaller state format writes less for each token.",
        plan.machine.device_count() == 1 ? "the drive" : "the drives", soon(best.drive_life_days)));
  }
  if (std::string overlap = overlap_remark(plan); !overlap.empty()) {
    result.remarks.push_back(std::move(overlap));
  }
  return result;
}

}  // namespace smartinf::sim
