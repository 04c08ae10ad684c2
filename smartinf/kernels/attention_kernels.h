// The kernel of a fold, one for each instruction set. The public side is attention.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smartinf::kernels {

/// How keys and values are kept.
enum class CacheFormat : uint8_t { kBf16 = 0, kF32 = 1, kQ8 = 2 };

inline constexpr uint32_t kCacheBlockTokens = 32;

/// One head of keys and values of a block, and which of its tokens are seen.
struct HeadOfBlock {
  CacheFormat format = CacheFormat::kBf16;
  uint32_t head_width = 0;
  uint32_t first = 0;  // tokens [first, end)
  uint32_t end = 0;
  const std::byte* keys = nullptr;       // [d][32]
  const std::byte* values = nullptr;     // [32][d]
  const float* key_scales = nullptr;     // q8: [32]
  const float* value_scales = nullptr;   // q8: [32]
  const std::byte* next_keys = nullptr;  // A hint: what is folded next, as many bytes as `keys`.
  float scale = 0;
  float softcap = 0;
};

/// One head of a query. state: the largest score, the sum, [d] weighted values.
struct FoldRow {
  const float* query = nullptr;
  float* state = nullptr;
};

/// Rows that share the loads of a head.
inline constexpr size_t kFoldRowsMax = 4;

struct AttentionKernels {
  /// count: 1 to kFoldRowsMax. first < end.
  void (*fold_rows)(const HeadOfBlock& head, const FoldRow* rows, size_t count);
};

const AttentionKernels& scalar_attention();

}  // namespace smartinf::kernels
