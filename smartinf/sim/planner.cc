#include "smartinf/sim/planner.h"

#include <algorithm>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/sim/one_rank.h"

namespace smartinf::sim {
namespace {

using base::Result;
using base::Status;
using plan::Overlap;
using plan::TrainingProgram;

constexpr double kSecondsPerDay = 86400;

void add_cost(PlanOption& option, const Machine& machine) {
  option.drive_life_days =
      drive_life_days(machine,
                      static_cast<double>(option.times.bytes.drive_written) /
                          static_cast<double>(devices_of_one(machine, option.options)),
                      option.times.total_s);
  option.cost_per_mtoken = option.options.machines *
                           cost_per_second(machine, option.drive_life_days) / option.tokens_per_s *
                           1e6;
}

std::string label_of(const StepOptions& options) {
  std::string label(method_name(options.method));
  if (options.method == Method::kSmartComp) label += fmt::format(" {:.0f} %", 100 * options.ratio);
  label += fmt::format(", {} state", base::state_format_name(options.format));
  return label;
}

bool can_decompress(const Machine& machine) {
  return std::all_of(machine.devices.begin(), machine.devices.end(),
                     [](const DeviceGroup& device) { return device.decompresses(); });
}

/// Makes the plan for one model, machine and request, part by part.
class Planner {
 public:
  Planner(const ModelShape& model, const Machine& machine, const PlanRequest& request)
      : request_(request) {
    plan_.model = model;
    plan_.machine = machine;
  }

  Result<Plan> make() {
    choose_use();
    SI_RETURN_IF_ERROR(try_options());
    recommend();
    for (UseNeed& one : plan_.uses) one = need_of(one.use, asked_of(plan_.best().options));
    plan_.fits = plan_.best().fits;
    if (!plan_.fits) {
      find_fitting();
      buy_what_lacks();
      return std::move(plan_);
    }
    SI_RETURN_IF_ERROR(compare_overlaps());
    SI_RETURN_IF_ERROR(wear_less());
    SI_RETURN_IF_ERROR(buy_speed());
    return std::move(plan_);
  }

 private:
  UseNeed need_of(const TrainingUse& use, const StepOptions& options) const {
    UseNeed one;
    one.use = use;
    one.need = memory_need(plan_.model, plan_.machine, options, use);
    one.shortfall = shortfall_of(one.need, plan_.machine, options, use);
    return one;
  }

  bool considers(TrainingProgram program) const {
    return request_.program.value_or(program) == program;
  }

  void choose_use() {
    TrainingUse use;
    use.recompute = request_.options.recompute;
    const bool ranks = request_.options.ranks > 1;  // Python's are a run for each: gpu.count
    if (considers(TrainingProgram::kTrain) && check_train_can(plan_.model).ok()) {
      plan_.uses.push_back(need_of(use, request_.options));
    }
    if (!ranks && considers(TrainingProgram::kPython)) {
      use.program = TrainingProgram::kPython;
      for (const bool release : {false, true}) {
        use.release_gradients = release;
        plan_.uses.push_back(need_of(use, request_.options));
        if (!plan_.uses.back().shortfall.empty()) consider_budget(use);
      }
      use.release_gradients = false;
      use.streamed = use.recompute = true;
      plan_.uses.push_back(need_of(use, request_.options));
    }
    const auto fitting = std::find_if(plan_.uses.begin(), plan_.uses.end(),
                                      [](const UseNeed& one) { return one.shortfall.empty(); });
    plan_.use = (fitting != plan_.uses.end() ? *fitting : plan_.uses.front()).use;
  }

