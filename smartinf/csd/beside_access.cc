#include "smartinf/csd/beside_access.h"

#include "smartinf/csd/messages/cache/cache_access.h"
#include "smartinf/csd/messages/rows/rows_access.h"
#include "smartinf/csd/spool_access.h"

namespace smartinf::csd {

std::vector<std::unique_ptr<BesideAccess>> make_beside_accesses(DeviceParts& parts) {
  std::vector<std::unique_ptr<BesideAccess>> all;
  all.push_back(std::make_unique<SpoolAccess>(parts));
  all.push_back(std::make_unique<CacheAccess>(parts));
  all.push_back(std::make_unique<RowsAccess>(parts));
  return all;
}

}  // namespace smartinf::csd
