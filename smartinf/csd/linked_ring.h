// A ring whose transfers pass through links: an emulated drive, or a drive behind the host link.
// Data moves at once; the completion is held back until every link has let the bytes pass.
#pragma once

#include <memory>
#include <vector>

#include "smartinf/csd/link.h"
#include "smartinf/csd/options.h"
#include "smartinf/storage/ring.h"

namespace smartinf::csd {

/// Reads go up, writes down; a sync passes freely. A transfer takes its time of all links at once,
/// as if cut through, and is done when the slowest has let it pass.
std::unique_ptr<storage::Ring> make_linked_ring(std::unique_ptr<storage::Ring> inner,
                                                std::vector<std::shared_ptr<Link>> links);

/// options.store with options.links.store put between the store and its ring.
storage::StoreOptions linked_store_options(const LocalDeviceOptions& options);

}  // namespace smartinf::csd