  /// The same with gradients on the drives, as many as do not fit in memory, where that is enough.
  void consider_budget(TrainingUse use) {
    constexpr uint64_t kStep = 100'000'000;
    const MemoryNeed& need = plan_.uses.back().need;
    const uint64_t limit = host_limit_bytes(plan_.machine, request_.options);
    const uint64_t gradients = need.plan.gradient_memory_bytes;
    if (limit == 0 || need.host_bytes <= limit || gradients <= kStep) return;
    use.gradient_budget = kStep;  // with the slots that spilling takes
    const uint64_t least = need_of(use, request_.options).need.host_bytes;
    if (least > limit) return;
    use.gradient_budget += (limit - least) / kStep * kStep;
    UseNeed with = need_of(use, request_.options);
    if (with.shortfall.empty()) plan_.uses.push_back(std::move(with));
  }

  /// Whether the program can run the overlap beside the update with these options.
  bool can_overlap(Overlap overlap, StepOptions options) const {
    const bool python = plan_.use.program == TrainingProgram::kPython;
    if (plan_.use.streamed) return overlap == Overlap::kLate;  // as it always works
    if (overlap == Overlap::kNone) return true;
    if (python && plan_.machine.gpu.count > 1) return false;  // in one process only
    if (python && overlap == Overlap::kEarly && !plan_.use.release_gradients) return false;
    options.overlap = overlap;
    return check_overlap(plan_.machine, options).ok() && check_ranks(plan_.machine, options).ok();
  }

  /// Without what another program's plan has put there.
  static StepOptions asked_of(StepOptions options) {
    options.gradient_memory_bytes = ~uint64_t{0};
    if (options.streamed() != nullptr) options.weights = PaperStep{};
    return options;
  }

  /// As the program works.
  StepOptions options_for(StepOptions options, const MemoryNeed& need) const {
    const TrainingUse& use = plan_.use;
    const bool python = use.program == TrainingProgram::kPython;
    options = with_plan(options, need);
    if (auto* resident = std::get_if<ResidentStep>(&options.weights);
        resident && python && !use.streamed) {
      resident->gradients =
          use.release_gradients ? GradientsLeave::kEveryPass : GradientsLeave::kTogether;
    }
    options.overlap = request_.overlap.value_or(python ? Overlap::kNone : Overlap::kLate);
    if (!can_overlap(options.overlap, options)) options.overlap = Overlap::kLate;
    if (!can_overlap(options.overlap, options)) options.overlap = Overlap::kNone;
    return options;
  }

  Status try_option(Method method, base::StateFormat format) {
    PlanOption option;
    StepOptions options = request_.options;
    options.method = method;
    options.format = format;
    UseNeed one = need_of(plan_.use, options);
    option.options = options_for(options, one.need);
    option.label = label_of(options);
    SI_ASSIGN_OR_RETURN(option.times, simulate_step(plan_.model, plan_.machine, option.options));
    option.need = std::move(one.need);
    option.shortfall = std::move(one.shortfall);
    option.fits = option.shortfall.empty();
    option.exact = format == base::StateFormat::kF32 && method != Method::kSmartComp;
    option.tokens_per_s = static_cast<double>(step_tokens(plan_.model, plan_.machine, options)) /
                          option.times.total_s;
    add_cost(option, plan_.machine);
    plan_.options.push_back(std::move(option));
    return {};
  }

  bool can_compress() const { return can_decompress(plan_.machine) && request_.options.ranks == 1; }

  bool is_requested(const PlanOption& option) const {
    return option.options.method == request_.options.method &&
           option.options.format == request_.options.format;
  }

