#include "smartinf/serve/metrics/metrics_endpoint.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <list>
#include <optional>
#include <thread>
#include <vector>

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "smartinf/serve/metrics/http_request.h"
#include "smartinf/serve/metrics/listening_socket.h"
#include "smartinf/storage/file_descriptor.h"

namespace smartinf::serve {

using base::Result;
using base::Status;
using storage::FileDescriptor;

namespace {

using Clock = std::chrono::steady_clock;

struct Exchange {
  FileDescriptor socket;
  Clock::time_point deadline;
  std::string request;
  std::string response;  // not empty: being sent
  size_t sent_bytes = 0;
};

class ThreadEndpoint final : public MetricsEndpoint {
 public:
  ThreadEndpoint(const MetricsOptions& options, Sources sources,
                 std::vector<FileDescriptor> listeners, FileDescriptor wake, std::string address)
      : options_(options),
        sources_(std::move(sources)),
        listeners_(std::move(listeners)),
        wake_(std::move(wake)),
        address_(std::move(address)),
        thread_([this](const std::stop_token& stop) { run(stop); }) {
    (void)::pthread_setname_np(thread_.native_handle(), "si-metrics");
  }
  ~ThreadEndpoint() override {
    thread_.request_stop();
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
  }

  const std::string& address() const override { return address_; }

 private:
  void run(const std::stop_token& stop);
  int wait_ms() const;
  void accept_some(int listener);
  /// False: the exchange has ended.
  bool go_on(Exchange& exchange);
  bool receive(Exchange& exchange);
  std::string answer(const HttpRequest& request);

  const MetricsOptions options_;
  const Sources sources_;
  const std::vector<FileDescriptor> listeners_;
  const FileDescriptor wake_;
  const std::string address_;
  std::list<Exchange> exchanges_;  // at most connections_max; of the thread
  Clock::time_point accept_again_{};
  std::jthread thread_;  // the last: it uses all others
};

void ThreadEndpoint::run(const std::stop_token& stop) {
  std::vector<pollfd> polled;
  while (!stop.stop_requested()) {
    const bool accepts = Clock::now() >= accept_again_;
    polled.assign(1, pollfd{wake_.get(), POLLIN, 0});
    for (const FileDescriptor& listener : listeners_) {
      polled.push_back(pollfd{accepts ? listener.get() : -1, POLLIN, 0});
    }
    for (const Exchange& exchange : exchanges_) {
      const short events = exchange.response.empty() ? POLLIN : POLLOUT;
      polled.push_back(pollfd{exchange.socket.get(), events, 0});
    }
    if (::poll(polled.data(), polled.size(), wait_ms()) < 0 && errno != EINTR) return;
    size_t at = 1 + listeners_.size();
    for (auto exchange = exchanges_.begin(); exchange != exchanges_.end(); ++at) {
      const bool ready = polled[at].revents != 0;
      const bool open = (!ready || go_on(*exchange)) && Clock::now() < exchange->deadline;
      exchange = open ? std::next(exchange) : exchanges_.erase(exchange);
    }
    for (size_t i = 0; i < listeners_.size(); ++i) {
      if ((polled[1 + i].revents & POLLIN) != 0) accept_some(listeners_[i].get());
    }
  }
}

int ThreadEndpoint::wait_ms() const {
  std::optional<Clock::time_point> next;
  if (Clock::now() < accept_again_) next = accept_again_;
  for (const Exchange& exchange : exchanges_)
    next = std::min(next.value_or(exchange.deadline), exchange.deadline);
  if (!next) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
  return static_cast<int>(std::max<int64_t>(0, left.count()));
}

/// Of those that all places are taken by, the one that has been there for longest makes room:
/// whoever says nothing keeps nobody waiting. No more at once than leaves some of them there.
void ThreadEndpoint::accept_some(int listener) {
  for (uint32_t i = 0; i <= options_.connections_max / 2; ++i) {
    FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.is_open()) {
      // Out of descriptors or memory: the queue stays readable, so look again a little later.
      const bool nobody = errno == EAGAIN || errno == EWOULDBLOCK;
      if (!nobody && errno != ECONNABORTED && errno != EINTR) {
        accept_again_ = Clock::now() + std::chrono::milliseconds(100);
      }
      return;
    }
    if (exchanges_.size() >= options_.connections_max) exchanges_.pop_front();
    Exchange& exchange = exchanges_.emplace_back();
    exchange.socket = std::move(socket);
    exchange.deadline = Clock::now() + options_.exchange_timeout;
    // What was asked for along with the connection is answered before anybody else comes.
    if (!go_on(exchange)) exchanges_.pop_back();
  }
}

bool ThreadEndpoint::go_on(Exchange& exchange) {
  if (exchange.response.empty() && !receive(exchange)) return false;
  while (exchange.sent_bytes < exchange.response.size()) {
    const ssize_t sent =
        ::send(exchange.socket.get(), exchange.response.data() + exchange.sent_bytes,
               exchange.response.size() - exchange.sent_bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    exchange.sent_bytes += static_cast<size_t>(sent);
  }
  if (exchange.response.empty()) return true;
  // What is unread would make the kernel reset the connection, and the peer lose the response.
  ::shutdown(exchange.socket.get(), SHUT_WR);
  std::array<char, 4096> ignored;
  (void)!::recv(exchange.socket.get(), ignored.data(), ignored.size(), 0);
  return false;
}

bool ThreadEndpoint::receive(Exchange& exchange) {
  std::array<char, 2048> piece;
  const ssize_t got = ::recv(exchange.socket.get(), piece.data(), piece.size(), 0);
  if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (got == 0) return false;
  exchange.request.append(piece.data(), static_cast<size_t>(got));
  const HttpRequest request = parse_http_request(exchange.request);
  if (request.state == HttpRequest::State::kMalformed) {
    exchange.response = http_response(400, "text/plain", "this is no HTTP request\n");
  } else if (request.state == HttpRequest::State::kComplete) {
    exchange.response = answer(request);
  } else if (exchange.request.size() > options_.request_bytes_max) {
    exchange.response = http_response(431, "text/plain", "the request is too long\n");
  }
  return true;
}

std::string ThreadEndpoint::answer(const HttpRequest& request) {
  const bool get = request.method == "GET";
  if (!get && request.method != "HEAD") {
    return http_response(405, "text/plain", "only GET and HEAD\n");
  }
  if (request.path == "/metrics") {
    return http_response(200, "text/plain; version=0.0.4; charset=utf-8", sources_.metrics(), get);
  }
  if (request.path == "/healthz") {
    const Status health = sources_.health();
    return http_response(health.ok() ? 200 : 503, "text/plain; charset=utf-8",
                         health.ok() ? "ok\n" : health.to_string() + "\n", get);
  }
  return http_response(404, "text/plain", "here are /metrics and /healthz\n", get);
}

}  // namespace

Result<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::start(const MetricsOptions& options,
                                                                Sources sources) {
  SI_CHECK(sources.metrics && sources.health, "metrics without sources");
  SI_CHECK(options.connections_max > 0 && options.request_bytes_max > 0, "metrics without room");
  SI_ASSIGN_OR_RETURN(auto listeners, listening_sockets(options.listen, "metrics"));
  FileDescriptor wake(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  std::string address = own_address(listeners.front().get());
  if (!wake.is_open()) return base::errno_status(errno, "cannot wait for requests", options.listen);
  return std::unique_ptr<MetricsEndpoint>(std::make_unique<ThreadEndpoint>(
      options, std::move(sources), std::move(listeners), std::move(wake), std::move(address)));
}

}  // namespace smartinf::serve
