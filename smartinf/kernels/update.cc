#include "smartinf/kernels/update.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/pairwise_sum.h"

namespace smartinf::kernels {
namespace {

using base::DataType;
using base::Encoding;
using base::PlaneKind;

/// Bits of a code of a tile with a scale, or 0 where there are none.
constexpr int code_bits(Encoding encoding) {
  return encoding == Encoding::kQ8 ? 8 : encoding == Encoding::kQ4 ? 4 : 0;
}

/// One plane while its tiles pass by: f32 planes are worked on in place, others through `scratch`.
class PlaneTile {
 public:
  PlaneTile() = default;
  PlaneTile(const TileKernels& tiles, Encoding encoding, PlaneKind kind, std::byte* block,
            size_t block_count)
      : tiles_(&tiles),
        encoding_(encoding),
        kind_(kind),
        block_(block),
        block_count_(block_count) {}

  bool present() const { return block_ != nullptr; }
  bool in_place() const { return encoding_ == Encoding::kF32; }

  /// Where a tile's codes, its step and the lower bytes of its m24 lie; null for a plane the rule
  /// does not keep. Steps lie behind the block's codes.
  std::byte* codes(size_t first) const {
    const auto bits = static_cast<size_t>(code_bits(encoding_));
    const size_t width = encoding_ == Encoding::kF32 ? 32 : bits != 0 ? bits : 16;
    return present() ? block_ + first * width / 8 : nullptr;
  }
  float* steps(size_t first) const {
    if (!present() || code_bits(encoding_) == 0) return nullptr;
    return reinterpret_cast<float*>(block_ + base::code_bytes(encoding_, block_count_)) +
           first / kTileElements;
  }
  uint8_t* low_bytes(size_t first) const {
    if (encoding_ != Encoding::kM24) return nullptr;
    return reinterpret_cast<uint8_t*>(block_) + block_count_ * sizeof(uint16_t) + first;
  }

  /// The tile's values as f32, to be changed in place.
  float* load(size_t first, size_t count) {
    if (in_place()) return reinterpret_cast<float*>(block_) + first;
    decode(first, count, scratch_.data());
    return scratch_.data();
  }
  void store(size_t first, size_t count, uint64_t step_seed, uint64_t element) {
    if (!in_place()) encode(first, count, step_seed, element, scratch_.data());
  }

  /// The tile that begins at element `first` of the block.
  void decode(size_t first, size_t count, float* out) const {
    switch (encoding_) {
      case Encoding::kF32:
        tiles_->widen(reinterpret_cast<const float*>(block_) + first, DataType::kF32, out, count);
        break;
      case Encoding::kBf16:
        tiles_->widen(reinterpret_cast<const uint16_t*>(block_) + first, DataType::kBf16, out,
                      count);
        break;
      case Encoding::kM24:
        tiles_->decode_m24(reinterpret_cast<const uint16_t*>(block_) + first, low_bytes(first), out,
                           count);
        break;
      case Encoding::kQ8:
      case Encoding::kQ4:
        tiles_->decode_codes(code_bits(encoding_), kind_, *steps(first),
                             reinterpret_cast<const uint8_t*>(codes(first)), out, count);
        break;
    }
  }
  /// element: of the tile's first one in the parameter space.
  void encode(size_t first, size_t count, uint64_t step_seed, uint64_t element,
              const float* in) const {
    if (in_place()) {
      tiles_->narrow(in, reinterpret_cast<float*>(block_) + first, DataType::kF32, count);
      return;
    }
    const Progression numbers = rounding_numbers(kind_, step_seed, element);
    switch (encoding_) {
      case Encoding::kF32:
        break;
      case Encoding::kBf16:
        tiles_->encode_bf16(numbers, in, reinterpret_cast<uint16_t*>(block_) + first, count);
        break;
      case Encoding::kM24:
        tiles_->encode_m24(numbers, in, reinterpret_cast<uint16_t*>(block_) + first,
                           low_bytes(first), count);
        break;
      case Encoding::kQ8:
      case Encoding::kQ4:
        *steps(first) = tiles_->encode_codes(code_bits(encoding_), kind_, numbers, in,
                                             reinterpret_cast<uint8_t*>(codes(first)), count);
        break;
    }
  }

