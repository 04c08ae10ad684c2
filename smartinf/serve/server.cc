#include "smartinf/serve/server.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/serve/certificates/certificates.h"
#include "smartinf/serve/hosted_session.h"
#include "smartinf/serve/protocol_fields.h"
#include "smartinf/serve/served_asks.h"
#include "smartinf/serve/token_bucket.h"

namespace smartinf::serve {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using namespace wire;

// A client has so long to say what it wants, and so much room for it.
constexpr double kHelloSeconds = 20;
constexpr uint64_t kHelloBytesMax = 4096;
// Names of devices in the server's file are no longer; one that is, is not repeated.
constexpr size_t kNameBytesMax = 64;
constexpr std::chrono::seconds kHousekeeping{1};
constexpr std::chrono::seconds kStopWait{10};
constexpr std::chrono::seconds kStopWaitMore{120};

class StreamServer final : public Server {
 public:
  explicit StreamServer(ServerOptions options) : options_(std::move(options)) {
    for (ServedDevice& served : options_.devices) {
      const std::string name = served.name;
      devices_.emplace(name, std::make_unique<HostedDevice>(std::move(served)));
    }
  }
  ~StreamServer() override { (void)stop(); }

  Status begin() {
    SI_ASSIGN_OR_RETURN(
        listener_,
        listen(options_.listen, [this](Stream& stream, const Peer& peer) { talk(stream, peer); }));
    housekeeper_ = std::jthread([this](const std::stop_token& stop) { keep_house(stop); });
    return Status();
  }

  uint16_t port() const override { return listener_->port(); }
  uint64_t refused() const override { return refused_; }
  std::vector<ServedDeviceStatus> devices() const override {
    std::vector<ServedDeviceStatus> all;
    for (const auto& [name, device] : devices_) {
      const DeviceCounters& counters = device->counters();
      const auto session = device->session();
      ServedDeviceStatus status;
      status.name = name;
      status.client = device->holder();
      status.attached = session != nullptr && session->attached();
      status.bytes_received = counters.bytes_received;
      status.bytes_sent = counters.bytes_sent;
      status.commands = counters.commands;
      status.errors = counters.errors;
      status.commits = counters.commits;
      status.sessions = counters.sessions;
      status.connections = counters.connections;
      status.memory_bytes = device->memory().used_bytes();
      status.memory_limit_bytes = device->memory().limit_bytes();
      all.push_back(std::move(status));
    }
    return all;
  }

  std::vector<std::string> stop() override;

 private:
  void talk(Stream& stream, const Peer& peer);
  Result<HostedDevice*> welcome(Stream& stream, const Peer& peer, Hello& hello);
  void serve_session(Stream& stream, const Peer& peer, HostedDevice& device);
  void keep_house(const std::stop_token& stop);
  bool revoked(const Peer& peer) const { return options_.revoked && options_.revoked(peer); }
  /// Whether a certificate of the authority is one that a client may show here.
  Status check_certificate(const Peer& peer) const;
  void refuse(const Peer& peer, const std::string& device, const Status& why) {
    ++refused_;
    log_rarely("refused", fmt::format("client {} ({}), device {}: refused: {}", peer.name,
                                      peer.address, device, why.to_string()));
  }

  ServerOptions options_;
  std::map<std::string, std::unique_ptr<HostedDevice>> devices_;
  std::atomic<uint64_t> refused_{0};

  std::mutex mutex_;
  struct Open {
    Peer peer;
    bool let_in = false;
  };
  std::map<std::string, uint32_t> streams_;  // of each client
  std::map<Stream*, Open> open_;             // streams, to be cancelled
  bool stopping_ = false;

