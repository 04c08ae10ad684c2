// How the engine's options become those of one device: what sources of every kind share.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "smartinf/csd/options.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/options.h"

namespace smartinf::engine {

/// One device's part of the machine: threads, cores, links.
struct DeviceBuild {
  DeviceOptions device;
  uint32_t threads = 1;
  std::vector<uint32_t> cores;  // cores for its threads, in this order; empty: not pinned
  // Held together with the device that books on them; the host link by all devices.
  std::shared_ptr<csd::Link> host_link;
  std::shared_ptr<csd::Link> internal_link;

  /// All but the size and number of transfers where they are to be measured: those stay 0.
  csd::LocalDeviceOptions options(const UpdaterOptions& engine, const DeviceShare& share) const;
  /// Bytes of a step's traffic per second that the internal link lets through; ~ infinity without
  /// one.
  double internal_rate() const;
};

/// One for each of options.devices, in order: cores and links shared out.
std::vector<DeviceBuild> device_builds(const UpdaterOptions& options);

}  // namespace smartinf::engine
