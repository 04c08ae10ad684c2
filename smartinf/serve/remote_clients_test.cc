// Whom a server lets in, whom a client takes for one, and those who mean harm.
#include <ctime>
#include <fstream>
#include <random>

#include <openssl/ssl.h>
#include <sys/stat.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/csd/local_state.h"
#include "smartinf/serve/conversation.h"
#include "smartinf/serve/header_blocks.h"
#include "smartinf/serve/test_http2.h"
#include "smartinf/serve/test_odd_certificates.h"
#include "smartinf/serve/test_session.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Status;
using testing::HasSubstr;

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
  EXPECT_FALSE(peek_as(another.client("trainer")).ok());
  // A server of another authority is none for the client.
  EXPECT_FALSE(peek_as(TestTrust::shared().client, another.ca()).ok());
  const OddCertificate late{.names = {"trainer"}, .from_s = -2 * 86400, .until_s = -86400};
  EXPECT_FALSE(peek_as(issue_odd(authority(), late)).ok());
  EXPECT_FALSE(peek_as(TestTrust::shared().server).ok()) << "a server's is no client's";
  const Status none = peek_as({"", ""});
  EXPECT_THAT(none.to_string(), HasSubstr("remote.certificate"));
  EXPECT_TRUE(peek_as(TestTrust::shared().client).ok()) << "the server is as before";
}

TEST_F(RemoteClients, OnlyThoseThatTheDeviceIsFor) {
  const Status other = peek_as(authority().client("stranger"));
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
  EXPECT_FALSE(driver_.run(csd::BeginStep{1}).ok());
}

TEST_F(RemoteClients, WhoIsRefusedIsToldWhyBeforeItsStreamEnds) {
  // So slowly that the server looks through its streams meanwhile, which it does each second.
  looked_up_ = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1500)); };
  start_server();
  revoked_ = true;
  EXPECT_THAT(peek_as(TestTrust::shared().client).to_string(), HasSubstr("revoked"));
}

TEST_F(RemoteClients, AnotherVersionIsToldWhatToDo) {
  auto stream =
      connect("localhost:" + std::to_string(server_->port()), TestTrust::shared().options());
  ASSERT_TRUE(stream.ok());
  base::Encoder newer;
  newer(kProtocolMagic, uint32_t{kProtocolVersion + 1}, std::string("what comes after"));
  ASSERT_TRUE((*stream)->write({seal_head(newer.take()), {}}));
  InFrame frame;
  ASSERT_OK((*stream)->read(frame));
  const auto welcome = decode<Welcome>(frame);
  ASSERT_TRUE(welcome.ok());
  EXPECT_THAT(welcome->outcome.to_string(), HasSubstr("Update smartinf on the server"));
}

uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t pages = 0;
  file >> pages >> pages;
  return pages * base::kPageBytes;
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
  const uint64_t before = resident_bytes();
  knock(server_->port(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  knock(server_->port(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  std::mt19937_64 random(7);
  std::string noise(1'000'000, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  knock(server_->port(), noise);
  EXPECT_LT(resident_bytes(), before + (uint64_t{64} << 20));
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

TEST_F(RemoteClients, APackedMessageIsNotUnpacked) {
  Hello hello;
  hello.device = "fast0";
  const std::vector<std::byte> bytes = encode(hello);
  const std::string message(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  EXPECT_TRUE(RawHttp2(server_->port()).is_answered(message, false));
  EXPECT_FALSE(RawHttp2(server_->port()).is_answered(message, true))
      << "a megabyte could become a gigabyte";
}

TEST_F(RemoteClients, AMessageOf4GbEndsAtTheServersMemory) {
  buffer_bytes_ = uint64_t{64} << 20;
  start_server();
  EXPECT_TRUE(peek_as(TestTrust::shared().client).ok());
  const uint64_t before = resident_bytes();
  RawHttp2 raw(server_->port());
  // gRPC takes what comes until its memory is full, and refuses the length only after that.
  EXPECT_LT(raw.send_message(~uint32_t{0}, uint64_t{1} << 30), buffer_bytes_ + (16 << 20));
  EXPECT_TRUE(raw.ended());
  // Within a message: a head of 4 GiB.
  auto stream =
      connect("localhost:" + std::to_string(server_->port()), TestTrust::shared().options());
  ASSERT_TRUE(stream.ok());
  ASSERT_TRUE((*stream)->write({std::vector<std::byte>(64, std::byte{0xff}), {}}));
  InFrame frame;
  EXPECT_FALSE((*stream)->read(frame).ok());
  EXPECT_LT(resident_bytes(), before + 2 * buffer_bytes_);
  EXPECT_EQ(server_->devices().front().memory_bytes, 0u);
  EXPECT_TRUE(peek_as(TestTrust::shared().client).ok());
}

/// Catches what the log says, in memory.
class CaughtLog {
 public:
  CaughtLog() {
    base::set_log_sink([this](base::LogLevel, std::string_view message) { text_ += message; });
  }
  ~CaughtLog() { base::set_log_sink({}); }
  /// While nobody logs.
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

TEST_F(RemoteClients, AFirstMessageIsShort) {
  const CaughtLog log;
  const auto say_hello = [&](size_t name_bytes) {
    auto stream =
        connect("localhost:" + std::to_string(server_->port()), TestTrust::shared().options());
    ASSERT_TRUE(stream.ok());
    Hello hello;
    hello.device = std::string(name_bytes, '\x1b');
    (void)(*stream)->write({encode(hello), {}});
    InFrame frame;
    const Status answer = (*stream)->read(frame);
    const auto welcome = decode<Welcome>(frame);
    EXPECT_TRUE(!answer.ok() || !welcome->outcome.ok());
    EXPECT_LT(frame.bytes(), 4096u) << "it is sent back";
  };
  for (const size_t bytes : {size_t{65}, size_t{3000}, size_t{5000}, size_t{23} << 20}) {
    say_hello(bytes);
  }
  EXPECT_TRUE(soon([&] { return server_->refused() == 4; }));
  server_.reset();
  EXPECT_LT(log.text().size(), 8192u);
  EXPECT_THAT(log.text(), HasSubstr("a message of 24117")) << "refused by its length";
  EXPECT_EQ(log.text().find('\x1b'), std::string::npos);
}

TEST_F(RemoteClients, StreamsThatAreResetEndTheConnection) {
  clients_ = {"trainer", "other"};
  start_server();
  const uint64_t before = resident_bytes();
  RawHttp2 raw(server_->port(), authority().client("other"));
  EXPECT_LT(raw.open_and_reset(200'000), 200'000u);
  EXPECT_TRUE(raw.ended());
  EXPECT_TRUE(peek_as(TestTrust::shared().client).ok()) << "another client";
  EXPECT_LT(resident_bytes(), before + (uint64_t{300} << 20));
  // The client that did it may come again after a while.
  EXPECT_TRUE(soon([&] { return peek_as(authority().client("other")).ok(); }));
}

TEST_F(RemoteClients, FieldsWithoutAnEndEndTheConnection) {
  const uint64_t before = resident_bytes();
  RawHttp2 raw(server_->port());
  EXPECT_LT(raw.send_fields(20'000), 20'000u);
  EXPECT_TRUE(raw.ended());
  EXPECT_LT(resident_bytes(), before + (uint64_t{100} << 20));
  EXPECT_TRUE(peek_as(TestTrust::shared().client).ok());
  EXPECT_TRUE(header_blocks_are_bounded());
}

TEST(RemoteHeaderBlocks, AreBoundedHoweverTheyCome) {
  const auto frame = [](size_t bytes, char type, char flags) {
    std::string text{0, static_cast<char>(bytes >> 8), static_cast<char>(bytes), type, flags};
    return text + std::string(4 + bytes, '\x09');
  };
  const std::string preface(24, 'x');
  const std::string data = frame(16384, 0, 4), ended = frame(1000, 1, 4), open = frame(1000, 1, 0),
                    more = frame(1000, 9, 0), last = frame(1000, 9, 4);
  std::string many = preface;
  for (int i = 0; i < 20; ++i) many += data + ended + open + more + more + last;
  std::string empty = preface + open;
  for (int i = 0; i < 400; ++i) empty += frame(0, 9, 0);
  const std::vector<std::pair<std::string, bool>> all{
      {many, true},
      {preface + open + more + more + more + last, false},
      {preface + frame(4096, 1, 4), false},
      {empty, false}};
  for (const size_t at_once : {size_t{1}, size_t{7}, size_t{4096}, size_t{1} << 20}) {
    for (const auto& [text, good] : all) {
      HeaderBlocks blocks(true);
      bool taken = true;
      for (size_t at = 0; at < text.size(); at += at_once) {
        taken = blocks.take(
            std::as_bytes(std::span(text).subspan(at, std::min(at_once, text.size() - at))));
      }
      EXPECT_EQ(taken, good) << text.size() << " by " << at_once;
      EXPECT_EQ(blocks.take({}), good);
    }
  }
}

TEST_F(RemoteClients, StreamsThatAreUsedAreNotCounted) {
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(peek_as(TestTrust::shared().client).ok()) << i;
}

TEST_F(RemoteClients, ACertificateMustSayForWhomItIs) {
  const auto peek = [&](const std::vector<std::string>& names, bool for_clients) {
    return peek_as(issue_odd(authority(), {names, for_clients}));
  };
  EXPECT_TRUE(peek({"trainer"}, true).ok());
  EXPECT_EQ(peek({"trainer"}, false).code(), ErrorCode::kPermissionDenied);
  EXPECT_EQ(peek({"trainer", "other"}, true).code(), ErrorCode::kPermissionDenied);
  EXPECT_EQ(peek({"other", "trainer"}, true).code(), ErrorCode::kPermissionDenied);
  EXPECT_EQ(peek({"trainer\n"}, true).code(), ErrorCode::kPermissionDenied);
  EXPECT_FALSE(peek({}, true).ok());
}

TEST_F(RemoteClients, AKeyThatOthersMayReadIsNotUsed) {
  const TestCertificate certificate = authority().client("trainer");
  ASSERT_EQ(::chmod(certificate.key.c_str(), 0644), 0);
  const Status open = peek_as(certificate);
  ASSERT_EQ(::chmod(certificate.key.c_str(), 0600), 0);
  EXPECT_EQ(open.code(), ErrorCode::kPermissionDenied);
  EXPECT_THAT(open.to_string(), HasSubstr("chmod 600"));
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
  /// A session with nothing between: of a new state, or of the one that is there.
  void attach(bool fresh = true) {
    RemoteOptions options = TestTrust::shared().options();
    options.deadline_seconds = 20;
    const Endpoint endpoint{"localhost:" + std::to_string(server_->port()), "fast0"};
    auto talk = Conversation::begin(endpoint, options, Purpose::kSession);
    ASSERT_TRUE(talk.ok()) << talk.status().to_string();
    Attach request;
    if (fresh) request.create = layout_;
    request.share = share_;
    const auto attached = talk->ask<Attached>(request);
    ASSERT_TRUE(attached.ok()) << attached.status().to_string();
    talk_.emplace(std::move(*talk));
    number_ = 0;
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
        return closed->outcome;
      }
      const auto* done = std::get_if<DoneFrame>(&down->body);
      if (done == nullptr || done->command != number_) continue;
      done_ = *done;
      return done->outcome;
    }
  }
  Status run(CommandBody body) {
    SI_RETURN_IF_ERROR(say(std::move(body)));
    return answer();
  }
  /// The start of the state, and the gradients of step 1.
  void attach_in_step_1() {
    ASSERT_OK(create());
    device_.reset();
    attach(false);
    ASSERT_OK(run(RecoverTo{0}));
    ASSERT_OK(run(csd::BeginStep{1}));
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      const auto gradient = std::make_shared<std::vector<std::byte>>(subgroup.count * 2);
      const csd::PutGradient body{subgroup.id, 0, subgroup.count, base::DataType::kBf16,
                                  gradient->data()};
      ASSERT_OK(
          talk_->say(Up{++number_, CommandFrame{gradient->size(), base::checksum(*gradient), body}},
                     {gradient, *gradient}));
      ASSERT_OK(answer());
    }
  }
  uint64_t memory_used() { return server_->devices().front().memory_bytes; }

  std::optional<Conversation> talk_;
  uint64_t number_ = 0;
  DoneFrame done_;
  // Targets of pointers, of which only this is sent: that they are there.
  base::Bf16 sample_{};
  float value_ = 0;
};

TEST_F(RemoteHarm, CommandsThatNoEngineSendsAreRefused) {
  attach();
  const base::SubgroupId first = layout_.subgroups.front().id;
  // Targets of pointers are never sent: only that they are there.
  float there = 0;
  std::byte spooled{};
  const auto spool = [&](uint64_t offset, uint64_t bytes) {
    return csd::Message(csd::GetSpool{offset, {&spooled, bytes}});
  };
  csd::Update update;
  update.scalars = csd::test_scalars(1);
  update.updates.push_back({first, &there});
  const std::vector<CommandBody> all{
      csd::Message(update),  // in step 0
      csd::Message(csd::Prefetch{{first}}),
      csd::Message(csd::ReadWeights{first, 1, base::DataType::kF32, &there}),
      csd::Message(csd::ReadState{first, 0, ~uint64_t{0}, {&there, &there, &there, &there}}),
      csd::Message(csd::ReadState{first, 0, 1, {&there}}),
      CacheState{{first, first}},
      CacheState{{base::SubgroupId{77777}}},
      RecoverTo{3},
      spool(~uint64_t{0}, ~uint64_t{0} - 100),
      spool(0, 4096),
      csd::Message(csd::Commit{~uint64_t{0}}),
      csd::Message(csd::Abort{7}),
      csd::Message(csd::Flush{}),
      csd::Message(csd::Prepare{1, std::string(100'000, 'x')}),
      csd::Message(csd::BeginStep{99}),
      csd::Message(csd::WriteState{first, ~uint64_t{0}, {&there, &there, &there, &there}}),
      csd::Message(csd::PutGradient{first, ~uint64_t{0}, 2, base::DataType::kF32, &there})};
  for (const CommandBody& body : all) {
    ASSERT_OK(say(body));
    EXPECT_FALSE(answer().ok()) << body.index();
  }
  // A payload that is announced and is not there: the session ends, the server does not.
  ASSERT_OK(say(csd::Message(csd::PutSpool{}), ~uint64_t{0}));
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
    written =
        stream->write({encode(Up{number, CommandFrame{0, 0, csd::Message(csd::Flush{})}}), {}});
    if (number % 1000 == 0) most = std::max(most, server_->devices().front().memory_bytes);
  }
  EXPECT_FALSE(written) << "it was never given up";
  EXPECT_LE(most, memory_bytes_);
  EXPECT_TRUE(soon([&] { return server_->devices().front().client.empty(); }));
}

TEST_F(RemoteHarm, AnswersThatAreNotAcknowledgedHaveABound) {
  ASSERT_OK(create());
  ASSERT_OK(driver_.run(csd::BeginStep{1}));
  ASSERT_OK(driver_.put_all(layout_, 1));
  ASSERT_OK(driver_.update(layout_, 1));
  const std::string longest(storage::Store::kClientMetadataBytesMax, 'x');
  ASSERT_OK(driver_.run(csd::Prepare{1, longest}));
  ASSERT_OK(driver_.run(csd::Commit{1}));
  device_.reset();
  attach(false);
  ASSERT_OK(run(RecoverTo{1}));
  Status status;
  for (int i = 0; i < 1000 && status.ok(); ++i) status = run(csd::Flush{});
  EXPECT_THAT(status.to_string(), HasSubstr("does not acknowledge"));
}

TEST_F(RemoteHarm, SamplesThatAreNotAcknowledgedAreOfTheMemory) {
  share_.matrices = {{0, 1, elements_, 0, 0}};  // of one row, which is sampled whole
  attach_in_step_1();
  csd::Update update;
  update.scalars = csd::test_scalars(1);
  for (const auto& subgroup : layout_.subgroups) {
    update.updates.push_back({subgroup.id, nullptr, &sample_});
  }
  ASSERT_OK(run(update));
  const uint64_t once = memory_used();
  ASSERT_OK(run(update));
  EXPECT_GE(memory_used(), once + elements_ * sizeof(base::Bf16));
}

TEST_F(RemoteHarm, WhatStaysInMemoryIsAskedForBefore) {
  layout_ = csd::test_layout(base::StateFormat::kF32, 0, 60);
  share_.groups.clear();
  drive_ = std::move(*csd::EmulatedDrive::create(
      *csd::EmulatedDrive::size_for(layout_, storage::Durability::kStep, 0)));
  memory_bytes_ = uint64_t{120} << 20;  // less than the state
  start_server();
  attach();
  CacheState cache;
  for (const auto& subgroup : layout_.subgroups) cache.subgroups.push_back(subgroup.id);
  EXPECT_EQ(run(cache).code(), ErrorCode::kOutOfMemory);
  ASSERT_TRUE(done_.standing);
  EXPECT_EQ(done_.standing->state_cache_bytes, 0u);
}

TEST_F(RemoteHarm, AStepThatCannotBeAbortedIsTheLast) {
  durability_ = storage::Durability::kNone;
  attach_in_step_1();
  csd::Update update;
  update.scalars = csd::test_scalars(1);
  for (const auto& subgroup : layout_.subgroups) {
    update.updates.push_back({subgroup.id});
  }
  ASSERT_OK(run(update));
  EXPECT_FALSE(run(csd::Abort{1}).ok()) << "it is written in place";
  EXPECT_FALSE(run(csd::BeginStep{1}).ok());
  EXPECT_FALSE(run(csd::BeginStep{2}).ok());
}

TEST_F(RemoteHarm, WhatASessionLeftIsOfNobodysMemory) {
  memory_bytes_ = uint64_t{100} << 20;
  slots_ = 1;
  start_server();
  ASSERT_OK(create());
  device_.reset();
  attach(false);
  ASSERT_OK(run(RecoverTo{0}));
  const storage::StoredSubgroup& first = layout_.subgroups.front();
  Status status;
  for (int i = 0; i < 1000 && status.ok(); ++i) {
    status = run(csd::ReadState{first.id, 0, first.count, {&value_, &value_, &value_}});
  }
  EXPECT_EQ(status.code(), ErrorCode::kOutOfMemory);
  ASSERT_OK(talk_->say(Up{++number_, ByeFrame{}}));
  EXPECT_TRUE(answer().ok());
  slots_ = 6;
  EXPECT_TRUE(soon([&] { return server_->devices().front().client.empty(); }));
  ASSERT_OK(open());
}

TEST_F(RemoteHarm, AStateThatWasClosedTakesNothingMore) {
  const base::Scratch scratch;
  create_state_ = [&](const storage::StoreLayout& layout) {
    return csd::create_local_state((scratch.path() / "state").string(), "fast0", layout, {},
                                   storage::RingKind::kThreads);
  };
  start_server();
  const Endpoint endpoint{"localhost:" + std::to_string(server_->port()), "fast0"};
  auto talk = Conversation::begin(endpoint, TestTrust::shared().options(), Purpose::kNewState);
  ASSERT_TRUE(talk.ok()) << talk.status().to_string();
  layout_.copied_step = 3;
  const CreateState create{layout_, storage::Durability::kStep, false};
  ASSERT_OK(talk->ask<StateAnswer>(create).status());
  ASSERT_OK(talk->ask<StateAnswer>(StateAsk(CloseState{})).status());
  const uint64_t bytes = layout_.subgroups.front().count * 3 * sizeof(float);
  for (uint64_t at = 0; at < bytes; at += kPieceBytes / 2) {
    const auto memory = std::make_shared<std::vector<std::byte>>(kPieceBytes / 2);
    const SubgroupPiece piece{0, at, bytes, base::checksum(*memory, at)};
    ASSERT_OK(talk->say(StateAsk(piece), {memory, *memory}));
  }
  EXPECT_FALSE(talk->ask<StateAnswer>(StateAsk(WaitFor{0})).ok());
}

}  // namespace
}  // namespace smartinf::serve::wire
