#include "smartinf/compress/gradient_compressor.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/selection.h"

namespace smartinf::compress {
namespace {

using base::DataType;
using base::kBlockElements;

// Other random numbers than those that the devices round the state with.
constexpr uint64_t kRoundingStream = 0x6b65'7074;

double square_of(std::span<const base::Bf16> values) {
  return kernels::copy_squares(kernels::kernels(), values, nullptr);
}

/// The largest that are not 0: their indices, ascending, and values. threshold: as top_k_near()'s.
size_t select_largest(std::span<const float> in, size_t k, float& threshold, uint32_t* indices,
                      float* values) {
  const size_t count =
      kernels::top_k_near(kernels::kernels(), in, k, kBlockElements, indices, values, threshold);
  size_t kept = 0;
  for (size_t i = 0; i < count; ++i) {
    if (values[i] == 0) continue;
    indices[kept] = indices[i];
    values[kept++] = values[i];
  }
  return kept;
}

}  // namespace

base::Result<std::unique_ptr<GradientCompressor>> GradientCompressor::make(
    const CompressOptions& options, uint64_t elements, uint64_t seed,
    std::vector<MatrixLayout> matrices) {
  const uint64_t planes = options.error_feedback ? 2 : 1;
  const uint64_t plane_bytes = base::round_up(elements * sizeof(base::Bf16), base::kIoAlignment);
  SI_ASSIGN_OR_RETURN(auto memory, base::AlignedBuffer::allocate(planes * plane_bytes));
  std::unique_ptr<GradientCompressor> made(
      new GradientCompressor(options, elements, seed, std::move(matrices), std::move(memory)));
  made->gradient_ = reinterpret_cast<base::Bf16*>(made->memory_.data());
  // It begins at 0, as new memory is. What is never used of either takes none.
  if (planes == 2) {
    made->residual_ = reinterpret_cast<base::Bf16*>(made->memory_.data() + plane_bytes);
  }
  return made;
}

GradientCompressor::GradientCompressor(const CompressOptions& options, uint64_t elements,
                                       uint64_t seed, std::vector<MatrixLayout> matrices,
                                       base::AlignedBuffer memory)
    : options_(options),
      elements_(elements),
      seed_(seed),
      memory_(std::move(memory)),
      thresholds_(base::divide_up(elements, kBlockElements)),
      residual_squares_(base::divide_up(elements, kBlockElements)) {
  if (!matrices.empty()) second_moment_.emplace(std::move(matrices));
}

void GradientCompressor::begin_step() {
  elements_of_step_ = values_of_step_ = bytes_of_step_ = 0;
  std::fill(residual_squares_.begin(), residual_squares_.end(), 0.0);
}

void GradientCompressor::put(uint64_t first, const void* gradient, DataType type, uint64_t count) {
  SI_CHECK(first <= elements_ && count <= elements_ - first, "a gradient outside the space");
  if (type == DataType::kBf16) {
    std::memcpy(static_cast<void*>(gradient_ + first), gradient, count * sizeof(base::Bf16));
    return;
  }
  const kernels::KernelTable& table = kernels::kernels();
  const auto* bytes = static_cast<const std::byte*>(gradient);
  std::array<float, 4096> wide;
  for (uint64_t done = 0; done < count; done += wide.size()) {
    const uint64_t n = std::min<uint64_t>(wide.size(), count - done);
    table.cast_to_f32(bytes + done * base::data_type_bytes(type), type, wide.data(), n);
    table.cast_from_f32(wide.data(), gradient_ + first + done, DataType::kBf16, n);
  }
}

void GradientCompressor::begin_update(base::StepNumber step, double scale, double norm,
                                      std::span<const plan::GroupSpan> skipped,
                                      base::ThreadTeam& team) {
  step_ = step;
  scale_ = static_cast<float>(scale);
  if (second_moment_) second_moment_->find(gradient_, scale_, skipped, team);
  finite_ = std::isfinite(norm);
  density_ = density_of_step(options_, step);
}

std::span<const std::byte> GradientCompressor::compress(Scratch& scratch, CompressedWriter& writer,
                                                        const plan::Subgroup& subgroup,
                                                        std::span<const plan::GroupSpan> skipped) {
  scratch.factors.clear();
  if (second_moment_) second_moment_->append(subgroup, scratch.factors);
  writer.begin(subgroup.id, subgroup.count, options_.values, scratch.factors);
  for (uint64_t first = 0; first < subgroup.count; first += kBlockElements) {
    const uint64_t count = std::min(kBlockElements, subgroup.count - first);
    compress_block(scratch, writer, subgroup.first + first, count,
                   std::min(kBlockElements, subgroup.count - first - count), skipped);
  }
  const auto message = writer.finish();
  bytes_of_step_ += message.size();
  elements_of_step_ += subgroup.count;
  return message;
}

void GradientCompressor::compress_block(Scratch& scratch, CompressedWriter& writer, uint64_t first,
                                        uint64_t count, uint64_t next,
                                        std::span<const plan::GroupSpan> skipped) {
  const Block block{.feedback = {.gradient = {gradient_ + first, count},
                                 .residual = residual_ == nullptr ? std::span<const base::Bf16>()
                                                                  : std::span<const base::Bf16>(
                                                                        residual_ + first, count),
                                 .scale = scale_,
                                 .element = first,
                                 .step = step_,
                                 .seed = base::mix_seed(seed_, kRoundingStream),
                                 .next = next},
                    .most = values_per_block(density_, count),
                    .threshold = thresholds_[first / kBlockElements]};
  const bool whole = std::none_of(skipped.begin(), skipped.end(), [&](const auto& out) {
    return out.first < first + count && first < out.first + out.count;
  });
  std::optional<size_t> sent;
  if (whole) sent = compress_as_signs(scratch, writer, block);
  values_of_step_ += sent ? *sent : compress_in_stages(scratch, writer, block, skipped);
}

std::optional<size_t> GradientCompressor::compress_as_signs(Scratch& scratch,
                                                            CompressedWriter& writer,
                                                            const Block& block) {
  if (residual_ == nullptr || options_.values != ValueEncoding::kSign || !finite_) {
    return std::nullopt;
  }
  const uint64_t first = block.feedback.element;
  const size_t count = block.feedback.gradient.size();
  const size_t words = base::divide_up(count, 64);
  const auto sent = std::span(scratch.sent).first(words);
  const auto negative = std::span(scratch.negative).first(words);
  const auto signs =
      kernels::residual_of_signs(kernels::kernels(), block.feedback, block.most, block.threshold,
                                 scratch.candidates, {gradient_ + first, count}, sent, negative);
  if (!signs) return std::nullopt;
  writer.add_signs(sent, negative, block.most, signs->magnitude);
  residual_squares_[first / kBlockElements] = signs->residual_squares;
  return block.most;
}

size_t GradientCompressor::compress_in_stages(Scratch& scratch, CompressedWriter& writer,
                                              const Block& block,
                                              std::span<const plan::GroupSpan> skipped) {
  const kernels::KernelTable& table = kernels::kernels();
  const kernels::FeedbackBlock& feedback = block.feedback;
  const uint64_t first = feedback.element;
  const uint64_t count = feedback.gradient.size();
  float* values = scratch.values.data();
  base::Bf16* gradient = gradient_ + first;
  const auto each_out = [&](auto&& act) {
    for (const plan::GroupSpan& out : skipped) {
      const uint64_t from = std::max(out.first, first);
      const uint64_t to = std::min(out.first + out.count, first + count);
      if (from < to) act(from - first, to - first);
    }
  };
  each_out(
      [&](uint64_t from, uint64_t to) { std::fill(gradient + from, gradient + to, base::Bf16{}); });
  kernels::add_feedback(table, feedback.gradient, feedback.residual, feedback.scale,
                        {values, count});
  each_out([&](uint64_t from, uint64_t to) { std::fill(values + from, values + to, 0.0f); });
  const size_t sent = select_largest({values, count}, block.most, block.threshold,
                                     scratch.indices.data(), scratch.selected.data());
  const auto arrived = add_block(scratch, writer, sent);
  if (residual_ == nullptr) return sent;

  for (size_t i = 0; i < sent; ++i) {
    // The rounding error of the sent value is not lost either.
    values[scratch.indices[i]] -= arrived[i];
  }
  // Stochastic rounding, so that a residual of many steps is right on average: a gradient below
  // a 512th of it would otherwise never count.
  table.encode_block(base::Encoding::kBf16, base::PlaneKind::kMomentum, values,
                     reinterpret_cast<std::byte*>(gradient), count, first, feedback.step,
                     feedback.seed);
  each_out([&](uint64_t from, uint64_t to) {
    std::copy_n(feedback.residual.begin() + from, to - from, gradient + from);
  });
  residual_squares_[first / kBlockElements] = square_of({gradient, count});
  return sent;
}

std::span<const float> GradientCompressor::add_block(Scratch& scratch, CompressedWriter& writer,
                                                     size_t sent) {
  const auto selected = std::span(scratch.selected).first(sent);
  const auto arrived = std::span(scratch.arrived).first(residual_ == nullptr ? 0 : sent);
  writer.add_block({scratch.indices.data(), sent}, selected, arrived);
  return arrived;
}

void GradientCompressor::leave(const plan::Subgroup& subgroup) {
  if (residual_ == nullptr) return;
  for (uint64_t done = 0; done < subgroup.count; done += kBlockElements) {
    const uint64_t first = subgroup.first + done;
    const uint64_t n = std::min(kBlockElements, subgroup.count - done);
    residual_squares_[first / kBlockElements] =
        kernels::copy_squares(kernels::kernels(), {residual_ + first, n}, gradient_ + first);
  }
}

CompressionSummary GradientCompressor::summary() const {
  CompressionSummary summary;
  summary.elements = elements_of_step_;
  summary.values = values_of_step_;
  summary.bytes = bytes_of_step_;
  summary.density = density_;
  summary.residual_norm =
      std::sqrt(std::accumulate(residual_squares_.begin(), residual_squares_.end(), 0.0));
  return summary;
}

void GradientCompressor::commit() {
  if (residual_ == nullptr) return;
  std::swap(gradient_, residual_);
}

void GradientCompressor::propose_residual(const base::Bf16* values) {
  std::memcpy(static_cast<void*>(gradient_), values, elements_ * sizeof(base::Bf16));
}

void GradientCompressor::set_residual(uint64_t first, std::span<const float> values) {
  kernels::kernels().cast_from_f32(values.data(), residual_ + first, DataType::kBf16,
                                   values.size());
}

}  // namespace smartinf::compress
