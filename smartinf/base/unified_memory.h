// Accelerators that compute in the host's own memory: nothing has to be copied to them.
#pragma once

namespace smartinf::base {

/// Whether this machine's accelerator does: the environment's SMARTINF_UNIFIED_MEMORY ("yes" or "no"),
/// else what NVIDIA's driver says of its first GPU ("integrated", as GB10 is); false without one.
bool memory_is_unified();

}  // namespace smartinf::base
