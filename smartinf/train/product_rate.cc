#include "smartinf/train/product_rate.h"

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/types.h>

#include "smartinf/base/clock.h"
#include "smartinf/train/accelerator.h"
#include "smartinf/train/linear.h"

namespace smartinf::train {

namespace {

/// The median of so many products of [rows, width] x [width, width], after some that do not count.
struct Products {
  int64_t rows = 0;
  int64_t width = 0;
  int not_counted = 0;
  size_t counted = 0;  // odd
};

base::Result<double> measure(Precision precision, uint32_t threads, const Products& products) {
  const auto& [rows, width, not_counted, counted] = products;
  try {
    const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
    at::set_num_threads(static_cast<int>(threads != 0 ? threads : cores));
    const torch::NoGradGuard no_grad;
    const auto options =
        torch::dtype(precision == Precision::kBf16 ? torch::kBFloat16 : torch::kFloat32);
    const torch::Tensor x_RC = torch::ones({rows, width}, options);
    const torch::Tensor weight_CC = torch::ones({width, width}, options);
    std::vector<double> seconds;
    for (int i = -not_counted; i < static_cast<int>(counted); ++i) {
      const uint64_t start_ns = base::now_ns();
      const torch::Tensor product = train::linear(x_RC, weight_CC);
      if (i >= 0) seconds.push_back(base::seconds_since(start_ns));
    }
    std::sort(seconds.begin(), seconds.end());
    const auto multiplications = static_cast<double>(rows * width * width);
    return 2 * multiplications / seconds[counted / 2];
  } catch (const std::exception& error) {
    return base::Status(base::ErrorCode::kOutOfMemory,
                        std::string("timing matrix products: ") + error.what());
  }
}

}  // namespace

base::Result<double> measure_product_rate(Precision precision) {
  return measure(precision, /*threads=*/0, {2048, 1024, 2, 9});
}

base::Result<ProductRates> compare_product_rates(uint32_t threads) {
  ProductRates rates;
  rates.fast_bf16 = has_fast_bf16();
  const Products some{128, 1024, 1, 3};
  SI_ASSIGN_OR_RETURN(rates.bf16, measure(Precision::kBf16, threads, some));
  SI_ASSIGN_OR_RETURN(rates.f32, measure(Precision::kF32, threads, some));
  return rates;
}

base::Result<ChosenPrecision> choose_precision(const TrainOptions& train, uint32_t local_rank,
                                               uint32_t local_world) {
  ChosenPrecision chosen;
  SI_ASSIGN_OR_RETURN(const torch::Device accelerator,
                      choose_accelerator("train.accelerator", train.accelerator, local_rank));
  if (!accelerator.is_cpu() || has_fast_bf16()) return chosen;
  chosen.precision = Precision::kF32;
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency() / local_world);
  const auto rates = compare_product_rates(train.threads != 0 ? train.threads : cores);
  if (rates.ok()) chosen.why = describe_product_rates(*rates);
  return chosen;
}

}  // namespace smartinf::train
