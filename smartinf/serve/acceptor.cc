#include "smartinf/serve/acceptor.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <ranges>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "smartinf/serve/listening_socket.h"
#include "smartinf/serve/token_bucket.h"

namespace smartinf::serve::wire {

using base::Result;
using base::Status;
using storage::FileDescriptor;

namespace {

// Accepted before what has come is looked at.
constexpr int kAtOnce = 64;
constexpr std::chrono::milliseconds kLook{1000};
// While somebody waits for a place.
constexpr std::chrono::milliseconds kLookSoon{10};
constexpr std::chrono::seconds kTrim{10};

/// 0: it is closed.
uint64_t cookie_of(int socket) {
  uint64_t cookie = 0;
  socklen_t length = sizeof(cookie);
  return ::getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0 ? cookie : 0;
}

enum class Said : uint8_t { kNothing, kPart, kEnough };

/// Whether what a connection has sent is worth a place: a handshake's first record as a whole, or
/// what is none. Of a part epoll says no more until the rest is there.
Said what_it_said(int socket) {
  constexpr size_t kHead = 5;
  constexpr uint8_t kHandshake = 22;
  std::array<uint8_t, kHead> head{};
  const ssize_t came = ::recv(socket, head.data(), head.size(), MSG_PEEK);
  if (came <= 0) return Said::kNothing;
  int wanted = kHead;
  if (head[0] != kHandshake) {
    wanted = 1;
  } else if (came == kHead) {
    wanted += head[3] << 8 | head[4];
  }
  int waiting = 0;
  const bool enough = ::ioctl(socket, FIONREAD, &waiting) != 0 || waiting >= wanted;
  if (enough) wanted = 1;
  (void)::setsockopt(socket, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof(wanted));
  return enough ? Said::kEnough : Said::kPart;
}

bool hung_up(int socket) {
  pollfd looked{socket, POLLRDHUP, 0};
  return ::poll(&looked, 1, 0) == 1;
}

/// Text that address_text() would give for gRPC's "ipv6:%5Bfe80::1%25eth0%5D:5" or
/// "ipv4:1.2.3.4:5", both without the interface of a link's own address.
std::string plain_peer(std::string_view peer) {
  if (peer.starts_with("ipv4:") || peer.starts_with("ipv6:")) peer.remove_prefix(5);
  std::string text;
  for (size_t i = 0; i < peer.size(); ++i) {
    const std::string_view escaped = peer.substr(i, 3);
    if (escaped == "%5B" || escaped == "%5D") {
      text += escaped == "%5B" ? '[' : ']';
      i += 2;
    } else {
      text += peer[i];
    }
  }
  const size_t interface = text.find('%');
  const size_t end = text.find(']');
  if (interface < end && end != std::string::npos) text.erase(interface, end - interface);
  return text;
}

/// Host of an address: of IPv6 the first half: who has one has all of them.
std::string host_of(const sockaddr_storage& address, const std::string& text) {
  if (address.ss_family == AF_INET6 && text.starts_with('[')) {
    const auto& wide = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    return {reinterpret_cast<const char*>(wide.s6_addr), 8};
  }
  return text.substr(0, text.rfind(':'));
}

/// With what has come and was not read, which can be megabytes.
void reset(int socket, uint64_t cookie) {
  // Held while it is looked at: who owns it may close it meanwhile, and its number be another's.
  const FileDescriptor held(::fcntl(socket, F_DUPFD_CLOEXEC, 0));
  if (!held.is_open() || cookie_of(held.get()) != cookie) return;
  sockaddr nobody{};
  nobody.sa_family = AF_UNSPEC;
  if (::connect(held.get(), &nobody, sizeof nobody) != 0) ::shutdown(held.get(), SHUT_RDWR);
}

}  // namespace

Acceptor::Acceptor(const Options& options, std::function<void(int)> pass_on)
    : options_(options), pass_on_(std::move(pass_on)) {}

Acceptor::~Acceptor() {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

Result<std::unique_ptr<Acceptor>> Acceptor::listen(const std::string& address,
                                                   const Options& options,
                                                   std::function<void(int)> pass_on) {
  SI_ASSIGN_OR_RETURN(auto listeners, listening_sockets(address, "devices"));
  Options within = options;
  // The drives need some, too.
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    within.silent_max = std::min<size_t>(within.silent_max, files.rlim_cur / 4);
    within.unknown_max = std::min<size_t>(within.unknown_max, files.rlim_cur / 4);
  }
  std::unique_ptr<Acceptor> acceptor(new Acceptor(within, std::move(pass_on)));
  SI_RETURN_IF_ERROR(acceptor->begin(std::move(listeners)));
  return acceptor;
}

Status Acceptor::begin(std::vector<FileDescriptor> listeners) {
  listeners_ = std::move(listeners);
  poll_ = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = FileDescriptor(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const auto watch = [&](int socket) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = next_number_++;
    return ::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, socket, &event) == 0;
  };
  bool watched = watch(wake_.get());  // number 0; the listeners are 1 and on
  for (const FileDescriptor& listener : listeners_) {
    // Accepted sockets inherit it.
    const int on = 1;
    const auto bound = static_cast<unsigned>(options_.unacknowledged.count());
    (void)::setsockopt(listener.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    (void)::setsockopt(listener.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &bound, sizeof(bound));
    watched = watched && watch(listener.get());
  }
  if (!watched) return base::errno_status(errno, "cannot wait for connections", {});
  const std::string own = own_address(listeners_.front().get());
  port_ = static_cast<uint16_t>(std::stoul(own.substr(own.rfind(':') + 1)));
  return Status();
}

void Acceptor::start() {
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  (void)::pthread_setname_np(thread_.native_handle(), "si-acceptor");
}

void Acceptor::run(const std::stop_token& stop) {
  std::array<epoll_event, 256> events;
  while (!stop.stop_requested()) {
    const auto wait = ready_.empty() ? kLook : kLookSoon;
    const int came =
        ::epoll_wait(poll_.get(), events.data(), events.size(), static_cast<int>(wait.count()));
    for (int i = 0; i < came; ++i) {
      const uint64_t number = events[static_cast<size_t>(i)].data.u64;
      if (number > 0 && number <= listeners_.size()) {
        accept_some(listeners_[number - 1].get());
        continue;
      }
      const auto found = silent_.find(number);
      if (found == silent_.end()) continue;
      const Said said = what_it_said(found->second.socket.get());
      const bool more = (events[static_cast<size_t>(i)].events & (EPOLLRDHUP | EPOLLHUP)) == 0;
      if (said == Said::kEnough) {
        ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, found->second.socket.get(), nullptr);
        ready_.insert(silent_.extract(found));
      } else if (said == Said::kNothing || !more) {
        silent_.erase(found);
      }
    }
    for (Connections* waiting : {&silent_, &ready_}) {
      std::erase_if(*waiting, [&](const auto& one) {
        return Clock::now() - one.second.since > options_.silent;
      });
    }
    pass_on_ready();
    // Memory of what has ended, some time ago by now, goes back to the system: malloc keeps it.
    if (trim_at_ && Clock::now() > *trim_at_) {
      ::malloc_trim(0);
      trim_at_.reset();
    }
  }
}

