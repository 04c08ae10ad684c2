#include "apps/smartinf/decode_rate.h"

#include <algorithm>
#include <span>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/attention.h"
#include "smartinf/kernels/row_product.h"

#include "apps/smartinf/kernel_timer.h"
#include "apps/smartinf/median.h"

namespace smartinf::apps {
namespace {

constexpr uint64_t kBytes = 128 * base::kMiB;
constexpr size_t kInputs = 1024;
constexpr size_t kRows = 16;

template <typename Work>
double median_seconds(Work work) {
  std::vector<double> seconds;
  for (int pass = 0; pass <= 5; ++pass) {
    const uint64_t start_ns = base::now_ns();
    work();
    if (pass > 0) seconds.push_back(base::seconds_since(start_ns));
  }
  return median(seconds);
}

}  // namespace

base::Result<DecodeRates> measure_decode_rates(uint32_t threads) {
  SI_ASSIGN_OR_RETURN(base::AlignedBuffer memory, base::AlignedBuffer::allocate(kBytes));
  std::fill_n(memory.data(), memory.size(), std::byte{0x3c});  // small numbers, as bf16
  base::ThreadTeam team(threads, "si-bench");
  kernels::RowProduct product(team);
  const kernels::RowMatrix matrix{
      .weights = memory.data(), .outputs = kBytes / sizeof(uint16_t) / kInputs, .inputs = kInputs};
  const std::vector<float> x(kRows * kInputs, 0.5f);
  std::vector<float> y(kRows * matrix.outputs);
  const auto product_s = [&](size_t rows) {
    return median_seconds([&] {
      product.run(matrix, std::span(x).first(rows * kInputs),
                  std::span(y).first(rows * matrix.outputs));
    });
  };
  DecodeRates rates;
  rates.weight_bytes_per_s = static_cast<double>(kBytes) / product_s(1);
  rates.flops = 2.0 * kRows * static_cast<double>(kBytes / sizeof(uint16_t)) / product_s(kRows);

  const kernels::AttentionShape shape{
      .block = {.kv_heads = 8, .head_width = 128, .format = kernels::CacheFormat::kBf16},
      .heads = 32,
      .scale = 0.1f};
  const uint64_t block_bytes = kernels::cache_block_bytes(shape.block);
  const std::vector<float> query(uint64_t{shape.heads} * shape.block.head_width, 0.5f);
  std::vector<uint64_t> sums(threads);
  const double fold_s = median_seconds([&] {
    team.run(threads, [&](uint32_t, size_t thread) {
      std::vector<float> state(shape.state_floats());
      kernels::begin_fold(shape, state.data());
      const kernels::FoldQuery one{query.data(), state.data()};
      const Share share = share_of(kBytes / block_bytes, static_cast<uint32_t>(thread), threads);
      for (uint64_t block = share.first; block < share.last; ++block) {
        const auto bytes =
            std::span<const std::byte>(memory.bytes()).subspan(block * block_bytes, block_bytes);
        sums[thread] ^= base::checksum(bytes, block);
        kernels::FoldRange range;
        if (block + 1 < share.last) range.next_block = bytes.data() + block_bytes;
        kernels::fold_block(shape, bytes, range, {&one, 1});
      }
    });
  });
  rates.fold_bytes_per_s = static_cast<double>(kBytes) / fold_s;
  return rates;
}

}  // namespace smartinf::apps
