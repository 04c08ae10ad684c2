#include "smartinf/engine/device_build.h"

#include <algorithm>
#include <limits>
#include <string>
#include <thread>
#include <utility>

#include "smartinf/csd/core_pinning.h"
#include "smartinf/csd/opencl_processor.h"
#include "smartinf/serve/options.h"

namespace smartinf::engine {

namespace {

std::shared_ptr<csd::Link> make_link(const EmulatedLink& link, std::string name,
                                     csd::Trace* trace) {
  if (!link.given()) return nullptr;
  csd::LinkOptions options;
  options.name = std::move(name);
  options.up_bytes_per_s = static_cast<double>(link.up_bytes_per_s);
  options.down_bytes_per_s = static_cast<double>(link.down_bytes_per_s);
  options.shared_budget = link.shared_budget;
  options.latency = std::chrono::microseconds(link.latency_us);
  auto made = std::make_shared<csd::Link>(std::move(options));
  made->set_trace(trace);
  return made;
}

/// Null: threads of this machine.
csd::ProcessorFactory processor_of(const DeviceOptions& device) {
  base::Result<csd::ProcessorChoice> choice = csd::parse_processor(device.processor);
  if (!choice.ok()) {
    return [status = std::move(choice).status()](std::function<void(csd::Job&)>) {
      return base::Result<std::unique_ptr<csd::Processor>>(status);
    };
  }
  if (!choice->opencl) return nullptr;
  csd::OpenClOptions options;
  options.device = choice->device;
  options.traffic = device.processor_traffic;
  return csd::opencl_processor(std::move(options));
}

}  // namespace

base::Status check_processor(const std::string& processor) {
  return csd::parse_processor(processor).status();
}

csd::LocalDeviceOptions DeviceBuild::options(const UpdaterOptions& engine,
                                             const DeviceShare& share) const {
  csd::LocalDeviceOptions result;
  result.path = device.path;
  result.name = device.name;
  result.threads = threads;
  result.cores = cores;
  result.memory_bytes = share.slot_memory_bytes;
  result.weight_read_slots = share.weight_read_slots;
  result.gradient_budget_bytes = share.gradient_memory_bytes;
  result.gradient_type = engine.gradient_type;
  result.compressed_block_bytes = share.compressed_block_bytes;
  result.schedule = engine.schedule;
  result.groups = share.groups;
  result.matrices = share.matrices;
  result.trace = engine.trace;
  // The one difference between the two updates: on which side of the processor the host link is.
  const bool on_host = engine.where == UpdateWhere::kHost;
  result.host_link_place =
      on_host ? csd::HostLinkPlace::kAtStore : csd::HostLinkPlace::kAtProcessor;
  if (internal_link) result.links.store.push_back(internal_link);
  if (host_link && on_host) result.links.store.push_back(host_link);
  if (!on_host) result.links.host = host_link;
  result.make_processor = processor_of(device);
  result.store.ring.kind = engine.ring;
  result.store.durability = engine.durability;
  result.store.spool_bytes = share.spool_bytes;
  result.cache_memory_bytes = share.cache_memory_bytes;
  result.cache_bytes = share.cache_bytes;
  result.row_memory_bytes = share.row_memory_bytes;
  result.store.checksums = engine.checksums;
  result.store.io_bytes = engine.io_bytes;
  result.store.io_depth = engine.io_depth;
  return result;
}

double DeviceBuild::internal_rate() const {
  if (!internal_link) return std::numeric_limits<double>::infinity();
  const csd::LinkOptions& link = internal_link->options();
  // A step reads as much as it writes.
  const double read_s = link.up_bytes_per_s > 0 ? 1 / link.up_bytes_per_s : 0;
  const double write_s = link.down_bytes_per_s > 0 ? 1 / link.down_bytes_per_s : 0;
  return 2 / (link.shared_budget ? read_s + write_s : std::max(read_s, write_s));
}

std::vector<DeviceBuild> device_builds(const UpdaterOptions& options) {
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  // Others' cores update what is there.
  const auto here = std::ranges::count_if(
      options.devices, [](const DeviceOptions& device) { return !serve::is_remote(device.path); });
  const auto count = static_cast<uint32_t>(std::max<decltype(here)>(here, 1));
  csd::Trace* trace = options.trace.get();
  const auto host_link = make_link(options.host_link, "host link", trace);
  std::vector<DeviceBuild> builds;
  csd::CoreShare shared_out;
  for (const DeviceOptions& device : options.devices) {
    DeviceBuild build;
    build.device = device;
    if (build.device.name.empty()) build.device.name = device.path;
    build.threads = device.threads != 0 ? device.threads : std::max(1u, cores / count);
    if (options.pin_threads && count > 1 && !serve::is_remote(device.path)) {
      build.cores = shared_out.take(csd::cores_near(device.path), build.threads);
    }
    build.host_link = host_link;
    build.internal_link =
        make_link(device.internal_link, build.device.name + " internal link", trace);
    builds.push_back(std::move(build));
  }
  return builds;
}

}  // namespace smartinf::engine
