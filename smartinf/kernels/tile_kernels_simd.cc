// Every tile stage as one Highway body, compiled once for each instruction set; most of it is in
// casts-inl.h, rules-inl.h, codecs-inl.h and whole_tiles-inl.h. The operations and their order are
// those of rules.h and state_codec.h, and no product is fused with a sum, so that all sets give the
// bits of the scalar truth. Elements that do not fill a vector go through the scalar truth itself.
#include "smartinf/kernels/tile_kernels_simd.h"

#include "smartinf/kernels/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "smartinf/kernels/tile_kernels_simd.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

#include "smartinf/kernels/casts-inl.h"
#include "smartinf/kernels/whole_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // a baseline that Highway may compile, and that never runs
namespace smartinf::kernels {
namespace HWY_NAMESPACE {

void multiply(const float* in, float by, float* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  const VF factor = set(by);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(F32(), in + i), factor), F32(), out + i);
  }
  for (; i < n; ++i) out[i] = in[i] * by;
}

double leaf_squares(const void* in, DataType type, size_t n) {
  const F64 f64;
  const hn::Rebind<float, F64> narrow_f32;
  constexpr size_t kAccumulators = kNormLanes / hn::MaxLanes(f64);
  const size_t lanes = hn::Lanes(f64);
  alignas(64) float wide[kNormLeafElements];
  const float* values = static_cast<const float*>(in);
  if (type != DataType::kF32) {
    widen(in, type, wide, n);
    values = wide;
  }
  hn::Vec<F64> sums[kAccumulators];
  for (auto& sum : sums) sum = hn::Zero(f64);
  size_t i = 0;
  for (; i + kNormLanes <= n; i += kNormLanes) {
    for (size_t a = 0; a < kAccumulators; ++a) {
      const auto value = hn::PromoteTo(f64, hn::LoadU(narrow_f32, values + i + a * lanes));
      sums[a] = hn::Add(sums[a], hn::Mul(value, value));
    }
  }
  alignas(64) double by_lane[kNormLanes];
  for (size_t a = 0; a < kAccumulators; ++a) hn::Store(sums[a], f64, by_lane + a * lanes);
  for (size_t l = 0; i < n; ++i, ++l) {
    const double value = static_cast<double>(values[i]);
    by_lane[l] += value * value;
  }
  for (size_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) by_lane[l] += by_lane[l + half];
  }
  return by_lane[0];
}

SelectionKernels selection_kernels();  // selection_simd.cc
FeedbackKernels feedback_kernels();    // feedback_simd.cc
SignKernels sign_kernels();            // signs_simd.cc
AttentionKernels attention_kernels();  // attention_simd.cc
RowProductKernels row_product_kernels();  // row_product_simd.cc

TileKernels tiles() {
  return {.isa = hwy::TargetName(HWY_TARGET),
          .widen = widen,
          .narrow = narrow,
          .update = update,
          .update_whole_tiles = update_whole_tiles,
          .encode_bf16 = encode_bf16,
          .encode_m24 = encode_m24,
          .decode_m24 = decode_m24,
          .encode_codes = encode_codes,
          .decode_codes = decode_codes,
          .multiply = multiply,
          .leaf_squares = leaf_squares,
          .selection = selection_kernels(),
          .feedback = feedback_kernels(),
          .signs = sign_kernels(),
          .attention = attention_kernels(),
          .row_product = row_product_kernels()};
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace smartinf::kernels {

// Slowest first. A target that this build does not compile, or this processor lacks, is left out.
std::vector<TileKernels> simd_tiles() {
#if HWY_TARGETS == HWY_STATIC_TARGET
  const int64_t supported = HWY_TARGETS;  // nothing to ask the processor
#else
  const int64_t supported = hwy::SupportedTargets();
#endif
  std::vector<TileKernels> found;
#if HWY_TARGETS & HWY_NEON
  if ((supported & HWY_NEON) != 0) found.push_back(N_NEON::tiles());
#endif
#if HWY_TARGETS & HWY_SSE2
  if ((supported & HWY_SSE2) != 0) found.push_back(N_SSE2::tiles());
#endif
#if HWY_TARGETS & HWY_SSE4
  if ((supported & HWY_SSE4) != 0) found.push_back(N_SSE4::tiles());
#endif
#if HWY_TARGETS & HWY_AVX2
  if ((supported & HWY_AVX2) != 0) found.push_back(N_AVX2::tiles());
#endif
#if HWY_TARGETS & HWY_AVX3
  if ((supported & HWY_AVX3) != 0) found.push_back(N_AVX3::tiles());
#endif
  return found;
}

}  // namespace smartinf::kernels
#endif  // HWY_ONCE
