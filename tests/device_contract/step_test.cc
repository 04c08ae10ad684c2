// Tests of what every device kind does in a step: bits, order, aborts, traffic, snapshots.
#include <set>
#include <thread>

#include "tests/device_contract/contract.h"

namespace smartinf::csd {
namespace {

TEST_P(DeviceContract, GivesTheBitsOfThePlainReference) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  for (uint64_t number = 1; number <= 3; ++number) {
    step(number);
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_TRUE(weights_ ==
                reference.step(number, GetParam().gradient_type, GetParam().weights_type))
        << "weights of step " << number;
    finish_step(number);
    ASSERT_FALSE(HasFatalFailure());
  }
  expect_state(reference);
  open();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(device_->state().committed_step, 3u);
  EXPECT_EQ(device_->client_metadata(), "client metadata of step 3");
  expect_state(reference);
}

/// Every rule in every state format, on each way that a message goes to a processor.
class RuleContract : public DeviceContract {};

std::vector<Kind> rule_kinds(bool opencl) {
  std::vector<Kind> all;
  for (const kernels::UpdateRule rule : kernels::all_update_rules()) {
    for (const StateFormat format : {StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8}) {
      const auto add = [&](std::string_view device, auto change) {
        Kind kind;
        change(kind);
        kind.rule = rule;
        kind.format = format;
        kind.name = std::string(device) + "_" + std::string(kernels::update_rule_name(rule)) + "_" +
                    base::state_format_name(format);
        all.push_back(kind);
      };
      if (opencl) {
        add("opencl", [](Kind& k) { k.opencl = true; });
        continue;
      }
      add("memory", [](Kind&) {});
      add("local", [](Kind& k) { k.memory = false; });
      add("other_processor", [](Kind& k) { k.other_processor = true; });
      add("remote", [](Kind& k) { k.remote = true; });
      if (format == StateFormat::kF32) add("fake", [](Kind& k) { k.fake = true; });
    }
  }
  return all;
}

TEST_P(RuleContract, GivesTheBitsOfThePlainReference) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_, GetParam().rule);
  for (uint64_t number = 1; number <= 2; ++number) {
    step(number);
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_TRUE(weights_ ==
                reference.step(number, GetParam().gradient_type, GetParam().weights_type))
        << "weights of step " << number;
    finish_step(number);
    ASSERT_FALSE(HasFatalFailure());
  }
  expect_state(reference);
}

TEST_P(DeviceContract, GivesASnapshotOfTheCommittedStep) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const bool in_place = GetParam().durability == storage::Durability::kNone;
  for (uint64_t number = 1; number <= 2; ++number) {
    step(number);
    ASSERT_FALSE(HasFatalFailure());
    (void)reference.step(number, GetParam().gradient_type, GetParam().weights_type);
    finish_step(number);
    ASSERT_FALSE(HasFatalFailure());
  }
  ASSERT_TRUE(run(Flush{}).ok());
  auto opened = device_->snapshot();
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  Snapshot& snapshot = **opened;
  EXPECT_EQ(snapshot.name(), "drive-a");
  EXPECT_EQ(snapshot.state().committed_step, 2u);
  EXPECT_EQ(snapshot.choose_step(7).code(), base::ErrorCode::kInvalidArgument);
  ASSERT_TRUE(snapshot.choose_step(2).ok());
  EXPECT_EQ(snapshot.client_metadata(), "client metadata of step 2");
  // Also while the next step is updated: that goes elsewhere.
  for (const bool in_next_step : {false, true}) {
    if (in_next_step && in_place) break;
    if (in_next_step) step(3);
    ASSERT_FALSE(HasFatalFailure());
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      for (size_t p = 0; p < layout_.planes.size(); ++p) {
        EXPECT_TRUE(plane_of(snapshot, i, p) == reference.plane(i, p))
            << "subgroup " << i << " plane " << p << " in the next step " << in_next_step;
      }
    }
  }
}

TEST_P(DeviceContract, TakesAStepBack) {
  if (GetParam().durability == storage::Durability::kNone) return;  // in place: nothing to abort
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(run(Abort{1}).ok());
  expect_state(reference);
  // Prepared, then aborted.
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(prepare(1).ok());
  ASSERT_TRUE(run(Abort{1}).ok());
  expect_state(reference);
  // Only gradients came; then the step again, whole.
  ASSERT_TRUE(run(BeginStep{1}).ok());
  put_all(1);
  ASSERT_TRUE(run(Abort{1}).ok());
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
}

