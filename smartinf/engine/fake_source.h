// Fake devices (csd/fake_device.h) as the engine opens them. For tests.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/csd/fake_device.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/storage/format.h"

namespace smartinf::engine {

using csd::FakeDrive;

/// Takes f32 state only, as FakeSnapshot gives it.
class FakeNewState final : public csd::NewState {
 public:
  FakeNewState(std::shared_ptr<FakeDrive> drive, const storage::StoreLayout& layout)
      : drive_(std::move(drive)), layout_(layout), made_(layout.subgroups.size()) {}
  ~FakeNewState() override {
    if (finished_) return;
    drive_->layout.reset();
    drive_->state = {};
  }
  const storage::StoreLayout& layout() const override { return layout_; }
  void start(csd::SubgroupWrite& write) override {
    const auto geometry = storage::Geometry::make(layout_, 1);
    SI_CHECK(geometry.ok(), "a layout that is none");
    for (size_t plane = 0; plane < geometry->planes(); ++plane) {
      std::vector<float>& values = made_[write.subgroup].values[plane];
      values.resize(layout_.subgroups[write.subgroup].count);
      std::memcpy(values.data(),
                  write.memory.data() + geometry->plane_offset(write.subgroup, plane),
                  values.size() * sizeof(float));
    }
  }
  base::Status wait(csd::SubgroupWrite&) override { return base::Status(); }
  base::Status prepare(const std::string& client_metadata) override {
    drive_->client_metadata = client_metadata;
    return base::Status();
  }
  base::Status commit() override {
    drive_->layout = layout_;
    drive_->committed = made_;
    drive_->state = {};
    drive_->state.run = layout_.run;
    drive_->state.device_index = layout_.device_index;
    drive_->state.device_count = layout_.device_count;
    drive_->state.committed_step = drive_->state.prepared_step = layout_.copied_step;
    drive_->state.initialized = drive_->state.complete = true;
    return base::Status();
  }
  base::Status close() override { return base::Status(); }
  base::Status finish() override {
    finished_ = true;
    return base::Status();
  }

 private:
  std::shared_ptr<FakeDrive> drive_;
  storage::StoreLayout layout_;
  std::vector<FakeDrive::Planes> made_;
  bool finished_ = false;
};

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
  base::Result<std::unique_ptr<csd::Snapshot>> snapshot(storage::ReaderLock) override {
    if (!drive_->layout) return base::Status(base::ErrorCode::kNotFound, "it holds no state");
    return std::unique_ptr<csd::Snapshot>(std::make_unique<csd::FakeSnapshot>(*drive_, name_));
  }
  base::Result<std::unique_ptr<csd::NewState>> create_state(
      const storage::StoreLayout& layout, const csd::NewStateOptions& options) override {
    if (drive_->layout && !options.replace) {
      return base::Status(base::ErrorCode::kAlreadyExists, name_ + ": it holds a state");
    }
    return std::unique_ptr<csd::NewState>(std::make_unique<FakeNewState>(drive_, layout));
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
    drive_->spool_bytes = share.spool_bytes;
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