 private:
  const TileKernels* tiles_ = nullptr;
  Encoding encoding_ = Encoding::kF32;
  PlaneKind kind_ = PlaneKind::kMaster;
  std::byte* block_ = nullptr;
  size_t block_count_ = 0;
  alignas(64) std::array<float, kTileElements> scratch_;
};

/// Walks through the runs of a block.
class SpanCursor {
 public:
  explicit SpanCursor(std::span<const ScalarsSpan> runs) : runs_(runs), ahead_(runs.front().count) {
    skip_empty();
  }
  const StepScalars& scalars() const { return *runs_[run_].scalars; }
  /// Elements that share these scalars from here on.
  uint64_t ahead() const { return ahead_; }
  void advance(uint64_t count) {
    ahead_ -= count;
    skip_empty();
  }

 private:
  void skip_empty() {
    while (ahead_ == 0 && run_ + 1 < runs_.size()) ahead_ = runs_[++run_].count;
  }
  std::span<const ScalarsSpan> runs_;
  size_t run_ = 0;
  uint64_t ahead_;
};

/// Walks through the squares of a block.
class SquaresCursor {
 public:
  SquaresCursor(const TileKernels& tiles, std::span<const SecondMomentRow> rows)
      : tiles_(tiles), rows_(rows) {}
  bool given() const { return !rows_.empty(); }

  /// Writes the squares of the next elements.
  void take(std::span<float> out) {
    each(out.size(), [&](const SecondMomentRow& row, uint64_t from, size_t count) {
      tiles_.multiply(row.columns + from, row.mean, out.data(), count);
      out = out.subspan(count);
    });
  }
  void skip(uint64_t count) {
    each(count, [](const SecondMomentRow&, uint64_t, size_t) {});
  }

 private:
  template <typename Act>
  void each(uint64_t left, const Act& act) {
    while (left > 0) {
      SI_CHECK(row_ < rows_.size(), "the squares of a block cover all its elements");
      const SecondMomentRow& row = rows_[row_];
      const auto count = static_cast<size_t>(std::min(left, row.count - taken_));
      act(row, taken_, count);
      left -= count;
      taken_ += count;
      if (taken_ < row.count) return;
      ++row_;
      taken_ = 0;
    }
  }
  const TileKernels& tiles_;
  std::span<const SecondMomentRow> rows_;
  size_t row_ = 0;
  uint64_t taken_ = 0;  // of that row
};

/// Tiles whose squares are made at once, to be read from the first-level cache.
constexpr size_t kSecondMomentTilesAtOnce = 16;

/// The stages of a block's update, with what they all need.
class BlockUpdate {
 public:
  BlockUpdate(const TileKernels& tiles, base::StateFormat format, const UpdateBlock& block,
              const StepScalars& scalars)
      : tiles_(tiles),
        format_(format),
        block_(block),
        squares_(tiles, block.second_moment),
        step_seed_(rounding_seed(scalars.seed, scalars.step)) {
    const std::span<const PlaneKind> kinds = rule_planes(scalars.rule);
    for (size_t i = 0; i < kinds.size(); ++i) {
      PlaneTile& tile = kinds[i] == PlaneKind::kMaster     ? master_
                        : kinds[i] == PlaneKind::kMomentum ? momentum_
                                                           : variance_;
      tile = PlaneTile(tiles, base::plane_encoding(format, kinds[i]), kinds[i], block.planes[i],
                       block.count);
    }
  }

  /// Elements that stay as they are: weights out, no more.
  void leave(size_t first, size_t count) {
    if (squares_.given()) squares_.skip(count);
    weights_of(first, count);
  }

