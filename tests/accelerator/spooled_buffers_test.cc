// Buffers beside an accelerator whose copies come late.
#include "smartinf/train/spooled_buffers.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "smartinf/base/units.h"
#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/test_device.h"

#include "tests/accelerator/accelerator.h"

namespace smartinf::train {
namespace {

using test_accelerator::smartinf_test_accelerator_hold_copies;

class LateBuffers : public testing::Test {
 protected:
  static constexpr size_t kUnits = 3;
  static constexpr size_t kBatches = 4;
  static constexpr int64_t kBytes = 64 * 1024;

  void SetUp() override {
    const test_accelerator::Options plain;
    test_accelerator::smartinf_test_accelerator_set_options(&plain);
    const auto layout = csd::test_layout(base::StateFormat::kF32, 0, 1);
    csd::LocalDeviceOptions options;
    options.path = options.name = "drive";
    options.store.io_bytes = 128 * base::kKiB;
    options.store.spool_bytes = 2 * base::kMiB;
    auto drive = csd::EmulatedDrive::create(*csd::EmulatedDrive::size_for(
        layout, storage::Durability::kStep, options.store.spool_bytes));
    ASSERT_TRUE(drive.ok());
    drive_ = std::move(*drive);
    auto device = csd::create_emulated_device(options, layout, *drive_);
    ASSERT_TRUE(device.ok()) << device.status().to_string();
    devices_.push_back(std::move(*device));
    spool_ = std::make_unique<engine::Spool>(devices_, watch_);
    buffers_.emplace(*spool_, copies_, SpooledBuffers::kOnTheirWay, kBytes);
  }
  void TearDown() override {
    buffers_.reset();
    devices_.clear();
  }

  static int value_of(size_t unit, size_t batch) {
    return static_cast<int>(1 + unit * kBatches + batch);
  }

  const torch::Device accelerator_{torch::kPrivateUse1, 0};
  const CopyStreams copies_{accelerator_};
  engine::DeviceWatch watch_{std::chrono::seconds(60)};
  std::unique_ptr<engine::Spool> spool_;  // before the devices, which are destroyed first
  std::unique_ptr<csd::EmulatedDrive> drive_;
  std::vector<std::unique_ptr<csd::Device>> devices_;
  std::optional<SpooledBuffers> buffers_;
};

TEST_F(LateBuffers, ABufferIsReadIntoWhenItsCopyIsDone) {
  using namespace std::chrono_literals;
  buffers_->begin(kUnits, kBatches);
  for (size_t unit = 0; unit < kUnits; ++unit) {
    for (size_t batch = 0; batch < kBatches; ++batch) {
      const SpooledBuffers::Part all{torch::full({kBytes}, value_of(unit, batch),
                                                 torch::dtype(torch::kUInt8).device(accelerator_)),
                                     0};
      buffers_->put(unit, batch, {&all, 1});
      buffers_->release(unit, batch);
    }
  }
  smartinf_test_accelerator_hold_copies(true);
  // Long enough for who does not wait to read other bytes into the buffers.
  std::thread other([] {
    std::this_thread::sleep_for(200ms);
    smartinf_test_accelerator_hold_copies(false);
  });
  std::vector<std::pair<int, torch::Tensor>> read;
  for (size_t unit = kUnits; unit-- > 0;) {
    for (size_t batch = 0; batch < kBatches; ++batch) {
      torch::Tensor host_N =
          torch::empty({kBytes}, torch::dtype(torch::kUInt8).pinned_memory(true));
      host_N.copy_(buffers_->take(unit, batch).narrow(0, 0, kBytes), /*non_blocking=*/true);
      read.emplace_back(value_of(unit, batch), std::move(host_N));
    }
  }
  other.join();
  c10::impl::VirtualGuardImpl(accelerator_.type()).getStream(accelerator_).synchronize();
  for (const auto& [value, host_N] : read) {
    const auto* bytes = host_N.const_data_ptr<uint8_t>();
    EXPECT_TRUE(std::all_of(bytes, bytes + kBytes, [&](int byte) { return byte == value; }))
        << value;
  }
}

}  // namespace
}  // namespace smartinf::train
