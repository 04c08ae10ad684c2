// Which weights are being fetched from the devices, and which of them a running update makes when
// it is asked for them. Pure bookkeeping: no threads, no devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::engine {

/// Subgroups by their index in the run.
class WeightFetches {
 public:
  explicit WeightFetches(size_t subgroups) : fetches_(subgroups), on_demand_(subgroups, 0) {}

  /// A fetch was sent. after_commit: no update makes these weights, they come after the commit.
  void start(size_t subgroup, bool after_commit) {
    fetches_[subgroup] = {State::kUnderWay, after_commit, {}};
    on_demand_[subgroup] = 0;
  }
  void end(size_t subgroup, base::Status status) {
    fetches_[subgroup].state = State::kDone;
    fetches_[subgroup].status = std::move(status);
  }
  bool under_way(size_t subgroup) const { return fetches_[subgroup].state == State::kUnderWay; }
  bool done(size_t subgroup) const { return fetches_[subgroup].state == State::kDone; }
  bool after_commit(size_t subgroup) const { return fetches_[subgroup].after_commit; }
  /// How a fetch that is done ended; it is forgotten.
  base::Status take(size_t subgroup) {
    return std::move(std::exchange(fetches_[subgroup], {}).status);
  }

  /// The update that starts makes the subgroup's weights when they are asked for.
  void add_on_demand(size_t subgroup) {
    on_demand_[subgroup] = 1;
    waits_ = true;
  }
  bool on_demand(size_t subgroup) const { return on_demand_[subgroup] != 0; }
  /// An update may wait for fetches. False after finish().
  bool update_waits() const { return waits_; }
  void finish() {
    waits_ = false;
    on_demand_.assign(on_demand_.size(), 0);
  }

 private:
  enum class State : uint8_t { kNone, kUnderWay, kDone };
  struct Fetch {
    State state = State::kNone;
    bool after_commit = false;
    base::Status status;
  };
  std::vector<Fetch> fetches_;
  std::vector<uint8_t> on_demand_;
  bool waits_ = false;
};

}  // namespace smartinf::engine
