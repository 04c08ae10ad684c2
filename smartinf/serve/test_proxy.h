// A way to a server that can be cut, and that can stand still. For tests.
#pragma once

#include <array>
#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "smartinf/base/check.h"

namespace smartinf::serve::wire {

inline int connect_to(uint16_t port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    ::close(socket);
    return -1;
  }
  return socket;
}

class TestProxy {
 public:
  explicit TestProxy(uint16_t to) : to_(to) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    SI_CHECK(::bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                 ::listen(listener_, 64) == 0,
             "a port for the proxy");
    socklen_t size = sizeof address;
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    acceptor_ = std::jthread([this](const std::stop_token& stop) { accept_all(stop); });
  }
  ~TestProxy() {
    acceptor_.request_stop();
    acceptor_.join();
    cut();
    ::close(listener_);
  }

  uint16_t port() const { return port_; }
  /// Another server.
  void lead_to(uint16_t port) { to_ = port; }
  /// Ends all connections; new ones are let through.
  void cut() {
    std::list<std::unique_ptr<Pair>> pairs;
    {
      const std::lock_guard lock(mutex_);
      pairs.swap(pairs_);
    }
    for (const auto& pair : pairs) {
      ::shutdown(pair->here, SHUT_RDWR);
      ::shutdown(pair->there, SHUT_RDWR);
      pair->cut = true;
    }
  }
  /// Nobody gets through any more, and nobody is told.
  void stall(bool down, bool up) {
    stall_down_ = down;
    stall_up_ = up;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Pair {
    int here = -1, there = -1;
    std::atomic<bool> cut{false};
    std::jthread down, up;
    ~Pair() {
      cut = true;
      if (down.joinable()) down.join();
      if (up.joinable()) up.join();
      ::close(here);
      ::close(there);
    }
  };

  void accept_all(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      pollfd ready{listener_, POLLIN, 0};
      if (::poll(&ready, 1, 20) != 1) continue;
      const int here = ::accept(listener_, nullptr, nullptr);
      const int there = connect_to(to_);
      if (here < 0 || there < 0) {
        if (here >= 0) ::close(here);
        if (there >= 0) ::close(there);
        continue;
      }
      auto pair = std::make_unique<Pair>();
      pair->here = here;
      pair->there = there;
      Pair* raw = pair.get();
      pair->down = std::jthread([this, raw] { pump(*raw, raw->here, raw->there, stall_down_); });
      pair->up = std::jthread([this, raw] { pump(*raw, raw->there, raw->here, stall_up_); });
      const std::lock_guard lock(mutex_);
      pairs_.push_back(std::move(pair));
    }
  }
  void pump(Pair& pair, int from, int to, const std::atomic<bool>& stalled) {
    std::array<char, 65536> buffer;
    while (!pair.cut) {
      pollfd ready{from, POLLIN, 0};
      if (stalled) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        continue;
      }
      if (::poll(&ready, 1, 20) != 1) continue;
      const ssize_t got = ::recv(from, buffer.data(), buffer.size(), 0);
      if (got <= 0) break;
      bytes_ += static_cast<uint64_t>(got);
      for (ssize_t sent = 0; sent < got && !pair.cut;) {
        const ssize_t some =
            ::send(to, buffer.data() + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
        if (some <= 0) break;
        sent += some;
      }
    }
    ::shutdown(from, SHUT_RDWR);
    ::shutdown(to, SHUT_RDWR);
  }

  std::atomic<uint16_t> to_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::atomic<bool> stall_down_{false}, stall_up_{false};
  std::atomic<uint64_t> bytes_{0};
  std::mutex mutex_;
  std::list<std::unique_ptr<Pair>> pairs_;
  std::jthread acceptor_;
};

}  // namespace smartinf::serve::wire
