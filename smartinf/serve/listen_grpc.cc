// The server's end of connections, over gRPC and TLS 1.3.
#include <condition_variable>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/method_handler.h>
#include <grpcpp/support/sync_stream.h>
#include <malloc.h>
#include <sys/resource.h>

#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/serve/acceptor.h"
#include "smartinf/serve/grpc_frame.h"
#include "smartinf/serve/grpc_log.h"
#include "smartinf/serve/grpc_room.h"
#include "smartinf/serve/grpc_tls.h"
#include "smartinf/serve/header_blocks.h"
#include "smartinf/serve/stream.h"
#include "smartinf/serve/token_bucket.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using grpc::ByteBuffer;

constexpr int kHandshakeMs = 10'000;
constexpr int kStreamsOfConnection = 8;
// Limits of malloc: so many arenas, each of which keeps so much.
constexpr int kArenasMax = 16;
constexpr int kMallocKeeps = 4 << 20;
// gRPC's own threads, beside one for each stream.
constexpr int kPollers = 4;

// Streams that a client may open without having been let in by one of them: at once, and a second.
constexpr double kUnknownStreams = 256;
constexpr double kUnknownStreamsPerSecond = 4;
// The first two messages of a stream are read of so many of a client's at once: what it wants, and
// of what model. Nobody knows yet how long they are, and gRPC takes them into memory as a whole.
constexpr uint32_t kFirstMessages = 2;
constexpr uint32_t kReadingMax = 4;
constexpr std::chrono::seconds kReadingWait{20};
// So many that were refused in a row are no client that tries again.
constexpr uint64_t kRefusedMax = 100;

using ServerSide = grpc::ServerReaderWriter<ByteBuffer, ByteBuffer>;

std::string property(const grpc::AuthContext& auth, const char* name) {
  const auto values = auth.FindPropertyValues(name);
  return values.empty() ? std::string() : std::string(values[0].begin(), values[0].end());
}

/// Bounds the streams of a client that end before it was let in: gRPC 1.51 queues every stream that
/// is opened, also one that was reset in the same breath, and its limit of concurrent ones does not
/// count those. Asked before a stream is queued, so that what is refused here takes no memory.
class StreamGate final : public grpc::AuthMetadataProcessor {
 public:
  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& /*metadata*/, grpc::AuthContext* auth,
                       OutputMetadata* /*consumed*/, OutputMetadata* /*response*/) override {
    const std::lock_guard lock(mutex_);
    Client& client = find(property(*auth, kName));
    if (client.streams.take()) return grpc::Status::OK;
    ++client.refused;
    return {grpc::StatusCode::RESOURCE_EXHAUSTED, "too many streams that were not used"};
  }
  /// A stream of the client was let in, and does not count.
  void let_in(const std::string& name) {
    const std::lock_guard lock(mutex_);
    find(name).streams.give_back();
  }
  /// Whether one that was not refused is of a client that floods, which counts anew from there.
  bool floods(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return std::exchange(find(name).refused, 0) > kRefusedMax;
  }

  /// False: too many of the client's streams are being read, for a long time.
  bool begin_reading(const std::string& name) {
    std::unique_lock lock(mutex_);
    Client& client = find(name);
    ++client.waiting;
    const bool may =
        read_.wait_for(lock, kReadingWait, [&] { return client.reading < kReadingMax; });
    --client.waiting;
    if (may) ++client.reading;
    return may;
  }
  void end_reading(const std::string& name) {
    const std::lock_guard lock(mutex_);
    --find(name).reading;
    read_.notify_all();
  }

  static constexpr const char* kName = "x509_common_name";

 private:
  struct Client {
    TokenBucket streams{kUnknownStreams, kUnknownStreamsPerSecond};
    uint64_t refused = 0;
    uint32_t reading = 0;
    uint32_t waiting = 0;
  };
  Client& find(const std::string& name) {
    // Names are those of the authority's certificates; who was quiet for a while is forgotten.
    if (clients_.size() >= kForget) {
      std::erase_if(clients_, [](const auto& one) {
        const Client& client = one.second;
        return client.streams.full() && client.reading + client.waiting == 0;
      });
    }
    return clients_[name];
  }

  static constexpr size_t kForget = 1024;
  std::mutex mutex_;
  std::condition_variable read_;
  std::map<std::string, Client> clients_;
};

class ServerStream final : public Stream {
 public:
  ServerStream(grpc::ServerContext& context, ServerSide& stream, const Peer& peer, StreamGate& gate,
               Acceptor& acceptor)
      : context_(context), stream_(stream), peer_(peer), gate_(gate), acceptor_(acceptor) {}
  ~ServerStream() override { acceptor_.done(use_); }
  bool write(const OutFrame& frame) override { return stream_.Write(to_buffer(frame)); }
  Status read(InFrame& frame, uint64_t bytes_max) override {
    if (messages_ >= kFirstMessages) return read_now(frame, bytes_max);
    ++messages_;
    if (!gate_.begin_reading(peer_.name)) {
      return Status(ErrorCode::kBusy, "too many streams of one client begin at once");
    }
    const Status status = read_now(frame, bytes_max);
    gate_.end_reading(peer_.name);
    return status;
  }
  void cancel() override { context_.TryCancel(); }
  void let_in() override {
    static std::once_flag looked;
    std::call_once(looked, [] {
      if (header_blocks_are_bounded()) return;
      base::log(base::LogLevel::kWarning,
                "this gRPC does not read by OpenSSL's SSL_read: a client can fill the server's "
                "memory with header blocks that do not end");
    });
    gate_.let_in(peer_.name);
    use_ = acceptor_.use(peer_.address);
  }

