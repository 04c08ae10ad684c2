// Space of a file system, taken before it is needed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "smartinf/base/status.h"

namespace smartinf::storage {

/// For messages.
struct SpaceUse {
  std::string_view what;     // "the state"
  std::string_view instead;  // another cure than to free some: "use another device"
};

/// kNoSpace: so many bytes are needed at `path`, and so many are free.
base::Status no_space(const SpaceUse& use, const std::string& path, uint64_t needed,
                      uint64_t available);

/// Takes `bytes` of space behind the `from_bytes` that the file has, so that a full disk is met
/// here and never in a step. directory: which holds the file. Errors: no_space(), kIo.
base::Status reserve_space(int descriptor, uint64_t bytes, const SpaceUse& use,
                           const std::string& directory, const std::string& file_path,
                           uint64_t from_bytes = 0);

}  // namespace smartinf::storage