  Status try_options() {
    using base::StateFormat;
    SI_RETURN_IF_ERROR(try_option(Method::kBaseline, StateFormat::kF32));
    if (plan_.machine.can_update()) {
      SI_RETURN_IF_ERROR(try_option(Method::kSmart, StateFormat::kF32));
      const StateFormat smaller{base::MomentFormat::kQ8, base::MasterFormat::kM24};
      const StateFormat smallest{base::MomentFormat::kQ4, base::MasterFormat::kM24};
      for (const StateFormat format :
           {StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8, smaller, smallest}) {
        SI_RETURN_IF_ERROR(try_option(Method::kSmartOver, format));
      }
    }
    if (can_compress()) {
      SI_RETURN_IF_ERROR(try_option(Method::kSmartComp, StateFormat::kF32));
    }
    if (request_.requested &&
        std::none_of(plan_.options.begin(), plan_.options.end(),
                     [&](const PlanOption& option) { return is_requested(option); })) {
      SI_RETURN_IF_ERROR(try_option(request_.options.method, request_.options.format));
    }
    std::stable_sort(plan_.options.begin(), plan_.options.end(),
                     [](const PlanOption& a, const PlanOption& b) {
                       if (a.fits != b.fits) return a.fits;
                       return a.times.total_s < b.times.total_s;
                     });
    return {};
  }

  /// Unless asked for, what changes no bits; the faster inexact ones stand beside it in the list.
  void recommend() {
    plan_.overlap_asked = request_.overlap.has_value();
    for (size_t i = 0; i < plan_.options.size(); ++i) {
      const PlanOption& option = plan_.options[i];
      if (request_.requested ? is_requested(option) : option.exact) {
        plan_.recommended = i;
        return;
      }
    }
  }

  Status compare_overlaps() {
    for (const Overlap overlap : {Overlap::kNone, Overlap::kLate, Overlap::kEarly}) {
      StepOptions options = plan_.best().options;
      if (!can_overlap(overlap, options)) continue;
      options.overlap = overlap;
      SI_ASSIGN_OR_RETURN(const StepTimes times,
                          simulate_step(plan_.model, plan_.machine, options));
      plan_.overlaps.emplace_back(overlap, times.total_s);
    }
    return {};
  }

  /// Finds what makes drives last longer: a smaller state format, and the least accumulation for a
  /// year.
  Status wear_less() {
    const PlanOption& best = plan_.best();
    if (best.drive_life_days <= 0 || best.drive_life_days >= kYearDays) return {};
    for (const PlanOption& other : plan_.options) {
      if (other.options.method != best.options.method || !other.fits) continue;
      if (other.drive_life_days <= best.drive_life_days) continue;
      plan_.wear_less.push_back(
          {fmt::format("state format {}", base::state_format_name(other.options.format)),
           other.drive_life_days});
    }
    constexpr uint32_t kMost = 4096;
    PlanOption more = best;
    for (PlanOption next = best;
         more.drive_life_days < kYearDays && more.options.accumulation < kMost; more = next) {
      next.options.accumulation *= 2;
      const UseNeed one = need_of(plan_.use, asked_of(next.options));
      if (!one.shortfall.empty()) break;
      next.options = options_for(next.options, one.need);
      SI_ASSIGN_OR_RETURN(next.times, simulate_step(plan_.model, plan_.machine, next.options));
      next.tokens_per_s =
          static_cast<double>(step_tokens(plan_.model, plan_.machine, next.options)) /
          next.times.total_s;
      add_cost(next, plan_.machine);
    }
    if (more.drive_life_days <= best.drive_life_days) return {};
    plan_.wear_less.push_back(
        {fmt::format("accumulation {}", more.options.accumulation), more.drive_life_days});
    return {};
  }

  /// accumulation 0: the one asked for.
  bool fits(const ModelShape& model, const TrainingUse& use, uint32_t accumulation = 0) const {
    StepOptions options = asked_of(plan_.best().options);
    if (accumulation > 0) options.accumulation = accumulation;
    const MemoryNeed need = memory_need(model, plan_.machine, options, use);
    return shortfall_of(need, plan_.machine, options, use).empty();
  }

  /// The largest micro batch that fits; 0: none does.
  uint64_t fitting_batch(const TrainingUse& use) const {
    ModelShape smaller = plan_.model;
    for (uint64_t batch = plan_.model.batch; batch >= 1; batch /= 2) {
      smaller.batch = batch;
      if (fits(smaller, use)) return batch;
    }
    return 0;
  }

