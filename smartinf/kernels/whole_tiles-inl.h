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
#include <iterator>
#include <type_traits>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "smartinf/kernels/casts-inl.h"
#include "smartinf/kernels/codecs-inl.h"
#include "smartinf/kernels/rules-inl.h"
#include "smartinf/kernels/tile_kernels_simd.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
// How far ahead memory is asked for what an update reads and writes: the processor's own
// prefetching stops at each page's end.
constexpr size_t kAheadElements = 2048;
constexpr size_t kPrefetchElements = 64;  // at once: at least a line of every plane, in any format
static_assert(kTileElements % kPrefetchElements == 0);

// Prefetches from one plane, `bits` an element. Addresses beyond its end do no harm.
HWY_INLINE void prefetch(const void* plane, size_t element, size_t bits) {
  constexpr size_t kLineBytes = 64;
  const auto* line = static_cast<const char*>(plane) + (element + kAheadElements) * bits / 8;
  for (size_t i = 0; i < kPrefetchElements * bits / 8; i += kLineBytes) hwy::Prefetch(line + i);
}

/// Values as f32 of planes that are something else. Master weights of two tiles by turns, until new
/// ones are rounded and stored; gradients in f16 of one.
struct WideTiles {
  alignas(64) float masters[2 * kTileElements];
  alignas(64) float gradients[kTileElements];
};

/// State that all tiles of a call share. kBf16: whether gradients are in bf16.
template <typename Rule, bool kBf16>
class TileStep {
 public:
  /// wide: not a part of this object, whose members stores to it cannot change then.
  TileStep(const StepScalars& s, const WholeTiles& tiles, WideTiles& wide)
      : t_(tiles),
        rule_(s),
        scale_(gradient_scale(s)),
        step_seed_(rounding_seed(s.seed, s.step)),
        masters_(in_place() ? reinterpret_cast<float*>(tiles.master) : wide.masters),
        masters_within_(in_place() ? ~size_t{0} : std::size(wide.masters) - 1),
        wide_gradients_(tiles.gradient_type == DataType::kF16 ? wide.gradients : nullptr) {}

  /// To be called before the elements of a tile.
  HWY_INLINE void begin(size_t first) const {
    if (HWY_UNLIKELY(!in_place() || wide_gradients_ != nullptr)) widen_tile(first);
  }

  /// Master weights from element `i` on: new ones, where their turn has been.
  HWY_INLINE float* masters(size_t i) const { return masters_ + (i & masters_within_); }

  /// Reads master weight and gradient of the elements from `i` on, applies the rule to them and to
  /// the momentum and variance in `e`, and writes the new master weight to masters(). Where
  /// anything becomes NaN so does `nan_probe`; the caller makes it canonical.
  HWY_INLINE void vector(size_t i, StateVectors& e, VF& nan_probe) const {
    e.master = hn::LoadU(F32(), masters(i));
    if constexpr (Rule::kSquares) e.square = hn::LoadU(F32(), t_.squares + i);
    rule_.update(hn::Mul(load_gradient(i), scale_), e);
    nan_probe = hn::Add(nan_probe, rule_.nan_probe(e));
    hn::StoreU(e.master, F32(), masters(i));
  }

  /// Asks for what elements kAheadElements after `i` need; `bits`: of a momentum.
  HWY_INLINE void prefetch_ahead(size_t i, size_t bits) const {
    prefetch(t_.master, i, in_place() ? 32 : 16);
    if (t_.master_low != nullptr) prefetch(t_.master_low, i, 8);
    prefetch(t_.gradient, i, kBf16 || wide_gradients_ != nullptr ? 16 : 32);
    if constexpr (Rule::kMomentum) prefetch(t_.momentum, i, bits);
    if constexpr (Rule::kVariance) prefetch(t_.variance, i, bits);
    if (t_.weights != nullptr) prefetch(t_.weights, i, 16);
  }

  /// Random numbers of the master weights of the tile that begins at element `first`.
  HWY_INLINE RandomVectors master_random(size_t first) const {
    const Progression numbers =
        in_place() ? Progression{} : master_rounding(step_seed_, t_.element + first);
    return RandomVectors(numbers, hn::Lanes(F32()));
  }

  /// Rounds and stores new master weights that are not f32, and writes weights out, while they are in
  /// the first-level cache. Elements of one tile, each once and in order, as `random` is taken from.
  HWY_INLINE void finish(size_t first, size_t count, RandomVectors& random) const {
    if (HWY_UNLIKELY(!in_place())) return finish_rounded(first, count, random);
    if (t_.weights == nullptr) return;
    if (t_.weights_type != DataType::kBf16) return finish_narrowed(first, count);
    const float* master = masters(first);
    for (size_t i = 0; i < count; i += 2 * hn::Lanes(F32())) {
      store_weights(hn::LoadU(F32(), master + i), hn::LoadU(F32(), master + i + hn::Lanes(F32())),
                    first + i);
    }
  }
  HWY_INLINE void finish(size_t first) const {
    RandomVectors random = master_random(first);
    finish(first, kTileElements, random);
  }

