// How planes become bf16, m24 or codes of 8 or 4 bits and come back: arithmetic.h's codecs by the
// plane's kind. docs/numerics.md has the reasons.
#pragma once

#include <cstddef>
#include <cstdint>

#include "smartinf/base/state_format.h"
#include "smartinf/kernels/arithmetic.h"

namespace smartinf::kernels {

static_assert(kGroupElements == base::kCodeGroupElements);

/// The random numbers of a plane's group in a step. `element` is the group's first.
inline Progression rounding_numbers(base::PlaneKind kind, uint64_t step_seed, uint64_t element) {
  if (kind == base::PlaneKind::kMaster) return master_rounding(step_seed, element);
  const RoundingKey key = rounding_key(step_seed, element);
  return kind == base::PlaneKind::kVariance ? key.variance : key.momentum;
}

inline uint32_t random_number(const Progression& numbers, size_t lane) {
  return random_at(numbers, static_cast<uint32_t>(lane));
}

inline float group_step(int bits, base::PlaneKind kind, uint32_t magnitude_bits) {
  return kind == base::PlaneKind::kVariance ? root_step(bits, magnitude_bits)
                                            : momentum_step(bits, magnitude_bits);
}

inline float decode_code(int bits, base::PlaneKind kind, uint8_t code, float step) {
  return kind == base::PlaneKind::kVariance ? decode_variance(bits, code, step)
                                            : decode_momentum(bits, code, step);
}

/// The code that is `position` codes behind the first.
inline uint8_t code_at(int bits, const uint8_t* codes, size_t position) {
  if (bits == 8) return codes[position];
  return codes[position / 2] >> (4 * (position % 2)) & 15;
}

}  // namespace smartinf::kernels
