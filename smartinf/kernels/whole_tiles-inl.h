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

// Prefetches from one plane, `width` bytes an element. Addresses beyond its end do no harm.
HWY_INLINE void prefetch(const void* plane, size_t element, size_t width) {
  constexpr size_t kLineBytes = 64;
  const auto* line = static_cast<const char*>(plane) + (element + kAheadElements) * width;
  for (size_t i = 0; i < kPrefetchElements * width; i += kLineBytes) hwy::Prefetch(line + i);
}

/// State that all tiles of a call share. kGradient: the type of the gradients.
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
  /// The tile at hand. What it has no plane for stays zero and unused.
  struct Tile {
    size_t index;
    size_t first;  // element
    uint8_t* momentum_codes = nullptr;
    uint8_t* variance_codes = nullptr;
    VF momentum_step = hn::Zero(F32());
    VF variance_step = hn::Zero(F32());
    VF nan_probe = hn::Zero(F32());
    VI momentum_largest = hn::Zero(I32());
    VI root_largest = hn::Zero(I32());
  };

  HWY_INLINE Tile begin(size_t index) const {
    Tile tile{.index = index, .first = index * kTileElements};
    if constexpr (Rule::kMomentum) {
      tile.momentum_codes = reinterpret_cast<uint8_t*>(t_.momentum) + tile.first;
      tile.momentum_step = set(t_.momentum_steps[index]);
    }
    if constexpr (Rule::kVariance) {
      tile.variance_codes = reinterpret_cast<uint8_t*>(t_.variance) + tile.first;
      tile.variance_step = set(t_.variance_steps[index]);
    }
    return tile;
  }

  /// Updates the elements whose codes are in byte kByte of the words.
  template <int kByte>
  HWY_INLINE void quarter(size_t word, VU momentum_words, VU variance_words, Tile& tile) {
    const size_t lane = kByte * kCodeWords + word;
    StateVectors e = zero_state();
    if constexpr (Rule::kMomentum) {
      e.momentum = decode<PlaneKind::kMomentum, kByte>(momentum_words, tile.momentum_step);
    }
    if constexpr (Rule::kVariance) {
      e.variance = decode<PlaneKind::kVariance, kByte>(variance_words, tile.variance_step);
    }
    step_.vector(tile.first + lane, e, tile.nan_probe);
    if constexpr (Rule::kMomentum) {
      hn::Store(e.momentum, F32(), momenta_[tile.index % 2].values + lane);
      tile.momentum_largest = larger_magnitude(tile.momentum_largest, e.momentum);
    }
    if constexpr (Rule::kVariance) {
      hn::Store(e.root, F32(), roots_[tile.index % 2].values + lane);
      tile.root_largest = hn::Max(tile.root_largest, hn::BitCast(I32(), e.root));
    }
  }

  /// Returns whether the tile's codes and weights are left to the next.
  template <bool kBehind>
  HWY_INLINE bool update(size_t index) {
    const size_t lanes = hn::Lanes(F32());
    Tile tile = begin(index);
    auto momentum_encoder = momentum_encoder_;
    auto root_encoder = root_encoder_;
    for (size_t word = 0; word < kCodeWords; word += lanes) {
      if (4 * word % kPrefetchElements == 0) {
        step_.prefetch_ahead(tile.first + 4 * word, sizeof(uint8_t));
      }
      VU momentum_words = hn::Zero(U32());
      VU variance_words = hn::Zero(U32());
      if constexpr (Rule::kMomentum) {
        momentum_words = hn::LoadU(U32(), reinterpret_cast<uint32_t*>(tile.momentum_codes) + word);
      }
      if constexpr (Rule::kVariance) {
        variance_words = hn::LoadU(U32(), reinterpret_cast<uint32_t*>(tile.variance_codes) + word);
      }
      quarter<0>(word, momentum_words, variance_words, tile);
      quarter<1>(word, momentum_words, variance_words, tile);
      if constexpr (kBehind && Rule::kMomentum) momentum_encoder.column(word);
      quarter<2>(word, momentum_words, variance_words, tile);
      quarter<3>(word, momentum_words, variance_words, tile);
      if constexpr (kBehind && Rule::kVariance) root_encoder.column(word);
      if constexpr (kBehind) step_.weights(tile.first - kTileElements + 4 * word, 4 * lanes);
    }
    if constexpr (kBehind && Rule::kMomentum) momentum_encoder.finish();
    if constexpr (kBehind && Rule::kVariance) root_encoder.finish();
    return finish(tile);
  }

  /// Knows the tile's scales: its codes can be written. Returns as update() does.
  HWY_INLINE bool finish(Tile& tile) {
    GroupValues& momenta = momenta_[tile.index % 2];
    GroupValues& roots = roots_[tile.index % 2];
    if (HWY_UNLIKELY(any_nan(tile.nan_probe))) {
      canonicalize(t_.master + tile.first, kTileElements);
      if constexpr (Rule::kMomentum) tile.momentum_largest = largest_of(momenta);
      if constexpr (Rule::kVariance) tile.root_largest = largest_of(roots);
    }
    const RoundingKey key = rounding_key(step_seed_, t_.element + tile.first);
    bool encodes = true;  // both planes
    if constexpr (Rule::kMomentum) {
      const float step = step_of<PlaneKind::kMomentum>(tile.momentum_largest);
      t_.momentum_steps[tile.index] = step;
      momentum_encoder_ =
          GroupEncoder<PlaneKind::kMomentum>(momenta, step, key.momentum, tile.momentum_codes);
      encodes = encodes && step > 0;
    }
    if constexpr (Rule::kVariance) {
      const float step = step_of<PlaneKind::kVariance>(tile.root_largest);
      t_.variance_steps[tile.index] = step;
      root_encoder_ =
          GroupEncoder<PlaneKind::kVariance>(roots, step, key.variance, tile.variance_codes);
      encodes = encodes && step > 0;
    }
    if (HWY_LIKELY(encodes)) return true;
    if constexpr (Rule::kMomentum) {
      encode_group<PlaneKind::kMomentum>(momenta, tile.momentum_largest, key.momentum,
                                         tile.momentum_codes);
    }
    if constexpr (Rule::kVariance) {
      encode_group<PlaneKind::kVariance>(roots, tile.root_largest, key.variance,
                                         tile.variance_codes);
    }
    step_.weights(tile.first);
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
