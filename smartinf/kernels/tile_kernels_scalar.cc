// The plain truth of every tile stage: arithmetic.h applied element by element.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "smartinf/base/units.h"
#include "smartinf/kernels/rules.h"
#include "smartinf/kernels/tile_kernels.h"

namespace smartinf::kernels {

namespace {

using base::DataType;
using base::PlaneKind;

// In messages 16-bit numbers lie at any address.
void store_bits(void* out, size_t index, uint16_t bits) {
  std::memcpy(static_cast<std::byte*>(out) + index * sizeof(bits), &bits, sizeof(bits));
}
uint16_t load_bits(const void* in, size_t index) {
  uint16_t bits;
  std::memcpy(&bits, static_cast<const std::byte*>(in) + index * sizeof(bits), sizeof(bits));
  return bits;
}

void widen(const void* in, DataType type, float* out, size_t n) {
  switch (type) {
    case DataType::kF32:
      if (n != 0) std::memcpy(out, in, n * sizeof(float));  // no pointers where there is nothing
      return;
    case DataType::kBf16: {
      for (size_t i = 0; i < n; ++i) out[i] = base::to_f32(base::Bf16{load_bits(in, i)});
      return;
    }
    case DataType::kF16: {
      for (size_t i = 0; i < n; ++i) out[i] = base::to_f32(base::F16{load_bits(in, i)});
      return;
    }
  }
}

void narrow(const float* in, void* out, DataType type, size_t n) {
  switch (type) {
    case DataType::kF32:
      if (n != 0) std::memcpy(out, in, n * sizeof(float));  // no pointers where there is nothing
      return;
    case DataType::kBf16: {
      for (size_t i = 0; i < n; ++i) store_bits(out, i, base::to_bf16(in[i]).bits);
      return;
    }
    case DataType::kF16: {
      for (size_t i = 0; i < n; ++i) store_bits(out, i, base::to_f16(in[i]).bits);
      return;
    }
  }
}

void update(const StepScalars& scalars, const float* gradient, float* master, float* momentum,
            float* variance, size_t n, const float* squares) {
  const RuleScalars s = rule_scalars(scalars);
  for (size_t i = 0; i < n; ++i) {
    ElementState state{.master = master[i],
                       .momentum = momentum != nullptr ? momentum[i] : 0,
                       .variance = variance != nullptr ? variance[i] : 0};
    state = update_element(s, gradient[i], squares != nullptr, squares != nullptr ? squares[i] : 0,
                           state);
    master[i] = state.master;
    if (momentum != nullptr) momentum[i] = state.momentum;
    if (variance != nullptr) variance[i] = state.variance;
  }
}

void encode_bf16(const Progression& numbers, const float* in, uint16_t* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    out[i] = round_bf16(in[i], random_number(numbers, i));
  }
}

void encode_m24(const Progression& numbers, const float* in, uint16_t* upper, uint8_t* lower,
                size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = round_m24(in[i], random_number(numbers, i));
    upper[i] = static_cast<uint16_t>(bits >> 16);
    lower[i] = static_cast<uint8_t>(bits >> kM24Cut);
  }
}

void decode_m24(const uint16_t* upper, const uint8_t* lower, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = kernels::decode_m24(upper[i], lower[i]);
}

float encode_codes(int bits, PlaneKind kind, const Progression& numbers, const float* in,
                   uint8_t* out, size_t n) {
  const auto kept = [kind](float value) {
    return kind == PlaneKind::kVariance ? std::sqrt(value) : value;
  };
  uint32_t largest = 0;
  for (size_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::bit_cast<uint32_t>(kept(in[i])) & kMagnitudeMask);
  }
  const float step = group_step(bits, kind, largest);
  const float inverse = group_inverse(step);
  const auto codes_in_byte = static_cast<size_t>(8 / bits);
  std::fill_n(out, base::divide_up(n, codes_in_byte), uint8_t{0});
  if (inverse == 0) return step;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t random = random_number(numbers, i);
    const uint8_t code = kind == PlaneKind::kVariance
                             ? encode_root(bits, kept(in[i]), inverse, random)
                             : encode_momentum(bits, in[i], inverse, random);
    const size_t position = code_position(bits, i, n);
    out[position / codes_in_byte] |=
        static_cast<uint8_t>(code << (static_cast<size_t>(bits) * (position % codes_in_byte)));
  }
  return step;
}

void decode_codes(int bits, PlaneKind kind, float step, const uint8_t* in, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    out[i] = decode_code(bits, kind, code_at(bits, in, code_position(bits, i, n)), step);
  }
}

void multiply(const float* in, float by, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = in[i] * by;
}

double leaf_squares(const void* in, DataType type, size_t n) {
  std::array<double, kNormLanes> lanes{};
  std::array<float, kNormLanes> wide{};
  const auto* bytes = static_cast<const std::byte*>(in);
  for (size_t i = 0; i < n; i += kNormLanes) {
    const size_t count = std::min(kNormLanes, n - i);
    widen(bytes + i * base::data_type_bytes(type), type, wide.data(), count);
    for (size_t l = 0; l < count; ++l) {
      const double value = wide[l];
      lanes[l] += value * value;
    }
  }
  for (size_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace

const TileKernels& scalar_tiles() {
  static const TileKernels kTiles{.isa = "scalar",
                                  .widen = widen,
                                  .narrow = narrow,
                                  .update = update,
                                  .update_whole_tiles = nullptr,
                                  .encode_bf16 = encode_bf16,
                                  .encode_m24 = encode_m24,
                                  .decode_m24 = decode_m24,
                                  .encode_codes = encode_codes,
                                  .decode_codes = decode_codes,
                                  .multiply = multiply,
                                  .leaf_squares = leaf_squares,
                                  .selection = scalar_selection(),
                                  .feedback = scalar_feedback(),
                                  .signs = scalar_signs(),
                                  .attention = scalar_attention(),
                                  .row_product = scalar_row_product()};
  return kTiles;
}

}  // namespace smartinf::kernels
