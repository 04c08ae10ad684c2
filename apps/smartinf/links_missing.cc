// A process without torch's process groups measures no links.
#include "apps/smartinf/calibrate_links.h"
#include "apps/smartinf/commands.h"

namespace smartinf::apps {

int run_links(const LinksJob& /*job*/) {
  return report(base::Status(base::ErrorCode::kUnsupported,
                             "--links needs ranks, and this build has no torch",
                             "Build with torch, or write the cluster's file by hand "
                             "(docs/cluster.md)."),
                kExitUsage);
}

}  // namespace smartinf::apps
