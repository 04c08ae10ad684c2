// New weights on their way from the ranks whose devices have them to the ranks that compute with
// them, one subgroup after another, by a thread of its own. All ranks ask for the subgroups that
// they have or compute with in the same order.
//
// A subgroup's bytes carry behind them whether they are any good: what a device fails with is an
// error of the same wait on every rank.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/base/worker.h"
#include "smartinf/engine/device_updater.h"
#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/plan/rank_share.h"

namespace smartinf::engine {

/// Threads: one caller.
class WeightExchange {
 public:
  /// Where the rank that has a subgroup gets its weights from.
  enum class From : uint8_t {
    kUpdate,  // Updater::wait_weights(): they are at `out`
    kFetch,   // Updater::wait_fetched(), likewise
    kMemory,  // they are at `out` now
  };

  /// updater: of this rank. rank_of: of each subgroup; users: ranks that compute with each. All
  /// that is referred to outlives this.
  WeightExchange(std::shared_ptr<Collectives> ranks, DeviceUpdater& updater,
                 const std::vector<uint32_t>& rank_of,
                 const std::vector<std::vector<uint32_t>>& users, base::TrafficCounter& traffic);
  /// Waits for what was asked for.
  ~WeightExchange() = default;
  WeightExchange(const WeightExchange&) = delete;
  WeightExchange& operator=(const WeightExchange&) = delete;

  /// Puts the weights of a subgroup to out, [count] of type, in its turn. At most one of each kind
  /// for a subgroup until it was waited for.
  void start(From from, size_t subgroup, base::DataType type, void* out);
  /// How the last one of that kind and subgroup ended; it is not forgotten. Ok where there was
  /// none.
  base::Status wait(From from, size_t subgroup);
  /// Waits for all of a kind, or for all.
  void wait_for_all(From from);
  void wait_for_all();

 private:
  static constexpr size_t kKinds = 3;
  static constexpr size_t kInFlight = plan::kRankSubgroupsInFlight;
  struct Job {
    From from = From::kUpdate;
    size_t subgroup = 0;
    base::DataType type = base::DataType::kBf16;
    std::byte* out = nullptr;
    uint64_t bytes = 0;
    std::vector<std::byte>* memory = nullptr;  // the bytes, and the outcome behind them
    std::vector<std::unique_ptr<Collectives::Pending>> messages;
    base::Status status;  // of who started them, or has the weights
  };

  void work(Job job);  // the thread
  void end_oldest();
  static uint64_t identity_of(const Job& job);
  /// Whether begin() of the job would wait for this rank's devices.
  bool would_wait(const Job& job) const;
  void begin(Job& job);
  void end(Job& job);
  bool here(const Job& job) const { return rank_of_[job.subgroup] == ranks_->rank(); }

  const std::shared_ptr<Collectives> ranks_;
  DeviceUpdater& updater_;
  const std::vector<uint32_t>& rank_of_;
  const std::vector<std::vector<uint32_t>>& users_;
  base::TrafficCounter& traffic_;
  std::array<std::vector<std::byte>, kInFlight> memory_;  // the thread's
  std::deque<Job> in_flight_;                             // likewise

  mutable std::mutex mutex_;  // of everything below
  std::condition_variable changed_;
  std::array<size_t, kKinds> under_way_{};                 // jobs of each kind
  std::array<std::vector<uint8_t>, kKinds> pending_;       // of every subgroup
  std::array<std::vector<base::Status>, kKinds> outcome_;  // likewise

  base::Worker<Job> worker_;  // the last: it uses all others
};

}  // namespace smartinf::engine
