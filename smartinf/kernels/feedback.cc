#include "smartinf/kernels/feedback.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/state_codec.h"

namespace smartinf::kernels {
namespace {

void add(const base::Bf16* gradient, const base::Bf16* residual, float scale, float* out,
         size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float scaled = scale * base::to_f32(gradient[i]);
    out[i] = residual == nullptr ? scaled : scaled + base::to_f32(residual[i]);
  }
}

double copy_squares(const base::Bf16* in, base::Bf16* out, size_t n) {
  double sum = 0;
  for (size_t first = 0; first < n; first += kSquaresGroup) {
    const size_t count = std::min(kSquaresGroup, n - first);
    std::array<float, kSquaresLanes> by_lane{};
    for (size_t i = 0; i < count; ++i) {
      const float value = base::to_f32(in[first + i]);
      by_lane[i % kSquaresLanes] += value * value;
      if (out != nullptr) out[first + i] = in[first + i];
    }
    sum += sum_in_range(sum_of_lanes(by_lane), in + first, count);
  }
  return sum;
}

void add_matrix_squares(const base::Bf16* in, size_t rows, size_t columns, float scale,
                        float* row_sums, float* column_sums) {
  for (size_t r = 0; r < rows; ++r) {
    std::array<float, kRowLanes> by_lane{};
    for (size_t c = 0; c < columns; ++c) {
      const float value = scale * base::to_f32(in[r * columns + c]);
      const float square = value * value;
      by_lane[c % kRowLanes] += square;
      column_sums[c] += square;
    }
    row_sums[r] += sum_of_lanes(by_lane);
  }
}

void ahead(const StepAheadPass& pass, float* weights, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float root = std::max(pass.root * pass.roots[i] + pass.eps, kRootLeast);
    const float step = pass.lr * base::to_f32(pass.residual[i]) / root;
    weights[i] -= std::min(std::max(step, -pass.limit), pass.limit);
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
  static constexpr FeedbackKernels kKernels{.add = add,
                                            .copy_squares = copy_squares,
                                            .add_matrix_squares = add_matrix_squares,
                                            .ahead = ahead};
  return kKernels;
}

void add_feedback(const KernelTable& table, std::span<const base::Bf16> gradient,
                  std::span<const base::Bf16> residual, float scale, std::span<float> out) {
  const size_t n = gradient.size();
  SI_CHECK(out.size() == n && (residual.empty() || residual.size() == n), "as many of each");
  table.tiles().feedback.add(gradient.data(), residual.empty() ? nullptr : residual.data(), scale,
                             out.data(), n);
}

double copy_squares(const KernelTable& table, std::span<const base::Bf16> in, base::Bf16* out) {
  return table.tiles().feedback.copy_squares(in.data(), out, in.size());
}

void add_matrix_squares(const KernelTable& table, std::span<const base::Bf16> in, float scale,
                        std::span<float> row_sums, std::span<float> column_sums) {
  SI_CHECK(in.size() == row_sums.size() * column_sums.size(), "rows and columns of a matrix");
  table.tiles().feedback.add_matrix_squares(in.data(), row_sums.size(), column_sums.size(), scale,
                                            row_sums.data(), column_sums.data());
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
                std::span<const base::Bf16> residual, float root, std::span<const float> roots,
                void* weights, base::DataType type) {
  const size_t n = residual.size();
  SI_CHECK(roots.size() == n, "a root for each element");
  if (how.lr == 0) return;
  StepAheadPass pass{.residual = residual.data(),
                     .lr = how.lr,
                     .limit = std::abs(how.lr) * kStepAheadMost,
                     .root = root / std::sqrt(how.bias),
                     .roots = roots.data(),
                     .eps = how.eps};
  const auto& feedback = table.tiles().feedback;
  if (type == base::DataType::kF32) return feedback.ahead(pass, static_cast<float*>(weights), n);
  auto* at = static_cast<std::byte*>(weights);
  std::array<float, 1024> wide;
  for (size_t first = 0; first < n;) {
    const size_t count = std::min(n - first, wide.size());
    table.cast_to_f32(at, type, wide.data(), count);
    feedback.ahead(pass, wide.data(), count);
    table.cast_from_f32(wide.data(), at, type, count);
    at += count * base::data_type_bytes(type);
    pass.residual += count;
    pass.roots += count;
    first += count;
  }
}

}  // namespace smartinf::kernels
