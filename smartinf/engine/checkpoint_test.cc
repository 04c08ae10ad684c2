// Copies of a run's state: equal to the last bit, complete or not there, and good to train with.
#include "smartinf/engine/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/checkpoint_test_model.h"

namespace smartinf::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

TEST_P(CheckpointTest, ComesBackOnOtherDevicesBitByBitAndTrainsOn) {
  // While the run has the devices open, between two steps, as the trainer does it.
  const CheckpointSummary made = checkpoint(snapshot());
  EXPECT_EQ(made.step, 3u);
  const auto at_three = state(*updater_);
  step(*updater_, 4);
  step(*updater_, 5);
  const auto at_five = state(*updater_);
  ASSERT_NE(at_three, at_five);

  const auto kept = read_checkpoint(made.path);
  ASSERT_TRUE(kept.ok()) << kept.status().to_string();
  EXPECT_EQ(kept->devices.size(), 2u);
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{"one"}, std::vector<std::string>{"x", "y", "z"}}) {
    ReshardOptions reshape;
    reshape.format = GetParam();
    reshape.subgroup_elements = names.size() == 1 ? 3 * base::kBlockElements : base::kBlockElements;
    StoredRun from = stored(kept->devices);
    const auto moved = reshard(from, devices(names), reshape);
    ASSERT_TRUE(moved.ok()) << moved.status().to_string();
    EXPECT_EQ(moved->step, 3u);
    EXPECT_EQ(moved->blocks_without_checksum, 0u);
    auto restored = open(options(GetParam(), names));
    ASSERT_NE(restored, nullptr);
    EXPECT_EQ(restored->committed_step(), 3u);
    EXPECT_EQ(restored->client_metadata(), "step 3");
    EXPECT_EQ(state(*restored), at_three);
    step(*restored, 4);
    step(*restored, 5);
    EXPECT_EQ(state(*restored), at_five);
    restored.reset();
    // And it is a run that can be opened again, and copied again.
    EXPECT_EQ(stored(paths(names)).step, 5u);
  }
}

TEST_P(CheckpointTest, ADeviceMoreTakesOnlyItsShare) {
  updater_.reset();
  StoredRun from = stored(paths({"a", "b"}));
  ReshardOptions reshape;
  reshape.format = GetParam();
  const auto moved = reshard(from, devices({"x", "y", "z"}), reshape);
  ASSERT_TRUE(moved.ok()) << moved.status().to_string();
  const StoredRun made = stored(paths({"x", "y", "z"}));
  ASSERT_EQ(made.pieces.size(), from.pieces.size());
  size_t taken = 0;
  for (size_t i = 0; i < made.pieces.size(); ++i) {
    if (made.pieces[i].device == 2) {
      ++taken;
    } else {
      EXPECT_EQ(made.pieces[i].device, from.pieces[i].device) << "piece " << i;
    }
  }
  EXPECT_GE(taken, made.pieces.size() / 3);
  EXPECT_LE(taken, base::divide_up(made.pieces.size(), 3));
}

// A copy that was cut between two devices' first steps is no run with a device missing, and no
// place for a new run either: it is made again.
TEST_P(CheckpointTest, AnInterruptedCopyIsMadeAgain) {
  StoredRun run = snapshot();
  const storage::RunId id = storage::make_run_id();
  for (const size_t prepared : {0u, 1u}) {
    for (size_t d = 0; d < 2; ++d) {
      storage::StoreLayout layout = run.devices[d]->layout();
      layout.run = id;
      layout.copied_step = 3;
      auto store = storage::Store::create(paths({"x", "y"})[d], layout, {});
      ASSERT_TRUE(store.ok()) << store.status().to_string();
      (*store)->begin_step(3);
      if (d >= prepared) continue;
      std::vector<base::AlignedBuffer> buffers;
      std::vector<storage::SubgroupIo> ios(layout.subgroups.size());
      for (size_t i = 0; i < ios.size(); ++i) {
        const base::SubgroupId subgroup = layout.subgroups[i].id;
        buffers.push_back(
            std::move(*base::AlignedBuffer::allocate((*store)->extent_bytes(subgroup))));
        for (size_t plane = 0; plane < layout.planes.size(); ++plane) {
          const auto bytes = buffers[i].bytes().subspan((*store)->plane_offset(subgroup, plane),
                                                        (*store)->plane_bytes(subgroup, plane));
          const uint64_t stride = base::encoded_bytes(
              base::plane_encoding(layout.format, layout.planes[plane]), base::kBlockElements);
          for (uint64_t block = 0; block * stride < bytes.size(); ++block) {
            (*store)->seal_block(
                subgroup, plane, block,
                bytes.subspan(block * stride,
                              std::min<uint64_t>(stride, bytes.size() - block * stride)));
          }
        }
        ios[i].op = storage::SubgroupIo::Op::kWrite;
        ios[i].subgroup = subgroup;
        ios[i].buffer = buffers[i].bytes();
        (*store)->start(ios[i]);
      }
      const base::Status status = (*store)->prepare(3, "step 3");
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    const auto opened = Updater::open(options(GetParam(), {"x", "y"}), space_);
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.status().code(), ErrorCode::kFailedPrecondition);
    EXPECT_THAT(opened.status().to_string(), HasSubstr("a copy of step 3"));
    const auto read = open_stored_run(devices({"x", "y"}), storage::ReaderLock::kTake);
    EXPECT_THAT(read.status().to_string(), HasSubstr("a copy of step 3"));
  }
  ReshardOptions reshape;
  reshape.format = GetParam();
  const auto again = reshard(run, devices({"x", "y"}), reshape);
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  auto restored = open(options(GetParam(), {"x", "y"}));
  ASSERT_NE(restored, nullptr);
  EXPECT_EQ(state(*restored), state(*updater_));
}

