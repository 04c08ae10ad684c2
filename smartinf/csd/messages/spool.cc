#include "smartinf/csd/messages/spool.h"

#include <string>

#include "smartinf/base/units.h"
#include "smartinf/csd/device_space.h"

namespace smartinf::csd {

using base::ErrorCode;
using base::Status;

Status check_spool(uint64_t offset_bytes, std::span<const std::byte> bytes, uint64_t spool_bytes) {
  if (spool_bytes == 0) {
    return Status(ErrorCode::kUnsupported, "the device was opened without room for a spool",
                  "Give it some (LocalDeviceOptions::store.spool_bytes).");
  }
  if (bytes.empty() || (reinterpret_cast<uintptr_t>(bytes.data()) | bytes.size() | offset_bytes) %
                               base::kIoAlignment !=
                           0) {
    return Status(ErrorCode::kInvalidArgument,
                  "memory, size and offset of what is spooled must be multiples of " +
                      std::to_string(base::kIoAlignment));
  }
  if (offset_bytes > spool_bytes || bytes.size() > spool_bytes - offset_bytes) {
    return Status(ErrorCode::kNoSpace, "the spool has " + base::format_bytes(spool_bytes) +
                                           ", and " + base::format_bytes(bytes.size()) +
                                           " at offset " + std::to_string(offset_bytes) +
                                           " do not fit in it");
  }
  return Status();
}

Status check(const PutSpool& message, const DeviceSpace& space) {
  return check_spool(message.offset_bytes, message.bytes, space.spool_bytes());
}
Status check(const GetSpool& message, const DeviceSpace& space) {
  return check_spool(message.offset_bytes, message.out, space.spool_bytes());
}

}  // namespace smartinf::csd
