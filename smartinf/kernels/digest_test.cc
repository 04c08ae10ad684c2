// The same numbers on every machine: checksums of what every kernel makes of fixed inputs, made by
// the scalar truth on x86-64. The inputs hold NaN, infinities and denormals. A change of formula or
// codec changes them: then, and only then, put the new ones here.
#include <bit>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/attention.h"
#include "smartinf/kernels/feedback.h"
#include "smartinf/kernels/selection.h"
#include "smartinf/kernels/signs.h"
#include "smartinf/kernels/test_kernels.h"

namespace smartinf::kernels {
namespace {

constexpr size_t kElements = 4000;  // not a multiple of a group

/// Made without the standard library's distributions, which differ between libraries.
std::vector<float> fixed_values(uint64_t seed, bool wild, bool positive) {
  std::vector<float> values(kElements);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint64_t word = base::mix_seed(seed, i);
    const auto exponent = static_cast<uint32_t>(word >> 32) % 24 + 104;
    auto bits = (exponent << 23) | static_cast<uint32_t>(word & 0x807fffffu);
    if (wild && word >> 60 < 4) bits = static_cast<uint32_t>(word >> 8);  // anything
    if (positive) bits &= 0x7fffffffu;
    values[i] = std::bit_cast<float>(bits);
  }
  return values;
}

class Digest {
 public:
  void add(const void* data, size_t bytes) {
    digest_ = base::checksum({static_cast<const std::byte*>(data), bytes}, digest_);
  }
  uint64_t value() const { return digest_; }

