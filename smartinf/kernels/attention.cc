#include "smartinf/kernels/attention.h"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/attention_arithmetic.h"
#include "smartinf/kernels/update.h"

namespace smartinf::kernels {
namespace {

constexpr uint32_t kTokens = kCacheBlockTokens;
using Tokens = std::array<float, kTokens>;

uint64_t value_bytes(CacheFormat format) {
  switch (format) {
    case CacheFormat::kBf16:
      return 2;
    case CacheFormat::kF32:
      return 4;
    case CacheFormat::kQ8:
      return 1;
  }
  return 0;
}

/// Of the keys of one head, and of its values.
uint64_t half_bytes(const CacheBlockShape& shape) {
  return uint64_t{shape.head_width} * kTokens * value_bytes(shape.format);
}

uint64_t head_bytes(const CacheBlockShape& shape) {
  const uint64_t scales = shape.format == CacheFormat::kQ8 ? 2 * sizeof(Tokens) : 0;
  return 2 * half_bytes(shape) + scales;
}

/// The scalar truth of a fold.

float value_at(const HeadOfBlock& head, const std::byte* values, size_t i) {
  switch (head.format) {
    case CacheFormat::kBf16:
      return base::to_f32(reinterpret_cast<const base::Bf16*>(values)[i]);
    case CacheFormat::kF32:
      return reinterpret_cast<const float*>(values)[i];
    case CacheFormat::kQ8:
      return static_cast<float>(static_cast<int8_t>(values[i]));
  }
  return 0;
}

float score_of(const HeadOfBlock& head, const float* query, uint32_t token) {
  float sum = 0;
  for (size_t c = 0; c < head.head_width; ++c) {
    sum = fused(query[c], value_at(head, head.keys, c * kTokens + token), sum);
  }
  if (head.format == CacheFormat::kQ8) sum *= head.key_scales[token];
  const float score = sum * head.scale;
  return head.softcap > 0 ? soft_capped(score, head.softcap, 1.0f / head.softcap) : score;
}

float sum_of_tokens(Tokens terms) {
  for (size_t half = kTokens / 2; half > 0; half /= 2) {
    for (size_t t = 0; t < half; ++t) terms[t] += terms[t + half];
  }
  return terms[0];
}

void fold_row(const HeadOfBlock& head, const FoldRow& row) {
  float& max = row.state[0];
  float& sum = row.state[1];
  float* weighted = row.state + 2;
  Tokens scores{};
  float new_max = max;
  for (uint32_t t = head.first; t < head.end; ++t) {
    scores[t] = score_of(head, row.query, t);
    new_max = greater(new_max, score_or_least(scores[t]));
  }
  new_max = without_sign_of_zero(new_max);
  const float base = score_base(new_max);
  const float rescale = exp_of_negative(max - base);
  Tokens weights{};
  for (uint32_t t = head.first; t < head.end; ++t) weights[t] = exp_of_negative(scores[t] - base);
  max = new_max;
  sum = canonical(sum * rescale + sum_of_tokens(weights));
  if (head.format == CacheFormat::kQ8) {
    for (uint32_t t = head.first; t < head.end; ++t) weights[t] *= head.value_scales[t];
  }
  for (size_t c = 0; c < head.head_width; ++c) {
    float value = weighted[c] * rescale;
    for (uint32_t t = head.first; t < head.end; ++t) {
      value =
          fused(weights[t], value_at(head, head.values, size_t{t} * head.head_width + c), value);
    }
    weighted[c] = canonical(value);
  }
}

void fold_rows(const HeadOfBlock& head, const FoldRow* rows, size_t count) {
  for (size_t r = 0; r < count; ++r) fold_row(head, rows[r]);
}

/// Puts one row of a token where its head has it: element c at out[c * stride].
void put_row(CacheFormat format, const float* row, uint32_t width, std::byte* out, size_t stride,
             float* scale) {
  switch (format) {
    case CacheFormat::kBf16:
      for (uint32_t c = 0; c < width; ++c) {
        reinterpret_cast<base::Bf16*>(out)[c * stride] = base::to_bf16(row[c]);
      }
      return;
    case CacheFormat::kF32:
      for (uint32_t c = 0; c < width; ++c) reinterpret_cast<float*>(out)[c * stride] = row[c];
      return;
    case CacheFormat::kQ8: {
      uint32_t magnitude = 0;
      for (uint32_t c = 0; c < width; ++c) {
        magnitude = std::max(magnitude, std::bit_cast<uint32_t>(row[c]) & kMagnitudeMask);
      }
      *scale = row_scale(magnitude);
      const float inverse = group_inverse(*scale);
      for (uint32_t c = 0; c < width; ++c) {
        out[c * stride] = static_cast<std::byte>(row_code(row[c], inverse));
      }
      return;
    }
  }
}

/// Calls work(row) for the queries of the heads of keys [first_head, end_head); 0: all.
template <typename Work>
void for_each_row(const AttentionShape& shape, uint32_t first_head, uint32_t end_head,
                  const Work& work) {
  const uint64_t group = shape.queries_per_head();
  const uint64_t end = end_head == 0 ? shape.heads : end_head * group;
  for (uint64_t row = first_head * group; row < end; ++row) work(row);
}

}  // namespace

const AttentionKernels& scalar_attention() {
  static constexpr AttentionKernels kKernels{.fold_rows = fold_rows};
  return kKernels;
}

uint64_t cache_block_bytes(const CacheBlockShape& shape) {
  return base::round_up(shape.kv_heads * head_bytes(shape), uint64_t{4096});
}

void append_tokens(const CacheBlockShape& shape, std::span<std::byte> block, uint32_t first,
                   uint32_t count, base::DataType type, const void* keys, const void* values,
                   uint64_t token_stride) {
  SI_CHECK(block.size() == cache_block_bytes(shape), "a whole block");
  SI_CHECK(first <= kTokens && count <= kTokens - first, "tokens of one block");
  const uint32_t width = shape.head_width;
  const uint64_t element_bytes = base::data_type_bytes(type);
  const uint64_t half = half_bytes(shape);
  if (token_stride == 0) token_stride = uint64_t{shape.kv_heads} * width;
  std::vector<float> row(width);
  const auto put = [&](const void* from, uint64_t element, std::byte* out, size_t stride,
                       float* scale) {
    kernels().cast_to_f32(static_cast<const std::byte*>(from) + element * element_bytes, type,
                          row.data(), width);
    put_row(shape.format, row.data(), width, out, stride, scale);
  };
  for (uint32_t h = 0; h < shape.kv_heads; ++h) {
    std::byte* head = block.data() + h * head_bytes(shape);
    auto* scales = reinterpret_cast<float*>(head + 2 * half);  // q8
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t t = first + i;
      const uint64_t element = i * token_stride + uint64_t{h} * width;
      put(keys, element, head + t * value_bytes(shape.format), kTokens, scales + t);
      put(values, element, head + half + uint64_t{t} * width * value_bytes(shape.format), 1,
          scales + kTokens + t);
    }
  }
}