  /// Settings, then smaller models, that would make it fit, each alone where one is enough.
  void find_fitting() {
    std::vector<TrainingUse> uses{plan_.use};
    for (const UseNeed& other : plan_.uses) {
      if (other.use != plan_.use) uses.push_back(other.use);
    }
    for (TrainingUse use : uses) {
      for (const bool recompute : {plan_.use.recompute, true}) {
        use.recompute = recompute;
        const uint64_t batch = fitting_batch(use);
        if (batch == 0) continue;
        std::string settings = use_name(use);
        if (recompute != plan_.use.recompute) settings += ", activations computed twice";
        if (batch != plan_.model.batch) settings += fmt::format(", a micro batch of {}", batch);
        plan_.fitting.push_back(std::move(settings));
        break;
      }
      // The inputs of all of a step's micro batches are in memory together.
      uint32_t accumulation = use.streamed ? request_.options.accumulation / 2 : 0;
      while (accumulation > 0 && !fits(plan_.model, use, accumulation)) accumulation /= 2;
      if (accumulation > 0 && plan_.fitting.empty()) {
        plan_.fitting.push_back(
            fmt::format("{} and {} micro batches in a step", use_name(use), accumulation));
      }
    }
    if (plan_.fitting.empty()) find_smaller(uses);
  }

  /// The most layers that one of the programs holds.
  void find_smaller(const std::vector<TrainingUse>& uses) {
    ModelShape one = plan_.model;
    one.batch = 1;
    uint64_t most = 0;
    const TrainingUse* of_most = nullptr;
    for (const TrainingUse& use : uses) {
      uint64_t fits_not = one.layers;
      while (fits_not - most > 1) {
        const uint64_t layers = most + (fits_not - most) / 2;
        if (fits(one.with_layers(layers), use)) {
          most = layers;
          of_most = &use;
        } else {
          fits_not = layers;
        }
      }
    }
    if (of_most == nullptr) return;
    plan_.fitting.push_back(fmt::format("{}, a micro batch of 1 and {} of the {} layers ({})",
                                        use_name(*of_most), most, one.layers,
                                        parameters_text(one.with_layers(most))));
  }

  void buy_what_lacks() {
    const Machine& machine = plan_.machine;
    const MemoryNeed& need = plan_.best().need;
    const auto more = [&](const std::string& what, uint64_t needed, uint64_t have) {
      if (have == 0 || needed <= have) return;
      plan_.purchases.push_back({fmt::format("{} of {} instead of {}", what,
                                             base::format_bytes(needed), base::format_bytes(have)),
                                 0, 0});
    };
    if (machine.gpu.name != "none") {
      more("a GPU with memory", need.gpu_bytes, machine.gpu.memory_bytes);
    }
    const StepOptions& options = plan_.best().options;
    const uint64_t ranks = options.ranks / options.machines;  // of each machine
    more("host memory", need.host_bytes * ranks, machine.host.memory_bytes);
    for (const DeviceGroup& device : machine.devices) {
      more("drives with space", need.drive_bytes, device.capacity_bytes);
    }
  }

  Status consider(std::string what, const Machine& changed, const StepOptions& options) {
    SI_ASSIGN_OR_RETURN(const StepTimes times, simulate_step(plan_.model, changed, options));
    plan_.purchases.push_back(
        {std::move(what), times.total_s, 1 - times.total_s / plan_.best().times.total_s});
    return {};
  }