 private:
  HWY_INLINE bool in_place() const { return t_.master_format == base::MasterFormat::kF32; }
  HWY_INLINE VF load_gradient(size_t i) const {
    if constexpr (kBf16) return load_bf16(static_cast<const uint16_t*>(t_.gradient) + i);
    return hn::LoadU(F32(), wide_gradients_ != nullptr
                                ? wide_gradients_ + i % kTileElements
                                : static_cast<const float*>(t_.gradient) + i);
  }

  HWY_NOINLINE void widen_tile(size_t first) const {
    const auto* halves = reinterpret_cast<const uint16_t*>(t_.master) + first;
    if (t_.master_format == base::MasterFormat::kM24) {
      decode_m24(halves, t_.master_low + first, masters(first), kTileElements);
    } else if (t_.master_format == base::MasterFormat::kBf16) {
      widen(halves, DataType::kBf16, masters(first), kTileElements);
    }
    if (wide_gradients_ != nullptr) {
      widen(static_cast<const uint16_t*>(t_.gradient) + first, DataType::kF16, wide_gradients_,
            kTileElements);
    }
  }
  HWY_NOINLINE void finish_narrowed(size_t first, size_t count) const {
    narrow(masters(first),
           static_cast<std::byte*>(t_.weights) + first * base::data_type_bytes(t_.weights_type),
           t_.weights_type, count);
  }
  HWY_NOINLINE void finish_rounded(size_t first, size_t count, RandomVectors& random) const {
    if (t_.master_format == base::MasterFormat::kM24) {
      round_masters<kM24Cut>(first, count, random);
    } else {
      round_masters<16>(first, count, random);
    }
    const bool done = t_.weights == nullptr || t_.weights_type == DataType::kBf16;
    if (!done) finish_narrowed(first, count);
  }

  /// bf16 weights of two vectors. Every NaN is canonical by now.
  HWY_INLINE void store_weights(VF first, VF second, size_t i) const {
    store_upper_halves(round_bf16_nearest(first), round_bf16_nearest(second),
                       static_cast<uint16_t*>(t_.weights) + i);
  }

  /// kCut: lower bits that are left out. Weights in bf16 are made here, others of what stays in
  /// masters().
  template <int kCut>
  HWY_INLINE void round_masters(size_t first, size_t count, RandomVectors& random) const {
    const size_t lanes = hn::Lanes(F32());
    const bool weights = t_.weights != nullptr && t_.weights_type == DataType::kBf16;
    float* master = masters(first);
    auto* upper = reinterpret_cast<uint16_t*>(t_.master) + first;
    const auto rounded = [&](const float* value) HWY_ATTR {
      return hn::Add(bits_of(hn::LoadU(F32(), value)), hn::ShiftRight<32 - kCut>(random.next()));
    };
    for (size_t i = 0; i < count; i += 2 * lanes) {
      const VU a = rounded(master + i);
      const VU b = rounded(master + i + lanes);
      if constexpr (kCut == kM24Cut) {
        store_m24(a, b, upper + i, t_.master_low + first + i);
      } else {
        store_upper_halves(a, b, upper + i);
      }
      const VF kept_a = float_of(hn::And(a, set_bits(~0u << kCut)));
      const VF kept_b = float_of(hn::And(b, set_bits(~0u << kCut)));
      if (weights) {
        store_weights(kept_a, kept_b, first + i);
      } else {
        hn::StoreU(kept_a, F32(), master + i);
        hn::StoreU(kept_b, F32(), master + i + lanes);
      }
    }
  }

  const WholeTiles t_;  // a copy, which stores through the planes cannot change
  const Rule rule_;
  const VF scale_;
  const uint64_t step_seed_;
  float* const masters_;
  const size_t masters_within_;  // mask of a place there
  float* const wide_gradients_;  // or null
};

