// Keys and values in memory.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/key_value_store.h"
#include "smartinf/engine/sequence_table.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Status;
using kernels::kCacheBlockTokens;

/// Blocks that a layer keeps: those of its window, and the one that is being filled.
uint64_t places_of(uint64_t window, uint64_t tokens_max) {
  const uint64_t all = base::divide_up(tokens_max, uint64_t{kCacheBlockTokens});
  if (window == 0) return all;
  return std::min(all, base::divide_up(window, uint64_t{kCacheBlockTokens}) + 1);
}

/// One layer of one sequence. Memory becomes resident as tokens are appended.
struct LayerBlocks {
  base::AlignedBuffer memory;
  uint64_t places = 0;  // block i is at place i % places
  uint64_t tokens = 0;
};

class MemoryStore final : public KeyValueStore {
 public:
  MemoryStore(KeyValueShape shape, uint64_t memory_bytes, std::shared_ptr<base::ThreadTeam> team)
      : shape_(std::move(shape)),
        block_bytes_(kernels::cache_block_bytes(shape_.attention.block)),
        memory_bytes_(memory_bytes),
        team_(std::move(team)) {}

  Status open(SequenceId id, uint64_t tokens_max, SharedPrefix prefix) override {
    SI_ASSIGN_OR_RETURN(const bool again, sequences_.begin_open(id, tokens_max, prefix));
    if (again) return {};
    const uint64_t own = tokens_max - prefix.tokens;
    const uint64_t needed = memory_store_bytes(shape_, own);
    if (needed > memory_bytes_ - used_bytes_) {
      return {
          ErrorCode::kOutOfMemory,
          fmt::format("keys and values of {} tokens need {}, and {} of {} are free", own,
                      base::format_bytes(needed), base::format_bytes(memory_bytes_ - used_bytes_),
                      base::format_bytes(memory_bytes_))};
    }
    Sequence sequence;
    sequence.layers.resize(shape_.layers);
    sequence.tokens_max = tokens_max;
    for (uint32_t l = 0; l < shape_.layers; ++l) {
      LayerBlocks& layer = sequence.layers[l];
      layer.places = places_of(shape_.window(l), own);
      if (layer.places == 0) continue;
      SI_ASSIGN_OR_RETURN(layer.memory, base::AlignedBuffer::allocate(layer.places * block_bytes_));
    }
    sequence.bytes = needed;
    used_bytes_ += needed;
    sequences_.add(id, std::move(sequence), prefix);
    return {};
  }

  uint64_t tokens(SequenceId id) const override {
    const Sequence* sequence = sequences_.find(id);
    if (sequence == nullptr || shape_.layers == 0) return 0;
    return sequence->prefix_tokens +
           std::ranges::min_element(sequence->layers, {}, &LayerBlocks::tokens)->tokens;
  }

  Status append(SequenceId id, uint32_t layer, uint64_t count, base::DataType type,
                const void* keys, const void* values) override {
    Sequence* const sequence = sequences_.find(id);
    if (sequence == nullptr) return sequence_not_open(id);
    LayerBlocks& blocks = sequence->layers[layer];
    if (count > sequence->tokens_max - sequence->prefix_tokens - blocks.tokens) {
      return {ErrorCode::kOutOfMemory,
              fmt::format("sequence {} has room for {} tokens, not for {}", id,
                          sequence->tokens_max, sequence->prefix_tokens + blocks.tokens + count)};
    }
    const kernels::CacheBlockShape& block = shape_.attention.block;
    const uint64_t token_bytes =
        uint64_t{block.kv_heads} * block.head_width * base::data_type_bytes(type);
    for (uint64_t done = 0; done < count;) {
      const uint64_t first = blocks.tokens % kCacheBlockTokens;
      const uint64_t some = std::min(kCacheBlockTokens - first, count - done);
      const uint64_t index = blocks.tokens / kCacheBlockTokens;
      const std::span<std::byte> at = block_at(blocks, index);
      if (first == 0 && index >= blocks.places) std::memset(at.data(), 0, at.size());
      kernels::append_tokens(block, at, static_cast<uint32_t>(first), static_cast<uint32_t>(some),
                             type, static_cast<const std::byte*>(keys) + done * token_bytes,
                             static_cast<const std::byte*>(values) + done * token_bytes);
      blocks.tokens += some;
      done += some;
    }
    return {};
  }

