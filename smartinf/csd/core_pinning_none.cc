#include "smartinf/csd/core_pinning.h"

namespace smartinf::csd {

std::vector<uint32_t> cores_near(const std::string&) { return {}; }

void pin_thread(std::jthread&, uint32_t) {}

}  // namespace smartinf::csd
