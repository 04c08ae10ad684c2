// The updater's own logic over fake devices: agreement of devices, what users get wrong.
// updater_contract_test.cc has what all updaters have in common.
#include "smartinf/engine/updater.h"

#include <cmath>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/fake_source.h"

namespace smartinf::engine {
namespace {

using base::DataType;
using base::ErrorCode;
using ::testing::HasSubstr;

constexpr uint64_t kCount = 5 * base::kBlockElements + 1234;

plan::ParameterSpace test_space() {
  plan::ParameterSpace space;
  EXPECT_TRUE(space.add("embed", {base::kBlockElements, 2}, 0).ok());
  EXPECT_TRUE(space.add("norm", {1234}, 1).ok());
  EXPECT_TRUE(space.add("head", {3, base::kBlockElements}, 0).ok());
  return space;
}

class UpdaterOverFakes : public ::testing::Test {
 protected:
  explicit UpdaterOverFakes(size_t devices = 2) {
    for (size_t d = 0; d < devices; ++d) drives_.push_back(std::make_shared<FakeDrive>());
    options_.subgroup_elements = base::kBlockElements;
    options_.gradient_type = DataType::kF32;
    weights_.resize(kCount);
  }

  std::vector<std::unique_ptr<DeviceSource>> sources() const {
    std::vector<std::unique_ptr<DeviceSource>> result;
    for (size_t d = 0; d < drives_.size(); ++d) {
      result.push_back(std::make_unique<FakeSource>(drives_[d], fmt_name(d)));
    }
    return result;
  }
  static std::string fmt_name(size_t d) { return "drive" + std::to_string(d); }

  base::Result<std::unique_ptr<Updater>> open() {
    return Updater::open(options_, space_, sources());
  }
  std::unique_ptr<Updater> open_fresh() {
    auto updater = open();
    EXPECT_TRUE(updater.ok()) << updater.status().to_string();
    const base::Status status = (*updater)->initialize(
        [](uint64_t first, std::span<float> out) {
          for (size_t i = 0; i < out.size(); ++i) {
            out[i] = std::sin(static_cast<float>(first + i));
          }
          return base::Status();
        },
        "step 0");
    EXPECT_TRUE(status.ok()) << status.to_string();
    return std::move(*updater);
  }

  WeightsSink sink() {
    return [this](uint64_t first) { return weights_.data() + first; };
  }
  static std::vector<float> gradient(uint64_t seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::normal_distribution<float> normal(0.0f, 0.1f);
    std::vector<float> values(kCount);
    for (float& value : values) value = normal(random);
    return values;
  }
  static UpdateOptions update_options() {
    UpdateOptions update;
    update.groups = {{.lr = 0.01, .weight_decay = 0.1}, {.lr = 0.02, .weight_decay = 0}};
    return update;
  }

  base::Status step_until_commit(Updater& updater, uint64_t seed) {
    const std::vector<float> values = gradient(seed);
    SI_RETURN_IF_ERROR(updater.begin_step());
    SI_RETURN_IF_ERROR(updater.put_gradient(0, values.data(), DataType::kF32, kCount));
    SI_RETURN_IF_ERROR(updater.finish_gradients(1).status());
    SI_RETURN_IF_ERROR(updater.start_update(update_options(), DataType::kF32, sink()));
    return updater.wait_weights(0, kCount);
  }
  base::Status step(Updater& updater, uint64_t seed) {
    SI_RETURN_IF_ERROR(step_until_commit(updater, seed));
    return updater.commit("step " + std::to_string(seed));
  }
  std::vector<float> loaded(Updater& updater) {
    std::vector<float> values(kCount);
    const base::Status status =
        updater.load_weights(DataType::kF32, [&](uint64_t first) { return values.data() + first; });
    EXPECT_TRUE(status.ok()) << status.to_string();
    return values;
  }

