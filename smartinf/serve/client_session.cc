#include "smartinf/serve/client_session.h"

#include <algorithm>

#include <fmt/format.h>
#include <pthread.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using Seconds = std::chrono::duration<double>;

// Not answered, but for those without a payload: a server takes 2^16.
constexpr size_t kCommandsMax = size_t{1} << 14;

// Between attempts to connect again: doubled from the first to the last.
constexpr Seconds kRetryFirst{0.05};
constexpr Seconds kRetryLast{2};

}  // namespace

ClientSession::ClientSession(Endpoint endpoint, RemoteOptions options, SessionId id)
    : endpoint_(std::move(endpoint)), options_(std::move(options)), id_(id) {}

Result<std::unique_ptr<ClientSession>> ClientSession::attach(const Endpoint& endpoint,
                                                             const RemoteOptions& options,
                                                             const Attach& request,
                                                             Attached& answer) {
  SI_ASSIGN_OR_RETURN(Conversation talk, Conversation::begin(endpoint, options, Purpose::kSession));
  SI_ASSIGN_OR_RETURN(answer, talk.ask<Attached>(request));
  std::unique_ptr<ClientSession> session(new ClientSession(endpoint, options, answer.session));
  session->stream_ = std::move(talk).take_stream();
  return session;
}

void ClientSession::start(Events events) {
  events_ = std::move(events);
  reader_ = std::jthread([this] { read_all(); });
  pthread_setname_np(reader_.native_handle(), "si-remote-read");
  writer_ = std::jthread([this](const std::stop_token& stop) { write_all(stop); });
  pthread_setname_np(writer_.native_handle(), "si-remote-write");
}

void ClientSession::close() {
  if (!reader_.joinable()) {  // never started: the server sees the stream end and waits
    return;
  }
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    if (lost_.ok()) {
      keep(ByeFrame{}, {});
      changed_.notify_all();
      changed_.wait_for(lock, Seconds(options_.deadline_seconds),
                        [&] { return closed_ || !lost_.ok(); });
      if (!closed_ && lost_.ok()) {
        base::log(base::LogLevel::kWarning,
                  fmt::format("server {} did not say that device {} is closed; its lease expires",
                              endpoint_.address, endpoint_.device));
        lost_ = Status(ErrorCode::kTimeout, "the session was closed without an answer");
      }
    }
    changed_.notify_all();
    if (stream_ != nullptr) stream_->cancel();
  }
  writer_.request_stop();
  changed_.notify_all();
  if (reader_.joinable()) reader_.join();
  if (writer_.joinable()) writer_.join();
}

// ---- What is sent.

Status ClientSession::wait_for_room(uint64_t bytes) {
  std::unique_lock lock(mutex_);
  const bool room =
      changed_.wait_for(lock, Seconds(options_.deadline_seconds + options_.reconnect_seconds), [&] {
        const bool fits = room_used_ == 0 || room_used_ + bytes <= options_.window_bytes;
        return !lost_.ok() || (fits && unanswered_ < kCommandsMax);
      });
  if (!lost_.ok()) return lost_;
  if (!room) {
    return Status(ErrorCode::kTimeout,
                  fmt::format("server {}, device {}: nothing of {} under way was answered in time",
                              endpoint_.address, endpoint_.device, base::format_bytes(room_used_)),
                  "See the server's log and the network between.");
  }
  room_used_ += bytes;
  return Status();
}

void ClientSession::keep(std::variant<CommandFrame, PieceFrame, AckFrame, ByeFrame> body,
                         Payload payload) {
  const Up up{link_.last() + 1, std::move(body)};
  link_.put({encode(up), std::move(payload)});
}

bool ClientSession::send(CommandBody body, std::vector<Payload> payload,
                         const std::function<void(uint64_t)>& number) {
  const std::lock_guard whole(send_mutex_);
  CommandFrame command;
  for (const Payload& piece : payload) command.payload_bytes += piece.bytes.size();
  const bool in_one = payload.size() <= 1 && command.payload_bytes <= kPieceBytes;
  Payload first;
  if (in_one && !payload.empty()) {
    first = std::move(payload.front());
    command.checksum = base::checksum(first.bytes);
  }
  command.body = std::move(body);
  std::unique_lock lock(mutex_);
  if (!lost_.ok() || closing_) return false;
  number(link_.last() + 1);
  keep(std::move(command), std::move(first));
  ++unanswered_;
  changed_.notify_all();
  if (in_one) return true;
  uint64_t offset = 0;
  for (const Payload& part : payload) {
    for (uint64_t at = 0; at < part.bytes.size();) {
      // Pieces do not end with a part, so that the other side counts alike.
      const uint64_t some = std::min<uint64_t>(part.bytes.size() - at, kPieceBytes);
      lock.unlock();
      const auto bytes_here = part.bytes.subspan(at, some);
      const PieceFrame piece{base::checksum(bytes_here, offset)};
      lock.lock();
      if (!lost_.ok()) return true;  // whoever waits for it was told
      keep(piece, {part.owner, bytes_here});
      changed_.notify_all();
      at += some;
      offset += some;
    }
  }
  return true;
}

void ClientSession::done(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  --unanswered_;
  room_used_ -= bytes;
  changed_.notify_all();
}

