// Which versions of TLS this process's gRPC speaks.
#pragma once

#include "smartinf/base/status.h"

namespace smartinf::serve::wire {

/// TLS 1.3 only, as client and as server, from now on; asked for again it does nothing. Threads:
/// any, but the first call changes the environment for a moment. Errors: kFailedPrecondition where
/// something else of this process has used gRPC's TLS before.
base::Status speak_tls13_only();

}  // namespace smartinf::serve::wire
