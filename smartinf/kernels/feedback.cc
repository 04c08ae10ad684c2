#include "smartinf/kernels/feedback.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/selection.h"
#include "smartinf/kernels/state_codec.h"

namespace smartinf::kernels {
namespace {

void add(const base::Bf16* gradient, const base::Bf16* residual, float scale, float decay,
         float* out, float* squares, size_t n) {
  for (size_t first = 0; first < n; first += kMeanSquareElements) {
    const size_t count = std::min(kMeanSquareElements, n - first);
    std::array<float, kMeanSquareLanes> by_lane{};
    for (size_t i = 0; i < count; ++i) {
      const float scaled = scale * base::to_f32(gradient[first + i]);
      by_lane[i % kMeanSquareLanes] += scaled * scaled;
      out[first + i] =
          residual == nullptr ? scaled : scaled + decay * base::to_f32(residual[first + i]);
    }
    if (squares != nullptr) {
      squares[first / kMeanSquareElements] = mean_square(by_lane.data(), count);
    }
  }
}

size_t keep(const FeedbackPass& pass, size_t n) {
  size_t found = 0;
  std::array<float, kMeanSquareElements> values;
  for (size_t first = 0; first < n; first += kMeanSquareElements) {
    const size_t count = std::min(kMeanSquareElements, n - first);
    add(pass.gradient + first, pass.residual + first, pass.scale, pass.decay, values.data(),
        pass.squares == nullptr ? nullptr : pass.squares + first / kMeanSquareElements, count);
    const size_t more =
        scalar_selection().collect_from(values.data(), count, pass.lowest, pass.room - found,
                                        pass.indices + found, pass.values + found);
    if (more == pass.room - found) return pass.room;
    for (size_t i = found; i < found + more; ++i) pass.indices[i] += static_cast<uint32_t>(first);
    found += more;
    scalar_tiles().encode_bf16(
        base::PlaneKind::kMomentum, rounding_key(pass.rounding_seed, pass.element + first),
        values.data(), reinterpret_cast<uint16_t*>(pass.kept + first), count);
  }
  return found;
}

double copy_squares(const base::Bf16* in, base::Bf16* out, size_t n) {
  double sum = 0;
  for (size_t first = 0; first < n; first += kMeanSquareElements) {
    const size_t count = std::min(kMeanSquareElements, n - first);
    std::array<float, kMeanSquareLanes> by_lane{};
    for (size_t i = 0; i < count; ++i) {
      const float value = base::to_f32(in[first + i]);
      by_lane[i % kMeanSquareLanes] += value * value;
      if (out != nullptr) out[first + i] = in[first + i];
    }
    sum += sum_in_range(sum_of_lanes(by_lane.data()), in + first, count);
  }
  return sum;
}

void ahead(const base::Bf16* residual, float rate, float limit, float* weights, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    weights[i] -= std::min(std::max(base::to_f32(residual[i]) * rate, -limit), limit);
  }
}

}  // namespace

double sum_in_range(float sum, const base::Bf16* in, size_t n) {
  if (sum == 0 || (sum >= kSquaresLeast && sum <= std::numeric_limits<float>::max())) return sum;
  double wide = 0;
  for (size_t i = 0; i < n; ++i) {
    const double value = base::to_f32(in[i]);
    wide += value * value;
  }
  return wide;
}

const FeedbackKernels& scalar_feedback() {
  static constexpr FeedbackKernels kKernels{
      .add = add, .keep = keep, .copy_squares = copy_squares, .ahead = ahead};
  return kKernels;
}

void add_feedback(const KernelTable& table, std::span<const base::Bf16> gradient,
                  std::span<const base::Bf16> residual, float scale, float decay,
                  std::span<float> out, std::span<float> squares) {
  const size_t n = gradient.size();
  SI_CHECK(out.size() == n && (residual.empty() || residual.size() == n), "as many of each");
  SI_CHECK(squares.empty() || squares.size() == base::divide_up(n, kMeanSquareElements),
           "a mean square for each group");
  table.tiles().feedback.add(gradient.data(), residual.empty() ? nullptr : residual.data(), scale,
                             decay, out.data(), squares.empty() ? nullptr : squares.data(), n);
}

