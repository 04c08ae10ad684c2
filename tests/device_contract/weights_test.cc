// Reading weights (ReadWeights) beside everything else that a device does, and updates that wait
// for whoever reads them.
#include <thread>

#include "smartinf/base/units.h"

#include "tests/device_contract/contract.h"

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
  /// Weights that the step's update makes; ends the reference's step.
  std::vector<std::vector<std::byte>> weights_of(ReferenceModel& reference, uint64_t number) {
    return reference.step(number, GetParam().gradient_type, GetParam().weights_type);
  }
  /// Weights of the state that the reference is in.
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
  /// Update of step `number`, without places for weights but for these subgroups.
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

/// An update changes cached state where it lies, and with durability "none" all of it.
TEST_P(WeightsContract, AnUpdateLeavesAloneWhatIsBeingRead) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  for (uint64_t number = 1; number <= 4; ++number) {
    step(number);
    finish_step(number);
    ASSERT_FALSE(HasFatalFailure());
    const auto committed = weights_of(reference, number);
    begin_with_gradients(number + 1);
    const auto readings = ask_all(number);
    Command update{update_of(number + 1)};
    driver_.start(update);
    for (size_t i = 0; i < count(); ++i) {
      const Status status = readings[i]->wait();
      if (in_place() && status.code() == ErrorCode::kFailedPrecondition) continue;
      EXPECT_TRUE(status.ok()) << status.to_string();
      EXPECT_TRUE(readings[i]->weights == committed[i]) << "weights of subgroup " << i;
    }
    ASSERT_TRUE(driver_.wait_for(update).ok());
    finish_step(++number);
    EXPECT_TRUE(weights_ == weights_of(reference, number));
  }
}

/// Does casts when it is told to.
class HeldCasts final : public Processor {
 public:
  explicit HeldCasts(std::function<void(Job&)> on_finished) : inner_(std::move(on_finished)) {}
  base::Result<std::unique_ptr<SlotMemory>> allocate(uint64_t bytes) override {
    return inner_.allocate(bytes);
  }
  void start(Job& job) override {
    const std::lock_guard lock(mutex_);
    const bool hold = !released_ && std::holds_alternative<CastJob>(job.work);
    hold ? held_.push_back(&job) : inner_.start(job);
  }
  uint32_t threads() const override { return 1; }
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    for (Job* job : held_) inner_.start(*job);
  }

 private:
  std::mutex mutex_;
  bool released_ = false;
  std::vector<Job*> held_;
  ReverseProcessor inner_;
};

TEST_P(WeightsContract, AnUpdateWaitsForAReadOfWhatItChanges) {
  if (GetParam().fake) GTEST_SKIP() << "it reads within submit()";
  HeldCasts* processor = nullptr;
  make_processor_ = [&](std::function<void(Job&)> on_finished) {
    auto made = std::make_unique<HeldCasts>(std::move(on_finished));
    processor = made.get();
    return base::Result<std::unique_ptr<Processor>>(std::move(made));
  };
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  step(1);
  finish_step(1);
  ASSERT_FALSE(HasFatalFailure());
  const auto committed = weights_of(reference, 1);
  begin_with_gradients(2);
  const auto held = ask(0, 1);
  Update message = update_of(2);
  std::swap(message.updates.front(), message.updates.back());  // the held one is the last
  Command update{message};
  driver_.start(update);
  for (size_t ready = 0; ready + 1 < count(); ++ready) {
    Completion completion;
    ASSERT_TRUE(driver_.queue.pop(completion, std::chrono::seconds(100)));
    EXPECT_EQ(completion.event, Completion::Event::kWeightsReady);
  }
  processor->release();
  EXPECT_TRUE(held->wait().ok()) << held->status.to_string();
  EXPECT_TRUE(held->weights == committed[0]);
  ASSERT_TRUE(driver_.wait_for(update).ok());
  finish_step(2);
  EXPECT_TRUE(weights_ == weights_of(reference, 2));
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

/// The order in which weights are asked for is the order of the update; what nobody asks for comes
/// at the end, and what has a place need not be asked for.
TEST_P(WeightsContract, AnUpdateOnDemandFollowsItsReaders) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  begin_with_gradients(1);
  Update message = streamed_update(1, {4});
  message.mode = plan::UpdateMode::kOnDemand;
  Command update{message};
  driver_.ready.clear();
  driver_.start(update);
  Completion first;
  ASSERT_TRUE(driver_.queue.pop(first, std::chrono::seconds(100)));
  EXPECT_EQ(first.event, Completion::Event::kWeightsReady);
  EXPECT_EQ(first.subgroup, layout_.subgroups[4].id);
  const auto expected = weights_of(reference, 1);
  EXPECT_TRUE(weights_[4] == expected[4]);
  for (const size_t i : {5, 0, 3}) {
    const auto reading = ask(i, 1);
    const Status status = reading->wait();
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(reading->weights == expected[i]) << i;
  }
  Command finish{FinishUpdate{}};
  CompletionQueue replies;
  finish.replies = &replies;
  device_->submit(finish);
  ASSERT_TRUE(driver_.wait_for(update).ok());
  ASSERT_TRUE(replies.pop(first, std::chrono::seconds(100)));
  EXPECT_TRUE(first.status.ok()) << first.status.to_string();
  ASSERT_EQ(driver_.ready.size(), 5u);
  for (const auto& [at, i] : {std::pair{0, 5}, {1, 0}, {2, 3}}) {
    EXPECT_EQ(driver_.ready[at], layout_.subgroups[i].id) << at;
  }
  finish_step(1);
  expect_state(reference);
}