 private:
  Status read_now(InFrame& frame, uint64_t bytes_max) {
    ByteBuffer buffer;
    if (!stream_.Read(&buffer)) {
      return Status(ErrorCode::kCancelled, "the connection has ended");
    }
    if (buffer.Length() > bytes_max) {
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("a message of {} bytes where {} are the most", buffer.Length(), bytes_max));
    }
    SI_ASSIGN_OR_RETURN(frame, from_buffer(buffer));
    return Status();
  }

  grpc::ServerContext& context_;
  ServerSide& stream_;
  const Peer& peer_;
  StreamGate& gate_;
  Acceptor& acceptor_;
  uint64_t use_ = 0;
  uint32_t messages_ = 0;  // read, or tried to
};

/// The server's method, as generated code would be, but that its messages are byte buffers; and all
/// others, which it does not have.
class TalkService final : public grpc::Service, public grpc::CallbackGenericService {
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

  const std::shared_ptr<StreamGate>& gate() const { return gate_; }
  void set_acceptor(std::unique_ptr<Acceptor> acceptor) { acceptor_ = std::move(acceptor); }
  Acceptor& acceptor() const { return *acceptor_; }

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    (void)cut_off(peer_of(*context));
    return CallbackGenericService::CreateReactor(context);  // says that there is no such method
  }

  grpc::Status talk(grpc::ServerContext& context, ServerSide& side) {
    const Peer peer = peer_of(context);
    if (!context.auth_context()->IsPeerAuthenticated()) {
      return {grpc::StatusCode::UNAUTHENTICATED, "no certificate of a client"};
    }
    if (cut_off(peer) || context.IsCancelled()) return grpc::Status::CANCELLED;
    ServerStream stream(context, side, peer, *gate_, *acceptor_);
    talk_(stream, peer);
    return grpc::Status::OK;
  }

  static Peer peer_of(const grpc::ServerContextBase& context) {
    const auto auth = context.auth_context();
    return {property(*auth, StreamGate::kName), property(*auth, "x509_pem_cert"), context.peer()};
  }

  /// Ends the connection of a client that floods.
  bool cut_off(const Peer& peer) {
    if (!gate_->floods(peer.name)) return false;
    log_rarely("cut off", fmt::format("client {} ({}) opens streams and does not use them: its "
                                      "connection is ended",
                                      peer.name, peer.address));
    acceptor_->cut(peer.address);
    return true;
  }

  const std::function<void(Stream&, const Peer&)> talk_;
  const std::shared_ptr<StreamGate> gate_ = std::make_shared<StreamGate>();
  std::unique_ptr<Acceptor> acceptor_;
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
    const auto credentials = grpc::SslServerCredentials(tls);
    credentials->SetAuthMetadataProcessor(service_.gate());
    using Builder = grpc::ServerBuilder::experimental_type;
    connections_ = builder.experimental().AddExternalConnectionAcceptor(
        Builder::ExternalConnectionType::FROM_FD, credentials);
    builder.RegisterService(&service_);
    builder.RegisterCallbackGenericService(&service_);
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
    // A megabyte of gzip can stand for a gigabyte, which gRPC would take into memory before it is
    // asked how long a message may be.
    builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
    Acceptor::Options bounds;
    bounds.unacknowledged = std::chrono::milliseconds(keepalive_ms);
    SI_ASSIGN_OR_RETURN(
        auto acceptor, Acceptor::listen(options.address, bounds, [this](int socket) {
          grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
          connection.fd = socket;
          connections_->HandleNewConnection(&connection);
        }));
    service_.set_acceptor(std::move(acceptor));
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return Status(ErrorCode::kIo, "gRPC cannot serve with these certificates");
    }
    service_.acceptor().start();
    return Status();
  }

  uint16_t port() const override { return service_.acceptor().port(); }

 private:
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> connections_;
  TalkService service_;  // after it: its acceptor's thread passes connections on
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

Result<std::unique_ptr<Listener>> listen(const ListenOptions& options,
                                         std::function<void(Stream&, const Peer&)> talk) {
  SI_RETURN_IF_ERROR(check_room_for_grpc());
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
  // A server with many threads would keep what each of them has freed: malloc_trim() does not give
  // back the end of a thread's arena, and malloc by itself only from a size that grows with what
  // was freed before.
  (void)::mallopt(M_ARENA_MAX, kArenasMax);
  (void)::mallopt(M_MMAP_THRESHOLD, kMallocKeeps);
  (void)::mallopt(M_TRIM_THRESHOLD, kMallocKeeps);
}

}  // namespace smartinf::serve::wire