  base::Result<AttendTicket> begin_attend(uint32_t layer,
                                          std::span<const AttendQuery> queries) override {
    SI_CHECK(under_way_ < 2, "at most two attends under way");
    std::vector<const Sequence*> sequences;
    for (const AttendQuery& query : queries) {
      sequences.push_back(sequences_.find(query.id));
      if (sequences.back() == nullptr) return sequence_not_open(query.id);
      const Sequence* prefix = sequences.back()->prefix;
      if (prefix != nullptr && prefix->layers[layer].tokens < sequences.back()->prefix_tokens) {
        return Status(ErrorCode::kFailedPrecondition,
                      fmt::format("the prefix of sequence {} is not there yet", query.id));
      }
    }
    const uint32_t heads = shape_.attention.block.kv_heads;
    states_.resize(queries.size() * shape_.attention.state_floats());
    team_->run(queries.size() * heads, [&](uint32_t, size_t index) {
      const size_t q = index / heads;
      attend(layer, *sequences[q], queries[q], states_.data() + q * shape_.attention.state_floats(),
             static_cast<uint32_t>(index % heads));
    });
    ++under_way_;
    return next_ticket_++;
  }

  Status finish_attend(AttendTicket ticket) override {
    SI_CHECK(ticket < next_ticket_ && under_way_ > 0, "a ticket of an attend under way");
    --under_way_;
    return {};
  }

  void close(SequenceId id) override {
    sequences_.close(id, [&](SequenceId, Sequence& one) { used_bytes_ -= one.bytes; });
  }

 private:
  struct Sequence : SharingSequence<Sequence> {
    std::vector<LayerBlocks> layers;
    uint64_t tokens_max = 0;
    uint64_t bytes = 0;
  };

  std::span<std::byte> block_at(const LayerBlocks& blocks, uint64_t index) const {
    return {blocks.memory.data() + index % blocks.places * block_bytes_, block_bytes_};
  }

  /// One head of keys of one sequence.
  void attend(uint32_t layer, const Sequence& sequence, const AttendQuery& query, float* state,
              uint32_t head) const {
    const uint64_t shared = sequence.prefix_tokens / kCacheBlockTokens;  // blocks
    const uint64_t tokens = sequence.prefix_tokens + sequence.layers[layer].tokens;
    const uint64_t first = shape_.first_seen(layer, tokens);
    const auto block = [&](uint64_t b) {
      return b < shared ? block_at(sequence.prefix->layers[layer], b)
                        : block_at(sequence.layers[layer], b - shared);
    };
    kernels::begin_fold(shape_.attention, state, head, head + 1);
    const kernels::FoldQuery one{query.query, state};
    for (uint64_t b = first / kCacheBlockTokens; b * kCacheBlockTokens < tokens; ++b) {
      kernels::FoldRange range = kernels::range_in_block(b, first, tokens);
      range.first_head = head;
      range.end_head = head + 1;
      const bool last = (b + 1) * kCacheBlockTokens >= tokens;
      range.next_block = last ? nullptr : block(b + 1).data();
      kernels::fold_block(shape_.attention, block(b), range, {&one, 1});
    }
    kernels::finish_fold(shape_.attention, state, query.out, head, head + 1);
  }

  KeyValueShape shape_;
  uint64_t block_bytes_;
  uint64_t memory_bytes_;
  uint64_t used_bytes_ = 0;
  SequenceTable<Sequence> sequences_;
  std::vector<float> states_;
  uint32_t under_way_ = 0;
  AttendTicket next_ticket_ = 0;
  const std::shared_ptr<base::ThreadTeam> team_;
};

}  // namespace

uint64_t memory_store_bytes(const KeyValueShape& shape, uint64_t tokens_max) {
  uint64_t blocks = 0;
  for (uint32_t l = 0; l < shape.layers; ++l) {
    blocks += places_of(shape.window(l), tokens_max);
  }
  return blocks * kernels::cache_block_bytes(shape.attention.block);
}

std::shared_ptr<base::ThreadTeam> make_decoder_team(uint32_t threads) {
  return std::make_shared<base::ThreadTeam>(threads, "si-decode", std::chrono::microseconds(200));
}

std::unique_ptr<KeyValueStore> make_memory_store(KeyValueShape shape, uint64_t memory_bytes,
                                                 std::shared_ptr<base::ThreadTeam> team) {
  return std::make_unique<MemoryStore>(std::move(shape), memory_bytes, std::move(team));
}

}  // namespace smartinf::engine
