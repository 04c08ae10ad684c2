// Fake devices (csd/fake_device.h) as the engine opens them. For tests.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "smartinf/csd/fake_device.h"
#include "smartinf/engine/device_source.h"

namespace smartinf::engine {

using csd::FakeDrive;

class FakeSource final : public DeviceSource {
 public:
  FakeSource(std::shared_ptr<FakeDrive> drive, std::string name)
      : drive_(std::move(drive)), name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  std::string place() const override { return name_; }
  base::Result<std::optional<storage::StoreState>> peek() override {
    if (!drive_->layout) return std::optional<storage::StoreState>();
    return std::optional(drive_->state);
  }
  base::Result<double> bandwidth() override { return drive_->bandwidth; }
  base::Result<uint64_t> capacity_bytes() override { return drive_->capacity_bytes; }
  base::Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                                    const DeviceShare& share) override {
    if (drive_->refuse_to_create) {
      return base::Status(base::ErrorCode::kNoSpace, name_ + ": asked to refuse", "A test.");
    }
    drive_->layout = layout;
    drive_->state = {};
    drive_->state.run = layout.run;
    drive_->state.device_index = layout.device_index;
    drive_->state.device_count = layout.device_count;
    drive_->committed.assign(layout.subgroups.size(), {});
    return open(share);
  }
  base::Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) override {
    if (drive_->open) {
      return base::Status(base::ErrorCode::kBusy, name_ + ": in use by process 1", "Wait.");
    }
    return std::unique_ptr<csd::Device>(
        std::make_unique<csd::FakeDevice>(drive_, name_, share.groups));
  }
  base::Status erase() override {
    drive_->layout.reset();
    drive_->state = {};
    return base::Status();
  }

 private:
  std::shared_ptr<FakeDrive> drive_;
  std::string name_;
};

}  // namespace smartinf::engine
