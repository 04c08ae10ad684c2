// The sizes of an update rule's state, and of the memory that it meets. How the budget is divided
// is plan/memory_plan.h.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/options.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::engine {

/// The planes of the rule, with a residual behind them or not.
std::vector<base::PlaneKind> state_planes(kernels::UpdateRule rule, bool residual = false);

/// Bytes that those planes of so many elements take on the drive.
uint64_t state_bytes(kernels::UpdateRule rule, base::StateFormat format, uint64_t elements,
                     bool residual = false);

/// How the devices' buffers divide options.memory_budget_bytes in a run that begins. Errors:
/// plan::plan_memory's.
base::Result<plan::MemoryPlan> plan_buffers(const UpdaterOptions& options,
                                            const plan::ParameterSpace& space, uint32_t devices);
/// Bytes of transfers that are to fill a drive, one way, as plan_buffers' devices will have them:
/// given, or found on the devices; nothing where a device has yet to be measured.
std::optional<uint64_t> known_in_flight_bytes(const UpdaterOptions& options);
/// Whether devices need not be measured to share a run's state by their rates.
bool rates_are_known(const UpdaterOptions& options);
/// Bytes for an element on the drive, for gradients that do not stay in memory; 0: all of them do.
uint32_t gradient_spill_bytes(const UpdaterOptions& options, const plan::ParameterSpace& space);

/// Memory of this machine in all.
uint64_t host_memory_bytes();
/// Bytes that a process can still take: of the machine, and of the control group that it is in.
uint64_t available_memory_bytes();
/// Bytes that this process has in memory now.
uint64_t resident_memory_bytes();
/// The most that it had since it was started; 0: unknown.
uint64_t peak_memory_bytes();

}  // namespace smartinf::engine