  void whole_tiles(size_t first, size_t count, const StepScalars& scalars) {
    if (!squares_.given()) return some_tiles(first, count, scalars, nullptr);
    alignas(64) std::array<float, kSecondMomentTilesAtOnce * kTileElements> squares;
    for (size_t done = 0; done < count;) {
      const size_t some = std::min(kSecondMomentTilesAtOnce, count - done);
      squares_.take({squares.data(), some * kTileElements});
      some_tiles(first + done * kTileElements, some, scalars, squares.data());
      done += some;
    }
  }

  /// Stage by stage: the last tile of a block, one whose elements differ in scalars, and every tile
  /// of the scalar truth.
  void one_tile(size_t first, size_t count, SpanCursor& cursor) {
    alignas(64) std::array<float, kTileElements> wide_gradient;
    const auto* gradient = static_cast<const float*>(gradient_at(first));
    if (block_.gradient_type != DataType::kF32) {
      tiles_.widen(gradient_at(first), block_.gradient_type, wide_gradient.data(), count);
      gradient = wide_gradient.data();
    }
    float* master = master_.load(first, count);
    float* momentum = momentum_.present() ? momentum_.load(first, count) : nullptr;
    float* variance = variance_.present() ? variance_.load(first, count) : nullptr;
    std::array<float, kTileElements> own_squares;
    const float* squares = nullptr;
    if (squares_.given()) {
      squares_.take({own_squares.data(), count});
      squares = own_squares.data();
    }
    for (size_t done = 0; done < count;) {
      SI_CHECK(cursor.ahead() > 0, "the runs of a block cover all its elements");
      const auto piece = static_cast<size_t>(std::min<uint64_t>(cursor.ahead(), count - done));
      if (!cursor.scalars().skip) {
        tiles_.update(cursor.scalars(), gradient + done, master + done,
                      momentum != nullptr ? momentum + done : nullptr,
                      variance != nullptr ? variance + done : nullptr, piece,
                      squares != nullptr ? squares + done : nullptr);
      }
      done += piece;
      cursor.advance(piece);
    }
    const uint64_t element = block_.element + first;
    master_.store(first, count, step_seed_, element);
    if (momentum_.present()) momentum_.store(first, count, step_seed_, element);
    if (variance_.present()) variance_.store(first, count, step_seed_, element);
    weights_of(first, count);
  }

 private:
  /// Weights out, of master weights as they are stored, from the beginning of a tile on.
  void weights_of(size_t first, size_t count) {
    if (block_.weights_out == nullptr) return;
    const size_t at_once = master_.in_place() ? count : kTileElements;
    for (size_t done = 0; done < count; done += at_once) {
      const size_t some = std::min(at_once, count - done);
      tiles_.narrow(master_.load(first + done, some), weights_at(first + done), block_.weights_type,
                    some);
    }
  }

  void some_tiles(size_t first, size_t count, const StepScalars& scalars,
                  const float* squares) const {
    tiles_.update_whole_tiles(format_.moments, scalars,
                              {.count = count,
                               .gradient = gradient_at(first),
                               .gradient_type = block_.gradient_type,
                               .weights = weights_at(first),
                               .weights_type = block_.weights_type,
                               .master_format = format_.master,
                               .master = master_.codes(first),
                               .master_low = master_.low_bytes(first),
                               .momentum = momentum_.codes(first),
                               .variance = variance_.codes(first),
                               .momentum_steps = momentum_.steps(first),
                               .variance_steps = variance_.steps(first),
                               .squares = squares,
                               .element = block_.element + first});
  }
  const void* gradient_at(size_t first) const {
    return static_cast<const std::byte*>(block_.gradient) +
           first * base::data_type_bytes(block_.gradient_type);
  }
  void* weights_at(size_t first) const {
    if (block_.weights_out == nullptr) return nullptr;
    return static_cast<std::byte*>(block_.weights_out) +
           first * base::data_type_bytes(block_.weights_type);
  }

