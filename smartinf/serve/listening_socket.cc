#include "smartinf/serve/listening_socket.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace smartinf::serve {

using base::ErrorCode;
using base::ErrorPlace;
using base::Result;
using base::Status;
using storage::FileDescriptor;

namespace {

Status listen_error(int system_errno, const std::string& address, const std::string& what) {
  if (system_errno == EADDRINUSE) {
    return Status(ErrorCode::kBusy,
                  fmt::format("the port of {} is in use by another process", what),
                  "Choose another port, or stop that process.", ErrorPlace{address, {}, {}, 0});
  }
  return base::errno_status(system_errno, fmt::format("cannot listen for {}", what), address, {},
                            {}, "It must be an address of this machine and a port that is free.");
}

Result<std::pair<std::string, std::string>> split(const std::string& address,
                                                  const std::string& what) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon == std::string::npos ? 0 : colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    host.clear();
  }
  std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 &&
                      port.find_first_not_of("0123456789") == std::string::npos;
  if (host.empty() || !digits || std::stoul(port) > 65535) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("'{}' is no address for {}: expected host:port", address, what),
                  "For example 127.0.0.1:7443, 0.0.0.0:7443 or [::1]:7443.");
  }
  return std::pair(host, port);
}

/// 0, or an errno.
int bind_and_listen(const FileDescriptor& socket, const sockaddr* address, socklen_t length) {
  const int on = 1;
  const int off = 0;
  if (!socket.is_open() ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0) {
    return errno;
  }
  // "[::]" is for IPv4 as well.
  if (address->sa_family == AF_INET6) {
    const auto* wide = reinterpret_cast<const sockaddr_in6*>(address);
    const bool any = IN6_IS_ADDR_UNSPECIFIED(&wide->sin6_addr);
    (void)::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, any ? &off : &on, sizeof(on));
  }
  const bool done =
      ::bind(socket.get(), address, length) == 0 && ::listen(socket.get(), SOMAXCONN) == 0;
  return done ? 0 : errno;
}

}  // namespace

std::string address_text(const sockaddr* address, unsigned length) {
  sockaddr_in narrow{};
  if (address->sa_family == AF_INET6) {
    const auto* wide = reinterpret_cast<const sockaddr_in6*>(address);
    if (IN6_IS_ADDR_V4MAPPED(&wide->sin6_addr)) {
      narrow.sin_family = AF_INET;
      narrow.sin_port = wide->sin6_port;
      std::memcpy(&narrow.sin_addr, wide->sin6_addr.s6_addr + 12, sizeof(narrow.sin_addr));
      address = reinterpret_cast<const sockaddr*>(&narrow);
      length = sizeof(narrow);
    }
  }
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (::getnameinfo(address, length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return {};
  }
  return address->sa_family == AF_INET6 ? fmt::format("[{}]:{}", host.data(), port.data())
                                        : fmt::format("{}:{}", host.data(), port.data());
}

std::string own_address(int socket) {
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&bound), &length) != 0) return {};
  return address_text(reinterpret_cast<const sockaddr*>(&bound), length);
}

Result<std::vector<FileDescriptor>> listening_sockets(const std::string& address,
                                                      const std::string& what) {
  SI_ASSIGN_OR_RETURN(auto parts, split(address, what));
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(parts.first.c_str(), parts.second.c_str(), &wanted, &found);
      error != 0) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("'{}' is no address for {}: {}", address,
                                                           what, ::gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
  std::vector<FileDescriptor> sockets;
  int failed = 0;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    sockaddr_storage place{};
    std::memcpy(&place, one->ai_addr, one->ai_addrlen);
    if (!sockets.empty()) {
      // The port of the first, where any would do; it stands at the same place for both families.
      sockaddr_storage first{};
      socklen_t length = sizeof(first);
      (void)::getsockname(sockets.front().get(), reinterpret_cast<sockaddr*>(&first), &length);
      reinterpret_cast<sockaddr_in*>(&place)->sin_port =
          reinterpret_cast<const sockaddr_in*>(&first)->sin_port;
    }
    FileDescriptor socket(
        ::socket(one->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, one->ai_protocol));
    const int error =
        bind_and_listen(socket, reinterpret_cast<const sockaddr*>(&place), one->ai_addrlen);
    if (error == 0) {
      sockets.push_back(std::move(socket));
    } else if (failed != EADDRINUSE) {
      failed = error;
    }
  }
  // A name may have addresses that this machine has not. A port that was chosen is this server's at
  // all of them.
  const bool shared = failed == EADDRINUSE && parts.second != "0";
  if (sockets.empty() || shared) return listen_error(failed, address, what);
  return sockets;
}

}  // namespace smartinf::serve
