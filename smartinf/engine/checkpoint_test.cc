// Copies of a run's state: equal to the last bit, complete or not there, and good to train with.
#include "smartinf/engine/checkpoint.h"

#include <array>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "smartinf/base/units.h"
#include "smartinf/engine/updater.h"

namespace {

/// Told what makes names and contents durable, in place of the C library's functions.
std::function<void(const std::string& call, const std::string& path)> watched_calls;

void tell(const char* call, const std::string& path) {
  if (!watched_calls) return;
  const auto told = std::exchange(watched_calls, nullptr);  // it makes such calls itself
  told(call, path);
  watched_calls = told;
}

}  // namespace

extern "C" {
int fsync(int file) {
  std::error_code error;
  tell("fsync",
       std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", file), error).string());
  return static_cast<int>(::syscall(SYS_fsync, file));
}
int rename(const char* from, const char* to) noexcept {
  const auto done = static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
  const int why = errno;
  if (done == 0) tell("rename", from);
  errno = why;
  return done;
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned int flags) noexcept {
  const auto done =
      static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  const int why = errno;
  if (done == 0) tell("exchange", from);
  errno = why;
  return done;
}
int unlink(const char* path) noexcept {
  tell("unlink", path);
  return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}
}

namespace smartinf::engine {
namespace {

using base::DataType;
using base::ErrorCode;
using base::StateFormat;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr uint64_t kCount = 7 * base::kBlockElements + 777;

class CheckpointTest : public ::testing::TestWithParam<StateFormat> {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "smartinf-checkpoint-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    ASSERT_TRUE(space_.add("embed", {4 * base::kBlockElements}, 0).ok());
    ASSERT_TRUE(space_.add("head", {kCount - 4 * base::kBlockElements}, 0).ok());
    options_ = options(GetParam(), {"a", "b"});
    updater_ = open(options_);
    const base::Status status = updater_->initialize(
        [](uint64_t first, std::span<float> out) {
          for (size_t i = 0; i < out.size(); ++i) out[i] = std::sin(static_cast<float>(first + i));
        },
        "step 0");
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (uint64_t n = 1; n <= 3; ++n) step(*updater_, n);
  }
  void TearDown() override {
    updater_.reset();
    fs::remove_all(folder_);
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::vector<std::string> paths(const std::vector<std::string>& names) const {
    std::vector<std::string> all;
    for (const std::string& name : names) all.push_back(path(name));
    return all;
  }
  UpdaterOptions options(StateFormat format, const std::vector<std::string>& names) const {
    UpdaterOptions options;
    options.format = format;
    options.subgroup_elements = 2 * base::kBlockElements;
    options.gradient_type = DataType::kF32;
    options.io_bytes = base::kMiB;
    options.io_depth = 2;
    for (const std::string& name : names) {
      DeviceOptions& device = options.devices.emplace_back();
      device.path = path(name);
      device.bandwidth = 1;
    }
    return options;
  }
  std::unique_ptr<Updater> open(const UpdaterOptions& options) {
    auto updater = Updater::open(options, space_);
    EXPECT_TRUE(updater.ok()) << updater.status().to_string();
    return updater.ok() ? std::move(*updater) : nullptr;
  }
  void step(Updater& updater, uint64_t seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::normal_distribution<float> normal(0.0f, 0.1f);
    std::vector<float> gradient(kCount);
    for (float& value : gradient) value = normal(random);
    std::vector<float> weights(kCount);
    UpdateOptions update;
    update.groups = {{.lr = 0.01, .weight_decay = 0.1}};
    const auto go = [&]() -> base::Status {
      SI_RETURN_IF_ERROR(updater.begin_step());
      SI_RETURN_IF_ERROR(updater.put_gradient(0, gradient.data(), DataType::kF32, kCount));
      SI_RETURN_IF_ERROR(updater.finish_gradients(1).status());
      SI_RETURN_IF_ERROR(updater.start_update(
          update, DataType::kF32, [&](uint64_t first) { return weights.data() + first; }));
      SI_RETURN_IF_ERROR(updater.wait_weights(0, kCount));
      return updater.commit("step " + std::to_string(seed));
    };
    const base::Status status = go();
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  std::vector<std::vector<float>> state(Updater& updater) {
    std::vector<std::vector<float>> planes(3, std::vector<float>(kCount));
    const base::Status status = updater.read_state(
        7, [&](uint64_t first, std::span<const std::span<const float>> pieces) -> base::Status {
          for (size_t plane = 0; plane < pieces.size(); ++plane) {
            std::copy(pieces[plane].begin(), pieces[plane].end(),
                      planes[plane].begin() + static_cast<std::ptrdiff_t>(first));
          }
          return base::Status();
        });
    EXPECT_TRUE(status.ok()) << status.to_string();
    return planes;
  }
  StoredRun stored(const std::vector<std::string>& places,
                   storage::ReaderLock lock = storage::ReaderLock::kTake) {
    auto run = open_stored_run(places, lock);
    EXPECT_TRUE(run.ok()) << run.status().to_string();
    return std::move(*run);
  }
  CheckpointSummary checkpoint(StoredRun run, uint64_t keep = 0) {
    CheckpointOptions options;
    options.folder = path("checkpoints");
    options.keep = keep;
    auto made = write_checkpoint(run, options);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return made.ok() ? *made : CheckpointSummary{};
  }

  fs::path folder_;
  plan::ParameterSpace space_;
  UpdaterOptions options_;
  std::unique_ptr<Updater> updater_;
};

TEST_P(CheckpointTest, ComesBackOnOtherDevicesBitByBitAndTrainsOn) {
  // While the run has the devices open, between two steps, as the trainer does it.
  const CheckpointSummary made = checkpoint(stored(paths({"a", "b"}), storage::ReaderLock::kLeave));
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
    const auto moved = reshard(from, paths(names), reshape);
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
  const auto moved = reshard(from, paths({"x", "y", "z"}), reshape);
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
  StoredRun run = stored(paths({"a", "b"}), storage::ReaderLock::kLeave);
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
    const auto read = open_stored_run(paths({"x", "y"}), storage::ReaderLock::kTake);
    EXPECT_THAT(read.status().to_string(), HasSubstr("a copy of step 3"));
  }
  ReshardOptions reshape;
  reshape.format = GetParam();
  const auto again = reshard(run, paths({"x", "y"}), reshape);
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
  options.scratch_memory = updater_->scratch_memory();
  ASSERT_EQ(options.scratch_memory.size(), 2u);
  const auto made = checkpoint_open_run(paths({"a", "b"}), options);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  const auto before = state(*updater_);
  step(*updater_, 4);  // with slots that something else was in
  const auto after = state(*updater_);
  ReshardOptions reshape;
  reshape.format = GetParam();
  StoredRun from = stored(read_checkpoint(made->path)->devices);
  ASSERT_TRUE(reshard(from, paths({"c"}), reshape).ok());
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
    const StoredRun run = stored(paths({"a", "b"}));
    const storage::StateReader& reader = *run.devices[1];
    for (uint32_t slot = 0; slot < 2; ++slot) {
      std::fstream file(reader.file_path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(static_cast<std::streamoff>(reader.geometry().extent_offset(0, slot) + 100));
      file.write("damage", 6);
    }
  }
  StoredRun run = stored(paths({"a", "b"}));
  ReshardOptions reshape;
  reshape.format = GetParam();
  const auto moved = reshard(run, paths({"c"}), reshape);
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

TEST_P(CheckpointTest, AFlippedBitInTheDescriptionIsFound) {
  const CheckpointSummary made = checkpoint(stored(paths({"a", "b"}), storage::ReaderLock::kLeave));
  const std::string file = made.path + "/" + std::string(kCheckpointFile);
  const auto right = read_checkpoint(made.path);
  ASSERT_TRUE(right.ok());
  uint64_t found = 0;
  for (uint64_t bit = 0; bit < 8 * fs::file_size(file); ++bit) {
    const auto flip = [&] {
      std::fstream text(file, std::ios::in | std::ios::out | std::ios::binary);
      text.seekg(static_cast<std::streamoff>(bit / 8));
      const int byte = text.get();
      text.seekp(static_cast<std::streamoff>(bit / 8));
      text.put(static_cast<char>(byte ^ (1 << bit % 8)));
    };
    flip();
    const auto read = read_checkpoint(made.path);
    if (!read.ok()) {
      ++found;
      EXPECT_EQ(read.status().code(), ErrorCode::kCorrupt);
    } else {
      // Between the words, or in the name of what is not needed.
      EXPECT_EQ(read->step, right->step) << "bit " << bit;
      EXPECT_EQ(read->run, right->run) << "bit " << bit;
      EXPECT_EQ(read->devices, right->devices) << "bit " << bit;
    }
    flip();
  }
  EXPECT_GT(found, 4 * fs::file_size(file));
  EXPECT_TRUE(read_checkpoint(made.path).ok());
}

TEST_P(CheckpointTest, KeepsTheNewest) {
  std::vector<std::string> removed;
  for (uint64_t n = 4; n <= 7; ++n) {
    const CheckpointSummary made =
        checkpoint(stored(paths({"a", "b"}), storage::ReaderLock::kLeave), 2);
    removed.insert(removed.end(), made.removed.begin(), made.removed.end());
    EXPECT_FALSE(made.existed);
    EXPECT_TRUE(checkpoint(stored(paths({"a", "b"}), storage::ReaderLock::kLeave), 2).existed);
    step(*updater_, n);
  }
  std::vector<uint64_t> steps;
  for (const Checkpoint& each : list_checkpoints(path("checkpoints"))) steps.push_back(each.step);
  EXPECT_THAT(steps, ElementsAre(5, 6));
  EXPECT_THAT(removed,
              ElementsAre(path("checkpoints/step-00000003"), path("checkpoints/step-00000004")));
}

TEST_P(CheckpointTest, WhatIsInTheWayIsLeftAlone) {
  EXPECT_EQ(open_stored_run(paths({"a", "b"}), storage::ReaderLock::kTake).status().code(),
            ErrorCode::kBusy);
  StoredRun run = stored(paths({"a", "b"}), storage::ReaderLock::kLeave);
  ReshardOptions reshape;
  reshape.format = GetParam();
  ASSERT_TRUE(reshard(run, paths({"c"}), reshape).ok());
  const auto again = reshard(run, paths({"d", "c"}), reshape);
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.status().code(), ErrorCode::kAlreadyExists);
  EXPECT_FALSE(fs::exists(path("d/smartinf.state")));
  EXPECT_EQ(stored(paths({"c"})).step, 3u);
  reshape.progress = [](uint64_t, uint64_t) {
    return base::Status(ErrorCode::kCancelled, "enough");
  };
  EXPECT_EQ(reshard(run, paths({"e"}), reshape).status().code(), ErrorCode::kCancelled);
  EXPECT_FALSE(fs::exists(path("e/smartinf.state")));
  reshape.progress = {};
  reshape.memory_budget_bytes = 100'000;
  EXPECT_EQ(reshard(run, paths({"e"}), reshape).status().code(), ErrorCode::kOutOfMemory);
  EXPECT_EQ(reshard(run, paths({"e", "e"}), reshape).status().code(), ErrorCode::kInvalidArgument);
}

TEST_P(CheckpointTest, ChangesTheFormat) {
  const auto before = state(*updater_);
  StoredRun run = stored(paths({"a", "b"}), storage::ReaderLock::kLeave);
  for (const StateFormat format : {StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8}) {
    const std::string name(base::state_format_name(format));
    ReshardOptions reshape;
    reshape.format = format;
    reshape.seed = 5;
    const auto moved = reshard(run, paths({name}), reshape);
    ASSERT_TRUE(moved.ok()) << moved.status().to_string();
    auto converted = open(options(format, {name}));
    ASSERT_NE(converted, nullptr);
    const auto after = state(*converted);
    EXPECT_EQ(after[0], before[0]) << "master weights are f32 in every format";
    // A relative error of 2^-7 for bf16; a q8 code is off by at most one of its steps, which near
    // the group's largest momentum are 16 of the 494 that make up that one.
    const bool coarser = format != StateFormat::kF32 && format != GetParam();
    double worst = 0;
    for (uint64_t first = 0; first < kCount; first += base::kQ8GroupElements) {
      const uint64_t end = std::min(kCount, first + base::kQ8GroupElements);
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
      EXPECT_EQ(after, before);
    }
    step(*converted, 4);
  }
}

/// What is the same in every format.
class CheckpointFolderTest : public CheckpointTest {
 protected:
  /// Another run at the same step, with the same state.
  void restore_to(const std::string& name) {
    StoredRun run = stored(paths({"a", "b"}), storage::ReaderLock::kLeave);
    ReshardOptions copy;
    copy.format = GetParam();
    const auto made = reshard(run, {path(name)}, copy);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
  }
  CheckpointSummary checkpoint_at(const std::string& name, bool replace = false) {
    StoredRun run = stored(paths({"a", "b"}), storage::ReaderLock::kLeave);
    CheckpointOptions options;
    options.path = path(name);
    options.replace = replace;
    auto made = write_checkpoint(run, options);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return made.ok() ? *made : CheckpointSummary{};
  }
  void write(const fs::path& file, const std::string& text) {
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::string read(const std::string& file) {
    std::ifstream in(file);
    return {std::istreambuf_iterator<char>(in), {}};
  }
};

TEST_P(CheckpointFolderTest, TwoRunsShareAFolder) {
  restore_to("c");
  for (int round = 0; round < 8; ++round) {
    CheckpointOptions options;
    options.folder = path("checkpoints");
    std::array<base::Result<CheckpointSummary>, 2> made = {base::Status(ErrorCode::kIo, ""),
                                                           base::Status(ErrorCode::kIo, "")};
    std::array<storage::RunId, 2> ids;
    {
      std::array<std::jthread, 2> runs;
      for (size_t i = 0; i < 2; ++i) {
        runs[i] = std::jthread([&, i] {
          auto run = open_stored_run(i == 0 ? paths({"a", "b"}) : paths({"c"}),
                                     storage::ReaderLock::kLeave);
          ids[i] = run->layout().run;
          made[i] = write_checkpoint(*run, options);
        });
      }
    }
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(made[i].ok()) << made[i].status().to_string();
      const auto kept = read_checkpoint(made[i]->path);
      ASSERT_TRUE(kept.ok()) << kept.status().to_string();
      EXPECT_EQ(kept->run, ids[i]);
      const auto opened = open_checkpoint(*kept);
      EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    }
    EXPECT_EQ(std::distance(fs::directory_iterator(options.folder), {}), 2);
    fs::remove_all(options.folder);
  }
}

TEST_P(CheckpointFolderTest, DevicesOfAnotherCheckpointAreRefused) {
  const CheckpointSummary first = checkpoint_at("first");
  restore_to("c");
  step(*updater_, 4);
  const CheckpointSummary later = checkpoint_at("later");
  auto other_run = stored({path("c")});
  CheckpointOptions options;
  options.path = path("other");
  ASSERT_TRUE(write_checkpoint(other_run, options).ok());

  const auto refused = [&](const std::string& name, const std::string& why) {
    const auto kept = read_checkpoint(path(name));
    ASSERT_TRUE(kept.ok()) << kept.status().to_string();
    const base::Status status = check_devices(*kept);
    EXPECT_EQ(status.code(), ErrorCode::kMismatch) << name;
    EXPECT_THAT(status.to_string(), HasSubstr(why));
    EXPECT_EQ(open_checkpoint(*kept).status().code(), ErrorCode::kMismatch) << name;
  };
  const auto copy = [&](const std::string& from, const std::string& to) {
    fs::copy(path(from), path(to), fs::copy_options::recursive);
  };
  copy("first", "sound");
  EXPECT_TRUE(check_devices(*read_checkpoint(path("sound"))).ok());

  copy("first", "with_description_of_other");
  fs::remove(path("with_description_of_other/checkpoint.json"));
  copy("other/checkpoint.json", "with_description_of_other/checkpoint.json");
  refused("with_description_of_other", "of run");

  copy("first", "with_one_of_later");
  fs::remove_all(path("with_one_of_later/device-1"));
  copy("later/device-1", "with_one_of_later/device-1");
  refused("with_one_of_later", "step 4");

  copy("first", "with_all_of_later");
  for (const std::string& device : paths({"device-0", "device-1"})) {
    const std::string name = "/" + fs::path(device).filename().string();
    fs::remove_all(path("with_all_of_later" + name));
    copy("later" + name, "with_all_of_later" + name);
  }
  refused("with_all_of_later", "step 4");

  copy("first", "crossed");
  fs::rename(path("crossed/device-0"), path("crossed/x"));
  fs::rename(path("crossed/device-1"), path("crossed/device-0"));
  fs::rename(path("crossed/x"), path("crossed/device-1"));
  refused("crossed", "number 1 of 2");
}

TEST_P(CheckpointFolderTest, IsNoPlaceToTrainOn) {
  updater_.reset();
  const CheckpointSummary made = checkpoint(stored(paths({"a", "b"})));
  UpdaterOptions inside = options_;
  inside.devices[0].path = made.path + "/device-0";
  inside.devices[1].path = made.path + "/device-1/";
  const auto opened = Updater::open(inside, space_);
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.status().code(), ErrorCode::kFailedPrecondition);
  EXPECT_THAT(opened.status().to_string(), HasSubstr("smartinf restore " + made.path));
  EXPECT_TRUE(open_checkpoint(*read_checkpoint(made.path)).ok());
}

TEST_P(CheckpointFolderTest, WhatIsLeftOfAPartialOneIsTold) {
  const std::string run = "-0a1b2c3d-1234.partial";
  for (const std::string& name :
       {"step-00000007" + run, "smartinf" + run, std::string("step-00000007.partial"),
        std::string("step-00000007-0a1b2c3d.partial")}) {
    const std::string folder = path("kept/" + name);
    fs::create_directories(folder);
    EXPECT_EQ(look_at_partial(folder), PartialFolder::kLeftover) << name;
    write(folder + "/device-0/smartinf.state.creating", "x");
    write(folder + "/device-12/smartinf.state", "x");
    write(folder + "/rank-1" + run + "/device-0/smartinf.state", "x");
    write(folder + "/rank-0/checkpoint.json", "x");
    EXPECT_EQ(look_at_partial(folder), PartialFolder::kLeftover) << name;
    {
      const storage::FileDescriptor lock(::open(folder.c_str(), O_RDONLY | O_DIRECTORY));
      ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
      EXPECT_EQ(look_at_partial(folder), PartialFolder::kInUse);
      EXPECT_EQ(remove_partial(folder).code(), ErrorCode::kBusy);
    }
    for (const std::string foreign :
         {"/thesis.tex", "/device-0/notes", "/device-0/more/smartinf.state",
          "/device-x/smartinf.state", "/rank-0/rank-1/checkpoint.json"}) {
      write(folder + foreign, "work");
      EXPECT_EQ(look_at_partial(folder), PartialFolder::kForeign) << foreign;
      EXPECT_EQ(remove_partial(folder).code(), ErrorCode::kFailedPrecondition);
      EXPECT_EQ(read(folder + foreign), "work");
      EXPECT_TRUE(fs::exists(folder + "/device-0/smartinf.state.creating"));
      fs::remove(folder + foreign);
      const fs::path parent = fs::path(folder + foreign).parent_path();
      if (fs::is_empty(parent)) fs::remove(parent);
      if (fs::exists(folder + "/rank-0/rank-1")) fs::remove(folder + "/rank-0/rank-1");
    }
    fs::create_directory_symlink(path("a"), folder + "/device-3");
    EXPECT_EQ(look_at_partial(folder), PartialFolder::kForeign) << "a link";
    fs::remove(folder + "/device-3");
    const base::Status removed = remove_partial(folder);
    EXPECT_TRUE(removed.ok()) << removed.to_string();
    EXPECT_FALSE(fs::exists(folder));
  }
  for (const char* name : {"step-1-draft.partial", "step-00000007", "work.partial", "step-.partial",
                           "x-0a1b2c3-1234.partial", "x-0a1b2c3d-.partial", "x-0a1b2c3d.partial"}) {
    fs::create_directories(path(std::string("kept/") + name));
    EXPECT_EQ(look_at_partial(path(std::string("kept/") + name)), PartialFolder::kForeign) << name;
  }
}

TEST_P(CheckpointFolderTest, LeftoversOfTheRunGoWithItsNextCheckpoint) {
  const std::string run =
      stored(paths({"a", "b"}), storage::ReaderLock::kLeave).layout().run.to_string().substr(0, 8);
  const std::string ours = path("checkpoints/step-00000002-" + run + "-1.partial");
  const std::string others = path("checkpoints/step-00000002-00000000-1.partial");
  const std::string with_more = path("checkpoints/step-00000001-" + run + "-1.partial");
  for (const std::string& each : {ours, others, with_more})
    write(each + "/device-0/smartinf.state", "x");
  write(with_more + "/notes", "work");
  checkpoint(stored(paths({"a", "b"}), storage::ReaderLock::kLeave));
  EXPECT_FALSE(fs::exists(ours));
  EXPECT_TRUE(fs::exists(others));
  EXPECT_EQ(read(with_more + "/notes"), "work");
  // An old checkpoint that somebody has put something into is not deleted with it.
  write(path("checkpoints/step-00000003/notes"), "work");
  step(*updater_, 4);
  EXPECT_TRUE(
      checkpoint(stored(paths({"a", "b"}), storage::ReaderLock::kLeave), 1).removed.empty());
  EXPECT_EQ(read(path("checkpoints/step-00000003/notes")), "work");
}

TEST_P(CheckpointFolderTest, TakesThePlaceOfAnother) {
  checkpoint_at("kept");
  StoredRun run = stored(paths({"a", "b"}), storage::ReaderLock::kLeave);
  CheckpointOptions options;
  options.path = path("kept/");
  EXPECT_EQ(write_checkpoint(run, options).status().code(), ErrorCode::kAlreadyExists);
  step(*updater_, 4);
  EXPECT_EQ(checkpoint_at("kept", true).step, 4u);
  EXPECT_TRUE(open_checkpoint(*read_checkpoint(path("kept"))).ok());
  EXPECT_EQ(fs::exists(path("kept/device-0/smartinf.state")), true);
  fs::create_directory(path("empty"));
  checkpoint_at("empty");
  // Whatever else lies there is not ours to delete.
  write(path("kept/notes"), "work");
  options.replace = true;
  const auto refused = write_checkpoint(run, options);
  EXPECT_EQ(refused.status().code(), ErrorCode::kAlreadyExists);
  EXPECT_THAT(refused.status().to_string(), HasSubstr("kept/notes"));
  EXPECT_EQ(read_checkpoint(path("kept"))->step, 4u);
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_FALSE(entry.path().string().ends_with(kPartialSuffix)) << entry.path();
  }
}

// What a power cut leaves is what was synced: files before folders, folders before their name, the
// name before the old one goes. At no moment is there neither the old one nor the new one.
TEST_P(CheckpointFolderTest, IsDurableBeforeItCounts) {
  fs::create_directory(path("new"));
  const std::string kept = path("new/run/kept");
  const auto record = [&](bool replace) {
    std::vector<std::string> calls;
    watched_calls = [&](const std::string& call, const std::string& on) {
      if (on.starts_with(folder_.string() + "/new") || on == folder_.string()) {
        calls.push_back(call + " " + on.substr(folder_.string().size()));
      }
      if (replace) {
        const auto there = read_checkpoint(kept);
        EXPECT_TRUE(there.ok() && check_devices(*there).ok()) << "at " << call << " " << on;
      }
    };
    checkpoint_at("new/run/kept", replace);
    watched_calls = nullptr;
    return calls;
  };
  const std::string run =
      stored(paths({"a", "b"}), storage::ReaderLock::kLeave).layout().run.to_string().substr(0, 8);
  const std::string partial = fmt::format("/new/run/kept-{}-{}.partial", run, ::getpid());
  const auto place_of = [](const std::vector<std::string>& calls, const std::string& call) {
    const auto found = std::find(calls.rbegin(), calls.rend(), call);
    EXPECT_NE(found, calls.rend()) << call << " in\n" << ::testing::PrintToString(calls);
    return calls.rend() - found;
  };
  for (const bool replace : {false, true}) {
    const std::vector<std::string> calls = record(replace);
    const auto named = place_of(calls, (replace ? "exchange " : "rename ") + partial);
    for (const std::string inside : {"/device-0/smartinf.state", "/device-1/smartinf.state",
                                     "/device-0", "/device-1", "/checkpoint.json", ""}) {
      const auto synced = place_of(calls, "fsync " + partial + inside);
      EXPECT_LT(synced, named) << inside;
    }
    const auto parent = place_of(calls, "fsync /new/run");
    EXPECT_GT(parent, named);
    if (replace) {
      EXPECT_GT(place_of(calls, "unlink " + partial + "/checkpoint.json"), parent);
      EXPECT_GT(place_of(calls, "unlink " + partial + "/device-1/smartinf.state"), parent);
    } else {
      place_of(calls, "fsync /new");  // which holds the name of the folder that was made
    }
    step(*updater_, 4);
  }
}

TEST_P(CheckpointFolderTest, OfSeveralRanksIsWholeOrRefused) {
  restore_to("c");
  const auto part = [&](const std::string& at, const std::vector<std::string>& devices) {
    StoredRun run = stored(devices, storage::ReaderLock::kLeave);
    CheckpointOptions options;
    options.path = at;
    const auto made = write_checkpoint(run, options);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return run.layout().run;
  };
  const auto both = [&](const std::string& name, bool replace) {
    auto ranks = RanksCheckpoint::begin(path(name), replace, storage::RunId{});
    ASSERT_TRUE(ranks.ok()) << ranks.status().to_string();
    part(rank_folder(ranks->folder(), 0), paths({"a", "b"}));
    EXPECT_EQ(ranks->finish(2, "text").code(), ErrorCode::kNotFound) << "rank 1 is still missing";
    part(rank_folder(ranks->folder(), 1), {path("c")});
    const base::Status status = ranks->finish(2, "text");
    EXPECT_TRUE(status.ok()) << status.to_string();
  };
  both("first", false);
  auto kept = read_checkpoint(path("first"));
  ASSERT_TRUE(kept.ok()) << kept.status().to_string();
  ASSERT_EQ(kept->ranks.size(), 2u);
  EXPECT_EQ(kept->trainer, "text");
  EXPECT_EQ(kept->step, 3u);
  for (const Checkpoint& rank : kept->ranks) EXPECT_TRUE(open_checkpoint(rank).ok());
  EXPECT_EQ(open_checkpoint(*kept).status().code(), ErrorCode::kUnsupported);
  EXPECT_EQ(RanksCheckpoint::begin(path("first"), false, storage::RunId{}).status().code(),
            ErrorCode::kAlreadyExists);
  {
    auto given_up = RanksCheckpoint::begin(path("given_up"), false, storage::RunId{});
    part(rank_folder(given_up->folder(), 0), paths({"a", "b"}));
  }
  step(*updater_, 4);
  both("later", false);
  both("first", true);
  fs::rename(path("later/rank-1"), path("later/x"));
  EXPECT_EQ(read_checkpoint(path("later")).status().code(), ErrorCode::kNotFound);
  fs::rename(path("first/rank-0"), path("later/rank-1"));
  const auto mixed = read_checkpoint(path("later"));
  EXPECT_EQ(mixed.status().code(), ErrorCode::kMismatch) << mixed.status().to_string();
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_FALSE(entry.path().string().ends_with(kPartialSuffix)) << entry.path();
  }
}

