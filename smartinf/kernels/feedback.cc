#include "smartinf/kernels/feedback.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"

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

void ahead(const base::Bf16* residual, float rate, float limit, float* weights, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    weights[i] -= std::min(std::max(base::to_f32(residual[i]) * rate, -limit), limit);
  }
}

}  // namespace

const FeedbackKernels& scalar_feedback() {
  static constexpr FeedbackKernels kKernels{.add = add, .ahead = ahead};
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
