// A spool over directories alone, for programs that keep no state on devices.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/engine/device_replies.h"
#include "smartinf/engine/options.h"
#include "smartinf/engine/spool.h"

namespace smartinf::engine {

/// Its files have no names once it is open, so that nothing of it is left when it is closed or the
/// process ends. Threads: as Spool.
class ScratchSpool {
 public:
  /// Opens a spool by the options `devices`, `spool_bytes`, `ring`, `io_bytes`, `io_depth` and
  /// `device_silence_max`; the others are not read. A directory is made if it is missing. Errors,
  /// each naming the device: kAlreadyExists, a run's state lies there; kInvalidArgument, no device,
  /// or none that is a directory; kNoSpace, kPermissionDenied, kIo.
  static base::Result<std::unique_ptr<ScratchSpool>> open(const UpdaterOptions& options);

  Spool& spool() { return *spool_; }

 private:
  explicit ScratchSpool(std::chrono::nanoseconds silence_max) : watch_(silence_max) {}

  DeviceWatch watch_;
  std::unique_ptr<Spool> spool_;
  std::vector<std::unique_ptr<csd::Device>> devices_;  // destroyed first
};

}  // namespace smartinf::engine
