// Tests of a client whose server has a certificate and lies: every command ends with an error,
// memory is neither written where it must not be nor taken without a bound.
#include <cmath>
#include <deque>
#include <limits>

#include "smartinf/base/checksum.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/serve/protocol_fields.h"
#include "smartinf/serve/test_session.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Status;
using base::SubgroupId;
using testing::HasSubstr;
using namespace std::chrono_literals;

/// A server that welcomes everybody and then does what a test says, on the stream's thread.
class HostileServer : public testing::Test {
 protected:
  HostileServer() : layout_(csd::test_layout(base::StateFormat::kF32, 0)) {
    const storage::StoredSubgroup& last = layout_.subgroups.back();
    share_.groups = csd::test_groups(last.first_element + last.count);
    attached_.session = {1, 2};
    attached_.layout = layout_;
    attached_.info.name = "fast0";
    attached_.info.kind = "local";
    attached_.info.slots = 3;
    attached_.standing.state.run = layout_.run;
    attached_.standing.state.device_index = layout_.device_index;
    attached_.standing.state.device_count = layout_.device_count;
    attached_.standing.state.initialized = true;
    const TestTrust& trust = TestTrust::shared();
    ListenOptions options;
    options.address = "localhost:0";
    options.certificate = trust.server.certificate;
    options.key = trust.server.key;
    options.ca = trust.authority.ca();
    listener_ = std::move(*listen(options, [this](Stream& stream, const Peer&) { talk(stream); }));
  }

  void talk(Stream& stream) {
    const auto hello = hear<Hello>(stream);
    if (!hello) return;
    std::function<void(Stream&, uint64_t, const CommandFrame&)> serve;  // which a test may change
    say(stream, Welcome{});
    switch (hello->purpose) {
      case Purpose::kAsk:
        if (const auto answers = answers_; hear<Ask>(stream)) answers(stream);
        return;
      case Purpose::kSnapshot:
        if (hear<OpenSnapshot>(stream)) say(stream, snapshot_);
        (void)hear<SnapshotAsk>(stream);
        return;
      case Purpose::kNewState:
        return;
      case Purpose::kSession:
        if (!hear<Attach>(stream)) return;
        serve = serve_;
        ++attached_times_;
        say(stream, attached_);
        if (ends_at_once_) return;
        while (const auto up = hear<Up>(stream)) {
          if (up->number > 0) ups_ = up->number;
          if (std::holds_alternative<ByeFrame>(up->body)) down(stream, ClosedFrame{});
          const auto* command = std::get_if<CommandFrame>(&up->body);
          if (command != nullptr) serve(stream, up->number, *command);
        }
        return;
    }
  }
  template <typename Message>
  static std::optional<Message> hear(Stream& stream) {
    InFrame frame;
    if (!stream.read(frame).ok()) return std::nullopt;
    auto message = decode<Message>(frame);
    if (!message.ok()) return std::nullopt;
    return std::move(*message);
  }
  template <typename Message>
  static bool say(Stream& stream, const Message& message, Payload payload = {}) {
    return stream.write({encode(message), std::move(payload)});
  }
  template <typename Body>
  bool down(Stream& stream, Body body, Payload payload = {}) {
    return say(stream, Down{++downs_, ups_, std::move(body)}, std::move(payload));
  }

  RemoteDeviceOptions remote() const {
    RemoteDeviceOptions options = test_remote(listener_->port(), "fast0");
    options.remote.reconnect_seconds = 1;
    options.remote.deadline_seconds = 10;
    return options;
  }
  Status create() { return take(source_->create(layout_, share_)); }
  Status open() { return take(source_->open(share_)); }
  Status take(base::Result<std::unique_ptr<csd::Device>> device) {
    if (!device.ok()) return std::move(device).status();
    device_ = std::move(*device);
    driver_.drive(*device_);
    return Status();
  }
  /// Updates all subgroups, with memory for the weights.
  Status update(plan::UpdateMode mode = plan::UpdateMode::kInOrder) {
    csd::Update update;
    update.mode = mode;
    update.scalars = csd::test_scalars(1);
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      weights_.emplace_back(subgroup.count);
      update.updates.push_back({subgroup.id, weights_.back().data(), nullptr});
    }
    return driver_.run(update);
  }

  storage::StoreLayout layout_;
  csd::DeviceShare share_;
  std::deque<std::vector<base::Bf16>> weights_;  // longer than the device, which may write them
  // Words and deeds of the server:
  Attached attached_;
  SnapshotOpened snapshot_;
  std::function<void(Stream&)> answers_;
  std::function<void(Stream&, uint64_t, const CommandFrame&)> serve_ = [](auto&&...) {};
  std::atomic<bool> ends_at_once_{false};
  std::atomic<int> attached_times_{0};
  std::atomic<uint64_t> downs_{0}, ups_{0};

  std::unique_ptr<Listener> listener_;
  std::unique_ptr<csd::DeviceSource> source_ = remote_source({});
  csd::DeviceDriver driver_;
  std::unique_ptr<csd::Device> device_;

  void SetUp() override { source_ = remote_source(remote()); }
};

