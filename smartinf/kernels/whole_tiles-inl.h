// All stages of an update at once, tile by tile, without a pass over memory between them.
// Part of tile_kernels_simd.cc, which includes it once for every instruction set.
#if defined(SMARTINF_KERNELS_WHOLE_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SMARTINF_KERNELS_WHOLE_TILES_INL_H_
#undef SMARTINF_KERNELS_WHOLE_TILES_INL_H_
#else
#define SMARTINF_KERNELS_WHOLE_TILES_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "smartinf/kernels/casts-inl.h"
#include "smartinf/kernels/q8-inl.h"
#include "smartinf/kernels/rules-inl.h"
#include "smartinf/kernels/tile_kernels_simd.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
template <DataType kGradient>
HWY_INLINE VF load_gradient(const void* gradient, size_t i) {
  if constexpr (kGradient == DataType::kF32) {
    return hn::LoadU(F32(), static_cast<const float*>(gradient) + i);
  } else if constexpr (kGradient == DataType::kBf16) {
    return load_bf16(static_cast<const uint16_t*>(gradient) + i);
  } else {
    return load_f16(static_cast<const uint16_t*>(gradient) + i);
  }
}

// How far ahead memory is asked for what an update reads and writes: the processor's own
// prefetching stops at each page's end.
constexpr size_t kAheadElements = 2048;
constexpr size_t kPrefetchElements = 64;  // at once: at least a line of every plane, in any format
static_assert(kTileElements % kPrefetchElements == 0);

// Of one plane, `width` bytes an element. Addresses beyond its end do no harm.
HWY_INLINE void prefetch(const void* plane, size_t element, size_t width) {
  constexpr size_t kLineBytes = 64;
  const auto* line = static_cast<const char*>(plane) + (element + kAheadElements) * width;
  for (size_t i = 0; i < kPrefetchElements * width; i += kLineBytes) hwy::Prefetch(line + i);
}

/// What all tiles of a call share. kGradient: the type of the gradients.
template <typename Rule, DataType kGradient>
class TileStep {
 public:
  TileStep(const StepScalars& s, const WholeTiles& tiles)
      : t_(tiles), rule_(s), scale_(gradient_scale(s)) {}

  /// Reads master weight and gradient of the elements from `i` on, applies the rule to them and to
  /// the momentum and variance in `e`, and writes the master weight. Where anything becomes NaN so
  /// does `nan_probe`; the caller makes it canonical.
  HWY_INLINE void vector(size_t i, StateVectors& e, VF& nan_probe) const {
    e.master = hn::LoadU(F32(), t_.master + i);
    if constexpr (Rule::kSquares) e.square = hn::LoadU(F32(), t_.squares + i);
    rule_.update(hn::Mul(load_gradient<kGradient>(t_.gradient, i), scale_), e);
    nan_probe = hn::Add(nan_probe, rule_.nan_probe(e));
    hn::StoreU(e.master, F32(), t_.master + i);
  }

  /// Asks for what elements kAheadElements after `i` need; `width`: bytes of a momentum.
  HWY_INLINE void prefetch_ahead(size_t i, size_t width) const {
    prefetch(t_.master, i, sizeof(float));
    prefetch(t_.gradient, i, base::data_type_bytes(kGradient));
    if constexpr (Rule::kMomentum) prefetch(t_.momentum, i, width);
    if constexpr (Rule::kVariance) prefetch(t_.variance, i, width);
    if (t_.weights != nullptr) prefetch(t_.weights, i, sizeof(uint16_t));
  }

