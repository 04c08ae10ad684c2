#include "smartinf/serve/acceptor.h"

#include <list>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "smartinf/serve/listening_socket.h"
#include "smartinf/serve/test_proxy.h"

namespace smartinf::serve::wire {
namespace {

using storage::FileDescriptor;

class Acceptors : public testing::Test {
 protected:
  void start(const Acceptor::Options& options) {
    auto made = Acceptor::listen("127.0.0.1:0", options, [this](int socket) {
      const std::lock_guard lock(mutex_);
      passed_.emplace_back(socket);
    });
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    acceptor_ = std::move(*made);
    acceptor_->start();
  }
  /// Connects from this machine's address 127.0.0.`host`; says something or not.
  FileDescriptor connect(bool says, uint8_t host = 1) {
    FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(0x7f000000u + host);
    sockaddr_in to = own;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(acceptor_->port());
    EXPECT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own), 0);
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
    if (says) {
      EXPECT_EQ(::send(socket.get(), "x", 1, MSG_NOSIGNAL), 1);
    }
    return socket;
  }
  size_t passed() {
    const std::lock_guard lock(mutex_);
    return passed_.size();
  }
  bool soon_passed(size_t count) {
    for (int i = 0; i < 2000 && passed() < count; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return passed() == count;
  }
  /// As gRPC writes it.
  static std::string peer_of(const FileDescriptor& socket) {
    return "ipv4:" + own_address(socket.get());
  }
  /// The server has hung up, or does so within seconds.
  static bool ends(const FileDescriptor& socket) {
    pollfd ready{socket.get(), POLLIN, 0};
    char byte = 0;
    return ::poll(&ready, 1, 10'000) == 1 && ::recv(socket.get(), &byte, 1, 0) <= 0;
  }
  static bool stays(const FileDescriptor& socket) {
    pollfd ready{socket.get(), POLLIN, 0};
    return ::poll(&ready, 1, 0) == 0;
  }

  std::mutex mutex_;
  std::list<FileDescriptor> passed_;
  std::unique_ptr<Acceptor> acceptor_;
};

TEST_F(Acceptors, WhoSaysNothingIsNotPassedOnAndMakesRoom) {
  Acceptor::Options options;
  options.silent_max = 3;
  start(options);
  std::list<FileDescriptor> silent;
  for (int i = 0; i < 8; ++i) silent.push_back(connect(false));
  EXPECT_TRUE(ends(silent.front()));
  const FileDescriptor speaks = connect(true);
  EXPECT_TRUE(soon_passed(1));
  EXPECT_TRUE(stays(speaks));
  EXPECT_TRUE(stays(silent.back()));
  // A silent connection may say something later.
  EXPECT_EQ(::send(silent.back().get(), "x", 1, MSG_NOSIGNAL), 1);
  EXPECT_TRUE(soon_passed(2));
}

TEST_F(Acceptors, APartOfARecordIsWorthNoPlace) {
  start({});
  const std::string record = std::string("\x16\x03\x01\x02\x00", 5) + std::string(512, 'h');
  const auto says = [](const FileDescriptor& socket, std::string_view text) {
    EXPECT_EQ(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  };
  std::list<FileDescriptor> parts;
  for (const size_t bytes : {1, 5, 6, 516}) {
    parts.push_back(connect(false));
    says(parts.back(), std::string_view(record).substr(0, bytes));
  }
  const FileDescriptor whole = connect(false);
  says(whole, record);
  EXPECT_TRUE(soon_passed(1));
  EXPECT_TRUE(stays(whole));
  for (const FileDescriptor& part : parts) EXPECT_TRUE(stays(part));
  // Byte by byte it becomes one; who ends within it has said nothing.
  for (const char byte : record.substr(1)) says(parts.front(), {&byte, 1});
  EXPECT_TRUE(soon_passed(2));
  ::shutdown(parts.back().get(), SHUT_WR);
  EXPECT_TRUE(ends(parts.back()));
}

TEST_F(Acceptors, WhoSaysNothingForLongIsHungUpOn) {
  Acceptor::Options options;
  options.silent = std::chrono::milliseconds(50);
  start(options);
  EXPECT_TRUE(ends(connect(false)));
}

TEST_F(Acceptors, WhoIsNotLetInMakesRoomAfterAWhile) {
  Acceptor::Options options;
  options.unknown_max = 2;
  options.unknown = std::chrono::milliseconds(300);
  start(options);
  const FileDescriptor first = connect(true);
  ASSERT_TRUE(soon_passed(1));
  const FileDescriptor second = connect(true);
  ASSERT_TRUE(soon_passed(2));
  acceptor_->use(peer_of(first));
  const FileDescriptor third = connect(true);
  ASSERT_TRUE(soon_passed(3)) << "a client's does not count";
  const FileDescriptor fourth = connect(true);
  EXPECT_TRUE(ends(second)) << "the oldest that is no client's";
  EXPECT_TRUE(soon_passed(4));
  EXPECT_TRUE(stays(first));
  EXPECT_TRUE(stays(third));
}

TEST_F(Acceptors, AFloodOfOneAddressKeepsNoOtherOneOut) {
  Acceptor::Options options;
  options.unknown_max = 4;
  options.unknown = std::chrono::hours(1);
  start(options);
  std::list<FileDescriptor> flood;
  for (size_t i = 0; i < 12; ++i) {
    flood.push_back(connect(true));
    if (i < 4) {  // of several at once the newest goes first
      ASSERT_TRUE(soon_passed(i + 1));
    }
  }
  const FileDescriptor other = connect(true, 2);
  EXPECT_TRUE(soon_passed(5));
  EXPECT_TRUE(ends(flood.front()));
  EXPECT_TRUE(stays(other));
  EXPECT_EQ(passed(), 5u) << "those of the flood wait";
}

TEST_F(Acceptors, AFloodThatSpeaksDropsNobodyOfAnotherAddress) {
  Acceptor::Options options;
  options.silent_max = 4;
  options.unknown_max = 2;
  options.unknown = std::chrono::hours(1);
  start(options);
  std::list<FileDescriptor> flood;
  for (int i = 0; i < 2; ++i) flood.push_back(connect(true, 2));
  ASSERT_TRUE(soon_passed(2));
  const FileDescriptor other = connect(false, 3);  // it is about to speak
  for (int i = 0; i < 20; ++i) flood.push_back(connect(true, 2));
  EXPECT_TRUE(ends(*std::next(flood.begin(), 2)));
  EXPECT_TRUE(stays(other));
  EXPECT_EQ(::send(other.get(), "x", 1, MSG_NOSIGNAL), 1);
  EXPECT_TRUE(soon_passed(3));
}

TEST_F(Acceptors, WhatIsClosedCountsNoMore) {
  Acceptor::Options options;
  options.unknown_max = 1;
  options.unknown = std::chrono::hours(1);
  start(options);
  const FileDescriptor first = connect(true);
  ASSERT_TRUE(soon_passed(1));
  const FileDescriptor second = connect(true);
  {
    const std::lock_guard lock(mutex_);
    passed_.clear();  // as gRPC does
  }
  EXPECT_TRUE(soon_passed(1));
  EXPECT_TRUE(stays(second));
  acceptor_->cut(peer_of(second));
  EXPECT_TRUE(ends(second));
}

TEST_F(Acceptors, AddressesAreChecked) {
  start({});
  const auto listen = [](const std::string& address) {
    return listening_sockets(address, "devices").status();
  };
  EXPECT_EQ(listen("127.0.0.1:" + std::to_string(acceptor_->port())).code(),
            base::ErrorCode::kBusy);
  for (const char* bad : {"", "7443", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536",
                          "::1:7443", "300.0.0.1:1", ":7443", "[]:1", "127.0.0.1:-1"}) {
    EXPECT_EQ(listen(bad).code(), base::ErrorCode::kInvalidArgument) << bad;
  }
  EXPECT_TRUE(listen("[::1]:0").ok() || listen("[::1]:0").code() == base::ErrorCode::kIo);
}

}  // namespace
}  // namespace smartinf::serve::wire
