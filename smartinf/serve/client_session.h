// The client's half of a session: a link over connections of its own, which are made again after a
// break, and a window for what is sent.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/serve/conversation.h"
#include "smartinf/serve/reliable_link.h"

namespace smartinf::serve::wire {

/// Threads: send(), done() and room() from any. Two of its own: one reads and connects, one writes.
class ClientSession {
 public:
  /// on_frame: what came, on the reading thread; on_lost: once, when the session is at its end
  /// without having been asked for it, also from there.
  struct Events {
    std::function<base::Status(const Down&, const InFrame&)> on_frame;
    std::function<void(const base::Status&)> on_lost;
  };

  /// Errors: Conversation's; what the server says.
  static base::Result<std::unique_ptr<ClientSession>> attach(const Endpoint& endpoint,
                                                             const RemoteOptions& options,
                                                             const Attach& request,
                                                             Attached& answer);
  ~ClientSession() { close(); }

  /// Ends it: the server closes the device, which is waited for up to the deadline. Events come
  /// until it returns.
  void close();

  /// Once, before the first send().
  void start(Events events);

  /// Waits until so many bytes may be on their way besides what is; what is larger than the window
  /// goes alone. Errors: why the session was lost; kTimeout.
  base::Status wait_for_room(uint64_t bytes);
  /// Numbers a command and sends it with its payload in pieces, for which there is room. `number`
  /// is called with the command's number before anything is sent. False: the session was lost.
  bool send(CommandBody body, std::vector<Payload> payload,
            const std::function<void(uint64_t number)>& number);
  /// A command is done: so many bytes, which were waited for, may be others'.
  void done(uint64_t bytes);

  const SessionId& id() const { return id_; }
  uint64_t bytes_sent() const { return bytes_sent_; }
  uint64_t bytes_received() const { return bytes_received_; }
  uint32_t connections() const { return connections_; }

 private:
  using Clock = std::chrono::steady_clock;
  ClientSession(Endpoint endpoint, RemoteOptions options, SessionId id);
  void keep(std::variant<CommandFrame, PieceFrame, AckFrame, ByeFrame> body, Payload payload);
  void read_all();
  base::Status read_stream();
  void detach();
  bool reconnect();
  void lose(base::Status why);
  void write_all(const std::stop_token& stop);

  const Endpoint endpoint_;
  const RemoteOptions options_;
  const SessionId id_;
  Events events_;

  std::mutex send_mutex_;  // a command's frames are not parted
  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  std::shared_ptr<Stream> stream_;  // null: broken
  bool writing_ = false;
  ReliableLink<OutFrame> link_;  // bound: the window, and the caller's commands
  uint64_t room_used_ = 0;
  size_t unanswered_ = 0;  // commands
  Clock::time_point connected_ = Clock::now();
  std::optional<uint64_t> received_at_break_;  // when one broke that had been of use
  base::Status lost_;
  bool closing_ = false;
  bool closed_ = false;  // the server says so

  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> bytes_received_{0};
  std::atomic<uint32_t> connections_{1};
  Clock::time_point retry_until_;  // the reader's own
  std::chrono::duration<double> retry_wait_{};
  std::jthread reader_;
  std::jthread writer_;
};

}  // namespace smartinf::serve::wire
