// How fast this machine's CPU multiplies matrices as the trainer does: for the planner, for the
// doctor, and for who leaves the type of compute to it.
#pragma once

#include <cstdint>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// Multiply-adds times two per second of [2048, 1024] x [1024, 1024]: the median of nine products
/// on all cores, after two that are not counted. Takes a second at most.
/// Errors: kUnsupported in a build without torch; kOutOfMemory.
base::Result<double> measure_product_rate(Precision precision);

/// Whether this processor multiplies bf16 itself (AVX-512 BF16, AMX, Arm's BF16) and torch uses it:
/// elsewhere products of f32 are several times as fast.
bool has_fast_bf16();

/// Multiply-adds times two per second in both types, of products that take a tenth of a second
/// together where the processor does not multiply bf16 itself.
struct ProductRates {
  bool fast_bf16 = false;
  double bf16 = 0;
  double f32 = 0;
};
/// threads: 0: all cores. Errors: as above.
base::Result<ProductRates> compare_product_rates(uint32_t threads);
/// "7.2 GFLOP/s in bf16, for which this processor has no instructions, and 54.0 in f32".
std::string describe_product_rates(const ProductRates& rates);

/// Precision that train.precision = "auto" stands for where this rank computes, by what the
/// processor is and not from measured rates: a run that is begun twice is the same twice.
struct ChosenPrecision {
  Precision precision = Precision::kBf16;
  std::string why;  // with rates; empty: there is nothing to say
};
/// Errors: kUnsupported for an accelerator that is not here, and in a build without torch.
base::Result<ChosenPrecision> choose_precision(const TrainOptions& train, uint32_t local_rank,
                                               uint32_t local_world);

}  // namespace smartinf::train
