// Reading ahead (Prefetch) saves the update its reads and changes no result.
#include <chrono>
#include <numeric>
#include <thread>

#include "smartinf/base/units.h"

#include "tests/device_contract/contract.h"

namespace smartinf::csd {
namespace {

class PrefetchContract : public DeviceContract {
 protected:
  std::vector<base::SubgroupId> all_subgroups() const {
    std::vector<base::SubgroupId> ids;
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) ids.push_back(subgroup.id);
    return ids;
  }
  uint64_t read_since(const base::TrafficReading& before) const {
    return device_->store_traffic().since(before).up(base::TrafficKind::kState);
  }
  /// State of the layout's i-th subgroup on the drive; 0: it lies in memory.
  uint64_t bytes_read_of(size_t i) const {
    if (plan::stays_in_memory(i, GetParam().cached, layout_.subgroups.size())) return 0;
    uint64_t bytes = 0;
    for (const base::PlaneKind plane : layout_.planes) {
      bytes += base::round_up(base::encoded_bytes(base::plane_encoding(layout_.format, plane),
                                                  layout_.subgroups[i].count),
                              base::kIoAlignment);
    }
    return bytes;
  }
  /// Begins a step with everything as a hint, and waits until all has been read that slots hold.
  void begin_and_wait(uint64_t number) {
    const base::TrafficReading before = device_->store_traffic();
    uint64_t expected = 0;
    const bool naive = GetParam().schedule == plan::ScheduleVariant::kNaive;
    const size_t slots = naive ? 1 : device_->info().slots;
    for (size_t i = 0; i < std::min(slots, layout_.subgroups.size()); ++i) {
      expected += bytes_read_of(i);
    }
    ASSERT_TRUE(run(BeginStep{number}).ok());
    ASSERT_TRUE(run(Prefetch{all_subgroups()}).ok());
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (read_since(before) < expected && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_EQ(read_since(before), expected);
  }
  void expect_update(ReferenceModel& reference, uint64_t number, Update& update) {
    const Status status = run(update);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(weights_ ==
                reference.step(number, GetParam().gradient_type, GetParam().weights_type));
    finish_step(number);
  }
};

TEST_P(PrefetchContract, AnUpdateReadsOnlyWhatWasNotPrefetched) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  for (uint64_t number = 1; number <= 3; ++number) {
    const base::TrafficReading before = device_->store_traffic();
    uint64_t once = 0;
    // In its first step a state cache is empty, and the update fills it from the drive.
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) once += bytes_read_of(i);
    begin_and_wait(number);
    ASSERT_FALSE(HasFatalFailure());
    put_all(number);
    Update update = update_of(number);
    expect_update(reference, number, update);
    if (number > 1 || GetParam().cached == 0) {
      EXPECT_EQ(read_since(before), once);
    }
  }
  expect_state(reference);
}

TEST_P(PrefetchContract, IsOnlyAHint) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  // The update comes in another order, and at once.
  ASSERT_TRUE(run(BeginStep{1}).ok());
  ASSERT_TRUE(run(Prefetch{all_subgroups()}).ok());
  put_all(1);
  Update update = update_of(1);
  std::reverse(update.updates.begin(), update.updates.end());
  expect_update(reference, 1, update);
  // Slots are used for something else in between.
  begin_and_wait(2);
  expect_state(reference);
  put_all(2);
  update = update_of(2);
  expect_update(reference, 2, update);
  // Some of what was read is not used, and is of a former step in the next one.
  begin_and_wait(3);
  put_all(3);
  Update rest = update_of(3);
  Update first = rest;
  first.updates.resize(1);
  rest.updates.erase(rest.updates.begin());
  ASSERT_TRUE(run(first).ok());
  expect_update(reference, 3, rest);
  step(4);
  reference.step(4, GetParam().gradient_type, GetParam().weights_type);
  finish_step(4);
  expect_state(reference);
  if (GetParam().durability == storage::Durability::kNone) return;
  // The step is aborted, and made again with and without the hint; then the next one.
  begin_and_wait(5);
  ASSERT_TRUE(run(Abort{5}).ok());
  begin_and_wait(5);
  put_all(5);
  ASSERT_TRUE(run(Message(update_of(5))).ok());
  ASSERT_TRUE(prepare(5).ok());
  ASSERT_TRUE(run(Abort{5}).ok());
  ASSERT_TRUE(run(BeginStep{5}).ok());
  put_all(5);
  update = update_of(5);
  expect_update(reference, 5, update);
  begin_and_wait(6);
  put_all(6);
  update = update_of(6);
  expect_update(reference, 6, update);
  expect_state(reference);
}

TEST_P(PrefetchContract, AnEarlyUpdateThatIsDoneAgainReadsTheCommittedState) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  if (!device_->info().updates_as_completed.ok()) return;  // not with this kind
  ReferenceModel reference(layout_, groups_);
  begin_and_wait(1);
  Update wrong = update_of(1);
  wrong.mode = plan::UpdateMode::kAsCompleted;
  for (kernels::StepScalars& scalars : wrong.scalars) scalars.gradient_scale *= 2.0f;
  Command early{wrong};
  CompletionQueue replies;  // of its own: gradients are answered meanwhile
  early.replies = &replies;
  device_->submit(early);
  put_all(1);
  Completion completion;
  do {
    ASSERT_TRUE(replies.pop(completion, std::chrono::seconds(100)));
  } while (completion.event != Completion::Event::kDone);
  ASSERT_TRUE(completion.status.ok()) << completion.status.to_string();
  Update update = update_of(1);
  expect_update(reference, 1, update);
  expect_state(reference);
}

TEST_P(PrefetchContract, IsRefusedOutsideAStepAndForAnotherDevice) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(run(Prefetch{all_subgroups()}).code(), base::ErrorCode::kFailedPrecondition);
  ASSERT_TRUE(run(BeginStep{1}).ok());
  EXPECT_EQ(run(Prefetch{{base::SubgroupId{1000}}}).code(), base::ErrorCode::kInvalidArgument);
}

/// All that read state from a store: a fake device takes no notice of the hint.
std::vector<Kind> prefetching_kinds() {
  std::vector<Kind> all = kinds();
  std::erase_if(all, [](const Kind& kind) { return kind.fake; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Kinds, PrefetchContract, testing::ValuesIn(prefetching_kinds()),
                         [](const auto& param) { return param.param.name; });
INSTANTIATE_TEST_SUITE_P(OpenCl, PrefetchContract,
                         testing::ValuesIn(opencl_kinds({"opencl", "opencl_copied_half_in_memory",
                                                         "opencl_m24_q4_peer_half_in_memory"})),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace smartinf::csd
