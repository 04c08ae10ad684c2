// Folds of queries over a cache's blocks on an OpenCL device.
#pragma once

#include <memory>

#include "smartinf/csd/opencl/context.h"
#include "smartinf/csd/processor.h"

namespace smartinf::csd::opencl {

/// Has passed a test: some blocks of the shape, compared with the scalar truth. Errors:
/// kUnsupported with what differs, or with the compiler's log; Device's.
base::Result<std::unique_ptr<Folder>> make_folder(std::shared_ptr<Device> device,
                                                  const kernels::AttentionShape& shape);

}  // namespace smartinf::csd::opencl
