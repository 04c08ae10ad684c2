#include "smartinf/graph/metis.h"
#include "smartinf/graph/partition.h"

namespace smartinf::graph {

bool has_metis() { return false; }

base::Result<std::vector<uint32_t>> metis_partition(const Csr& /*csr*/, uint32_t /*blocks*/) {
  return base::Status(base::ErrorCode::kUnsupported, "this build has no METIS",
                      "Use the method stream, or install libmetis-dev and build again.");
}

}  // namespace smartinf::graph
