#include "workloads/gnn/ranks.h"

#include <chrono>

#include "smartinf/train/ranks/environment.h"
#include "smartinf/train/ranks/join_ranks.h"

namespace smartinf::workloads {

/// A rank that computes a layer for longer before it comes to the others is given up.
constexpr std::chrono::minutes kTimeout{30};

int start_with_ranks(char** /*arguments*/) { return 0; }

base::Status join_ranks(RankOptions& ranks) {
  SI_ASSIGN_OR_RETURN(const auto environment, train::rank_environment());
  if (!environment) return base::Status();
  SI_ASSIGN_OR_RETURN(const train::Ranks joined, train::join_ranks(*environment, kTimeout));
  ranks.rank = joined.rank();
  ranks.ranks = joined.world();
  ranks.collectives = joined.collectives();
  return base::Status();
}

}  // namespace smartinf::workloads
