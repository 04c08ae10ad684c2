// Position that the trainer commits with each step: where the data goes on, what must be the same
// when a run goes on, and the folder that the run belongs to.
#pragma once

#include <cstdint>
#include <string>

#include "smartinf/base/status.h"

namespace smartinf::train {

struct Position {
  uint64_t windows = 0;  // seen so far: where the data goes on
  uint64_t data_seed = 0;
  uint64_t sequence = 0;
  uint64_t corpus = 0;  // digest
  uint64_t base = 0;    // digest of the weights that adapters are beside; 0: see the next
  /// The same of the files' ends, of versions that read no more; 0: there are no adapters.
  uint64_t base_ends = 0;
  std::string folder;  // of the run, absolute; empty: of a version that did not say

  std::string to_json() const;
  /// Errors: kMismatch for what this trainer did not write.
  static base::Result<Position> from_json(const std::string& text);
};

}  // namespace smartinf::train
