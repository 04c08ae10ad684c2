// The messages of the spool: bytes that go to a device and come back within this process, of no
// step. Carried out beside everything else, also while an update runs.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"

namespace smartinf::csd {

class DeviceSpace;  // device_space.h

/// Bytes go to offset_bytes of the device's spool (DeviceInfo::spool_bytes). Whole or an error;
/// until kDone nobody gets them. What lay there before is lost. Memory, size and offset are
/// multiples of base::kIoAlignment. Errors: kInvalidArgument; kNoSpace, it reaches beyond the
/// spool; kFailedPrecondition, what lies there is being moved; kUnsupported, there is no spool; the
/// drive's. After kTimeout a drive that hangs may still read the memory, for as long as the process
/// lives.
struct PutSpool {
  static constexpr std::string_view kName = "put spool";
  uint64_t offset_bytes = 0;
  std::span<const std::byte> bytes;
};

/// Brings back what one PutSpool put at the same offset: all of it. Errors: as above, and
/// kFailedPrecondition for what was not put; kCorrupt. The step can then be repeated: the state is
/// not touched. After kTimeout a drive that hangs may still write to the memory.
struct GetSpool {
  static constexpr std::string_view kName = "get spool";
  uint64_t offset_bytes = 0;
  std::span<std::byte> out;
};

using SpoolMessage = std::variant<PutSpool, GetSpool>;

/// check() of both; spool_bytes: of the device.
base::Status check_spool(uint64_t offset_bytes, std::span<const std::byte> bytes,
                         uint64_t spool_bytes);
base::Status check(const PutSpool& message, const DeviceSpace& space);
base::Status check(const GetSpool& message, const DeviceSpace& space);

template <typename Wire>
void describe(Wire& wire, PutSpool& message) {
  auto& [offset_bytes, bytes] = message;
  wire(offset_bytes, bytes);
}
template <typename Wire>
void describe(Wire& wire, GetSpool& message) {
  auto& [offset_bytes, out] = message;
  wire(offset_bytes, out);
}
template <typename Visit, typename Space>
void memory(Visit& visit, PutSpool& message, const Space&) {
  visit.down(message.bytes);
}
template <typename Visit, typename Space>
void memory(Visit& visit, GetSpool& message, const Space&) {
  visit.up(message.out, base::SubgroupId{});
}

}  // namespace smartinf::csd
