// Which bytes of a bucket of gradients go from which rank to which, as all ranks compute it for
// themselves. Pure: no threads, no calls.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/gradient_tracker.h"
#include "smartinf/plan/micro_batches.h"

namespace smartinf::engine {

/// Ranks that share the micro batches of a gradient.
struct Holders {
  uint32_t first = 0;
  uint32_t count = 0;

  friend auto operator<=>(const Holders&, const Holders&) = default;
};

/// Format of what is sent for an element of a step's gradient, and the way in which it is added up.
struct SumFormat {
  struct Node {
    uint32_t rank = 0;
    base::DataType type = base::DataType::kF32;
    /// After it the topmost sum is added to the one below so many times.
    uint32_t added = 0;
  };
  std::vector<Node> nodes;      // of all ranks, in the order of micro batches
  size_t stack_max = 0;         // sums at once
  std::vector<uint64_t> bytes;  // for one element, of each rank's nodes
  uint64_t bytes_max = 0;       // of any rank
  uint64_t bytes_of_all = 0;
  std::optional<uint32_t> only;  // the rank that has all nodes
  bool replicated = false;       // several ranks share the micro batches of every tree
  uint32_t last_stage = 0;       // of those that have a tree

  /// trees: who has each (GradientSums::trees).
  static SumFormat make(uint64_t micro_batches, base::DataType type, uint32_t world,
                        std::span<const Holders> trees);
  /// [count] values of a node, with space behind them that keeps what follows aligned.
  static uint64_t array_bytes(base::DataType type, uint64_t count) {
    return (count * base::data_type_bytes(type) + 7) / 8 * 8;
  }
  size_t nodes_of(uint32_t rank) const {
    return static_cast<size_t>(std::ranges::count(nodes, rank, &Node::rank));
  }
  /// Bytes of all nodes of a rank.
  uint64_t part_bytes(uint32_t rank, uint64_t count) const;
};

/// Formats of the steps so far; addresses stay.
class SumFormats {
 public:
  explicit SumFormats(uint32_t world) : world_(world) {}
  const SumFormat& of(uint64_t micro_batches, base::DataType type, std::vector<Holders> trees);

 private:
  const uint32_t world_;
  std::map<std::tuple<uint64_t, base::DataType, std::vector<Holders>>, std::unique_ptr<SumFormat>>
      formats_;
};

/// Elements that one rank gets of a piece.
using GradientPart = GradientTracker::Piece;

/// Where elements go.
class GradientLayout {
 public:
  /// rank_of: of each subgroup of the set. Both outlive this.
  GradientLayout(const DeviceSet& set, const std::vector<uint32_t>& rank_of)
      : set_(set), rank_of_(rank_of) {}

  /// The rank that measures a piece which begins there.
  uint32_t measuring_rank(uint64_t first) const { return rank_of_[set_.subgroup_at(first)]; }
  /// Calls visit(rank, part) for each part that a rank gets of the piece, in order; a part that is
  /// `measured` is the whole piece.
  template <typename Visit>
  void visit_parts(const GradientTracker::Piece& piece, const Visit& visit) const {
    const uint32_t measuring = measuring_rank(piece.first);
    visit(measuring, piece);
    const uint64_t end = piece.first + piece.count;
    for (size_t i = set_.subgroup_at(piece.first);
         i < set_.subgroups.size() && set_.subgroups[i].first < end; ++i) {
      if (rank_of_[i] == measuring) continue;
      const plan::Subgroup& subgroup = set_.subgroups[i];
      const uint64_t from = std::max(piece.first, subgroup.first);
      const uint64_t to = std::min(end, subgroup.first + subgroup.count);
      visit(rank_of_[i], GradientPart{piece.index, from, to - from, false});
    }
  }

 private:
  const DeviceSet& set_;
  const std::vector<uint32_t>& rank_of_;
};

}  // namespace smartinf::engine
