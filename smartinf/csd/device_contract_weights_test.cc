// Reading weights (ReadWeights) beside everything else that a device does, and updates that wait
// for whoever reads them.
#include "smartinf/csd/device_contract.h"

#include <thread>

namespace smartinf::csd {
namespace {

using base::ErrorCode;

/// A ReadWeights with replies of its own: its answer may come at any time.
struct Reading {
  Command command;
  std::vector<std::byte> weights;
  CompletionQueue replies;

  bool answered_within(std::chrono::nanoseconds wait) {
    Completion completion;
    if (!done && replies.pop(completion, wait)) {
      done = true;
      status = completion.status;
    }
    return done;
  }
  Status wait() {
    return answered_within(std::chrono::seconds(100)) ? status
                                                      : Status(ErrorCode::kTimeout, "no answer");
  }
  bool done = false;
  Status status;
};

class WeightsContract : public DeviceContract {
 protected:
  void SetUp() override {
    DeviceContract::SetUp();
    weight_read_slots_ = 2;
  }
  bool in_place() const { return GetParam().durability == storage::Durability::kNone; }
  size_t count() const { return layout_.subgroups.size(); }

  std::unique_ptr<Reading> ask(size_t i, uint64_t step, DataType type) {
    auto reading = std::make_unique<Reading>();
    reading->weights.resize(layout_.subgroups[i].count * base::data_type_bytes(type));
    reading->command.message =
        ReadWeights{layout_.subgroups[i].id, step, type, reading->weights.data()};
    reading->command.replies = &reading->replies;
    device_->submit(reading->command);
    return reading;
  }
  std::unique_ptr<Reading> ask(size_t i, uint64_t step) {
    return ask(i, step, GetParam().weights_type);
  }
  Status answer_of(size_t i, uint64_t step) { return ask(i, step)->wait(); }
  std::vector<std::unique_ptr<Reading>> ask_all(uint64_t step) {
    std::vector<std::unique_ptr<Reading>> readings;
    for (size_t i = 0; i < count(); ++i) readings.push_back(ask(i, step));
    return readings;
  }
  /// What the step's update makes; ends the reference's step.
  std::vector<std::vector<std::byte>> weights_of(ReferenceModel& reference, uint64_t number) {
    return reference.step(number, GetParam().gradient_type, GetParam().weights_type);
  }
  /// Of the state that the reference is in.
  std::vector<std::vector<std::byte>> weights_at(ReferenceModel& reference, DataType type) {
    std::vector<std::vector<std::byte>> weights;
    for (size_t i = 0; i < count(); ++i) {
      const std::vector<float> master = reference.plane(i, 0);
      weights.emplace_back(master.size() * base::data_type_bytes(type));
      kernels::kernels().cast_from_f32(master.data(), weights.back().data(), type, master.size());
    }
    return weights;
  }
  static void expect_weights(const std::vector<std::unique_ptr<Reading>>& readings,
                             const std::vector<std::vector<std::byte>>& expected) {
    for (size_t i = 0; i < readings.size(); ++i) {
      if (readings[i] == nullptr) continue;
      const Status status = readings[i]->wait();
      EXPECT_TRUE(status.ok()) << status.to_string();
      EXPECT_TRUE(readings[i]->weights == expected[i]) << "weights of subgroup " << i;
    }
  }
  /// Of step `number`, without places for weights but for these subgroups.
  Update streamed_update(uint64_t number, std::vector<size_t> with_place = {}) {
    Update update = update_of(number);
    for (size_t i = 0; i < count(); ++i) {
      if (std::ranges::find(with_place, i) == with_place.end()) {
        update.updates[i].weights_out = nullptr;
      }
    }
    return update;
  }
  uint64_t state_read_since(const base::TrafficReading& before) const {
    return device_->store_traffic().since(before).up(base::TrafficKind::kState);
  }
  uint64_t elements() const {
    uint64_t all = 0;
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) all += subgroup.count;
    return all;
  }
  void begin_with_gradients(uint64_t number) {
    ASSERT_TRUE(run(BeginStep{number}).ok());
    put_all(number);
  }
};

TEST_P(WeightsContract, CommittedWeightsHaveTheBitsThatTheirUpdateSentUp) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  expect_weights(ask_all(0), weights_at(reference, GetParam().weights_type));
  for (uint64_t number = 1; number <= 2; ++number) {
    step(number);
    finish_step(number);
    ASSERT_FALSE(HasFatalFailure());
    const auto expected = weights_of(reference, number);
    EXPECT_TRUE(weights_ == expected);
    expect_weights(ask_all(number), expected);
  }
  for (const DataType type : {DataType::kF32, DataType::kF16, DataType::kBf16}) {
    std::vector<std::unique_ptr<Reading>> readings;
    for (size_t i = 0; i < count(); ++i) readings.push_back(ask(i, 2, type));
    expect_weights(readings, weights_at(reference, type));
  }
  if (GetParam().writes_postponed()) {
    ASSERT_TRUE(run(Flush{}).ok());
  }
  open();
  ASSERT_FALSE(HasFatalFailure());
  expect_weights(ask_all(2), weights_at(reference, GetParam().weights_type));
}