  Status buy_speed() {
    const Machine& machine = plan_.machine;
    const StepOptions& options = plan_.best().options;
    const std::string& drive = machine.devices.front().name;
    Machine changed = machine;
    changed.devices.front().count += 1;
    SI_RETURN_IF_ERROR(consider(fmt::format("one more {}", drive), changed, options));
    changed = machine;
    changed.devices.front().count *= 2;
    SI_RETURN_IF_ERROR(consider(fmt::format("twice as many {}", drive), changed, options));
    changed = machine;
    changed.host.link_bytes_per_s *= 2;
    SI_RETURN_IF_ERROR(consider("a host link twice as fast", changed, options));
    if (machine.has_remote() || options.machines > 1) {
      changed = machine;
      changed.network.bytes_per_s *= 2;
      for (DeviceGroup& device : changed.devices) device.link_bytes_per_s *= device.remote ? 2 : 1;
      SI_RETURN_IF_ERROR(consider("a network twice as fast", changed, options));
    }
    changed = machine;
    changed.gpu.peak_flops *= 2;
    changed.gpu.memory_bytes_per_s *= 2;
    const bool gpu = machine.gpu.name != "none";
    SI_RETURN_IF_ERROR(
        consider(gpu ? "a GPU twice as fast, same link" : "cores twice as fast", changed, options));
    changed = machine;
    changed.gpu.link_bytes_per_s *= 2;
    if (gpu) SI_RETURN_IF_ERROR(consider("a GPU link twice as fast", changed, options));
    if (can_compress()) {
      StepOptions compressed = options;
      compressed.method = Method::kSmartComp;
      const UseNeed one = need_of(plan_.use, compressed);
      if (one.shortfall.empty()) {
        SI_RETURN_IF_ERROR(consider("compressed gradients (nothing to buy, not exact)", machine,
                                    options_for(compressed, one.need)));
      }
    }
    std::erase_if(plan_.purchases, [](const Purchase& purchase) { return purchase.saved < 0.001; });
    std::stable_sort(plan_.purchases.begin(), plan_.purchases.end(),
                     [](const Purchase& a, const Purchase& b) { return a.saved > b.saved; });
    return {};
  }

  const PlanRequest& request_;
  Plan plan_;
};

}  // namespace

double drive_life_days(const Machine& machine, double written_bytes, double step_s) {
  double amplification = 1;
  for (const DeviceGroup& device : machine.devices) {
    amplification = std::max(amplification, device.write_amplification);
  }
  double life_days = 0;
  for (const DeviceGroup& device : machine.devices) {
    if (device.endurance_bytes == 0) continue;
    const double per_day = amplification * written_bytes * kSecondsPerDay / step_s;
    const double days = static_cast<double>(device.endurance_bytes) / per_day;
    life_days = life_days == 0 ? days : std::min(life_days, days);
  }
  return life_days;
}

double cost_per_second(const Machine& machine, double drive_life_days) {
  const Price& price = machine.price;
  double drives = 0;
  for (const DeviceGroup& device : machine.devices) drives += device.count * device.price;
  const double machine_price = price.host + price.gpu * machine.gpu.count;
  const double life_s = price.life_years * 365 * kSecondsPerDay;
  // A drive that wears out sooner than the machine is bought again.
  const double drive_life_s =
      drive_life_days > 0 ? std::min(life_s, drive_life_days * kSecondsPerDay) : life_s;
  return machine_price / life_s + drives / drive_life_s +
         price.power_watts / 1000 * price.per_kwh / 3600;
}

Result<Plan> make_plan(const ModelShape& model, const Machine& machine,
                       const PlanRequest& request) {
  const StepOptions& options = request.options;
  if (options.ranks > 1 && request.program == TrainingProgram::kPython) {
    return Status(base::ErrorCode::kUnsupported, "ranks are those of `smartinf train`",
                  "Of the Python package each process has a run of its own: give --gpus.");
  }
  if (options.ranks > 1 || request.program == TrainingProgram::kTrain) {
    SI_RETURN_IF_ERROR(check_train_can(model));
  }
  StepOptions asked = options;
  if (!request.requested) asked.method = Method::kSmartOver;
  asked.overlap = request.overlap.value_or(Overlap::kNone);
  SI_RETURN_IF_ERROR(check_ranks(machine, asked));
  return Planner(model, machine, request).make();
}

}  // namespace smartinf::sim
