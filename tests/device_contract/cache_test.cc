// Tests of a device whose state lies in memory in part.
#include "tests/device_contract/contract.h"

namespace smartinf::csd {
namespace {

class CachedContract : public DeviceContract {};

std::vector<Kind> cached_kinds() {
  std::vector<Kind> all = kinds();
  std::erase_if(all, [](const Kind& kind) { return kind.cached == 0; });
  return all;
}

/// Bytes of state on the drive of those subgroups that are in memory, or of the others.
uint64_t state_bytes(const storage::StoreLayout& layout, uint64_t cached, bool in_memory) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < layout.subgroups.size(); ++i) {
    if (plan::stays_in_memory(i, cached, layout.subgroups.size()) != in_memory) continue;
    for (const base::PlaneKind plane : layout.planes) {
      bytes += base::round_up(base::encoded_bytes(base::plane_encoding(layout.format, plane),
                                                  layout.subgroups[i].count),
                              base::kIoAlignment);
    }
  }
  return bytes;
}

TEST_P(CachedContract, ReadsOnlyWhatIsNotInMemory) {
  const uint64_t cached = GetParam().cached;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const auto make_step = [&](uint64_t number) {
    step(number);
    finish_step(number);
    reference.step(number, GetParam().gradient_type, GetParam().weights_type);
  };
  make_step(1);
  EXPECT_EQ(device_->info().cached_subgroups, cached);
  EXPECT_EQ(device_->info().state_cache_bytes, state_bytes(layout_, cached, true));
  const uint64_t in_memory = state_bytes(layout_, cached, true);
  const uint64_t on_drive = state_bytes(layout_, cached, false);
  const uint64_t hits_before = device_->state_bytes_cached();
  const base::TrafficReading before = device_->store_traffic();
  const base::TrafficReading link_before = drive_link_->traffic();
  make_step(2);
  EXPECT_EQ(device_->state_bytes_cached() - hits_before, in_memory);
  const base::TrafficReading moved = device_->store_traffic().since(before);
  EXPECT_EQ(moved.up(base::TrafficKind::kState), on_drive);
  EXPECT_EQ(moved.down(base::TrafficKind::kState),
            GetParam().writes_postponed() ? on_drive : on_drive + in_memory);
  if (GetParam().links) {
    EXPECT_EQ(drive_link_->traffic().since(link_before).up(base::TrafficKind::kState), on_drive);
  }
  // Asking for the state is served from memory too.
  const uint64_t read_before = device_->store_traffic().up(base::TrafficKind::kState);
  expect_state(reference);
  EXPECT_EQ(device_->store_traffic().up(base::TrafficKind::kState) - read_before, on_drive);
  if (GetParam().writes_postponed()) return;
  // The committed state is asked for while memory holds the one after it.
  step(3);
  ASSERT_FALSE(HasFatalFailure());
  expect_state(reference);
}

// A write from outside takes the place of what lies in memory, plane by plane.
TEST_P(CachedContract, AWriteReplacesWhatIsInMemory) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  step(1);
  finish_step(1);
  const auto read = [&](size_t i, std::vector<std::vector<float>>& planes) {
    ReadState command;
    command.subgroup = layout_.subgroups[i].id;
    command.count = layout_.subgroups[i].count;
    planes.assign(3, std::vector<float>(command.count));
    for (size_t p = 0; p < 3; ++p) command.planes[p] = planes[p].data();
    ASSERT_TRUE(run(command).ok());
  };
  std::vector<std::vector<std::vector<float>>> before(layout_.subgroups.size());
  for (size_t i = 0; i < before.size(); ++i) read(i, before[i]);
  ASSERT_TRUE(run(BeginStep{2}).ok());
  for (size_t i = 0; i < before.size(); ++i) {
    WriteState write;
    write.subgroup = layout_.subgroups[i].id;
    write.count = layout_.subgroups[i].count;
    write.plane_mask = 1;
    for (float& value : before[i][0]) value *= 2;  // exact in every format
    write.planes[0] = before[i][0].data();
    ASSERT_TRUE(run(write).ok());
  }
  finish_step(2);
  const auto expect_planes = [&] {
    for (size_t i = 0; i < before.size(); ++i) {
      std::vector<std::vector<float>> now;
      read(i, now);
      EXPECT_TRUE(now == before[i]) << "subgroup " << i;
    }
  };
  expect_planes();
  if (GetParam().writes_postponed()) {
    ASSERT_TRUE(run(Flush{}).ok());
  }
  open();
  ASSERT_FALSE(HasFatalFailure());
  expect_planes();
  step(3);  // from planes that come from memory and from the drive
  finish_step(3);
}