  /// Weights out of elements whose master weights are done, and still in the first-level cache.
  HWY_INLINE void weights(size_t first, size_t count = kTileElements) const {
    const F32 f32;
    const size_t lanes = hn::Lanes(f32);
    const float* master = t_.master + first;
    if (t_.weights == nullptr) return;
    if (t_.weights_type != DataType::kBf16) {
      narrow(master,
             static_cast<std::byte*>(t_.weights) + first * base::data_type_bytes(t_.weights_type),
             t_.weights_type, count);
      return;
    }
    auto* out = static_cast<uint16_t*>(t_.weights) + first;
    for (size_t i = 0; i < count; i += 2 * lanes) {
      // Every NaN is canonical by now.
      store_upper_halves(round_bf16_nearest(hn::LoadU(f32, master + i)),
                         round_bf16_nearest(hn::LoadU(f32, master + i + lanes)), out + i);
    }
  }

 private:
  const WholeTiles t_;  // a copy, which stores through the planes cannot change
  const Rule rule_;
  const VF scale_;
};

template <typename Rule, DataType kGradient>
void update_whole_f32(const StepScalars& s, const WholeTiles& t) {
  const F32 f32;
  const TileStep<Rule, kGradient> step(s, t);
  auto* momentum = reinterpret_cast<float*>(t.momentum);
  auto* variance = reinterpret_cast<float*>(t.variance);
  for (size_t first = 0; first < t.count * kTileElements; first += kTileElements) {
    VF nan_probe = hn::Zero(f32);
    for (size_t i = first; i < first + kTileElements; i += hn::Lanes(f32)) {
      if (i % kPrefetchElements == 0) step.prefetch_ahead(i, sizeof(float));
      StateVectors e = zero_state();
      if constexpr (Rule::kMomentum) e.momentum = hn::LoadU(f32, momentum + i);
      if constexpr (Rule::kVariance) e.variance = hn::LoadU(f32, variance + i);
      step.vector(i, e, nan_probe);
      if constexpr (Rule::kMomentum) hn::StoreU(e.momentum, f32, momentum + i);
      if constexpr (Rule::kVariance) hn::StoreU(e.variance, f32, variance + i);
    }
    if (HWY_UNLIKELY(any_nan(nan_probe))) {
      canonicalize(t.master + first, kTileElements);
      if constexpr (Rule::kMomentum) canonicalize(momentum + first, kTileElements);
      if constexpr (Rule::kVariance) canonicalize(variance + first, kTileElements);
    }
    step.weights(first);
  }
}

template <typename Rule, DataType kGradient>
void update_whole_bf16(const StepScalars& s, const WholeTiles& t) {
  const size_t lanes = hn::Lanes(F32());
  const TileStep<Rule, kGradient> step(s, t);
  auto* momentum = reinterpret_cast<uint16_t*>(t.momentum);
  auto* variance = reinterpret_cast<uint16_t*>(t.variance);
  const auto load = [&](size_t i) {
    StateVectors e = zero_state();
    if constexpr (Rule::kMomentum) e.momentum = load_bf16(momentum + i);
    if constexpr (Rule::kVariance) e.variance = load_bf16(variance + i);
    return e;
  };
  const uint64_t step_seed = rounding_seed(s.seed, s.step);
  const size_t elements = t.count * kTileElements;
  for (size_t first = 0; first < elements; first += kTileElements) {
    const RoundingKey key = rounding_key(step_seed, t.element + first);
    RandomVectors momentum_random(key.momentum, lanes);
    RandomVectors variance_random(key.variance, lanes);
    for (size_t i = first; i < first + kTileElements; i += 2 * lanes) {
      if (i % kPrefetchElements == 0) step.prefetch_ahead(i, sizeof(uint16_t));
      StateVectors a = load(i);
      StateVectors b = load(i + lanes);
      VF nan_probe = hn::Zero(F32());
      step.vector(i, a, nan_probe);
      step.vector(i + lanes, b, nan_probe);
      if (HWY_UNLIKELY(any_nan(nan_probe))) {
        canonicalize(t.master + i, 2 * lanes);
        a.momentum = canonical_nan(a.momentum);
        b.momentum = canonical_nan(b.momentum);
        a.variance = canonical_nan(a.variance);
        b.variance = canonical_nan(b.variance);
      }
      if constexpr (Rule::kMomentum) {
        const VU lower = round_bf16_random(a.momentum, momentum_random.next());
        const VU upper = round_bf16_random(b.momentum, momentum_random.next());
        store_upper_halves(lower, upper, momentum + i);
      }
      if constexpr (Rule::kVariance) {
        const VU lower = round_bf16_random(a.variance, variance_random.next());
        const VU upper = round_bf16_random(b.variance, variance_random.next());
        store_upper_halves(lower, upper, variance + i);
      }
    }
    step.weights(first);
  }
}

