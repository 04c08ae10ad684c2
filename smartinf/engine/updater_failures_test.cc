// Updaters whose drives fail, whose state stays in memory, and which run on every instruction set.
#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/units.h"
#include "smartinf/csd/fault_ring.h"
#include "smartinf/engine/device_build.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/stored_run.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {
namespace {

// ---- A drive that fails in the middle of a step, over whole devices.

/// Devices in memory, of which the last one's drive fails on request.
class FailingSource final : public DeviceSource {
 public:
  FailingSource(const UpdaterOptions& options, DeviceBuild build, csd::EmulatedDrive& drive,
                csd::Faults* faults)
      : options_(options), build_(std::move(build)), drive_(drive), faults_(faults) {}
  const std::string& name() const override { return build_.device.name; }
  std::string place() const override { return build_.device.path; }
  base::Result<std::optional<storage::StoreState>> peek() override {
    if (!drive_.holds_store()) return std::optional<storage::StoreState>();
    SI_ASSIGN_OR_RETURN(const storage::StoreSummary summary, drive_.summarize());
    return std::optional(summary.state);
  }
  base::Result<double> bandwidth() override { return 1.0; }
  base::Result<uint64_t> capacity_bytes() override { return drive_.size_bytes(); }
  base::Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                                    const DeviceShare& share) override {
    return csd::create_emulated_device(device_options(share), layout, drive_);
  }
  base::Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) override {
    return csd::open_emulated_device(device_options(share), drive_);
  }
  base::Status erase() override { return base::Status(); }

 private:
  csd::LocalDeviceOptions device_options(const DeviceShare& share) const {
    csd::LocalDeviceOptions result = build_.options(options_, share);
    if (faults_ == nullptr) return result;
    result.store.wrap_ring = [faults = faults_](std::unique_ptr<storage::Ring> ring) {
      return std::make_unique<csd::FaultRing>(std::move(ring), *faults);
    };
    return result;
  }
  const UpdaterOptions options_;
  const DeviceBuild build_;
  csd::EmulatedDrive& drive_;
  csd::Faults* const faults_;
};

class FailingDrive
    : public ::testing::TestWithParam<std::tuple<UpdateWhere, csd::Faults::What, uint64_t>> {};

TEST_P(FailingDrive, IsNamedAndTheLastCommittedStepStands) {
  const auto [where, what, state_cache_bytes] = GetParam();
  const Scratch scratch;
  const UpdaterOptions options = options_of({.name = "",
                                             .devices = 2,
                                             .subgroup_elements = kBlock,
                                             .where = where,
                                             .state_cache_bytes = state_cache_bytes},
                                            scratch);
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives;
  std::vector<std::unique_ptr<DeviceSource>> sources;
  csd::Faults faults;
  for (DeviceBuild& build : device_builds(options)) {
    auto drive = csd::EmulatedDrive::create(64 * base::kMiB);
    ASSERT_TRUE(drive.ok());
    drives.push_back(std::move(*drive));
    csd::Faults* of_this = drives.size() == 2 ? &faults : nullptr;
    sources.push_back(
        std::make_unique<FailingSource>(options, std::move(build), *drives.back(), of_this));
  }
  auto updater = Updater::open(options, contract_space(), std::move(sources));
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  Outcome outcome;
  run_steps(**updater, 1, 1, outcome);
  const auto committed = all_planes(**updater);

  const uint64_t count = contract_space().count();
  const auto gradient = contract_gradient(count, 99);
  // In the middle; reads begin while gradients come in.
  faults.after = 3;
  faults.what = what;
  expect_ok((*updater)->begin_step());
  expect_ok((*updater)->put_gradient(0, gradient.data(), DataType::kBf16, count));
  expect_ok((*updater)->finish_gradients(1).status());
  UpdateOptions update;
  update.groups.resize(2);
  expect_ok((*updater)->start_update(update, DataType::kBf16, nullptr));
  const base::Status failed = (*updater)->commit("never");
  faults.what = csd::Faults::What::kNothing;
  EXPECT_GT(faults.done, 0u);
  EXPECT_EQ(failed.code(), base::ErrorCode::kIo) << failed.to_string();
  EXPECT_THAT(failed.to_string(), ::testing::HasSubstr(options.devices[1].path));
  EXPECT_EQ((*updater)->committed_step(), 1u);
  EXPECT_EQ((*updater)->client_metadata(), "after step 1");
  EXPECT_EQ(all_planes(**updater), committed);
  run_steps(**updater, 2, kSteps, outcome);
  EXPECT_EQ(outcome, reference(DataType::kBf16));
}

INSTANTIATE_TEST_SUITE_P(BothUpdaters, FailingDrive,
                         ::testing::Combine(::testing::Values(UpdateWhere::kDevice,
                                                              UpdateWhere::kHost),
                                            ::testing::Values(csd::Faults::What::kFailReads,
                                                              csd::Faults::What::kFailWrites),
                                            ::testing::Values(0, kHalfOfState)));

// ---- State that stays in memory.

/// Bytes of state that a step moves, in each direction and out of memory.
struct StepMoved {
  uint64_t read = 0;
  uint64_t written = 0;
  uint64_t cached = 0;
};
StepMoved moved_in_step(Updater& updater, int step) {
  const UpdaterTraffic before = updater.traffic();
  const uint64_t count = updater.space().count();
  const auto gradient = contract_gradient(count, step);
  expect_ok(updater.begin_step());
  expect_ok(updater.put_gradient(0, gradient.data(), DataType::kBf16, count));
  expect_ok(updater.finish_gradients(1).status());
  UpdateOptions update;
  update.groups.resize(2);
  expect_ok(updater.start_update(update, DataType::kBf16, nullptr));
  expect_ok(updater.commit("moved"));
  const UpdaterTraffic moved = updater.traffic().since(before);
  return {moved.store.up(TrafficKind::kState), moved.store.down(TrafficKind::kState),
          moved.state_bytes_cached};
}

