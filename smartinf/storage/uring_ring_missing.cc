#include "smartinf/storage/uring_ring.h"

namespace smartinf::storage {

base::Result<std::unique_ptr<Ring>> make_uring_ring(uint32_t /*depth*/) {
  return base::Status(base::ErrorCode::kUnsupported, "io_uring is not part of this build",
                      "Install liburing-dev and build again.");
}

}  // namespace smartinf::storage
