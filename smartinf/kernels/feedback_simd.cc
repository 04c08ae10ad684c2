// Error feedback as one Highway body for every instruction set.
#include <algorithm>
#include <array>
#include <cstring>

#include "smartinf/kernels/feedback_kernels.h"
#include "smartinf/kernels/state_codec.h"
#include "smartinf/kernels/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "smartinf/kernels/feedback_simd.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

#include "smartinf/kernels/pairs-inl.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

FeedbackKernels feedback_kernels();

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;

HWY_INLINE hn::Vec<F32> widened(const base::Bf16* in) {
  const auto half = hn::LoadU(U16(), reinterpret_cast<const uint16_t*>(in));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), half)));
}

template <bool kResidual>
void add_all(const base::Bf16* gradient, const base::Bf16* residual, float scale, float* out,
             size_t n) {
  const size_t lanes = hn::Lanes(F32());
  const auto scales = hn::Set(F32(), scale);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto value = hn::Mul(scales, widened(gradient + i));
    if (kResidual) value = hn::Add(value, widened(residual + i));
    hn::StoreU(value, F32(), out + i);
  }
  scalar_feedback().add(gradient + i, kResidual ? residual + i : nullptr, scale, out + i, n - i);
}

void add(const base::Bf16* gradient, const base::Bf16* residual, float scale, float* out,
         size_t n) {
  (residual == nullptr ? add_all<false> : add_all<true>)(gradient, residual, scale, out, n);
}

double copy_squares(const base::Bf16* in, base::Bf16* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  double total = 0;
  size_t first = 0;
  for (; first + kSquaresGroup <= n; first += kSquaresGroup) {
    SquaresByLane squares;
    for (size_t i = 0; i < kSquaresGroup; i += kSquaresLanes) {
      for (size_t p = 0; p < SquaresByLane::kPairs; ++p) {
        squares.add(p, widened_pairs(in + first + i + p * 2 * lanes));
      }
    }
    total += squares.sum(in + first);
  }
  if (out != nullptr) std::memcpy(static_cast<void*>(out), in, first * sizeof(base::Bf16));
  if (first == n) return total;
  return total +
         scalar_feedback().copy_squares(in + first, out == nullptr ? out : out + first, n - first);
}

// kRows rows at once, so that the columns' sums are read and written once for all of them.
template <size_t kRows>
HWY_INLINE void add_rows(const base::Bf16* in, size_t columns, float scale, float* row_sums,
                         float* column_sums) {
  constexpr size_t kVectors = kRowLanes / hn::MaxLanes(F32());
  const size_t lanes = hn::Lanes(F32());
  const auto scales = hn::Set(F32(), scale);
  hn::Vec<F32> by_lane[kRows][kVectors];
  for (auto& row : by_lane) {
    for (auto& sum : row) sum = hn::Zero(F32());
  }
  size_t c = 0;
  for (; c + kRowLanes <= columns; c += kRowLanes) {
    for (size_t v = 0; v < kVectors; ++v) {
      const size_t at = c + v * lanes;
      auto column = hn::LoadU(F32(), column_sums + at);
      for (size_t r = 0; r < kRows; ++r) {
        const auto value = hn::Mul(scales, widened(in + r * columns + at));
        const auto square = hn::Mul(value, value);
        by_lane[r][v] = hn::Add(by_lane[r][v], square);
        column = hn::Add(column, square);
      }
      hn::StoreU(column, F32(), column_sums + at);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    std::array<float, kRowLanes> sums;
    for (size_t v = 0; v < kVectors; ++v) hn::StoreU(by_lane[r][v], F32(), sums.data() + v * lanes);
    for (size_t i = c; i < columns; ++i) {
      const float value = scale * base::to_f32(in[r * columns + i]);
      const float square = value * value;
      sums[i - c] += square;
      column_sums[i] += square;
    }
    row_sums[r] += sum_of_lanes(sums);
  }
}

void add_matrix_squares(const base::Bf16* in, size_t rows, size_t columns, float scale,
                        float* row_sums, float* column_sums) {
  constexpr size_t kAtOnce = 4;
  size_t r = 0;
  for (; r + kAtOnce <= rows; r += kAtOnce) {
    add_rows<kAtOnce>(in + r * columns, columns, scale, row_sums + r, column_sums);
  }
  for (; r < rows; ++r) add_rows<1>(in + r * columns, columns, scale, row_sums + r, column_sums);
}

void ahead(const StepAheadPass& pass, float* weights, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  const auto lr = hn::Set(F32(), pass.lr);
  const auto row = hn::Set(F32(), pass.root);
  const auto eps = hn::Set(F32(), pass.eps);
  const auto most = hn::Set(F32(), pass.limit);
  const auto least = hn::Set(F32(), -pass.limit);
  const auto root_least = hn::Set(F32(), kRootLeast);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto roots = hn::Mul(row, hn::LoadU(F32(), pass.roots + i));
    // std::max() and std::min() where a number is none too.
    const auto sum = hn::Add(roots, eps);
    const auto root = hn::IfThenElse(hn::Lt(sum, root_least), root_least, sum);
    const auto step = hn::Div(hn::Mul(lr, widened(pass.residual + i)), root);
    const auto above = hn::IfThenElse(hn::Lt(step, least), least, step);
    const auto held = hn::IfThenElse(hn::Lt(most, above), most, above);
    hn::StoreU(hn::Sub(hn::LoadU(F32(), weights + i), held), F32(), weights + i);
  }
  StepAheadPass rest = pass;
  rest.residual += i;
  rest.roots += i;
  scalar_feedback().ahead(rest, weights + i, n - i);
}

FeedbackKernels feedback_kernels() {
  return {.add = add,
          .copy_squares = copy_squares,
          .add_matrix_squares = add_matrix_squares,
          .ahead = ahead};
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();
