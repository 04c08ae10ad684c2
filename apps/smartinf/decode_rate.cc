#include "apps/smartinf/decode_rate.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <vector>

#include "smartinf/base/checksum.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/attention.h"
#include "smartinf/kernels/row_ops.h"
#include "smartinf/kernels/row_product.h"

#include "apps/smartinf/kernel_timer.h"
#include "apps/smartinf/median.h"

namespace smartinf::apps {
namespace {

constexpr uint64_t kBytes = 128 * base::kMiB;
constexpr size_t kRows = 16;
constexpr std::chrono::microseconds kAwake(200);  // as in train/row_decoder.cc

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

/// What a layer does between its products, for each of their outputs: a norm, an activation, sums.
/// Its vectors are made anew, as there.
double between_products_s(base::ThreadTeam& team) {
  constexpr base::DataType kType = base::DataType::kBf16;
  constexpr size_t kWidth = 1024, kInner = 4096;
  constexpr size_t kOutputs = 2 * kWidth + 2 * kWidth + 2 * kInner;  // qkv, out, down; gate and up
  const std::vector<float> weight(kWidth, 1.0f), made(kRows * 2 * kInner, 0.5f);
  const auto run = [&] {
    std::vector<float> x(kRows * kWidth, 0.5f), h(kRows * kWidth), inner(kRows * kInner);
    const std::vector<float> qkv(kRows * 2 * kWidth), up(made.size());
    for (size_t r = 0; r < 2 * kRows; ++r) {  // before attention, and before the feed-forward part
      const size_t at = r % kRows * kWidth;
      const std::span<float> x_C = std::span(x).subspan(at, kWidth);
      kernels::rms_norm(kType, weight, 1e-5f, x_C, std::span(h).subspan(at, kWidth));
      kernels::add(kType, std::span(h).subspan(at, kWidth), x_C);
    }
    team.run(kRows, [&](uint32_t, size_t r) {
      const auto up_G = std::span(made).subspan(r * 2 * kInner, 2 * kInner);
      const std::span<float> inner_F = std::span(inner).subspan(r * kInner, kInner);
      std::ranges::copy(up_G.first(kInner), inner_F.begin());
      kernels::silu(kType, inner_F);
      kernels::multiply(kType, up_G.subspan(kInner), inner_F);
    });
  };
  return median_seconds(run) / static_cast<double>(kRows * kOutputs);
}

}  // namespace

base::Result<DecodeRates> measure_decode_rates(uint32_t threads) {
  base::ThreadTeam team(threads, "si-bench", kAwake);
  kernels::RowProduct product(team);
  // Small numbers, as bf16; in pages as torch's.
  const std::vector<uint16_t> weights(kBytes / sizeof(uint16_t), 0x3c3c);
  const std::vector<float> x(kRows * 4096, 0.5f);
  std::vector<float> y(kRows * weights.size() / 256);
  const auto product_s = [&](size_t rows, size_t outputs, size_t inputs) {
    const kernels::RowMatrix matrix{
        .weights = weights.data(), .outputs = outputs, .inputs = inputs};
    return median_seconds([&] {
      product.run(matrix, std::span(x).first(rows * inputs), std::span(y).first(rows * outputs));
    });
  };
  DecodeRates rates;
  rates.weight_bytes_per_s =
      static_cast<double>(kBytes) / product_s(1, weights.size() / 1024, 1024);
  // As many multiply-adds with more outputs and with fewer.
  constexpr size_t kFew = 4096, kMany = 256;
  const double many_s = product_s(kRows, weights.size() / kMany, kMany);
  const double few_s = product_s(kRows, weights.size() / kFew, kFew);
  const double adds = static_cast<double>(kRows * weights.size());
  const double output_s = std::max(0.0, many_s - few_s) / (adds / kMany - adds / kFew);
  rates.flops = 2 * adds / (few_s - output_s * adds / kFew);
  rates.value_s = output_s + between_products_s(team);
  rates.product_s = product_s(1, 128, 512);

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
            std::as_bytes(std::span(weights)).subspan(block * block_bytes, block_bytes);
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