TEST_P(DeviceContract, StopsAnUpdateThatIsAborted) {
  if (GetParam().durability == storage::Durability::kNone) return;  // in place
  if (GetParam().fake) return;  // an update ends within submit()
  faulty_ = true;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  ASSERT_TRUE(run(BeginStep{1}).ok());
  put_all(1);
  Command update{update_of(1)};
  Command back{Abort{1}};
  faults_.what = Faults::What::kHoldWrites;  // the update cannot end before the other command comes
  driver_.start(update);
  while (faults_.done == 0) std::this_thread::yield();
  start_at_device(back);
  faults_.what = Faults::What::kNothing;
  EXPECT_EQ(driver_.wait_for(update).code(), base::ErrorCode::kCancelled);
  EXPECT_TRUE(driver_.wait_for(back).ok());
  expect_state(reference);
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
}

/// A message that ends an update reaches the device while the update waits for what is in flight
/// before it.
TEST_P(DeviceContract, AnUpdateThatHasNotStartedIsStopped) {
  if (GetParam().durability == storage::Durability::kNone) return;  // in place
  if (GetParam().fake) return;  // an update ends within submit()
  faulty_ = true;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const storage::StoredSubgroup& first = layout_.subgroups.front();
  const std::vector<float> ones(first.count, 1.0f);
  const auto wait_behind_a_write = [&](Update message, Message end, base::ErrorCode outcome) {
    ASSERT_TRUE(run(BeginStep{1}).ok());
    if (message.mode != plan::UpdateMode::kAsCompleted) put_all(1);
    faults_.done = 0;
    faults_.what = Faults::What::kHoldWrites;
    Command write{WriteState{first.id, first.count, {ones.data()}}};
    Command update{std::move(message)};
    Command ending{std::move(end)};
    driver_.start(write);
    while (faults_.done == 0) std::this_thread::yield();
    start_at_device(update);
    start_at_device(ending);
    driver_.ready.clear();
    faults_.what = Faults::What::kNothing;
    EXPECT_TRUE(driver_.wait_for(write).ok());
    const Status status = driver_.wait_for(update);
    EXPECT_EQ(status.code(), outcome) << status.to_string();
    EXPECT_TRUE(driver_.wait_for(ending).ok());
    EXPECT_TRUE(driver_.ready.empty());
    EXPECT_TRUE(run(Abort{1}).ok());
    expect_state(reference);
  };
  wait_behind_a_write(update_of(1), Abort{1}, base::ErrorCode::kCancelled);
  if (device_->info().updates_as_completed.ok()) {
    Update early = update_of(1);  // of gradients that never come
    early.mode = plan::UpdateMode::kAsCompleted;
    wait_behind_a_write(early, Abort{1}, base::ErrorCode::kCancelled);
    wait_behind_a_write(early, StopUpdate{}, base::ErrorCode::kOk);
  }
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
}

