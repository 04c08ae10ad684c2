#include "smartinf/plan/cache_traffic.h"

#include <algorithm>
#include <limits>
#include <map>

#include "smartinf/base/units.h"

namespace smartinf::plan {
namespace {

/// Of the token that comes behind `tokens`, the first block that it sees.
uint64_t first_block_seen(const CacheModel& model, uint32_t layer, uint64_t tokens) {
  const uint64_t window = model.window(layer);
  if (window == 0 || tokens + 1 <= window) return 0;
  return (tokens + 1 - window) / model.block_tokens;
}

}  // namespace

CacheTraffic& CacheTraffic::operator+=(const CacheTraffic& other) {
  read += other.read;
  written += other.written;
  link_down += other.link_down;
  link_up += other.link_up;
  return *this;
}

uint64_t blocks_read(const CacheModel& model, uint32_t layer, uint64_t tokens) {
  const uint64_t whole = tokens / model.block_tokens;
  return whole - std::min(whole, first_block_seen(model, layer, tokens));
}

CacheTraffic step_traffic(const CacheModel& model, std::span<const CachedSequence> sequences) {
  const uint64_t width = model.head_width;
  const uint64_t query_bytes = model.heads * width * sizeof(float);
  const uint64_t state_bytes = model.heads * (width + 2) * sizeof(float);
  CacheTraffic traffic;
  uint64_t blocks = 0;
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    std::map<uint32_t, std::pair<uint64_t, uint64_t>> prefixes;  // [first, end) that somebody sees
    for (const CachedSequence& one : sequences) {
      const uint64_t whole = one.tokens / model.block_tokens;
      const uint64_t first = std::min(whole, first_block_seen(model, layer, one.tokens));
      const uint64_t shared = std::min(whole, one.prefix_tokens / model.block_tokens);
      blocks += whole - std::max(first, shared);
      if (first < shared) {
        auto& [low, high] =
            prefixes.try_emplace(one.prefix, std::numeric_limits<uint64_t>::max(), 0).first->second;
        low = std::min(low, first);
        high = std::max(high, shared);
      }
      if (first < whole) {
        traffic.link_down += query_bytes;
        traffic.link_up += state_bytes;
      }
      if ((one.tokens + 1) % model.block_tokens == 0) {
        traffic.link_down += model.block_bytes;
        traffic.written += model.block_bytes;
      }
    }
    for (const auto& [prefix, range] : prefixes) blocks += range.second - range.first;
  }
  traffic.read = blocks * model.block_bytes;
  return traffic;
}

SequenceTraffic sequence_traffic(const CacheModel& model, uint64_t context, uint64_t tokens) {
  SequenceTraffic all;
  all.prefill.written =
      model.layers * base::divide_up(context, model.block_tokens) * model.block_bytes;
  all.prefill.link_down = all.prefill.written;
  for (uint64_t step = 0; step < tokens; ++step) {
    const CachedSequence one{context + step};
    all.decode += step_traffic(model, std::span(&one, 1));
  }
  return all;
}

uint64_t drive_bytes(const CacheModel& model, uint64_t tokens) {
  return model.layers * (base::divide_up(tokens, model.block_tokens) + 2) * model.block_bytes;
}

uint64_t memory_bytes(const CacheModel& model, uint64_t tokens) {
  uint64_t blocks = 0;
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    const uint64_t all = base::divide_up(tokens, model.block_tokens);
    const uint64_t window = model.window(layer);
    const uint64_t ring = base::divide_up(window, model.block_tokens) + 1;
    blocks += window == 0 ? all : std::min(all, ring);
  }
  return blocks * model.block_bytes;
}

uint64_t tail_bytes(const CacheModel& model) { return model.layers * model.block_bytes; }

}  // namespace smartinf::plan
