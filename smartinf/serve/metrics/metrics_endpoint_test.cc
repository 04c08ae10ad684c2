#include "smartinf/serve/metrics/metrics_endpoint.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "smartinf/serve/metrics/http_request.h"
#include "smartinf/storage/file_descriptor.h"

namespace smartinf::serve {
namespace {

using base::ErrorCode;
using base::Status;
using storage::FileDescriptor;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;
using State = HttpRequest::State;
using Clock = std::chrono::steady_clock;

TEST(HttpRequest, IsReadAsItComes) {
  const std::string whole = "GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n";
  for (size_t n = 0; n < whole.size(); ++n) {
    EXPECT_EQ(parse_http_request(whole.substr(0, n)).state, State::kIncomplete) << n;
  }
  const HttpRequest request = parse_http_request(whole);
  EXPECT_EQ(request.state, State::kComplete);
  EXPECT_EQ(request.method, "GET");
  EXPECT_EQ(request.path, "/metrics");
  EXPECT_EQ(parse_http_request("GET / HTTP/1.0\r\n\r\n").state, State::kComplete);
}

TEST(HttpRequest, OtherThingsAreMalformed) {
  for (const char* text : {"\x16\x03\x01\x02", "PRI * HTTP/2.0\r\n", "GET\r\n", "GET /\r\n",
                           "GET  / HTTP/1.1\r\n", "GET / HTTP/1.1 x\r\n", " / HTTP/1.1\r\n",
                           "GET http://a/ HTTP/1.1\r\n", "GET / HTTP/9.9\r\n",
                           "GET /\x80 HTTP/1.1\r\n", "GET /\rX HTTP/1.1\r\n", "a\nb", "\r\n\r\n"}) {
    EXPECT_EQ(parse_http_request(text).state, State::kMalformed) << text;
  }
  std::mt19937 draw(7);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes(draw() % 64, '\0');
    for (char& c : bytes) c = static_cast<char>(draw());
    (void)parse_http_request(bytes);
  }
}

class Endpoint : public testing::Test {
 protected:
  void start(MetricsOptions options = {}) {
    options.listen = "127.0.0.1:0";
    auto started = MetricsEndpoint::start(
        options, {[this] { return body_; }, [this] { return healthy_ ? Status() : sick_; }});
    ASSERT_TRUE(started.ok()) << started.status().to_string();
    endpoint_ = std::move(*started);
  }

  FileDescriptor connect() const {
    FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const std::string& text = endpoint_->address();
    address.sin_port = htons(static_cast<uint16_t>(std::stoul(text.substr(text.rfind(':') + 1))));
    const timeval wait{10, 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return socket;
  }
  static void send(const FileDescriptor& socket, std::string_view text) {
    (void)!::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL);
  }
  static std::string receive(const FileDescriptor& socket) {
    std::string all(1 << 20, '\0');
    size_t length = 0;
    while (length < all.size()) {
      const ssize_t got = ::recv(socket.get(), all.data() + length, all.size() - length, 0);
      if (got <= 0) break;
      length += static_cast<size_t>(got);
    }
    return all.substr(0, length);
  }
  std::string ask(std::string_view text) const {
    const FileDescriptor socket = connect();
    send(socket, text);
    return receive(socket);
  }

  std::string body_ = "a 1\n";
  std::atomic<bool> healthy_ = true;
  const Status sick_{ErrorCode::kIo, "a drive failed"};
  std::unique_ptr<MetricsEndpoint> endpoint_;
};

TEST_F(Endpoint, ServesTwoPages) {
  start();
  const std::string metrics = ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(metrics, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(metrics, HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
  EXPECT_THAT(metrics, HasSubstr("Content-Length: 4\r\n"));
  EXPECT_THAT(metrics, EndsWith("\r\n\r\na 1\n"));
  EXPECT_THAT(ask("HEAD /metrics HTTP/1.1\r\n\r\n"), EndsWith("\r\n\r\n"));
  EXPECT_THAT(ask("GET /healthz HTTP/1.1\r\n\r\n"), EndsWith("\r\n\r\nok\n"));
  healthy_ = false;
  const std::string sick = ask("GET /healthz HTTP/1.1\r\n\r\n");
  EXPECT_THAT(sick, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(sick, HasSubstr("a drive failed"));
  EXPECT_THAT(ask("GET / HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(ask("GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(ask("POST /metrics HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(ask("\x16\x03\x01"), StartsWith("HTTP/1.1 400 "));
}

TEST_F(Endpoint, SendsWhatIsLongerThanTheKernelTakesAtOnce) {
  body_ = std::string(900000, 'x');
  start();
  EXPECT_GT(ask("GET /metrics HTTP/1.1\r\n\r\n").size(), 900000u);
}

TEST_F(Endpoint, RequestsAreBounded) {
  start();
  EXPECT_THAT(ask("GET /metrics HTTP/1.1\r\nX: " + std::string(9000, 'y')),
              StartsWith("HTTP/1.1 431 "));
  EXPECT_THAT(ask("GET /" + std::string(9000, 'y')), StartsWith("HTTP/1.1 431 "));
}

TEST_F(Endpoint, WhoIsSilentMakesRoom) {
  MetricsOptions options;
  options.connections_max = 2;
  options.exchange_timeout = std::chrono::hours(1);
  start(options);
  std::vector<FileDescriptor> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(connect());
  const FileDescriptor late = connect();
  send(late, "GET /healthz HTTP/1.1\r\n\r\n");
  EXPECT_THAT(receive(late), EndsWith("ok\n"));
  EXPECT_EQ(receive(silent.front()), "");
}

TEST_F(Endpoint, WhoIsSlowIsCutOff) {
  MetricsOptions options;
  options.exchange_timeout = std::chrono::milliseconds(300);
  start(options);
  const FileDescriptor slow = connect();
  send(slow, "GET /hea");
  EXPECT_EQ(receive(slow), "");
}

TEST_F(Endpoint, AThousandConnectionsAtOnceAreSurvived) {
  MetricsOptions options;
  options.exchange_timeout = std::chrono::milliseconds(50);
  start(options);
  for (int i = 0; i < 1000; ++i) {
    const FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const std::string& text = endpoint_->address();
    address.sin_port = htons(static_cast<uint16_t>(std::stoul(text.substr(text.rfind(':') + 1))));
    (void)::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
    send(socket, "GET ");
  }
  EXPECT_THAT(ask("GET /healthz HTTP/1.1\r\n\r\n"), EndsWith("ok\n"));
}

TEST_F(Endpoint, EndsWhileSomebodyIsConnected) {
  start();
  const FileDescriptor socket = connect();
  const auto began = Clock::now();
  endpoint_.reset();
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
  EXPECT_EQ(receive(socket), "");
}

TEST_F(Endpoint, AddressesAreChecked) {
  start();
  const auto listen = [](const std::string& address) {
    MetricsOptions options;
    options.listen = address;
    return MetricsEndpoint::start(options, {[] { return std::string(); }, [] { return Status(); }})
        .status();
  };
  EXPECT_EQ(listen(endpoint_->address()).code(), ErrorCode::kBusy);
  for (const char* bad : {"", "9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536",
                          "::1:9464", "300.0.0.1:1", ":9464", "[]:1", "127.0.0.1:-1"}) {
    EXPECT_EQ(listen(bad).code(), ErrorCode::kInvalidArgument) << bad;
  }
  EXPECT_TRUE(listen("[::1]:0").ok() || listen("[::1]:0").code() == ErrorCode::kIo);
}

}  // namespace
}  // namespace smartinf::serve
