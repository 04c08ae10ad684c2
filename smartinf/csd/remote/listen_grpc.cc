// The server's end of connections, over gRPC and TLS 1.3.
#include <string_view>

#include <fmt/format.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/method_handler.h>
#include <grpcpp/support/sync_stream.h>
#include <sys/resource.h>

#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/csd/remote/grpc_frame.h"
#include "smartinf/csd/remote/grpc_log.h"
#include "smartinf/csd/remote/grpc_tls.h"
#include "smartinf/csd/remote/stream.h"

namespace smartinf::csd::wire {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using grpc::ByteBuffer;

constexpr uint64_t kPemBytesMax = uint64_t{1} << 20;
constexpr int kHandshakeMs = 10'000;
constexpr int kStreamsOfConnection = 8;
// gRPC's own threads, beside one for each stream.
constexpr int kPollers = 4;

using ServerSide = grpc::ServerReaderWriter<ByteBuffer, ByteBuffer>;

class ServerStream final : public Stream {
 public:
  ServerStream(grpc::ServerContext& context, ServerSide& stream)
      : context_(context), stream_(stream) {}
  bool write(const OutFrame& frame) override { return stream_.Write(to_buffer(frame)); }
  Status read(InFrame& frame) override {
    ByteBuffer buffer;
    if (!stream_.Read(&buffer)) {
      return Status(ErrorCode::kCancelled, "the connection has ended");
    }
    SI_ASSIGN_OR_RETURN(frame, from_buffer(buffer));
    return Status();
  }
  void cancel() override { context_.TryCancel(); }

 private:
  grpc::ServerContext& context_;
  ServerSide& stream_;
};

/// As generated code would be, but that its messages are byte buffers.
class TalkService final : public grpc::Service {
 public:
  explicit TalkService(std::function<void(Stream&, const Peer&)> talk) : talk_(std::move(talk)) {
    AddMethod(new grpc::internal::RpcServiceMethod(
        kMethod, grpc::internal::RpcMethod::BIDI_STREAMING,
        new grpc::internal::BidiStreamingHandler<TalkService, ByteBuffer, ByteBuffer>(
            [](TalkService* service, grpc::ServerContext* context, ServerSide* stream) {
              return service->talk(*context, *stream);
            },
            this)));
  }

 private:
  grpc::Status talk(grpc::ServerContext& context, ServerSide& side) {
    Peer peer;
    peer.address = context.peer();
    const auto auth = context.auth_context();
    const auto property = [&](const char* name) {
      const auto values = auth->FindPropertyValues(name);
      return values.empty() ? std::string() : std::string(values[0].begin(), values[0].end());
    };
    peer.name = property("x509_common_name");
    peer.certificate = property("x509_pem_cert");
    if (!auth->IsPeerAuthenticated() || peer.name.empty()) {
      return {grpc::StatusCode::UNAUTHENTICATED, "no certificate that names a client"};
    }
    ServerStream stream(context, side);
    talk_(stream, peer);
    return grpc::Status::OK;
  }

  const std::function<void(Stream&, const Peer&)> talk_;
};

class GrpcListener final : public Listener {
 public:
  explicit GrpcListener(std::function<void(Stream&, const Peer&)> talk)
      : service_(std::move(talk)) {}
  ~GrpcListener() override {
    if (server_ == nullptr) return;
    // Streams that are left are cancelled; their threads return.
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }

  Status begin(const ListenOptions& options) {
    grpc::SslServerCredentialsOptions tls(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    const auto pem = [](const std::string& path, std::string_view what) {
      return base::read_text_file(path, fmt::format("cannot read the {}", what), kPemBytesMax);
    };
    SI_ASSIGN_OR_RETURN(tls.pem_root_certs, pem(options.ca, "authority's certificate"));
    SI_ASSIGN_OR_RETURN(std::string certificate, pem(options.certificate, "server's certificate"));
    SI_ASSIGN_OR_RETURN(std::string key, pem(options.key, "server's key"));
    tls.pem_key_cert_pairs.push_back({std::move(key), std::move(certificate)});

    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(options.address, grpc::SslServerCredentials(tls), &port);
    builder.RegisterService(&service_);
    builder.SetMaxReceiveMessageSize(static_cast<int>(kFrameBytesMax));
    builder.SetMaxSendMessageSize(-1);
    grpc::ResourceQuota quota("smartinf");
    quota.Resize(options.buffer_bytes);
    quota.SetMaxThreads(static_cast<int>(options.streams_max) + kPollers);
    builder.SetResourceQuota(quota);
    const int keepalive_ms = static_cast<int>(options.keepalive_seconds * 1e3);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_ms);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsOfConnection);
    // Two servers at one address would share its clients out at random.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      return Status(ErrorCode::kIo, fmt::format("cannot listen at {}", options.address),
                    "Another program may have the port, or the address is not this machine's.");
    }
    port_ = static_cast<uint16_t>(port);
    return Status();
  }

  uint16_t port() const override { return port_; }

 private:
  TalkService service_;
  std::unique_ptr<grpc::Server> server_;
  uint16_t port_ = 0;
};

}  // namespace

Result<std::unique_ptr<Listener>> listen(const ListenOptions& options,
                                         std::function<void(Stream&, const Peer&)> talk) {
  SI_RETURN_IF_ERROR(speak_tls13_only());
  take_grpc_log(true);
  auto listener = std::make_unique<GrpcListener>(std::move(talk));
  SI_RETURN_IF_ERROR(listener->begin(options));
  return std::unique_ptr<Listener>(std::move(listener));
}

void prepare_to_listen() {
  // gRPC stops listening when it has no descriptor left for a connection.
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &files);
  }
  (void)speak_tls13_only();  // listen() says what is wrong
}

}  // namespace smartinf::csd::wire
