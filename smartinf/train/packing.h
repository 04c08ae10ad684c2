// Which pieces of documents share a window.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace smartinf::train {

/// The window of each piece, numbered from 0 without gaps, so that no window holds more than
/// `room`. Best-fit decreasing: the longest piece first, each into the window with the least room
/// left that still holds it. Follows from the arguments alone. Lengths are from 1 to `room`. Time:
/// n log n; memory: some 20 bytes a piece.
std::vector<uint64_t> pack(std::span<const uint32_t> lengths, uint32_t room);

}  // namespace smartinf::train
