#include "smartinf/engine/found_run.h"

#include <memory>
#include <utility>
#include <vector>

#include "smartinf/engine/step_metadata.h"
#include "smartinf/storage/state_reader.h"

namespace smartinf::engine {

std::optional<FoundRun> find_run(std::span<const std::string> devices) {
  std::optional<FoundRun> found;
  std::vector<storage::StoreState> states;
  for (const std::string& device : devices) {
    const auto state = storage::Store::peek(device);
    if (!state.ok() || !(state->initialized || state->torn)) continue;
    states.push_back(*state);
    if (!found) found = FoundRun{state->run, state->prepared_step, device, {}};
  }
  if (!found) return found;
  // Of some of a run's devices, or of a run that is going, what the first one promises counts.
  const auto step = storage::recovery_step(states);
  found->step = step.ok() ? *step : states.front().committed_step;
  auto reader = storage::StateReader::open(found->device, storage::ReaderLock::kLeave);
  if (reader.ok() && (*reader)->choose_step(found->step).ok()) {
    found->client_metadata = split_metadata((*reader)->client_metadata()).client_metadata;
  }
  return found;
}

std::optional<storage::RunId> run_made_for(std::span<const std::string> devices) {
  for (const std::string& device : devices) {
    const auto state = storage::Store::peek(device);
    if (state.ok()) return state->run;
  }
  return std::nullopt;
}

}  // namespace smartinf::engine
