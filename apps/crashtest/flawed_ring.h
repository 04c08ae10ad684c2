// Commits as they must not be: the store's own order of writes and syncs, broken on its way to the
// drive. The crash test must see such a store lose steps; otherwise it would prove nothing.
#pragma once

#include <memory>

#include "smartinf/storage/ring.h"

namespace smartinf::crash {

enum class CommitFlaw {
  kNone,
  kNoSync,           // syncs are reported as done and not carried out
  kSuperblockFirst,  // planes and tables reach the drive after the superblock that speaks of them
  kRowsNoSync,       // kNoSync for the rows of tables alone
};

std::unique_ptr<storage::Ring> make_flawed_ring(std::unique_ptr<storage::Ring> inner,
                                                CommitFlaw flaw);

}  // namespace smartinf::crash
