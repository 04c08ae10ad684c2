// What a device does when its drive fails in the middle of a step: it says who it is and what
// happened, the step can be taken back, and the state of the last committed step is what it was.
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/test_model.h"

namespace smartinf::csd {
namespace {

using base::DataType;
using base::Status;

/// Fails, damages or loses chosen requests while it is armed.
struct Faults {
  enum class What { kNothing, kFailReads, kFailWrites, kFlipReads, kLoseAll };
  std::atomic<What> what{What::kNothing};
  std::atomic<uint32_t> after{0};  // so many requests of that direction still pass
  std::atomic<uint32_t> done{0};
  base::TrafficKind kind = base::TrafficKind::kState;
};

class FaultRing final : public storage::Ring {
 public:
  FaultRing(std::unique_ptr<storage::Ring> inner, Faults& faults)
      : inner_(std::move(inner)), faults_(faults) {}
  std::string_view name() const override { return "faulty"; }
  uint32_t depth() const override { return inner_->depth(); }
  base::Result<uint32_t> add_file(int descriptor, std::string path) override {
    return inner_->add_file(descriptor, std::move(path));
  }
  void register_memory(std::span<std::byte> memory) override { inner_->register_memory(memory); }
  Status submit(std::span<storage::IoRequest* const> requests) override {
    return inner_->submit(requests);
  }
  base::Result<size_t> reap(std::span<storage::IoRequest*> done,
                            std::chrono::nanoseconds wait) override {
    SI_ASSIGN_OR_RETURN(size_t count, inner_->reap(done, wait));
    for (size_t i = 0; i < count;) {
      if (!treat(*done[i])) {
        done[i] = done[--count];  // lost: never completes
        continue;
      }
      ++i;
    }
    return count;
  }

 private:
  bool treat(storage::IoRequest& request) {
    using What = Faults::What;
    const What what = faults_.what;
    const bool read = request.op == storage::IoOp::kRead;
    const bool meant = what == What::kLoseAll || (what == What::kFailWrites) != read;
    if (what == What::kNothing || !meant || request.kind != faults_.kind) return true;
    if (faults_.after > 0) {
      --faults_.after;
      return true;
    }
    ++faults_.done;
    if (what == What::kLoseAll) return false;
    if (what == What::kFlipReads) {
      request.buffer[request.buffer.size() / 3] ^= std::byte{4};
    } else {
      request.outcome = -EIO;
    }
    return true;
  }

  std::unique_ptr<storage::Ring> inner_;
  Faults& faults_;
};

class DeviceFaults : public testing::Test {
 protected:
  void make(uint64_t gradient_budget, std::chrono::seconds watchdog = std::chrono::seconds(60)) {
    layout_ = test_layout(base::StateFormat::kF32, 2);
    groups_ = test_groups(layout_.subgroups.back().first_element + 2 * base::kBlockElements);
    options_.path = options_.name = "drive-b";
    options_.threads = 2;
    options_.slots = 3;
    options_.gradient_budget_bytes = gradient_budget;
    options_.groups = groups_;
    options_.store.io_bytes = 128 * 1024;
    options_.store.watchdog = watchdog;
    options_.store.wrap_ring = [this](std::unique_ptr<storage::Ring> ring) {
      return std::make_unique<FaultRing>(std::move(ring), faults_);
    };
    const auto size = EmulatedDrive::size_for(layout_, storage::Durability::kStep);
    ASSERT_TRUE(size.ok());
    auto drive = EmulatedDrive::create(*size);
    ASSERT_TRUE(drive.ok());
    drive_ = std::move(*drive);
    auto made = create_emulated_device(options_, layout_, *drive_);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    device_ = std::move(*made);
    reference_ = std::make_unique<ReferenceModel>(layout_, groups_);
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      std::vector<float> master = ReferenceModel::master_at_start(subgroup);
      Command write;
      write.kind = CommandKind::kWriteState;
      write.subgroup = subgroup.id;
      write.count = subgroup.count;
      write.planes[0] = master.data();
      ASSERT_TRUE(run(write).ok());
    }
    ASSERT_TRUE(run(CommandKind::kPrepare, 0).ok());
    ASSERT_TRUE(run(CommandKind::kCommit, 0).ok());
  }

