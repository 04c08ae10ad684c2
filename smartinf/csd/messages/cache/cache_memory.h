// What a device's memory for its cache is for.
#pragma once

#include <cstdint>

namespace smartinf::csd {

/// Of a device's memory for its cache (DeviceInfo::cache_memory_bytes), at most this much is for
/// blocks on their way; the rest keeps blocks, which are then not read from the drive.
inline constexpr uint64_t kCacheWorkBytes = uint64_t{64} << 20;

}  // namespace smartinf::csd
