// Tests of a device whose drive fails in the middle of a step: it says who it is and what happened,
// the step can be aborted, and the state of the last committed step is what it was.
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/fault_ring.h"
#include "smartinf/csd/test_device.h"

namespace smartinf::csd {
namespace {

using base::DataType;
using base::Status;

class DeviceFaults : public testing::Test {
 protected:
  void make(uint64_t gradient_budget, std::chrono::milliseconds watchdog = std::chrono::seconds(60),
            uint64_t cached = 0) {
    layout_ = test_layout(base::StateFormat::kF32, 2, subgroups_);
    groups_ = test_groups(layout_.subgroups.back().first_element + 2 * base::kBlockElements);
    options_.path = options_.name = "drive-b";
    options_.threads = 2;
    options_.slots = slots_;
    options_.gradient_budget_bytes = gradient_budget;
    options_.groups = groups_;
    options_.store.io_bytes = 128 * 1024;
    options_.store.watchdog = watchdog;
    options_.store.wrap_ring = [this](std::unique_ptr<storage::Ring> ring) {
      return std::make_unique<FaultRing>(std::move(ring), faults_);
    };
    const auto size =
        EmulatedDrive::size_for(layout_, storage::Durability::kStep, options_.store.spool_bytes);
    ASSERT_TRUE(size.ok());
    auto drive = EmulatedDrive::create(*size);
    ASSERT_TRUE(drive.ok());
    drive_ = std::move(*drive);
    auto made = create_emulated_device(options_, layout_, *drive_);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    device_ = std::move(*made);
    reference_ = std::make_unique<ReferenceModel>(layout_, groups_);
    driver_.drive(*device_);
    ASSERT_TRUE(driver_.cache_state(layout_, cached).ok());
    const Status status = driver_.make_start(layout_);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }

  Status run(Message message) { return driver_.run(std::move(message)); }
  Status prepare(uint64_t step) { return driver_.prepare(step); }
  Status put_all(uint64_t step) { return driver_.put_all(layout_, step); }
  Status update(uint64_t step) { return driver_.update(layout_, step); }
  void expect_master() {
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      std::vector<float> master(layout_.subgroups[i].count);
      ReadState read;
      read.subgroup = layout_.subgroups[i].id;
      read.count = master.size();
      read.planes[0] = master.data();
      const Status status = run(read);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_TRUE(master == reference_->plane(i, 0)) << "subgroup " << i;
    }
  }
  /// A step that fails, is aborted, and succeeds when repeated.
  void fail_and_repeat(Faults::What what, uint32_t after, base::ErrorCode code, uint64_t step = 1) {
    faults_.after = after;
    ASSERT_TRUE(run(BeginStep{step}).ok());
    faults_.what = what;
    ASSERT_TRUE(put_all(step).ok());
    const Status status = update(step);
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_NE(status.to_string().find("drive-b"), std::string::npos) << status.to_string();
    EXPECT_GT(faults_.done, 0u);
    EXPECT_FALSE(prepare(step).ok()) << "a failed step must not be prepared";
    faults_.what = Faults::What::kNothing;
    ASSERT_TRUE(run(Abort{step}).ok());
    EXPECT_EQ(device_->state().committed_step, step - 1);
    expect_master();
    make_step(step);
    expect_master();
  }
  void make_step(uint64_t step) {
    ASSERT_TRUE(run(BeginStep{step}).ok());
    ASSERT_TRUE(put_all(step).ok());
    const Status status = update(step);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_TRUE(prepare(step).ok());
    ASSERT_TRUE(run(Commit{step}).ok());
    reference_->step(step, DataType::kBf16, DataType::kBf16);
  }