TEST(StateCache, SavesReadsOfTheSlowestDeviceFirst) {
  const Scratch scratch;
  UpdaterOptions options = options_of(
      {.name = "", .devices = 2, .subgroup_elements = kBlock, .state_cache_bytes = 8 * base::kMiB},
      scratch);
  auto updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  const StepMoved first = moved_in_step(**updater, 1);
  EXPECT_EQ(first.cached, 0u);
  const StepMoved second = moved_in_step(**updater, 2);
  EXPECT_EQ(second.cached, (*updater)->state_cache_bytes());
  EXPECT_LE(second.cached, options.state_cache_bytes);
  // The rest of the budget is less than a subgroup, and the last one, which is shorter, counts as
  // whole.
  EXPECT_GT(second.cached, options.state_cache_bytes - 2 * 12 * kBlock);
  EXPECT_EQ(second.read, first.read - second.cached);
  EXPECT_EQ(second.written, first.written);
  EXPECT_LE((*updater)->memory_bytes(), options.memory_budget_bytes);
  // The state is where it was; now one of its devices is said to be slow, and gets it all.
  updater->reset();
  options.devices[0].bandwidth = 10;
  updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  (void)moved_in_step(**updater, 3);
  const UpdaterTraffic before = (*updater)->traffic();
  (void)moved_in_step(**updater, 4);
  const UpdaterTraffic moved = (*updater)->traffic().since(before);
  EXPECT_EQ(moved.store_by_device[0].up(TrafficKind::kState),
            moved.store_by_device[0].down(TrafficKind::kState));
  EXPECT_EQ(moved.store_by_device[1].up(TrafficKind::kState) + moved.state_bytes_cached,
            moved.store_by_device[1].down(TrafficKind::kState));
}

TEST(StateCache, InPlaceStateIsWrittenWhenAskedForAndAtTheEnd) {
  const Scratch scratch;
  const UpdaterOptions options = options_of({.name = "",
                                             .devices = 2,
                                             .durability = storage::Durability::kNone,
                                             .state_cache_bytes = kHalfOfState},
                                            scratch);
  const std::vector<std::string> paths = {options.devices[0].path, options.devices[1].path};
  const auto stored_step = [&] {
    const auto run = open_stored_run(sources_at(paths), storage::ReaderLock::kLeave);
    return run.ok() ? run->step : ~base::StepNumber{0};
  };
  auto updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  expect_ok((*updater)->flush());  // nothing is there yet
  initialize(**updater);
  const StepMoved first = moved_in_step(**updater, 1);
  const StepMoved second = moved_in_step(**updater, 2);
  EXPECT_EQ(second.read, first.read - second.cached);
  EXPECT_EQ(second.written, second.read);
  EXPECT_THAT(open_stored_run(sources_at(paths), storage::ReaderLock::kLeave).status().to_string(),
              ::testing::HasSubstr("in memory only"));
  expect_ok((*updater)->flush());
  EXPECT_EQ(stored_step(), 2u);
  const auto planes = all_planes(**updater);
  updater->reset();
  updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_EQ(all_planes(**updater), planes);
  (void)moved_in_step(**updater, 3);
  const auto newer = all_planes(**updater);
  EXPECT_EQ((*updater)->begin_step().code(), base::ErrorCode::kOk);
  EXPECT_EQ((*updater)->flush().code(), base::ErrorCode::kFailedPrecondition);
  updater->reset();  // in a step that has not changed anything
  EXPECT_EQ(stored_step(), 3u);
  updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_EQ(all_planes(**updater), newer);
}

// ---- Instruction sets. The table is chosen once in a process, so each gets one of its own.

/// Run by the test below with SMARTINF_FORCE_ISA set; prints what must not depend on it.
TEST(InstructionSet, DISABLED_PrintOutcome) {
  const Scratch scratch;
  auto updater = Updater::open(options_of({.name = "", .devices = 2}, scratch), contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  Outcome outcome;
  run_steps(**updater, 1, kSteps, outcome);
  fmt::print("outcome of {}: {:a} {:x} {:x}\n", kernels::kernels().isa(),
             fmt::join(outcome.norms, " "), fmt::join(outcome.weights, " "), outcome.state);
}

TEST(InstructionSet, AllGiveTheSameBits) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  std::string expected;
  for (const kernels::KernelTable* table : kernels::supported_tables()) {
    const std::string isa(table->isa());
    const std::string command = fmt::format(
        "SMARTINF_FORCE_ISA={} '{}' --gtest_also_run_disabled_tests "
        "--gtest_filter=InstructionSet.DISABLED_PrintOutcome",
        isa, self);
    FILE* output = popen(command.c_str(), "r");
    ASSERT_NE(output, nullptr);
    std::string said;
    std::array<char, 512> line;
    const std::string prefix = fmt::format("outcome of {}: ", isa);
    while (fgets(line.data(), static_cast<int>(line.size()), output) != nullptr) {
      if (std::string_view(line.data()).starts_with(prefix)) said = line.data() + prefix.size();
    }
    ASSERT_EQ(pclose(output), 0) << command;
    ASSERT_FALSE(said.empty()) << isa << " did not run";
    if (expected.empty()) expected = said;
    EXPECT_EQ(said, expected) << isa;
  }
}

}  // namespace
}  // namespace smartinf::engine