/// Momenta and variances in q8. A tile's scales are known only after its last element, so its codes
/// and weights out are written while the next tile is updated: dividing and rooting of one hide the
/// encoding of the other.
template <typename Rule, DataType kGradient>
class Q8Tiles {
 public:
  Q8Tiles(const StepScalars& s, const WholeTiles& tiles)
      : t_(tiles), step_(s, tiles), step_seed_(rounding_seed(s.seed, s.step)) {}

  void run() {
    bool behind = false;  // whether the codes of the tile before are still to be written
    for (size_t tile = 0; tile < t_.count; ++tile) {
      behind = behind ? update<true>(tile) : update<false>(tile);
    }
    if (behind) {
      if constexpr (Rule::kMomentum) momentum_encoder_.all();
      if constexpr (Rule::kVariance) root_encoder_.all();
      step_.weights((t_.count - 1) * kTileElements);
    }
  }

 private:
  /// Returns whether the tile's codes and weights are left to the next.
  template <bool kBehind>
  HWY_INLINE bool update(size_t tile) {
    const size_t lanes = hn::Lanes(F32());
    const size_t first = tile * kTileElements;
    GroupValues& momenta = momenta_[tile % 2];
    GroupValues& roots = roots_[tile % 2];
    uint8_t* momentum_codes = nullptr;
    uint8_t* variance_codes = nullptr;
    VF momentum_step = hn::Zero(F32());
    VF variance_step = hn::Zero(F32());
    if constexpr (Rule::kMomentum) {
      momentum_codes = reinterpret_cast<uint8_t*>(t_.momentum) + first;
      momentum_step = set(t_.momentum_steps[tile]);
    }
    if constexpr (Rule::kVariance) {
      variance_codes = reinterpret_cast<uint8_t*>(t_.variance) + first;
      variance_step = set(t_.variance_steps[tile]);
    }
    auto momentum_encoder = momentum_encoder_;
    auto root_encoder = root_encoder_;
    VF nan_probe = hn::Zero(F32());
    VI momentum_largest = hn::Zero(I32());
    VI root_largest = hn::Zero(I32());
    for (size_t word = 0; word < kCodeWords; word += lanes) {
      if (4 * word % kPrefetchElements == 0)
        step_.prefetch_ahead(first + 4 * word, sizeof(uint8_t));
      VU momentum_words = hn::Zero(U32());
      VU variance_words = hn::Zero(U32());
      if constexpr (Rule::kMomentum) {
        momentum_words = hn::LoadU(U32(), reinterpret_cast<uint32_t*>(momentum_codes) + word);
      }
      if constexpr (Rule::kVariance) {
        variance_words = hn::LoadU(U32(), reinterpret_cast<uint32_t*>(variance_codes) + word);
      }
      const auto quarter = [&](auto byte) HWY_ATTR {
        const size_t lane = byte * kCodeWords + word;
        StateVectors e = zero_state();
        if constexpr (Rule::kMomentum) {
          e.momentum = decode<PlaneKind::kMomentum, byte>(momentum_words, momentum_step);
        }
        if constexpr (Rule::kVariance) {
          e.variance = decode<PlaneKind::kVariance, byte>(variance_words, variance_step);
        }
        step_.vector(first + lane, e, nan_probe);
        if constexpr (Rule::kMomentum) {
          hn::Store(e.momentum, F32(), momenta.values + lane);
          momentum_largest = larger_magnitude(momentum_largest, e.momentum);
        }
        if constexpr (Rule::kVariance) {
          hn::Store(e.root, F32(), roots.values + lane);
          root_largest = hn::Max(root_largest, hn::BitCast(I32(), e.root));
        }
      };
      quarter(std::integral_constant<int, 0>());
      quarter(std::integral_constant<int, 1>());
      if constexpr (kBehind && Rule::kMomentum) momentum_encoder.column(word);
      quarter(std::integral_constant<int, 2>());
      quarter(std::integral_constant<int, 3>());
      if constexpr (kBehind && Rule::kVariance) root_encoder.column(word);
      if constexpr (kBehind) step_.weights(first - kTileElements + 4 * word, 4 * lanes);
    }
    if constexpr (kBehind && Rule::kMomentum) momentum_encoder.finish();
    if constexpr (kBehind && Rule::kVariance) root_encoder.finish();
    if (HWY_UNLIKELY(any_nan(nan_probe))) {
      canonicalize(t_.master + first, kTileElements);
      if constexpr (Rule::kMomentum) momentum_largest = largest_of(momenta);
      if constexpr (Rule::kVariance) root_largest = largest_of(roots);
    }
    const RoundingKey key = rounding_key(step_seed_, t_.element + first);
    bool encodes = true;  // both planes
    if constexpr (Rule::kMomentum) {
      const float step = step_of<PlaneKind::kMomentum>(momentum_largest);
      t_.momentum_steps[tile] = step;
      momentum_encoder_ =
          GroupEncoder<PlaneKind::kMomentum>(momenta, step, key.momentum, momentum_codes);
      encodes = encodes && step > 0;
    }
    if constexpr (Rule::kVariance) {
      const float step = step_of<PlaneKind::kVariance>(root_largest);
      t_.variance_steps[tile] = step;
      root_encoder_ = GroupEncoder<PlaneKind::kVariance>(roots, step, key.variance, variance_codes);
      encodes = encodes && step > 0;
    }
    if (HWY_LIKELY(encodes)) return true;
    if constexpr (Rule::kMomentum) {
      encode_group<PlaneKind::kMomentum>(momenta, momentum_largest, key.momentum, momentum_codes);
    }
    if constexpr (Rule::kVariance) {
      encode_group<PlaneKind::kVariance>(roots, root_largest, key.variance, variance_codes);
    }
    step_.weights(first);
    return false;
  }

