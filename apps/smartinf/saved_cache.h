// Keys and values that a batch job has saved in a device's directory, as the commands for states
// show them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/storage/cache_file.h"

namespace smartinf::apps {

struct SavedCache {
  std::unique_ptr<storage::CacheFile> file;  // null: there is none
  uint64_t sequences = 0;
  uint64_t beginnings = 0;  // of them, those that several share
  uint64_t tokens = 0;      // of all of them, each counted once
  uint64_t saved_bytes = 0;
  uint64_t file_bytes = 0;
  uint64_t written_seconds = 0;  // since 1970; what was written last
};

/// Of a device of another machine none is shown. Errors: what is there cannot be read.
base::Result<SavedCache> saved_cache(const std::string& device);

/// "16 sequences of 20480 tokens, 3.2 GiB".
std::string cache_text(const SavedCache& cache);

}  // namespace smartinf::apps