  std::unique_ptr<Listener> listener_;
  std::jthread housekeeper_;
};

Status StreamServer::check_certificate(const Peer& peer) const {
  const auto name = client_name(peer.certificate);
  if (!name.ok()) return name.status();
  if (!revoked(peer)) return Status();
  return Status(ErrorCode::kPermissionDenied,
                fmt::format("the certificate of client {} was revoked", peer.name),
                "Ask whoever runs the server for a new one.");
}

/// The device that a stream is for, once it was said hello to.
Result<HostedDevice*> StreamServer::welcome(Stream& stream, const Peer& peer, Hello& hello) {
  InFrame frame;
  {
    const Deadline deadline(stream, kHelloSeconds);
    SI_RETURN_IF_ERROR(stream.read(frame, kHelloBytesMax));
  }
  Welcome answer;
  Status wrong = check_certificate(peer);
  HostedDevice* device = nullptr;
  const auto said = decode<Hello>(frame);
  if (said.ok() && said->device.size() <= kNameBytesMax) hello = *said;
  if (!wrong.ok()) {
  } else if (said.ok() && said->device.size() > kNameBytesMax) {
    wrong = Status(ErrorCode::kInvalidArgument,
                   fmt::format("a device's name has {} bytes at most, and this one {}",
                               kNameBytesMax, said->device.size()));
  } else if (!said.ok() || hello.magic != kProtocolMagic) {
    wrong = Status(ErrorCode::kInvalidArgument, "this is no smartinf client");
  } else if (hello.version != kProtocolVersion) {
    wrong = Status(ErrorCode::kMismatch,
                   fmt::format("the client speaks version {} of the protocol, this server version "
                               "{}",
                               hello.version, kProtocolVersion),
                   hello.version > kProtocolVersion ? "Update smartinf on the server."
                                                    : "Update smartinf on the client's machine.");
  } else {
    const auto found = devices_.find(hello.device);
    if (found == devices_.end() || !found->second->allows(peer.name)) {
      // The same for both: who may not use a device need not know of it.
      wrong =
          Status(ErrorCode::kPermissionDenied,
                 fmt::format("there is no device \"{}\" for client {}", hello.device, peer.name),
                 "See the devices and their clients in the server's file.");
    } else {
      device = found->second.get();
    }
  }
  answer.outcome = wrong;
  const Deadline deadline(stream, kHelloSeconds);
  if (!stream.write({encode(answer), {}}) && wrong.ok()) {
    wrong = Status(ErrorCode::kCancelled, "the client is gone");
  }
  if (!wrong.ok()) return wrong;
  return device;
}

void StreamServer::talk(Stream& stream, const Peer& peer) {
  {
    const std::lock_guard lock(mutex_);
    // No client takes more than half of what there is.
    const uint32_t most = std::min<uint32_t>(
        options_.client_streams_max * static_cast<uint32_t>(std::max<size_t>(devices_.size(), 1)),
        options_.listen.streams_max / 2);
    if (stopping_ || streams_[peer.name] >= most) {
      refuse(peer, "?",
             Status(ErrorCode::kBusy,
                    stopping_ ? "the server stops" : "too many connections of one client"));
      return;
    }
    ++streams_[peer.name];
    open_[&stream] = {peer};
  }
  Hello hello;
  hello.device = "?";  // while it is not known
  if (auto device = welcome(stream, peer, hello); !device.ok()) {
    refuse(peer, hello.device, device.status());
  } else {
    stream.let_in();
    {
      const std::lock_guard lock(mutex_);
      open_[&stream].let_in = true;
    }
    ServedStream served{stream, peer, **device};
    switch (hello.purpose) {
      case Purpose::kAsk:
        serve_ask(served);
        break;
      case Purpose::kSession:
        serve_session(stream, peer, **device);
        break;
      case Purpose::kSnapshot:
        serve_snapshot(served);
        break;
      case Purpose::kNewState:
        serve_new_state(served);
        break;
    }
  }
  const std::lock_guard lock(mutex_);
  open_.erase(&stream);
  if (--streams_[peer.name] == 0) streams_.erase(peer.name);
}

void StreamServer::serve_session(Stream& stream, const Peer& peer, HostedDevice& device) {
  InFrame frame;
  {
    const Deadline deadline(stream, kHelloSeconds);
    if (!stream.read(frame).ok()) return;
  }
  auto request = decode<Attach>(frame);
  frame = {};  // of a large model some MB
  std::shared_ptr<HostedSession> session;
  Status wrong = request.status();
  const bool fresh = request.ok() && !request->session;
  if (fresh) {
    const HostedSession::Limits limits{std::chrono::duration<double>(options_.lease_seconds)};
    auto opened = HostedSession::open(device, peer, *request, limits);
    if (opened.status().code() == ErrorCode::kBusy && session_gives_way(device, peer)) {
      opened = HostedSession::open(device, peer, *request, limits);
    }
    wrong = opened.status();
    if (opened.ok()) {
      session = *opened;
      device.set_session(session);
      const std::lock_guard lock(mutex_);
      if (stopping_) session->end(Status(ErrorCode::kUnavailable, "the server stops"));
      base::log(base::LogLevel::kInfo,
                fmt::format("client {} ({}), device {}: {}", peer.name, peer.address, device.name(),
                            request->create ? "created and opened" : "opened"));
    }
  } else if (wrong.ok()) {
    session = device.session();
    const bool his = session != nullptr && session->id() == *request->session &&
                     session->client().name == peer.name;
    if (!his) {
      wrong = Status(ErrorCode::kNotFound,
                     "the server does not have the session any more: it was started again, or the "
                     "client was away for longer than its lease",
                     "The step was aborted; training goes on from the committed one when it is "
                     "started again.");
    }
  }
  if (wrong.ok()) {
    wrong = session->serve(stream, request->received, fresh);
    // A broken connection is no news: the client comes again or its lease expires.
    if (wrong.code() == ErrorCode::kCancelled) return;
  }
  if (wrong.ok()) return;
  if (fresh || wrong.code() != ErrorCode::kUnavailable) refuse(peer, device.name(), wrong);
  Attached answer;
  answer.outcome = wrong;
  const Deadline deadline(stream, kHelloSeconds);
  (void)stream.write({encode(answer), {}});
}

/// Ends sessions and streams of clients whose certificates were revoked. Blocks on nobody.
void StreamServer::keep_house(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any changed;
  std::unique_lock waiting(mutex);
  while (!stop.stop_requested()) {
    changed.wait_for(waiting, stop, kHousekeeping, [] { return false; });
    for (const auto& [name, device] : devices_) {
      const auto session = device->session();
      if (session == nullptr || !revoked(session->client())) continue;
      session->end(Status(ErrorCode::kPermissionDenied, "the client's certificate was revoked"));
      session->cancel_stream();
    }
    const std::lock_guard lock(mutex_);
    // One that was not let in is being told why.
    for (const auto& [stream, open] : open_) {
      if (open.let_in && revoked(open.peer)) stream->cancel();
    }
  }
}

std::vector<std::string> StreamServer::stop() {
  std::vector<std::string> words;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(stopping_, true)) return words;
  }
  housekeeper_.request_stop();
  const Status why(ErrorCode::kUnavailable, "the server was stopped",
                   "Start it again; training goes on from the committed step.");
  for (const auto& [name, device] : devices_) {
    if (const auto session = device->session(); session != nullptr) session->end(why);
  }
  for (const auto& [name, device] : devices_) {
    const auto session = device->session();
    if (session == nullptr) continue;
    bool ended = session->wait_ended(kStopWait);
    if (!ended) {
      session->cancel_stream();
      ended = session->wait_ended(kStopWaitMore);
    }
    words.push_back(fmt::format("device {}, client {}: {}", name, session->client().name,
                                ended ? session->last_words() : "it does not end"));
  }
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [stream, open] : open_) stream->cancel();
  }
  listener_.reset();
  for (const auto& [name, device] : devices_) device->set_session(nullptr);
  return words;
}

}  // namespace

Result<std::unique_ptr<Server>> Server::start(ServerOptions options) {
  const auto wrong = [](std::string what) {
    return Status(ErrorCode::kInvalidArgument, std::move(what),
                  "Correct the server's file or its flags.");
  };
  if (options.devices.empty()) return wrong("the server offers no device");
  if (!(options.lease_seconds >= 1)) return wrong("lease_seconds is below one second");
  std::set<std::string> names;
  for (const ServedDevice& device : options.devices) {
    if (device.name.empty() || device.name.find('/') != std::string::npos) {
      return wrong(fmt::format("\"{}\" is no name of a device", device.name));
    }
    if (!names.insert(device.name).second) {
      return wrong(fmt::format("two devices are named {}", device.name));
    }
  }
  auto server = std::make_unique<StreamServer>(std::move(options));
  SI_RETURN_IF_ERROR(server->begin());
  return std::unique_ptr<Server>(std::move(server));
}

void prepare_to_serve() { wire::prepare_to_listen(); }

}  // namespace smartinf::serve