  const WholeTiles t_;
  const TileStep<Rule, kGradient> step_;
  const uint64_t step_seed_;
  GroupValues momenta_[2];  // by turns: of the tile at hand, and of the one before it
  GroupValues roots_[2];
  GroupEncoder<PlaneKind::kMomentum> momentum_encoder_;
  GroupEncoder<PlaneKind::kVariance> root_encoder_;
};

template <typename Rule, DataType kGradient>
void update_whole(base::StateFormat format, const StepScalars& s, const WholeTiles& t) {
  switch (format) {
    case base::StateFormat::kF32:
      update_whole_f32<Rule, kGradient>(s, t);
      return;
    case base::StateFormat::kBf16:
      update_whole_bf16<Rule, kGradient>(s, t);
      return;
    case base::StateFormat::kQ8:
      Q8Tiles<Rule, kGradient>(s, t).run();
      return;
  }
}

void update_whole_tiles(base::StateFormat format, const StepScalars& s, const WholeTiles& t) {
  with_rule(s, t.squares != nullptr, [&]<typename Rule>() {
    switch (t.gradient_type) {
      case DataType::kF32:
        update_whole<Rule, DataType::kF32>(format, s, t);
        return;
      case DataType::kBf16:
        update_whole<Rule, DataType::kBf16>(format, s, t);
        return;
      case DataType::kF16:
        update_whole<Rule, DataType::kF16>(format, s, t);
        return;
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