TEST_P(DeviceContract, RefusesCommandsOutOfOrder) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(prepare(1).code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_EQ(run(Commit{1}).code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_TRUE(run(Abort{1}).ok());
  ASSERT_TRUE(run(BeginStep{1}).ok());
  EXPECT_EQ(run(BeginStep{1}).code(), base::ErrorCode::kFailedPrecondition);

  Update update = update_of(1);
  const Status incomplete = run(update);
  EXPECT_EQ(incomplete.code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_NE(incomplete.to_string().find("drive-a"), std::string::npos) << incomplete.to_string();

  const storage::StoredSubgroup& first = layout_.subgroups.front();
  const auto gradient = test_gradient(first, 1, GetParam().gradient_type);
  EXPECT_EQ(put({base::SubgroupId{0}, 0, first.count}, gradient, 0, 1).code(),
            base::ErrorCode::kInvalidArgument);
  EXPECT_EQ(put(first, gradient, first.count - 1, 2).code(), base::ErrorCode::kInvalidArgument);
  EXPECT_TRUE(put(first, gradient, 0, first.count).ok());
  EXPECT_EQ(put(first, gradient, 0, first.count).code(), base::ErrorCode::kInvalidArgument);
}

// Their replies may be lost on the way.
/// Ranges, not their number: half of a gradient put twice is not a whole one.
TEST_P(DeviceContract, AnElementsGradientIsPutOnce) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  ASSERT_TRUE(run(BeginStep{1}).ok());
  for (auto subgroup = layout_.subgroups.rbegin(); subgroup != layout_.subgroups.rend();
       ++subgroup) {
    const auto gradient = test_gradient(*subgroup, 1, GetParam().gradient_type);
    const uint64_t all = subgroup->count;
    const uint64_t half = all / 2;
    const auto refused = [&](uint64_t first, uint64_t count) {
      EXPECT_EQ(put(*subgroup, gradient, first, count).code(), base::ErrorCode::kInvalidArgument)
          << first << " " << count << " of " << all;
    };
    ASSERT_TRUE(put(*subgroup, gradient, 0, half).ok());
    refused(0, half);
    refused(half - 1, 2);
    ASSERT_TRUE(put(*subgroup, gradient, half + 1, all - half - 1).ok());
    refused(half - 1, 3);
    ASSERT_TRUE(put(*subgroup, gradient, half, 1).ok());
    refused(0, 1);
    refused(all - 1, 1);
  }
  ASSERT_TRUE(run(update_of(1)).ok());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
}

TEST_P(DeviceContract, ACommitAndAnAbortCanBeAskedForAgain) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(run(Commit{0}).ok());
  ReferenceModel reference(layout_, groups_);
  step(1);
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  const auto expect_committed = [&] {
    EXPECT_TRUE(run(Commit{1}).ok());
    for (const uint64_t other : {0, 2}) {
      EXPECT_EQ(run(Commit{other}).code(), base::ErrorCode::kFailedPrecondition) << other;
    }
    EXPECT_EQ(device_->state().committed_step, 1u);
    EXPECT_EQ(device_->client_metadata(), "client metadata of step 1");
  };
  expect_committed();
  ASSERT_TRUE(run(BeginStep{2}).ok());
  expect_committed();
  for (int time = 0; time < 3; ++time) EXPECT_TRUE(run(Abort{2}).ok());
  EXPECT_EQ(run(Abort{1}).code(), base::ErrorCode::kFailedPrecondition) << "it is committed";
  expect_committed();
  expect_state(reference);
  open();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(run(Abort{2}).ok());
  expect_committed();
  step(2);  // none of it stands in the way
  ASSERT_TRUE(prepare(2).ok());
  EXPECT_TRUE(run(Commit{1}).ok());
  ASSERT_TRUE(run(Commit{2}).ok());
  reference.step(2, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
  if (GetParam().durability == storage::Durability::kStep) return;
  // In place: a step that has written cannot be aborted, however often it is asked for.
  step(3);
  for (int time = 0; time < 2; ++time) EXPECT_FALSE(run(Abort{3}).ok());
  EXPECT_FALSE(run(Commit{2}).ok()) << "what lies there is of no step";
}

TEST_P(DeviceContract, CountsWhatPasses) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  const base::TrafficReading host_before = device_->host_traffic();
  const base::TrafficReading store_before = device_->store_traffic();
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  const base::TrafficReading host = device_->host_traffic().since(host_before);
  const base::TrafficReading store = device_->store_traffic().since(store_before);
  uint64_t elements = 0;
  uint64_t state_bytes = 0;
  for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
    elements += subgroup.count;
    for (const base::PlaneKind plane : layout_.planes) {
      state_bytes +=
          base::encoded_bytes(base::plane_encoding(layout_.format, plane), subgroup.count);
    }
  }
  // The store moves whole 4 KiB units: up to one more per plane and subgroup.
  const uint64_t slack = layout_.subgroups.size() * layout_.planes.size() * 4096;
  EXPECT_GE(store.up(base::TrafficKind::kState), state_bytes);
  EXPECT_LE(store.up(base::TrafficKind::kState), state_bytes + slack);
  if (!GetParam().writes_postponed()) {
    EXPECT_EQ(store.up(base::TrafficKind::kState), store.down(base::TrafficKind::kState));
  }
  EXPECT_EQ(store.up(base::TrafficKind::kGradient), store.down(base::TrafficKind::kGradient));
  EXPECT_EQ(store.up(base::TrafficKind::kGradient) > 0, GetParam().spill);
  if (GetParam().place == HostLinkPlace::kAtStore) {
    EXPECT_EQ(host.up_bytes, store.up_bytes);
    EXPECT_EQ(host.down_bytes, store.down_bytes);
  } else {
    EXPECT_EQ(host.down(base::TrafficKind::kGradient), elements * type_bytes());
    EXPECT_EQ(host.up(base::TrafficKind::kWeight),
              elements * base::data_type_bytes(GetParam().weights_type));
    EXPECT_EQ(host.up_total(), host.up(base::TrafficKind::kWeight));
    EXPECT_EQ(host.down_total(), host.down(base::TrafficKind::kGradient));
  }
}

