// Figures of a server and its drives, for the metrics page.
#pragma once

#include <string>

#include "smartinf/serve/server.h"
#include "smartinf/serve/server_metrics.h"

#include "apps/smartinf/drive_watch.h"
#include "apps/smartinf/serve_file.h"

namespace smartinf::apps {

/// started_s, certificate_until_s: seconds since 1970. The drives in the order of the file.
serve::ServerMetrics collect_metrics(const serve::Server& server, const ServeFile& file,
                                     const DriveWatch& drives, double started_s,
                                     double certificate_until_s);

}  // namespace smartinf::apps
