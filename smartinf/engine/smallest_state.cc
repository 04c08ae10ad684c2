#include "smartinf/engine/smallest_state.h"

#include <chrono>
#include <utility>
#include <vector>

#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::Result;
using base::Status;

namespace {

Status run(csd::Device& device, csd::Message message) {
  csd::CompletionQueue replies;
  csd::Command command{std::move(message), &replies, nullptr};
  device.submit(command);
  csd::Completion done;
  while (!replies.pop(done, std::chrono::hours(1))) {
  }
  return done.status;
}

/// Step 0: zeros.
Status commit_first(csd::Device& device) {
  SI_RETURN_IF_ERROR(run(device, csd::BeginStep{0}));
  for (const storage::StoredSubgroup& subgroup : device.layout().subgroups) {
    SI_RETURN_IF_ERROR(run(device, csd::WriteState{subgroup.id, subgroup.count, {}}));
  }
  SI_RETURN_IF_ERROR(run(device, csd::Prepare{0, {}}));
  return run(device, csd::Commit{0});
}

}  // namespace

storage::StoreLayout smallest_layout() {
  storage::StoreLayout layout;
  layout.run = storage::make_run_id();
  const auto planes = kernels::rule_planes(kernels::UpdateRule::kSgdMomentum);
  layout.planes.assign(planes.begin(), planes.end());
  layout.description = "{}";
  layout.subgroups.push_back({base::SubgroupId{0}, 0, base::kBlockElements});
  return layout;
}

bool is_smallest(const storage::StoreLayout& layout) {
  return layout.subgroups.size() == 1 && layout.subgroups.front().count == base::kBlockElements &&
         layout.description == smallest_layout().description;
}

Result<std::unique_ptr<csd::Device>> open_or_make_smallest(csd::DeviceSource& source,
                                                           const csd::DeviceShare& share) {
  SI_ASSIGN_OR_RETURN(const auto state, source.peek());
  if (state && state->initialized) {
    SI_ASSIGN_OR_RETURN(std::unique_ptr<csd::Device> device, source.open(share));
    SI_RETURN_IF_ERROR(device->recover_to(state->committed_step));
    return device;
  }
  if (state) SI_RETURN_IF_ERROR(source.erase());
  SI_ASSIGN_OR_RETURN(std::unique_ptr<csd::Device> device, source.create(smallest_layout(), share));
  SI_RETURN_IF_ERROR(commit_first(*device));
  return device;
}

}  // namespace smartinf::engine