void expect_corrupt(const Status& status) {
  EXPECT_EQ(status.code(), ErrorCode::kCorrupt) << status.to_string();
  EXPECT_THAT(status.to_string(), HasSubstr("device fast0"));
}

TEST_F(HostileServer, ADeviceIsTheOneThatWasAskedFor) {
  EXPECT_TRUE(create().ok());
  device_.reset();
  attached_.layout.subgroups.front().count += base::kBlockElements;
  expect_corrupt(create());
  attached_.layout = layout_;
  attached_.layout.format = base::StateFormat::kQ8;
  expect_corrupt(create());
}

TEST_F(HostileServer, AStateThatCannotBeIsNotOpened) {
  EXPECT_TRUE(open().ok());
  device_.reset();
  const Attached right = attached_;
  const auto expect_refused = [&](const std::function<void(Attached&)>& lie) {
    attached_ = right;
    lie(attached_);
    expect_corrupt(open());
    snapshot_ = {Status(), attached_.standing.state, attached_.layout, "drive"};
    expect_corrupt(source_->snapshot(storage::ReaderLock::kLeave).status());
    storage::StoreSummary summary;
    summary.state = attached_.standing.state;
    summary.layout = attached_.layout;
    answers_ = [=](Stream& stream) { say(stream, Answer(summary)); };
    expect_corrupt(source_->summarize().status());
  };
  expect_refused([](Attached& a) { a.layout.planes.clear(); });
  expect_refused([](Attached& a) {
    // Their sum is a small one.
    a.layout.subgroups[0].count = a.layout.subgroups[1].count = uint64_t{1} << 63;
  });
  expect_refused(
      [](Attached& a) { a.layout.device_count = a.standing.state.device_count = ~uint32_t{0}; });
  expect_refused([](Attached& a) { a.standing.state.device_index = 7; });
  expect_refused([](Attached& a) { a.standing.state.run.bytes[0] ^= 1; });
  expect_refused([](Attached& a) { a.standing.state.prepared_step = 3; });
}

TEST_F(HostileServer, WhatIsAskedBeforehandIsANumberThatCanBe) {
  for (const double rate : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    answers_ = [=](Stream& stream) { say(stream, Answer(Measured{rate})); };
    expect_corrupt(source_->bandwidth().status());
  }
  storage::StoreState state;
  state.device_count = ~uint32_t{0};
  answers_ = [=](Stream& stream) { say(stream, Answer(Peeked{state})); };
  expect_corrupt(source_->peek().status());
}

TEST_F(HostileServer, ADeviceIsNotOfAnotherRank) {
  attached_.info.of_other_rank = true;
  ASSERT_TRUE(open().ok());
  EXPECT_FALSE(device_->info().of_other_rank) << "the engine would leave it out";
}

TEST_F(HostileServer, ACheckThatDoesNotGoOnEnds) {
  constexpr uint64_t kEnough = 20'000;
  const auto check = [&](const std::function<Answer(uint64_t)>& answer) {
    answers_ = [answer](Stream& stream) {
      for (uint64_t i = 0; i < kEnough && say(stream, answer(i)); ++i) {
      }
    };
    uint64_t visited = 0;
    expect_corrupt(source_->check({}, [&](const storage::StoreFault&) { ++visited; }).status());
    EXPECT_LT(visited, kEnough);
  };
  storage::StoreFault fault;
  fault.status = Status(ErrorCode::kCorrupt, "a block");
  check([](uint64_t) { return Progress{5, 10}; });
  check([](uint64_t i) { return Progress{i % 2, 10}; });
  check([](uint64_t) { return Progress{11, 10}; });
  check([=](uint64_t) { return fault; });
  // And nothing but a check has any.
  answers_ = [=](Stream& stream) {
    while (say(stream, Answer(fault))) {
    }
  };
  expect_corrupt(source_->capacity_bytes().status());
}