// The devices' own slots are what a run's checkpoint is copied through.
TEST_P(CheckpointTest, IsCopiedThroughLentMemory) {
  CheckpointOptions options;
  options.folder = path("checkpoints");
  options.memory_budget_bytes = 0;  // nothing could be allocated
  const auto made = write_checkpoint(*updater_, options);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  const auto before = state(*updater_);
  step(*updater_, 4);  // with slots that something else was in
  const auto after = state(*updater_);
  ReshardOptions reshape;
  reshape.format = GetParam();
  StoredRun from = stored(read_checkpoint(made->path)->devices);
  ASSERT_TRUE(reshard(from, devices({"c"}), reshape).ok());
  auto restored = open(this->options(GetParam(), {"c"}));
  ASSERT_NE(restored, nullptr);
  EXPECT_EQ(state(*restored), before);
  step(*restored, 4);
  EXPECT_EQ(state(*restored), after);
}

// Dropping a step does not wait for the update of everything else.
TEST_P(CheckpointTest, AnAbortStopsTheUpdateUnderWay) {
  updater_.reset();
  UpdaterOptions slow = options_;
  for (DeviceOptions& device : slow.devices) device.internal_link.up_bytes_per_s = 4e6;
  slow.memory_budget_bytes = 10 * base::kMiB;  // one slot each (f32), for two subgroups
  updater_ = open(slow);
  ASSERT_NE(updater_, nullptr);
  const auto before = state(*updater_);
  const std::vector<float> gradient(kCount, 0.1f);
  std::vector<float> weights(kCount);
  UpdateOptions update;
  update.groups = {{.lr = 0.01, .weight_decay = 0.1}};
  const auto begin = [&]() -> base::Status {
    SI_RETURN_IF_ERROR(updater_->begin_step());
    SI_RETURN_IF_ERROR(updater_->put_gradient(0, gradient.data(), DataType::kF32, kCount));
    SI_RETURN_IF_ERROR(updater_->finish_gradients(1).status());
    return updater_->start_update(update, DataType::kF32,
                                  [&](uint64_t first) { return weights.data() + first; });
  };
  uint64_t all = 0;
  for (const std::vector<float>& plane : before) all += plane.size() * sizeof(float);
  // On a busy machine the update may be over before it is aborted: then once more.
  bool stopped = false;
  for (int attempt = 0; attempt < 10 && !stopped; ++attempt) {
    const uint64_t read_before = updater_->traffic().store.up_total();
    ASSERT_TRUE(begin().ok());
    const base::Status taken = updater_->abort();
    ASSERT_TRUE(taken.ok()) << taken.to_string();
    const uint64_t read = updater_->traffic().store.up_total() - read_before;
    EXPECT_EQ(state(*updater_), before);
    stopped = GetParam() != StateFormat::kF32 || read < all * 9 / 10;
  }
  EXPECT_TRUE(stopped) << "every update went on to its end";
  ASSERT_TRUE(begin().ok());
  ASSERT_TRUE(updater_->wait_weights(0, kCount).ok());
  EXPECT_TRUE(updater_->commit("again").ok());
}

