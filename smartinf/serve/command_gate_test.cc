#include "smartinf/serve/command_gate.h"

#include <gtest/gtest.h>

#include "smartinf/csd/test_model.h"

namespace smartinf::serve::wire {
namespace {

class RemoteGate : public testing::Test {
 protected:
  RemoteGate() : layout_(csd::test_layout(base::StateFormat::kF32, 0)) {
    state_.initialized = state_.complete = true;
    const storage::StoredSubgroup& last = layout_.subgroups.back();
    share_.groups = csd::test_groups(last.first_element + last.count);
  }
  UpdateWanted update() const {
    UpdateWanted update;
    update.scalars = csd::test_scalars(1);
    for (const auto& subgroup : layout_.subgroups) update.updates.push_back({subgroup.id, true});
    return update;
  }

  storage::StoreLayout layout_;
  csd::DeviceShare share_;
  storage::StoreState state_;
};

TEST_F(RemoteGate, GroupsCoverTheDeviceAndAreFew) {
  EXPECT_TRUE(check_share(layout_, share_).ok());
  csd::DeviceShare wrong = share_;
  wrong.groups.back().group = ~uint32_t{0};  // one more is none
  EXPECT_FALSE(check_share(layout_, wrong).ok());
  wrong = share_;
  wrong.groups.back().count -= 1;
  EXPECT_FALSE(check_share(layout_, wrong).ok());
  wrong = share_;
  wrong.groups.front().count = ~uint64_t{0};
  EXPECT_FALSE(check_share(layout_, wrong).ok());
}

TEST_F(RemoteGate, MatricesOfAnySizeAreRefusedNotAllocated) {
  csd::DeviceShare wrong = share_;
  wrong.matrices.push_back({0, uint64_t{1} << 56, 1, 0, 0});
  EXPECT_FALSE(check_share(layout_, wrong).ok());
  wrong.matrices = {{0, 0, 5, 0, 0}};
  EXPECT_FALSE(check_share(layout_, wrong).ok());
  wrong.matrices = {{0, uint64_t{1} << 33, uint64_t{1} << 33, 0, 0}};
  EXPECT_FALSE(check_share(layout_, wrong).ok());
}

TEST_F(RemoteGate, LayoutsThatNoStoreHasAreRefused) {
  const auto check = [&](const storage::StoreLayout& layout) {
    return check_layout(layout, storage::Durability::kStep, 0, uint64_t{1} << 40);
  };
  EXPECT_TRUE(check(layout_).ok()) << check(layout_).to_string();
  storage::StoreLayout wrong = layout_;
  std::swap(wrong.planes.front(), wrong.planes.back());
  EXPECT_FALSE(check(wrong).ok());
  wrong = layout_;
  wrong.subgroups.front().first_element = ~uint64_t{0} - 65535;
  EXPECT_FALSE(check(wrong).ok());
  wrong = layout_;
  wrong.subgroups[1].id = wrong.subgroups[0].id;
  EXPECT_FALSE(check(wrong).ok());
  EXPECT_EQ(check_layout(layout_, storage::Durability::kStep, 0, 4096).code(),
            base::ErrorCode::kNoSpace);
  EXPECT_EQ(
      check_layout(layout_, storage::Durability::kStep, ~uint64_t{0}, uint64_t{1} << 40).code(),
      base::ErrorCode::kNoSpace);
}

TEST_F(RemoteGate, UpdatesThatADeviceWouldTakeForABugAreRefused) {
  CommandGate gate(layout_, share_, true);
  EXPECT_TRUE(gate.admit(update(), state_).ok());
  gate.finished(update());
  UpdateWanted wrong = update();
  wrong.scalars.clear();
  EXPECT_FALSE(gate.admit(wrong, state_).ok());
  wrong = update();
  wrong.scalars.back().rule = kernels::UpdateRule::kLion;
  EXPECT_FALSE(gate.admit(wrong, state_).ok());
  wrong = update();
  wrong.updates.push_back(wrong.updates.front());
  EXPECT_FALSE(gate.admit(wrong, state_).ok());
  wrong = update();
  wrong.updates.front().samples = true;  // it knows no matrices
  EXPECT_FALSE(gate.admit(wrong, state_).ok());
  storage::StoreState fresh;  // step 0
  EXPECT_FALSE(gate.admit(update(), fresh).ok());
  EXPECT_FALSE(gate.admit(csd::Prefetch{{layout_.subgroups.front().id}}, fresh).ok());
  EXPECT_FALSE(gate.admit(csd::Prepare{1, std::string(1 << 20, 'x')}, state_).ok());
  EXPECT_FALSE(gate.admit(ReadWanted{base::SubgroupId{12345}, 1}, state_).ok());
  EXPECT_FALSE(gate.admit(StateWanted{layout_.subgroups[0].id, 1, ~uint64_t{0}, 1}, state_).ok());
}

TEST_F(RemoteGate, OrderIsKept) {
  CommandGate gate(layout_, share_, false);
  EXPECT_FALSE(gate.admit(csd::BeginStep{1}, state_).ok()) << "before recovery";
  EXPECT_FALSE(gate.admit(RecoverTo{5}, state_).ok()) << "to a step that is not there";
  const base::SubgroupId first = layout_.subgroups.front().id;
  EXPECT_FALSE(gate.admit(CacheState{{first, first}}, state_).ok()) << "twice";
  EXPECT_TRUE(gate.admit(CacheState{{first}}, state_).ok());
  EXPECT_FALSE(gate.admit(CacheState{{layout_.subgroups[1].id}}, state_).ok()) << "again";
  EXPECT_TRUE(gate.admit(RecoverTo{0}, state_).ok());
  EXPECT_FALSE(gate.admit(RecoverTo{0}, state_).ok()) << "again";
  EXPECT_TRUE(gate.admit(csd::BeginStep{1}, state_).ok());
  EXPECT_TRUE(gate.admit(update(), state_).ok());
  EXPECT_FALSE(gate.admit(Gradient{first, 0, 1}, state_).ok()) << "beside an update of all";
  EXPECT_FALSE(gate.admit(csd::BeginStep{2}, state_).ok()) << "beside an update";
}

TEST_F(RemoteGate, PayloadsHaveTheirSizes) {
  CommandGate gate(layout_, share_, true);
  const storage::StoredSubgroup& subgroup = layout_.subgroups.front();
  const auto bytes = gate.payload_bytes(Gradient{subgroup.id, 1, 10, base::DataType::kF32});
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ(*bytes, 40u);
  EXPECT_FALSE(gate.payload_bytes(Gradient{subgroup.id, 1, ~uint64_t{0}}).ok());
  EXPECT_FALSE(gate.payload_bytes(Gradient{base::SubgroupId{9999}, 0, 1}).ok());
  EXPECT_FALSE(gate.payload_bytes(StateGiven{subgroup.id, subgroup.count - 1, 1, 1}).ok());
  EXPECT_FALSE(gate.payload_bytes(StateGiven{subgroup.id, subgroup.count, ~0u, 1}).ok());
  const auto state = gate.payload_bytes(StateGiven{subgroup.id, subgroup.count, 3, ~0u});
  ASSERT_TRUE(state.ok());
  EXPECT_EQ(*state, 8 * subgroup.count);
}

}  // namespace
}  // namespace smartinf::serve::wire
