#include "smartinf/engine/emulated_source.h"

#include <algorithm>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/engine/device_build.h"
#include "smartinf/storage/tuning.h"

namespace smartinf::engine {

using base::Result;
using base::Status;

namespace {

/// Rate of a drive without an internal link: all such drives are alike.
constexpr double kMemoryBytesPerSecond = 1e10;

class EmulatedSource final : public DeviceSource {
 public:
  EmulatedSource(const UpdaterOptions& options, DeviceBuild build, csd::EmulatedDrive& drive)
      : options_(options), build_(std::move(build)), drive_(drive) {}

  const std::string& name() const override { return build_.device.name; }
  std::string place() const override { return build_.device.path; }

  Result<std::optional<storage::StoreState>> peek() override {
    if (!drive_.holds_store()) return std::optional<storage::StoreState>();
    auto summary = drive_.summarize();
    if (!summary.ok()) return std::move(summary).status().with_context("device " + name());
    return std::optional(summary->state);
  }
  Result<storage::StoreSummary> summarize() override { return drive_.summarize(); }
  Result<storage::CheckReport> check(
      const storage::CheckOptions& options,
      const std::function<void(const storage::StoreFault&)>& visit) override {
    return drive_.check(options, visit);
  }
  Result<std::unique_ptr<csd::Snapshot>> snapshot(storage::ReaderLock) override {
    return drive_.snapshot(name());
  }
  Result<std::unique_ptr<csd::NewState>> create_state(
      const storage::StoreLayout& layout, const csd::NewStateOptions& options) override {
    return drive_.create_state(name(), layout, options);
  }

  Result<double> bandwidth() override {
    if (build_.device.bandwidth > 0) return build_.device.bandwidth;
    return std::min(kMemoryBytesPerSecond, build_.internal_rate());
  }

  Result<uint64_t> capacity_bytes() override {
    const uint64_t most = build_.device.capacity_bytes;
    return most == 0 ? drive_.size_bytes() : std::min(most, drive_.size_bytes());
  }

  Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                              const DeviceShare& share) override {
    return csd::create_emulated_device(device_options(share), layout, drive_);
  }
  Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) override {
    return csd::open_emulated_device(device_options(share), drive_);
  }
  Status erase() override {
    drive_.erase();
    return Status();
  }

 private:
  csd::LocalDeviceOptions device_options(const DeviceShare& share) const {
    csd::LocalDeviceOptions result = build_.options(options_, share);
    const storage::IoTuning usual;
    if (result.store.io_bytes == 0) result.store.io_bytes = usual.io_bytes;
    if (result.store.io_depth == 0) result.store.io_depth = usual.io_depth;
    return result;
  }

  const UpdaterOptions options_;
  const DeviceBuild build_;
  csd::EmulatedDrive& drive_;
};

}  // namespace

DeviceSources emulated_sources(const UpdaterOptions& options,
                               const std::vector<std::unique_ptr<csd::EmulatedDrive>>& drives) {
  SI_CHECK(drives.size() == options.devices.size(), "a drive for every device");
  DeviceSources sources;
  for (DeviceBuild& build : device_builds(options)) {
    csd::EmulatedDrive& drive = *drives[sources.size()];
    sources.push_back(std::make_unique<EmulatedSource>(options, std::move(build), drive));
  }
  return sources;
}

}  // namespace smartinf::engine