TEST_P(WeightsContract, AReadOfCommittedWeightsMovesTheMasterPlaneOnly) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  step(1);
  finish_step(1);
  ASSERT_FALSE(HasFatalFailure());
  const base::TrafficReading store = device_->store_traffic();
  const base::TrafficReading host = device_->host_traffic();
  const uint64_t hits = device_->state_bytes_cached();
  for (const auto& reading : ask_all(1)) EXPECT_TRUE(reading->wait().ok());
  uint64_t on_drive = 0;
  uint64_t in_memory = 0;
  for (size_t i = 0; i < count(); ++i) {
    const uint64_t bytes = base::encoded_bytes(
        base::plane_encoding(layout_.format, base::PlaneKind::kMaster), layout_.subgroups[i].count);
    const bool cached = plan::stays_in_memory(i, GetParam().cached, count());
    (cached ? in_memory : on_drive) +=
        GetParam().fake ? bytes : base::round_up(bytes, base::kIoAlignment);
  }
  EXPECT_EQ(state_read_since(store), on_drive);
  EXPECT_EQ(device_->state_bytes_cached() - hits, in_memory);
  if (GetParam().place == HostLinkPlace::kAtProcessor) {
    EXPECT_EQ(device_->host_traffic().since(host).up(base::TrafficKind::kWeight),
              elements() * base::data_type_bytes(GetParam().weights_type));
  }
}

TEST_P(WeightsContract, CommittedWeightsAreReadWhileGradientsComeInAndWhileAnUpdateRuns) {
  faulty_ = true;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  step(1);
  finish_step(1);
  ASSERT_FALSE(HasFatalFailure());
  const auto committed = weights_of(reference, 1);
  ASSERT_TRUE(run(BeginStep{2}).ok());
  for (size_t i = count(); i-- > 0;) {
    const auto gradient = test_gradient(layout_.subgroups[i], 2, GetParam().gradient_type);
    ASSERT_TRUE(put(layout_.subgroups[i], gradient, 0, layout_.subgroups[i].count).ok());
    expect_weights(ask_all(1), committed);
  }
  Command update{update_of(2)};
  const bool held = !GetParam().fake && !in_place();
  faults_.what = held ? Faults::What::kHoldWrites : Faults::What::kNothing;
  driver_.start(update);
  while (held && faults_.done == 0) std::this_thread::yield();
  if (!in_place()) expect_weights(ask_all(1), committed);
  faults_.what = Faults::What::kNothing;
  ASSERT_TRUE(driver_.wait_for(update).ok());
  if (!in_place()) expect_weights(ask_all(1), committed);
  ASSERT_TRUE(prepare(2).ok());
  if (!in_place()) expect_weights(ask_all(1), committed);
  ASSERT_TRUE(run(Commit{2}).ok());
  EXPECT_TRUE(weights_ == weights_of(reference, 2));
  expect_weights(ask_all(2), weights_);
  expect_state(reference);
}

TEST_P(WeightsContract, AnUpdateMakesTheWeightsThatAreWaitedForWithoutAnyRead) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  step(1);
  finish_step(1);
  (void)weights_of(reference, 1);
  base::TrafficReading store = device_->store_traffic();
  step(2);
  finish_step(2);
  ASSERT_FALSE(HasFatalFailure());
  (void)weights_of(reference, 2);
  const uint64_t usual = state_read_since(store);
  store = device_->store_traffic();
  const base::TrafficReading host = device_->host_traffic();
  begin_with_gradients(3);
  std::vector<std::unique_ptr<Reading>> readings;
  for (size_t i = 0; i < count(); ++i) readings.push_back(i == 2 ? nullptr : ask(i, 3));
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(run(streamed_update(3, {2})).ok());
  const auto expected = weights_of(reference, 3);
  expect_weights(readings, expected);
  EXPECT_TRUE(weights_[2] == expected[2]);
  EXPECT_EQ(state_read_since(store), usual);
  if (GetParam().place == HostLinkPlace::kAtProcessor) {
    EXPECT_EQ(device_->host_traffic().since(host).up(base::TrafficKind::kWeight),
              elements() * base::data_type_bytes(GetParam().weights_type));
  }
  finish_step(3);
  expect_state(reference);
}

INSTANTIATE_TEST_SUITE_P(Kinds, WeightsContract, testing::ValuesIn(kinds()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace smartinf::csd