  Status run(Command& command) {
    command.replies = &queue_;
    device_->submit(command);
    Completion completion;
    while (queue_.pop(completion, std::chrono::seconds(100))) {
      if (completion.event == Completion::Event::kDone) return completion.status;
    }
    return Status(base::ErrorCode::kTimeout, "no completion");
  }
  Status run(CommandKind kind, uint64_t step) {
    Command command;
    command.kind = kind;
    command.step = step;
    return run(command);
  }
  Status put_all(uint64_t step) {
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      const auto gradient = test_gradient(subgroup, step, DataType::kBf16);
      Command put;
      put.kind = CommandKind::kPutGradient;
      put.subgroup = subgroup.id;
      put.count = subgroup.count;
      put.gradient = gradient.data();
      SI_RETURN_IF_ERROR(run(put));
    }
    return Status();
  }
  Status update(uint64_t step) {
    Command update;
    update.kind = CommandKind::kUpdate;
    update.step = step;
    update.scalars = test_scalars(step);
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      update.updates.push_back({subgroup.id, nullptr});
    }
    return run(update);
  }
  void expect_master() {
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      std::vector<float> master(layout_.subgroups[i].count);
      Command read;
      read.kind = CommandKind::kReadState;
      read.subgroup = layout_.subgroups[i].id;
      read.count = master.size();
      read.planes[0] = master.data();
      const Status status = run(read);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_TRUE(master == reference_->plane(i, 0)) << "subgroup " << i;
    }
  }
  /// A step that fails, is taken back, and succeeds when repeated.
  void fail_and_repeat(Faults::What what, uint32_t after, base::ErrorCode code) {
    faults_.after = after;
    ASSERT_TRUE(run(CommandKind::kBeginStep, 1).ok());
    faults_.what = what;
    ASSERT_TRUE(put_all(1).ok());
    const Status status = update(1);
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_NE(status.to_string().find("drive-b"), std::string::npos) << status.to_string();
    EXPECT_GT(faults_.done, 0u);
    EXPECT_FALSE(run(CommandKind::kPrepare, 1).ok()) << "a failed step must not be prepared";
    faults_.what = Faults::What::kNothing;
    ASSERT_TRUE(run(CommandKind::kTakeBack, 1).ok());
    EXPECT_EQ(device_->state().committed_step, 0u);
    expect_master();
    ASSERT_TRUE(run(CommandKind::kBeginStep, 1).ok());
    ASSERT_TRUE(put_all(1).ok());
    const Status again = update(1);
    ASSERT_TRUE(again.ok()) << again.to_string();
    ASSERT_TRUE(run(CommandKind::kPrepare, 1).ok());
    ASSERT_TRUE(run(CommandKind::kCommit, 1).ok());
    reference_->step(1, DataType::kBf16, DataType::kBf16);
    expect_master();
  }

  Faults faults_;
  storage::StoreLayout layout_;
  std::vector<plan::GroupStretch> groups_;
  LocalDeviceOptions options_;
  CompletionQueue queue_;
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

TEST_F(DeviceFaults, ADamagedSpilledGradientIsFoundBeforeItIsUsed) {
  make(0);
  ASSERT_FALSE(HasFatalFailure());
  faults_.kind = base::TrafficKind::kGradient;
  fail_and_repeat(Faults::What::kFlipReads, 1, base::ErrorCode::kCorrupt);
}

TEST_F(DeviceFaults, AGradientThatCannotBeSpilledFailsTheUpdate) {
  make(0);
  ASSERT_FALSE(HasFatalFailure());
  faults_.kind = base::TrafficKind::kGradient;
  fail_and_repeat(Faults::What::kFailWrites, 2, base::ErrorCode::kIo);
}

TEST_F(DeviceFaults, MoreIncompleteSpilledGradientsThanBuffersAreRefused) {
  make(0);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(run(CommandKind::kBeginStep, 1).ok());
  Status last;
  for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
    const auto gradient = test_gradient(subgroup, 1, DataType::kBf16);
    Command put;
    put.kind = CommandKind::kPutGradient;
    put.subgroup = subgroup.id;
    put.count = 1000;
    put.gradient = gradient.data();
    last = run(put);
    if (!last.ok()) break;
  }
  EXPECT_EQ(last.code(), base::ErrorCode::kOutOfMemory) << last.to_string();
  EXPECT_TRUE(run(CommandKind::kTakeBack, 1).ok());
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
  ASSERT_TRUE(run(CommandKind::kBeginStep, 1).ok());
  ASSERT_TRUE(put_all(1).ok());
  Command update;
  update.kind = CommandKind::kUpdate;
  update.step = 1;
  update.scalars = test_scalars(1);
  update.replies = &queue_;
  for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
    update.updates.push_back({subgroup.id, nullptr});
  }
  device_->submit(update);
  device_.reset();
  Completion completion;
  do {
    ASSERT_TRUE(queue_.pop(completion, std::chrono::seconds(0))) << "not answered";
  } while (completion.event != Completion::Event::kDone);
  EXPECT_TRUE(completion.status.ok() || completion.status.code() == base::ErrorCode::kCancelled);
}

}  // namespace
}  // namespace smartinf::csd
