// Bytes of keys and values that generation moves and keeps, from shapes and lengths alone: promises
// of the planner, with which the counters of devices are compared. Pure. Which device has which
// sequence is not decided here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace smartinf::plan {

/// A model's attention, as far as a cache of its keys and values sees it.
struct CacheModel {
  uint32_t layers = 0;  // that attend
  uint32_t heads = 0;   // of queries
  uint32_t kv_heads = 0;
  uint32_t head_width = 0;
  std::vector<uint32_t> windows;  // by layer, tokens that it sees, itself too; 0: all. Empty: none
  uint64_t block_bytes = 0;       // of a sequence and layer: kernels::cache_block_bytes()
  uint32_t block_tokens = 32;

  uint32_t window(uint32_t layer) const { return windows.empty() ? 0 : windows[layer]; }
};

/// A sequence whose first `tokens` tokens have keys and values in all layers.
struct CachedSequence {
  uint64_t tokens = 0;
  uint64_t prefix_tokens = 0;  // whole blocks that all sequences of the same prefix share
  uint32_t prefix = 0;         // which; without meaning where prefix_tokens is 0
};

/// At the drives, and on the links to the devices. Queries and states are f32, and blocks travel as
/// they are kept (csd/messages/cache/cache.h).
struct CacheTraffic {
  uint64_t read = 0;
  uint64_t written = 0;
  uint64_t link_down = 0;
  uint64_t link_up = 0;

  CacheTraffic& operator+=(const CacheTraffic& other);
  bool operator==(const CacheTraffic&) const = default;
};

/// Whole blocks that a layer's next token reads of a sequence that has `tokens`; the unfinished
/// block stays on the host.
uint64_t blocks_read(const CacheModel& model, uint32_t layer, uint64_t tokens);

/// One decode step, in which each sequence gets one token more.
CacheTraffic step_traffic(const CacheModel& model, std::span<const CachedSequence> sequences);

/// A prompt of `context` tokens is computed and appended, its unfinished block too, once, for a
/// resume; then `tokens` steps follow.
struct SequenceTraffic {
  CacheTraffic prefill;
  CacheTraffic decode;
};
SequenceTraffic sequence_traffic(const CacheModel& model, uint64_t context, uint64_t tokens);

/// Bytes on a drive for a sequence of up to `tokens`: all blocks of each layer, and two for the one
/// that is not whole.
uint64_t drive_bytes(const CacheModel& model, uint64_t tokens);
/// Bytes of a sequence that is kept in memory; a layer with a window keeps a ring of the blocks
/// that it sees, and one more.
uint64_t memory_bytes(const CacheModel& model, uint64_t tokens);
/// Bytes of the host's memory for a sequence's unfinished blocks.
uint64_t tail_bytes(const CacheModel& model);

}  // namespace smartinf::plan
