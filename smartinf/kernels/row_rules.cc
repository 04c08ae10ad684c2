// Loops of single operations, which a compiler makes vectors of: each rounds once, so the bits do
// not depend on how many are done at a time. (-fno-math-errno, for this file: roots are vectors.)
#include "smartinf/kernels/row_rules.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/kernels/arithmetic.h"
#include "smartinf/kernels/update.h"

namespace smartinf::kernels {
namespace {

/// Where a record's numbers lie. What the rule does not keep is null.
struct Planes {
  float* weight = nullptr;
  float* momentum = nullptr;  // [dim]
  float* variance = nullptr;  // [dim], or one of the row
};

Planes planes_of(RowRule rule, uint64_t dim, std::span<std::byte> record) {
  SI_CHECK(dim > 0 && record.size() == record_bytes(rule, dim), "a record of the rule and dim");
  auto* const weight = reinterpret_cast<float*>(record.data());
  Planes planes{.weight = weight};
  if (rule == RowRule::kSgd) return planes;
  float* next = weight + dim;
  if (rule != RowRule::kRowAdagrad) planes.momentum = std::exchange(next, next + dim);
  planes.variance = next;
  return planes;
}

std::byte* step_of(std::span<std::byte> record) {
  return record.data() + record.size() - sizeof(uint32_t);
}

void set_step(base::StepNumber step, std::span<std::byte> record) {
  const auto number = static_cast<uint32_t>(step);
  std::memcpy(step_of(record), &number, sizeof number);
}

/// The mean of the scaled gradient's squares: in f64, in 16 lanes that are added in halves.
float mean_square(std::span<const float> gradient, float scale) {
  std::array<double, kNormLanes> lanes{};
  const size_t n = gradient.size();
  const auto square = [&](size_t i) {
    const double value = gradient[i] * scale;
    return value * value;
  };
  size_t i = 0;
  for (; i + kNormLanes <= n; i += kNormLanes) {
    for (size_t l = 0; l < kNormLanes; ++l) lanes[l] += square(i + l);
  }
  for (size_t l = 0; i < n; ++i, ++l) lanes[l] += square(i);
  for (size_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return static_cast<float>(lanes[0] / static_cast<double>(n));
}

void update_sgd(const StepScalars& s, std::span<const float> gradient, const Planes& row) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    row.weight[i] = canonical(row.weight[i] + -s.lr * (gradient[i] * s.gradient_scale));
  }
}

void update_sparse_adam(const StepScalars& s, std::span<const float> gradient, const Planes& row) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    const float g = gradient[i] * s.gradient_scale;
    const float m = row.momentum[i] + (g - row.momentum[i]) * s.one_minus_beta1;
    const float v = row.variance[i] + (g * g - row.variance[i]) * s.one_minus_beta2;
    row.momentum[i] = canonical(m);
    row.variance[i] = canonical(v);
    row.weight[i] = canonical(row.weight[i] + (m / (std::sqrt(v) + s.eps)) * -s.step_size);
  }
}

void update_row_adagrad(const StepScalars& s, std::span<const float> gradient, const Planes& row) {
  const float sum = *row.variance + mean_square(gradient, s.gradient_scale);
  *row.variance = canonical(sum);
  const float factor = -s.lr / (std::sqrt(sum) + s.eps);
  for (size_t i = 0; i < gradient.size(); ++i) {
    row.weight[i] = canonical(row.weight[i] + factor * (gradient[i] * s.gradient_scale));
  }
}

void update_row_adam(const StepScalars& s, std::span<const float> gradient, const Planes& row) {
  const float v =
      *row.variance * s.beta2 + mean_square(gradient, s.gradient_scale) * s.one_minus_beta2;
  *row.variance = canonical(v);
  const float factor = -s.step_size / (std::sqrt(v) + s.eps);
  for (size_t i = 0; i < gradient.size(); ++i) {
    const float g = gradient[i] * s.gradient_scale;
    const float m = row.momentum[i] * s.beta1 + g * s.one_minus_beta1;
    row.momentum[i] = canonical(m);
    row.weight[i] = canonical(row.weight[i] + factor * m);
  }
}

