// The ring for machines where io_uring is not allowed: a pool of threads that call
// preadv2/pwritev2.
#pragma once

#include <cstdint>
#include <memory>

#include "smartinf/storage/ring.h"

namespace smartinf::storage {

/// `threads` transfers run at once; up to `depth` wait for them.
std::unique_ptr<Ring> make_thread_ring(uint32_t depth, uint32_t threads);

}  // namespace smartinf::storage
