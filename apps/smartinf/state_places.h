// What a word on the command line stands for: a device, a run's folder with all its devices, or a
// checkpoint's.
#pragma once

#include <string>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::apps {

/// Whether the path is the folder of a training run.
bool is_run_folder(const std::string& path);

/// The devices of each word in turn. Nothing is opened. Errors: a run's recipe or a checkpoint's
/// description that cannot be read; a checkpoint that was put together from others.
base::Result<std::vector<std::string>> devices_of(const std::vector<std::string>& words);

}  // namespace smartinf::apps