TEST_P(CheckpointFolderTest, AStateIsReplacedByAWholeOneOnly) {
  const CheckpointSummary made = checkpoint_at("kept");
  step(*updater_, 4);
  const auto at_four = state(*updater_);
  updater_.reset();
  const auto kept = read_checkpoint(made.path);
  StoredRun from = *open_checkpoint(*kept);
  ReshardOptions replace;
  replace.format = GetParam();
  replace.replace = true;
  const auto old_is_untouched = [&] {
    EXPECT_EQ(stored(paths({"a", "b"})).step, 4u);
    for (const std::string& target : paths({"a", "b"})) {
      for (const auto& entry : fs::directory_iterator(target)) {
        EXPECT_FALSE(entry.is_directory()) << entry.path();
      }
    }
  };
  // A place that takes nothing, found when the others are ready; a copy that is stopped; a rename
  // that fails when the first has been exchanged.
  write(path("file"), "x");
  EXPECT_FALSE(reshard(from, paths({"a", "file"}), replace).ok());
  old_is_untouched();
  replace.progress = [](uint64_t done, uint64_t total) {
    return done < total ? base::Status() : base::Status(ErrorCode::kCancelled, "enough");
  };
  EXPECT_EQ(reshard(from, paths({"a", "b"}), replace).status().code(), ErrorCode::kCancelled);
  old_is_untouched();
  replace.progress = {};
  int exchanges = 0;
  watched_calls = [&](const std::string& call, const std::string&) {
    if (call == "exchange" && ++exchanges == 1)
      fs::rename(path("b/smartinf.state"), path("hidden"));
    if (call == "exchange" && exchanges == 2) fs::rename(path("hidden"), path("b/smartinf.state"));
  };
  const auto failed = reshard(from, paths({"a", "b"}), replace);
  watched_calls = nullptr;
  EXPECT_EQ(failed.status().code(), ErrorCode::kNotFound) << failed.status().to_string();
  EXPECT_EQ(exchanges, 2) << "the first is aborted";
  old_is_untouched();
  const auto many = reshard(from, paths({"a", "b", "c", "d", "e", "f", "g", "h", "i"}), replace);
  EXPECT_THAT(many.status().to_string(), HasSubstr("Leave this place out"));
  old_is_untouched();
  updater_ = open(options_);
  EXPECT_EQ(state(*updater_), at_four);
  EXPECT_EQ(reshard(from, paths({"a", "b"}), replace).status().code(), ErrorCode::kBusy);
  updater_.reset();

  const auto done = reshard(from, paths({"a", "c"}), replace);
  ASSERT_TRUE(done.ok()) << done.status().to_string();
  const StoredRun now = stored(paths({"a", "c"}));
  EXPECT_EQ(now.step, 3u);
  EXPECT_EQ(now.layout().run, done->run);
  EXPECT_FALSE(fs::exists(path("a/smartinf.replacement")));
}

INSTANTIATE_TEST_SUITE_P(Once, CheckpointFolderTest, ::testing::Values(StateFormat::kF32),
                         [](const auto&) { return std::string("f32"); });

INSTANTIATE_TEST_SUITE_P(Formats, CheckpointTest,
                         ::testing::Values(StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8),
                         [](const auto& test) {
                           return std::string(base::state_format_name(test.param));
                         });

}  // namespace
}  // namespace smartinf::engine
