#include "smartinf/serve/said_state.h"

#include <algorithm>
#include <tuple>

#include "smartinf/storage/format.h"

namespace smartinf::serve::wire {

using base::ErrorCode;
using base::Status;

namespace {

Status no_such_state(const std::string& why) {
  return Status(
      ErrorCode::kCorrupt, "the server describes a state that cannot be: " + why,
      "See the server's log; if it is sound, this is a bug in smartinf, please report it.");
}

bool of_same_device(const auto& a, const auto& b) {
  return a.run == b.run && a.device_index == b.device_index && a.device_count == b.device_count;
}

}  // namespace

Status check_said(const storage::StoreState& state) {
  if (state.device_count == 0 || state.device_count > storage::kDevicesMax ||
      state.device_index >= state.device_count) {
    return no_such_state("its place among the devices of the run");
  }
  const base::StepNumber ahead = state.prepared_step - state.committed_step;
  if (ahead > 1 || state.prepared_step < state.committed_step) {
    return no_such_state("its prepared step does not follow the committed one");
  }
  return Status();
}

Status check_said(const storage::StoreState& state, const storage::StoreLayout& layout) {
  SI_RETURN_IF_ERROR(check_said(state));
  const auto geometry = storage::Geometry::make(layout, 1);
  if (!geometry.ok()) return no_such_state(geometry.status().what());
  return of_same_device(state, layout) ? Status()
                                       : no_such_state("it is not that of its own layout");
}

bool same_device(const storage::StoreState& a, const storage::StoreState& b) {
  return of_same_device(a, b);
}

bool same_layout(const storage::StoreLayout& a, const storage::StoreLayout& b) {
  const auto same_subgroup = [](const storage::StoredSubgroup& x,
                                const storage::StoredSubgroup& y) {
    return std::tie(x.id, x.first_element, x.count) == std::tie(y.id, y.first_element, y.count);
  };
  return of_same_device(a, b) && a.format == b.format && a.planes == b.planes &&
         a.description == b.description &&
         std::ranges::equal(a.subgroups, b.subgroups, same_subgroup);
}

}  // namespace smartinf::serve::wire