void Acceptor::accept_some(int listener) {
  for (int i = 0; i < kAtOnce; ++i) {
    sockaddr_storage address{};
    socklen_t length = sizeof(address);
    FileDescriptor socket(::accept4(listener, reinterpret_cast<sockaddr*>(&address), &length,
                                    SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.is_open()) {
      const bool nobody = errno == EAGAIN || errno == EWOULDBLOCK;
      if (nobody || errno == ECONNABORTED || errno == EINTR) return;
      // Out of descriptors: those of who waits are the first to be had.
      if (silent_.empty() && ready_.empty()) {
        std::this_thread::sleep_for(kLookSoon);
      } else {
        hang_up_some();
      }
      return;
    }
    if (silent_.size() + ready_.size() >= options_.silent_max) hang_up_some();
    Connection connection;
    const std::string text = address_text(reinterpret_cast<const sockaddr*>(&address), length);
    connection.peer = plain_peer(text);
    connection.host = host_of(address, text);
    connection.since = Clock::now();
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = next_number_;
    if (::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, socket.get(), &event) != 0) continue;
    connection.socket = std::move(socket);
    silent_.emplace(next_number_++, std::move(connection));
  }
}

/// The oldest ones that wait, of the host that has most of them: an eighth of its own, so that a
/// flood is not counted for each connection of it.
void Acceptor::hang_up_some() {
  std::map<std::string_view, size_t> waiting_of;
  for (const Connections* waiting : {&silent_, &ready_}) {
    for (const auto& [number, connection] : *waiting) ++waiting_of[connection.host];
  }
  const auto most =
      std::ranges::max_element(waiting_of, {}, [](const auto& one) { return one.second; });
  const std::string host(most->first);
  size_t left = std::max<size_t>(1, most->second / 8);
  for (auto silent = silent_.begin(), ready = ready_.begin(); left > 0;) {
    const bool first =
        ready == ready_.end() || (silent != silent_.end() && silent->first < ready->first);
    Connections& from = first ? silent_ : ready_;
    auto& next = first ? silent : ready;
    if (next->second.host != host) {
      ++next;
      continue;
    }
    next = from.erase(next);
    --left;
  }
}

