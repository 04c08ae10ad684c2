// IEEE 754 binary32 in integers, rounded to nearest with ties to even, denormals kept: what the
// rules compute with on the card. Xilinx' floating-point operators, which Vitis HLS takes for
// `float`, make denormals zero, so their bits would not be those of every other processor
// (docs/decisions/fpga-kernels.md). Every loop has a fixed bound and every branch becomes a choice,
// so a pipeline of one result in a cycle comes out of it.
#pragma once

#include <cstdint>

namespace smartinf {
namespace fpga {

class Float32 {
 public:
  Float32() : bits_(0) {}
  Float32(float literal) {  // NOLINT: the rules' constants are written as literals
    union {
      float value;
      uint32_t bits;
    } both;
    both.value = literal;
    bits_ = both.bits;
  }
  static Float32 of_bits(uint32_t bits) {
    Float32 number;
    number.bits_ = bits;
    return number;
  }
  uint32_t bits() const { return bits_; }

  bool nan() const { return (bits_ & kMagnitude) > kInfinity; }
  bool infinite() const { return (bits_ & kMagnitude) == kInfinity; }
  bool zero() const { return (bits_ & kMagnitude) == 0; }
  bool negative() const { return bits_ >> 31 != 0; }

  Float32 operator-() const { return of_bits(bits_ ^ kSign); }

  friend bool operator==(Float32 a, Float32 b) {
    return !a.nan() && !b.nan() && (a.bits_ == b.bits_ || (a.zero() && b.zero()));
  }
  friend bool operator!=(Float32 a, Float32 b) { return !(a == b); }
  friend bool operator<(Float32 a, Float32 b) {
    return !a.nan() && !b.nan() && !(a.zero() && b.zero()) && a.ordered() < b.ordered();
  }
  friend bool operator>(Float32 a, Float32 b) { return b < a; }

  friend Float32 operator-(Float32 a, Float32 b) { return a + -b; }
  friend Float32 operator+(Float32 a, Float32 b);
  friend Float32 operator*(Float32 a, Float32 b);
  friend Float32 operator/(Float32 a, Float32 b);
  friend Float32 square_root(Float32 a);

 private:
  static const uint32_t kSign = 0x80000000u;
  static const uint32_t kMagnitude = 0x7fffffffu;
  static const uint32_t kInfinity = 0x7f800000u;
  static const uint32_t kHidden = 0x00800000u;
  static const uint32_t kNan = 0x7fc00000u;  // the one that the rules end with, whatever NaN it was

  /// Significand with its hidden bit, times 2^(exponent - 150).
  struct Parts {
    uint32_t significand;
    int exponent;
  };

  /// The number as an integer of the same order as the numbers.
  int32_t ordered() const {
    return negative() ? -static_cast<int32_t>(bits_ & kMagnitude)
                      : static_cast<int32_t>(bits_ & kMagnitude);
  }
  /// Parts of the number. A denormal has exponent 1, and no hidden bit.
  Parts parts() const {
    const int exponent = static_cast<int>(bits_ >> 23 & 0xff);
    const Parts found = {(bits_ & (kHidden - 1)) | (exponent != 0 ? kHidden : 0),
                         exponent != 0 ? exponent : 1};
    return found;
  }
  /// With the hidden bit in its place and an exponent that may be below 1. Not of zero.
  Parts normal_parts() const {
    Parts found = parts();
    const int shift = leading_zeros(found.significand) - 8;
    found.significand <<= shift;
    found.exponent -= shift;
    return found;
  }
  static int leading_zeros(uint32_t value) { return value == 0 ? 32 : __builtin_clz(value); }

  /// value >> shift, the last bit set if any that is lost was.
  static uint32_t shift_sticky(uint32_t value, int shift) {
    if (shift > 31) return value != 0 ? 1 : 0;
    const uint32_t lost = value & ((uint32_t{1} << shift) - 1);
    return value >> shift | (lost != 0 ? 1 : 0);
  }
  /// significand: three bits beyond those of the result, the last of which stands for all that
  /// follow. With the hidden bit in its place, or the exponent is 1.
  static Float32 rounded(uint32_t sign, int exponent, uint32_t significand) {
    if (exponent < 1) {
      significand = shift_sticky(significand, 1 - exponent);
      exponent = 1;
    }
    if (exponent > 254) return of_bits(sign | kInfinity);
    const bool up = (significand & 4) != 0 && (significand & 11) != 0;
    // A carry out of the significand makes the next exponent, up to infinity; without hidden bit
    // the exponent is 0.
    return of_bits(
        sign | ((static_cast<uint32_t>(exponent - 1) << 23) + (significand >> 3) + (up ? 1 : 0)));
  }

