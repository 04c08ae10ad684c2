// Reading of a cache's blocks: layer by layer of a sequence, in order, into a fixed number of
// slots; first what queries wait for, then ahead, what will be asked for next. No locks: its
// owner's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/messages/cache/cache.h"
#include "smartinf/storage/cache_file.h"
#include "smartinf/storage/transfer_queue.h"

namespace smartinf::csd {

inline constexpr uint64_t kCacheReadBytesMax = 512 * base::kKiB;  // of one read

/// Reads at once, of the depth of a cache's ring; the others are for its writes.
constexpr uint32_t cache_reads_at_once(uint32_t depth) {
  return std::max(1u, depth - std::max(1u, depth / 4));
}

struct CacheScan;

/// A slot: consecutive blocks that are read at once.
struct CacheChunk {
  std::span<std::byte> memory;
  storage::Transfer transfer;  // owner: the chunk
  CacheScan* scan = nullptr;   // null: free
  uint64_t first = 0;          // block
  uint64_t blocks = 0;
  uint32_t readers = 0;  // that have not used it
  bool there = false;
};

/// Blocks [first, end) of a sequence in one layer, on their way.
struct CacheScan {
  storage::CachedSequence* sequence = nullptr;
  uint32_t layer = 0;
  uint64_t first = 0, next = 0, end = 0;  // next: to be started
  std::deque<CacheChunk*> chunks;         // those that are not used up, in order
  uint64_t used = 0;                      // chunks that are used up
  uint32_t in_flight = 0;
  std::vector<void*> readers;  // none: read ahead
  base::Status status;         // of the first read that failed

  /// The next one of a reader that has used so many; null: it is not started.
  CacheChunk* chunk(uint64_t used_by_reader) const {
    const uint64_t place = used_by_reader - used;
    return place < chunks.size() ? chunks[place] : nullptr;
  }
};

class CacheScans {
 public:
  /// on_drive: blocks of a sequence's layer that can be read. depth: reads at once.
  CacheScans(storage::CacheFile& file, std::vector<std::span<std::byte>> slots, uint32_t depth,
             std::function<uint64_t(const storage::CachedSequence&, uint32_t)> on_drive,
             base::TrafficCounter& traffic);

  /// For a reader that needs [first, end): one that was begun ahead, or a new one. It may have
  /// blocks beyond both.
  CacheScan& take(storage::CachedSequence& sequence, uint32_t layer, uint64_t first, uint64_t end,
                  void* reader);
  /// One more reader of the same blocks, before any has used a chunk.
  void join(CacheScan& scan, void* reader);
  /// A reader has used its next chunk, after so many.
  void use(CacheScan& scan, uint64_t used_by_reader);
  /// A reader that has used so many needs no more.
  void leave(CacheScan& scan, void* reader, uint64_t used_by_reader);
  /// What was read ahead of a sequence's layer is not needed.
  void drop_ahead(const storage::CachedSequence& sequence, uint32_t layer);
  /// Nothing is read ahead of a sequence any more.
  void forget(const storage::CachedSequence& sequence);
  void set_order(std::vector<LayerSequence> order);

  /// Starts as many reads as there are slots for.
  void start();
  /// A read has ended. Null: of a scan that was dropped.
  CacheScan* finished(CacheChunk& chunk);
  /// A reader waits for reads that are not even started.
  bool wants() const;
  uint32_t in_flight() const { return in_flight_; }

 private:
  using Scans = std::list<CacheScan>;
  bool start_one(CacheScan& scan);
  void read_ahead();
  void free_used(CacheScan& scan);
  void discard(Scans& from, Scans::iterator scan);
  void free(CacheChunk& chunk);
  Scans::iterator ahead(const storage::CachedSequence& sequence, uint32_t layer);

  storage::CacheFile& file_;
  const uint32_t depth_;
  const std::function<uint64_t(const storage::CachedSequence&, uint32_t)> on_drive_;
  base::TrafficCounter& traffic_;
  /// Slots that reading ahead leaves to those who wait: what it has read stays until it is asked
  /// for.
  const size_t kept_free_;
  std::vector<CacheChunk> chunks_;  // all slots
  std::vector<CacheChunk*> free_;
  uint32_t in_flight_ = 0;

  Scans demanded_;
  Scans ahead_;
  Scans dropped_;  // whose reads have not ended
  std::vector<LayerSequence> order_;
  std::map<std::pair<uint32_t, uint64_t>, size_t> place_in_order_;
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> first_block_;  // where the last reader began
  size_t ahead_next_ = 0;  // in the order: to be read ahead next
};

}  // namespace smartinf::csd
