// A build without gRPC.
#include "smartinf/serve/stream.h"

namespace smartinf::serve::wire {
namespace {

base::Status without() {
  return base::Status(base::ErrorCode::kUnsupported,
                      "this smartinf was built without gRPC, which devices of other machines need",
                      "Install libgrpc++-dev and build it again.");
}

}  // namespace

bool has_transport() { return false; }

base::Result<std::unique_ptr<Stream>> connect(const std::string&, const RemoteOptions&) {
  return without();
}

base::Result<std::unique_ptr<Listener>> listen(const ListenOptions&,
                                               std::function<void(Stream&, const Peer&)>) {
  return without();
}

void prepare_to_listen() {}

}  // namespace smartinf::serve::wire
