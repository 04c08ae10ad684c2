#include "smartinf/sim/step.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "smartinf/sim/one_rank.h"
#include "smartinf/sim/step_graph.h"

namespace smartinf::sim {

using base::ErrorCode;
using base::Result;
using base::Status;

uint64_t spilled_gradient_bytes(const Machine& machine, const StepOptions& options,
                                uint64_t parameters) {
  if (host_selects(machine, options)) return 0;
  const uint64_t all = machine.software.gradient_bytes * parameters;
  if (machine.software.gradient_spilled) return all;
  return all - std::min(all, options.gradient_memory_bytes);
}

uint64_t step_tokens(const ModelShape& model, const Machine& machine, const StepOptions& options) {
  // Without ranks each GPU has micro batches of its own; ranks share those of the step.
  const uint64_t gpus = options.ranks == 1 ? machine.gpu.count : 1;
  return model.tokens() * options.accumulation * gpus;
}

Status check_overlap(const Machine& machine, const StepOptions& options) {
  if (options.overlap != plan::Overlap::kEarly) return {};
  if (options.method == Method::kSmartComp) {
    return Status(ErrorCode::kUnsupported,
                  "an early update needs whole gradients, and these are compressed",
                  "Take overlap late.");
  }
  const uint32_t slots = options.slots != 0 ? options.slots : machine.software.slots;
  const bool spilled =
      machine.software.gradient_spilled || options.gradient_memory_bytes != ~uint64_t{0};
  if (plan::slots_as_completed(slots, spilled) == 0) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("beside gradients that are spilled {} slots are too few for an early "
                              "update",
                              slots),
                  "Give at least eight (--slots), or take overlap late.");
  }
  return {};
}

Result<StepTimes> simulate_step(const ModelShape& model, const Machine& machine,
                                const StepOptions& options) {
  SI_RETURN_IF_ERROR(check_model(model));
  SI_RETURN_IF_ERROR(check_machine(machine));
  const auto invalid = [](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  if (!(options.ratio > 0 && options.ratio <= 1)) {
    return invalid(fmt::format("the compression ratio is {}", options.ratio),
                   "The ratio is compressed bytes divided by f32 bytes: above 0, at most 1.");
  }
  const uint64_t wanted = options.subgroup_elements != 0 ? options.subgroup_elements
                                                         : machine.software.subgroup_elements;
  if (model.parameters() / wanted > 1'000'000) {
    return invalid(
        fmt::format("subgroups of {} elements cut the model into more than a million", wanted),
        "Give larger subgroups.");
  }
  if (options.accumulation == 0 || options.accumulation > 1'000'000) {
    return invalid(fmt::format("{} micro batches in a step", options.accumulation),
                   "Give a number from 1 to a million.");
  }
  if (options.slots > 1024 || machine.software.slots > 1024) {
    return invalid("more than 1024 slots", "Give fewer.");
  }
  if (const StreamedStep* streamed = options.streamed()) {
    if (options.method == Method::kBaseline || options.method == Method::kSmartComp) {
      return Status(ErrorCode::kUnsupported,
                    "weights come from devices that update with whole gradients",
                    "Take method su or su+o.");
    }
    if (streamed->units.empty() || streamed->units.back().end() != model.parameters()) {
      return invalid("the units that are streamed are not the model's", "Take model.units().");
    }
  }
  if (options.method != Method::kBaseline) {
    for (const DeviceGroup& device : machine.devices) {
      const bool comp = options.method == Method::kSmartComp;
      if (device.kernel.clock_hz > 0 &&
          (options.format != base::StateFormat::kF32 || !pipeline_has(options.rule))) {
        return Status(ErrorCode::kUnsupported,
                      fmt::format("device '{}' has no kernel for {} with {} state", device.name,
                                  kernels::update_rule_name(options.rule),
                                  base::state_format_name(options.format)),
                      "Take f32 state and another rule than lion, or a machine file that gives "
                      "device.update_bytes_per_s.");
      }
      if (!(comp ? device.decompresses() : device.updates())) {
        return Status(ErrorCode::kUnsupported,
                      fmt::format("device '{}' has no processor to {}", device.name,
                                  comp ? "decompress and update with" : "update with"),
                      fmt::format("Set device.{}_bytes_per_s in the machine file, or use --method "
                                  "baseline.",
                                  comp ? "decompress" : "update"));
      }
    }
  }
  SI_RETURN_IF_ERROR(check_ranks(machine, options));
  SI_RETURN_IF_ERROR(check_overlap(machine, options));
  const OneRank one = one_rank(machine, options);
  const auto graph = [&](const StepOptions& asked) {
    return StepGraph(model, one.machine, asked, one.exchange);
  };
  if (options.overlap == plan::Overlap::kNone) return graph(one.options).run_apart();
  StepOptions alone = one.options;
  alone.overlap = plan::Overlap::kNone;
  const double forward_s = graph(alone).forward_alone_s(options.overlap);
  // A commit may end beside the next step. In the steady state all commits end at the same time of
  // the step that follows, which is found by simulating the step again; mostly twice.
  constexpr int kRoundsMax = 8;
  StepTimes times;
  double committed_s = 0;
  for (int round = 0; round < kRoundsMax; ++round) {
    DeviceSubgroups begun;
    if (options.overlap == plan::Overlap::kEarly) {
      begun = graph(one.options).begun_in_backward(committed_s);
    }
    StepGraph step = graph(one.options);
    times = step.run_overlapped(begun, forward_s, committed_s);
    const double before_s = std::exchange(committed_s, step.commit_after_step_s());
    if (std::abs(committed_s - before_s) < 1e-3 * times.total_s) break;
  }
  return times;
}

std::pair<double, double> computing_s(const ModelShape& model, const Machine& machine,
                                      const StepOptions& options) {
  return StepGraph(model, machine, options, Exchange{}).forward_and_backward_s();
}

Result<StageTimes> stage_times(const ModelShape& model, const Machine& machine,
                               StepOptions options) {
  options.overlap = plan::Overlap::kNone;
  options.weights = ResidentStep{};
  SI_ASSIGN_OR_RETURN(const StepTimes step, simulate_step(model, machine, options));
  const OneRank one = one_rank(machine, options);
  const StepGraph graph(model, one.machine, one.options, one.exchange);
  StageTimes times;
  std::tie(times.forward_s, times.backward_s) = graph.forward_and_backward_s();
  const auto batches = static_cast<double>(one.options.accumulation);
  times.exchange_s = std::max(0.0, step.backward_s - batches * times.backward_s);
  times.update_s = step.update_s + std::max(0.0, step.forward_s - batches * times.forward_s);
  times.sync_s = graph.sync_s();
  StepGraph reading(model, one.machine, one.options, one.exchange);
  times.read_s = reading.read_alone_s();
  times.fetch_s = reading.fetch_alone_s();
  times.bytes = step.bytes;
  for (const Utilization& used : step.update) {
    if (used.resource == "cores") times.update_cores = used.share;
  }
  times.bound_by = step.update.empty() ? "nothing" : step.update.front().resource;
  return times;
}

}  // namespace smartinf::sim
