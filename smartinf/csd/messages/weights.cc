#include "smartinf/csd/messages/weights.h"

#include <string>

#include "smartinf/csd/device_space.h"

namespace smartinf::csd {

base::Status check(const ReadWeights& message, const DeviceSpace& space) {
  if (space.find(message.subgroup) != nullptr) return base::Status();
  return base::Status(
      base::ErrorCode::kInvalidArgument,
      "subgroup " + std::to_string(message.subgroup.value) + " belongs to another device");
}

}  // namespace smartinf::csd