  plan::ParameterSpace space_ = test_space();
  UpdaterOptions options_;
  std::vector<std::shared_ptr<FakeDrive>> drives_;
  std::vector<float> weights_;
};

TEST_F(UpdaterOverFakes, AStepBecomesRealAndIsThereAfterReopening) {
  auto updater = open_fresh();
  EXPECT_FALSE(updater->fresh());
  EXPECT_EQ(updater->client_metadata(), "step 0");
  const std::vector<float> before = loaded(*updater);
  for (uint64_t n = 1; n <= 3; ++n) {
    const base::Status status = step(*updater, n);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(updater->committed_step(), n);
  }
  EXPECT_NE(weights_, before);
  EXPECT_EQ(loaded(*updater), weights_);
  updater.reset();
  auto again = open();
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_FALSE((*again)->fresh());
  EXPECT_EQ((*again)->committed_step(), 3u);
  EXPECT_EQ((*again)->client_metadata(), "step 3");
  EXPECT_EQ(loaded(**again), weights_);
}

TEST_F(UpdaterOverFakes, NormDependsOnNothingButTheValues) {
  const std::vector<float> values = gradient(7);
  double expected = 0;
  for (const float value : values) expected += static_cast<double>(value) * value;
  std::vector<double> norms;
  for (const uint64_t subgroup : {base::kBlockElements, 4 * base::kBlockElements}) {
    for (const bool reversed : {false, true}) {
      for (auto& drive : drives_) *drive = FakeDrive();
      options_.subgroup_elements = subgroup;
      auto updater = open_fresh();
      ASSERT_TRUE(updater->begin_step().ok());
      std::vector<plan::ParameterRange> ranges = space_.ranges();
      if (reversed) std::reverse(ranges.begin(), ranges.end());
      for (const auto& range : ranges) {
        ASSERT_TRUE(updater
                        ->put_gradient(range.first, values.data() + range.first, DataType::kF32,
                                       range.count)
                        .ok());
      }
      const auto summary = updater->finish_gradients(0.5);
      ASSERT_TRUE(summary.ok());
      norms.push_back(summary->norm);
    }
  }
  for (const double norm : norms) EXPECT_EQ(norm, norms.front());
  EXPECT_NEAR(norms.front(), 0.5 * std::sqrt(expected), 1e-9 * norms.front());
}

TEST_F(UpdaterOverFakes, GradientOfAnotherTypeIsCastAndThatIsWhatIsMeasured) {
  options_.gradient_type = DataType::kBf16;
  auto updater = open_fresh();
  std::vector<float> values = gradient(3);
  std::vector<base::Bf16> narrow(kCount);
  for (size_t i = 0; i < kCount; ++i) narrow[i] = base::to_bf16(values[i]);
  ASSERT_TRUE(updater->begin_step().ok());
  ASSERT_TRUE(updater->put_gradient(0, values.data(), DataType::kF32, kCount).ok());
  const auto from_f32 = updater->finish_gradients(1);
  ASSERT_TRUE(from_f32.ok());
  ASSERT_TRUE(updater->abort().ok());
  ASSERT_TRUE(updater->begin_step().ok());
  ASSERT_TRUE(updater->put_gradient(0, narrow.data(), DataType::kBf16, kCount).ok());
  const auto from_bf16 = updater->finish_gradients(1);
  ASSERT_TRUE(from_bf16.ok());
  EXPECT_EQ(from_f32->norm, from_bf16->norm);
}

class FailingCommand : public UpdaterOverFakes,
                       public ::testing::WithParamInterface<csd::Message> {};

TEST_P(FailingCommand, NamesTheDeviceAndLeavesTheLastCommittedStep) {
  auto updater = open_fresh();
  ASSERT_TRUE(step(*updater, 1).ok());
  const std::vector<float> committed = weights_;
  drives_[1]->fail_next = GetParam();
  const base::Status failed = step(*updater, 2);
  EXPECT_EQ(failed.code(), ErrorCode::kIo);
  EXPECT_THAT(failed.to_string(), HasSubstr("drive1"));
  // The step is aborted now, where it had not been by commit.
  ASSERT_TRUE(updater->abort().ok());
  EXPECT_EQ(updater->committed_step(), 1u);
  EXPECT_EQ(updater->client_metadata(), "step 1");
  EXPECT_EQ(loaded(*updater), committed);
  EXPECT_EQ(drives_[0]->state.prepared_step, 1u);
  ASSERT_TRUE(step(*updater, 2).ok());
  EXPECT_EQ(updater->committed_step(), 2u);
}

INSTANTIATE_TEST_SUITE_P(BeforeAllArePrepared, FailingCommand,
                         ::testing::Values(csd::BeginStep{}, csd::PutGradient{}, csd::Update{},
                                           csd::Prepare{}));

TEST_F(UpdaterOverFakes, AFailureWhileCommittingIsSettledByOpeningAgain) {
  auto updater = open_fresh();
  ASSERT_TRUE(step(*updater, 1).ok());
  ASSERT_TRUE(step_until_commit(*updater, 2).ok());
  drives_[1]->fail_next = csd::Commit{};
  const base::Status failed = updater->commit("step 2");
  EXPECT_THAT(failed.to_string(), HasSubstr("drive1"));
  EXPECT_THAT(updater->begin_step().to_string(), HasSubstr("Open the updater again"));
  updater.reset();
  auto again = open();  // one device had committed, so the other rolls forward
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_EQ((*again)->committed_step(), 2u);
  EXPECT_EQ((*again)->client_metadata(), "step 2");
  EXPECT_EQ(loaded(**again), weights_);
}

class SilentDevice : public UpdaterOverFakes, public ::testing::WithParamInterface<csd::Message> {};

TEST_P(SilentDevice, IsAnErrorThatNamesItAndTheStateIsRecovered) {
  options_.device_silence_max = std::chrono::milliseconds(60);
  auto updater = open_fresh();
  ASSERT_TRUE(step(*updater, 1).ok());
  const std::vector<float> committed = weights_;
  drives_[1]->silent_from = GetParam();
  const base::Status failed = step(*updater, 2);
  EXPECT_EQ(failed.code(), ErrorCode::kTimeout);
  EXPECT_THAT(failed.to_string(), HasSubstr("device drive1 has neither answered \"" +
                                            std::string(csd::message_name(GetParam())) + "\""));
  // Nobody waits for it a second time, and closing does not either.
  EXPECT_FALSE(updater->abort().ok());
  EXPECT_FALSE(updater->begin_step().ok());
  updater.reset();
  drives_[1]->silent_from.reset();
  drives_[1]->silent = false;
  auto again = open();
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  const bool decided = std::holds_alternative<csd::Commit>(GetParam());
  EXPECT_EQ((*again)->committed_step(), decided ? 2u : 1u);
  EXPECT_EQ(loaded(**again), decided ? weights_ : committed);
  EXPECT_TRUE(step(**again, 3).ok());
}

INSTANTIATE_TEST_SUITE_P(InAStep, SilentDevice,
                         ::testing::Values(csd::BeginStep{}, csd::PutGradient{}, csd::Update{},
                                           csd::Prepare{}, csd::Commit{}));

TEST_F(UpdaterOverFakes, ASilentDeviceEndsReadingEditingAndInitialization) {
  options_.device_silence_max = std::chrono::milliseconds(60);
  auto updater = open_fresh();
  std::vector<float> out(kCount);
  const auto fails_at = [&](csd::Message message, const auto& call) {
    drives_[1]->silent_from = std::move(message);
    EXPECT_THAT(call().to_string(), HasSubstr("drive1"));
    drives_[1]->silent_from.reset();
    drives_[1]->silent = false;
    updater.reset();
    auto again = open();
    ASSERT_TRUE(again.ok()) << again.status().to_string();
    updater = std::move(*again);
  };
  fails_at(csd::ReadState{}, [&] {
    return updater->load_weights(DataType::kF32, [&](uint64_t first) { return &out[first]; });
  });
  const auto edit = [&] {
    return updater->edit_state([](uint64_t, auto) { return true; }, "edited");
  };
  fails_at(csd::ReadState{}, edit);
  fails_at(csd::WriteState{}, edit);
  EXPECT_TRUE(edit().ok());
  EXPECT_EQ(updater->client_metadata(), "edited");
  updater.reset();
  for (auto& drive : drives_) drive = std::make_shared<FakeDrive>();
  auto fresh = open();
  ASSERT_TRUE(fresh.ok());
  drives_[1]->silent_from = csd::WriteState{};
  const base::Status failed =
      (*fresh)->initialize([](uint64_t, std::span<float>) { return base::Status(); }, "");
  EXPECT_EQ(failed.code(), ErrorCode::kTimeout);
  EXPECT_THAT(failed.to_string(), HasSubstr("\"write state\""));
}

TEST_F(UpdaterOverFakes, ACommitInTheBackgroundIsFinishedByWhoeverNeedsItNext) {
  auto updater = open_fresh();
  ASSERT_TRUE(step_until_commit(*updater, 1).ok());
  ASSERT_TRUE(updater->start_commit("b").ok());
  ASSERT_TRUE(updater->begin_step().ok());
  EXPECT_EQ(updater->committed_step(), 1u);
  ASSERT_TRUE(updater->abort().ok());
  ASSERT_TRUE(step_until_commit(*updater, 2).ok());
  drives_[0]->fail_next = csd::Prepare{};
  ASSERT_TRUE(updater->start_commit("c").ok());
  EXPECT_THAT(updater->begin_step().to_string(), HasSubstr("drive0"));
  EXPECT_EQ(updater->committed_step(), 1u);
  ASSERT_TRUE(step(*updater, 2).ok());
}

// ---- Opening, and what users get wrong.

TEST_F(UpdaterOverFakes, NoDeviceAndTheSameDeviceTwice) {
  drives_.clear();
  EXPECT_THAT(open().status().to_string(), HasSubstr("[[device]]"));
  std::vector<std::unique_ptr<DeviceSource>> twice;
  const auto drive = std::make_shared<FakeDrive>();
  twice.push_back(std::make_unique<FakeSource>(drive, "a"));
  twice.push_back(std::make_unique<FakeSource>(drive, "a"));
  EXPECT_THAT(Updater::open(options_, space_, std::move(twice)).status().to_string(),
              HasSubstr("same place"));
}

TEST_F(UpdaterOverFakes, NothingThereAndNotToBeCreated) {
  options_.create = false;
  EXPECT_EQ(open().status().code(), ErrorCode::kNotFound);
  EXPECT_FALSE(drives_[0]->layout.has_value());
}

TEST_F(UpdaterOverFakes, StateOfADifferentModelIsNotTouched) {
  open_fresh();
  plan::ParameterSpace other;
  ASSERT_TRUE(other.add("embed", {base::kBlockElements, 4}, 0).ok());
  const auto status = Updater::open(options_, other, sources()).status();
  EXPECT_EQ(status.code(), ErrorCode::kMismatch);
  EXPECT_THAT(status.to_string(), HasSubstr("embed: [65536, 4] here, [65536, 2] on the device"));
  EXPECT_THAT(status.to_string(), HasSubstr("drive0"));
  EXPECT_TRUE(open().ok());
}

TEST_F(UpdaterOverFakes, AnotherRuleOrFormatIsAMismatch) {
  open_fresh();
  options_.rule.rule = kernels::UpdateRule::kSgdMomentum;
  EXPECT_THAT(open().status().to_string(), HasSubstr("rule adamw, not sgd"));
  options_.rule.rule = kernels::UpdateRule::kAdamW;
  options_.format = base::StateFormat::kQ8;
  EXPECT_THAT(open().status().to_string(), HasSubstr("format f32, not q8"));
  options_.format.master = base::MasterFormat::kM24;
  EXPECT_THAT(open().status().to_string(),
              AllOf(HasSubstr("format f32, not m24+q8"),
                    HasSubstr("smartinf reshard --state-format q8 --master m24")));
}

TEST_F(UpdaterOverFakes, AMissingDeviceIsNamed) {
  open_fresh();
  const auto removed = drives_.back();
  drives_.pop_back();
  const auto status = open().status();
  EXPECT_EQ(status.code(), ErrorCode::kNotFound);
  EXPECT_THAT(status.to_string(), HasSubstr("2 devices; drive1 is not among those given"));
  drives_.push_back(std::make_shared<FakeDrive>());  // an empty one in its place
  const auto empty = open().status();
  EXPECT_EQ(empty.code(), ErrorCode::kNotFound);
  EXPECT_THAT(empty.to_string(), HasSubstr("drive1 holds no optimizer state"));
  EXPECT_FALSE(drives_.back()->layout.has_value());
  drives_.back() = removed;
  EXPECT_TRUE(open().ok());
}

TEST_F(UpdaterOverFakes, DevicesMayBeNamedInAnotherOrder) {
  auto updater = open_fresh();
  const std::vector<float> before = loaded(*updater);
  updater.reset();
  std::swap(drives_[0], drives_[1]);
  auto again = open();
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_EQ(loaded(**again), before);
}

TEST_F(UpdaterOverFakes, ADeviceOfAnotherRunIsNamed) {
  open_fresh();
  const auto foreign = drives_[1];
  drives_[0] = std::make_shared<FakeDrive>();
  drives_[1] = std::make_shared<FakeDrive>();
  open_fresh();
  drives_[1] = foreign;
  const auto status = open().status();
  EXPECT_EQ(status.code(), ErrorCode::kMismatch);
  EXPECT_THAT(status.to_string(), HasSubstr("device drive1 belongs to run"));
}

TEST_F(UpdaterOverFakes, ADeviceInUseIsNamed) {
  auto updater = open_fresh();
  const auto status = open().status();
  EXPECT_EQ(status.code(), ErrorCode::kBusy);
  EXPECT_THAT(status.to_string(), HasSubstr("drive0"));
}

TEST_F(UpdaterOverFakes, AnInterruptedCreationIsStartedOver) {
  // Neither device has step 0.
  ASSERT_TRUE(open().ok());
  auto again = open();
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_TRUE((*again)->fresh());
  again->reset();
  // One has it, the other does not.
  open_fresh();
  drives_[1]->state.initialized = false;
  again = open();
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_TRUE((*again)->fresh());
  again->reset();
  // Steps were made: an uninitialized device is then no leftover but a loss.
  auto updater = open_fresh();
  ASSERT_TRUE(step(*updater, 1).ok());
  updater.reset();
  drives_[1]->state.initialized = false;
  EXPECT_EQ(open().status().code(), ErrorCode::kNotFound);
}

TEST_F(UpdaterOverFakes, ACreationThatFailsLeavesNothingBehind) {
  drives_[1]->refuse_to_create = true;
  EXPECT_EQ(open().status().code(), ErrorCode::kNoSpace);
  EXPECT_FALSE(drives_[0]->layout.has_value());
}

TEST_F(UpdaterOverFakes, ATornStateIsSaidAndNotErased) {
  open_fresh().reset();
  for (const auto& drive : drives_) {
    drive->state.initialized = false;
    drive->state.torn = true;
  }
  const auto status = open().status();
  EXPECT_EQ(status.code(), ErrorCode::kFailedPrecondition) << status.to_string();
  EXPECT_THAT(status.to_string(), HasSubstr("a crash fell into a step"));
  EXPECT_TRUE(drives_[0]->layout.has_value());
}

// More ranges without a gradient than commands that may be in flight.
TEST_F(UpdaterOverFakes, AFailureWhileZerosAreSentIsAborted) {
  plan::ParameterSpace space;
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(space.add("used" + std::to_string(i), {4}, 0).ok());
    ASSERT_TRUE(space.add("unused" + std::to_string(i), {4}, 1).ok());
  }
  drives_.resize(1);
  space_ = space;
  auto updater = open_fresh();
  const std::vector<float> values(4, 0.5f);
  ASSERT_TRUE(updater->begin_step().ok());
  for (const plan::ParameterRange& range : space.ranges()) {
    const base::Status status =
        range.group == 0
            ? updater->put_gradient(range.first, values.data(), DataType::kF32, range.count)
            : updater->skip_gradient(range.first, range.count);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  ASSERT_TRUE(updater->finish_gradients(1).ok());
  UpdateOptions update = update_options();
  update.groups[1].skip = true;
  drives_[0]->fail_next = csd::PutGradient{};
  EXPECT_EQ(updater->start_update(update, DataType::kF32, sink()).code(), ErrorCode::kIo);
  const base::Status aborted = updater->abort();
  EXPECT_TRUE(aborted.ok()) << aborted.to_string();
  EXPECT_TRUE(updater->begin_step().ok());
}

TEST_F(UpdaterOverFakes, TooLittleSpaceIsSaidBeforeAnythingIsMade) {
  drives_[0]->capacity_bytes = 3 * base::kBlockElements * 24;
  drives_[1]->capacity_bytes = 2 * base::kBlockElements * 24;
  const auto status = open().status();
  EXPECT_EQ(status.code(), ErrorCode::kNoSpace);
  EXPECT_THAT(status.to_string(), HasSubstr("4.50 MiB on drive0, 3.00 MiB on drive1 are free"));
  EXPECT_FALSE(drives_[0]->layout.has_value());
}

TEST_F(UpdaterOverFakes, TooLittleMemorySaysHowMuchWouldDo) {
  options_.memory_budget_bytes = 1 << 20;
  options_.subgroup_elements = 0;
  const auto status = open().status();
  EXPECT_EQ(status.code(), ErrorCode::kOutOfMemory);
  EXPECT_THAT(status.to_string(), HasSubstr("at least"));
}

TEST_F(UpdaterOverFakes, ADeviceThatNoSubgroupFallsToIsLeftOut) {
  drives_[0]->capacity_bytes = 1000;
  auto updater = open_fresh();
  EXPECT_FALSE(drives_[0]->layout.has_value());
  ASSERT_TRUE(drives_[1]->layout.has_value());
  EXPECT_EQ(drives_[1]->layout->device_count, 1u);
  EXPECT_EQ(drives_[1]->layout->subgroups.size(), 6u);
  EXPECT_EQ(updater->describe_devices().size(), 1u);
  const std::vector<float> before = loaded(*updater);
  updater.reset();
  drives_[0]->capacity_bytes = ~uint64_t{0};
  auto again = open();  // resuming names both again
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_FALSE(drives_[0]->layout.has_value());
  EXPECT_EQ(loaded(**again), before);
}

TEST_F(UpdaterOverFakes, FasterDevicesOwnMore) {
  drives_[0]->bandwidth = 2;
  auto updater = open();
  ASSERT_TRUE(updater.ok());
  EXPECT_EQ(drives_[0]->layout->subgroups.size(), 4u);
  EXPECT_EQ(drives_[1]->layout->subgroups.size(), 2u);
}

}  // namespace
}  // namespace smartinf::engine
