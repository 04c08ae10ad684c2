#include "smartinf/engine/found_run.h"

#include <memory>
#include <utility>
#include <vector>

#include "smartinf/engine/step_metadata.h"
#include "smartinf/storage/row_commit.h"

namespace smartinf::engine {

std::optional<FoundRun> find_run(const DeviceSources& sources) {
  std::optional<FoundRun> found;
  DeviceSource* first = nullptr;
  std::vector<storage::StoreState> states;
  for (const auto& source : sources) {
    const auto state = source->peek();
    if (!state.ok() || !*state || !((*state)->initialized || (*state)->torn)) continue;
    states.push_back(**state);
    if (found) continue;
    first = source.get();
    found = FoundRun{states.front().run, 0, {}};
  }
  if (!found) return found;
  // The first device's promise counts where only some of a run's devices are here, or the run is
  // going.
  const auto step = storage::recovery_step(states);
  found->step = step.ok() ? *step : states.front().committed_step;
  auto snapshot = first->snapshot(storage::ReaderLock::kLeave);
  if (snapshot.ok() && (*snapshot)->choose_step(found->step).ok()) {
    found->client_metadata =
        split_metadata(storage::split_row_commit((*snapshot)->client_metadata()).client_metadata)
            .client_metadata;
  }
  return found;
}

base::Result<std::optional<storage::RunId>> run_made_for(const DeviceSources& sources) {
  for (const auto& source : sources) {
    SI_ASSIGN_OR_RETURN(const auto state, source->peek());
    if (state) return std::optional(state->run);
  }
  return std::optional<storage::RunId>();
}

}  // namespace smartinf::engine
