// A device in a few lines of memory, for the engine's tests: what the csd::Device contract asks for
// and nothing more, with failures on request. State is f32 whatever the layout says. It carries
// commands out inside submit(), so every test over it is deterministic.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/engine/device_source.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

/// What outlives the device: a drive that can be looked at and opened again.
struct FakeDrive {
  struct Planes {
    std::array<std::vector<float>, 3> values;
  };
  std::optional<storage::StoreLayout> layout;
  storage::StoreState state;
  std::vector<Planes> committed;  // by position in layout->subgroups
  std::vector<Planes> shadow;
  std::string blob;
  std::string prepared_blob;
  bool open = false;
  uint64_t capacity_bytes = ~uint64_t{0};
  double bandwidth = 1;
  bool refuse_to_create = false;
  /// The next message of this type fails.
  std::optional<csd::Message> fail_next;
  /// From the next message of this type on nothing is carried out or answered.
  std::optional<csd::Message> silent_from;
  bool silent = false;
};

class FakeDevice final : public csd::Device {
 public:
  FakeDevice(std::shared_ptr<FakeDrive> drive, std::string name, const DeviceShare& share)
      : drive_(std::move(drive)), groups_(share.groups) {
    info_.name = std::move(name);
    info_.kind = "fake";
    drive_->open = true;
    gradients_.resize(drive_->layout->subgroups.size());
  }
  ~FakeDevice() override { drive_->open = false; }

  const csd::DeviceInfo& info() const override { return info_; }
  const storage::StoreLayout& layout() const override { return *drive_->layout; }
  storage::StoreState state() const override { return drive_->state; }
  std::string blob() const override { return drive_->blob; }
  base::Status recover_to(base::StepNumber step) override {
    if (step == drive_->state.prepared_step && step != drive_->state.committed_step) commit();
    drive_->state.prepared_step = drive_->state.committed_step = step;
    return base::Status();
  }

  void submit(csd::Command& command) override {
    const std::lock_guard lock(mutex_);  // gradients come from several threads
    const auto is = [&](const std::optional<csd::Message>& type) {
      return type && type->index() == command.message.index();
    };
    drive_->silent = drive_->silent || is(drive_->silent_from);
    if (drive_->silent) return;
    base::Status status;
    if (is(drive_->fail_next)) {
      drive_->fail_next.reset();
      status = base::Status(base::ErrorCode::kIo, "asked to fail", "It is a test.");
    } else {
      carry_out(command);
    }
    command.replies->push({&command, csd::Completion::Event::kDone, {}, std::move(status)});
  }

  base::TrafficReading host_traffic() const override { return host_.read(); }
  base::TrafficReading store_traffic() const override { return {}; }
  uint64_t bytes_written_ever() const override { return 0; }

 private:
  size_t position(base::SubgroupId id) const {
    for (size_t i = 0; i < drive_->layout->subgroups.size(); ++i) {
      if (drive_->layout->subgroups[i].id == id) return i;
    }
    SI_CHECK(false, "a subgroup of another device");
  }

  void commit() {
    drive_->committed = drive_->shadow;
    drive_->state.committed_step = drive_->state.prepared_step;
    drive_->state.initialized = drive_->state.complete = true;
    drive_->blob = drive_->prepared_blob;
  }

  void carry_out(csd::Command& command) {
    if (command.as<csd::BeginStep>() != nullptr) {
      drive_->shadow = drive_->committed;
      for (auto& gradient : gradients_) gradient.clear();
    } else if (const auto* put = command.as<csd::PutGradient>()) {
      const size_t at = position(put->subgroup);
      auto& gradient = gradients_[at];
      const size_t bytes = base::data_type_bytes(put->type);
      gradient.resize(drive_->layout->subgroups[at].count * bytes);
      std::copy_n(static_cast<const std::byte*>(put->gradient), put->count * bytes,
                  gradient.begin() + static_cast<ptrdiff_t>(put->first * bytes));
      type_ = put->type;
      host_.add_down(base::TrafficKind::kGradient, put->count * bytes);
    } else if (const auto* update = command.as<csd::Update>()) {
      for (const csd::SubgroupUpdate& entry : update->updates) {
        update_subgroup(*update, entry);
        command.replies->push(
            {&command, csd::Completion::Event::kWeightsReady, entry.subgroup, {}});
      }
    } else if (const auto* read = command.as<csd::ReadState>()) {
      const FakeDrive::Planes& planes = drive_->committed[position(read->subgroup)];
      for (size_t p = 0; p < 3; ++p) {
        if (read->planes[p] == nullptr) continue;
        std::copy_n(planes.values[p].begin() + static_cast<ptrdiff_t>(read->first), read->count,
                    read->planes[p]);
      }
    } else if (const auto* write = command.as<csd::WriteState>()) {
      FakeDrive::Planes& planes = drive_->shadow[position(write->subgroup)];
      for (size_t p = 0; p < 3; ++p) {
        planes.values[p].assign(write->count, 0.0f);
        if (write->planes[p] != nullptr) {
          std::copy_n(write->planes[p], write->count, planes.values[p].begin());
        }
      }
    } else if (const auto* prepare = command.as<csd::Prepare>()) {
      drive_->state.prepared_step = prepare->step;
      drive_->prepared_blob = prepare->blob;
    } else if (command.as<csd::Commit>() != nullptr) {
      commit();
    } else if (command.as<csd::Abort>() != nullptr) {
      drive_->state.prepared_step = drive_->state.committed_step;
    }
  }

  void update_subgroup(const csd::Update& step, const csd::SubgroupUpdate& update) {
    const size_t at = position(update.subgroup);
    const storage::StoredSubgroup& subgroup = drive_->layout->subgroups[at];
    for (uint64_t first = 0; first < subgroup.count; first += base::kBlockElements) {
      kernels::UpdateBlock block;
      block.count = std::min(base::kBlockElements, subgroup.count - first);
      block.element = subgroup.first_element + first;
      for (size_t p = 0; p < drive_->layout->planes.size(); ++p) {
        block.planes[p] = reinterpret_cast<std::byte*>(drive_->shadow[at].values[p].data() + first);
      }
      block.gradient_type = type_;
      block.gradient = gradients_[at].data() + first * base::data_type_bytes(type_);
      block.weights_type = step.weights_type;
      const uint64_t weight_bytes = base::data_type_bytes(step.weights_type);
      if (update.weights_out != nullptr) {
        block.weights_out = static_cast<std::byte*>(update.weights_out) + first * weight_bytes;
        host_.add_up(base::TrafficKind::kWeight, block.count * weight_bytes);
      }
      std::vector<kernels::GroupRun> runs;
      for (const plan::GroupStretch& stretch : groups_) {
        const uint64_t from = std::max(stretch.first, block.element);
        const uint64_t to = std::min(stretch.first + stretch.count, block.element + block.count);
        if (from < to) runs.push_back({to - from, &step.scalars[stretch.group]});
      }
      kernels::kernels().update_block(base::StateFormat::kF32, block, runs);
    }
  }

  std::shared_ptr<FakeDrive> drive_;
  std::vector<plan::GroupStretch> groups_;
  csd::DeviceInfo info_;
  std::vector<std::vector<std::byte>> gradients_;
  base::DataType type_ = base::DataType::kBf16;
  base::TrafficCounter host_;
  std::mutex mutex_;
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
    return std::unique_ptr<csd::Device>(std::make_unique<FakeDevice>(drive_, name_, share));
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
