// Error feedback as one Highway body for every instruction set.
#include <algorithm>

#include "smartinf/kernels/feedback_kernels.h"
#include "smartinf/kernels/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "smartinf/kernels/feedback_simd.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
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

// A group, or the whole lanes' worth of its beginning; returns how many elements that were. The
// sums by lane go to `by_lane`: [kMeanSquareLanes].
template <bool kResidual>
HWY_INLINE size_t add_group(const base::Bf16* gradient, const base::Bf16* residual, float scale,
                            float decay, float* out, float* by_lane, size_t n) {
  constexpr size_t kAccumulators = kMeanSquareLanes / hn::MaxLanes(F32());
  const size_t lanes = hn::Lanes(F32());
  const auto scales = hn::Set(F32(), scale);
  const auto decays = hn::Set(F32(), decay);
  hn::Vec<F32> sums[kAccumulators];
  for (auto& sum : sums) sum = hn::Zero(F32());
  size_t i = 0;
  for (; i + kMeanSquareLanes <= n; i += kMeanSquareLanes) {
    for (size_t a = 0; a < kAccumulators; ++a) {
      const size_t at = i + a * lanes;
      auto value = hn::Mul(scales, widened(gradient + at));
      sums[a] = hn::Add(sums[a], hn::Mul(value, value));
      if (kResidual) value = hn::Add(value, hn::Mul(decays, widened(residual + at)));
      hn::StoreU(value, F32(), out + at);
    }
  }
  for (size_t a = 0; a < kAccumulators; ++a) hn::StoreU(sums[a], F32(), by_lane + a * lanes);
  return i;
}

void add(const base::Bf16* gradient, const base::Bf16* residual, float scale, float decay,
         float* out, float* squares, size_t n) {
  for (size_t first = 0; first < n; first += kMeanSquareElements) {
    const size_t count = std::min(kMeanSquareElements, n - first);
    float by_lane[kMeanSquareLanes];
    size_t i = residual == nullptr ? add_group<false>(gradient + first, nullptr, scale, decay,
                                                      out + first, by_lane, count)
                                   : add_group<true>(gradient + first, residual + first, scale,
                                                     decay, out + first, by_lane, count);
    for (size_t l = 0; i < count; ++i, ++l) {
      const float scaled = scale * base::to_f32(gradient[first + i]);
      by_lane[l] += scaled * scaled;
      out[first + i] =
          residual == nullptr ? scaled : scaled + decay * base::to_f32(residual[first + i]);
    }
    if (squares == nullptr) continue;
    for (size_t half = kMeanSquareLanes / 2; half > 0; half /= 2) {
      for (size_t l = 0; l < half; ++l) by_lane[l] += by_lane[l + half];
    }
    squares[first / kMeanSquareElements] = by_lane[0] / static_cast<float>(count);
  }
}

FeedbackKernels feedback_kernels() { return {.add = add}; }

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
HWY_AFTER_NAMESPACE();
