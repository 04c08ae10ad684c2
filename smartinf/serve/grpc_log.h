// gRPC's own words go to the log sink, and not to standard error.
#pragma once

namespace smartinf::serve::wire {

/// Takes gRPC's log of the whole process from now on. listening: why a handshake failed is what a
/// server wants to know; a client is told by its calls. Asked for again it does nothing, but for
/// listening.
void take_grpc_log(bool listening);

}  // namespace smartinf::serve::wire
