// The client's half of a session: keeps what it sends until it is done, connects again after a
// break, and hands over what comes, each frame once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/serve/conversation.h"

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
  /// Numbers a command and sends it with its payload in pieces. `number` is called with the
  /// command's number before anything is sent. bytes: what was waited for. False: the session was
  /// lost.
  bool send(CommandBody body, std::vector<Payload> payload, uint64_t bytes,
            const std::function<void(uint64_t number)>& number);
  /// A command is done: its frames need not be sent again.
  void done(uint64_t number);

  const SessionId& id() const { return id_; }
  uint64_t bytes_sent() const { return bytes_sent_; }
  uint64_t bytes_received() const { return bytes_received_; }
  uint32_t connections() const { return connections_; }

 private:
  struct Kept {
    OutFrame frame;
    uint64_t command = 0;
    uint64_t room = 0;  // given back when it is done
    bool done = false;
  };
  ClientSession(Endpoint endpoint, RemoteOptions options, SessionId id);
  void keep(std::variant<CommandFrame, PieceFrame, AckFrame, ByeFrame> body, Payload payload,
            uint64_t command, uint64_t room);
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
  std::deque<Kept> kept_;      // bound: the window, and the caller's commands
  uint64_t first_number_ = 1;  // of kept_
  uint64_t next_ = 1;          // to be sent
  uint64_t numbered_ = 0;      // the last one
  uint64_t room_used_ = 0;
  size_t unanswered_ = 0;      // commands
  uint64_t received_ = 0;      // the last Down frame
  uint64_t acknowledged_ = 0;  // of them
  uint64_t unacknowledged_bytes_ = 0;
  base::Status lost_;
  bool closing_ = false;
  bool closed_ = false;  // the server says so

  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> bytes_received_{0};
  std::atomic<uint32_t> connections_{1};
  std::jthread reader_;
  std::jthread writer_;
};

}  // namespace smartinf::serve::wire
