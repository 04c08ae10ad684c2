// For programs without torch as well.
#include <fmt/format.h>

#include "smartinf/train/product_rate.h"

namespace smartinf::train {

std::string describe_product_rates(const ProductRates& rates) {
  return fmt::format("{:.1f} GFLOP/s in bf16{}, and {:.1f} in f32", rates.bf16 * 1e-9,
                     rates.fast_bf16 ? "" : ", for which this processor has no instructions",
                     rates.f32 * 1e-9);
}

}  // namespace smartinf::train
