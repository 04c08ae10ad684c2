#include "smartinf/csd/messages/weights.h"

#include "smartinf/csd/device_space.h"

namespace smartinf::csd {

base::Status check(const ReadWeights& message, const DeviceSpace& space) {
  if (space.find(message.subgroup) != nullptr) return base::Status();
  return of_another_device(message.subgroup);
}

}  // namespace smartinf::csd
