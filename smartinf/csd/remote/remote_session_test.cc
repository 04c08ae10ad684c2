// What happens to a session when the network, the server, or a client behaves badly.
#include <chrono>
#include <ctime>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>

#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/remote/conversation.h"
#include "smartinf/csd/remote/test_proxy.h"
#include "smartinf/csd/remote/test_server.h"
#include "smartinf/csd/test_device.h"
#include "smartinf/csd/test_model.h"

namespace smartinf::csd::wire {
namespace {

using base::ErrorCode;
using base::Status;
using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

/// Waits for what must happen soon.
template <typename Condition>
bool soon(const Condition& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(5ms);
  }
  return false;
}

class RemoteSession : public testing::Test {
 protected:
  RemoteSession() : layout_(test_layout(base::StateFormat::kF32, 0)) {
    const storage::StoredSubgroup& last = layout_.subgroups.back();
    elements_ = last.first_element + last.count;
    share_.groups = test_groups(elements_);
    drive_ = std::move(
        *EmulatedDrive::create(*EmulatedDrive::size_for(layout_, storage::Durability::kStep, 0)));
    start_server();
  }

  LocalDeviceOptions local() const {
    LocalDeviceOptions options;
    options.name = "fast0";
    options.threads = 2;
    options.slots = 3;
    options.store.io_bytes = 256 * 1024;
    options.groups = share_.groups;
    return options;
  }
  ServedDevice served() {
    const TestSource::Functions functions{
        [this](const storage::StoreLayout& layout, const DeviceShare&) {
          return create_emulated_device(local(), layout, *drive_);
        },
        [this](const DeviceShare&) { return open_emulated_device(local(), *drive_); },
        [this] { return drive_->summarize(); }, [this] { drive_->erase(); }};
    ServedDevice device;
    device.name = "fast0";
    device.memory_bytes = memory_bytes_;
    device.clients = clients_;
    device.source = [functions](const SourceWishes&) {
      return base::Result<std::unique_ptr<DeviceSource>>(
          std::make_unique<TestSource>("fast0", functions));
    };
    return device;
  }
  void start_server() {
    server_.reset();
    ServerOptions options = test_server_options({served()});
    options.lease_seconds = lease_seconds_;
    options.revoked = [this](const Peer& peer) { return revoked_ && peer.name == "trainer"; };
    server_ = start_test_server(std::move(options));
    if (proxy_ == nullptr) {
      proxy_ = std::make_unique<TestProxy>(server_->port());
    } else {
      proxy_->lead_to(server_->port());
    }
  }
  RemoteDeviceOptions remote() const {
    RemoteDeviceOptions options = test_remote(proxy_->port(), "fast0");
    options.remote.keepalive_seconds = 1;
    return options;
  }
  Status create() {
    source_ = remote_source(remote());
    auto device = source_->create(layout_, share_);
    if (!device.ok()) return std::move(device).status();
    device_ = std::move(*device);
    driver_.drive(*device_);
    return driver_.make_start(layout_);
  }
  Status open() {
    device_.reset();
    source_ = remote_source(remote());
    auto device = source_->open(share_);
    if (!device.ok()) return std::move(device).status();
    device_ = std::move(*device);
    driver_.drive(*device_);
    return device_->recover_to(device_->state().committed_step);
  }
  Status step(uint64_t number) {
    SI_RETURN_IF_ERROR(driver_.run(BeginStep{number}));
    SI_RETURN_IF_ERROR(driver_.put_all(layout_, number));
    SI_RETURN_IF_ERROR(driver_.update(layout_, number));
    return driver_.finish_step(number);
  }
  void expect_state_after(uint64_t steps) {
    ReferenceModel reference(layout_, share_.groups);
    for (uint64_t number = 1; number <= steps; ++number) {
      reference.step(number, base::DataType::kBf16, base::DataType::kBf16);
    }
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      std::vector<float> master(layout_.subgroups[i].count);
      ReadState read;
      read.subgroup = layout_.subgroups[i].id;
      read.count = layout_.subgroups[i].count;
      read.planes[0] = master.data();
      const Status status = driver_.run(read);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_TRUE(master == reference.plane(i, 0)) << "subgroup " << i;
    }
  }

  std::vector<std::string> clients_{"trainer"};
  uint64_t memory_bytes_ = uint64_t{1} << 30;
  double lease_seconds_ = 30;
  std::atomic<bool> revoked_{false};
  storage::StoreLayout layout_;
  uint64_t elements_ = 0;
  DeviceShare share_;
  DeviceDriver driver_;
  std::unique_ptr<EmulatedDrive> drive_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<TestProxy> proxy_;
  std::unique_ptr<DeviceSource> source_;
  std::unique_ptr<Device> device_;
};

