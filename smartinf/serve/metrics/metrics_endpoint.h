// What a server says of itself over HTTP/1.1, on a port of its own: GET /metrics in Prometheus'
// text form, and GET /healthz. Nothing else is there. Without TLS and without passwords: whoever
// reaches the port may read it, so it listens on 127.0.0.1 unless told otherwise.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "smartinf/base/status.h"

namespace smartinf::serve {

struct MetricsOptions {
  std::string listen = "127.0.0.1:9464";  // host:port, [IPv6]:port; port 0: any that is free
  // Of hostile input: what is open at once (the oldest makes room), what a request may take, how
  // long an exchange may.
  uint32_t connections_max = 256;
  uint32_t request_bytes_max = 8192;
  std::chrono::milliseconds exchange_timeout{5000};
};

class MetricsEndpoint {
 public:
  /// Both are called on the endpoint's thread, one call at a time, and must not wait for long.
  struct Sources {
    std::function<std::string()> metrics;  // a body in Prometheus' text form
    std::function<base::Status()> health;  // ok: 200 "ok"; else 503 with its text
  };

  /// Listens and starts the thread. Errors: kInvalidArgument: the address; kBusy: the port is in
  /// use; as errno says.
  static base::Result<std::unique_ptr<MetricsEndpoint>> start(const MetricsOptions& options,
                                                              Sources sources);
  /// Ends the thread; open exchanges are cut off.
  virtual ~MetricsEndpoint() = default;
  /// Where it listens, with the port that it got.
  virtual const std::string& address() const = 0;
};

}  // namespace smartinf::serve