template <typename Rule, bool kBf16>
void update_whole_f32(const StepScalars& s, const WholeTiles& t) {
  const F32 f32;
  WideTiles wide;
  const TileStep<Rule, kBf16> step(s, t, wide);
  auto* momentum = reinterpret_cast<float*>(t.momentum);
  auto* variance = reinterpret_cast<float*>(t.variance);
  for (size_t first = 0; first < t.count * kTileElements; first += kTileElements) {
    step.begin(first);
    VF nan_probe = hn::Zero(f32);
    for (size_t i = first; i < first + kTileElements; i += hn::Lanes(f32)) {
      if (i % kPrefetchElements == 0) step.prefetch_ahead(i, 32);
      StateVectors e = zero_state();
      if constexpr (Rule::kMomentum) e.momentum = hn::LoadU(f32, momentum + i);
      if constexpr (Rule::kVariance) e.variance = hn::LoadU(f32, variance + i);
      step.vector(i, e, nan_probe);
      if constexpr (Rule::kMomentum) hn::StoreU(e.momentum, f32, momentum + i);
      if constexpr (Rule::kVariance) hn::StoreU(e.variance, f32, variance + i);
    }
    if (HWY_UNLIKELY(any_nan(nan_probe))) {
      canonicalize(step.masters(first), kTileElements);
      if constexpr (Rule::kMomentum) canonicalize(momentum + first, kTileElements);
      if constexpr (Rule::kVariance) canonicalize(variance + first, kTileElements);
    }
    step.finish(first);
  }
}