TEST_F(HostileServer, WeightsAreThoseOfTheUpdateAndReadyOnce) {
  const auto send_weights = [this](Stream& stream, uint64_t number, size_t index) {
    const auto zeros = std::make_shared<std::vector<std::byte>>(layout_.subgroups[index].count * 2);
    for (uint64_t at = 0; at < zeros->size(); at += kPieceBytes) {
      const auto bytes =
          std::span(*zeros).subspan(at, std::min<uint64_t>(kPieceBytes, zeros->size() - at));
      down(stream, DataFrame{number, static_cast<uint32_t>(index), at, base::checksum(bytes, at)},
           {zeros, bytes});
    }
  };
  const auto expect_refused = [&](const std::function<void(Stream&, uint64_t)>& answer) {
    downs_ = 0;
    serve_ = [this, answer](Stream& stream, uint64_t number, const CommandFrame& command) {
      const auto* message = std::get_if<csd::Message>(&command.body);
      if (message != nullptr && std::holds_alternative<csd::Update>(*message)) {
        answer(stream, number);
      }
      down(stream, DoneFrame{number, {}, {}, {}});
    };
    driver_.ready.clear();
    device_.reset();
    ASSERT_TRUE(open().ok());
    expect_corrupt(update());
    for (const SubgroupId subgroup : driver_.ready) {
      EXPECT_LT(subgroup.value, layout_.subgroups.size());
    }
    EXPECT_LT(driver_.ready.size(), 2u);
    EXPECT_FALSE(driver_.run(csd::Flush{}).ok()) << "and stays so";
  };
  const SubgroupId first = layout_.subgroups[0].id;
  expect_refused([this](Stream& stream, uint64_t number) {
    down(stream, ReadyFrame{number, SubgroupId{1'000'000}, {}});
  });
  expect_refused([=, this](Stream& stream, uint64_t number) {
    send_weights(stream, number, 0);
    down(stream, ReadyFrame{number, first, {}});
    down(stream, ReadyFrame{number, first, {}});
  });
  // Done, and no word of the weights.
  expect_refused([](Stream&, uint64_t) {});
  expect_refused([=, this](Stream& stream, uint64_t number) {
    down(stream, ReadyFrame{number, first, {}});  // none came
  });
  device_.reset();
}

TEST_F(HostileServer, TheStateStaysThatOfTheDevice) {
  serve_ = [this](Stream& stream, uint64_t number, const CommandFrame&) {
    Standing standing = attached_.standing;
    standing.state.device_index = 1'000'000;
    down(stream, DoneFrame{number, {}, {}, standing});
  };
  ASSERT_TRUE(open().ok());
  expect_corrupt(driver_.run(csd::Flush{}));
  EXPECT_EQ(device_->state().device_index, layout_.device_index);
}

TEST_F(HostileServer, AServerThatEndsEveryConnectionIsGivenUp) {
  serve_ = [](Stream& stream, uint64_t, const CommandFrame&) { stream.cancel(); };
  ASSERT_TRUE(open().ok());
  ends_at_once_ = true;
  const Status lost = driver_.run(csd::Flush{});
  EXPECT_EQ(lost.code(), ErrorCode::kUnavailable) << lost.to_string();
  EXPECT_LT(attached_times_, 100) << "with pauses between";
}

TEST_F(HostileServer, WhatIsAnsweredHasCome) {
  serve_ = [](Stream& stream, uint64_t number, const CommandFrame&) {
    say(stream, Down{1, number - 1, DoneFrame{number, {}, {}, {}}});
  };
  ASSERT_TRUE(open().ok());
  expect_corrupt(driver_.run(csd::Flush{}));
}

}  // namespace
}  // namespace smartinf::serve::wire
