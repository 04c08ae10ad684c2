// Knowledge of the ranks of a run about each other beside their collective calls, through torch's
// key-value store: who they are, that they live, and why one of them gave up.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "smartinf/base/status.h"
#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/train/ranks/environment.h"

namespace smartinf::train {

/// A rank's process.
struct RankMember {
  uint32_t rank = 0;
  uint64_t process = 0;
  uint64_t started = 0;  // when the process began, in the kernel's ticks
  std::string machine;   // the same for processes that see each other's numbers
  std::string host;

  /// "rank 2 (process 417 on node1)".
  std::string name() const;
};

/// A thread of its own writes a sign of life to the store and looks at those of the others, twenty
/// times within the timeout, and every five seconds at least. The first failure that any rank
/// reports, or sees of another, is the failure on all ranks.
///
/// Threads: any.
class RankWatch {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Meets the other ranks, for at most `timeout`. A rank that gives no sign of life for so long
  /// has failed. Errors: kTimeout with the ranks that did not come; kIo where there is no store.
  static base::Result<std::unique_ptr<RankWatch>> join(const RankEnvironment& environment,
                                                       Milliseconds timeout);
  /// This rank leaves, in peace where no failure is known. Who serves the store waits some seconds
  /// until the others know as well.
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  const std::vector<RankMember>& members() const;
  uint32_t rank() const;
  Milliseconds timeout() const;
  /// A connection of its own, where keys begin with `prefix`. Errors: torch throws.
  c10::intrusive_ptr<c10d::Store> store(const std::string& prefix) const;

  /// Ok where none is known.
  base::Status failure() const;
  /// Calls `act` once, as soon as a failure is known, on the thread that gets to know it. act:
  /// short, and calls nothing here; empty: nothing is called from here on.
  void when_failed(std::function<void()> act);
  /// This rank has failed.
  void report(const base::Status& why);
  /// This rank waits for a message of another one, or for none any more.
  void waits_for(engine::Channel channel, std::optional<uint32_t> rank);
  /// Waits until every rank has called this as often as this one, or a failure is known.
  base::Status barrier_without_timeout();
  /// A call has broken, or `other` did not answer in time. Waits for a few signs of life until it
  /// is known why, and returns that; never ok. what: what torch said.
  base::Status cause_of(engine::Channel channel, std::optional<uint32_t> other,
                        const std::string& what, bool timed_out);

 private:
  struct Shared;
  explicit RankWatch(std::shared_ptr<Shared> shared);

  const std::shared_ptr<Shared> shared_;  // with the thread, which may hang in a broken connection
  std::thread thread_;
};

}  // namespace smartinf::train
