#include "smartinf/engine/device_replies.h"

#include <atomic>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::engine {
namespace {

using std::chrono::milliseconds;

/// Keeps what it is sent. When it is looked at for the n-th time, it moves a byte or answers.
class Reluctant final : public csd::Device {
 public:
  explicit Reluctant(std::string name) { info_.name = std::move(name); }

  const csd::DeviceInfo& info() const override { return info_; }
  const storage::StoreLayout& layout() const override { return layout_; }
  storage::StoreState state() const override { return {}; }
  std::string client_metadata() const override { return {}; }
  base::Status recover_to(base::StepNumber) override { return base::Status(); }
  void submit(csd::Command& command) override { sent.push_back(&command); }
  base::TrafficReading host_traffic() const override { return {}; }
  base::TrafficReading store_traffic() const override {
    ++looks;
    if (looks < moves) store_.add_down(base::TrafficKind::kState, 1);
    if (looks == answers) answer(0);
    return store_.read();
  }
  uint64_t bytes_written_ever() const override { return 0; }

  void answer(size_t index) const {
    csd::Completion done;
    done.command = sent[index];
    sent[index]->replies->push(std::move(done));
  }

  std::vector<csd::Command*> sent;
  mutable int looks = 0;
  int moves = 0;    // something with each look before this one
  int answers = 0;  // the first command at this look

 private:
  csd::DeviceInfo info_;
  storage::StoreLayout layout_;
  mutable base::TrafficCounter store_;
};

TEST(DeviceReplies, ADeviceThatDoesNotAnswerIsGivenUpForGood) {
  Reluctant quick("quick");
  Reluctant dead("drive-x");
  DeviceWatch watch{milliseconds(100)};
  DeviceReplies replies(watch);
  const csd::Command* update = replies.submit(dead, csd::Update{});
  const csd::Command* commit = replies.submit(dead, csd::Commit{3});
  replies.submit(quick, csd::Commit{3});
  quick.answer(0);
  EXPECT_TRUE(replies.next().status.ok());
  for (const csd::Command* command : {update, commit}) {
    const csd::Completion completion = replies.next();
    EXPECT_EQ(completion.command, command);
    EXPECT_EQ(completion.status.code(), base::ErrorCode::kTimeout);
    const std::string text = completion.status.to_string();
    for (const char* part : {"drive-x", "\"update\"", "for 0.1 s", "dmesg", "start again"}) {
      EXPECT_THAT(text, ::testing::HasSubstr(part));
    }
  }
  EXPECT_EQ(replies.owed(), 0u);
  EXPECT_TRUE(watch.given_up(quick).ok());
  // The next command fails at once, and the device is not asked.
  DeviceReplies others(watch);
  others.submit(dead, csd::Abort{3});
  EXPECT_EQ(others.next().status.code(), base::ErrorCode::kTimeout);
  EXPECT_EQ(dead.sent.size(), 2u);
  // Answers that come now belong to nothing, and its commands are not used for others.
  dead.answer(0);
  dead.answer(1);
  const csd::Command* another = replies.submit(quick, csd::Flush{});
  EXPECT_NE(another, update);
  EXPECT_NE(another, commit);
  quick.answer(1);
  EXPECT_EQ(replies.next().command, another);
  EXPECT_EQ(replies.owed(), 0u);
}

TEST(DeviceReplies, ASlowDeviceIsWaitedForAsLongAsSomethingMoves) {
  Reluctant slow("slow");
  slow.moves = 60;  // three times as many looks as silence is given
  slow.answers = 70;
  DeviceWatch watch{milliseconds(40)};
  DeviceReplies replies(watch);
  replies.submit(slow, csd::Prepare{1, {}});
  EXPECT_TRUE(replies.next().status.ok());
  EXPECT_EQ(slow.looks, 70);
  // From then on it is silent.
  replies.submit(slow, csd::Commit{1});
  EXPECT_EQ(replies.next().status.code(), base::ErrorCode::kTimeout);
}

TEST(DeviceReplies, WhoeverWaitsIsWoken) {
  Reluctant dead("drive-x");
  DeviceWatch watch{std::chrono::hours(1)};
  DeviceReplies replies(watch);
  std::atomic<int> answers{0};
  std::jthread waiting([&] {
    while (replies.next().command != nullptr) ++answers;
  });
  std::this_thread::sleep_for(milliseconds(50));  // it waits by now
  watch.give_up(dead, base::Status(base::ErrorCode::kTimeout, "a test", {}));
  replies.submit(dead, csd::Commit{1});
  while (answers == 0) std::this_thread::yield();
  replies.close();
  waiting.join();
  EXPECT_EQ(answers, 1);
}

}  // namespace
}  // namespace smartinf::engine