void ClientSession::write_all(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    changed_.wait(lock, stop, [&] {
      return stream_ != nullptr && lost_.ok() && (link_.has_next() || link_.ack_due());
    });
    if (stop.stop_requested()) return;
    OutFrame frame;
    if (link_.ack_due()) {
      frame.head = encode(Up{0, AckFrame{link_.ack()}});
    } else {
      frame = link_.next().frame;
    }
    const std::shared_ptr<Stream> stream = stream_;
    writing_ = true;
    lock.unlock();
    bytes_sent_ += frame.bytes();
    // A failure shows at the reading end, which connects again.
    if (!stream->write(frame)) stream->cancel();
    lock.lock();
    writing_ = false;
    changed_.notify_all();
  }
}

// ---- What comes.

void ClientSession::read_all() {
  for (;;) {
    Status why = read_stream();
    detach();
    {
      const std::lock_guard lock(mutex_);
      if (closed_ || !lost_.ok()) return;
    }
    base::log(base::LogLevel::kWarning,
              fmt::format("the connection to server {}, device {} is broken ({}); trying again",
                          endpoint_.address, endpoint_.device, why.to_string()));
    if (!reconnect()) return;
  }
}

/// Until the stream breaks.
Status ClientSession::read_stream() {
  std::shared_ptr<Stream> stream;
  {
    const std::lock_guard lock(mutex_);
    stream = stream_;
  }
  for (;;) {
    InFrame frame;
    SI_RETURN_IF_ERROR(stream->read(frame));
    bytes_received_ += frame.bytes();
    SI_ASSIGN_OR_RETURN(const Down down, decode<Down>(frame));
    std::optional<std::vector<OutFrame>> gone;  // outside of the lock
    ReliableLink<OutFrame>::Came came{};
    {
      const std::lock_guard lock(mutex_);
      gone = link_.acknowledge(down.received);
      came = link_.take(down.number, frame.bytes());
      if (link_.ack_due()) changed_.notify_all();
    }
    // An answered command has come: a server that answers and does not read could have us keep it
    // for ever.
    const auto* done = std::get_if<DoneFrame>(&down.body);
    if (!gone || (done != nullptr && done->command > down.received)) {
      lose(Status(ErrorCode::kCorrupt, gone ? "the server answers what it does not have"
                                            : "the server says that it has what was not sent"));
      return Status(ErrorCode::kCancelled, "the session is closed");
    }
    if (came == ReliableLink<OutFrame>::Came::kAgain) continue;
    if (came == ReliableLink<OutFrame>::Came::kGap) {
      return Status(ErrorCode::kCorrupt, "a message of the server is missing");
    }
    if (const auto* closed = std::get_if<ClosedFrame>(&down.body)) {
      {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        changed_.notify_all();
      }
      if (Status why = closed->outcome; !why.ok()) lose(why);
      return Status(ErrorCode::kCancelled, "the session is closed");
    }
    if (Status wrong = events_.on_frame(down, frame); !wrong.ok()) {
      lose(wrong);
      return wrong;
    }
  }
}

/// Nobody uses the stream afterwards.
void ClientSession::detach() {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Stream> stream = std::exchange(stream_, nullptr);
  stream->cancel();
  changed_.wait(lock, [&] { return !writing_; });
}

bool ClientSession::reconnect() {
  Status why(ErrorCode::kUnavailable, "the server ends every one at once");
  // A connection that brought nothing, and not for long, is no reason to begin anew.
  bool pause = true;
  {
    const std::lock_guard lock(mutex_);
    if (link_.received() != received_at_break_ ||
        Clock::now() - connected_ > Seconds(options_.reconnect_seconds)) {
      retry_until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        Seconds(options_.reconnect_seconds));
      retry_wait_ = kRetryFirst;
      received_at_break_ = link_.received();
      pause = false;
    }
  }
  for (;; pause = true) {
    Attach request;
    request.session = id_;
    {
      std::unique_lock lock(mutex_);
      if (pause) {
        if (Clock::now() + retry_wait_ > retry_until_) break;
        changed_.wait_for(lock, retry_wait_, [&] { return !lost_.ok(); });
        retry_wait_ = std::min(2 * retry_wait_, kRetryLast);
      }
      request.received = link_.ack();
    }
    Attached answer;
    RemoteOptions soon = options_;
    soon.deadline_seconds =
        std::clamp(Seconds(retry_until_ - Clock::now()).count(), 0.1, options_.deadline_seconds);
    Result<std::unique_ptr<ClientSession>> again = attach(endpoint_, soon, request, answer);
    std::unique_lock lock(mutex_);
    if (!lost_.ok()) return false;
    if (again.ok()) {
      if (!link_.resume(answer.received)) {
        lock.unlock();
        lose(Status(ErrorCode::kCorrupt, "the server does not have what it had"));
        return false;
      }
      stream_ = std::move((*again)->stream_);
      ++connections_;
      connected_ = Clock::now();
      changed_.notify_all();
      return true;
    }
    why = again.status();
    // The server is there and has no such session, or does not let this client in any more.
    if (why.code() == ErrorCode::kUnavailable || why.code() == ErrorCode::kTimeout) continue;
    lock.unlock();
    lose(why.code() == ErrorCode::kNotFound
             ? Status(ErrorCode::kUnavailable, why.what(), why.advice())
             : why);
    return false;
  }
  lose(Status(
      ErrorCode::kUnavailable,
      fmt::format("the connection was lost and could not be made again ({})", why.to_string()),
      "The step was aborted; when the server can be reached, training goes on from the committed "
      "one."));
  return false;
}

void ClientSession::lose(Status why) {
  why = std::move(why).with_context(
      fmt::format("server {}, device {}", endpoint_.address, endpoint_.device));
  {
    const std::lock_guard lock(mutex_);
    if (!lost_.ok()) return;
    lost_ = why;
    changed_.notify_all();
  }
  events_.on_lost(why);
}

}  // namespace smartinf::serve::wire
