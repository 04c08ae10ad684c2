// Product rates in a build without torch.
#include "smartinf/train/product_rate.h"

namespace smartinf::train {
namespace {

base::Status without_torch() {
  return base::Status(base::ErrorCode::kUnsupported, "this smartinf was built without torch",
                      "Run scripts/setup.sh, which installs torch and builds again.");
}

}  // namespace

base::Result<double> measure_product_rate(Precision) { return without_torch(); }

base::Result<ProductRates> compare_product_rates(uint32_t) { return without_torch(); }

}  // namespace smartinf::train