#define ASSERT_OK(expression)                         \
  do {                                                \
    const Status status_ = (expression);              \
    ASSERT_TRUE(status_.ok()) << status_.to_string(); \
  } while (false)

TEST_F(RemoteSession, GoesOnAfterBreaks) {
  ASSERT_OK(create());
  ASSERT_OK(step(1));
  std::atomic<bool> done{false};
  std::jthread breaker([&] {
    // Some way into what follows the last break, however slow the machine is.
    for (uint64_t cut_at = proxy_->bytes() + 300'000; !done; std::this_thread::sleep_for(1ms)) {
      if (proxy_->bytes() < cut_at) continue;
      proxy_->cut();
      cut_at = proxy_->bytes() + 700'000;
    }
  });
  Status status;
  for (uint64_t number = 2; number <= 6 && status.ok(); ++number) status = step(number);
  done = true;
  breaker.join();
  ASSERT_OK(status);
  expect_state_after(6);
  EXPECT_GT(server_->devices().front().connections, 1u) << "nothing was broken";
  EXPECT_EQ(server_->devices().front().commits, 7u) << "each is done once";
}

TEST_F(RemoteSession, AReplyThatWasLostIsGivenAgain) {
  ASSERT_OK(create());
  ASSERT_OK(driver_.run(BeginStep{1}));
  ASSERT_OK(driver_.put_all(layout_, 1));
  ASSERT_OK(driver_.update(layout_, 1));
  ASSERT_OK(driver_.prepare(1));
  proxy_->stall(false, true);
  Command commit{Commit{1}};
  driver_.start(commit);
  ASSERT_TRUE(soon([&] { return server_->devices().front().commits == 2; }));
  proxy_->cut();
  proxy_->stall(false, false);
  ASSERT_OK(driver_.wait_for(commit));
  EXPECT_EQ(device_->state().committed_step, 1u);
  EXPECT_EQ(server_->devices().front().commits, 2u);
}

TEST_F(RemoteSession, AConnectionThatStandsStillIsGivenUp) {
  ASSERT_OK(create());
  ASSERT_OK(driver_.run(BeginStep{1}));
  proxy_->stall(true, true);
  std::jthread heals([&] {
    std::this_thread::sleep_for(4s);
    proxy_->cut();
    proxy_->stall(false, false);
  });
  ASSERT_OK(driver_.put_all(layout_, 1));
  ASSERT_OK(driver_.update(layout_, 1));
  ASSERT_OK(driver_.finish_step(1));
  expect_state_after(1);
}

TEST_F(RemoteSession, AServerThatWasStartedAgainHasTheCommittedStep) {
  ASSERT_OK(create());
  ASSERT_OK(step(1));
  ASSERT_OK(driver_.run(BeginStep{2}));
  ASSERT_OK(driver_.put_all(layout_, 2));
  start_server();
  const Status lost = driver_.update(layout_, 2);
  EXPECT_EQ(lost.code(), ErrorCode::kUnavailable) << lost.to_string();
  EXPECT_THAT(lost.to_string(), AllOf(HasSubstr("localhost"), HasSubstr("fast0")));
  EXPECT_EQ(driver_.run(Abort{2}).code(), ErrorCode::kUnavailable) << "and stays so";
  ASSERT_OK(open());
  EXPECT_EQ(device_->state().committed_step, 1u);
  ASSERT_OK(step(2));
  expect_state_after(2);
}

TEST_F(RemoteSession, StoppingSaysWhatBecameOfTheStep) {
  ASSERT_OK(create());
  ASSERT_OK(step(1));
  ASSERT_OK(driver_.run(BeginStep{2}));
  const std::vector<std::string> words = server_->stop();
  ASSERT_EQ(words.size(), 1u);
  EXPECT_THAT(words.front(), AllOf(HasSubstr("fast0"), HasSubstr("trainer"),
                                   HasSubstr("step 2 was aborted"), HasSubstr("step 1")));
  EXPECT_EQ(driver_.update(layout_, 2).code(), ErrorCode::kUnavailable);
  start_server();
  ASSERT_OK(open());
  ASSERT_OK(driver_.run(BeginStep{2}));
  ASSERT_OK(driver_.put_all(layout_, 2));
  ASSERT_OK(driver_.update(layout_, 2));
  ASSERT_OK(driver_.prepare(2));
  EXPECT_THAT(server_->stop().front(), HasSubstr("step 2 is prepared"));
}

