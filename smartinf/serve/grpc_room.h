// gRPC ends the process where it gets no thread, descriptor or memory for itself.
#pragma once

#include "smartinf/base/status.h"

namespace smartinf::serve::wire {

/// Takes what gRPC takes at its start, and gives it back. Until that went well once, some
/// milliseconds at most; then nothing. Errors: kUnavailable, kOutOfMemory, with the limit to raise.
base::Status check_room_for_grpc();

}  // namespace smartinf::serve::wire