/// Copy of the drive that a process leaves which ends here without a word, for another process to
/// open.
base::Result<std::unique_ptr<EmulatedDrive>> copy_of(EmulatedDrive& drive,
                                                     const storage::StoreLayout& layout,
                                                     const LocalDeviceOptions& options) {
  SI_ASSIGN_OR_RETURN(auto copy, EmulatedDrive::create(drive.size_bytes()));
  // Makes it a drive that holds a store; its contents are the other one's then.
  SI_RETURN_IF_ERROR(create_emulated_device(options, layout, *copy).status());
  std::copy(drive.contents().begin(), drive.contents().end(), copy->contents().begin());
  return copy;
}

// State that is in memory only is written when asked for and at the end; before that, what a crash
// leaves is known for what it is.
TEST_P(CachedContract, StateInMemoryOnlyIsTornUntilItIsFlushed) {
  if (!GetParam().writes_postponed() || !GetParam().memory) return;  // every step is written
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  for (uint64_t number = 1; number <= 2; ++number) {
    step(number);
    finish_step(number);
    reference.step(number, GetParam().gradient_type, GetParam().weights_type);
    const auto left = copy_of(*drive_, layout_, options());
    ASSERT_TRUE(left.ok()) << left.status().to_string();
    EXPECT_TRUE((*left)->summarize()->state.torn);
    auto opened = open_emulated_device(options(), **left);
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    const Status refused = (*opened)->recover_to(number);
    EXPECT_EQ(refused.code(), base::ErrorCode::kFailedPrecondition) << refused.to_string();
  }
  // Not in the middle of a step.
  ASSERT_TRUE(run(BeginStep{3}).ok());
  EXPECT_EQ(run(Flush{}).code(), base::ErrorCode::kFailedPrecondition);
  ASSERT_TRUE(run(Abort{3}).ok());
  const uint64_t written = device_->store_traffic().down(base::TrafficKind::kState);
  ASSERT_TRUE(run(Flush{}).ok());
  EXPECT_EQ(device_->store_traffic().down(base::TrafficKind::kState) - written,
            state_bytes(layout_, GetParam().cached, true));
  {
    const auto left = copy_of(*drive_, layout_, options());
    ASSERT_TRUE(left.ok()) << left.status().to_string();
    EXPECT_FALSE((*left)->summarize()->state.torn);
    auto opened = open_emulated_device(options(), **left);
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    ASSERT_TRUE((*opened)->recover_to(2).ok());
    driver_.drive(**opened);
    expect_state(reference);
    driver_.drive(*device_);
  }
  // A second flush has nothing to do, and the cache is as good as before.
  ASSERT_TRUE(run(Flush{}).ok());
  step(3);
  finish_step(3);
  reference.step(3, GetParam().gradient_type, GetParam().weights_type);
  // Closed in a step that has gradients and nothing else.
  ASSERT_TRUE(run(BeginStep{4}).ok());
  put_all(4);
  open();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(device_->state().committed_step, 3u);
  expect_state(reference);
}

INSTANTIATE_TEST_SUITE_P(Kinds, CachedContract, testing::ValuesIn(cached_kinds()),
                         [](const auto& param) { return param.param.name; });
// One of them writes when it is flushed.
INSTANTIATE_TEST_SUITE_P(OpenCl, CachedContract, testing::ValuesIn([] {
                           std::vector<Kind> all =
                               opencl_kinds({"opencl_copied_half_in_memory", "opencl_all_in_memory",
                                             "opencl_m24_q4_peer_half_in_memory"});
                           for (Kind& kind : all) {
                             if (kind.cached == 6) kind.durability = storage::Durability::kNone;
                           }
                           return all;
                         }()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace smartinf::csd
