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
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/fake_source.h"
#include "smartinf/engine/test_model.h"

namespace smartinf::engine {
namespace {

class DevicesPlace final : public StatePlace {
 public:
  explicit DevicesPlace(const Variant& variant)
      : in_memory_(variant.in_memory), options_(options_of(variant, scratch_)) {}

  base::Result<std::unique_ptr<Updater>> open() override {
    if (!in_memory_) return Updater::open(options_, contract_space());
    while (drives_.size() < options_.devices.size()) {
      SI_ASSIGN_OR_RETURN(auto drive, csd::EmulatedDrive::create(64 * base::kMiB));
      drives_.push_back(std::move(drive));
    }
    return Updater::open(options_, contract_space(), emulated_sources(options_, drives_));
  }

 private:
  const Scratch scratch_;
  const bool in_memory_;
  const UpdaterOptions options_;
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives_;
};

class FakesPlace final : public StatePlace {
 public:
  base::Result<std::unique_ptr<Updater>> open() override {
    UpdaterOptions options;
    options.subgroup_elements = kBlock;
    std::vector<std::unique_ptr<DeviceSource>> sources;
    for (size_t d = 0; d < drives_.size(); ++d) {
      sources.push_back(std::make_unique<FakeSource>(drives_[d], "drive" + std::to_string(d)));
    }
    return Updater::open(options, contract_space(), std::move(sources));
  }

 private:
  const std::vector<std::shared_ptr<FakeDrive>> drives_ = {std::make_shared<FakeDrive>(),
                                                           std::make_shared<FakeDrive>()};
};

const Variant kVariants[] = {
    {.name = "OneDevice"},
    {.name = "TwoDevices", .devices = 2},
    {.name = "ThreeDevices", .devices = 3},
    {.name = "SmallestSubgroups", .devices = 2, .subgroup_elements = kBlock},
    {.name = "OneSubgroup", .subgroup_elements = 64 * kBlock, .memory_budget_bytes = base::kGiB},
    {.name = "LeastMemory", .subgroup_elements = kBlock, .memory_budget_bytes = 8 * base::kMiB},
    {.name = "Naive", .devices = 2, .schedule = plan::ScheduleVariant::kNaive},
    {.name = "ThreadRing", .devices = 2, .ring = storage::RingKind::kThreads},
    {.name = "Spilled", .devices = 2, .gradient_budget_bytes = 0},
    {.name = "SpilledInSmallSubgroups", .subgroup_elements = kBlock, .gradient_budget_bytes = 0},
    {.name = "HalfSpilled", .gradient_budget_bytes = 2 * base::kMiB},
    {.name = "InPlace", .devices = 2, .durability = storage::Durability::kNone},
    {.name = "NoChecksums", .checksums = false},
    {.name = "F32Gradients", .gradient_type = DataType::kF32},
    {.name = "HostUpdate", .devices = 2, .where = UpdateWhere::kHost},
    {.name = "HostUpdateAsInThePaper",
     .devices = 3,
     .where = UpdateWhere::kHost,
     .gradient_type = DataType::kF32,
     .gradient_budget_bytes = 0},
    {.name = "HostUpdateNaive",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .schedule = plan::ScheduleVariant::kNaive},
    {.name = "UnequalDevices", .devices = 3, .subgroup_elements = kBlock, .unequal = true},
    {.name = "InMemory", .devices = 2, .in_memory = true},
    {.name = "InMemoryHostUpdate",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .in_memory = true},
    {.name = "BehindLinks", .devices = 2, .behind_links = true},
    {.name = "InMemoryBehindLinks", .devices = 3, .in_memory = true, .behind_links = true},
    {.name = "HostUpdateBehindLinks",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .behind_links = true},
    {.name = "InMemoryHostUpdateBehindLinks",
     .devices = 3,
     .where = UpdateWhere::kHost,
     .in_memory = true,
     .behind_links = true},
    {.name = "AllCached", .devices = 2, .in_memory = true, .state_cache_bytes = base::kGiB},
    {.name = "UnequalDevicesHalfCached",
     .devices = 3,
     .subgroup_elements = kBlock,
     .in_memory = true,
     .unequal = true,
     .state_cache_bytes = kHalfOfState},
    {.name = "HostUpdateSpilledHalfCached",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .behind_links = true,
     .state_cache_bytes = kHalfOfState},
    {.name = "InPlaceHalfCached",
     .devices = 2,
     .subgroup_elements = kBlock,
     .durability = storage::Durability::kNone,
     .state_cache_bytes = kHalfOfState},
};

std::vector<UpdaterKind> all_kinds() {
  std::vector<UpdaterKind> kinds;
  for (const Variant& variant : kVariants) {
    UpdaterKind& kind = kinds.emplace_back();
    kind.name = variant.name;
    kind.make_place = [&variant] { return std::make_unique<DevicesPlace>(variant); };
    kind.reference = [&variant]() -> const Outcome& { return reference(variant.gradient_type); };
    kind.in_place = variant.durability == storage::Durability::kNone;
  }
  UpdaterKind& fakes = kinds.emplace_back();
  fakes.name = "Fakes";
  fakes.make_place = [] { return std::make_unique<FakesPlace>(); };
  fakes.reference = []() -> const Outcome& { return reference(DataType::kBf16); };
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(All, UpdaterContract, ::testing::ValuesIn(all_kinds()),
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

INSTANTIATE_TEST_SUITE_P(All, DeviceUpdaters, ::testing::ValuesIn(kVariants),
                         [](const auto& variant) { return variant.param.name; });

}  // namespace
}  // namespace smartinf::engine
