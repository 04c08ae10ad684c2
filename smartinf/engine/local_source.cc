#include "smartinf/engine/local_source.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/local_device.h"
#include "smartinf/csd/local_state.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/device_build.h"
#include "smartinf/serve/remote_source.h"
#include "smartinf/storage/erase.h"
#include "smartinf/storage/tuning.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

/// Stands in for a drive that could not be measured; only its ratio to other drives matters.
constexpr double kUsualBytesPerSecond = 2e9;

/// Free for this user at a path that may still have to be made.
Result<uint64_t> free_bytes_at(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_block_file(path, error)) {
    std::ifstream device(path, std::ios::ate | std::ios::binary);
    if (device) return static_cast<uint64_t>(device.tellg());
    return base::errno_status(errno, "cannot open the block device", path);
  }
  fs::path existing = fs::absolute(path, error);
  while (!fs::exists(existing, error) && existing.has_relative_path()) {
    existing = existing.parent_path();
  }
  const fs::space_info space = fs::space(existing, error);
  if (error) return base::errno_status(error.value(), "cannot determine the free space", path);
  return static_cast<uint64_t>(space.available);
}

class LocalSource final : public DeviceSource {
 public:
  LocalSource(const UpdaterOptions& options, DeviceBuild build, bool read_only)
      : options_(options),
        build_(std::move(build)),
        device_(build_.device),
        read_only_(read_only) {}

  const std::string& name() const override { return device_.name; }
  uint32_t rank() const override { return device_.rank == kAnyRank ? 0 : device_.rank; }

  std::string place() const override {
    std::error_code error;
    const auto canonical = std::filesystem::weakly_canonical(device_.path, error);
    return error ? device_.path : canonical.string();
  }

  Result<std::optional<storage::StoreState>> peek() override {
    auto state = storage::Store::peek(device_.path);
    if (state.ok()) return std::optional(std::move(*state));
    if (state.status().code() == ErrorCode::kNotFound) return std::optional<storage::StoreState>();
    return std::move(state).status().with_context("device " + device_.name);
  }

  Result<storage::StoreSummary> summarize() override { return storage::summarize(device_.path); }
  Result<storage::CheckReport> check(
      const storage::CheckOptions& options,
      const std::function<void(const storage::StoreFault&)>& visit) override {
    return storage::check_store(device_.path, options, visit);
  }
  Result<std::unique_ptr<csd::Snapshot>> snapshot(storage::ReaderLock lock) override {
    return csd::open_local_snapshot(device_.path, device_.name, lock);
  }
  Result<std::unique_ptr<csd::NewState>> create_state(
      const storage::StoreLayout& layout, const csd::NewStateOptions& options) override {
    return csd::create_local_state(device_.path, device_.name, layout, options, options_.ring);
  }
  bool keeps_replaced() const override {
    std::error_code error;
    return !std::filesystem::is_block_file(device_.path, error);
  }
  std::string drive() const override { return csd::local_drive(device_.path); }

  Result<double> bandwidth() override {
    if (device_.bandwidth > 0) return device_.bandwidth;
    const storage::IoTuning tuned = tuning();
    const double rate = tuned.read_bytes_per_second + tuned.write_bytes_per_second;
    return std::min(rate > 0 ? rate : kUsualBytesPerSecond, build_.internal_rate());
  }

  Result<uint64_t> capacity_bytes() override {
    SI_ASSIGN_OR_RETURN(const uint64_t free_bytes, free_bytes_at(device_.path));
    return device_.capacity_bytes == 0 ? free_bytes : std::min(free_bytes, device_.capacity_bytes);
  }

  Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                              const DeviceShare& share) override {
    SI_RETURN_IF_ERROR(
        refuse_checkpoint_device(device_.path).with_context("device " + device_.name));
    return csd::create_local_device(device_options(share), layout);
  }
  Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) override {
    if (!read_only_) {
      SI_RETURN_IF_ERROR(
          refuse_checkpoint_device(device_.path).with_context("device " + device_.name));
    }
    return csd::open_local_device(device_options(share));
  }
  Status erase() override {
    return storage::erase_store(device_.path).with_context("device " + device_.name);
  }

 private:
  /// Measured once and remembered beside the state; the defaults where that does not work.
  storage::IoTuning tuning() {
    if (tuning_) return *tuning_;
    tuning_ = storage::recall_tuning(device_.path);
    if (!tuning_ && read_only_) tuning_ = storage::IoTuning{};  // measuring writes
    if (tuning_) return *tuning_;
    storage::MeasureOptions measure;
    measure.ring.kind = options_.ring;
    measure.memory_bytes = options_.memory_budget_bytes / options_.devices.size();
    auto measured = storage::measure_io(device_.path, measure);
    if (!measured.ok()) {
      base::log(base::LogLevel::kWarning,
                fmt::format("device {} could not be measured ({}); default values are used",
                            device_.name, measured.status().to_string()));
      tuning_ = storage::IoTuning{};
      return *tuning_;
    }
    tuning_ = *measured;
    base::log(base::LogLevel::kInfo,
              fmt::format("device {}: transfers of {}, {} at a time each way: {} read + {} written",
                          device_.name, base::format_bytes(tuning_->io_bytes), tuning_->io_depth,
                          base::format_rate(tuning_->read_bytes_per_second),
                          base::format_rate(tuning_->write_bytes_per_second)));
    if (const Status kept = storage::remember_tuning(device_.path, *tuning_); !kept.ok()) {
      base::log(base::LogLevel::kWarning, kept.to_string());
    }
    return *tuning_;
  }

  csd::LocalDeviceOptions device_options(const DeviceShare& share) {
    csd::LocalDeviceOptions result = build_.options(options_, share);
    result.store.read_only = read_only_;
    if (options_.io_bytes == 0 || options_.io_depth == 0) {
      const storage::IoTuning tuned = tuning();
      if (options_.io_bytes == 0) result.store.io_bytes = tuned.io_bytes;
      if (options_.io_depth == 0) result.store.io_depth = tuned.io_depth;
    }
    return result;
  }

  const UpdaterOptions options_;
  const DeviceBuild build_;
  const DeviceOptions& device_;  // of build_
  const bool read_only_;
  std::optional<storage::IoTuning> tuning_;
};

}  // namespace

DeviceSources local_sources(const UpdaterOptions& options, bool read_only) {
  DeviceSources sources;
  for (DeviceBuild& build : device_builds(options)) {
    if (serve::is_remote(build.device.path)) {
      sources.push_back(serve::remote_source(
          {build.device.path,
           build.device.name,
           build.device.bandwidth,
           build.device.capacity_bytes,
           build.device.rank,
           options.remote,
           {options.gradient_type, options.schedule, options.durability, options.checksums}}));
      continue;
    }
    sources.push_back(std::make_unique<LocalSource>(options, std::move(build), read_only));
  }
  return sources;
}

DeviceSources sources_at(const std::vector<std::string>& paths, storage::RingKind ring,
                         const serve::RemoteOptions& remote) {
  UpdaterOptions options;
  options.pin_threads = false;
  options.ring = ring;
  options.remote = remote;
  for (const std::string& path : paths) options.devices.emplace_back().path = path;
  return local_sources(options);
}

}  // namespace smartinf::engine
