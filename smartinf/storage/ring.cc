#include "smartinf/storage/ring.h"

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/storage/thread_ring.h"
#include "smartinf/storage/uring_ring.h"

namespace smartinf::storage {

base::Result<std::unique_ptr<Ring>> make_ring(const RingOptions& options) {
  if (options.kind == RingKind::kThreads) return make_thread_ring(options.depth, options.threads);
  auto ring = make_uring_ring(options.depth);
  if (ring.ok()) return ring;
  const base::Status& why = ring.status();
  if (options.kind == RingKind::kUring) {
    return base::Status(why.code(), why.what(),
                        (why.advice().empty() ? "" : why.advice() + " ") +
                            "Or use engine.ring = \"auto\": a pool of threads then does the same.",
                        why.place());
  }
  base::log(base::LogLevel::kInfo, why.to_string() + " A pool of threads is used instead.");
  return make_thread_ring(options.depth, options.threads);
}

base::Status probe_uring() { return make_uring_ring(4).status(); }

}  // namespace smartinf::storage
