// A run's state through the device interface alone: checkpoint, restore, reshard and check do with
// devices that have no path what they do with directories.
#include "smartinf/csd/snapshot.h"

#include <filesystem>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/found_run.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/engine/test_model.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using ::testing::HasSubstr;

enum class Kind : uint8_t { kLocal, kEmulated, kFake };

class SnapshotContract : public ::testing::TestWithParam<Kind> {
 protected:
  /// Devices of the kind with these names: the same ones each time.
  DeviceSources devices(const std::vector<std::string>& names) {
    UpdaterOptions options;
    std::vector<std::unique_ptr<csd::EmulatedDrive>> drives;
    DeviceSources all;
    for (const std::string& name : names) {
      if (GetParam() == Kind::kFake) {
        std::shared_ptr<FakeDrive>& drive = fakes_[name];
        if (drive == nullptr) drive = std::make_shared<FakeDrive>();
        all.push_back(std::make_unique<FakeSource>(drive, name));
        continue;
      }
      options.io_bytes = base::kMiB;  // else the drive would be measured
      options.io_depth = 4;
      options.devices = {DeviceOptions{}};
      options.devices.front().bandwidth = 1;
      options.devices.front().name = name;
      options.devices.front().path = GetParam() == Kind::kLocal ? scratch_ / name : name;
      if (GetParam() == Kind::kLocal) {
        all.push_back(std::move(local_sources(options).front()));
        continue;
      }
      if (!emulated_.contains(name)) {
        auto drive = csd::EmulatedDrive::create(64 * base::kMiB);
        EXPECT_TRUE(drive.ok()) << drive.status().to_string();
        emulated_[name].push_back(std::move(*drive));
      }
      all.push_back(std::move(emulated_sources(options, emulated_[name]).front()));
    }
    return all;
  }
  std::unique_ptr<Updater> open(const std::vector<std::string>& names) {
    UpdaterOptions options;
    options.subgroup_elements = 2 * kBlock;
    auto updater = Updater::open(options, contract_space(), devices(names));
    EXPECT_TRUE(updater.ok()) << updater.status().to_string();
    return updater.ok() ? std::move(*updater) : nullptr;
  }
  /// A run on devices "a" and "b" that has done two steps.
  void SetUp() override {
    updater_ = open({"a", "b"});
    ASSERT_NE(updater_, nullptr);
    initialize(*updater_);
    run_steps(*updater_, 1, 2, outcome_);
  }
  StoredRun stored(const DeviceSources& sources) {
    auto run = open_stored_run(sources, storage::ReaderLock::kTake);
    EXPECT_TRUE(run.ok()) << run.status().to_string();
    return std::move(*run);
  }
  /// Goes on with step 3 on these devices: with the bits of a run that was never stopped.
  void expect_to_go_on(const std::vector<std::string>& names) {
    auto updater = open(names);
    ASSERT_NE(updater, nullptr);
    EXPECT_EQ(updater->committed_step(), 2u);
    EXPECT_EQ(updater->client_metadata(), "after step 2");
    Outcome outcome = outcome_;
    run_steps(*updater, 3, kSteps, outcome);
    EXPECT_EQ(outcome, reference(DataType::kBf16));
  }
  /// Checked to the end; faults that were found.
  uint64_t faults(DeviceSource& source) {
    const auto report = source.check({}, [](const storage::StoreFault&) {});
    EXPECT_TRUE(report.ok()) << report.status().to_string();
    if (!report.ok()) return 0;
    EXPECT_GT(report->blocks_checked, 0u);
    return report->faults;
  }

  const base::Scratch scratch_;
  std::map<std::string, std::shared_ptr<FakeDrive>> fakes_;
  std::map<std::string, std::vector<std::unique_ptr<csd::EmulatedDrive>>> emulated_;
  std::unique_ptr<Updater> updater_;
  Outcome outcome_;
};