void begin_fold(const AttentionShape& shape, float* state, uint32_t first_head, uint32_t end_head) {
  for_each_row(shape, first_head, end_head, [&](uint64_t row) {
    float* const at = state + row * (2 + shape.block.head_width);
    std::fill_n(at, 2 + shape.block.head_width, 0.0f);
    *at = std::bit_cast<float>(kMinusInfinityBits);
  });
}

void fold_block(const KernelTable& table, const AttentionShape& shape,
                std::span<const std::byte> block, const FoldRange& range,
                std::span<const FoldQuery> queries) {
  SI_CHECK(block.size() == cache_block_bytes(shape.block), "a whole block");
  SI_CHECK(range.end <= kTokens, "tokens of one block");
  SI_CHECK(shape.heads % shape.block.kv_heads == 0, "as many queries for each head of keys");
  if (range.first >= range.end) return;
  const uint32_t end_head = range.end_head == 0 ? shape.block.kv_heads : range.end_head;
  const uint32_t width = shape.block.head_width;
  const uint32_t group = shape.queries_per_head();
  const uint64_t half = half_bytes(shape.block);
  const uint64_t stride = head_bytes(shape.block);
  for (uint32_t h = range.first_head; h < end_head; ++h) {
    const std::byte* keys = block.data() + h * stride;
    const auto* scales = reinterpret_cast<const float*>(keys + 2 * half);
    const std::byte* next = keys + stride;
    if (h + 1 == end_head) {
      next = range.next_block == nullptr ? keys : range.next_block + range.first_head * stride;
    }
    const HeadOfBlock head{.format = shape.block.format,
                           .head_width = width,
                           .first = range.first,
                           .end = range.end,
                           .keys = keys,
                           .values = keys + half,
                           .key_scales = scales,
                           .value_scales = scales + kTokens,
                           .next_keys = next,
                           .scale = shape.scale,
                           .softcap = shape.softcap};
    std::array<FoldRow, kFoldRowsMax> rows;
    size_t count = 0;
    const uint64_t rows_all = uint64_t{group} * queries.size();
    for (uint64_t r = 0; r < rows_all; ++r) {
      const FoldQuery& query = queries[r / group];
      const uint64_t row = uint64_t{h} * group + r % group;
      rows[count++] = {query.query + row * width, query.state + row * (2 + width)};
      if (count == kFoldRowsMax || r + 1 == rows_all) {
        table.tiles().attention.fold_rows(head, rows.data(), count);
        count = 0;
      }
    }
  }
}

void fold_block(const AttentionShape& shape, std::span<const std::byte> block,
                const FoldRange& range, std::span<const FoldQuery> queries) {
  fold_block(kernels(), shape, block, range, queries);
}

void finish_fold(const AttentionShape& shape, const float* state, float* out, uint32_t first_head,
                 uint32_t end_head) {
  const uint32_t width = shape.block.head_width;
  for_each_row(shape, first_head, end_head, [&](uint64_t row) {
    const float* const from = state + row * (2 + width);
    const float sum = from[1];
    for (uint32_t c = 0; c < width; ++c) {
      out[row * width + c] = sum == 0 ? 0.0f : canonical(from[2 + c] / sum);
    }
  });
}

}  // namespace smartinf::kernels
