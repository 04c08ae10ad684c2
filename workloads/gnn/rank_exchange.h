// What the ranks of an epoch hand each other: rows before each step, sums of gradients, parameters,
// and what they have counted.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "smartinf/base/status.h"

#include "workloads/gnn/epoch_plan.h"

namespace smartinf::workloads {

struct EpochReport {
  uint64_t epoch = 0;                // from 1; 0: before the first
  double loss = 0;                   // mean over the vertices that are trained with
  std::array<double, 3> accuracy{};  // of training, validation and test
  std::array<uint64_t, 6> counts{};  // of vertices: right and all of each of these
  double seconds = 0;
  uint64_t up_bytes = 0, down_bytes = 0;  // counted by this rank's devices, as planned above
  uint64_t planned_up_bytes = 0, planned_down_bytes = 0, row_bytes = 0;
  double compute_seconds = 0;                    // of parts
  double row_seconds = 0;                        // that rows were waited for, and put
  double exchange_seconds = 0;                   // of this rank, with waiting for others
  uint64_t within_bytes = 0, between_bytes = 0;  // of all ranks
  uint64_t planned_within_bytes = 0, planned_between_bytes = 0;

  void add(const EpochReport& batch);
};

/// Rank 0 has the parameters. Servers' first ranks speak for their servers. Without collectives all
/// calls return at once. Threads: one caller, that of the collectives.
class RankExchange {
 public:
  /// plan outlives it, and may be made later.
  RankExchange(const RankOptions& ranks, const EpochPlan& plan) : ranks_(ranks), plan_(plan) {}

  bool alone() const { return ranks_.collectives == nullptr; }
  bool first_rank() const { return ranks_.rank == 0; }
  /// Fails on all ranks where it has failed on one. what: must be the same on all.
  base::Status all_ok(const std::string& what, const base::Status& mine);

  using Read = std::function<base::Status(size_t table, std::span<const graph::Vertex> vertices,
                                          std::span<float> out)>;
  using Write = std::function<base::Status(size_t table, std::span<const graph::Vertex> vertices,
                                           std::span<const float> values)>;
  /// Rows that ranks lack for a step.
  base::Status rows(size_t step, const Read& read, const Write& write, EpochReport& report);
  /// Sums up what all ranks have found; the loss is a sum as well.
  base::Status sum_report(std::span<const double> block_losses, EpochReport& report);
  /// Rank 0 gets all ranks' sums of each layer, those of a server from its leader. Servers' samples
  /// are summed server by server.
  base::Status gradients(std::span<const Layer> layers, std::span<BlockSums> sums);
  /// Rank 0's to all, by leaders; fails on all ranks where it has failed on one.
  base::Status parameters(const base::Status& mine, uint64_t& done, std::span<float> values);

 private:
  /// The first rank of this one's server.
  uint32_t leader() const { return ranks_.rank - ranks_.rank % plan_.spread.ranks_of_server(); }
  base::Status send_sums(std::span<BlockSums> sums, uint32_t to);
  base::Status receive_sums(std::span<const Layer> layers, std::span<BlockSums> sums,
                            uint32_t first, uint32_t end, uint32_t stride);
  template <typename T>
  base::Status send(std::span<const T> values, uint32_t to) {
    SI_ASSIGN_OR_RETURN(const auto call, ranks_.collectives->send(engine::Channel::kControl,
                                                                  std::as_bytes(values), to));
    return call->wait();
  }
  template <typename T>
  base::Status receive(std::span<T> values, uint32_t from) {
    SI_ASSIGN_OR_RETURN(const auto call,
                        ranks_.collectives->receive(engine::Channel::kControl,
                                                    std::as_writable_bytes(values), from));
    return call->wait();
  }

  const RankOptions& ranks_;
  const EpochPlan& plan_;
};

}  // namespace smartinf::workloads
