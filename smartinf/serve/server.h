// Server that makes a machine a computational storage device for others: `smartinf serve`. Offers
// devices by name to clients with certificates.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/serve/hosted_device.h"
#include "smartinf/serve/stream.h"

namespace smartinf::serve {

struct ServerOptions {
  wire::ListenOptions listen;
  std::vector<ServedDevice> devices;
  /// Whether a client's certificate is not accepted any more; asked for every stream, and once a
  /// second for those that are open. From several threads at once; must not wait. Empty: all are.
  std::function<bool(const wire::Peer&)> revoked;
  double lease_seconds = 60;         // a client may be away for so long; 1 at least
  uint32_t client_streams_max = 16;  // of one client at once, on each device
};

/// For a metrics page: what a device has done since the server was started.
struct ServedDeviceStatus {
  std::string name;
  std::string client;     // the client that has it; empty: nobody
  bool attached = false;  // its client is connected just now
  uint64_t bytes_received = 0, bytes_sent = 0;
  uint64_t commands = 0, errors = 0, commits = 0, sessions = 0, connections = 0;
  uint64_t memory_bytes = 0, memory_limit_bytes = 0;
};

/// Threads: any.
class Server {
 public:
  /// Errors: kInvalidArgument (what is wrong with the options or the certificates); kIo.
  static base::Result<std::unique_ptr<Server>> start(ServerOptions options);
  virtual ~Server() = default;  // stops it

  virtual uint16_t port() const = 0;
  virtual std::vector<ServedDeviceStatus> devices() const = 0;
  virtual uint64_t refused() const = 0;  // clients and requests that were not let in
  /// Accepts nothing more and closes the devices: a commit under way is finished, another step is
  /// aborted. One line for each device that was in use. Bound: two minutes beyond what the drives'
  /// watchdogs take.
  virtual std::vector<std::string> stop() = 0;
};

/// See wire::prepare_to_listen.
void prepare_to_serve();

}  // namespace smartinf::serve
