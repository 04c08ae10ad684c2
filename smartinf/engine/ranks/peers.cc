#include "smartinf/engine/ranks/peers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/device_updater.h"
#include "smartinf/engine/ranks/messages.h"
#include "smartinf/storage/store.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;
using base::StepNumber;

namespace {

/// State that a rank's devices hold, all together.
struct Held {
  uint64_t all = 0;  // 1: each of them holds a state
  StepNumber committed_step = 0;
  StepNumber prepared_step = ~StepNumber{0};
};

Result<Held> held_here(DeviceSources& sources) {
  Held held{1};
  for (const auto& source : sources) {
    SI_ASSIGN_OR_RETURN(const std::optional<storage::StoreState> state, source->peek());
    if (!state || !state->initialized) {
      held.all = 0;
      continue;
    }
    held.committed_step = std::max(held.committed_step, state->committed_step);
    held.prepared_step = std::min(held.prepared_step, state->prepared_step);
  }
  return held;
}

std::string text_of(const std::vector<Held>& ranks) {
  std::string text;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    text += fmt::format(
        "{}rank {}: {}", rank == 0 ? "" : ", ", rank,
        ranks[rank].all == 0 ? "empty" : fmt::format("step {}", ranks[rank].committed_step));
  }
  return text;
}

/// The rule for the devices of one run, with each rank for a device.
Result<StepNumber> recovery_step(const std::vector<Held>& ranks) {
  std::vector<storage::StoreState> states(ranks.size());
  for (uint32_t rank = 0; rank < states.size(); ++rank) {
    states[rank].device_index = rank;
    states[rank].device_count = static_cast<uint32_t>(states.size());
    states[rank].initialized = states[rank].complete = true;
    states[rank].committed_step = ranks[rank].committed_step;
    states[rank].prepared_step = ranks[rank].prepared_step;
  }
  Result<StepNumber> step = storage::recovery_step(states);
  if (step.ok()) return step;
  return Status(ErrorCode::kMismatch,
                fmt::format("the ranks' devices hold different steps, and no crash explains that "
                            "({}): one of them was replaced by an older copy",
                            text_of(ranks)),
                "Load the last checkpoint.");
}

Status erase(DeviceSources& sources) {
  for (const auto& source : sources) {
    SI_ASSIGN_OR_RETURN(const std::optional<storage::StoreState> state, source->peek());
    if (state) SI_RETURN_IF_ERROR(source->erase());
  }
  return Status();
}

}  // namespace

Result<std::optional<StepNumber>> agree_on_step(Collectives& peers, DeviceSources& sources) {
  const Result<Held> held = held_here(sources);
  SI_RETURN_IF_ERROR(all_ok(peers, Channel::kControl, "look at the devices", held.status()));
  SI_ASSIGN_OR_RETURN(
      const std::vector<Held> ranks,
      all_gather_values(peers, Channel::kControl, std::span<const Held>(&*held, 1)));
  const auto holds = [](const Held& rank) { return rank.all != 0; };
  if (std::ranges::none_of(ranks, holds)) return std::optional<StepNumber>();
  if (std::ranges::all_of(ranks, holds)) {
    SI_ASSIGN_OR_RETURN(const StepNumber step, recovery_step(ranks));
    return std::optional(step);
  }
  if (std::ranges::any_of(ranks, [](const Held& rank) { return rank.committed_step > 0; })) {
    return Status(
        ErrorCode::kMismatch,
        fmt::format("some ranks' devices hold state and others' do not ({})", text_of(ranks)),
        "Give every rank the devices it had, or load the last checkpoint over empty ones "
        "(resume=False).");
  }
  SI_RETURN_IF_ERROR(all_ok(peers, Channel::kControl, "start over", erase(sources)));
  return std::optional<StepNumber>();
}

namespace {

/// The trainer keeps the same with a step on all ranks.
Status check_same_state(Collectives& peers, const Updater& updater) {
  struct State {
    uint64_t fresh, step, metadata;
    bool operator==(const State&) const = default;
  };
  const std::string metadata = updater.client_metadata();
  const State mine{updater.fresh() ? 1u : 0u, updater.committed_step(),
                   base::checksum(std::as_bytes(std::span(metadata)))};
  SI_ASSIGN_OR_RETURN(
      const std::vector<State> ranks,
      all_gather_values(peers, Channel::kControl, std::span<const State>(&mine, 1)));
  if (std::ranges::all_of(ranks, [&](const State& rank) { return rank == ranks[0]; })) {
    return Status();
  }
  std::string text;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    text += fmt::format("{}rank {}: {}", rank == 0 ? "" : ", ", rank,
                        ranks[rank].fresh != 0 ? "none"
                                               : fmt::format("step {} ({:016x})", ranks[rank].step,
                                                             ranks[rank].metadata));
  }
  return Status(ErrorCode::kMismatch, "the ranks' devices hold states of different runs: " + text,
                "Give every rank the devices it had, or load the last checkpoint.");
}

}  // namespace

Result<std::unique_ptr<Updater>> open_among_peers(const UpdaterOptions& options,
                                                  const plan::ParameterSpace& space,
                                                  DeviceSources sources) {
  Collectives& peers = *options.peers;
  UpdaterOptions here = options;
  SI_ASSIGN_OR_RETURN(here.recover_to, agree_on_step(peers, sources));
  Result<std::unique_ptr<DeviceUpdater>> made = [&]() -> decltype(made) {
    SI_ASSIGN_OR_RETURN(DeviceSet set, open_device_set(here, space, sources));
    return DeviceUpdater::make(here, space, std::move(set));
  }();
  SI_RETURN_IF_ERROR(all_ok(peers, Channel::kControl, "open", made.status()));
  SI_RETURN_IF_ERROR(check_same_state(peers, **made));
  return std::unique_ptr<Updater>(std::move(*made));
}

Result<GradientSummary> sum_gradients(Collectives& peers, const Result<GradientSummary>& mine) {
  const GradientSummary here = mine.ok() ? *mine : GradientSummary();
  SI_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                      all_gather(peers, Channel::kControl,
                                 pack(mine.status(), here.norm, here.finite, here.first_bad)));
  GradientSummary summary;
  double squares = 0;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    Status status;
    GradientSummary part;
    SI_RETURN_IF_ERROR(unpack(texts[rank], status, part.norm, part.finite, part.first_bad));
    if (!status.ok()) return std::move(status).with_context(fmt::format("rank {}", rank));
    squares += part.norm * part.norm;
    summary.finite = part.finite && summary.finite;
    if (summary.first_bad.empty()) summary.first_bad = part.first_bad;
  }
  summary.norm = summary.finite ? std::sqrt(squares) : std::numeric_limits<double>::infinity();
  return summary;
}

}  // namespace smartinf::engine
