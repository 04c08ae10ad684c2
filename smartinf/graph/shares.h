// Who computes what where the ranks of some servers train on one graph. Each rank has vertices of
// its own. The ranks of a server together also compute vertices around the server's own, so far
// out that the first propagations of an epoch need nothing of other servers: what GraNNDis (PACT
// 2024) calls flexible preloading, because features of these vertices are there from the start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/graph/csr.h"
#include "smartinf/graph/neighbourhood.h"

namespace smartinf::graph {

/// Own vertices of the ranks. Those of a server are next to each other.
struct Spread {
  std::vector<Vertex> bounds{0, 0};  // [ranks + 1]
  uint32_t servers = 1;

  uint32_t ranks() const { return static_cast<uint32_t>(bounds.size() - 1); }
  uint32_t ranks_of_server() const { return ranks() / servers; }
  uint32_t server_of(uint32_t rank) const { return rank / ranks_of_server(); }
  uint32_t owner(Vertex vertex) const;
};

/// One step in which vertices take in rows of their neighbours: activations forward, gradients
/// backward. A ring is what lies so many hops around a server's own vertices.
struct Propagation {
  uint32_t out = 0;        // results are wanted for the rings up to this one
  bool between = false;    // from their owners, also of other servers; else from the same server
  bool preloaded = false;  // all of them are there: features

  bool operator==(const Propagation&) const = default;
};
/// Of an epoch: [2 * layers - 1], the layers forward, then backward from the last one's to the
/// second one's. The first `hops` of them need nothing of other servers; the rest takes from
/// owners what they have made. hops: at most 2 * layers - 1.
std::vector<Propagation> propagations(uint32_t layers, uint32_t hops);
/// The same where each server has a graph of its own, that of a sample which reaches `hops` rings
/// out: nothing comes from other servers.
std::vector<Propagation> sampled_propagations(uint32_t layers, uint32_t hops);

/// The edges among a server's own vertices and the sample around them; other vertices have none.
Csr sampled_graph(const Csr& csr, const Spread& spread, uint32_t server, const Sampling& sampling);

/// Vertices that the ranks of one server compute. Threads: one caller.
class ServerShare {
 public:
  /// Some vertices of a ring that one rank computes.
  struct Piece {
    uint32_t ring = 0;
    size_t first = 0, count = 0;  // among computed()
    uint64_t number = 0;          // among the server's, whatever ranks it has
  };

  /// Rings up to `rings` are dealt out to the server's ranks, in pieces of piece_vertices. csr and
  /// spread outlive it.
  ServerShare(const Csr& csr, const Spread& spread, uint32_t server, uint32_t rings,
              uint64_t piece_vertices);

  // rank: of the run, one of this server's.

  /// Own vertices first, then ring by ring: each ring's are behind those of the rings before.
  std::span<const Vertex> computed(uint32_t rank, uint32_t rings) const;
  std::span<const Piece> pieces(uint32_t rank) const { return of_[local(rank)].pieces; }
  /// Neighbours of all that the rank computes which it does not compute, ascending.
  std::vector<Vertex> read_only(uint32_t rank);
  /// Rows that the rank lacks for a propagation, by the rank that has made them: [ranks], each
  /// ascending.
  std::vector<std::vector<Vertex>> lacking(uint32_t rank, const Propagation& step);

 private:
  struct OfRank {
    std::vector<Vertex> vertices;
    std::vector<size_t> ends;  // [rings + 1]
    std::vector<Piece> pieces;
  };
  uint32_t local(uint32_t rank) const { return rank - first_rank_; }
  template <typename Has>
  std::vector<Vertex> neighbours_without(std::span<const Vertex> of, const Has& has);

  const Csr& csr_;
  const Spread& spread_;
  uint32_t first_rank_ = 0;
  std::vector<OfRank> of_;
  std::vector<uint32_t> made_by_;  // [vertices]: the rank of this server; none: kNobody
  std::vector<bool> seen_;
};

/// What an epoch costs with so many hops preloaded.
struct PreloadCost {
  uint32_t hops = 0;
  // Of the rank with the most in each propagation, summed over them.
  double work = 0;             // where one process alone has 1
  uint32_t exchanges = 0;      // propagations before which ranks hand each other rows
  uint64_t row_bytes = 0;      // read from tables and written to them
  uint64_t within_bytes = 0;   // sent or received
  uint64_t between_bytes = 0;  // of the server that moves most, likewise
  uint64_t room_bytes = 0;     // of the largest rank's tables
};
struct PreloadRates {
  double alone_s = 0;  // an epoch's computing in one process that has a rank's cores
  double rows = std::numeric_limits<double>::infinity();  // bytes per second of a rank's tables
  double within = 0;   // bytes per second of a rank, in each direction
  double between = 0;  // of a server
  double exchange_s = 0;               // of an exchange of few rows
  uint64_t room_bytes = ~uint64_t{0};  // of a rank
};
double predicted_seconds(const PreloadCost& cost, const PreloadRates& rates);
/// The place of the fastest of those that have room; of equals the one with fewer hops. Errors:
/// kOutOfMemory where none has room, with the least that is needed.
base::Result<size_t> choose_preload(std::span<const PreloadCost> costs, const PreloadRates& rates);

}  // namespace smartinf::graph
