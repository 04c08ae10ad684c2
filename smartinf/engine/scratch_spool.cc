#include "smartinf/engine/scratch_spool.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "smartinf/csd/local_device.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/device_build.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/smallest_state.h"
#include "smartinf/storage/tuning.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;
namespace fs = std::filesystem;

namespace {

Status check_place(DeviceSource& source, const std::string& path) {
  if (serve::is_remote(path)) {
    return Status(ErrorCode::kUnsupported, "activations without state go to this machine's drives",
                  "Give a directory.");
  }
  std::error_code error;
  fs::create_directories(path, error);
  if (!fs::is_directory(path)) {
    return Status(ErrorCode::kInvalidArgument, "the place for activations is not a directory",
                  "Give a directory on that drive.", base::ErrorPlace{path, {}, {}, 0});
  }
  SI_RETURN_IF_ERROR(refuse_checkpoint_device(path));
  SI_ASSIGN_OR_RETURN(const auto state, source.peek());
  if (!state) return Status();
  return Status(ErrorCode::kAlreadyExists, "the directory holds the state of a run",
                "Give activations a directory of their own; it may be on the same drive.",
                base::ErrorPlace{path, {}, {}, 0});
}

Result<std::unique_ptr<csd::Device>> open_device(const UpdaterOptions& options,
                                                 const DeviceBuild& build, uint64_t spool_bytes) {
  DeviceShare share;
  share.slot_memory_bytes = uint64_t{64} << 20;  // at most; one slot of a block is made
  share.gradient_memory_bytes = share.slot_memory_bytes;
  share.spool_bytes = spool_bytes;
  csd::LocalDeviceOptions local = build.options(options, share);
  local.threads = 1;
  local.slots = 1;
  local.store.durability = storage::Durability::kNone;
  const auto tuned = storage::recall_tuning(build.device.path).value_or(storage::IoTuning{});
  if (local.store.io_bytes == 0) local.store.io_bytes = tuned.io_bytes;
  if (local.store.io_depth == 0) local.store.io_depth = tuned.io_depth;
  local.path = (fs::path(build.device.path) / "smartinf.scratch-XXXXXX").string();
  if (mkdtemp(local.path.data()) == nullptr) {
    return base::errno_status(errno, "cannot make a scratch directory", build.device.path, {}, {},
                              "The directory must be writable.");
  }
  const std::string folder = local.path;
  auto device = csd::create_local_device(std::move(local), smallest_layout());
  std::error_code error;
  fs::remove_all(folder, error);  // the open files stay for as long as they are used
  return device;
}

}  // namespace

Result<std::unique_ptr<ScratchSpool>> ScratchSpool::open(const UpdaterOptions& options) {
  if (options.devices.empty()) {
    return Status(ErrorCode::kInvalidArgument, "no device is given for activations",
                  "Name at least one directory.");
  }
  std::unique_ptr<ScratchSpool> scratch(new ScratchSpool(options.device_silence_max));
  const std::vector<DeviceBuild> builds = device_builds(options);
  const DeviceSources sources = local_sources(options);
  double all = 0;
  std::vector<double> bandwidths;
  for (size_t d = 0; d < builds.size(); ++d) {
    const DeviceOptions& device = builds[d].device;
    SI_RETURN_IF_ERROR(check_place(*sources[d], device.path).with_context("device " + device.name));
    bandwidths.push_back(device.bandwidth > 0 ? device.bandwidth : 1);
    all += bandwidths.back();
  }
  for (size_t d = 0; d < builds.size(); ++d) {
    const double share = static_cast<double>(options.spool_bytes) * bandwidths[d] / all;
    const uint64_t bytes =
        base::round_up(static_cast<uint64_t>(share) + 1, uint64_t{base::kIoAlignment});
    auto device = open_device(options, builds[d], bytes);
    if (!device.ok()) {
      return std::move(device).status().with_context("device " + builds[d].device.name);
    }
    scratch->devices_.push_back(std::move(*device));
  }
  scratch->spool_ = std::make_unique<Spool>(scratch->devices_, scratch->watch_);
  return scratch;
}

}  // namespace smartinf::engine
