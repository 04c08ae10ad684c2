// Taking a store away: what is left of an interrupted creation, of a benchmark, or of a run that is
// not needed any more.
#pragma once

#include <string>

#include "smartinf/base/status.h"

namespace smartinf::storage {

/// Deletes the store at `path`, finished or not, with its lock; what was measured about the drive
/// stays. Of a block device only the superblocks are wiped. Ok when there is none.
/// Errors: kBusy (in use, by whom), kIo.
base::Status erase_store(const std::string& path);
/// Deletes the keys and values in a directory, and leaves a state that lies beside them. Ok when
/// there are none. Errors: kBusy (in use, by whom), kIo.
base::Status erase_cache(const std::string& directory);

}  // namespace smartinf::storage