TEST_P(DeviceContract, ReadsAPieceOfOnePlane) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const storage::StoredSubgroup& subgroup = layout_.subgroups[1];
  std::vector<float> piece(1000, -1.0f);
  ReadState read;
  read.subgroup = subgroup.id;
  read.first = base::kBlockElements;
  read.count = piece.size() - 1;
  read.planes[0] = piece.data();
  ASSERT_TRUE(run(read).ok());
  const std::vector<float> whole = reference.plane(1, 0);
  EXPECT_TRUE(std::equal(piece.begin(), piece.end() - 1, whole.begin() + base::kBlockElements));
  EXPECT_EQ(piece.back(), -1.0f) << "wrote behind the end";
}

class OneSlotContract : public DeviceContract {};

/// The order in which an update takes subgroups up whose gradients become complete while its slots
/// are busy; an update that follows and keeps what was done lets it go on.
TEST_P(OneSlotContract, OfSeveralCompleteSubgroupsTheLastOneIsUpdatedFirst) {
  faulty_ = true;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  ASSERT_TRUE(run(BeginStep{1}).ok());
  Command early{update_of(1)};
  std::get<Update>(early.message).mode = plan::UpdateMode::kAsCompleted;
  CompletionQueue replies;  // of its own: gradients are answered meanwhile
  early.replies = &replies;
  device_->submit(early);
  faults_.what = Faults::What::kHoldWrites;
  const auto put_whole = [&](size_t i) {
    const auto gradient = test_gradient(layout_.subgroups[i], 1, GetParam().gradient_type);
    ASSERT_TRUE(put(layout_.subgroups[i], gradient, 0, layout_.subgroups[i].count).ok());
  };
  put_whole(3);
  while (faults_.done == 0) std::this_thread::yield();  // it has the slot
  for (const size_t i : {5, 0, 1, 4, 2}) put_whole(i);
  Update update = std::get<Update>(early.message);
  update.mode = plan::UpdateMode::kRest;
  Command rest{update};
  driver_.ready.clear();
  driver_.start(rest);
  faults_.what = Faults::What::kNothing;
  ASSERT_TRUE(driver_.wait_for(rest).ok());
  EXPECT_TRUE(driver_.ready.empty()) << "all were updated before";
  std::vector<base::SubgroupId> order;
  for (Completion completion; replies.pop(completion, std::chrono::seconds(100));) {
    if (completion.event == Completion::Event::kDone) break;
    order.push_back(completion.subgroup);
  }
  std::vector<base::SubgroupId> expected;
  for (const size_t i : {3, 2, 4, 1, 0, 5}) expected.push_back(layout_.subgroups[i].id);
  EXPECT_EQ(order, expected);
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
}

std::vector<Kind> one_slot_kinds() {
  std::vector<Kind> all = kinds();
  std::erase_if(all, [](const Kind& kind) { return kind.slots != 1; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Kinds, OneSlotContract, testing::ValuesIn(one_slot_kinds()),
                         [](const auto& param) { return param.param.name; });

INSTANTIATE_TEST_SUITE_P(Rules, RuleContract, testing::ValuesIn(rule_kinds(false)),
                         [](const auto& param) { return param.param.name; });
INSTANTIATE_TEST_SUITE_P(OpenCl, RuleContract, testing::ValuesIn(rule_kinds(true)),
                         [](const auto& param) { return param.param.name; });
INSTANTIATE_TEST_SUITE_P(Kinds, DeviceContract, testing::ValuesIn(kinds()),
                         [](const auto& param) { return param.param.name; });
INSTANTIATE_TEST_SUITE_P(OpenCl, DeviceContract, testing::ValuesIn(opencl_kinds()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace smartinf::csd
