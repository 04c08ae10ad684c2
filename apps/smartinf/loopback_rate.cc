#include "apps/smartinf/loopback_rate.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "smartinf/base/units.h"

#include "apps/smartinf/median.h"

namespace smartinf::apps {
namespace {

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

base::Status failed(const char* what) { return base::errno_status(errno, what, "127.0.0.1"); }

constexpr size_t kMessage = 1 * base::kMiB;
constexpr uint64_t kBytes = 64 * base::kMiB;

/// call: send() or recv() of so many bytes, which may do fewer.
bool pass(const std::function<ssize_t(std::byte*, size_t)>& call) {
  std::vector<std::byte> message(kMessage);
  for (uint64_t done = 0; done < kBytes;) {
    const ssize_t bytes = call(message.data(), std::min<uint64_t>(kMessage, kBytes - done));
    if (bytes <= 0) return false;
    done += static_cast<uint64_t>(bytes);
  }
  return true;
}

}  // namespace

base::Result<double> measure_loopback_rate() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* place = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  const Socket listening(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const Socket one(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (listening.fd() < 0 || one.fd() < 0) return failed("cannot make a socket");
  if (::bind(listening.fd(), place, length) != 0 || ::listen(listening.fd(), 1) != 0 ||
      ::getsockname(listening.fd(), place, &length) != 0) {
    return failed("cannot listen");
  }
  if (::connect(one.fd(), place, length) != 0) return failed("cannot connect");
  const Socket other(::accept4(listening.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  if (other.fd() < 0) return failed("cannot accept a connection");

  std::vector<double> rates;
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::atomic<bool> good = true;
    const auto sends = [&](int fd) {
      const bool all = pass(
          [fd](std::byte* bytes, size_t count) { return ::send(fd, bytes, count, MSG_NOSIGNAL); });
      if (!all) good = false;
    };
    const auto receives = [&](int fd) {
      const bool all =
          pass([fd](std::byte* bytes, size_t count) { return ::recv(fd, bytes, count, 0); });
      if (!all) good = false;
    };
    const auto begin = std::chrono::steady_clock::now();
    {
      std::vector<std::jthread> threads;
      for (const int fd : {one.fd(), other.fd()}) {
        threads.emplace_back(sends, fd);
        threads.emplace_back(receives, fd);
      }
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (!good) return failed("cannot send");
    rates.push_back(2.0 * kBytes / took.count());
  }
  return median(rates);
}

}  // namespace smartinf::apps
