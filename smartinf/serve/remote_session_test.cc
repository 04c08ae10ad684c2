// Tests of a session when the network, the server, or a client behaves badly.
#include <mutex>

#include "smartinf/serve/client_session.h"
#include "smartinf/serve/test_session.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Status;
using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

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
  ASSERT_OK(driver_.run(csd::BeginStep{1}));
  ASSERT_OK(driver_.put_all(layout_, 1));
  ASSERT_OK(driver_.update(layout_, 1));
  ASSERT_OK(driver_.prepare(1));
  proxy_->stall(false, true);
  csd::Command commit{csd::Commit{1}};
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
  ASSERT_OK(driver_.run(csd::BeginStep{1}));
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

TEST_F(RemoteSession, ACommandThatIsRefusedBeforeAllOfItHasComeEndsNothingElse) {
  Attach request;
  request.create = layout_;
  request.share = share_;
  Attached answer;
  auto attached =
      ClientSession::attach(*Endpoint::parse(remote().url), remote().remote, request, answer);
  ASSERT_TRUE(attached.ok()) << attached.status().to_string();
  ClientSession& session = **attached;
  std::mutex mutex;
  std::vector<Status> answers;
  const auto note = [&](const Status& status) {
    const std::lock_guard lock(mutex);
    answers.push_back(status);
  };
  session.start({[&](const Down& down, const InFrame&) {
                   if (const auto* done = std::get_if<DoneFrame>(&down.body)) {
                     session.done(0);
                     note(done->outcome);
                   }
                   return Status();
                 },
                 note});
  const auto answered = [&](size_t count) {
    return soon([&] {
      const std::lock_guard lock(mutex);
      return answers.size() >= count;
    });
  };
  // A Flush has no payload; of this one some is not sent when the server says so.
  const auto memory = std::make_shared<std::vector<std::byte>>(uint64_t{32} << 20);
  ASSERT_TRUE(session.wait_for_room(0).ok());
  ASSERT_TRUE(session.send(csd::Message(csd::Flush{}),
                           std::vector<Payload>(4, Payload{memory, *memory}), [](uint64_t) {}));
  ASSERT_TRUE(answered(1));
  EXPECT_EQ(answers[0].code(), ErrorCode::kInvalidArgument) << answers[0].to_string();
  for (size_t more = 2; more < 4; ++more) {
    ASSERT_TRUE(session.wait_for_room(0).ok());
    ASSERT_TRUE(session.send(csd::Message(csd::Abort{0}), {}, [](uint64_t) {}));
    ASSERT_TRUE(answered(more));
    EXPECT_TRUE(answers[more - 1].ok()) << answers[more - 1].to_string();
  }
  session.close();
}

TEST_F(RemoteSession, AServerThatWasStartedAgainHasTheCommittedStep) {
  ASSERT_OK(create());
  ASSERT_OK(step(1));
  ASSERT_OK(driver_.run(csd::BeginStep{2}));
  ASSERT_OK(driver_.put_all(layout_, 2));
  start_server();
  const Status lost = driver_.update(layout_, 2);
  EXPECT_EQ(lost.code(), ErrorCode::kUnavailable) << lost.to_string();
  EXPECT_THAT(lost.to_string(), AllOf(HasSubstr("localhost"), HasSubstr("fast0")));
  EXPECT_EQ(driver_.run(csd::Abort{2}).code(), ErrorCode::kUnavailable) << "and stays so";
  ASSERT_OK(open());
  EXPECT_EQ(device_->state().committed_step, 1u);
  ASSERT_OK(step(2));
  expect_state_after(2);
}

TEST_F(RemoteSession, StoppingSaysWhatBecameOfTheStep) {
  ASSERT_OK(create());
  ASSERT_OK(step(1));
  ASSERT_OK(driver_.run(csd::BeginStep{2}));
  const std::vector<std::string> words = server_->stop();
  ASSERT_EQ(words.size(), 1u);
  EXPECT_THAT(words.front(), AllOf(HasSubstr("fast0"), HasSubstr("trainer"),
                                   HasSubstr("step 2 was aborted"), HasSubstr("step 1")));
  EXPECT_EQ(driver_.update(layout_, 2).code(), ErrorCode::kUnavailable);
  start_server();
  ASSERT_OK(open());
  ASSERT_OK(driver_.run(csd::BeginStep{2}));
  ASSERT_OK(driver_.put_all(layout_, 2));
  ASSERT_OK(driver_.update(layout_, 2));
  ASSERT_OK(driver_.prepare(2));
  EXPECT_THAT(server_->stop().front(), HasSubstr("step 2 is prepared"));
}

TEST_F(RemoteSession, ASecondClientIsToldWhoIsThere) {
  clients_ = {"trainer", "other"};
  start_server();
  ASSERT_OK(create());
  const TestCertificate other = TestTrust::shared().authority.client("other");
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
  ASSERT_OK(driver_.run(csd::BeginStep{2}));
  // Behind another proxy: this one's client is gone.
  proxy_->stall(true, true);
  const TestCertificate other = TestTrust::shared().authority.client("other");
  RemoteDeviceOptions options = test_remote(server_->port(), "fast0");
  options.remote.certificate = other.certificate;
  options.remote.key = other.key;
  const auto second = remote_source(options);
  EXPECT_EQ(second->open(share_).status().code(), ErrorCode::kBusy);
  std::unique_ptr<csd::Device> device;
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
  const Status lost = driver_.run(csd::Prepare{2, ""});
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

TEST_F(RemoteSession, AClientThatWasKilledWhileItMadeAStateMayBeginAgain) {
  source_ = remote_source(remote());
  auto device = source_->create(layout_, share_);
  ASSERT_TRUE(device.ok()) << device.status().to_string();
  const auto again = remote_source(test_remote(server_->port(), "fast0"));
  EXPECT_EQ(again->erase().code(), ErrorCode::kBusy) << "it is there";
  proxy_->stall(true, true);
  ASSERT_TRUE(soon([&] { return !server_->devices().front().attached; }));
  EXPECT_TRUE(again->erase().ok());
  EXPECT_FALSE(drive_->holds_store());
  EXPECT_TRUE(again->create(layout_, share_).ok());
  proxy_->cut();
  proxy_->stall(false, false);
}

/// A state that others have committed, or whose training is away for a moment, is not deleted so.
TEST_F(RemoteSession, ACommittedStateIsNotDeletedUnderItsSession) {
  ASSERT_OK(create());
  ASSERT_OK(step(1));
  proxy_->stall(true, true);
  ASSERT_TRUE(soon([&] { return !server_->devices().front().attached; }));
  const auto again = remote_source(test_remote(server_->port(), "fast0"));
  EXPECT_EQ(again->erase().code(), ErrorCode::kBusy);
  proxy_->cut();
  proxy_->stall(false, false);
  ASSERT_OK(step(2));
  expect_state_after(2);
}

TEST_F(RemoteSession, ANewStateThatIsGivenUpIsDeleted) {
  source_ = remote_source(remote());
  auto device = source_->create(layout_, share_);
  ASSERT_TRUE(device.ok()) << device.status().to_string();
  device->reset();
  ASSERT_TRUE(soon([&] { return server_->devices().front().client.empty(); }));
  EXPECT_FALSE(drive_->holds_store());
}

}  // namespace
}  // namespace smartinf::serve::wire
