// Which of what autograd keeps of units of layers and micro batches is offloaded, and which is
// computed again: measured in the first steps. Needs no torch. Pure but for measure_spool().
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/engine/spool.h"

namespace smartinf::train {

/// Bytes per second of all devices together.
struct SpoolRates {
  double write = 0;
  double read = 0;
};

/// Writes `memory` to the spool and reads it back, at most 256 MiB of it; what was there is lost.
/// Aligned as Spool says. Errors: the devices'.
base::Result<SpoolRates> measure_spool(engine::Spool& spool, std::span<std::byte> memory);

/// Whether an entry is offloaded. Of so many entries, in the order of forward, those are: the last
/// ones, for which there are buffers, and the others evenly, so that the drives have time for each.
bool is_offloaded(uint64_t entry, uint64_t offloaded, uint64_t in_memory, uint64_t entries);

/// The keep rule. Steps in which all is computed again tell how long an entry takes to compute and
/// what the drives have to do beside activations. Then as many entries are offloaded as the drives
/// can write and read in the time that is left, and fewer if the step waited for them; each number
/// is tried for kSteps steps, and the one with the fastest step stays. As drives wear, it has to
/// gain kGain.
///
/// Threads: one caller.
class OffloadChoice {
 public:
  static constexpr int kSteps = 2;
  static constexpr size_t kTrials = 3;
  static constexpr double kGain = 0.02;

  struct Entries {
    uint64_t count = 0;      // of units of layers and micro batches
    uint64_t in_memory = 0;  // of them, for which there are buffers
    uint64_t bytes = 0;      // of each
    SpoolRates rates;
  };
  /// Measurements of one step.
  struct Measured {
    double seconds = 0;
    double forward_s = 0;     // without what it waited for weights
    double waited_s = 0;      // for the spool
    uint64_t read_bytes = 0;  // by the drives, all together
    uint64_t written_bytes = 0;
  };

  explicit OffloadChoice(const Entries& entries) : entries_(entries) {}

  /// Entries to be offloaded in the next step.
  uint64_t offloaded() const { return trials_.back().offloaded; }
  bool decided() const { return decided_; }
  /// A step was made with offloaded(). The first one is not counted: memory is new, and there was
  /// no update to wait for. Once it is decided, what and why, for people; else empty.
  std::string stepped(const Measured& step);

 private:
  struct Trial {
    uint64_t offloaded = 0;
    Measured fastest{.seconds = std::numeric_limits<double>::infinity()};
    int steps = 0;
  };
  uint64_t next() const;
  uint64_t as_many_as_fit(double drives_s, double moved_s) const;
  std::string decide();

  Entries entries_;
  std::vector<Trial> trials_{Trial{}};  // the last one goes on
  bool warm_ = false;
  bool decided_ = false;
};

}  // namespace smartinf::train