std::optional<size_t> keep_unsent(const KernelTable& table, const FeedbackBlock& block, size_t k,
                                  float& border, std::span<base::Bf16> kept,
                                  std::span<float> squares, std::span<uint32_t> indices,
                                  std::span<float> values) {
  const size_t n = block.gradient.size();
  SI_CHECK(k > 0 && n <= std::numeric_limits<uint32_t>::max(), "some of what has 32-bit indices");
  SI_CHECK(block.residual.size() == n && kept.size() == n && indices.size() == values.size(),
           "as many of each");
  SI_CHECK(squares.empty() || squares.size() == base::divide_up(n, kMeanSquareElements),
           "a mean square for each group");
  SI_CHECK(block.element % kTileElements == 0, "blocks start on a rounding group");
  const std::optional<Candidates> candidates = candidates_near(border, k, indices.size());
  if (!candidates) return std::nullopt;
  const size_t found =
      table.tiles().feedback.keep({.gradient = block.gradient.data(),
                                   .residual = block.residual.data(),
                                   .scale = block.scale,
                                   .decay = block.decay,
                                   .element = block.element,
                                   .rounding_seed = rounding_seed(block.seed, block.step),
                                   .kept = kept.data(),
                                   .squares = squares.empty() ? nullptr : squares.data(),
                                   .lowest = candidates->lowest,
                                   .room = candidates->room,
                                   .likely = k,
                                   .indices = indices.data(),
                                   .values = values.data()},
                                  n);
  return top_k_of_candidates(*candidates, found, k, indices.data(), values.data(), border);
}

void keep_rest(const FeedbackBlock& block, std::span<const uint32_t> indices,
               std::span<const float> rests, std::span<base::Bf16> kept) {
  const uint64_t seed = rounding_seed(block.seed, block.step);
  uint64_t group = std::numeric_limits<uint64_t>::max();
  RoundingKey key;  // of the group
  for (size_t i = 0; i < indices.size(); ++i) {
    const size_t lane = indices[i] % kTileElements;
    if (const uint64_t its = indices[i] - lane; its != group) {
      group = its;
      key = rounding_key(seed, block.element + group);
    }
    kept[indices[i]] =
        base::Bf16{round_bf16(rests[i], random_number(key, base::PlaneKind::kMomentum, lane))};
  }
}

double copy_squares(const KernelTable& table, std::span<const base::Bf16> in, base::Bf16* out) {
  return table.tiles().feedback.copy_squares(in.data(), out, in.size());
}

void group_variances(std::span<const float> variances, std::span<float> out) {
  SI_CHECK(out.size() == base::divide_up(variances.size(), kMeanSquareElements),
           "a variance for each group");
  for (size_t g = 0; g < out.size(); ++g) {
    const auto group = variances.subspan(g * kMeanSquareElements);
    const auto samples = group.first(std::min(group.size(), kVarianceSamples));
    float sum = 0;
    for (const float variance : samples) sum += variance;
    out[g] = sum / static_cast<float>(samples.size());
  }
}

size_t variance_plane(UpdateRule rule) {
  const auto kinds = rule_planes(rule);
  const auto found = std::find(kinds.begin(), kinds.end(), base::PlaneKind::kVariance);
  SI_CHECK(found != kinds.end(), "a rule that keeps variances");
  return static_cast<size_t>(found - kinds.begin());
}

StepAhead make_step_ahead(const RuleOptions& run_options, const GroupOptions& group,
                          base::StepNumber step) {
  const RuleOptions& options = group.rule ? *group.rule : run_options;
  const auto t = static_cast<double>(group.step > 0 ? group.step : step);
  return {.lr = static_cast<float>(options.maximize ? -group.lr : group.lr),
          .bias = static_cast<float>(1 - std::pow(options.beta2, t)),
          .eps = static_cast<float>(options.eps)};
}

void step_ahead(const KernelTable& table, const StepAhead& how,
                std::span<const base::Bf16> residual, std::span<const float> variances,
                size_t phase, void* weights, base::DataType type) {
  const size_t n = residual.size();
  SI_CHECK(variances.size() == base::divide_up(phase + n, kMeanSquareElements) &&
               (n == 0 || phase < kMeanSquareElements),
           "a variance for each group");
  if (how.lr == 0) return;
  auto* bytes = static_cast<std::byte*>(weights);
  std::array<float, kMeanSquareElements> wide;
  for (size_t first = 0; first < n;) {
    const size_t count =
        std::min(n - first, kMeanSquareElements - (phase + first) % kMeanSquareElements);
    const float variance = variances[(phase + first) / kMeanSquareElements];
    const float rate = how.lr / (std::sqrt(variance / how.bias) + how.eps);
    std::byte* at = bytes + first * base::data_type_bytes(type);
    auto* floats = type == base::DataType::kF32 ? reinterpret_cast<float*>(at) : wide.data();
    if (floats == wide.data()) table.cast_to_f32(at, type, floats, count);
    table.tiles().feedback.ahead(residual.data() + first, rate, std::abs(how.lr) * kStepAheadMost,
                                 floats, count);
    if (floats == wide.data()) table.cast_from_f32(floats, at, type, count);
    first += count;
  }
}

}  // namespace smartinf::kernels
