// In which order training sees the windows of a corpus: every window once per epoch, in an order
// that follows from the seed. Nothing is stored: resuming at a position needs the position alone.
#pragma once

#include <cstdint>

namespace smartinf::train {

/// The window at `position` of an endless sequence of epochs, each a permutation of [0, windows).
/// windows > 0.
uint64_t window_at(uint64_t seed, uint64_t windows, uint64_t position);

}  // namespace smartinf::train
