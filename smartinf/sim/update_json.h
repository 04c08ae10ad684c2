// An update's shape as a JSON object, so that what was measured can be simulated again: the benches
// print it, a test reads it. Whole or not at all: a field that is missing is an exception of
// nlohmann's.
#pragma once

#include <nlohmann/json.hpp>

#include "smartinf/sim/update.h"

namespace smartinf::plan {

inline void to_json(nlohmann::json& json, ScheduleVariant variant) {
  json = base::enum_name(variant);
}
inline void from_json(const nlohmann::json& json, ScheduleVariant& variant) {
  variant = base::enum_from_name<ScheduleVariant>(json.get<std::string>()).value();
}

}  // namespace smartinf::plan

namespace smartinf::sim {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(UpdateShape, parameters, devices, subgroup_elements, slots,
                                   schedule, master, moments, gradient, weight, host_update,
                                   gradient_spilled, state_cache_bytes, cached_writes_wait,
                                   drive_read_bytes_per_s, drive_write_bytes_per_s, shared_budget,
                                   host_up_bytes_per_s, host_down_bytes_per_s, link_catch_up_s,
                                   links_in_order, host_shared_budget, update_params_per_s,
                                   copy_bytes_per_s, gradient_params_per_s, select_params_per_s,
                                   select_threads)

}  // namespace smartinf::sim
