// In place of OpenCL where its headers were not found at build time.
#include "smartinf/csd/opencl_processor.h"

namespace smartinf::csd {
namespace {

base::Status missing() {
  return base::Status(base::ErrorCode::kUnsupported, "this smartinf was built without OpenCL",
                      "Install ocl-icd-opencl-dev and opencl-headers, configure the build again, "
                      "or use processor = \"cpu\".");
}

}  // namespace

ProcessorFactory opencl_processor(OpenClOptions) {
  return
      [](std::function<void(Job&)>) { return base::Result<std::unique_ptr<Processor>>(missing()); };
}
base::Result<std::vector<OpenClDevice>> opencl_devices() { return missing(); }
base::Status opencl_self_test(const OpenClOptions&) { return missing(); }

}  // namespace smartinf::csd
