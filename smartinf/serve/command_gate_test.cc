#include "smartinf/serve/command_gate.h"

#include <gtest/gtest.h>

#include "smartinf/csd/device_space.h"
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
  csd::Update update() {
    csd::Update update;
    update.scalars = csd::test_scalars(1);
    for (const auto& subgroup : layout_.subgroups)
      update.updates.push_back({subgroup.id, &memory_});
    return update;
  }

  csd::DeviceSpace space() const { return csd::DeviceSpace(layout_, share_, 0); }
  template <typename One>
  bool checked(const One& message) const {
    return csd::check(message, space()).ok();
  }
  bool admitted(CommandGate& gate, const CommandBody& body, const storage::StoreState& state) {
    return gate.admit(body, space(), state).ok();
  }

  float memory_ = 0;
  base::Bf16 sample_{};
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
  EXPECT_TRUE(checked(update()));
  csd::Update wrong = update();
  wrong.scalars.clear();
  EXPECT_FALSE(checked(wrong));
  wrong = update();
  wrong.scalars.back().rule = kernels::UpdateRule::kLion;
  EXPECT_FALSE(checked(wrong));
  wrong = update();
  wrong.updates.push_back(wrong.updates.front());
  EXPECT_FALSE(checked(wrong));
  wrong = update();
  wrong.updates.front().samples_out = &sample_;  // it knows no matrices
  EXPECT_FALSE(checked(wrong));
  EXPECT_FALSE(checked(csd::Prepare{1, std::string(1 << 20, 'x')}));
  EXPECT_FALSE(checked(csd::ReadWeights{base::SubgroupId{12345}, 1}));
  EXPECT_FALSE(checked(csd::ReadState{layout_.subgroups[0].id, 1, ~uint64_t{0}, {&memory_}}));
  CommandGate gate(true);
  EXPECT_TRUE(admitted(gate, csd::Message(update()), state_));
  gate.finished(update());
  storage::StoreState fresh;  // step 0
  EXPECT_FALSE(admitted(gate, csd::Message(update()), fresh));
  EXPECT_FALSE(admitted(gate, csd::Message(csd::Prefetch{{layout_.subgroups.front().id}}), fresh));
}

TEST_F(RemoteGate, OrderIsKept) {
  CommandGate gate(false);
  const auto begin = [](uint64_t step) { return csd::Message(csd::BeginStep{step}); };
  EXPECT_FALSE(admitted(gate, begin(1), state_)) << "before recovery";
  EXPECT_FALSE(admitted(gate, RecoverTo{5}, state_)) << "to a step that is not there";
  const base::SubgroupId first = layout_.subgroups.front().id;
  EXPECT_FALSE(admitted(gate, CacheState{{first, first}}, state_)) << "twice";
  EXPECT_TRUE(admitted(gate, CacheState{{first}}, state_));
  EXPECT_FALSE(admitted(gate, CacheState{{layout_.subgroups[1].id}}, state_)) << "again";
  EXPECT_TRUE(admitted(gate, RecoverTo{0}, state_));
  EXPECT_FALSE(admitted(gate, RecoverTo{0}, state_)) << "again";
  EXPECT_TRUE(admitted(gate, begin(1), state_));
  EXPECT_TRUE(admitted(gate, csd::Message(update()), state_));
  EXPECT_FALSE(admitted(gate, csd::Message(csd::PutGradient{first, 0, 1}), state_))
      << "beside an update of all";
  EXPECT_FALSE(admitted(gate, begin(2), state_)) << "beside an update";
}

TEST_F(RemoteGate, ElementsAreTheSubgroups) {
  const storage::StoredSubgroup& subgroup = layout_.subgroups.front();
  EXPECT_TRUE(checked(csd::PutGradient{subgroup.id, 1, 10, base::DataType::kF32, &memory_}));
  EXPECT_FALSE(checked(csd::PutGradient{subgroup.id, 1, ~uint64_t{0}}));
  EXPECT_FALSE(checked(csd::PutGradient{base::SubgroupId{9999}, 0, 1}));
  EXPECT_TRUE(checked(csd::WriteState{subgroup.id, subgroup.count, {&memory_, &memory_}}));
  EXPECT_FALSE(checked(csd::WriteState{subgroup.id, subgroup.count - 1, {&memory_}}));
  EXPECT_FALSE(checked(
      csd::WriteState{subgroup.id, subgroup.count, {&memory_, &memory_, &memory_, &memory_}}));
  EXPECT_FALSE(checked(csd::WriteState{subgroup.id, subgroup.count, {}, ~0u, &sample_}));
}

}  // namespace
}  // namespace smartinf::serve::wire
