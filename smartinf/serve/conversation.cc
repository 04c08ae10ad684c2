#include "smartinf/serve/conversation.h"

#include <charconv>

#include <fmt/format.h>

#include "smartinf/base/units.h"

namespace smartinf::serve::wire {

using base::ErrorCode;
using base::Result;
using base::Status;

Result<Endpoint> Endpoint::parse(const std::string& url) {
  const auto wrong = [&](const char* why) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("\"{}\" {}", url, why),
                  "Write grpc://HOST:PORT/DEVICE, e.g. grpc://store.lan:7443/fast0.");
  };
  if (!is_remote(url)) return wrong("is no device of a server");
  const std::string rest = url.substr(kRemoteScheme.size());
  const size_t slash = rest.find('/');
  if (slash == std::string::npos || slash + 1 == rest.size()) return wrong("names no device");
  Endpoint endpoint{rest.substr(0, slash), rest.substr(slash + 1)};
  if (endpoint.device.find('/') != std::string::npos) return wrong("names more than a device");
  const size_t colon = endpoint.address.rfind(':');
  if (colon == std::string::npos || colon == 0) return wrong("names no host and port");
  const std::string port = endpoint.address.substr(colon + 1);
  uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size() || number == 0) {
    return wrong("has a port that is no number from 1 to 65535");
  }
  return endpoint;
}

Result<Conversation> Conversation::begin(const Endpoint& endpoint, const RemoteOptions& options,
                                         Purpose purpose) {
  const std::string where = fmt::format("server {}, device {}", endpoint.address, endpoint.device);
  auto stream = connect(endpoint.address, options);
  if (!stream.ok()) return std::move(stream).status().with_context(where);
  Conversation talk(std::move(*stream), options, where);
  Hello hello;
  hello.purpose = purpose;
  hello.device = endpoint.device;
  SI_RETURN_IF_ERROR(talk.say(hello));
  SI_ASSIGN_OR_RETURN(const Welcome welcome, talk.hear<Welcome>());
  if (welcome.magic != kProtocolMagic) {
    return talk.named(Status(ErrorCode::kMismatch, "what answers there is no smartinf serve"));
  }
  if (welcome.version != kProtocolVersion) {
    return talk.named(
        Status(ErrorCode::kMismatch,
               fmt::format("the server speaks version {} of the protocol, this program version {}",
                           welcome.version, kProtocolVersion),
               welcome.version > kProtocolVersion
                   ? "Install the server's version of smartinf on this machine."
                   : "Install this machine's version of smartinf on the server."));
  }
  if (Status refused = welcome.outcome; !refused.ok()) return talk.named(refused);
  return talk;
}

Status Conversation::ending(const Status& status, bool expired) const {
  if (expired) {
    return named(
        Status(ErrorCode::kTimeout,
               fmt::format("no answer for {}", base::format_seconds(options_.deadline_seconds)),
               "See the server's log and the network between; remote.deadline_seconds "
               "says how long to wait."));
  }
  return named(status.ok() ? Status(ErrorCode::kUnavailable, "the server ended the connection",
                                    "See the server's log.")
                           : status);
}

}  // namespace smartinf::serve::wire
