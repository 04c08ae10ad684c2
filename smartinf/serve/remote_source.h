// Sources of devices that are on other machines: the other end of `smartinf serve`.
#pragma once

#include <memory>
#include <string>

#include "smartinf/csd/device_source.h"
#include "smartinf/serve/options.h"

namespace smartinf::serve {

struct RemoteDeviceOptions {
  std::string url;              // grpc://HOST:PORT/DEVICE
  std::string name;             // in messages; empty: the url
  double bandwidth = 0;         // for placement; 0: what the server says
  uint64_t capacity_bytes = 0;  // 0: what the server says
  uint32_t rank = 0;
  RemoteOptions remote;
  csd::SourceWishes wishes;
};

/// Nothing is connected to or read yet: what is wrong shows when it is used.
std::unique_ptr<csd::DeviceSource> remote_source(RemoteDeviceOptions options);

}  // namespace smartinf::serve
