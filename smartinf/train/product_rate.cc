#include "smartinf/train/product_rate.h"

#include <algorithm>
#include <array>
#include <thread>

#include <ATen/Parallel.h>
#include <torch/types.h>

#include "smartinf/base/clock.h"
#include "smartinf/train/linear.h"

namespace smartinf::train {

base::Result<double> measure_product_rate(Precision precision) {
  constexpr int64_t kRows = 2048;
  constexpr int64_t kWidth = 1024;
  try {
    at::set_num_threads(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
    const torch::NoGradGuard no_grad;
    const auto options =
        torch::dtype(precision == Precision::kBf16 ? torch::kBFloat16 : torch::kFloat32);
    const torch::Tensor x_RC = torch::randn({kRows, kWidth}, options);
    const torch::Tensor weight_CC = torch::randn({kWidth, kWidth}, options);
    std::array<double, 9> seconds{};
    for (int i = -2; i < static_cast<int>(seconds.size()); ++i) {
      const uint64_t start_ns = base::now_ns();
      const torch::Tensor product = train::linear(x_RC, weight_CC);
      if (i >= 0) seconds[static_cast<size_t>(i)] = base::seconds_since(start_ns);
    }
    std::sort(seconds.begin(), seconds.end());
    return 2.0 * kRows * kWidth * kWidth / seconds[seconds.size() / 2];
  } catch (const std::exception& error) {
    return base::Status(base::ErrorCode::kOutOfMemory,
                        std::string("timing matrix products: ") + error.what());
  }
}

}  // namespace smartinf::train
