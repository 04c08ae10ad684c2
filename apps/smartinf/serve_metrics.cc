#include "apps/smartinf/serve_metrics.h"

#include <algorithm>
#include <fstream>

#include <unistd.h>

namespace smartinf::apps {
namespace {

uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t size_pages = 0;
  uint64_t resident_pages = 0;
  file >> size_pages >> resident_pages;
  return resident_pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

serve::ServerMetrics collect_metrics(const serve::Server& server, const ServeFile& file,
                                     const DriveWatch& drives, double started_s,
                                     double certificate_until_s) {
  serve::ServerMetrics metrics;
  metrics.version = SMARTINF_VERSION;
  metrics.started_s = started_s;
  metrics.refused = server.refused();
  metrics.resident_bytes = resident_bytes();
  metrics.certificate_until_s = certificate_until_s;
  for (const serve::ServedDeviceStatus& served : server.devices()) {
    serve::DeviceMetrics& device = metrics.devices.emplace_back();
    device.name = served.name;
    device.holder = served.client;
    device.attached = served.attached;
    device.received_bytes = served.bytes_received;
    device.sent_bytes = served.bytes_sent;
    device.commands = served.commands;
    device.errors = served.errors;
    device.steps_committed = served.commits;
    device.sessions = served.sessions;
    device.connections = served.connections;
    device.memory_bytes = served.memory_bytes;
    device.memory_limit_bytes = served.memory_limit_bytes;
    const auto found = std::ranges::find(file.devices, served.name, &ServeDevice::name);
    if (found == file.devices.end()) continue;
    device.usable = ::access(found->path.c_str(), R_OK | W_OK) == 0 ? 1 : 0;
    const DriveFacts drive = drives.facts(static_cast<size_t>(found - file.devices.begin()));
    if (drive.size_bytes > 0) device.capacity_bytes = drive.size_bytes;
    if (drive.size_bytes > 0 && !drive.is_block_device) device.free_bytes = drive.free_bytes;
    device.temperature_celsius = drive.temperature_celsius;
    device.wear_share = drive.wear_share;
    device.drive_written_bytes = drive.written_bytes;
  }
  return metrics;
}

}  // namespace smartinf::apps
