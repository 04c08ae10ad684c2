// The client's side of the streams on which one question is asked at a time. Every wait has the
// recipe's deadline; every failure names server and device.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "smartinf/serve/protocol_fields.h"
#include "smartinf/serve/stream.h"

namespace smartinf::serve::wire {

/// Threads: one at a time.
class Conversation {
 public:
  /// Connects and says what for. Errors: kUnavailable, kTimeout, kMismatch (other version), what
  /// the server says (kPermissionDenied, kNotFound, ...).
  static base::Result<Conversation> begin(const Endpoint& endpoint, const RemoteOptions& options,
                                          Purpose purpose);

  template <typename Message>
  base::Status say(const Message& message, Payload payload = {}) {
    const Deadline deadline(*stream_, options_.deadline_seconds);
    if (stream_->write({encode(message), std::move(payload)})) return base::Status();
    InFrame frame;
    return ending(stream_->read(frame), deadline.expired());
  }
  template <typename Message>
  base::Result<Message> hear(InFrame* with_payload = nullptr) {
    InFrame frame;
    {
      const Deadline deadline(*stream_, options_.deadline_seconds);
      const base::Status status = stream_->read(frame);
      if (!status.ok()) return ending(status, deadline.expired());
    }
    auto message = decode<Message>(frame);
    if (!message.ok()) return named(std::move(message).status());
    if (with_payload != nullptr) *with_payload = std::move(frame);
    return message;
  }
  /// Both; an answer with an `outcome` that is a failure is that failure.
  template <typename Answered, typename Asked>
  base::Result<Answered> ask(const Asked& question, Payload payload = {},
                             InFrame* with_payload = nullptr) {
    SI_RETURN_IF_ERROR(say(question, std::move(payload)));
    SI_ASSIGN_OR_RETURN(Answered answer, hear<Answered>(with_payload));
    if (base::Status failure = answer.outcome; !failure.ok()) return named(failure);
    return answer;
  }

  std::unique_ptr<Stream> take_stream() && { return std::move(stream_); }
  base::Status named(base::Status status) const { return std::move(status).with_context(where_); }

 private:
  Conversation(std::unique_ptr<Stream> stream, RemoteOptions options, std::string where)
      : stream_(std::move(stream)), options_(std::move(options)), where_(std::move(where)) {}
  base::Status ending(const base::Status& status, bool expired) const;

  std::unique_ptr<Stream> stream_;
  RemoteOptions options_;
  std::string where_;  // "server host:port, device name"
};

}  // namespace smartinf::serve::wire
