// The state of a directory or a block device of this machine, without a device over it: how
// snapshots of it and new states in it are made.
#pragma once

#include <memory>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/storage/ring.h"
#include "smartinf/storage/state_reader.h"

namespace smartinf::csd {

/// name: in messages. Errors: storage::StateReader::open's.
base::Result<std::unique_ptr<Snapshot>> open_local_snapshot(const std::string& path,
                                                            const std::string& name,
                                                            storage::ReaderLock lock);

/// A state that is replaced in a directory is locked until the new one is finished or gone; the new
/// one is made in a directory inside it, so both need room. A block device cannot hold two: its old
/// state is gone at once.
/// Errors: storage::Store::create's; kBusy.
base::Result<std::unique_ptr<NewState>> create_local_state(const std::string& path,
                                                           const std::string& name,
                                                           const storage::StoreLayout& layout,
                                                           const NewStateOptions& options,
                                                           storage::RingKind ring);

/// Snapshot::drive() of what is made at a path, which may be missing still.
std::string local_drive(const std::string& path);

}  // namespace smartinf::csd
