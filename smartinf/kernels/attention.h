// Attention of single queries over the keys and values of a sequence, block by block. A cache block
// holds 32 tokens of one sequence and layer, in one layout in memory, on the drive and on the wire.
// A *fold* takes a block into a query's state, which may stop at any block boundary and go on
// elsewhere: the bits are the same for every instruction set, device and interruption. Decides
// nothing about which blocks there are (engine/key_value_store.h).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/kernels/attention_kernels.h"

namespace smartinf::kernels {

class KernelTable;

inline constexpr std::array<std::string_view, 3> kCacheFormatNames{"bf16", "f32", "q8"};
constexpr base::EnumNames enum_names(CacheFormat) { return kCacheFormatNames; }

/// bf16 and f32 hold exactly what is appended in that type; in q8 each token's row of a head is
/// 8-bit codes and a scale.
struct CacheBlockShape {
  uint32_t kv_heads = 0;
  uint32_t head_width = 0;  // d
  CacheFormat format = CacheFormat::kBf16;
};

/// Bytes of one block: for each head of keys K transposed [d][32], then V [32][d]; in q8 both as
/// int8, then the scales [32] of K's rows and [32] of V's, in f32. A multiple of 4096, padded to it
/// with zeros. What tokens have not been appended is zeros.
uint64_t cache_block_bytes(const CacheBlockShape& shape);

/// Puts `count` tokens behind the `first` that the block has.
/// Shapes: block: cache_block_bytes(); keys, values: [count][kv_heads][d] of type, by elements
/// `token_stride` apart from token to token; 0: kv_heads * d. first + count <= 32.
void append_tokens(const CacheBlockShape& shape, std::span<std::byte> block, uint32_t first,
                   uint32_t count, base::DataType type, const void* keys, const void* values,
                   uint64_t token_stride = 0);

struct AttentionShape {
  CacheBlockShape block;
  uint32_t heads = 0;  // of queries, a multiple of kv_heads
  float scale = 0;     // of query times key
  float softcap = 0;   // scores become softcap * tanh(score / softcap); 0: none

  uint32_t queries_per_head() const { return heads / block.kv_heads; }
  uint64_t state_floats() const { return uint64_t{heads} * (2 + block.head_width); }
};

/// One query that reads a block. Shapes: query: [heads][d]; state: [heads][2 + d].
struct FoldQuery {
  const float* query = nullptr;
  float* state = nullptr;
};

/// The state of a query: for each head the largest score, the sum of exp(score - largest), and the
/// values weighted by these, which is [heads][2 + d].
/// Of the heads of keys [first_head, end_head), as FoldRange has them.
void begin_fold(const AttentionShape& shape, float* state, uint32_t first_head = 0,
                uint32_t end_head = 0);

/// Which part of a block is folded.
struct FoldRange {
  uint32_t first = 0;  // tokens [first, end) of the block
  uint32_t end = kCacheBlockTokens;
  uint32_t first_head = 0;  // heads of keys [first_head, end_head); 0: all
  uint32_t end_head = 0;
  const std::byte* next_block = nullptr;  // A hint: the block that the caller will fold next.
};

/// Tokens [first_token, end_token) of a sequence as far as its block `block` has them; none where
/// first is not below end.
constexpr FoldRange range_in_block(uint64_t block, uint64_t first_token, uint64_t end_token) {
  const uint64_t begin = block * kCacheBlockTokens;
  const auto in_block = [&](uint64_t token) {
    return static_cast<uint32_t>(
        std::min(std::max(token, begin) - begin, uint64_t{kCacheBlockTokens}));
  };
  FoldRange range;
  range.first = in_block(first_token);
  range.end = in_block(end_token);
  return range;
}

/// Folds tokens of a block into the states of all queries that read it, which are several where
/// sequences share a prefix. Blocks are folded in the order of their tokens.
/// Threads: safe on disjoint states or heads. Errors: none; wrong sizes are a bug (SI_CHECK).
void fold_block(const KernelTable& table, const AttentionShape& shape,
                std::span<const std::byte> block, const FoldRange& range,
                std::span<const FoldQuery> queries);
/// With the table in use.
void fold_block(const AttentionShape& shape, std::span<const std::byte> block,
                const FoldRange& range, std::span<const FoldQuery> queries);

/// The weighted mean of the values; zeros where no token was folded. out: [heads][d].
void finish_fold(const AttentionShape& shape, const float* state, float* out,
                 uint32_t first_head = 0, uint32_t end_head = 0);

}  // namespace smartinf::kernels
