#include "smartinf/csd/messages/cache/cache_scans.h"

#include <algorithm>
#include <utility>

namespace smartinf::csd {

using storage::CachedSequence;

CacheScans::CacheScans(storage::CacheFile& file, std::vector<std::span<std::byte>> slots,
                       uint32_t depth,
                       std::function<uint64_t(const CachedSequence&, uint32_t)> on_drive,
                       base::TrafficCounter& traffic)
    : file_(file),
      depth_(depth),
      on_drive_(std::move(on_drive)),
      traffic_(traffic),
      kept_free_(std::max<size_t>(1, slots.size() / 8)),
      chunks_(slots.size()) {
  for (size_t i = 0; i < slots.size(); ++i) {
    chunks_[i].memory = slots[i];
    chunks_[i].transfer.owner = &chunks_[i];
    free_.push_back(&chunks_[i]);
  }
}

CacheScans::Scans::iterator CacheScans::ahead(const CachedSequence& sequence, uint32_t layer) {
  return std::ranges::find_if(ahead_, [&](const CacheScan& scan) {
    return scan.sequence == &sequence && scan.layer == layer;
  });
}

CacheScan& CacheScans::take(CachedSequence& sequence, uint32_t layer, uint64_t first, uint64_t end,
                            void* reader) {
  first_block_[{layer, sequence.id}] = first;
  const auto place = place_in_order_.find({layer, sequence.id});
  if (place != place_in_order_.end() && ahead_.empty()) {
    ahead_next_ = (place->second + 1) % order_.size();
  }
  auto begun = ahead(sequence, layer);
  if (begun != ahead_.end() && (begun->first > first || !begun->status.ok())) {
    discard(ahead_, begun);
    begun = ahead_.end();
  }
  if (begun != ahead_.end()) {
    demanded_.splice(demanded_.end(), ahead_, begun);
  } else {
    demanded_.emplace_back();
    demanded_.back().first = demanded_.back().next = first;
  }
  CacheScan& scan = demanded_.back();
  scan.sequence = &sequence;
  scan.layer = layer;
  scan.next = std::max(scan.next, first);
  scan.end = end;
  join(scan, reader);
  return scan;
}

void CacheScans::join(CacheScan& scan, void* reader) {
  scan.readers.push_back(reader);
  for (CacheChunk* chunk : scan.chunks) ++chunk->readers;
}

void CacheScans::free(CacheChunk& chunk) {
  chunk.scan = nullptr;
  chunk.there = false;
  free_.push_back(&chunk);
}

void CacheScans::use(CacheScan& scan, uint64_t used_by_reader) {
  --scan.chunk(used_by_reader)->readers;
  free_used(scan);
}

/// Chunks that all readers have used; they are there.
void CacheScans::free_used(CacheScan& scan) {
  while (!scan.chunks.empty() && scan.chunks.front()->readers == 0) {
    free(*scan.chunks.front());
    scan.chunks.pop_front();
    ++scan.used;
  }
}

void CacheScans::discard(Scans& from, Scans::iterator scan) {
  std::erase_if(scan->chunks, [&](CacheChunk* chunk) {
    if (!chunk->there) return false;
    free(*chunk);
    return true;
  });
  scan->end = scan->next;
  if (scan->in_flight == 0) {
    from.erase(scan);
  } else {
    dropped_.splice(dropped_.end(), from, scan);
  }
}

void CacheScans::leave(CacheScan& scan, void* reader, uint64_t used_by_reader) {
  std::erase(scan.readers, reader);
  if (scan.readers.empty()) {
    return discard(demanded_, std::ranges::find_if(
                                  demanded_, [&](const CacheScan& one) { return &one == &scan; }));
  }
  while (CacheChunk* chunk = scan.chunk(used_by_reader++)) --chunk->readers;
  free_used(scan);
}

void CacheScans::drop_ahead(const CachedSequence& sequence, uint32_t layer) {
  if (const auto begun = ahead(sequence, layer); begun != ahead_.end()) discard(ahead_, begun);
}

void CacheScans::forget(const CachedSequence& sequence) {
  std::erase_if(first_block_, [&](const auto& one) { return one.first.second == sequence.id; });
  for (auto scan = ahead_.begin(); scan != ahead_.end();) {
    const auto here = scan++;
    if (here->sequence == &sequence) discard(ahead_, here);
  }
}

void CacheScans::set_order(std::vector<LayerSequence> order) {
  order_ = std::move(order);
  place_in_order_.clear();
  for (size_t i = 0; i < order_.size(); ++i) {
    place_in_order_[{order_[i].layer, order_[i].id}] = i;
  }
  for (auto scan = ahead_.begin(); scan != ahead_.end();) {  // that nobody will ask for
    const auto here = scan++;
    if (!place_in_order_.contains({here->layer, here->sequence->id})) discard(ahead_, here);
  }
  // Reading goes on behind what is there.
  ahead_next_ = 0;
  if (!ahead_.empty()) {
    const CacheScan& last = ahead_.back();
    ahead_next_ = (place_in_order_.at({last.layer, last.sequence->id}) + 1) % order_.size();
  }
}

bool CacheScans::wants() const {
  return std::ranges::any_of(demanded_, [](const CacheScan& scan) { return scan.next < scan.end; });
}

void CacheScans::start() {
  for (CacheScan& scan : demanded_) {
    while (scan.next < scan.end) {
      if (!start_one(scan)) return;
    }
  }
  read_ahead();
}

/// False: there is no slot, or enough is in flight.
bool CacheScans::start_one(CacheScan& scan) {
  if (in_flight_ >= depth_ || free_.empty()) return false;
  CacheChunk& chunk = *free_.back();
  free_.pop_back();
  const uint64_t block_bytes = file_.identity().block_bytes;
  chunk.scan = &scan;
  chunk.readers = static_cast<uint32_t>(scan.readers.size());
  chunk.first = scan.next;
  chunk.blocks = std::min(chunk.memory.size() / block_bytes, scan.end - scan.next);
  chunk.there = false;
  chunk.transfer.op = storage::IoOp::kRead;
  chunk.transfer.offset_bytes = file_.place_offset(*scan.sequence, scan.layer, chunk.first);
  chunk.transfer.buffer = chunk.memory.first(chunk.blocks * block_bytes);
  chunk.transfer.kind = base::TrafficKind::kCache;
  scan.next += chunk.blocks;
  scan.chunks.push_back(&chunk);
  ++scan.in_flight;
  ++in_flight_;
  file_.queue().start(chunk.transfer);
  return true;
}

void CacheScans::read_ahead() {
  for (size_t tried = 0; tried <= order_.size(); ++tried) {
    if (!ahead_.empty()) {
      CacheScan& scan = ahead_.back();
      while (scan.next < scan.end) {
        if (free_.size() <= kept_free_ || !start_one(scan)) return;
      }
    }
    if (free_.size() <= kept_free_ || order_.empty()) return;
    const LayerSequence& wanted = order_[ahead_next_];
    CachedSequence* sequence = file_.find(wanted.id);
    if (sequence != nullptr && wanted.layer < sequence->layers.size()) {
      // All of the order is being read.
      if (ahead(*sequence, wanted.layer) != ahead_.end()) return;
      const uint64_t end = on_drive_(*sequence, wanted.layer);
      const auto began = first_block_.find({wanted.layer, wanted.id});
      const uint64_t first = began == first_block_.end() ? 0 : began->second;
      if (first < end) {
        CacheScan& scan = ahead_.emplace_back();
        scan.sequence = sequence;
        scan.layer = wanted.layer;
        scan.first = scan.next = first;
        scan.end = end;
      }
    }
    ahead_next_ = (ahead_next_ + 1) % order_.size();
  }
}

CacheScan* CacheScans::finished(CacheChunk& chunk) {
  CacheScan& scan = *chunk.scan;
  chunk.there = true;
  --in_flight_;
  --scan.in_flight;
  if (chunk.transfer.status.ok()) {
    traffic_.add_up(base::TrafficKind::kCache, chunk.transfer.buffer.size());
  } else if (scan.status.ok()) {
    scan.status = chunk.transfer.status;
  }
  const auto dropped =
      std::ranges::find_if(dropped_, [&](const CacheScan& one) { return &one == &scan; });
  if (dropped == dropped_.end()) return &scan;
  std::erase(scan.chunks, &chunk);
  free(chunk);
  if (scan.in_flight == 0) dropped_.erase(dropped);
  return nullptr;
}

}  // namespace smartinf::csd