TEST_F(RemoteSession, ASecondClientIsToldWhoIsThere) {
  clients_ = {"trainer", "other"};
  start_server();
  ASSERT_OK(create());
  const TestCertificate other = TestTrust::shared().authority.issue({.name = "other"});
  RemoteDeviceOptions options = remote();
  options.remote.certificate = other.certificate;
  options.remote.key = other.key;
  const auto second = remote_source(options);
  const Status busy = second->open(share_).status();
  EXPECT_EQ(busy.code(), ErrorCode::kBusy);
  EXPECT_THAT(busy.to_string(), HasSubstr("client trainer"));
  EXPECT_EQ(second->erase().code(), ErrorCode::kBusy);
  EXPECT_EQ(second->snapshot(storage::ReaderLock::kLeave).status().code(), ErrorCode::kBusy);
  EXPECT_TRUE(second->peek().ok()) << "anybody may look";
  device_.reset();
  EXPECT_TRUE(second->open(share_).ok());
}

TEST_F(RemoteSession, AClientThatVanishesLeavesALeaseThatExpires) {
  lease_seconds_ = 1;
  clients_ = {"trainer", "other"};
  start_server();
  ASSERT_OK(create());
  ASSERT_OK(step(1));
  ASSERT_OK(driver_.run(BeginStep{2}));
  // Behind another proxy: this one's client is gone.
  proxy_->stall(true, true);
  const TestCertificate other = TestTrust::shared().authority.issue({.name = "other"});
  RemoteDeviceOptions options = test_remote(server_->port(), "fast0");
  options.remote.certificate = other.certificate;
  options.remote.key = other.key;
  const auto second = remote_source(options);
  EXPECT_EQ(second->open(share_).status().code(), ErrorCode::kBusy);
  std::unique_ptr<Device> device;
  EXPECT_TRUE(soon([&] {
    auto opened = second->open(share_);
    if (opened.ok()) device = std::move(*opened);
    return device != nullptr;
  }));
  ASSERT_NE(device, nullptr);
  EXPECT_EQ(device->state().committed_step, 1u);
  device.reset();
  proxy_->cut();
  proxy_->stall(false, false);
  const Status lost = driver_.run(Prepare{2, ""});
  EXPECT_EQ(lost.code(), ErrorCode::kUnavailable) << lost.to_string();
  EXPECT_THAT(lost.to_string(), HasSubstr("committed one"));
}

TEST_F(RemoteSession, AClientThatWasKilledMayComeAgainAtOnce) {
  ASSERT_OK(create());
  ASSERT_OK(step(1));
  RemoteDeviceOptions options = test_remote(server_->port(), "fast0");
  const auto again = remote_source(options);
  EXPECT_EQ(again->open(share_).status().code(), ErrorCode::kBusy) << "it is there";
  proxy_->stall(true, true);
  ASSERT_TRUE(soon([&] { return !server_->devices().front().attached; }));
  EXPECT_TRUE(again->open(share_).ok());
  proxy_->cut();
  proxy_->stall(false, false);
}

TEST_F(RemoteSession, ANewStateThatIsGivenUpIsDeleted) {
  source_ = remote_source(remote());
  auto device = source_->create(layout_, share_);
  ASSERT_TRUE(device.ok()) << device.status().to_string();
  device->reset();
  ASSERT_TRUE(soon([&] { return server_->devices().front().client.empty(); }));
  EXPECT_FALSE(drive_->holds_store());
}

// ---- Who is let in.

class RemoteClients : public RemoteSession {
 protected:
  Status peek_as(const TestCertificate& certificate, const std::string& ca = {}) {
    RemoteDeviceOptions options = test_remote(server_->port(), "fast0");
    options.remote.certificate = certificate.certificate;
    options.remote.key = certificate.key;
    if (!ca.empty()) options.remote.ca = ca;
    options.remote.deadline_seconds = 20;
    return remote_source(options)->peek().status();
  }
  TestAuthority& authority() { return TestTrust::shared().authority; }
};