  uint32_t bits_;
};

inline Float32 operator+(Float32 a, Float32 b) {
  const bool a_larger = (a.bits_ & Float32::kMagnitude) >= (b.bits_ & Float32::kMagnitude);
  const Float32 large = a_larger ? a : b;
  const Float32 small = a_larger ? b : a;
  const uint32_t sign = large.bits_ & Float32::kSign;
  const bool subtract = large.negative() != small.negative();
  if (a.nan() || b.nan() || (small.infinite() && subtract)) return Float32::of_bits(Float32::kNan);
  if (large.infinite()) return large;
  const Float32::Parts x = large.parts();
  const Float32::Parts y = small.parts();
  const uint32_t aligned = Float32::shift_sticky(y.significand << 3, x.exponent - y.exponent);
  uint32_t sum = subtract ? (x.significand << 3) - aligned : (x.significand << 3) + aligned;
  if (sum == 0) return Float32::of_bits(subtract ? 0 : sign);
  int exponent = x.exponent;
  if (sum >> 27 != 0) {
    sum = Float32::shift_sticky(sum, 1);
    ++exponent;
  } else {
    const int zeros = Float32::leading_zeros(sum) - 5;
    const int shift = zeros < exponent ? zeros : exponent - 1;
    sum <<= shift;
    exponent -= shift;
  }
  return Float32::rounded(sign, exponent, sum);
}

inline Float32 operator*(Float32 a, Float32 b) {
  const uint32_t sign = (a.bits_ ^ b.bits_) & Float32::kSign;
  const bool infinite = a.infinite() || b.infinite();
  const bool zero = a.zero() || b.zero();
  if (a.nan() || b.nan() || (infinite && zero)) return Float32::of_bits(Float32::kNan);
  if (infinite) return Float32::of_bits(sign | Float32::kInfinity);
  if (zero) return Float32::of_bits(sign);
  const Float32::Parts x = a.normal_parts();
  const Float32::Parts y = b.normal_parts();
  // 24 by 24 bits, said so that no wider multiplier is made.
  uint64_t product = static_cast<uint64_t>(x.significand & 0xffffff) * (y.significand & 0xffffff);
  int exponent = x.exponent + y.exponent - 127;
  if (product >> 47 != 0) {
    ++exponent;
  } else {
    product <<= 1;
  }
  const uint32_t rest = (product & 0x1fffff) != 0 ? 1 : 0;
  return Float32::rounded(sign, exponent, static_cast<uint32_t>(product >> 21) | rest);
}

inline Float32 operator/(Float32 a, Float32 b) {
  const uint32_t sign = (a.bits_ ^ b.bits_) & Float32::kSign;
  if (a.nan() || b.nan() || (a.infinite() && b.infinite()) || (a.zero() && b.zero())) {
    return Float32::of_bits(Float32::kNan);
  }
  if (a.infinite() || b.zero()) return Float32::of_bits(sign | Float32::kInfinity);
  if (a.zero() || b.infinite()) return Float32::of_bits(sign);
  const Float32::Parts x = a.normal_parts();
  const Float32::Parts y = b.normal_parts();
  const bool below = x.significand < y.significand;
  uint32_t rest = below ? x.significand << 1 : x.significand;
  const int exponent = x.exponent - y.exponent + 127 - (below ? 1 : 0);
  uint32_t quotient = 0;
  for (int bit = 0; bit < 26; ++bit) {
    const bool fits = rest >= y.significand;
    quotient = quotient << 1 | (fits ? 1 : 0);
    rest = (fits ? rest - y.significand : rest) << 1;
  }
  return Float32::rounded(sign, exponent, quotient << 1 | (rest != 0 ? 1 : 0));
}

inline Float32 square_root(Float32 a) {
  if (a.nan() || (a.negative() && !a.zero())) return Float32::of_bits(Float32::kNan);
  if (a.infinite() || a.zero()) return a;
  const Float32::Parts x = a.normal_parts();
  const bool odd = (x.exponent & 1) == 0;  // without the bias of 127
  const int half = (x.exponent - 127 - (odd ? 1 : 0)) / 2;
  uint64_t radicand = static_cast<uint64_t>(x.significand) << (odd ? 28 : 27);  // 52 bits
  uint32_t root = 0;
  uint32_t rest = 0;
  for (int bit = 0; bit < 26; ++bit) {
    rest = rest << 2 | static_cast<uint32_t>(radicand >> 50 & 3);
    radicand <<= 2;
    const uint32_t candidate = root << 2 | 1;
    const bool fits = rest >= candidate;
    rest = fits ? rest - candidate : rest;
    root = root << 1 | (fits ? 1 : 0);
  }
  return Float32::rounded(0, half + 127, root << 1 | (rest != 0 ? 1 : 0));
}

}  // namespace fpga
}  // namespace smartinf
