// How much of a drive's life a state has used up.
#pragma once

#include <cstdint>
#include <string>

#include "apps/smartinf/machine.h"

namespace smartinf::apps {

/// The wear that the drive reports, e.g. "3% of its rated life used, 1.2 TiB written (by nvme)".
/// Empty when it does not say.
std::string drive_wear_text(const DriveFacts& drive);

/// Bytes that a state has written, beside what the drive says and what it is rated for (0: not
/// known).
std::string wear_text(uint64_t written_bytes, uint64_t rated_bytes, const DriveFacts& drive);

}  // namespace smartinf::apps
