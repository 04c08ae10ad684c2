#include "python/core/checksums.h"

#include <algorithm>
#include <span>

#include "smartinf/base/checksum.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/engine/gradient_path.h"

#include "python/core/arguments.h"

namespace smartinf::python {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{4} << 20;

}  // namespace

std::vector<uint64_t> checksums(const std::vector<uintptr_t>& addresses,
                                const std::vector<uint64_t>& sizes) {
  if (addresses.size() != sizes.size()) usage("a size is needed for every address");
  std::vector<std::span<const std::byte>> pieces;
  std::vector<size_t> ends;  // of each range among the pieces
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto* bytes = reinterpret_cast<const std::byte*>(addresses[i]);
    for (uint64_t at = 0; at < sizes[i]; at += kPieceBytes) {
      pieces.emplace_back(bytes + at, std::min(kPieceBytes, sizes[i] - at));
    }
    ends.push_back(pieces.size());
  }
  std::vector<uint64_t> sums(pieces.size());
  const auto threads = std::clamp<size_t>(pieces.size() / 4, 1, engine::gradient_threads());
  base::ThreadTeam team(static_cast<uint32_t>(threads), "si-checksum");
  team.run(pieces.size(), [&](uint32_t, size_t p) { sums[p] = base::checksum(pieces[p]); });
  std::vector<uint64_t> whole;
  size_t begin = 0;
  for (const size_t end : ends) {
    const std::span of_range(sums.data() + begin, end - begin);
    whole.push_back(base::checksum(std::as_bytes(of_range)));
    begin = end;
  }
  return whole;
}

}  // namespace smartinf::python
