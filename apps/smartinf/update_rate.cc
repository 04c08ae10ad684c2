#include "apps/smartinf/update_rate.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/update.h"

namespace smartinf::apps {

base::Result<double> measure_update_rate(base::StateFormat format, uint32_t threads) {
  constexpr uint64_t kBlocks = 64;  // of each thread: beyond the caches
  constexpr uint64_t kBlock = base::kBlockElements;
  const auto planes = kernels::rule_planes(kernels::UpdateRule::kAdamW);
  std::vector<uint64_t> plane_at;
  uint64_t block_bytes = 0;
  for (const base::PlaneKind kind : planes) {
    plane_at.push_back(block_bytes);
    block_bytes += base::round_up(base::encoded_bytes(base::plane_encoding(format, kind), kBlock),
                                  uint64_t{64});
  }
  const uint64_t gradient_at = block_bytes;
  block_bytes += 2 * 2 * kBlock;  // the gradient, and weights out
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer memory,
                      base::AlignedBuffer::allocate(threads * kBlocks * block_bytes));
  kernels::RuleOptions rule;
  rule.rule = kernels::UpdateRule::kAdamW;
  const kernels::StepScalars scalars =
      kernels::make_step_scalars(rule, kernels::GroupOptions{}, 1, 1.0, 0);
  const auto pass = [&](uint32_t thread) {
    for (uint64_t b = 0; b < kBlocks; ++b) {
      std::byte* at = memory.data() + (thread * kBlocks + b) * block_bytes;
      kernels::UpdateBlock block;
      for (size_t i = 0; i < plane_at.size(); ++i) block.planes[i] = at + plane_at[i];
      block.count = kBlock;
      block.gradient = at + gradient_at;
      block.weights_out = at + gradient_at + 2 * kBlock;
      const kernels::GroupRun run{kBlock, &scalars};
      kernels::kernels().update_block(format, block, {&run, 1});
    }
  };
  double best_s = 1e30;  // what the machine can do, not what else it was doing
  for (int i = 0; i < 5; ++i) {
    const uint64_t start_ns = base::now_ns();
    {
      std::vector<std::jthread> workers;
      for (uint32_t t = 0; t < threads; ++t) workers.emplace_back(pass, t);
    }
    best_s = std::min(best_s, base::seconds_since(start_ns));
  }
  return static_cast<double>(threads * kBlocks * kBlock) / best_s;
}

StateBytes state_bytes_per_parameter(kernels::UpdateRule rule, base::StateFormat format) {
  StateBytes bytes;
  for (const base::PlaneKind kind : kernels::rule_planes(rule)) {
    const base::Encoding encoding = base::plane_encoding(format, kind);
    (kind == base::PlaneKind::kMaster ? bytes.master : bytes.moments) +=
        static_cast<double>(base::encoded_bytes(encoding, base::kBlockElements)) /
        static_cast<double>(base::kBlockElements);
  }
  return bytes;
}

}  // namespace smartinf::apps