void update_adamw(const StepScalars& s, std::span<const float> gradient, const Planes& row) {
  kernels().tiles().update(s, gradient.data(), row.weight, row.momentum, row.variance,
                           gradient.size(), nullptr);
}

/// The natural logarithm of a number above 0 that is not subnormal, within a few roundings of f64.
/// The library's differs between processors.
double log_of(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  int exponent = static_cast<int>(bits >> 52) - 1022;
  auto mantissa = std::bit_cast<double>((bits & 0xfffffffffffffu) | 0x3fe0000000000000u);
  if (mantissa < 0.70710678118654752) {
    mantissa *= 2;
    --exponent;
  }
  // ln m = 2 artanh((m - 1) / (m + 1)), |z| < 0.1716: the next term is below 2^-53 of the first.
  const double z = (mantissa - 1) / (mantissa + 1);
  const double square = z * z;
  double sum = 0;
  for (int odd = 21; odd >= 1; odd -= 2) sum = sum * square + 1.0 / odd;
  return exponent * 0.69314718055994531 + 2 * z * sum;
}

/// Two independent numbers of the standard normal distribution.
std::array<double, 2> normal_pair(uint64_t seed) {
  for (uint64_t attempt = 0;; ++attempt) {
    const uint64_t word = base::mix_seed(seed, attempt);
    // Centres of 2^32 intervals of (-1, 1): never 0, and exact.
    const auto place = [](uint64_t bits) {
      return (static_cast<double>(static_cast<uint32_t>(bits)) + 0.5) * 0x1p-31 - 1;
    };
    const double x = place(word);
    const double y = place(word >> 32);
    const double square = x * x + y * y;
    if (square >= 1) continue;
    const double factor = std::sqrt(-2 * log_of(square) / square);
    return {x * factor, y * factor};
  }
}

/// Momenta that a step with a gradient of zeros no longer changes, and when they move no weight.
struct Rest {
  float one_minus_beta1 = 0;
  float largest = 0;

  bool in(const StepScalars& s) const {
    return s.one_minus_beta1 == one_minus_beta1 && s.step_size * largest == 0;
  }
};

/// What can have come to rest. Momenta fall until roundings of denormals hold them up.
constexpr float kRestMax = 256 * std::numeric_limits<float>::denorm_min();
constexpr size_t kRestEvery = 16;  // steps from one look to the next

float largest_of(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

}  // namespace

RowScalars make_row_scalars(const RowOptions& options, double lr, base::StepNumber step,
                            double gradient_scale) {
  SI_CHECK(step <= std::numeric_limits<uint32_t>::max(), "a record's step has 32 bits");
  const bool sgd = options.rule == RowRule::kSgd;
  const bool adagrad = options.rule == RowRule::kRowAdagrad;
  RowScalars scalars{.rule = options.rule,
                     .step = make_step_scalars({.rule = sgd       ? UpdateRule::kSgdMomentum
                                                        : adagrad ? UpdateRule::kAdagrad
                                                                  : UpdateRule::kAdamW,
                                                .beta1 = options.beta1,
                                                .beta2 = options.beta2,
                                                .eps = options.eps},
                                               {.lr = lr}, step, gradient_scale, 0)};
  if (options.rule == RowRule::kSparseAdam) scalars.step.eps = static_cast<float>(options.eps);
  return scalars;
}

void initial_record(const RowStart& start, uint32_t table, uint64_t row, uint64_t dim,
                    std::span<std::byte> record) {
  SI_CHECK(record.size() > dim * sizeof(float), "a record of that dim");
  std::ranges::fill(record, std::byte{0});
  if (start.deviation == 0) return;
  auto* const weight = reinterpret_cast<float*>(record.data());
  const uint64_t seed = base::mix_seed(base::mix_seed(start.seed, table), row);
  for (uint64_t column = 0; column < dim; column += 2) {
    const auto [first, second] = normal_pair(base::mix_seed(seed, column / 2));
    weight[column] = static_cast<float>(start.deviation * first);
    if (column + 1 < dim) weight[column + 1] = static_cast<float>(start.deviation * second);
  }
}

