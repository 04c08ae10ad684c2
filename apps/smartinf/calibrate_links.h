// `smartinf calibrate --links`, under torchrun: the links between the boxes of several ranks.
#pragma once

#include <functional>
#include <string>

#include "smartinf/base/status.h"

namespace smartinf::apps {

struct LinksJob {
  std::string file;  // cluster's, to write
  std::string name;
  /// Measures this box's machine and returns its file's text; null: machine files are there.
  std::function<base::Result<std::string>()> machine;
};

/// Every ordered pair of boxes alone, then all boxes in pairs at once, both ways; several rounds,
/// in an order that is drawn anew for each. All ranks call it; rank 0 writes the file, and each
/// box's machine beside it. Returns an exit code.
int run_links(const LinksJob& job);

}  // namespace smartinf::apps
