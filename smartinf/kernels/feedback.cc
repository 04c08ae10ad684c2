#include "smartinf/kernels/feedback.h"

#include <algorithm>
#include <array>

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

}  // namespace

const FeedbackKernels& scalar_feedback() {
  static constexpr FeedbackKernels kKernels{.add = add};
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

}  // namespace smartinf::kernels