TEST_P(WeightsContract, AnUpdateOnDemandThatNobodyReadsIsFinished) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  EXPECT_TRUE(run(FinishUpdate{}).ok()) << "there is none";
  begin_with_gradients(1);
  Update message = streamed_update(1);
  message.mode = plan::UpdateMode::kOnDemand;
  // All at once, as a queue may bring them.
  std::vector<std::unique_ptr<Command>> commands;
  for (Message next :
       {Message{message}, Message{FinishUpdate{}}, Message{Prepare{1, "x"}}, Message{Commit{1}}}) {
    commands.push_back(std::make_unique<Command>(Command{std::move(next)}));
    driver_.start(*commands.back());
  }
  for (const auto& command : commands) {
    const Status status = driver_.wait_for(*command);
    EXPECT_TRUE(status.ok()) << message_name(command->message) << ": " << status.to_string();
  }
  const auto expected = weights_of(reference, 1);
  expect_weights(ask_all(1), expected);
  expect_state(reference);
  // Nor does the device wait for them when it is closed.
  begin_with_gradients(2);
  Update second = streamed_update(2);
  second.mode = plan::UpdateMode::kOnDemand;
  Command unread{second};
  driver_.start(unread);
  device_.reset();
}

TEST_P(WeightsContract, AnAbortEndsTheReadsThatWaitForTheStep) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const auto committed = weights_at(reference, GetParam().weights_type);
  const DataType other =
      GetParam().weights_type == DataType::kF32 ? DataType::kBf16 : DataType::kF32;
  for (const bool updates : {false, true}) {
    if (updates && in_place()) break;
    begin_with_gradients(1);
    const auto waiting = updates ? ask(2, 1, other) : ask(2, 1);
    Update message = streamed_update(1);
    message.mode = plan::UpdateMode::kOnDemand;
    Command update{message};
    if (updates) {
      driver_.start(update);
      EXPECT_TRUE(answer_of(1, 1).ok());
    }
    Command back{Abort{1}};
    driver_.start(back);
    if (updates) {
      EXPECT_EQ(driver_.wait_for(update).code(), ErrorCode::kCancelled);
    }
    EXPECT_TRUE(driver_.wait_for(back).ok());
    const Status status = waiting->wait();
    EXPECT_EQ(status.code(), ErrorCode::kCancelled) << status.to_string();
    expect_weights(ask_all(0), committed);
    EXPECT_EQ(answer_of(1, 1).code(), ErrorCode::kFailedPrecondition) << "it has not begun";
  }
}

