#include "smartinf/plan/block_stages.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"

namespace smartinf::plan {

double block_stage_seconds(std::span<const BlockCost> blocks, const BlockRanks& ranks,
                           uint32_t first, uint32_t end, uint32_t replicas) {
  double seconds = first == 0 ? ranks.loading_s : 0;
  double update_s = 0;
  double gradient_bytes = 0;
  for (const BlockCost& block : blocks.subspan(first, end - first)) {
    seconds += block.teacher_s + block.student_s;
    update_s += block.update_s;
    gradient_bytes += static_cast<double>(block.gradient_bytes);
  }
  const uint64_t parts = ranks.micro_batches;
  seconds = parts == 0 ? seconds / replicas
                       : seconds * static_cast<double>(base::divide_up(parts, replicas)) /
                             static_cast<double>(parts);
  seconds += update_s;
  if (ranks.link_bytes_per_s <= 0) return seconds;
  double bytes = 2.0 * (replicas - 1) / replicas * gradient_bytes;
  if (end < blocks.size()) bytes += static_cast<double>(ranks.activation_bytes) / replicas;
  return seconds + bytes / ranks.link_bytes_per_s;
}

base::Result<std::vector<BlockStage>> divide_blocks(std::span<const BlockCost> blocks,
                                                    const BlockRanks& ranks) {
  SI_CHECK(!blocks.empty() && ranks.ranks > 0, "there are blocks, and ranks");
  const auto count = static_cast<uint32_t>(blocks.size());
  constexpr double kNever = std::numeric_limits<double>::infinity();
  /// The best division of the first blocks among exactly so many ranks, and its last stage.
  struct Best {
    double slowest = kNever;
    BlockStage last;
  };
  std::vector<std::vector<Best>> best(count + 1, std::vector<Best>(ranks.ranks + 1));
  best[0][0].slowest = 0;
  for (uint32_t end = 1; end <= count; ++end) {
    uint64_t bytes = 0;
    for (uint32_t first = end; first-- > 0;) {
      bytes += blocks[first].memory_bytes;
      if (ranks.memory_bytes != 0 && bytes > ranks.memory_bytes) break;
      const uint64_t most = ranks.micro_batches == 0 ? ranks.ranks : ranks.micro_batches;
      for (uint32_t replicas = 1; replicas <= std::min<uint64_t>(ranks.ranks, most); ++replicas) {
        const double seconds = block_stage_seconds(blocks, ranks, first, end, replicas);
        for (uint32_t all = replicas; all <= ranks.ranks; ++all) {
          const double slowest = std::max(best[first][all - replicas].slowest, seconds);
          // First ones have more blocks: an equal one that comes later has fewer in front.
          if (slowest > best[end][all].slowest || slowest == kNever) continue;
          best[end][all] = {slowest, {first, end, replicas, seconds}};
        }
      }
    }
  }
  const auto& whole = best[count];
  const auto fastest = std::ranges::min_element(whole, {}, &Best::slowest);
  if (fastest->slowest == kNever) {
    const auto largest = std::ranges::max_element(blocks, {}, &BlockCost::memory_bytes);
    return base::Status(
        base::ErrorCode::kOutOfMemory,
        fmt::format("{} blocks do not fit on {} rank{} of {} each; the largest needs {}", count,
                    ranks.ranks, ranks.ranks == 1 ? "" : "s",
                    base::format_bytes(ranks.memory_bytes),
                    base::format_bytes(largest->memory_bytes)),
        "Take more ranks, or ranks with more memory");
  }
  std::vector<BlockStage> stages;
  auto left = static_cast<uint32_t>(fastest - whole.begin());
  for (uint32_t end = count; end > 0;) {
    stages.insert(stages.begin(), best[end][left].last);
    left -= stages.front().ranks;
    end = stages.front().first;
  }
  return stages;
}

}  // namespace smartinf::plan