TEST_P(CheckpointTest, ADamagedBlockIsNotCopied) {
  updater_.reset();
  {
    const auto reader = storage::StateReader::open(path("b"), storage::ReaderLock::kTake);
    ASSERT_TRUE(reader.ok()) << reader.status().to_string();
    for (uint32_t slot = 0; slot < 2; ++slot) {
      std::fstream file((*reader)->file_path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(static_cast<std::streamoff>((*reader)->geometry().extent_offset(0, slot) + 100));
      file.write("damage", 6);
    }
  }
  StoredRun run = stored(paths({"a", "b"}));
  ReshardOptions reshape;
  reshape.format = GetParam();
  const auto moved = reshard(run, devices({"c"}), reshape);
  ASSERT_FALSE(moved.ok());
  EXPECT_EQ(moved.status().code(), ErrorCode::kCorrupt);
  EXPECT_EQ(moved.status().place().path, path("b/smartinf.state"));
  EXPECT_FALSE(fs::exists(path("c/smartinf.state")));
  CheckpointOptions options;
  options.folder = path("checkpoints");
  const auto made = write_checkpoint(run, options);
  // A clone takes the blocks as they are; a copy looks at them.
  if (!made.ok()) {
    EXPECT_EQ(made.status().code(), ErrorCode::kCorrupt);
    EXPECT_TRUE(fs::is_empty(path("checkpoints")));
  } else {
    EXPECT_TRUE(made->cloned);
  }
}

TEST_P(CheckpointTest, KeepsTheNewest) {
  std::vector<std::string> removed;
  for (uint64_t n = 4; n <= 7; ++n) {
    const CheckpointSummary made = checkpoint(snapshot(), 2);
    removed.insert(removed.end(), made.removed.begin(), made.removed.end());
    EXPECT_FALSE(made.existed);
    EXPECT_TRUE(checkpoint(snapshot(), 2).existed);
    step(*updater_, n);
  }
  std::vector<uint64_t> steps;
  for (const Checkpoint& each : list_checkpoints(path("checkpoints"))) steps.push_back(each.step);
  EXPECT_THAT(steps, ElementsAre(5, 6));
  EXPECT_THAT(removed,
              ElementsAre(path("checkpoints/step-00000003"), path("checkpoints/step-00000004")));
}

TEST_P(CheckpointTest, WhatIsInTheWayIsLeftAlone) {
  EXPECT_EQ(open_stored_run(devices({"a", "b"}), storage::ReaderLock::kTake).status().code(),
            ErrorCode::kBusy);
  StoredRun run = snapshot();
  ReshardOptions reshape;
  reshape.format = GetParam();
  ASSERT_TRUE(reshard(run, devices({"c"}), reshape).ok());
  const auto again = reshard(run, devices({"d", "c"}), reshape);
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.status().code(), ErrorCode::kAlreadyExists);
  EXPECT_FALSE(fs::exists(path("d/smartinf.state")));
  EXPECT_EQ(stored(paths({"c"})).step, 3u);
  reshape.progress = [](uint64_t, uint64_t) {
    return base::Status(ErrorCode::kCancelled, "enough");
  };
  EXPECT_EQ(reshard(run, devices({"e"}), reshape).status().code(), ErrorCode::kCancelled);
  EXPECT_FALSE(fs::exists(path("e/smartinf.state")));
  reshape.progress = {};
  reshape.memory_budget_bytes = 100'000;
  EXPECT_EQ(reshard(run, devices({"e"}), reshape).status().code(), ErrorCode::kOutOfMemory);
  EXPECT_EQ(reshard(run, devices({"e", "e"}), reshape).status().code(),
            ErrorCode::kInvalidArgument);
}

TEST_P(CheckpointTest, ChangesTheFormat) {
  const auto before = state(*updater_);
  StoredRun run = snapshot();
  for (const StateFormat format : {StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8,
                                   StateFormat{MomentFormat::kQ8, MasterFormat::kM24},
                                   StateFormat{MomentFormat::kF32, MasterFormat::kBf16}}) {
    const std::string name = base::state_format_name(format);
    ReshardOptions reshape;
    reshape.format = format;
    reshape.seed = 5;
    const auto moved = reshard(run, devices({name}), reshape);
    ASSERT_TRUE(moved.ok()) << moved.status().to_string();
    auto converted = open(options(format, {name}));
    ASSERT_NE(converted, nullptr);
    const auto after = state(*converted);
    const bool masters_stay =
        format.master == MasterFormat::kF32 || format.master == GetParam().master;
    const double rounding = masters_stay                           ? 0
                            : format.master == MasterFormat::kBf16 ? 0x1p-7
                                                                   : 0x1p-15;
    for (uint64_t i = 0; i < kCount; ++i) {
      const double master = before[0][i];
      ASSERT_LE(std::fabs(after[0][i] - master), rounding * std::fabs(master)) << i;
    }
    // A relative error of 2^-7 for bf16; a q8 code is off by at most one of its steps, which near
    // the group's largest momentum are 16 of the 494 that make up that one.
    const bool coarser =
        format.moments != MomentFormat::kF32 && format.moments != GetParam().moments;
    double worst = 0;
    for (uint64_t first = 0; first < kCount; first += base::kCodeGroupElements) {
      const uint64_t end = std::min(kCount, first + base::kCodeGroupElements);
      double largest = 0;
      for (uint64_t i = first; i < end; ++i) {
        largest = std::max(largest, std::fabs(static_cast<double>(before[1][i])));
      }
      for (uint64_t i = first; i < end; ++i) {
        worst =
            std::max(worst, std::fabs(static_cast<double>(after[1][i]) - before[1][i]) / largest);
      }
    }
    if (coarser) {
      EXPECT_LT(worst, format == StateFormat::kBf16 ? 0x1p-7 : 16.0 / 494);
    } else {
      EXPECT_EQ(after[1], before[1]);
      EXPECT_EQ(after[2], before[2]);
    }
    step(*converted, 4);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CheckpointTest,
                         ::testing::Values(StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8,
                                           StateFormat{MomentFormat::kQ8, MasterFormat::kM24}),
                         [](const auto& test) {
                           std::string name = base::state_format_name(test.param);
                           std::replace(name.begin(), name.end(), '+', '_');
                           return name;
                         });

}  // namespace
}  // namespace smartinf::engine