TEST_P(SnapshotContract, ACheckpointOfOpenDevicesIsRestoredOntoOthers) {
  CheckpointOptions options;
  options.folder = scratch_ / "checkpoints";
  options.memory_budget_bytes = 0;  // nothing could be allocated beside the devices' own memory
  if (GetParam() == Kind::kFake) options.memory_budget_bytes = 64 * base::kMiB;  // they have none
  const auto made = write_checkpoint(*updater_, options);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  EXPECT_EQ(made->step, 2u);
  Outcome outcome = outcome_;
  run_steps(*updater_, 3, kSteps, outcome);
  EXPECT_EQ(outcome, reference(DataType::kBf16)) << "it went through the devices' slots";

  const auto kept = read_checkpoint(made->path);
  ASSERT_TRUE(kept.ok()) << kept.status().to_string();
  for (const auto& device : sources_at(kept->devices)) EXPECT_EQ(faults(*device), 0u);
  auto from = open_checkpoint(*kept);
  ASSERT_TRUE(from.ok()) << from.status().to_string();
  ReshardOptions reshape;
  reshape.subgroup_elements = kBlock;
  const auto restored = reshard(*from, devices({"x", "y", "z"}), reshape);
  ASSERT_TRUE(restored.ok()) << restored.status().to_string();
  expect_to_go_on({"x", "y", "z"});
  EXPECT_NE(stored(devices({"x", "y", "z"})).layout().run, from->layout().run);
}

TEST_P(SnapshotContract, AStateMovesFromDeviceToDevice) {
  updater_.reset();
  StoredRun from = stored(devices({"a", "b"}));
  ASSERT_TRUE(reshard(from, devices({"one"}), {}).ok());
  const auto found = find_run(devices({"one"}));
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->step, 2u);
  EXPECT_EQ(found->client_metadata, "after step 2");
  // State that is there stays, unless it is to be replaced.
  EXPECT_EQ(reshard(from, devices({"one"}), {}).status().code(), ErrorCode::kAlreadyExists);
  EXPECT_EQ(stored(devices({"one"})).layout().run, found->run);
  ReshardOptions replace;
  replace.replace = true;
  const auto replaced = reshard(from, devices({"one", "two"}), replace);
  ASSERT_TRUE(replaced.ok()) << replaced.status().to_string();
  EXPECT_EQ(stored(devices({"one", "two"})).layout().run, replaced->run);
  expect_to_go_on({"one", "two"});
}

TEST_P(SnapshotContract, NothingIsLeftOfACopyThatFails) {
  StoredRun from = *updater_->snapshot();
  ReshardOptions stopped;
  stopped.progress = [](uint64_t, uint64_t) {
    return base::Status(ErrorCode::kCancelled, "enough");
  };
  EXPECT_EQ(reshard(from, devices({"x", "y"}), stopped).status().code(), ErrorCode::kCancelled);
  for (const auto& device : devices({"x", "y"})) {
    const auto state = device->peek();
    ASSERT_TRUE(state.ok());
    EXPECT_FALSE(state->has_value()) << device->name();
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SnapshotContract,
                         ::testing::Values(Kind::kLocal, Kind::kEmulated, Kind::kFake),
                         [](const auto& test) {
                           return std::string(test.param == Kind::kLocal      ? "local"
                                              : test.param == Kind::kEmulated ? "emulated"
                                                                              : "fake");
                         });

class EmulatedSnapshot : public SnapshotContract {};

TEST_P(EmulatedSnapshot, DamageIsFoundAndNotCopied) {
  CheckpointOptions options;
  options.folder = scratch_ / "checkpoints";
  ASSERT_TRUE(write_checkpoint(*updater_, options).ok());
  updater_.reset();
  for (const auto& device : devices({"a", "b"})) EXPECT_EQ(faults(*device), 0u);
  csd::EmulatedDrive& drive = *emulated_.at("b").front();
  const auto summary = devices({"b"}).front()->summarize();
  ASSERT_TRUE(summary.ok()) << summary.status().to_string();
  const auto geometry = storage::Geometry::make(summary->layout, summary->slots);
  for (uint32_t slot = 0; slot < 2; ++slot) {
    drive.contents()[geometry->extent_offset(0, slot) + 100] ^= std::byte{1};
  }
  EXPECT_EQ(faults(*devices({"b"}).front()), 1u);
  StoredRun from = stored(devices({"a", "b"}));
  const auto copied = reshard(from, devices({"x"}), {});
  EXPECT_EQ(copied.status().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(copied.status().to_string(), HasSubstr("has a wrong checksum for step 2"));
  EXPECT_FALSE(emulated_.at("x").front()->holds_store());
  options.folder = scratch_ / "more";
  EXPECT_EQ(write_checkpoint(from, options).status().code(), ErrorCode::kCorrupt);
  EXPECT_TRUE(std::filesystem::is_empty(options.folder));
}

INSTANTIATE_TEST_SUITE_P(Kind, EmulatedSnapshot, ::testing::Values(Kind::kEmulated),
                         [](const auto&) { return std::string("emulated"); });

}  // namespace
}  // namespace smartinf::engine
