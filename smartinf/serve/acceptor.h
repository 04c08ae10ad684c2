// Accepts the connections of a server, and bounds what they take before the server knows whose they
// are: TLS and HTTP/2 have a connection only once it has said something and there is a place for
// it. Has no part in what is said.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/storage/file_descriptor.h"

namespace smartinf::serve::wire {

/// Threads: any.
class Acceptor {
 public:
  struct Options {
    // Connections that have not sent a whole record of TLS, or wait for a place; the oldest of the
    // address that has most of them make room for a new one. One costs a descriptor and what the
    // kernel has of it.
    size_t silent_max = 4096;
    std::chrono::milliseconds silent{10'000};  // and no longer than that
    // Connections that were passed on and that no client uses, whom the server lets in: handshakes,
    // and what is idle. One costs some tens of KB.
    size_t unknown_max = 256;
    // From this age one of them makes room for others of its address; for another address, which
    // has fewer, at once.
    std::chrono::milliseconds unknown{1'000};
    // The kernel gives a connection up whose peer acknowledges nothing for so long.
    std::chrono::milliseconds unacknowledged{10'000};
  };

  /// Listens, and accepts nothing before start(). `pass_on` takes a socket over, on the acceptor's
  /// thread. Errors: listening_sockets().
  static base::Result<std::unique_ptr<Acceptor>> listen(const std::string& address,
                                                        const Options& options,
                                                        std::function<void(int socket)> pass_on);
  /// Leaves open what was passed on.
  ~Acceptor();
  void start();
  uint16_t port() const { return port_; }

  /// A connection, by its peer as gRPC writes it, is a client's that was let in, until done() with
  /// what this returns.
  uint64_t use(const std::string& peer);
  void done(uint64_t use);
  /// Ends a connection that was passed on, at once.
  void cut(const std::string& peer);

 private:
  using Clock = std::chrono::steady_clock;

  struct Connection {
    storage::FileDescriptor socket;  // until it is passed on
    std::string peer;                // "1.2.3.4:5", "[::1]:5"
    std::string host;                // whose it counts as: the address, of IPv6 the network
    Clock::time_point since;
    // Once passed on:
    int passed = -1;      // is the socket for as long as it has this cookie, which is never used
    uint64_t cookie = 0;  // again
    int uses = 0;         // streams of clients
    bool used = false;    // ever
  };
  using Connections = std::map<uint64_t, Connection>;  // by number: the oldest first

  Acceptor(const Options& options, std::function<void(int)> pass_on);
  base::Status begin(std::vector<storage::FileDescriptor> listeners);
  void run(const std::stop_token& stop);
  void accept_some(int listener);
  void hang_up_some();
  void pass_on_ready();
  // With mutex_:
  bool make_room(const std::string& host, std::map<std::string, size_t>& unknown_of);
  void forget_closed();
  Connections::iterator passed(const std::string& peer);

  const Options options_;
  const std::function<void(int)> pass_on_;
  std::vector<storage::FileDescriptor> listeners_;
  storage::FileDescriptor poll_, wake_;
  uint16_t port_ = 0;

  // The thread's own:
  Connections silent_, ready_;  // ready: a whole record came
  uint64_t next_number_ = 0;
  std::optional<Clock::time_point> trim_at_;

  std::mutex mutex_;
  Connections passed_;

  std::jthread thread_;  // the last: it uses all others
};

}  // namespace smartinf::serve::wire
