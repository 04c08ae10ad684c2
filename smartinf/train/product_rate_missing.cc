#include "smartinf/train/product_rate.h"

namespace smartinf::train {

base::Result<double> measure_product_rate(Precision) {
  return base::Status(base::ErrorCode::kUnsupported, "this smartinf was built without torch",
                      "Run scripts/setup.sh, which installs torch and builds again.");
}

}  // namespace smartinf::train
