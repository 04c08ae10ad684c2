// How long a step takes when devices are not equally fast, on emulated drives: what the placement
// in proportion predicts, not what the slowest device would need for an equal share.
#include <algorithm>
#include <limits>

#include <gtest/gtest.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/test_timing.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {
namespace {

constexpr uint64_t kBlocks = 48;
constexpr uint64_t kElements = kBlocks * base::kBlockElements;
constexpr uint64_t kRate = 80'000'000;  // of the faster drive, read and written at once

class UnequalDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(space_.add("all", {kElements}, 0).ok());
    weights_.resize(kElements);
    options_.subgroup_elements = base::kBlockElements;
    options_.io_bytes = 128 * base::kKiB;
    options_.io_depth = 8;
    for (const uint64_t rate : {kRate, kRate / 2}) {
      DeviceOptions device;
      device.path = "drive of " + base::format_rate(static_cast<double>(rate));
      device.threads = 1;
      device.internal_link = {rate, rate};
      options_.devices.push_back(device);
      auto drive = csd::EmulatedDrive::create(128 * base::kMiB);
      ASSERT_TRUE(drive.ok()) << drive.status().to_string();
      drives_.push_back(std::move(*drive));
    }
  }

  double step_seconds() {
    EXPECT_TRUE(updater_->begin_step().ok());
    EXPECT_TRUE(updater_->put_gradient(0, weights_.data(), base::DataType::kBf16, kElements).ok());
    EXPECT_TRUE(updater_->finish_gradients(1).ok());
    UpdateOptions update;
    update.groups.resize(1);
    const uint64_t start_ns = base::now_ns();
    EXPECT_TRUE(updater_->start_update(update, base::DataType::kBf16, nullptr).ok());
    EXPECT_TRUE(updater_->commit("").ok());
    return base::seconds_since(start_ns);
  }

  plan::ParameterSpace space_;
  UpdaterOptions options_;
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives_;
  std::unique_ptr<Updater> updater_;
  std::vector<base::Bf16> weights_;
};

TEST_F(UnequalDevices, AStepTakesTheTimeThatTheProportionPredicts) {
  // The placement sees the links' rates, without being told.
  auto opened = Updater::open(options_, space_, emulated_sources(options_, drives_));
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  updater_ = std::move(*opened);
  const auto no_weights = [](uint64_t, std::span<float> out) {
    std::ranges::fill(out, 0.0f);
    return base::Status();
  };
  ASSERT_TRUE(updater_->initialize(no_weights, "").ok());
  const base::TrafficReading before = updater_->traffic().store_by_device[0];
  // 12 bytes each way a parameter, over one and a half drives.
  const double predicted = 12.0 * kElements / (1.5 * kRate);
  const double equal_shares = 12.0 * kElements / 2 / (0.5 * kRate);
  double best = std::numeric_limits<double>::infinity();
  int steps = 0;
  for (; steps < 5 && best > 1.06 * predicted; ++steps) best = std::min(best, step_seconds());
  EXPECT_GE(best, 0.97 * predicted);
  base::expect_in_time(best, 1.10 * predicted);  // a little for filling the slots
  base::expect_in_time(best, 0.80 * equal_shares);
  const uint64_t read =
      updater_->traffic().store_by_device[0].since(before).up(base::TrafficKind::kState);
  EXPECT_EQ(read, static_cast<uint64_t>(steps) * kBlocks * 2 / 3 * 12 * base::kBlockElements);
}

}  // namespace
}  // namespace smartinf::engine