TEST_F(RemoteClients, OnlyWithACertificateOfTheAuthority) {
  EXPECT_TRUE(peek_as(TestTrust::shared().client).ok());
  const base::Scratch scratch;
  TestAuthority another(scratch.path().string());
  EXPECT_FALSE(peek_as(another.issue({.name = "trainer"})).ok());
  // A server of another authority is none for the client.
  EXPECT_FALSE(peek_as(TestTrust::shared().client, another.ca()).ok());
  EXPECT_FALSE(peek_as(authority().issue(
                           {.name = "late", .days = 1, .from_s = std::time(nullptr) - 3 * 86400}))
                   .ok());
  EXPECT_FALSE(peek_as(TestTrust::shared().server).ok()) << "a server's is no client's";
  const Status none = peek_as({"", ""});
  EXPECT_THAT(none.to_string(), HasSubstr("remote.certificate"));
  EXPECT_TRUE(peek_as(TestTrust::shared().client).ok()) << "the server is as before";
}

TEST_F(RemoteClients, OnlyThoseThatTheDeviceIsFor) {
  const Status other = peek_as(authority().issue({.name = "stranger"}));
  EXPECT_EQ(other.code(), ErrorCode::kPermissionDenied) << other.to_string();
  RemoteDeviceOptions options = test_remote(server_->port(), "secret");
  const Status unknown = remote_source(options)->peek().status();
  EXPECT_EQ(unknown.code(), ErrorCode::kPermissionDenied) << "and no word whether it is there";
  EXPECT_TRUE(soon([&] { return server_->refused() == 2; }));
}

TEST_F(RemoteClients, NotWhoseCertificateWasRevoked) {
  ASSERT_OK(create());
  revoked_ = true;
  EXPECT_THAT(peek_as(TestTrust::shared().client).to_string(), HasSubstr("revoked"));
  // Also where a session is open.
  EXPECT_TRUE(soon([&] { return server_->devices().front().client.empty(); }));
  EXPECT_FALSE(driver_.run(BeginStep{1}).ok());
}

TEST_F(RemoteClients, AnotherVersionIsToldWhatToDo) {
  auto stream =
      connect("localhost:" + std::to_string(server_->port()), TestTrust::shared().options());
  ASSERT_TRUE(stream.ok());
  Writer newer;
  newer(kProtocolMagic, uint32_t{kProtocolVersion + 1}, std::string("what comes after"));
  ASSERT_TRUE((*stream)->write({seal_head(newer.take()), {}}));
  InFrame frame;
  ASSERT_OK((*stream)->read(frame));
  const auto welcome = decode<Welcome>(frame);
  ASSERT_TRUE(welcome.ok());
  EXPECT_THAT(welcome->outcome.status().to_string(), HasSubstr("Update smartinf on the server"));
}

