#include "smartinf/engine/ranks/compressed_sums.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/message.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::Status;
using compress::CompressedHeader;

namespace {

/// Larger numbers may be infinite in bf16.
constexpr float kMost = 3e38f;

}  // namespace

base::Result<std::unique_ptr<CompressedSums>> CompressedSums::make(
    const compress::CompressOptions& options, uint64_t seed, std::vector<Piece> pieces) {
  // Each piece begins on a group of random numbers; which ones does not depend on stages and
  // devices.
  std::vector<uint64_t> places;
  uint64_t end = 0;
  for (const Piece& piece : pieces) {
    places.push_back(end);
    end += base::round_up(piece.count, base::kCodeGroupElements);
  }
  SI_ASSIGN_OR_RETURN(auto compressor, compress::GradientCompressor::make(options, end, seed, {}));
  return std::unique_ptr<CompressedSums>(
      new CompressedSums(options, std::move(pieces), std::move(places), std::move(compressor)));
}

CompressedSums::CompressedSums(const compress::CompressOptions& options, std::vector<Piece> pieces,
                               std::vector<uint64_t> places,
                               std::unique_ptr<compress::GradientCompressor> compressor)
    : options_(options),
      pieces_(std::move(pieces)),
      places_(std::move(places)),
      compressor_(std::move(compressor)) {}

void CompressedSums::begin_step(base::StepNumber step, base::ThreadTeam& team) {
  density_ = compress::density_of_step(options_, step);
  compressor_->begin_step();
  compressor_->begin_update(step, 1, 0, {}, team);
}

uint64_t CompressedSums::bytes(uint64_t count) const {
  const uint64_t values =
      compress::values_per_block(density_, std::min(count, base::kBlockElements));
  return base::round_up(compress::CompressedWriter::bytes_max(count, values, options_.values, 0),
                        sizeof(uint64_t));
}

plan::Subgroup CompressedSums::place_of(const Piece& piece) const {
  return {base::SubgroupId{static_cast<uint32_t>(piece.index)}, places_[piece.index], piece.count};
}

void CompressedSums::compress(const Piece& piece, std::span<const float> sum, std::byte* out) {
  SI_CHECK(sum.size() == piece.count, "a sum of the whole piece");
  const plan::Subgroup place = place_of(piece);
  const uint64_t bytes_of_piece = bytes(piece.count);
  std::memset(out, 0, bytes_of_piece);  // as it stays where the sum is not finite
  if (!std::ranges::all_of(sum, [](float value) { return std::abs(value) < kMost; })) {
    return compressor_->leave(place);
  }
  compressor_->put(place.first, sum.data(), base::DataType::kF32, piece.count);
  const auto message = compressor_->compress(scratch_, writer_, place, {});
  SI_CHECK(message.size() <= bytes_of_piece, "no message is longer than the most");
  std::ranges::copy(message, out);
}

Status CompressedSums::add(const Piece& piece, const std::byte* message, uint64_t from,
                           std::span<float> out, std::vector<float>& scratch) const {
  CompressedHeader header;
  std::memcpy(&header, message, sizeof(header));
  if (header.bytes == 0) {
    std::ranges::fill(out, std::numeric_limits<float>::quiet_NaN());
    return Status();
  }
  SI_ASSIGN_OR_RETURN(const auto view, compress::CompressedView::parse(
                                           {message, std::min(header.bytes, bytes(piece.count))}));
  if (view.subgroup().value != piece.index || view.elements() != piece.count) {
    return Status(base::ErrorCode::kCorrupt, "a rank sent another piece of the gradient",
                  "Start all ranks with the same program.");
  }
  scratch.resize(std::max<size_t>(scratch.size(), 2 * base::kBlockElements));
  auto* const expanded = reinterpret_cast<std::byte*>(scratch.data());
  float* const values = scratch.data() + base::kBlockElements;
  const uint64_t end = from + out.size();
  for (uint64_t block = from / base::kBlockElements; block * base::kBlockElements < end; ++block) {
    const uint64_t first = block * base::kBlockElements;
    const uint64_t begin = std::max(first, from);
    const uint64_t count = std::min(first + base::kBlockElements, end) - begin;
    view.expand_block(block, expanded);
    kernels::kernels().cast_to_f32(expanded + (begin - first) * base::data_type_bytes(view.type()),
                                   view.type(), values, count);
    for (uint64_t i = 0; i < count; ++i) out[begin - from + i] += values[i];
  }
  return Status();
}

void CompressedSums::leave(uint64_t first, uint64_t count) {
  for (const Piece& piece : pieces_) {
    if (piece.first >= first && piece.first < first + count) compressor_->leave(place_of(piece));
  }
}

}  // namespace smartinf::engine