base::StepNumber record_step(std::span<const std::byte> record) {
  uint32_t step = 0;
  SI_CHECK(record.size() > sizeof step, "a record");
  std::memcpy(&step, record.data() + record.size() - sizeof step, sizeof step);
  return step;
}

void read_weights(std::span<const std::byte> record, uint64_t dim, base::DataType type, void* out) {
  SI_CHECK(record.size() >= dim * sizeof(float), "a record of that dim");
  kernels().cast_from_f32(reinterpret_cast<const float*>(record.data()), out, type, dim);
}

void update_record(const RowScalars& scalars, std::span<const float> gradient,
                   std::span<std::byte> record) {
  const Planes row = planes_of(scalars.rule, gradient.size(), record);
  switch (scalars.rule) {
    case RowRule::kSgd:
      update_sgd(scalars.step, gradient, row);
      break;
    case RowRule::kSparseAdam:
      update_sparse_adam(scalars.step, gradient, row);
      break;
    case RowRule::kRowAdagrad:
      update_row_adagrad(scalars.step, gradient, row);
      break;
    case RowRule::kRowAdam:
      update_row_adam(scalars.step, gradient, row);
      break;
    case RowRule::kAdamW:
      update_adamw(scalars.step, gradient, row);
      break;
  }
  set_step(scalars.step.step, record);
}

void catch_up(std::span<const RowScalars> missed, std::span<std::byte> record) {
  if (missed.empty()) return;
  const base::StepNumber from = record_step(record);
  SI_CHECK(missed.front().rule == RowRule::kAdamW, "rows of other rules are not brought up");
  SI_CHECK(missed.front().step.step > from, "the scalars of steps that the record missed");
  const uint64_t dim = (record.size() - sizeof(uint32_t)) / (3 * sizeof(float));
  const Planes row = planes_of(RowRule::kAdamW, dim, record);
  set_step(missed.back().step.step, record);
  if (from == 0) return;
  const std::span<float> momentum(row.momentum, dim);
  const std::vector<float> zeros(dim);
  std::vector<float> before(dim);
  std::optional<Rest> rest;
  for (size_t i = 0; i < missed.size(); ++i) {
    const StepScalars& s = missed[i].step;
    if (rest && rest->in(s)) {
      for (uint64_t k = 0; k < dim; ++k) row.variance[k] *= s.beta2;
      continue;
    }
    const bool look = i % kRestEvery == 0 && largest_of(momentum) <= kRestMax;
    if (look) std::ranges::copy(momentum, before.begin());
    update_adamw(s, zeros, row);
    rest.reset();
    if (!look || std::memcmp(before.data(), row.momentum, dim * sizeof(float)) != 0) continue;
    // From a step on that moved no weight, since such a step makes +0 of a weight that is -0.
    const Rest found{.one_minus_beta1 = s.one_minus_beta1, .largest = largest_of(momentum)};
    if (found.in(s)) rest = found;
  }
}

void add_rows(base::DataType type, const void* gradient, std::span<const uint32_t> place,
              uint64_t dim, std::span<float> sums) {
  const size_t row_bytes = dim * base::data_type_bytes(type);
  const uint64_t rows = sums.size() / dim;
  const auto* from = static_cast<const std::byte*>(gradient);
  std::vector<float> wide(dim);
  for (const uint32_t to : place) {
    SI_CHECK(to < rows, "every id has the place of its row");
    kernels().cast_to_f32(from, type, wide.data(), dim);
    float* const sum = sums.data() + to * dim;
    for (uint64_t k = 0; k < dim; ++k) sum[k] += wide[k];
    from += row_bytes;
  }
}

}  // namespace smartinf::kernels