  uint32_t subgroups_ = 6;
  uint32_t slots_ = 3;
  Faults faults_;
  storage::StoreLayout layout_;
  std::vector<plan::GroupSpan> groups_;
  LocalDeviceOptions options_;
  DeviceDriver driver_;
  std::unique_ptr<ReferenceModel> reference_;
  std::unique_ptr<EmulatedDrive> drive_;
  std::unique_ptr<Device> device_;
};

TEST_F(DeviceFaults, AFailingReadIsNamedAndTheStepCanBeRepeated) {
  make(~uint64_t{0});
  ASSERT_FALSE(HasFatalFailure());
  fail_and_repeat(Faults::What::kFailReads, 7, base::ErrorCode::kIo);
}

TEST_F(DeviceFaults, AFailingWriteIsNamedAndTheStepCanBeRepeated) {
  make(~uint64_t{0});
  ASSERT_FALSE(HasFatalFailure());
  fail_and_repeat(Faults::What::kFailWrites, 11, base::ErrorCode::kIo);
}

TEST_F(DeviceFaults, DamagedStateIsFoundBeforeItIsUsed) {
  make(~uint64_t{0});
  ASSERT_FALSE(HasFatalFailure());
  fail_and_repeat(Faults::What::kFlipReads, 3, base::ErrorCode::kCorrupt);
}

// Changes in memory by a step that failed are not taken for the committed state.
TEST_F(DeviceFaults, AFailureWithStateInMemoryLeavesTheCommittedOne) {
  for (const uint64_t cached : {3, 6}) {
    make(~uint64_t{0}, std::chrono::seconds(60), cached);
    ASSERT_FALSE(HasFatalFailure());
    make_step(1);
    fail_and_repeat(Faults::What::kFailWrites, 11, base::ErrorCode::kIo, 2);
    if (cached < 6) fail_and_repeat(Faults::What::kFlipReads, 3, base::ErrorCode::kCorrupt, 3);
    device_.reset();
  }
}

TEST_F(DeviceFaults, AFailureWhileTheCacheIsFilledIsNoState) {
  make(~uint64_t{0}, std::chrono::seconds(60), 6);
  ASSERT_FALSE(HasFatalFailure());
  fail_and_repeat(Faults::What::kFailReads, 7, base::ErrorCode::kIo);
  make_step(2);
  expect_master();
}

TEST_F(DeviceFaults, ADamagedSpilledGradientIsFoundBeforeItIsUsed) {
  make(0);
  ASSERT_FALSE(HasFatalFailure());
  faults_.kind = base::TrafficKind::kGradient;
  fail_and_repeat(Faults::What::kFlipReads, 1, base::ErrorCode::kCorrupt);
}

// The spill area then holds the gradient of the step before: whole, and of that place.
TEST_F(DeviceFaults, AStaleSpilledGradientIsFoundBeforeItIsUsed) {
  make(0);
  ASSERT_FALSE(HasFatalFailure());
  faults_.kind = base::TrafficKind::kGradient;
  make_step(1);
  ASSERT_TRUE(run(BeginStep{2}).ok());
  faults_.what = Faults::What::kDropWrites;
  ASSERT_TRUE(put_all(2).ok());
  const Status status = update(2);
  EXPECT_GT(faults_.done, 0u);
  EXPECT_EQ(status.code(), base::ErrorCode::kCorrupt) << status.to_string();
  EXPECT_NE(status.to_string().find("spilled gradient"), std::string::npos) << status.to_string();
  faults_.what = Faults::What::kNothing;
  ASSERT_TRUE(run(Abort{2}).ok());
  expect_master();
}

// A drive that hangs is named, and holds up neither the step's failure nor closing.
TEST_F(DeviceFaults, ADriveThatNeverAnswersIsNamedAndCanBeClosed) {
  make(~uint64_t{0}, std::chrono::milliseconds(40));
  ASSERT_FALSE(HasFatalFailure());
  std::vector<std::string> remarks;
  std::mutex mutex;
  base::set_log_sink([&](base::LogLevel, std::string_view text) {
    const std::lock_guard lock(mutex);
    remarks.emplace_back(text);
  });
  ASSERT_TRUE(run(BeginStep{1}).ok());
  faults_.what = Faults::What::kLoseAll;
  faults_.after = 5;
  ASSERT_TRUE(put_all(1).ok());
  const Status status = update(1);
  EXPECT_EQ(status.code(), base::ErrorCode::kTimeout) << status.to_string();
  EXPECT_FALSE(run(Abort{1}).ok()) << "what is on the drive is not known";
  device_.reset();
  base::set_log_sink({});
  ASSERT_FALSE(remarks.empty());
  EXPECT_NE(remarks.back().find("drive-b is closed without an answer"), std::string::npos)
      << remarks.back();
  EXPECT_NE(remarks.back().find("offset"), std::string::npos) << remarks.back();
}

TEST_F(DeviceFaults, ASpoolWhoseDriveNeverAnswersIsNamedAndCanBeClosed) {
  options_.store.spool_bytes = base::kMiB;
  make(~uint64_t{0}, std::chrono::milliseconds(40));
  ASSERT_FALSE(HasFatalFailure());
  base::set_log_sink([](base::LogLevel, std::string_view) {});
  const auto data = base::AlignedBuffer::allocate(base::kMiB);
  faults_.kind = base::TrafficKind::kActivation;
  faults_.what = Faults::What::kLoseAll;
  const Status status = run(GetSpool{0, data->bytes()});
  EXPECT_EQ(status.code(), base::ErrorCode::kFailedPrecondition) << status.to_string();
  const Status lost = run(PutSpool{0, data->bytes()});
  EXPECT_EQ(lost.code(), base::ErrorCode::kTimeout) << lost.to_string();
  EXPECT_NE(lost.to_string().find("drive-b"), std::string::npos) << lost.to_string();
  EXPECT_EQ(run(PutSpool{0, data->bytes()}).code(), base::ErrorCode::kTimeout);
  EXPECT_FALSE(run(BeginStep{1}).ok()) << "the store cannot go on";
  device_.reset();
  base::set_log_sink({});
}

TEST_F(DeviceFaults, AReadOfWeightsThatHangsIsGivenUpWithEverythingThatWaits) {
  options_.weight_read_slots = 2;
  make(~uint64_t{0}, std::chrono::milliseconds(40));
  ASSERT_FALSE(HasFatalFailure());
  base::set_log_sink([](base::LogLevel, std::string_view) {});
  ASSERT_TRUE(run(BeginStep{1}).ok());
  faults_.what = Faults::What::kLoseAll;
  std::vector<std::vector<base::Bf16>> weights;
  std::vector<std::unique_ptr<Command>> commands;
  for (const uint64_t step : {1, 0}) {
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      weights.emplace_back(subgroup.count);
      commands.push_back(std::make_unique<Command>(
          Command{ReadWeights{subgroup.id, step, DataType::kBf16, weights.back().data()}}));
      driver_.start(*commands.back());
    }
  }
  for (size_t i = 0; i < commands.size(); ++i) {
    Completion completion;
    ASSERT_TRUE(driver_.queue.pop(completion, std::chrono::seconds(100)));
    EXPECT_EQ(completion.status.code(), base::ErrorCode::kTimeout);
    EXPECT_NE(completion.status.to_string().find("drive-b"), std::string::npos);
  }
  EXPECT_EQ(run(commands.front()->message).code(), base::ErrorCode::kTimeout)
      << "and whatever follows";
  device_.reset();
  base::set_log_sink({});
}

