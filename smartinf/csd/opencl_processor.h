// A processor of a local device that is an OpenCL device: a GPU, a card beside the drive, or this
// machine's cores (PoCL). Its bits are the cores' own; a device whose bits are others is refused.
// docs/opencl.md says what has run on what. Without OpenCL at build time everything here says so.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/processor.h"

namespace smartinf::csd {

/// Where slots lie, and how kernels reach them.
enum class OpenClMemory : uint8_t {
  kAuto,    // the first of these that the device can do: peer, shared, copied
  kShared,  // this machine's memory, which the device computes in
  kCopied,  // pinned memory of this machine, copied to the device's and back
  kPeer,    // the device's memory, which the drive reads and writes itself
};
inline constexpr std::array<std::string_view, 4> kOpenClMemoryNames{"auto", "shared", "copied",
                                                                    "peer"};
constexpr base::EnumNames enum_names(OpenClMemory) { return kOpenClMemoryNames; }

/// Bytes between this machine's memory and the device's, by what they are; values are f32 that
/// state is read and written as, tables what kernels are told and answer. Threads: any.
struct OpenClTraffic {
  enum What : size_t {
    kMaster,
    kMomentum,
    kVariance,
    kResidual,
    kGradient,
    kWeights,
    kValues,
    kTables
  };
  static constexpr size_t kWhats = 8;
  std::array<std::atomic<uint64_t>, kWhats> down{};  // to the device
  std::array<std::atomic<uint64_t>, kWhats> up{};

  uint64_t state_bytes() const {
    uint64_t sum = 0;
    for (size_t what = kMaster; what <= kResidual; ++what) sum += down[what] + up[what];
    return sum;
  }
};

struct OpenClOptions {
  /// Part of "platform: device" as opencl_devices() says it, in any letter case, or a number in
  /// that list. Empty: the first one.
  std::string device;
  OpenClMemory memory = OpenClMemory::kAuto;
  /// Where built programs are kept; empty: $XDG_CACHE_HOME/smartinf/opencl, or ~/.cache.
  std::string cache_folder;
  /// shared_ptr: whoever reads it may outlive the processor. Null: not counted.
  std::shared_ptr<OpenClTraffic> traffic;

  /// A device of which no job ends for so long, while some are in flight, is given up. As long as
  /// requests to a drive (five times StoreOptions::watchdog).
  std::chrono::nanoseconds silence_max = std::chrono::minutes(5);

  /// For tests: called before every OpenCL call, by its name; not 0: the error that it returns
  /// in place of being made. As "a kernel or a copy" when the last of a job has ended.
  std::function<int(std::string_view call)> fault;
  std::string compiler_options;  // for tests: besides those that every program gets
  /// For tests: what stands for memory of the device that a drive reaches.
  bool pretend_peer = false;
};

/// "opencl" or "opencl:DEVICE" of `device.processor`.
struct ProcessorChoice {
  bool opencl = false;
  std::string device;
};
/// Errors: kInvalidArgument with what there is.
base::Result<ProcessorChoice> parse_processor(std::string_view text);

/// A factory for LocalDeviceOptions::make_processor. What it makes has passed the self test.
/// Errors of it: kNotFound for no platform or no such device, with those that there are;
/// kUnsupported without OpenCL, for a device that lacks what is needed, or whose bits differ
/// (named); kOutOfMemory; kIo with OpenCL's error by name.
ProcessorFactory opencl_processor(OpenClOptions options);

struct OpenClDevice {
  std::string name;    // "platform: device"
  std::string driver;  // versions
  bool cpu = false;
  bool shares_memory = false;
  bool peer = false;  // its memory can be given to drives
};
/// The devices of all platforms, in OpenCL's order. Errors: kUnsupported where this was built
/// without.
base::Result<std::vector<OpenClDevice>> opencl_devices();

/// Every rule on the device, in some format and with some types, compared with the scalar truth.
/// Errors: kUnsupported with the first thing that differs.
base::Status opencl_self_test(const OpenClOptions& options);

}  // namespace smartinf::csd
