// Updaters over devices of every kind against their contract (updater_contract.h): whatever the
// devices, their number, the cut into subgroups, the schedule, the ring, the place of the update or
// of the gradients. And what they have beyond it: budgets and traffic.
#include "smartinf/engine/updater_contract.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/units.h"
#include "smartinf/engine/ranks/test_crew.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater_kinds.h"

namespace smartinf::engine {
namespace {

INSTANTIATE_TEST_SUITE_P(All, UpdaterContract, ::testing::ValuesIn(all_kinds()),
                         [](const auto& kind) { return kind.param.name; });

INSTANTIATE_TEST_SUITE_P(Ranks, UpdaterContract, ::testing::ValuesIn(ranks_kinds()),
                         [](const auto& kind) { return kind.param.name; });

/// Updaters whose weights could be fetched work the same where nobody fetches.
INSTANTIATE_TEST_SUITE_P(Streaming, UpdaterContract, ::testing::ValuesIn([] {
                           std::vector<UpdaterKind> kinds = all_kinds(true);
                           std::erase_if(kinds, [](const UpdaterKind& kind) {
                             return kind.name != "TwoDevices" && kind.name != "InPlace" &&
                                    kind.name != "Naive" && kind.name != "Fakes";
                           });
                           return kinds;
                         }()),
                         [](const auto& kind) { return kind.param.name; });

// ---- Budgets and traffic.

class DeviceUpdaters : public ::testing::TestWithParam<Variant> {
 protected:
  DevicesPlace place_{GetParam()};
};

TEST_P(DeviceUpdaters, StayWithinTheirBudget) {
  auto updater = place_.open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  EXPECT_LE((*updater)->memory_bytes(), GetParam().memory_budget_bytes);
  EXPECT_EQ((*updater)->describe_devices().size(), GetParam().devices);
  EXPECT_TRUE((*updater)->early_update_possible().ok() ||
              GetParam().durability == storage::Durability::kNone || (*updater)->slots() < 8);
}

/// Bytes of a step over the host link and on the drive, exact but for metadata.
TEST_P(DeviceUpdaters, CountedBytesAreThoseOfTheScheme) {
  auto updater = place_.open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  const UpdaterTraffic before = (*updater)->traffic();
  Outcome outcome;
  const uint64_t count = contract_space().count();
  std::vector<base::Bf16> weights(count);
  const auto gradient = contract_gradient(count, 1);
  expect_ok((*updater)->begin_step());
  expect_ok((*updater)->put_gradient(0, gradient.data(), DataType::kBf16, count));
  expect_ok((*updater)->finish_gradients(1).status());
  UpdateOptions update;
  update.groups.resize(2);
  expect_ok((*updater)->start_update(update, DataType::kBf16,
                                     [&](uint64_t first) { return weights.data() + first; }));
  expect_ok((*updater)->commit("one step"));
  const base::TrafficReading host = (*updater)->traffic().host_link.since(before.host_link);
  const base::TrafficReading store = (*updater)->traffic().store.since(before.store);
  const uint64_t gradient_bytes = count * base::data_type_bytes(GetParam().gradient_type);
  const bool spilled = GetParam().gradient_budget_bytes == 0;
  // Planes of a subgroup are padded to pages, so the state is counted with that.
  const uint64_t padding = 3 * 4096 * 2 * (count / kBlock + 1);
  EXPECT_GE(store.up(TrafficKind::kState), 12 * count);
  EXPECT_LE(store.up(TrafficKind::kState), 12 * count + padding);
  if (GetParam().durability == storage::Durability::kStep) {
    EXPECT_EQ(store.down(TrafficKind::kState), store.up(TrafficKind::kState));
  } else {  // what stays in memory is not written
    EXPECT_LE(store.down(TrafficKind::kState), store.up(TrafficKind::kState));
  }
  if (GetParam().where == UpdateWhere::kDevice) {
    EXPECT_EQ(host.down(TrafficKind::kGradient), gradient_bytes);
    EXPECT_EQ(host.up(TrafficKind::kWeight), 2 * count);
    EXPECT_EQ(host.up(TrafficKind::kState), 0u);
    EXPECT_EQ(host.down(TrafficKind::kState), 0u);
  } else {
    EXPECT_EQ(host.up(TrafficKind::kState), store.up(TrafficKind::kState));
    EXPECT_EQ(host.down(TrafficKind::kState), store.down(TrafficKind::kState));
    EXPECT_GE(host.up(TrafficKind::kGradient), spilled ? gradient_bytes : 0);
    EXPECT_LE(host.up(TrafficKind::kGradient), spilled ? gradient_bytes + padding : 0);
    EXPECT_EQ(host.down(TrafficKind::kGradient), host.up(TrafficKind::kGradient));
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceUpdaters, ::testing::ValuesIn(variants()),
                         [](const auto& variant) { return variant.param.name; });

}  // namespace
}  // namespace smartinf::engine
