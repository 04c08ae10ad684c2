// Checksums of weights where the model has them, so that a write behind torch's back is found.
#pragma once

#include <cstdint>
#include <vector>

namespace smartinf::python {

/// Checksums: one number for each range of bytes, decided by its content. Ranges are read by
/// several threads where that is worth it. The GIL need not be held.
std::vector<uint64_t> checksums(const std::vector<uintptr_t>& addresses,
                                const std::vector<uint64_t>& sizes);

}  // namespace smartinf::python
