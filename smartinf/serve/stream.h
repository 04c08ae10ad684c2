// A connection in use: frames go and come, in order, each way at its own pace. What carries them
// (gRPC over TLS, or memory in tests) is behind it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "smartinf/base/status.h"
#include "smartinf/serve/frame.h"
#include "smartinf/serve/options.h"

namespace smartinf::serve::wire {

/// Threads: one that reads, one that writes; cancel() from any.
class Stream {
 public:
  virtual ~Stream() = default;
  /// Waits until the other side, or what lies between, takes it. False: the stream is broken.
  virtual bool write(const OutFrame& frame) = 0;
  /// The next one; waits for it. Errors: kCancelled, the stream has ended or was cancelled (the
  /// client's says why); kCorrupt; kInvalidArgument, it is longer than bytes_max, of which nothing
  /// is kept.
  virtual base::Status read(InFrame& frame, uint64_t bytes_max) = 0;
  base::Status read(InFrame& frame) { return read(frame, kFrameBytesMax); }
  /// Ends it: write() and read() fail, also those that wait.
  virtual void cancel() = 0;
  /// The server's: who is there has said what it wants, and may have it. Streams and connections
  /// without that are few.
  virtual void let_in() {}
};

/// The other end of a connection, by its certificate.
struct Peer {
  std::string name;
  std::string certificate;  // PEM
  std::string address;
};

/// Cancels a stream that gives no answer in time, unless it is gone first.
class Deadline {
 public:
  Deadline(Stream& stream, double seconds)
      : thread_([this, &stream, seconds](const std::stop_token& stop) {
          std::unique_lock lock(mutex_);
          changed_.wait_for(lock, stop, std::chrono::duration<double>(seconds),
                            [] { return false; });
          if (stop.stop_requested()) return;
          expired_ = true;
          stream.cancel();
        }) {}
  bool expired() const { return expired_; }

 private:
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::atomic<bool> expired_{false};
  std::jthread thread_;
};

/// Whether this build can connect and listen.
bool has_transport();

// ---- The client's side: connect_grpc.cc, or connect_none.cc in a build without gRPC.

/// Where a device is: "grpc://host:port/name".
struct Endpoint {
  std::string address;  // "host:port"
  std::string device;
  /// Errors: kInvalidArgument.
  static base::Result<Endpoint> parse(const std::string& url);
};

/// A stream of its own connection. Whether anybody is there shows when it is used.
/// Errors: those of reading the certificates; kUnsupported without gRPC.
base::Result<std::unique_ptr<Stream>> connect(const std::string& address,
                                              const RemoteOptions& options);

// ---- The server's side: listen_grpc.cc, or listen_none.cc.

struct ListenOptions {
  std::string address;  // "host:port"; port 0: any
  std::string certificate, key, ca;
  uint32_t streams_max = 256;  // at once, of all clients
  double keepalive_seconds = 10;
  /// For what gRPC itself holds of messages that come or go, of all connections.
  uint64_t buffer_bytes = uint64_t{256} << 20;
};

/// Accepts streams until it is destroyed, which waits for all of them to return.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual uint16_t port() const = 0;
};

/// `talk` is called for every stream, on a thread of that stream, whose end it is.
/// Errors: kInvalidArgument for certificates that a server cannot use; kIo; kUnsupported.
base::Result<std::unique_ptr<Listener>> listen(const ListenOptions& options,
                                               std::function<void(Stream&, const Peer&)> talk);

/// Once in main(), before any thread: raises the limit of open files to what is allowed, and lets
/// this process's gRPC speak TLS 1.3 only, which changes the environment for a moment.
void prepare_to_listen();

}  // namespace smartinf::serve::wire