TEST_P(WeightsContract, ACommitWaitsForReadsAndReadsWaitForACommit) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const auto before = weights_at(reference, GetParam().weights_type);
  for (int time = 0; time < 5; ++time) {  // in which order things come is up to the device
    ASSERT_TRUE(run(BeginStep{1}).ok());
    const auto early = ask_all(0);
    Command back{Abort{1}};
    driver_.start(back);
    EXPECT_TRUE(driver_.wait_for(back).ok());
    expect_weights(early, before);
  }
  begin_with_gradients(1);
  ASSERT_TRUE(run(streamed_update(1)).ok());
  ASSERT_TRUE(prepare(1).ok());
  const auto late = ask_all(1);  // of what the update has made already
  for (const auto& reading : late) EXPECT_FALSE(reading->answered_within({}));
  std::vector<std::unique_ptr<Reading>> early;
  if (!in_place()) early = ask_all(0);
  Command commit{Commit{1}};
  driver_.start(commit);
  EXPECT_TRUE(driver_.wait_for(commit).ok());
  expect_weights(early, before);
  expect_weights(late, weights_of(reference, 1));
  EXPECT_EQ(answer_of(0, 0).code(), ErrorCode::kFailedPrecondition);
  // Reads go on over the beginning of the next step.
  step(2);
  finish_step(2);
  const auto after = ask_all(2);
  ASSERT_TRUE(run(BeginStep{3}).ok());
  expect_weights(after, weights_of(reference, 2));
}

TEST_P(WeightsContract, ReadsThatCannotBeServedAreRefused) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(answer_of(0, 1).code(), ErrorCode::kFailedPrecondition) << "it has not begun";
  std::byte none{};
  EXPECT_EQ(run(ReadWeights{base::SubgroupId{0}, 0, DataType::kBf16, &none}).code(),
            ErrorCode::kInvalidArgument);
  begin_with_gradients(1);
  EXPECT_EQ(answer_of(0, 2).code(), ErrorCode::kFailedPrecondition);
  const auto waiting = ask(0, 1);
  const Status second = answer_of(0, 1);
  EXPECT_EQ(second.code(), ErrorCode::kFailedPrecondition);
  EXPECT_NE(second.to_string().find("drive-a"), std::string::npos) << second.to_string();
  ASSERT_TRUE(run(streamed_update(1)).ok());
  EXPECT_TRUE(waiting->wait().ok());
  if (in_place()) {
    EXPECT_EQ(answer_of(0, 0).code(), ErrorCode::kFailedPrecondition) << "it is overwritten";
  }
  finish_step(1);
  EXPECT_EQ(answer_of(0, 0).code(), ErrorCode::kFailedPrecondition);
  EXPECT_EQ(answer_of(0, 2).code(), ErrorCode::kFailedPrecondition);
  EXPECT_TRUE(answer_of(0, 1).ok());
  if (GetParam().fake) return;
  Update other_planes = streamed_update(2);
  begin_with_gradients(2);
  for (kernels::StepScalars& scalars : other_planes.scalars) {
    scalars.rule = kernels::UpdateRule::kLion;
  }
  EXPECT_EQ(run(other_planes).code(), ErrorCode::kMismatch);
  const Status failed = answer_of(0, 2);
  EXPECT_EQ(failed.code(), ErrorCode::kMismatch) << "the step can only be aborted";
  EXPECT_TRUE(run(Abort{2}).ok());
  if (GetParam().writes_postponed()) {
    ASSERT_TRUE(run(Flush{}).ok());
  }
  weight_read_slots_ = 0;
  open();
  ASSERT_FALSE(HasFatalFailure());
  const Status unsupported = answer_of(0, 1);
  EXPECT_EQ(unsupported.code(), ErrorCode::kUnsupported);
  EXPECT_NE(unsupported.to_string().find("read slots"), std::string::npos);
}

TEST_P(WeightsContract, DamagedWeightsAreNamedAndTheDeviceGoesOn) {
  if (GetParam().fake) GTEST_SKIP() << "it has no drive";
  faulty_ = true;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const auto expected = weights_at(reference, GetParam().weights_type);
  faults_.what = Faults::What::kFailReads;
  EXPECT_EQ(answer_of(1, 0).code(), ErrorCode::kIo);
  if (GetParam().checksums) {
    faults_.what = Faults::What::kFlipReads;
    const Status status = answer_of(1, 0);
    EXPECT_EQ(status.code(), ErrorCode::kCorrupt) << status.to_string();
    for (const char* part : {"drive-a", "block ", "master plane of subgroup 3"}) {
      EXPECT_NE(status.to_string().find(part), std::string::npos) << status.to_string();
    }
  }
  faults_.what = Faults::What::kNothing;
  expect_weights(ask_all(0), expected);
  step(1);
  finish_step(1);
  expect_weights(ask_all(1), weights_of(reference, 1));
}

