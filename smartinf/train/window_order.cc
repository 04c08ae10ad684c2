#include "smartinf/train/window_order.h"

#include <bit>

#include "smartinf/train/random.h"

namespace smartinf::train {

uint64_t window_at(uint64_t seed, uint64_t windows, uint64_t position) {
  const uint64_t epoch_seed = random_bits(seed, position / windows);
  // A balanced Feistel network permutes the numbers of an even count of bits; numbers that are no
  // window are sent through it again, which ends because a permutation returns to where it began.
  // The next power of four is below four times the windows, so that takes four rounds on average.
  const auto half_bits = (static_cast<uint32_t>(std::bit_width(windows)) + 1) / 2;
  const uint64_t half_mask = (uint64_t{1} << half_bits) - 1;
  uint64_t value = position % windows;
  do {
    uint64_t left = value >> half_bits;
    uint64_t right = value & half_mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = left ^ (random_bits(epoch_seed + round, right) & half_mask);
      left = right;
      right = mixed;
    }
    value = (left << half_bits) | right;
  } while (value >= windows);
  return value;
}

}  // namespace smartinf::train
