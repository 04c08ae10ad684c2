// Gradients as pairs and as compressed messages: the update they lead to has the bits of the scalar
// truth with the same gradient expanded.
#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/compress/message.h"

#include "fpga/tests/subgroup.h"

namespace smartinf::fpga {
namespace {

using base::DataType;
using compress::CompressedView;
using compress::CompressedWriter;
using compress::ValueEncoding;
using kernels::UpdateRule;

constexpr double kDensities[] = {0, 0.0005, 0.01, 0.05, 0.3, 0.9, 1};

struct Sparse {
  std::vector<uint32_t> indices;
  std::vector<float> values;
};

Sparse make_sparse(uint32_t count, double density, uint64_t seed) {
  std::mt19937_64 random(seed);
  Sparse sparse;
  for (uint32_t i = 0; i < count; ++i) {
    if (static_cast<double>(random() % 1000000) >= density * 1e6) continue;
    const auto bits = static_cast<uint32_t>(random());
    sparse.indices.push_back(i);
    sparse.values.push_back(std::bit_cast<float>((bits & 0x807fffffu) | (100 + bits % 40) << 23));
  }
  return sparse;
}

Step make_step(UpdateRule rule, uint32_t count, DataType gradient) {
  Step step;
  step.rule = rule;
  step.count = count;
  kernels::RuleOptions options;
  options.rule = rule;
  step.spans = {{count, kernels::make_step_scalars(options, {}, 2, 0.5, 3)}};
  step.gradient_type = gradient;
  return step;
}

uint32_t status_in(const Word& word) { return lane(word, 0); }

TEST(Pairs, EveryDensityAndLength) {
  uint64_t seed = 0;
  for (const double density : kDensities) {
    for (const uint32_t count : {1u, 15u, 16u, 17u, 100u, 5000u, 65536u + 33}) {
      ++seed;
      const Sparse sparse = make_sparse(count, density, seed);
      std::vector<uint32_t> pairs;
      std::vector<float> dense(count);
      for (size_t i = 0; i < sparse.indices.size(); ++i) {
        pairs.insert(pairs.end(), {sparse.indices[i], std::bit_cast<uint32_t>(sparse.values[i])});
        dense[sparse.indices[i]] = sparse.values[i];
      }
      const std::vector<Word> memory = words_of(pairs.data(), 4 * pairs.size());
      const Step step = make_step(UpdateRule::kAdamW, count, DataType::kF32);
      Subgroup card(step.rule, count, seed, false);
      Subgroup truth = card;
      Word status = 9;
      ASSERT_EQ(card.update_on_card(step,
                                    [&](hls::stream<GradientWord>& out) {
                                      smartinf_gradient_pairs(
                                          memory.data(),
                                          static_cast<uint32_t>(sparse.indices.size()), count,
                                          &status, out);
                                    },
                                    {.seed = seed, .stall_one_in = count > 1000 ? 30u : 2u}),
                "");
      EXPECT_EQ(status_in(status), kStatusOk);
      truth.update_by_truth(step, dense.data());
      ASSERT_EQ(card.difference(truth), "") << count << " at " << density;
    }
  }
}

TEST(Pairs, DisorderIsNamedAndEndsNothing) {
  const uint32_t count = 100;
  const std::vector<std::vector<uint32_t>> wrong{
      {5, 5}, {7, 3}, {40, 2, 50}, {100}, {3, 4000000000u}};
  for (const std::vector<uint32_t>& indices : wrong) {
    std::vector<uint32_t> pairs;
    for (const uint32_t index : indices) pairs.insert(pairs.end(), {index, 0x3f800000u});
    const std::vector<Word> memory = words_of(pairs.data(), 4 * pairs.size());
    const Step step = make_step(UpdateRule::kSgdMomentum, count, DataType::kF32);
    Subgroup card(step.rule, count, 1, false);
    Word status = 9;
    ASSERT_EQ(card.update_on_card(step,
                                  [&](hls::stream<GradientWord>& out) {
                                    smartinf_gradient_pairs(memory.data(),
                                                            static_cast<uint32_t>(indices.size()),
                                                            count, &status, out);
                                  },
                                  {.stall_one_in = 2}),
              "");
    EXPECT_EQ(status_in(status), kStatusDisorder) << indices[0];
  }
}

std::vector<std::byte> make_message(uint32_t count, double density, ValueEncoding encoding,
                                    uint64_t seed, bool factors = false) {
  CompressedWriter writer;
  compress::RowColumnFactors second_moment;
  if (factors) second_moment = {.values = {1, 2, 3}, .runs = {1, 2}};
  writer.begin(base::SubgroupId{3}, count, encoding, second_moment);
  for (uint32_t first = 0; first < count; first += kBlockElements) {
    const uint32_t elements = std::min(kBlockElements, count - first);
    const Sparse block = make_sparse(elements, density, seed + first);
    writer.add_block(block.indices, block.values);
  }
  const std::span<const std::byte> message = writer.finish();
  return {message.begin(), message.end()};
}

/// Status of the decompressor for a message; the run itself is expected to say nothing.
uint32_t update_by_message(Subgroup& card, const Step& step, std::span<const std::byte> message,
                           const software::Options& options) {
  std::vector<Word> memory = words_of(message.data(), message.size());
  memory.resize(std::max<size_t>(memory.size(), 2 + divide_up(step.count, kBlockElements) / 8 + 1));
  Word status = 9;
  EXPECT_EQ(card.update_on_card(
                step,
                [&](hls::stream<GradientWord>& out) {
                  smartinf_gradient_message(memory.data(), memory.data(), memory.data(),
                                            memory.data(), message.size(), step.count, &status,
                                            out);
                },
                options),
            "");
  return status_in(status);
}

std::vector<std::byte> expand(std::span<const std::byte> message, uint32_t count, DataType type) {
  const CompressedView view = CompressedView::trusted(message);
  const uint64_t width = base::data_type_bytes(type);
  std::vector<std::byte> dense(count * width);
  for (uint64_t first = 0; first < count; first += kBlockElements) {
    view.expand_block(first / kBlockElements, dense.data() + first * width);
  }
  return dense;
}

TEST(Message, EveryEncodingDensityAndLength) {
  uint64_t seed = 0;
  for (const ValueEncoding encoding :
       {ValueEncoding::kF32, ValueEncoding::kBf16, ValueEncoding::kSign}) {
    for (const double density : kDensities) {
      for (const uint32_t count : {1u, 17u, 100u, 3000u, 65536u, 2 * 65536u + 4099}) {
        ++seed;
        const std::vector<std::byte> message = make_message(count, density, encoding, seed);
        ASSERT_TRUE(CompressedView::parse(message).ok());
        const DataType type = compress::expanded_type(encoding);
        const Step step = make_step(UpdateRule::kAdagrad, count, type);
        Subgroup card(step.rule, count, seed, false);
        Subgroup truth = card;
        const uint32_t stalls = count > 10000 ? 0 : 3;
        ASSERT_EQ(update_by_message(card, step, message, {.seed = seed, .stall_one_in = stalls}),
                  kStatusOk);
        truth.update_by_truth(step, expand(message, count, type).data());
        ASSERT_EQ(card.difference(truth), "")
            << compress::value_encoding_name(encoding) << ", " << count << " at " << density;
      }
    }
  }
}

TEST(Message, NoDeadlockWithStreamsOfOneElement) {
  for (const double density : kDensities) {
    for (const ValueEncoding encoding : {ValueEncoding::kF32, ValueEncoding::kSign}) {
      const uint32_t count = 65536 + 500;
      const std::vector<std::byte> message = make_message(count, density, encoding, 1);
      const Step step =
          make_step(UpdateRule::kSgdMomentum, count, compress::expanded_type(encoding));
      Subgroup card(step.rule, count, 1, false);
      EXPECT_EQ(update_by_message(card, step, message,
                                  {.seed = 4, .stall_one_in = 10, .stream_depth = 1}),
                kStatusOk);
    }
  }
}

TEST(Message, WhatIsNotDoneIsNamed) {
  const Step step = make_step(UpdateRule::kAdamW, 500, DataType::kBf16);
  Subgroup card(step.rule, 500, 1, false);
  const auto status_of = [&](const std::vector<std::byte>& message) {
    return update_by_message(card, step, message, {});
  };
  EXPECT_EQ(status_of(make_message(500, 0.1, ValueEncoding::kBf16, 1, true)), kStatusFactors);
  EXPECT_EQ(status_of(make_message(500, 0.1, ValueEncoding::kF16, 1)), kStatusUnknown);
  EXPECT_EQ(status_of(make_message(501, 0.1, ValueEncoding::kBf16, 1)), kStatusCorrupt);
  std::vector<std::byte> other = make_message(500, 0.1, ValueEncoding::kBf16, 1);
  other[8] = std::byte{77};
  EXPECT_EQ(status_of(other), kStatusUnknown);
  other[0] = std::byte{0};
  other[8] = std::byte{4};
  EXPECT_EQ(status_of(other), kStatusCorrupt);
}

// Messages are checked where they arrive. One that is broken later ends the run all the same, and
// never reads or writes where it may not.
TEST(Message, BrokenOnesEndAndHarmNothing) {
  std::mt19937_64 random(11);
  int named = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const ValueEncoding encoding = trial % 2 == 0 ? ValueEncoding::kBf16 : ValueEncoding::kSign;
    const uint32_t count = 700;
    std::vector<std::byte> message =
        make_message(count, trial % 5 == 4 ? 1 : 0.1, encoding, static_cast<uint64_t>(trial));
    const size_t from = trial % 3 == 0 ? 0 : 48;  // the header, too
    for (int flips = 1 + trial % 3; flips > 0; --flips) {
      message[from + random() % (message.size() - from)] ^=
          static_cast<std::byte>(1 << random() % 8);
    }
    const Step step = make_step(UpdateRule::kSgdMomentum, count, DataType::kBf16);
    Subgroup card(step.rule, count, 1, false);
    Subgroup truth = card;
    const uint32_t status = update_by_message(card, step, message, {.stall_one_in = 5});
    compress::seal_compressed(message);
    const auto view = CompressedView::parse(message);
    if (view.ok() && view->elements() == count) {
      ASSERT_EQ(status, kStatusOk) << trial;
      truth.update_by_truth(step, expand(message, count, DataType::kBf16).data());
      ASSERT_EQ(card.difference(truth), "") << trial;
    }
    named += status == kStatusOk ? 0 : 1;
  }
  EXPECT_GT(named, 50);
}

}  // namespace
}  // namespace smartinf::fpga
