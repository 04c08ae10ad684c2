#include "smartinf/engine/local_source.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/local_device.h"
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
  if (error) return base::errno_status(error.value(), "cannot find out the free space", path);
  return static_cast<uint64_t>(space.available);
}

std::shared_ptr<csd::Link> make_link(const EmulatedLink& link, std::string name) {
  if (!link.given()) return nullptr;
  csd::LinkOptions options;
  options.name = std::move(name);
  options.up_bytes_per_s = link.up_bytes_per_s;
  options.down_bytes_per_s = link.down_bytes_per_s;
  options.shared_budget = link.shared_budget;
  return std::make_shared<csd::Link>(std::move(options));
}

class LocalSource final : public DeviceSource {
 public:
  LocalSource(const UpdaterOptions& options, const DeviceOptions& device, uint32_t threads,
              std::shared_ptr<csd::Link> host_link)
      : options_(options),
        device_(device),
        threads_(threads),
        host_link_(std::move(host_link)),
        internal_link_(make_link(device.internal_link, device.path + " internal link")) {
    if (device_.name.empty()) device_.name = device_.path;
  }

  const std::string& name() const override { return device_.name; }

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

  Result<double> bandwidth() override {
    if (device_.bandwidth > 0) return device_.bandwidth;
    const storage::IoTuning tuned = tuning();
    const double rate = tuned.read_bytes_per_second + tuned.write_bytes_per_second;
    return rate > 0 ? rate : kUsualBytesPerSecond;
  }

  Result<uint64_t> capacity_bytes() override {
    SI_ASSIGN_OR_RETURN(const uint64_t free_bytes, free_bytes_at(device_.path));
    return device_.capacity_bytes == 0 ? free_bytes : std::min(free_bytes, device_.capacity_bytes);
  }

  Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                              const DeviceShare& share) override {
    return csd::create_local_device(device_options(share), layout);
  }
  Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) override {
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
    if (tuning_) return *tuning_;
    storage::MeasureOptions measure;
    measure.ring.kind = options_.ring;
    auto measured = storage::measure_io(device_.path, measure);
    if (!measured.ok()) {
      base::log(base::LogLevel::kWarning,
                fmt::format("device {} could not be measured ({}); going on with usual values",
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
    csd::LocalDeviceOptions result;
    result.path = device_.path;
    result.name = device_.name;
    result.threads = threads_;
    result.memory_bytes = share.slot_memory_bytes;
    result.gradient_budget_bytes = share.gradient_memory_bytes;
    result.gradient_type = options_.gradient_type;
    result.schedule = options_.schedule;
    result.groups = share.groups;
    result.host_link_place = options_.where == UpdateWhere::kHost
                                 ? csd::HostLinkPlace::kAtStore
                                 : csd::HostLinkPlace::kAtProcessor;
    // The one difference between the two updates: on which side of the processor the host link is.
    if (internal_link_) result.links.store.push_back(internal_link_);
    if (host_link_ && options_.where == UpdateWhere::kHost)
      result.links.store.push_back(host_link_);
    if (options_.where == UpdateWhere::kDevice) result.links.host = host_link_;
    result.store.ring.kind = options_.ring;
    result.store.durability = options_.durability;
    result.store.checksums = options_.checksums;
    result.store.io_bytes = options_.io_bytes;
    result.store.io_depth = options_.io_depth;
    if (options_.io_bytes == 0 || options_.io_depth == 0) {
      const storage::IoTuning tuned = tuning();
      if (options_.io_bytes == 0) result.store.io_bytes = tuned.io_bytes;
      if (options_.io_depth == 0) result.store.io_depth = tuned.io_depth;
    }
    return result;
  }

  const UpdaterOptions options_;
  DeviceOptions device_;
  const uint32_t threads_;
  // Held together with the device that books on them; the host link by all devices.
  const std::shared_ptr<csd::Link> host_link_;
  const std::shared_ptr<csd::Link> internal_link_;
  std::optional<storage::IoTuning> tuning_;
};

}  // namespace

std::vector<std::unique_ptr<DeviceSource>> local_sources(const UpdaterOptions& options) {
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  const auto count = static_cast<uint32_t>(std::max<size_t>(options.devices.size(), 1));
  const auto host_link = make_link(options.host_link, "host link");
  std::vector<std::unique_ptr<DeviceSource>> sources;
  for (const DeviceOptions& device : options.devices) {
    const uint32_t threads = device.threads != 0 ? device.threads : std::max(1u, cores / count);
    sources.push_back(std::make_unique<LocalSource>(options, device, threads, host_link));
  }
  return sources;
}

}  // namespace smartinf::engine