/// Sends bytes to the server's port and waits until it hangs up.
void knock(uint16_t port, const std::string& bytes) {
  const int socket = connect_to(port);
  ASSERT_GE(socket, 0);
  (void)!::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  std::array<char, 4096> answer;
  pollfd ready{socket, POLLIN, 0};
  while (::poll(&ready, 1, 12'000) == 1 && ::recv(socket, answer.data(), answer.size(), 0) > 0) {
  }
  ::close(socket);
}

TEST_F(RemoteClients, WhatIsNoTlsIsHungUpOn) {
  knock(server_->port(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  knock(server_->port(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  std::mt19937_64 random(7);
  std::string noise(1'000'000, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  knock(server_->port(), noise);
  EXPECT_TRUE(peek_as(TestTrust::shared().client).ok());
}

bool shakes_hands(uint16_t port, int version) {
  SSL_CTX* context = SSL_CTX_new(TLS_client_method());
  SSL_CTX_set_min_proto_version(context, version);
  SSL_CTX_set_max_proto_version(context, version);
  const TestTrust& trust = TestTrust::shared();
  SSL_CTX_use_certificate_file(context, trust.client.certificate.c_str(), SSL_FILETYPE_PEM);
  SSL_CTX_use_PrivateKey_file(context, trust.client.key.c_str(), SSL_FILETYPE_PEM);
  const unsigned char protocols[] = {2, 'h', '2'};
  SSL_CTX_set_alpn_protos(context, protocols, sizeof protocols);
  SSL* connection = SSL_new(context);
  const int socket = connect_to(port);
  SSL_set_fd(connection, socket);
  const bool done = SSL_connect(connection) == 1;
  SSL_free(connection);
  SSL_CTX_free(context);
  ::close(socket);
  return done;
}

TEST_F(RemoteClients, OnlyTls13) {
  EXPECT_TRUE(shakes_hands(server_->port(), TLS1_3_VERSION));
  EXPECT_FALSE(shakes_hands(server_->port(), TLS1_2_VERSION));
}

TEST_F(RemoteClients, AThousandConnectionsKeepNobodyOut) {
  std::vector<int> sockets;
  for (int i = 0; i < 1000; ++i) {
    sockets.push_back(connect_to(server_->port()));
    ASSERT_GE(sockets.back(), 0) << i;
  }
  EXPECT_TRUE(peek_as(TestTrust::shared().client).ok());
  for (const int socket : sockets) ::close(socket);
}

// ---- A client that was let in and means harm.

class RemoteHarm : public RemoteSession {
 protected:
  /// A session with nothing between.
  void attach() {
    RemoteOptions options = TestTrust::shared().options();
    options.deadline_seconds = 20;
    const Endpoint endpoint{"localhost:" + std::to_string(server_->port()), "fast0"};
    auto talk = Conversation::begin(endpoint, options, Purpose::kSession);
    ASSERT_TRUE(talk.ok()) << talk.status().to_string();
    Attach request;
    request.create = layout_;
    request.share = share_;
    const auto attached = talk->ask<Attached>(request);
    ASSERT_TRUE(attached.ok()) << attached.status().to_string();
    talk_.emplace(std::move(*talk));
  }
  Status say(CommandBody body, uint64_t payload_bytes = 0) {
    return talk_->say(Up{++number_, CommandFrame{payload_bytes, 0, std::move(body)}});
  }
  /// The answer to the last command.
  Status answer() {
    for (;;) {
      auto down = talk_->hear<Down>();
      if (!down.ok()) return std::move(down).status();
      if (const auto* closed = std::get_if<ClosedFrame>(&down->body)) {
        return closed->outcome.status();
      }
      const auto* done = std::get_if<DoneFrame>(&down->body);
      if (done != nullptr && done->command == number_) return done->outcome.status();
    }
  }

  std::optional<Conversation> talk_;
  uint64_t number_ = 0;
};

TEST_F(RemoteHarm, CommandsThatNoEngineSendsAreRefused) {
  attach();
  const base::SubgroupId first = layout_.subgroups.front().id;
  UpdateWanted update;
  update.scalars = test_scalars(1);
  update.updates.push_back({first, true, false});
  const std::vector<CommandBody> all{update,  // in step 0
                                     Prefetch{{first}},
                                     ReadWanted{first, 1, base::DataType::kF32},
                                     StateWanted{first, 0, ~uint64_t{0}, ~0u},
                                     StateWanted{first, 0, 1, 1},
                                     CacheState{{first, first}},
                                     CacheState{{base::SubgroupId{77777}}},
                                     RecoverTo{3},
                                     SpoolWanted{~uint64_t{0}, ~uint64_t{0} - 100},
                                     SpoolWanted{0, 4096},
                                     Commit{~uint64_t{0}},
                                     Abort{7},
                                     Flush{},
                                     Prepare{1, std::string(100'000, 'x')},
                                     BeginStep{99},
                                     StateGiven{first, ~uint64_t{0}, ~0u, ~0u, true},
                                     Gradient{first, ~uint64_t{0}, 2, base::DataType::kF32}};
  for (const CommandBody& body : all) {
    ASSERT_OK(say(body));
    EXPECT_FALSE(answer().ok()) << body.index();
  }
  // A payload that is announced and is not there: the session ends, the server does not.
  ASSERT_OK(say(SpoolGiven{0}, ~uint64_t{0}));
  EXPECT_FALSE(answer().ok());
  talk_.reset();
  lease_seconds_ = 1;
  start_server();
  EXPECT_TRUE(remote_source(remote())->peek().ok());
}

TEST_F(RemoteHarm, WhoDoesNotReadIsGivenUpWithinTheMemory) {
  attach();
  // More than the connection holds by itself.
  const std::unique_ptr<Stream> stream = std::move(*talk_).take_stream();
  uint64_t most = 0;
  bool written = true;
  for (uint64_t number = 1; number <= 2'000'000 && written; ++number) {
    written = stream->write({encode(Up{number, CommandFrame{0, 0, Flush{}}}), {}});
    if (number % 1000 == 0) most = std::max(most, server_->devices().front().memory_bytes);
  }
  EXPECT_FALSE(written) << "it was never given up";
  EXPECT_LE(most, memory_bytes_);
  EXPECT_TRUE(soon([&] { return server_->devices().front().client.empty(); }));
}

}  // namespace
}  // namespace smartinf::csd::wire
