#include "apps/smartinf/saved_cache.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <sys/stat.h>

#include "smartinf/base/units.h"
#include "smartinf/serve/options.h"
#include "smartinf/train/sequence_decoder.h"

namespace smartinf::apps {

base::Result<SavedCache> saved_cache(const std::string& device) {
  SavedCache cache;
  if (serve::is_remote(device)) return cache;
  auto file = storage::CacheFile::open_saved(device);
  if (file.status().code() == base::ErrorCode::kNotFound) return cache;
  SI_ASSIGN_OR_RETURN(cache.file, std::move(file));
  struct stat info {};
  if (::stat(cache.file->path().c_str(), &info) == 0) {
    cache.file_bytes = static_cast<uint64_t>(info.st_blocks) * 512;
    cache.written_seconds = static_cast<uint64_t>(info.st_mtime);
  }
  for (const auto& [id, sequence] : cache.file->sequences()) {
    ++cache.sequences;
    cache.beginnings += train::is_prefix(id) ? 1 : 0;
    cache.saved_bytes += cache.file->saved_bytes(sequence);
    uint64_t tokens = sequence.tokens_max;
    for (const storage::CachedLayer& layer : sequence.layers) {
      tokens = std::min(tokens, layer.tokens(cache.file->identity().block_tokens));
    }
    cache.tokens += tokens;
  }
  return cache;
}

std::string cache_text(const SavedCache& cache) {
  const uint64_t own = cache.sequences - cache.beginnings;
  return fmt::format("{} sequences{} of {} tokens, {}", own,
                     cache.beginnings == 0
                         ? ""
                         : fmt::format(" and {} beginnings that they share", cache.beginnings),
                     cache.tokens, base::format_bytes(cache.saved_bytes));
}

}  // namespace smartinf::apps
