// How momentum and variance become bf16 or 8-bit codes and come back: arithmetic.h's codecs by the
// plane's kind. docs/numerics.md has the reasons.
#pragma once

#include <cstddef>
#include <cstdint>

#include "smartinf/base/state_format.h"
#include "smartinf/kernels/arithmetic.h"

namespace smartinf::kernels {

static_assert(kGroupElements == base::kQ8GroupElements);

inline const Progression& progression(const RoundingKey& key, base::PlaneKind kind) {
  return kind == base::PlaneKind::kVariance ? key.variance : key.momentum;
}

inline uint32_t random_number(const RoundingKey& key, base::PlaneKind kind, size_t lane) {
  return random_at(progression(key, kind), static_cast<uint32_t>(lane));
}

inline float group_step(base::PlaneKind kind, uint32_t magnitude_bits) {
  return kind == base::PlaneKind::kVariance ? variance_step(magnitude_bits)
                                            : momentum_step(magnitude_bits);
}

}  // namespace smartinf::kernels
