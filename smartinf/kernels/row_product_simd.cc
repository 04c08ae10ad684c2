// Products of a matrix with few rows, as one Highway body for every instruction set. Each output is
// a sum by lanes over the inputs, whatever rows there are beside; products are fused with sums
// where the processor can.
#include <algorithm>
#include <cstdint>

#include "smartinf/kernels/row_product_kernels.h"
#include "smartinf/kernels/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "smartinf/kernels/row_product_simd.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
namespace row_product {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using U64 = hn::ScalableTag<uint64_t>;
using U16 = hn::ScalableTag<uint16_t>;
using VF = hn::Vec<F32>;

constexpr size_t kLanes = hn::MaxLanes(F32());
constexpr size_t kPair = 2 * kLanes;
static_assert(kRowBlock % kPair == 0 && kColumnPart % (2 * kPair) == 0);

// As many sums as there are registers for.
#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr size_t kRowsMax = 4;
#else
constexpr size_t kRowsMax = 3;
#endif
constexpr size_t kOutputs = 4;

// Two vectors' weights: of bf16 those at even places, then those at odd ones.
struct Pair {
  VF first, second;
};
HWY_INLINE Pair load_pair(const float* weights) {
  return {hn::LoadU(F32(), weights), hn::LoadU(F32(), weights + kLanes)};
}
HWY_INLINE Pair load_pair(const uint16_t* weights) {
  const auto bits = hn::BitCast(U32(), hn::LoadU(U16(), weights));
  return {hn::BitCast(F32(), hn::ShiftLeft<16>(bits)),
          hn::BitCast(F32(), hn::And(bits, hn::Set(U32(), 0xffff0000u)))};
}

void arrange(base::DataType type, const float* x, float* out, size_t n) {
  const size_t padded = (n + kRowBlock - 1) / kRowBlock * kRowBlock;
  if (type == base::DataType::kF32) {
    std::fill(std::copy_n(x, n, out), out + padded, 0.0f);
    return;
  }
  const auto put = [&](const float* in, size_t at) HWY_ATTR {
    const VF lower = hn::LoadU(F32(), in);
    const VF upper = hn::LoadU(F32(), in + kLanes);
    hn::StoreU(hn::ConcatEven(F32(), upper, lower), F32(), out + at);
    hn::StoreU(hn::ConcatOdd(F32(), upper, lower), F32(), out + at + kLanes);
  };
  size_t k = 0;
  for (; k + kPair <= n; k += kPair) put(x + k, k);
  for (; k < padded; k += kPair) {
    float rest[kPair] = {};
    if (k < n) std::copy_n(x + k, n - k, rest);
    put(rest, k);
  }
}

// The sums of the lanes of four vectors.
HWY_INLINE void add_lanes(VF a, VF b, VF c, VF d, float* out) {
  const auto pair_up = [](VF v, VF w) HWY_ATTR {
    return hn::BitCast(U64(),
                       hn::Add(hn::InterleaveLower(F32(), v, w), hn::InterleaveUpper(F32(), v, w)));
  };
  const auto ab = pair_up(a, b);
  const auto cd = pair_up(c, d);
  alignas(64) float blocks[kLanes];
  hn::Store(hn::Add(hn::BitCast(F32(), hn::InterleaveLower(U64(), ab, cd)),
                    hn::BitCast(F32(), hn::InterleaveUpper(U64(), ab, cd))),
            F32(), blocks);
  const hn::Full128<float> f128;
  for (size_t half = kLanes / 2; half >= 4; half /= 2) {
    for (size_t i = 0; i < half; i += 4) {
      hn::Store(hn::Add(hn::Load(f128, blocks + i), hn::Load(f128, blocks + half + i)), f128,
                blocks + i);
    }
  }
  hn::StoreU(hn::Load(f128, blocks), f128, out);
}

template <size_t kRows>
using RowSums = VF[kRows][kOutputs];

template <class T, size_t kRows>
HWY_INLINE void add_products(const T* const (&weights)[kOutputs], const float* x, size_t x_stride,
                             RowSums<kRows>& sums) {
  for (size_t n = 0; n < kOutputs; ++n) {
    const Pair w = load_pair(weights[n]);
    for (size_t r = 0; r < kRows; ++r) {
      const float* const at = x + r * x_stride;
      sums[r][n] = hn::MulAdd(w.first, hn::LoadU(F32(), at), sums[r][n]);
      sums[r][n] = hn::MulAdd(w.second, hn::LoadU(F32(), at + kLanes), sums[r][n]);
    }
  }
}

// kOutputs outputs of kRows rows. weights: of each output.
template <class T, size_t kRows>
void multiply_tile(const T* const* outputs, const float* x, size_t x_stride, size_t inputs,
                   float (*y)[kOutputs]) {
  RowSums<kRows> sums;
  for (auto& row : sums) {
    for (VF& sum : row) sum = hn::Zero(F32());
  }
  const T* weights[kOutputs] = {outputs[0], outputs[1], outputs[2], outputs[3]};
  size_t k = 0;
  for (; k + kPair <= inputs; k += kPair) {
    add_products<T, kRows>(weights, x + k, x_stride, sums);
    for (const T*& at : weights) at += kPair;
  }
  if (k < inputs) {
    T rest[kOutputs][kPair] = {};
    for (size_t n = 0; n < kOutputs; ++n) std::copy_n(weights[n], inputs - k, rest[n]);
    add_products<T, kRows>({rest[0], rest[1], rest[2], rest[3]}, x + k, x_stride, sums);
  }
  for (size_t r = 0; r < kRows; ++r) {
    add_lanes(sums[r][0], sums[r][1], sums[r][2], sums[r][3], y[r]);
  }
}

// Of a matrix [inputs][outputs]: up to 2 kPair outputs, one sum each, of kRows rows.
template <class T, size_t kRows>
void multiply_columns(const RowProductPart& part, const T* weights, const float* x, size_t columns,
                      float (*y)[2 * kPair]) {
  constexpr size_t kAhead = 16;  // rows of the matrix, which lie too far apart to be foreseen
  VF sums[kRows][2][2];
  for (auto& row : sums) {
    for (auto& pair : row) pair[0] = pair[1] = hn::Zero(F32());
  }
  const bool whole = columns == 2 * kPair;
  T rest[2 * kPair] = {};
  for (size_t k = 0; k < part.inputs; ++k) {
    const T* at = weights + k * part.outputs;
    for (size_t line = 0; line < columns && k + kAhead < part.inputs; line += 64 / sizeof(T)) {
      hwy::Prefetch(at + kAhead * part.outputs + line);
    }
    if (!whole) {
      std::copy_n(at, columns, rest);
      at = rest;
    }
    const Pair w[2] = {load_pair(at), load_pair(at + kPair)};
    for (size_t r = 0; r < kRows; ++r) {
      const VF input = hn::Set(F32(), x[r * part.x_stride + k]);
      for (size_t p = 0; p < 2; ++p) {
        sums[r][p][0] = hn::MulAdd(w[p].first, input, sums[r][p][0]);
        sums[r][p][1] = hn::MulAdd(w[p].second, input, sums[r][p][1]);
      }
    }
  }
  constexpr bool kHalves = sizeof(T) == 2;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t p = 0; p < 2; ++p) {
      float lanes[2][kLanes];
      hn::StoreU(sums[r][p][0], F32(), lanes[0]);
      hn::StoreU(sums[r][p][1], F32(), lanes[1]);
      for (size_t i = 0; i < kPair; ++i) {
        y[r][p * kPair + i] = kHalves ? lanes[i % 2][i / 2] : lanes[i / kLanes][i % kLanes];
      }
    }
  }
}