template <typename Rule, bool kBf16>
void update_whole_bf16(const StepScalars& s, const WholeTiles& t) {
  const size_t lanes = hn::Lanes(F32());
  WideTiles wide;
  const TileStep<Rule, kBf16> step(s, t, wide);
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
    step.begin(first);
    const RoundingKey key = rounding_key(step_seed, t.element + first);
    RandomVectors momentum_random(key.momentum, lanes);
    RandomVectors variance_random(key.variance, lanes);
    for (size_t i = first; i < first + kTileElements; i += 2 * lanes) {
      if (i % kPrefetchElements == 0) step.prefetch_ahead(i, 16);
      StateVectors a = load(i);
      StateVectors b = load(i + lanes);
      VF nan_probe = hn::Zero(F32());
      step.vector(i, a, nan_probe);
      step.vector(i + lanes, b, nan_probe);
      if (HWY_UNLIKELY(any_nan(nan_probe))) {
        canonicalize(step.masters(i), 2 * lanes);
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
    step.finish(first);
  }
}

/// Momenta and variances in q8 or q4, codes of kBits. A tile's scales are known only after its last
/// element, so its codes and weights out are written while the next tile is updated: dividing and
/// rooting of one hide the encoding of the other.
template <int kBits, typename Rule, bool kBf16>
class CodedTiles {
 public:
  CodedTiles(const StepScalars& s, const WholeTiles& tiles)
      : t_(tiles), step_(s, tiles, wide_), step_seed_(rounding_seed(s.seed, s.step)) {}

  void run() {
    bool behind = false;  // whether the codes of the tile before are still to be written
    for (size_t tile = 0; tile < t_.count; ++tile) {
      behind = behind ? update<true>(tile) : update<false>(tile);
    }
    if (behind) {
      if constexpr (Rule::kMomentum) momentum_encoder_.all();
      if constexpr (Rule::kVariance) root_encoder_.all();
      step_.finish((t_.count - 1) * kTileElements, kTileElements, master_random_);
    }
  }

 private:
  static constexpr size_t kWords = code_words(kBits);
  static constexpr size_t kCodesPerWord = 32 / kBits;

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
      tile.momentum_codes = reinterpret_cast<uint8_t*>(t_.momentum) + tile.first * kBits / 8;
      tile.momentum_step = set(t_.momentum_steps[index]);
    }
    if constexpr (Rule::kVariance) {
      tile.variance_codes = reinterpret_cast<uint8_t*>(t_.variance) + tile.first * kBits / 8;
      tile.variance_step = set(t_.variance_steps[index]);
    }
    return tile;
  }

  /// Updates the elements that have codes kIndex of the words, of which codes 0 have the elements
  /// from `lane` of the tile on.
  template <int kIndex>
  HWY_INLINE void elements(size_t lane, VU momentum_words, VU variance_words, Tile& tile) {
    lane += kIndex * kWords;
    StateVectors e = zero_state();
    if constexpr (Rule::kMomentum) {
      e.momentum = decode<kBits, PlaneKind::kMomentum, kIndex>(momentum_words, tile.momentum_step);
    }
    if constexpr (Rule::kVariance) {
      e.variance = decode<kBits, PlaneKind::kVariance, kIndex>(variance_words, tile.variance_step);
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
    step_.begin(tile.first);
    auto momentum_encoder = momentum_encoder_;
    auto root_encoder = root_encoder_;
    RandomVectors master_random = master_random_;
    for (size_t word = 0; word < kWords; word += lanes) {
      const size_t done = kCodesPerWord * word;
      if (done % kPrefetchElements == 0) step_.prefetch_ahead(tile.first + done, kBits);
      VU momentum_words = hn::Zero(U32());
      VU variance_words = hn::Zero(U32());
      if constexpr (Rule::kMomentum) {
        momentum_words = hn::LoadU(U32(), reinterpret_cast<uint32_t*>(tile.momentum_codes) + word);
      }
      if constexpr (Rule::kVariance) {
        variance_words = hn::LoadU(U32(), reinterpret_cast<uint32_t*>(tile.variance_codes) + word);
      }
      for (size_t codes = 0; codes < kCodesPerWord;
           codes += 4) {  // a loop, so that it is compiled once
        const size_t lane = kWords * codes + word;
        elements<0>(lane, momentum_words, variance_words, tile);
        elements<1>(lane, momentum_words, variance_words, tile);
        elements<2>(lane, momentum_words, variance_words, tile);
        elements<3>(lane, momentum_words, variance_words, tile);
        momentum_words = hn::ShiftRight<16>(momentum_words);
        variance_words = hn::ShiftRight<16>(variance_words);
      }
      if constexpr (kBehind && Rule::kMomentum) momentum_encoder.column(word);
      if constexpr (kBehind && Rule::kVariance) root_encoder.column(word);
      if constexpr (kBehind) {
        step_.finish(tile.first - kTileElements + done, kCodesPerWord * lanes, master_random);
      }
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
      canonicalize(step_.masters(tile.first), kTileElements);
      if constexpr (Rule::kMomentum) tile.momentum_largest = largest_of(momenta);
      if constexpr (Rule::kVariance) tile.root_largest = largest_of(roots);
    }
    const RoundingKey key = rounding_key(step_seed_, t_.element + tile.first);
    bool encodes = true;  // both planes
    if constexpr (Rule::kMomentum) {
      const float step = step_of<kBits, PlaneKind::kMomentum>(tile.momentum_largest);
      t_.momentum_steps[tile.index] = step;
      momentum_encoder_ = GroupEncoder<kBits, PlaneKind::kMomentum>(momenta, step, key.momentum,
                                                                    tile.momentum_codes);
      encodes = encodes && step > 0;
    }
    if constexpr (Rule::kVariance) {
      const float step = step_of<kBits, PlaneKind::kVariance>(tile.root_largest);
      t_.variance_steps[tile.index] = step;
      root_encoder_ =
          GroupEncoder<kBits, PlaneKind::kVariance>(roots, step, key.variance, tile.variance_codes);
      encodes = encodes && step > 0;
    }
    master_random_ = step_.master_random(tile.first);
    if (HWY_LIKELY(encodes)) return true;
    if constexpr (Rule::kMomentum) {
      encode_group<kBits, PlaneKind::kMomentum>(momenta, tile.momentum_largest, key.momentum,
                                                tile.momentum_codes);
    }
    if constexpr (Rule::kVariance) {
      encode_group<kBits, PlaneKind::kVariance>(roots, tile.root_largest, key.variance,
                                                tile.variance_codes);
    }
    step_.finish(tile.first, kTileElements, master_random_);
    return false;
  }

  const WholeTiles t_;
  const TileStep<Rule, kBf16> step_;
  const uint64_t step_seed_;
  WideTiles wide_;
  GroupValues momenta_[2];  // by turns: of the tile at hand, and of the one before it
  GroupValues roots_[2];
  GroupEncoder<kBits, PlaneKind::kMomentum> momentum_encoder_;
  GroupEncoder<kBits, PlaneKind::kVariance> root_encoder_;
  RandomVectors master_random_;
};

template <typename Rule, bool kBf16>
void update_whole(base::MomentFormat moments, const StepScalars& s, const WholeTiles& t) {
  switch (moments) {
    case base::MomentFormat::kF32:
      update_whole_f32<Rule, kBf16>(s, t);
      return;
    case base::MomentFormat::kBf16:
      update_whole_bf16<Rule, kBf16>(s, t);
      return;
    case base::MomentFormat::kQ8:
      CodedTiles<8, Rule, kBf16>(s, t).run();
      return;
    case base::MomentFormat::kQ4:
      CodedTiles<4, Rule, kBf16>(s, t).run();
      return;
  }
}

void update_whole_tiles(base::MomentFormat moments, const StepScalars& s, const WholeTiles& t) {
  with_rule(s, t.squares != nullptr, [&]<typename Rule>() {
    if (t.gradient_type == DataType::kBf16) {
      update_whole<Rule, true>(moments, s, t);
    } else {
      update_whole<Rule, false>(moments, s, t);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
