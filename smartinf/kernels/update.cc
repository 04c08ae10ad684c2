#include "smartinf/kernels/update.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"

namespace smartinf::kernels {
namespace {

using base::DataType;
using base::Encoding;
using base::PlaneKind;

/// Where a block of an encoded plane keeps its q8 scales: behind the codes, on 4 bytes.
float* q8_scales(std::byte* block, size_t count) {
  return reinterpret_cast<float*>(block + base::round_up(count, 4));
}
const float* q8_scales(const std::byte* block, size_t count) {
  return reinterpret_cast<const float*>(block + base::round_up(count, 4));
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

  /// The tile's values as f32, to be changed in place.
  float* load(size_t first, size_t count) {
    switch (encoding_) {
      case Encoding::kF32:
        return reinterpret_cast<float*>(block_) + first;
      case Encoding::kBf16:
        tiles_->widen(reinterpret_cast<const uint16_t*>(block_) + first, DataType::kBf16,
                      scratch_.data(), count);
        break;
      case Encoding::kQ8:
        tiles_->decode_q8(kind_, q8_scales(block_, block_count_)[first / kTileElements],
                          reinterpret_cast<const uint8_t*>(block_) + first, scratch_.data(), count);
        break;
    }
    return scratch_.data();
  }

  void store(size_t first, size_t count, RoundingKey key) {
    switch (encoding_) {
      case Encoding::kF32:
        break;
      case Encoding::kBf16:
        tiles_->encode_bf16(kind_, key, scratch_.data(),
                            reinterpret_cast<uint16_t*>(block_) + first, count);
        break;
      case Encoding::kQ8:
        q8_scales(block_, block_count_)[first / kTileElements] = tiles_->encode_q8(
            kind_, key, scratch_.data(), reinterpret_cast<uint8_t*>(block_) + first, count);
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

/// Adds leaves pairwise as a binary counter carries: the shape depends on their number only.
class PairwiseSum {
 public:
  void add(double leaf) {
    for (uint64_t carry = leaves_; (carry & 1) != 0; carry >>= 1) leaf = levels_[--depth_] + leaf;
    levels_[depth_++] = leaf;
    ++leaves_;
  }
  double total() const {
    double sum = 0;
    for (size_t i = depth_; i > 0; --i) sum = levels_[i - 1] + sum;
    return sum;
  }

 private:
  std::array<double, 64> levels_{};
  size_t depth_ = 0;
  uint64_t leaves_ = 0;
};

}  // namespace

void KernelTable::update_block(base::StateFormat format, const UpdateBlock& block,
                               std::span<const GroupRun> runs) const {
  if (block.count == 0) return;
  SI_CHECK(!runs.empty(), "a block needs the scalars of its elements");
  SI_CHECK(block.element % kTileElements == 0, "blocks start on a rounding group");
  const StepScalars& first_scalars = *runs.front().scalars;
  const std::span<const PlaneKind> kinds = rule_planes(first_scalars.rule);

  PlaneTile momentum_tile;
  PlaneTile variance_tile;
  for (size_t i = 1; i < kinds.size(); ++i) {
    PlaneTile& tile = kinds[i] == PlaneKind::kMomentum ? momentum_tile : variance_tile;
    tile = PlaneTile(tiles_, base::plane_encoding(format, kinds[i]), kinds[i], block.planes[i],
                     block.count);
  }
  auto* master_plane = reinterpret_cast<float*>(block.planes[0]);
  const auto* gradient_bytes = static_cast<const std::byte*>(block.gradient);
  auto* weight_bytes = static_cast<std::byte*>(block.weights_out);
  const uint64_t gradient_width = base::data_type_bytes(block.gradient_type);
  const uint64_t weight_width = base::data_type_bytes(block.weights_type);
  alignas(64) std::array<float, kTileElements> wide_gradient;

  size_t run = 0;
  uint64_t run_left = runs[0].count;
  for (size_t first = 0; first < block.count; first += kTileElements) {
    const size_t count = std::min<size_t>(kTileElements, block.count - first);
    const std::byte* gradient_tile = gradient_bytes + first * gradient_width;
    const float* gradient = reinterpret_cast<const float*>(gradient_tile);
    if (block.gradient_type != DataType::kF32) {
      tiles_.widen(gradient_tile, block.gradient_type, wide_gradient.data(), count);
      gradient = wide_gradient.data();
    }
    float* master = master_plane + first;
    while (run_left == 0 && run + 1 < runs.size()) run_left = runs[++run].count;
    if (run_left >= count && runs[run].scalars->skip) {
      // Not even decoded and encoded again, so that what is left alone keeps its bits.
      run_left -= count;
      if (weight_bytes != nullptr) {
        tiles_.narrow(master, weight_bytes + first * weight_width, block.weights_type, count);
      }
      continue;
    }
    float* momentum = momentum_tile.present() ? momentum_tile.load(first, count) : nullptr;
    float* variance = variance_tile.present() ? variance_tile.load(first, count) : nullptr;

    for (size_t done = 0; done < count;) {
      while (run_left == 0) {
        SI_CHECK(++run < runs.size(), "the runs of a block cover all its elements");
        run_left = runs[run].count;
      }
      const auto piece = static_cast<size_t>(std::min<uint64_t>(run_left, count - done));
      if (!runs[run].scalars->skip) {
        tiles_.update(*runs[run].scalars, gradient + done, master + done,
                      momentum != nullptr ? momentum + done : nullptr,
                      variance != nullptr ? variance + done : nullptr, piece);
      }
      done += piece;
      run_left -= piece;
    }

    if (format != base::StateFormat::kF32) {
      const RoundingKey key =
          rounding_key(first_scalars.seed, first_scalars.step, block.element + first);
      if (momentum_tile.present()) momentum_tile.store(first, count, key);
      if (variance_tile.present()) variance_tile.store(first, count, key);
    }
    if (weight_bytes != nullptr) {
      tiles_.narrow(master, weight_bytes + first * weight_width, block.weights_type, count);
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
  switch (encoding) {
    case Encoding::kF32:
      tiles_.widen(in, DataType::kF32, out, n);
      return;
    case Encoding::kBf16:
      tiles_.widen(in, DataType::kBf16, out, n);
      return;
    case Encoding::kQ8:
      for (size_t first = 0; first < n; first += kTileElements) {
        tiles_.decode_q8(kind, q8_scales(in, n)[first / kTileElements],
                         reinterpret_cast<const uint8_t*>(in) + first, out + first,
                         std::min(kTileElements, n - first));
      }
      return;
  }
}

void KernelTable::encode_block(Encoding encoding, PlaneKind kind, const float* in, std::byte* out,
                               size_t n, uint64_t element, uint64_t step, uint64_t seed) const {
  SI_CHECK(element % kTileElements == 0, "blocks start on a rounding group");
  if (encoding == Encoding::kF32) {
    tiles_.narrow(in, out, DataType::kF32, n);
    return;
  }
  // The padding between codes and scales takes part in the checksum.
  if (encoding == Encoding::kQ8) std::fill(out + n, out + base::round_up(n, 4), std::byte{0});
  for (size_t first = 0; first < n; first += kTileElements) {
    const size_t count = std::min(kTileElements, n - first);
    const RoundingKey key = rounding_key(seed, step, element + first);
    if (encoding == Encoding::kBf16) {
      tiles_.encode_bf16(kind, key, in + first, reinterpret_cast<uint16_t*>(out) + first, count);
    } else {
      q8_scales(out, n)[first / kTileElements] =
          tiles_.encode_q8(kind, key, in + first, reinterpret_cast<uint8_t*>(out) + first, count);
    }
  }
}

}  // namespace smartinf::kernels