 private:
  uint64_t digest_ = 0;
};

uint64_t digest_of_updates(const KernelTable& table, StateFormat format, bool given_squares) {
  Digest digest;
  std::vector<RuleOptions> all;
  for (const UpdateRule rule : all_update_rules()) all.push_back({.rule = rule});
  all.push_back({.rule = UpdateRule::kSgdMomentum, .nesterov = true, .maximize = true});
  all.push_back({.rule = UpdateRule::kAdam, .beta1 = 0.2, .eps = 1e-3});
  for (const RuleOptions& options : all) {
    if (given_squares && !takes_factored_second_moment(options.rule)) continue;
    for (const DataType type : {DataType::kF32, DataType::kBf16, DataType::kF16}) {
      for (const bool wild : {false, true}) {
        const std::span<const PlaneKind> kinds = rule_planes(options.rule);
        std::vector<std::vector<std::byte>> planes;
        UpdateBlock block{
            .count = kElements, .element = 512, .gradient_type = type, .weights_type = type};
        for (size_t i = 0; i < kinds.size(); ++i) {
          const Encoding encoding = base::plane_encoding(format, kinds[i]);
          planes.emplace_back(base::encoded_bytes(encoding, kElements));
          const std::vector<float> values = fixed_values(i, wild && kinds[i] == PlaneKind::kMaster,
                                                         kinds[i] == PlaneKind::kVariance);
          table.encode_block(encoding, kinds[i], values.data(), planes[i].data(), kElements, 512, 1,
                             9);
          block.planes[i] = planes[i].data();
        }
        std::vector<std::byte> gradient(kElements * base::data_type_bytes(type));
        std::vector<std::byte> weights(gradient.size());
        table.cast_from_f32(fixed_values(77, wild, false).data(), gradient.data(), type, kElements);
        block.gradient = gradient.data();
        block.weights_out = weights.data();
        const std::vector<float> columns = fixed_values(78, wild, true);
        const std::array rows = {SecondMomentRow{100, 0.5f, columns.data() + 7},
                                 SecondMomentRow{kElements - 100, 1.25f, columns.data()}};
        if (given_squares) block.second_moment = rows;
        for (uint64_t step = 1; step <= 3; ++step) {
          const StepScalars scalars =
              make_step_scalars(options, {.lr = 0.25, .weight_decay = 0.125}, step, 0.5, 4);
          const ScalarsSpan run{kElements, &scalars};
          table.update_block(format, block, {&run, 1});
          for (const auto& plane : planes) digest.add(plane.data(), plane.size());
          digest.add(weights.data(), weights.size());
        }
      }
    }
  }
  return digest.value();
}

uint64_t digest_of_the_rest(const KernelTable& table) {
  Digest digest;
  for (const bool wild : {false, true}) {
    const std::vector<float> values = fixed_values(5, wild, false);
    for (const DataType type : {DataType::kF32, DataType::kBf16, DataType::kF16}) {
      std::vector<std::byte> narrow(kElements * base::data_type_bytes(type));
      std::vector<float> wide(kElements);
      table.cast_from_f32(values.data(), narrow.data(), type, kElements);
      table.cast_to_f32(narrow.data(), type, wide.data(), kElements);
      digest.add(narrow.data(), narrow.size());
      digest.add(wide.data(), wide.size() * sizeof(float));
      const KernelTable::Norm norm = table.partial_norm(narrow.data(), type, kElements);
      digest.add(&norm.sum_of_squares, sizeof(double));
      const uint64_t first_bad = norm.first_bad;
      digest.add(&first_bad, sizeof(first_bad));
    }
    std::vector<uint32_t> indices(300);
    std::vector<float> taken(300);
    top_k(table, values, 300, indices.data(), taken.data());
    digest.add(indices.data(), indices.size() * sizeof(uint32_t));
    digest.add(taken.data(), taken.size() * sizeof(float));
  }
  return digest.value();
}

std::vector<base::Bf16> fixed_bf16(const KernelTable& table, uint64_t seed) {
  std::vector<base::Bf16> values(kElements);
  table.cast_from_f32(fixed_values(seed, false, false).data(), values.data(), DataType::kBf16,
                      kElements);
  return values;
}
FeedbackBlock feedback_of(std::span<const base::Bf16> gradient,
                          std::span<const base::Bf16> residual) {
  return {.gradient = gradient,
          .residual = residual,
          .scale = 0.7f,
          .element = 1024,
          .step = 3,
          .seed = 5};
}

uint64_t digest_of_feedback(const KernelTable& table) {
  constexpr size_t kMost = 60;
  Digest digest;
  const std::vector<base::Bf16> gradient = fixed_bf16(table, 6);
  const std::vector<base::Bf16> residual = fixed_bf16(table, 7);
  const FeedbackBlock block = feedback_of(gradient, residual);
  std::vector<float> sum(kElements);
  std::vector<float> rows(3);
  std::vector<float> columns(kElements / 3);
  std::vector<uint32_t> indices(kElements);
  std::vector<float> values(kElements);
  std::vector<base::Bf16> next_residual(kElements);
  float threshold = 0;
  add_feedback(table, gradient, residual, block.scale, sum);
  add_matrix_squares(table, std::span(block.gradient).first(3 * columns.size()), block.scale, rows,
                     columns);
  top_k_near(table, sum, kMost, kElements, indices.data(), values.data(), threshold);
  table.encode_block(base::Encoding::kBf16, base::PlaneKind::kMomentum, sum.data(),
                     reinterpret_cast<std::byte*>(next_residual.data()), kElements, block.element,
                     block.step, block.seed);
  const double square = copy_squares(table, next_residual, nullptr);
  std::vector<float> weights = fixed_values(8, false, false);
  const std::vector<float> roots = fixed_values(9, false, true);
  step_ahead(table, {.lr = 1e-2f, .bias = 0.5f, .eps = 1e-8f}, next_residual, 0.75f, roots,
             weights.data(), DataType::kF32);
  digest.add(sum.data(), sum.size() * sizeof(float));
  digest.add(rows.data(), rows.size() * sizeof(float));
  digest.add(columns.data(), columns.size() * sizeof(float));
  digest.add(indices.data(), kMost * sizeof(uint32_t));
  digest.add(values.data(), kMost * sizeof(float));
  digest.add(next_residual.data(), next_residual.size() * sizeof(base::Bf16));
  digest.add(&square, sizeof(square));
  digest.add(weights.data(), weights.size() * sizeof(float));
  return digest.value();
}

uint64_t digest_of_signs(const KernelTable& table) {
  constexpr size_t kMost = 300;
  Digest digest;
  std::vector<base::Bf16> gradient = fixed_bf16(table, 6);
  const std::vector<base::Bf16> residual = fixed_bf16(table, 7);
  std::vector<float> sum(kElements);
  std::vector<uint32_t> indices(kElements);
  std::vector<float> candidates(kSignCandidates);
  std::vector<uint64_t> sent((kElements + 63) / 64);
  std::vector<uint64_t> negative(sent.size());
  std::vector<uint32_t> ends(1 + 64 * sent.size() + kEndSlack);
  std::vector<uint64_t> tails(kMost / 2);
  std::vector<uint64_t> highs(kMost / 2);
  std::vector<uint64_t> high_bits(kMost / 2);
  float threshold = 0;
  const FeedbackBlock block = feedback_of(gradient, residual);
  add_feedback(table, gradient, residual, block.scale, sum);
  top_k_near(table, sum, kMost, kElements, indices.data(), candidates.data(), threshold);
  const auto signs =
      residual_of_signs(table, block, kMost, threshold, candidates, gradient, sent, negative);
  if (!signs) return 0;
  EXPECT_EQ(ends_of_signs(table, sent, negative, std::span(ends).subspan(1)), kMost);
  split_gaps(table, std::span(ends).first(1 + kMost), 3, 1, {tails, highs, high_bits});
  digest.add(gradient.data(), gradient.size() * sizeof(base::Bf16));
  digest.add(sent.data(), sent.size() * sizeof(uint64_t));
  digest.add(negative.data(), negative.size() * sizeof(uint64_t));
  digest.add(&signs->magnitude, sizeof(signs->magnitude));
  digest.add(&signs->residual_squares, sizeof(signs->residual_squares));
  digest.add(tails.data(), tails.size() * sizeof(uint64_t));
  digest.add(high_bits.data(), high_bits.size() * sizeof(uint64_t));
  for (size_t p = 0; p < highs.size(); ++p) {
    if (high_bits[p] != 0) digest.add(&highs[p], sizeof(highs[p]));
  }
  return digest.value();
}

uint64_t digest_of_attention(const KernelTable& table) {
  Digest digest;
  for (const CacheFormat format : {CacheFormat::kBf16, CacheFormat::kF32, CacheFormat::kQ8}) {
    for (const bool wild : {false, true}) {
      const AttentionShape shape{.block = {.kv_heads = 1, .head_width = 80, .format = format},
                                 .heads = 7,
                                 .scale = 0.11f,
                                 .softcap = wild ? 30.0f : 0.0f};
      const std::vector<float> keys = fixed_values(21, wild, false);
      const std::vector<float> values = fixed_values(22, wild, false);
      const std::vector<float> query = fixed_values(23, false, false);
      std::vector<std::byte> block(cache_block_bytes(shape.block));
      append_tokens(shape.block, block, 0, kCacheBlockTokens, DataType::kF32, keys.data(),
                    values.data());
      std::vector<float> state(shape.state_floats());
      begin_fold(shape, state.data());
      const FoldQuery one{query.data(), state.data()};
      fold_block(table, shape, block, {.first = 3, .end = 29}, {&one, 1});
      fold_block(table, shape, block, {}, {&one, 1});
      digest.add(block.data(), block.size());
      digest.add(state.data(), state.size() * sizeof(float));
    }
  }
  return digest.value();
}

TEST(Digest, IsThatOfX86sScalarTruthOnEveryTarget) {
  for (const KernelTable* table : supported_tables()) {
    const auto hex = [](uint64_t digest) {
      char text[19];
      std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(digest));
      return std::string(text);
    };
    const auto both = [&](MasterFormat master, MomentFormat moments) {
      return hex(digest_of_updates(*table, {moments, master}, false)) + " " +
             hex(digest_of_updates(*table, {moments, master}, true));
    };
    EXPECT_EQ(both(MasterFormat::kF32, MomentFormat::kF32), "a39e578522c83114 835b4eb2642fe13b")
        << table->isa();
    EXPECT_EQ(both(MasterFormat::kF32, MomentFormat::kBf16), "74d260a8dc85255c 91cce9319426f0a0")
        << table->isa();
    EXPECT_EQ(both(MasterFormat::kF32, MomentFormat::kQ8), "b18ad3f458c9ba51 260cb3ad229a8a09")
        << table->isa();
    EXPECT_EQ(both(MasterFormat::kM24, MomentFormat::kF32), "6870a0a548c2533b 984fe68ca13b03b2")
        << table->isa();
    EXPECT_EQ(both(MasterFormat::kM24, MomentFormat::kQ8), "6839fcf6b0f48522 ce5411e0f7180967")
        << table->isa();
    EXPECT_EQ(both(MasterFormat::kF32, MomentFormat::kQ4), "6d0c516029e15610 c03810fdbd6fa92b")
        << table->isa();
    EXPECT_EQ(both(MasterFormat::kM24, MomentFormat::kQ4), "f0eb216ef14ee0d9 97fdb834a0d5ba66")
        << table->isa();
    EXPECT_EQ(both(MasterFormat::kBf16, MomentFormat::kQ8), "b88850c7df185690 3d4d3d564dd4755c")
        << table->isa();
    EXPECT_EQ(hex(digest_of_the_rest(*table)), "139e07b90cf9631d") << table->isa();
    EXPECT_EQ(hex(digest_of_feedback(*table)), "21d8c09d3a5bf859") << table->isa();
    EXPECT_EQ(hex(digest_of_signs(*table)), "bd338bfcf481b2a6") << table->isa();
    EXPECT_EQ(hex(digest_of_attention(*table)), "e6fda5077803d4ad") << table->isa();
  }
}

}  // namespace
}  // namespace smartinf::kernels
