// The io_uring ring. liburing is included by uring_ring.cc alone; a build without it links
// uring_ring_missing.cc, which answers kUnsupported.
#pragma once

#include <cstdint>
#include <memory>

#include "smartinf/base/status.h"
#include "smartinf/storage/ring.h"

namespace smartinf::storage {

/// Errors: kUnsupported with the reason (no kernel support, forbidden, built without),
/// kOutOfMemory.
base::Result<std::unique_ptr<Ring>> make_uring_ring(uint32_t depth);

}  // namespace smartinf::storage