// Calls tile.operator()<rows>(first row) for all rows, some at a time.
template <class Tile>
HWY_INLINE void for_rows(size_t rows, const Tile& tile) {
  size_t r = 0;
  for (; r + kRowsMax <= rows; r += kRowsMax) tile.template operator()<kRowsMax>(r);
  if (rows - r == 1) tile.template operator()<1>(r);
  if (rows - r == 2) tile.template operator()<2>(r);
  if constexpr (kRowsMax > 3) {
    if (rows - r == 3) tile.template operator()<3>(r);
  }
}

template <class T>
void multiply_part(const RowProductPart& part) {
  const T* const weights = static_cast<const T*>(part.weights);
  const size_t end = part.first + part.count;
  const size_t width = part.transposed ? 2 * kPair : kOutputs;
  for (size_t n = part.first; n < end; n += width) {
    const size_t some = std::min(width, end - n);
    const auto put = [&](const float* y, size_t row) {
      std::copy_n(y, some, part.y + row * part.outputs + n);
    };
    if (part.transposed) {
      for_rows(part.rows, [&]<size_t kRows>(size_t r) HWY_ATTR {
        float y[kRows][2 * kPair];
        multiply_columns<T, kRows>(part, weights + n, part.x + r * part.x_stride, some, y);
        for (size_t i = 0; i < kRows; ++i) put(y[i], r + i);
      });
      continue;
    }
    const T* outputs[kOutputs];
    for (size_t i = 0; i < kOutputs; ++i) {
      outputs[i] = weights + (n + std::min(i, some - 1)) * part.inputs;
    }
    for_rows(part.rows, [&]<size_t kRows>(size_t r) HWY_ATTR {
      float y[kRows][kOutputs];
      multiply_tile<T, kRows>(outputs, part.x + r * part.x_stride, part.x_stride, part.inputs, y);
      for (size_t i = 0; i < kRows; ++i) put(y[i], r + i);
    });
  }
}

void multiply(base::DataType type, const RowProductPart& part) {
  type == base::DataType::kF32 ? multiply_part<float>(part) : multiply_part<uint16_t>(part);
}

}  // namespace row_product

RowProductKernels row_product_kernels() {
  return {.arrange = row_product::arrange, .multiply = row_product::multiply};
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();