void Acceptor::pass_on_ready() {
  std::unique_lock lock(mutex_);
  forget_closed();
  std::map<std::string, size_t> unknown_of;  // each host
  size_t unknown = 0;
  for (const auto& [number, connection] : passed_) {
    if (connection.uses > 0) continue;
    ++unknown_of[connection.host];
    ++unknown;
  }
  while (!ready_.empty()) {
    auto next = std::prev(ready_.end());
    if (unknown >= options_.unknown_max) {
      // Addresses with the fewest connections go first: a flood from one address keeps no other one
      // out. Of one address the newest: those of a flood stay, and whoever means it comes when they
      // are there.
      const auto has = [&](const auto& one) {
        const auto found = unknown_of.find(one.second.host);
        return found == unknown_of.end() ? 0 : found->second;
      };
      next = std::prev(std::ranges::min_element(ready_ | std::views::reverse, {}, has).base());
    }
    if (hung_up(next->second.socket.get())) {  // a handshake with nobody
      ready_.erase(next);
      continue;
    }
    if (unknown >= options_.unknown_max) {
      if (!make_room(next->second.host, unknown_of)) return;
      --unknown;
    }
    ++unknown;
    auto node = ready_.extract(next);
    Connection& connection = node.mapped();
    const int socket = connection.socket.release();
    connection.passed = socket;
    connection.cookie = cookie_of(socket);
    connection.since = Clock::now();
    ++unknown_of[connection.host];
    passed_.insert(std::move(node));
    lock.unlock();  // a stream may begin within
    pass_on_(socket);
    lock.lock();
  }
}

/// Ends one that no client uses, of the host that has most of them.
bool Acceptor::make_room(const std::string& host, std::map<std::string, size_t>& unknown_of) {
  const auto most =
      std::ranges::max_element(unknown_of, {}, [](const auto& one) { return one.second; });
  auto oldest = passed_.end();
  for (auto one = passed_.begin(); one != passed_.end(); ++one) {
    const Connection& connection = one->second;
    if (connection.uses > 0 || connection.host != most->first) continue;
    if (oldest == passed_.end() || connection.since < oldest->second.since) oldest = one;
  }
  if (oldest == passed_.end()) return false;  // a client uses it by now
  const bool fair = most->second > unknown_of[host] + 1;
  if (!fair && Clock::now() - oldest->second.since < options_.unknown) return false;
  log_rarely("places", fmt::format("{}: its connection, which no client uses, made room for others",
                                   oldest->second.peer));
  reset(oldest->second.passed, oldest->second.cookie);
  passed_.erase(oldest);
  if (!trim_at_) trim_at_ = Clock::now() + kTrim;
  --most->second;
  return true;
}

void Acceptor::forget_closed() {
  for (auto one = passed_.begin(); one != passed_.end();) {
    const Connection& connection = one->second;
    if (cookie_of(connection.passed) == connection.cookie) {
      ++one;
      continue;
    }
    if (!connection.used) {
      log_rarely(
          "connections without a client",
          fmt::format("{}: its connection ended before a client was let in: no certificate of "
                      "the authority, or no handshake at all",
                      connection.peer));
    }
    one = passed_.erase(one);
    if (!trim_at_) trim_at_ = Clock::now() + kTrim;
  }
}

/// The connection that was passed on from this address; of two the newer one is open.
Acceptor::Connections::iterator Acceptor::passed(const std::string& peer) {
  const std::string plain = plain_peer(peer);
  auto found = passed_.end();
  for (auto one = passed_.begin(); one != passed_.end(); ++one) {
    if (one->second.peer == plain) found = one;
  }
  return found;
}

uint64_t Acceptor::use(const std::string& peer) {
  const std::lock_guard lock(mutex_);
  const auto found = passed(peer);
  if (found == passed_.end()) return 0;
  ++found->second.uses;
  found->second.used = true;
  return found->first;
}

void Acceptor::done(uint64_t use) {
  const std::lock_guard lock(mutex_);
  if (const auto found = passed_.find(use); found != passed_.end()) --found->second.uses;
}

void Acceptor::cut(const std::string& peer) {
  const std::lock_guard lock(mutex_);
  const auto found = passed(peer);
  if (found != passed_.end()) reset(found->second.passed, found->second.cookie);
}

}  // namespace smartinf::serve::wire
