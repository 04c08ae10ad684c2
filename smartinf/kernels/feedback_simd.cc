// Error feedback as one Highway body for every instruction set.
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

// A whole group. The sums by lane go to `by_lane`: [kMeanSquareLanes].
template <bool kResidual>
HWY_INLINE void add_group(const base::Bf16* gradient, const base::Bf16* residual, float scale,
                          float decay, float* out, float* by_lane) {
  constexpr size_t kAccumulators = kMeanSquareLanes / hn::MaxLanes(F32());
  const size_t lanes = hn::Lanes(F32());
  const auto scales = hn::Set(F32(), scale);
  const auto decays = hn::Set(F32(), decay);
  hn::Vec<F32> sums[kAccumulators];
  for (auto& sum : sums) sum = hn::Zero(F32());
  for (size_t i = 0; i < kMeanSquareElements; i += kMeanSquareLanes) {
    for (size_t a = 0; a < kAccumulators; ++a) {
      const size_t at = i + a * lanes;
      auto value = hn::Mul(scales, widened(gradient + at));
      sums[a] = hn::Add(sums[a], hn::Mul(value, value));
      if (kResidual) value = hn::Add(value, hn::Mul(decays, widened(residual + at)));
      hn::StoreU(value, F32(), out + at);
    }
  }
  for (size_t a = 0; a < kAccumulators; ++a) hn::StoreU(sums[a], F32(), by_lane + a * lanes);
}

template <bool kResidual>
void add_groups(const base::Bf16* gradient, const base::Bf16* residual, float scale, float decay,
                float* out, float* squares, size_t n) {
  size_t i = 0;
  for (; i + kMeanSquareElements <= n; i += kMeanSquareElements) {
    float by_lane[kMeanSquareLanes];
    add_group<kResidual>(gradient + i, kResidual ? residual + i : nullptr, scale, decay, out + i,
                         by_lane);
    if (squares != nullptr) *squares++ = mean_square(by_lane, kMeanSquareElements);
  }
  if (i < n) {
    scalar_feedback().add(gradient + i, kResidual ? residual + i : nullptr, scale, decay, out + i,
                          squares, n - i);
  }
}

void add(const base::Bf16* gradient, const base::Bf16* residual, float scale, float decay,
         float* out, float* squares, size_t n) {
  (residual == nullptr ? add_groups<false> : add_groups<true>)(gradient, residual, scale, decay,
                                                               out, squares, n);
}

void ahead(const base::Bf16* residual, float rate, float limit, float* weights, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  const auto rates = hn::Set(F32(), rate);
  const auto most = hn::Set(F32(), limit);
  const auto least = hn::Set(F32(), -limit);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto step = hn::Min(hn::Max(hn::Mul(widened(residual + i), rates), least), most);
    hn::StoreU(hn::Sub(hn::LoadU(F32(), weights + i), step), F32(), weights + i);
  }
  scalar_feedback().ahead(residual + i, rate, limit, weights + i, n - i);
}

FeedbackKernels feedback_kernels() { return {.add = add, .ahead = ahead}; }

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
HWY_AFTER_NAMESPACE();
