// The client's end of a connection, over gRPC and TLS.
#include <atomic>
#include <mutex>

#include <fmt/format.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/sync_stream.h>

#include "smartinf/base/file.h"
#include "smartinf/serve/certificates/certificates.h"
#include "smartinf/serve/grpc_frame.h"
#include "smartinf/serve/grpc_log.h"
#include "smartinf/serve/grpc_room.h"
#include "smartinf/serve/grpc_tls.h"
#include "smartinf/serve/stream.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using grpc::ByteBuffer;

Status status_of(const grpc::Status& ended) {
  ErrorCode code = ErrorCode::kUnavailable;
  std::string advice = "Check that smartinf serve runs there, and the network between.";
  switch (ended.error_code()) {
    case grpc::StatusCode::OK:
      return Status(ErrorCode::kUnavailable, "the server ended the connection",
                    "See the server's log.");
    case grpc::StatusCode::CANCELLED:
      return Status(ErrorCode::kUnavailable, "the connection was broken off");
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
      code = ErrorCode::kPermissionDenied;
      advice = "See the certificates of [remote] and the server's log.";
      break;
    case grpc::StatusCode::UNIMPLEMENTED:
      code = ErrorCode::kMismatch;
      advice = "What answers there is no smartinf serve, or one of another version.";
      break;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      advice = "The server has too much to do, or the model's description is too long for it.";
      break;
    default:
      break;
  }
  std::string what = ended.error_message();
  if (what.find("SSL") != std::string::npos || what.find("TLS") != std::string::npos ||
      what.find("handshake") != std::string::npos || what.find("tsi") != std::string::npos) {
    advice =
        "The certificates may not fit (expired, of another authority, or another host's): "
        "see those of [remote], and the server's log.";
  }
  return Status(code, "no connection: " + what, advice);
}

class ClientStream final : public Stream {
 public:
  ClientStream(std::shared_ptr<grpc::Channel> channel, CredentialFiles files)
      : files_(std::move(files)),
        channel_(std::move(channel)),
        method_(kMethod, grpc::internal::RpcMethod::BIDI_STREAMING, channel_),
        stream_(grpc::internal::ClientReaderWriterFactory<ByteBuffer, ByteBuffer>::Create(
            channel_.get(), method_, &context_)) {}
  ~ClientStream() override {
    cancel();
    finish();
  }

  bool write(const OutFrame& frame) override {
    const std::lock_guard lock(write_mutex_);
    return !finished_ && stream_->Write(to_buffer(frame));
  }
  Status read(InFrame& frame, uint64_t /*bytes_max*/) override {
    ByteBuffer buffer;
    if (!finished_ && stream_->Read(&buffer)) {
      SI_ASSIGN_OR_RETURN(frame, from_buffer(buffer));
      return Status();
    }
    // A stream that the server has ended has its status by now, and keeps it.
    cancel();
    finish();
    return explained(status_of(ended_));
  }
  void cancel() override { context_.TryCancel(); }

 private:
  /// Explains a handshake that failed, of which gRPC says only that: certificates that cannot fit
  /// are found here.
  Status explained(Status ended) const {
    if (ended.code() != ErrorCode::kUnavailable) return ended;
    const Status own = read_credentials(files_, CertificateRole::kClient).status();
    const bool why =
        own.code() == ErrorCode::kMismatch || own.code() == ErrorCode::kFailedPrecondition;
    return why ? own : ended;
  }
  /// Not while somebody writes.
  void finish() {
    const std::lock_guard lock(write_mutex_);
    if (finished_) return;
    ended_ = stream_->Finish();
    finished_ = true;
  }

  const CredentialFiles files_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::internal::RpcMethod method_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<ByteBuffer, ByteBuffer>> stream_;
  std::mutex write_mutex_;
  std::atomic<bool> finished_{false};
  grpc::Status ended_;
};

Result<std::string> pem(const std::string& path, const char* what, const char* key) {
  if (path.empty()) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("no {} is given for devices of other machines", what),
        fmt::format("Set remote.{0} in the recipe, or --remote-{0} where a command has that flag "
                    "(smartinf certificates makes it).",
                    key));
  }
  return base::read_text_file(path, fmt::format("cannot read the {}", what), kPemBytesMax);
}

}  // namespace

bool has_transport() { return true; }

Result<std::unique_ptr<Stream>> connect(const std::string& address, const RemoteOptions& options) {
  SI_RETURN_IF_ERROR(check_room_for_grpc());
  take_grpc_log(false);
  SI_RETURN_IF_ERROR(speak_tls13_only());
  grpc::SslCredentialsOptions tls;
  SI_ASSIGN_OR_RETURN(tls.pem_root_certs, pem(options.ca, "authority's certificate", "ca"));
  SI_ASSIGN_OR_RETURN(tls.pem_cert_chain,
                      pem(options.certificate, "client's certificate", "certificate"));
  SI_ASSIGN_OR_RETURN(tls.pem_private_key, pem(options.key, "client's key", "key"));
  SI_RETURN_IF_ERROR(check_key_mode(options.key));
  grpc::ChannelArguments arguments;
  const int keepalive_ms = static_cast<int>(options.keepalive_seconds * 1e3);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_ms);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);  // as a server's
  // A connection for each stream: one that is full holds up no other.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kFrameBytesMax));
  arguments.SetMaxSendMessageSize(-1);
  auto channel = grpc::CreateCustomChannel(address, grpc::SslCredentials(tls), arguments);
  return std::unique_ptr<Stream>(std::make_unique<ClientStream>(
      std::move(channel), CredentialFiles{options.certificate, options.key, options.ca}));
}

}  // namespace smartinf::serve::wire
