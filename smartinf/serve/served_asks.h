// The server's side of streams that are no session: one thing after another on the stream's own
// thread.
#pragma once

#include "smartinf/serve/hosted_device.h"
#include "smartinf/serve/stream.h"

namespace smartinf::serve::wire {

/// A stream that was said hello to.
struct ServedStream {
  Stream& stream;
  const Peer& peer;
  HostedDevice& device;
};

void serve_ask(ServedStream& served);
void serve_snapshot(ServedStream& served);
void serve_new_state(ServedStream& served);

}  // namespace smartinf::serve::wire
