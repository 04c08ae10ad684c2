// Code that the tests of checkpoints share: a run on two devices that has done three steps.
#pragma once

#include <cmath>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {

using base::DataType;
using base::ErrorCode;
using base::MasterFormat;
using base::MomentFormat;
using base::StateFormat;

inline constexpr uint64_t kCount = 7 * base::kBlockElements + 777;

class CheckpointTest : public ::testing::TestWithParam<StateFormat> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(space_.add("embed", {4 * base::kBlockElements}, 0).ok());
    ASSERT_TRUE(space_.add("head", {kCount - 4 * base::kBlockElements}, 0).ok());
    options_ = options(GetParam(), {"a", "b"});
    updater_ = open(options_);
    const base::Status status = updater_->initialize(
        [](uint64_t first, std::span<float> out) {
          for (size_t i = 0; i < out.size(); ++i) out[i] = std::sin(static_cast<float>(first + i));
          return base::Status();
        },
        "step 0");
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (uint64_t n = 1; n <= 3; ++n) step(*updater_, n);
  }

  std::string path(const std::string& name) const { return scratch_ / name; }
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
  DeviceSources devices(const std::vector<std::string>& names) const {
    return sources_at(paths(names));
  }
  StoredRun stored(const std::vector<std::string>& places,
                   storage::ReaderLock lock = storage::ReaderLock::kTake) {
    auto run = open_stored_run(sources_at(places), lock);
    EXPECT_TRUE(run.ok()) << run.status().to_string();
    return std::move(*run);
  }
  /// A snapshot of the devices that are open, between two steps.
  StoredRun snapshot() {
    auto run = updater_->snapshot();
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

  const base::Scratch scratch_;
  const std::filesystem::path folder_ = scratch_.path();
  plan::ParameterSpace space_;
  UpdaterOptions options_;
  std::unique_ptr<Updater> updater_;
};

}  // namespace smartinf::engine
