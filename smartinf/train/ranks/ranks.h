// This process among the ranks of a run, as the trainer uses it: what all agree on before they do
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/engine/ranks/collectives.h"

namespace smartinf::train {

/// Threads: one caller, the trainer's. Every call but failed() is made by all ranks in the same
/// order, and its errors are engine::Collectives'. Alone each returns what it was given.
class Ranks {
 public:
  /// One process alone.
  Ranks() = default;
  /// names: of all ranks, for messages. local: among the ranks of this machine.
  Ranks(std::shared_ptr<engine::Collectives> collectives, std::vector<std::string> names,
        uint32_t local_rank, uint32_t local_world)
      : collectives_(std::move(collectives)),
        names_(std::move(names)),
        rank_(collectives_->rank()),
        world_(collectives_->world()),
        local_rank_(local_rank),
        local_world_(local_world) {}

  bool alone() const { return world_ == 1; }
  uint32_t rank() const { return rank_; }
  uint32_t world() const { return world_; }
  /// Whether this rank writes the run's folder and speaks.
  bool first() const { return rank_ == 0; }
  uint32_t local_rank() const { return local_rank_; }
  uint32_t local_world() const { return local_world_; }
  const std::string& name(uint32_t rank) const { return names_[rank]; }
  const std::shared_ptr<engine::Collectives>& collectives() const { return collectives_; }

  /// Ok where all are; else the failure of the first rank that has one, on all of them.
  base::Status all_ok(std::string_view doing, const base::Status& mine) const;
  /// Rank 0's.
  base::Result<std::string> from_first(std::string text) const;
  /// Each rank's, of any size.
  base::Result<std::vector<std::string>> all_texts(std::string mine) const;
  /// Each rank's, as many from each: by rank.
  template <typename T>
  base::Result<std::vector<T>> all(std::span<const T> mine) const {
    if (alone()) return std::vector<T>(mine.begin(), mine.end());
    return engine::all_gather_values(*collectives_, engine::Channel::kControl, mine);
  }
  /// Waits for all.
  base::Status barrier() const;
  /// all_ok() to which ranks come at very different times (Collectives::barrier_without_timeout).
  base::Status all_ok_without_timeout(std::string_view doing, const base::Status& mine) const;
  /// This rank gives up; the others end with this as their error.
  void failed(const base::Status& why) const {
    if (!alone()) collectives_->failed(why);
  }

 private:
  std::shared_ptr<engine::Collectives> collectives_;  // null: alone
  std::vector<std::string> names_{"rank 0"};
  uint32_t rank_ = 0;
  uint32_t world_ = 1;
  uint32_t local_rank_ = 0;
  uint32_t local_world_ = 1;
};

}  // namespace smartinf::train