/// Its results may be made again with other options.
TEST_P(WeightsContract, AnUpdateOfCompletedGradientsServesNoReaders) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  if (!device_->info().updates_as_completed.ok()) return;  // not with this kind
  ReferenceModel reference(layout_, groups_);
  for (const bool guessed_right : {false, true}) {
    const uint64_t number = guessed_right ? 2 : 1;
    ASSERT_TRUE(run(BeginStep{number}).ok());
    Command early{streamed_update(number)};
    Update& guess = std::get<Update>(early.message);
    guess.mode = plan::UpdateMode::kAsCompleted;
    if (!guessed_right) guess.scalars = test_scalars(number + 7);
    CompletionQueue replies;  // of its own: gradients are answered meanwhile
    early.replies = &replies;
    device_->submit(early);
    const auto readings = ask_all(number);
    put_all(number);
    for (size_t ready = 0; ready < count(); ++ready) {
      Completion completion;
      ASSERT_TRUE(replies.pop(completion, std::chrono::seconds(100)));
    }
    for (const auto& reading : readings) EXPECT_FALSE(reading->answered_within({}));
    Update update = streamed_update(number);
    if (guessed_right) update.mode = plan::UpdateMode::kRest;
    ASSERT_TRUE(run(update).ok());
    if (guessed_right) {
      for (const auto& reading : readings) EXPECT_FALSE(reading->answered_within({}));
    } else {
      for (const auto& reading : readings) EXPECT_TRUE(reading->wait().ok());
    }
    finish_step(number);
    expect_weights(readings, weights_of(reference, number));
  }
}

TEST_P(WeightsContract, AClosingDeviceAnswersWhoWaits) {
  if (GetParam().fake) GTEST_SKIP() << "it answers nothing when it is closed";
  create();
  ASSERT_FALSE(HasFatalFailure());
  begin_with_gradients(1);
  const auto waiting = ask(0, 1);
  device_.reset();
  EXPECT_TRUE(waiting->answered_within({})) << "not answered";
  EXPECT_EQ(waiting->status.code(), ErrorCode::kCancelled);
}

TEST_P(WeightsContract, MemoryForReadingComesOutOfTheBudget) {
  if (GetParam().fake || GetParam().remote) return;  // it has no memory here
  create();
  ASSERT_FALSE(HasFatalFailure());
  const uint64_t master =
      base::round_up(base::encoded_bytes(base::plane_encoding(layout_.format, layout_.planes[0]),
                                         layout_.subgroups[0].count),
                     base::kIoAlignment);
  const uint64_t with = device_->info().memory_bytes;
  EXPECT_EQ(device_->info().weight_read_slots, 2u);
  if (!GetParam().other_processor) {
    EXPECT_EQ(with, device_->scratch_memory().size() + 2 * master);
  }
  if (GetParam().writes_postponed()) return;
  // Where there is no room for them, no slot is left.
  device_.reset();
  LocalDeviceOptions tight = options();
  tight.memory_bytes = with;
  tight.weight_read_slots = static_cast<uint32_t>(with / master);
  const auto made =
      GetParam().memory ? open_emulated_device(tight, *drive_) : open_local_device(tight);
  EXPECT_EQ(made.status().code(), ErrorCode::kOutOfMemory);
}

INSTANTIATE_TEST_SUITE_P(Kinds, WeightsContract, testing::ValuesIn(kinds()),
                         [](const auto& param) { return param.param.name; });
INSTANTIATE_TEST_SUITE_P(OpenCl, WeightsContract,
                         testing::ValuesIn(opencl_kinds({"opencl", "opencl_copied_half_in_memory",
                                                         "opencl_m24_q4_peer_half_in_memory"})),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace smartinf::csd
