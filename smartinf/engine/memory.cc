#include "smartinf/engine/memory.h"

#include <unistd.h>

#include "smartinf/plan/memory_plan.h"

namespace smartinf::engine {

std::vector<base::PlaneKind> state_planes(kernels::UpdateRule rule, bool residual) {
  const auto planes = kernels::rule_planes(rule);
  std::vector<base::PlaneKind> all(planes.begin(), planes.end());
  if (residual) all.push_back(base::PlaneKind::kResidual);
  return all;
}

uint64_t state_bytes(kernels::UpdateRule rule, base::StateFormat format, uint64_t elements,
                     bool residual) {
  return plan::state_bytes(format, state_planes(rule, residual), elements);
}

uint64_t host_memory_bytes() {
  return static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace smartinf::engine
