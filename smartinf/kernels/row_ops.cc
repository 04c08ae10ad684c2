#include "smartinf/kernels/row_ops.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/kernels/attention_arithmetic.h"
#include "smartinf/kernels/row_product.h"

namespace smartinf::kernels {
namespace {

using base::DataType;

/// By lanes, which a compiler makes vectors of.
template <class Term>
float sum_of(size_t n, const Term& term) {
  constexpr size_t kLanes = 16;
  std::array<float, kLanes> lanes{};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t l = 0; l < kLanes; ++l) lanes[l] += term(i + l);
  }
  for (size_t l = 0; i < n; ++i, ++l) lanes[l] += term(i);
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

template <class Operation>
void for_each(DataType type, std::span<float> row, const Operation& operation) {
  for (float& value : row) value = operation(value);
  round_to(type, row);
}

}  // namespace

void rms_norm(DataType type, std::span<const float> factor, float eps, std::span<const float> in,
              std::span<float> out) {
  SI_CHECK(factor.size() == in.size() && out.size() == in.size(), "as many of each");
  const size_t n = in.size();
  const float mean = sum_of(n, [&](size_t i) { return in[i] * in[i]; }) / static_cast<float>(n);
  const float scale = 1 / std::sqrt(mean + eps);
  for (size_t i = 0; i < n; ++i) out[i] = in[i] * scale * factor[i];
  round_to(type, out);
}

void layer_norm(DataType type, std::span<const float> factor, std::span<const float> bias,
                float eps, std::span<const float> in, std::span<float> out) {
  SI_CHECK(factor.size() == in.size() && bias.size() == in.size() && out.size() == in.size(),
           "as many of each");
  const size_t n = in.size();
  const auto count = static_cast<float>(n);
  const float mean = sum_of(n, [&](size_t i) { return in[i]; }) / count;
  const auto square = [&](size_t i) { return (in[i] - mean) * (in[i] - mean); };
  const float scale = 1 / std::sqrt(sum_of(n, square) / count + eps);
  for (size_t i = 0; i < n; ++i) out[i] = (in[i] - mean) * scale * factor[i] + bias[i];
  round_to(type, out);
}

void rotate(DataType type, std::span<const float> cosine, std::span<const float> sine,
            std::span<float> row) {
  const size_t width = cosine.size();
  const size_t half = width / 2;
  SI_CHECK(sine.size() == width && row.size() % width == 0, "whole heads");
  std::vector<float> turned(width);
  for (size_t at = 0; at < row.size(); at += width) {
    const std::span<float> head = row.subspan(at, width);
    for (size_t i = 0; i < half; ++i) {
      turned[i] = -head[half + i] * sine[i];
      turned[half + i] = head[i] * sine[half + i];
    }
    round_to(type, turned);
    multiply(type, cosine, head);
    add(type, turned, head);
  }
}

void silu(DataType type, std::span<float> row) {
  for_each(type, row, [](float x) {
    const float e = exp_of_negative(-std::fabs(x));
    return x * ((x < 0 ? e : 1.0f) / (1.0f + e));
  });
}

void gelu(DataType type, std::span<float> row) {
  for_each(type, row, [](float x) {
    return x * 0.5f * (1.0f + std::erf(x * static_cast<float>(std::numbers::sqrt2 / 2)));
  });
}

void gelu_tanh(DataType type, std::span<float> row) {
  constexpr auto kFactor = static_cast<float>(std::numbers::sqrt2 * std::numbers::inv_sqrtpi);
  for_each(type, row, [](float x) {
    const float inner = kFactor * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + soft_capped(inner, 1.0f, 1.0f));
  });
}

void soft_cap(DataType type, float cap, std::span<float> row) {
  for_each(type, row, [&](float x) { return x / cap; });
  for_each(type, row, [](float x) { return soft_capped(x, 1.0f, 1.0f); });
  multiply(type, cap, row);
}

void add(DataType type, std::span<const float> more, std::span<float> row) {
  SI_CHECK(more.size() == row.size(), "as many of each");
  for (size_t i = 0; i < row.size(); ++i) row[i] += more[i];
  round_to(type, row);
}

void multiply(DataType type, std::span<const float> by, std::span<float> row) {
  SI_CHECK(by.size() == row.size(), "as many of each");
  for (size_t i = 0; i < row.size(); ++i) row[i] *= by[i];
  round_to(type, row);
}

void multiply(DataType type, float by, std::span<float> row) {
  for_each(type, row, [&](float x) { return x * by; });
}

}  // namespace smartinf::kernels
