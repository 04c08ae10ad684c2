// METIS, in one of two sources: with the library, or without.
#pragma once

#include "smartinf/graph/csr.h"

namespace smartinf::graph {

/// partition() with PartitionMethod::kMetis, of two blocks at least.
base::Result<std::vector<uint32_t>> metis_partition(const Csr& csr, uint32_t blocks);

}  // namespace smartinf::graph
