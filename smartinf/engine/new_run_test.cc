// Whether a new run would begin in the place of an old one: asked without touching the old one.
#include "smartinf/engine/new_run.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/checkpoint_test_model.h"

namespace smartinf::engine {
namespace {

namespace fs = std::filesystem;

class NewRunTest : public CheckpointTest {
 protected:
  void SetUp() override {
    CheckpointTest::SetUp();
    old_ = snapshot().layout().run;
    made_ = checkpoint(snapshot()).path;
    EXPECT_EQ(check_new_run(options_, space_, old_).code(), ErrorCode::kBusy);
    updater_.reset();
    before_ = files();
  }
  void TearDown() override { EXPECT_TRUE(files() == before_) << "something was touched"; }

  std::map<std::string, std::string> files() const {
    std::map<std::string, std::string> all;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      if (!entry.is_regular_file()) continue;
      std::ifstream in(entry.path(), std::ios::binary);
      all[entry.path().string()] = {std::istreambuf_iterator<char>(in), {}};
    }
    return all;
  }
  ErrorCode code(const UpdaterOptions& options) const {
    return check_new_run(options, space_, old_).code();
  }

  storage::RunId old_;
  std::string made_;  // a checkpoint
  std::map<std::string, std::string> before_;
};

TEST_P(NewRunTest, BeginsWhereTheOldStateIs) {
  EXPECT_EQ(code(options_), ErrorCode::kOk);
  UpdaterOptions other = options_;
  for (DeviceOptions& device : other.devices) {
    device.capacity_bytes = fs::file_size(device.path + "/smartinf.state") * 5 / 4;
  }
  EXPECT_EQ(code(other), ErrorCode::kOk) << "what it takes goes free";
  for (DeviceOptions& device : other.devices) device.capacity_bytes /= 4;
  EXPECT_EQ(code(other), ErrorCode::kNoSpace);
  other = options_;
  other.devices.emplace_back().path = path("fresh");
  other.devices.back().bandwidth = 1;
  EXPECT_EQ(code(other), ErrorCode::kOk);
}

TEST_P(NewRunTest, WhatWouldFailLaterFailsNow) {
  EXPECT_EQ(check_new_run(options_, space_, storage::make_run_id()).code(), ErrorCode::kMismatch);
  UpdaterOptions other = options_;
  other.devices[0].path = device_folder(made_, 0);
  other.devices[1].path = device_folder(made_, 1);
  EXPECT_EQ(code(other), ErrorCode::kFailedPrecondition) << "devices of a checkpoint";
  other = options_;
  other.devices[1].bandwidth = 0;
  EXPECT_EQ(code(other), ErrorCode::kInvalidArgument);
  other = options_;
  other.devices[1].path = other.devices[0].path + "/../a";
  EXPECT_EQ(code(other), ErrorCode::kInvalidArgument) << "the same place";
  other = options_;
  other.memory_budget_bytes = 1000;
  EXPECT_EQ(code(other), ErrorCode::kOutOfMemory);
  other = options_;
  other.devices[1].processor = "opencl:none of this name";
  EXPECT_NE(code(other), ErrorCode::kOk);
  other = options_;
  other.rule.eps = 0;
  EXPECT_EQ(code(other), ErrorCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Once, NewRunTest, ::testing::Values(StateFormat::kF32),
                         [](const auto&) { return std::string("f32"); });

}  // namespace
}  // namespace smartinf::engine
