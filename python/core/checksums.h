// Checksums of weights where the model has them, so that a write behind torch's back is found.
#pragma once

#include <cstdint>
#include <vector>

namespace smartinf::python {

/// Of each range of bytes one number that its content decides. Ranges are read by several threads
/// where that is worth it. The GIL need not be held.
std::vector<uint64_t> checksums(const std::vector<uintptr_t>& addresses,
                                const std::vector<uint64_t>& sizes);

}  // namespace smartinf::python