  const TileKernels& tiles_;
  base::StateFormat format_;
  const UpdateBlock& block_;
  SquaresCursor squares_;
  uint64_t step_seed_;
  PlaneTile master_;
  PlaneTile momentum_;
  PlaneTile variance_;
};

}  // namespace

void KernelTable::update_block(base::StateFormat format, const UpdateBlock& block,
                               std::span<const ScalarsSpan> runs) const {
  if (block.count == 0) return;
  SI_CHECK(!runs.empty(), "a block needs the scalars of its elements");
  SI_CHECK(block.element % kTileElements == 0, "blocks start on a rounding group");
  SI_CHECK(block.second_moment.empty() || takes_factored_second_moment(runs.front().scalars->rule),
           "a second moment in factors is for Adam's variance");
  BlockUpdate update(tiles_, format, block, *runs.front().scalars);
  SpanCursor cursor(runs);
  for (size_t first = 0; first < block.count;) {
    const size_t left = block.count - first;
    const auto ahead = static_cast<size_t>(std::min<uint64_t>(cursor.ahead(), left));
    if (cursor.scalars().skip && (ahead >= kTileElements || ahead == left)) {
      // Not even decoded and encoded again, so that what is left alone keeps its bits.
      const size_t count = ahead == left ? left : ahead / kTileElements * kTileElements;
      update.leave(first, count);
      cursor.advance(count);
      first += count;
    } else if (ahead >= kTileElements && tiles_.update_whole_tiles != nullptr) {
      const size_t whole = ahead / kTileElements;
      update.whole_tiles(first, whole, cursor.scalars());
      cursor.advance(whole * kTileElements);
      first += whole * kTileElements;
    } else {
      const size_t count = std::min(kTileElements, left);
      update.one_tile(first, count, cursor);
      first += count;
    }
  }
}

KernelTable::Norm KernelTable::partial_norm(const void* in, DataType type, size_t n) const {
  const auto* bytes = static_cast<const std::byte*>(in);
  const uint64_t width = base::data_type_bytes(type);
  PairwiseSum sum;
  for (size_t first = 0; first < n; first += kNormLeafElements) {
    const size_t count = std::min(kNormLeafElements, n - first);
    const double leaf = tiles_.leaf_squares(bytes + first * width, type, count);
    if (std::isfinite(leaf)) {  // squares of finite f32 do not overflow f64
      sum.add(leaf);
      continue;
    }
    std::array<float, kNormLeafElements> wide;
    tiles_.widen(bytes + first * width, type, wide.data(), count);
    const auto* bad = std::find_if(wide.data(), wide.data() + count,
                                   [](float value) { return !std::isfinite(value); });
    return {.sum_of_squares = std::numeric_limits<double>::infinity(),
            .finite = false,
            .first_bad = first + static_cast<size_t>(bad - wide.data())};
  }
  return {.sum_of_squares = sum.total(), .finite = true, .first_bad = 0};
}

void KernelTable::decode_block(Encoding encoding, PlaneKind kind, const std::byte* in, float* out,
                               size_t n) const {
  // decode() only reads.
  const PlaneTile plane(tiles_, encoding, kind, const_cast<std::byte*>(in), n);
  for (size_t first = 0; first < n; first += kTileElements) {
    plane.decode(first, std::min(kTileElements, n - first), out + first);
  }
}

void KernelTable::encode_block(Encoding encoding, PlaneKind kind, const float* in, std::byte* out,
                               size_t n, uint64_t element, uint64_t step, uint64_t seed) const {
  SI_CHECK(element % kTileElements == 0, "blocks start on a rounding group");
  const uint64_t step_seed = rounding_seed(seed, step);
  // The padding between codes and scales takes part in the checksum.
  if (const auto bits = static_cast<uint64_t>(code_bits(encoding)); bits != 0) {
    std::fill(out + base::divide_up(n * bits, 8), out + base::code_bytes(encoding, n),
              std::byte{0});
  }
  const PlaneTile plane(tiles_, encoding, kind, out, n);
  for (size_t first = 0; first < n; first += kTileElements) {
    plane.encode(first, std::min(kTileElements, n - first), step_seed, element + first, in + first);
  }
}

}  // namespace smartinf::kernels