TEST_F(DeviceFaults, AGradientThatCannotBeSpilledFailsTheUpdate) {
  make(0);
  ASSERT_FALSE(HasFatalFailure());
  faults_.kind = base::TrafficKind::kGradient;
  fail_and_repeat(Faults::What::kFailWrites, 2, base::ErrorCode::kIo);
}

/// The update would wait for it for ever, and what comes behind the update with it.
TEST_F(DeviceFaults, AGradientThatCannotBeSpilledEndsAnEarlyUpdate) {
  subgroups_ = 12;
  slots_ = 8;
  make(0);
  ASSERT_FALSE(HasFatalFailure());
  faults_.kind = base::TrafficKind::kGradient;
  faults_.after = 2;
  ASSERT_TRUE(run(BeginStep{1}).ok());
  Update update;
  update.scalars = test_scalars(1);
  for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
    update.updates.push_back({subgroup.id, nullptr});
  }
  update.mode = plan::UpdateMode::kAsCompleted;
  Command early{update};
  CompletionQueue replies;  // of its own: gradients are answered meanwhile
  early.replies = &replies;
  device_->submit(early);
  faults_.what = Faults::What::kFailWrites;
  ASSERT_TRUE(put_all(1).ok());
  update.mode = plan::UpdateMode::kRest;
  const Status status = run(update);
  EXPECT_EQ(status.code(), base::ErrorCode::kIo) << status.to_string();
  for (Completion completion;
       completion.event != Completion::Event::kDone || completion.command != &early;) {
    ASSERT_TRUE(replies.pop(completion, std::chrono::seconds(100)));
  }
  faults_.what = Faults::What::kNothing;
  ASSERT_TRUE(run(Abort{1}).ok());
  expect_master();
  make_step(1);
  expect_master();
}

TEST_F(DeviceFaults, MoreIncompleteSpilledGradientsThanBuffersAreRefused) {
  make(0);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(run(BeginStep{1}).ok());
  Status last;
  for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
    const auto gradient = test_gradient(subgroup, 1, DataType::kBf16);
    last = driver_.put(subgroup, gradient, DataType::kBf16, 0, 1000);
    if (!last.ok()) break;
  }
  EXPECT_EQ(last.code(), base::ErrorCode::kOutOfMemory) << last.to_string();
  EXPECT_TRUE(run(Abort{1}).ok());
  expect_master();
}

TEST_F(DeviceFaults, SaysWhatMemoryItNeeds) {
  make(~uint64_t{0});
  ASSERT_FALSE(HasFatalFailure());
  device_.reset();
  options_.memory_bytes = 4096;
  const auto small = open_emulated_device(options_, *drive_);
  ASSERT_FALSE(small.ok());
  EXPECT_EQ(small.status().code(), base::ErrorCode::kOutOfMemory);
  EXPECT_NE(small.status().to_string().find("drive-b"), std::string::npos);
}

TEST_F(DeviceFaults, ClosesWhileAnUpdateRuns) {
  make(~uint64_t{0});
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(run(BeginStep{1}).ok());
  ASSERT_TRUE(put_all(1).ok());
  Update update;
  update.scalars = test_scalars(1);
  for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
    update.updates.push_back({subgroup.id, nullptr});
  }
  Command command{update};
  faults_.what = Faults::What::kHoldWrites;  // the update cannot end before the device closes
  driver_.start(command);
  while (faults_.done == 0) std::this_thread::yield();
  std::jthread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it is closing by then
    faults_.what = Faults::What::kNothing;
  });
  device_.reset();
  Completion completion;
  do {
    ASSERT_TRUE(driver_.queue.pop(completion, std::chrono::seconds(0))) << "not answered";
  } while (completion.event != Completion::Event::kDone);
  EXPECT_EQ(completion.status.code(), base::ErrorCode::kCancelled);
}

}  // namespace
}  // namespace smartinf::csd
