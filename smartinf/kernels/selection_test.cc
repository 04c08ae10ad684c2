#include "smartinf/kernels/selection.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "smartinf/kernels/state_codec.h"

namespace smartinf::kernels {
namespace {

/// Selects by sorting: larger magnitude first, then lower index.
std::vector<uint32_t> sorted_top_k(const std::vector<float>& in, size_t k) {
  std::vector<uint32_t> order(in.size());
  std::iota(order.begin(), order.end(), 0u);
  const auto magnitude = [&](uint32_t i) {
    return std::bit_cast<uint32_t>(in[i]) & kMagnitudeMask;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return magnitude(a) > magnitude(b); });
  order.resize(std::min(k, in.size()));
  std::sort(order.begin(), order.end());
  return order;
}

testing::AssertionResult selects_right(const KernelTable& table, const std::vector<float>& in,
                                       size_t k) {
  const size_t room = std::min(k, in.size());
  // The elements at every misalignment, by turns, as K changes.
  const size_t shift = k % 16;
  std::vector<float> shifted(shift + in.size());
  std::copy(in.begin(), in.end(), shifted.begin() + static_cast<ptrdiff_t>(shift));
  // One element behind each output shows a store that goes too far.
  std::vector<uint32_t> indices(room + 1, 0xdeadbeefu);
  std::vector<float> values(room + 1, -7.0f);
  const size_t taken = top_k(table, std::span<const float>(shifted).subspan(shift), k,
                             indices.data(), values.data());
  const auto complain = [&](const std::string& what) {
    return testing::AssertionFailure()
           << table.isa() << " n " << in.size() << " k " << k << ": " << what;
  };
  if (taken != room) return complain("took " + std::to_string(taken));
  if (indices[room] != 0xdeadbeefu || values[room] != -7.0f) return complain("wrote too far");
  indices.resize(room);
  if (indices != sorted_top_k(in, k)) return complain("took others");
  for (size_t i = 0; i < room; ++i) {
    if (std::bit_cast<uint32_t>(values[i]) != std::bit_cast<uint32_t>(in[indices[i]])) {
      return complain("value of another");
    }
  }
  return testing::AssertionSuccess();
}

TEST(TopK, EveryLengthAndK) {
  std::mt19937 random(3);
  for (const KernelTable* table : supported_tables()) {
    for (size_t n = 0; n <= 65; ++n) {
      std::vector<float> in(n);
      // Small whole numbers: many ties, of both signs, zeros too.
      for (float& value : in) value = static_cast<float>(static_cast<int>(random() % 9) - 4);
      for (size_t k = 0; k <= n + 1; ++k) ASSERT_TRUE(selects_right(*table, in, k));
    }
  }
}

TEST(TopK, LargeAndWild) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal(0, 1e-3f);
  for (const KernelTable* table : supported_tables()) {
    std::vector<float> in(100003);
    for (float& value : in) value = normal(random);
    for (const size_t k : {1ul, 2ul, 1000ul, 50000ul, 100002ul}) {
      ASSERT_TRUE(selects_right(*table, in, k));
    }
    for (size_t i = 0; i < in.size(); i += 7) {
      in[i] = std::bit_cast<float>(static_cast<uint32_t>(random()));
    }
    in[77] = std::numeric_limits<float>::quiet_NaN();
    for (const size_t k : {1ul, 100ul, 5000ul, 90000ul}) ASSERT_TRUE(selects_right(*table, in, k));
    // The sample, every 24th element, sees only large ones and guesses too high.
    std::fill(in.begin(), in.end(), 1e-6f);
    for (size_t i = 0; i < in.size(); i += in.size() / 4096) in[i] = normal(random);
    for (const size_t k : {100ul, 5000ul}) ASSERT_TRUE(selects_right(*table, in, k));
    std::fill(in.begin(), in.end(), 0.0f);
    for (const size_t k : {1ul, 100ul, 99999ul}) ASSERT_TRUE(selects_right(*table, in, k));
  }
}

// Bit patterns that differ only in one of the three digits of the search.
RC_GTEST_PROP(TopK, AgreesWithSorting, ()) {
  const auto shift = *rc::gen::element(0, 5, 18);
  const auto top = *rc::gen::inRange<uint32_t>(0, 8);
  const auto patterns = *rc::gen::container<std::vector<uint32_t>>(rc::gen::inRange(0u, 32u));
  std::vector<float> in;
  for (const uint32_t pattern : patterns) {
    const uint32_t sign = (pattern & 1) << 31;
    in.push_back(std::bit_cast<float>(sign | (top << 28) | ((pattern >> 1) << shift)));
  }
  const auto k = *rc::gen::inRange<size_t>(0, in.size() + 2);
  for (const KernelTable* table : supported_tables()) {
    RC_ASSERT(static_cast<bool>(selects_right(*table, in, k)));
  }
}

// The guess of the threshold does not change the result.
TEST(TopK, NearAThresholdFindsTheSame) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal(0, 1e-3f);
  for (const KernelTable* table : supported_tables()) {
    for (const size_t n : {0ul, 1ul, 65ul, 5000ul, 20000ul}) {
      for (const bool ties : {false, true}) {
        std::vector<float> in(n);
        for (float& value : in) {
          value = ties ? static_cast<float>(static_cast<int>(random() % 9) - 4) : normal(random);
        }
        for (const size_t k : {size_t{0}, size_t{1}, n / 100, n / 3, n, n + 1}) {
          const auto expected = sorted_top_k(in, k);
          const size_t least = std::min(k, n);
          for (const size_t room : {least, std::min(2 * least, n), n}) {
            for (const float guess : {1e-30f, 2.5e-3f, 3.0f, std::numeric_limits<float>::infinity(),
                                      std::numeric_limits<float>::quiet_NaN()}) {
              std::vector<uint32_t> indices(room);
              std::vector<float> values(room);
              float threshold = guess;
              for (int again = 0; again < 2; ++again) {  // then with the threshold it left
                ASSERT_EQ(top_k_near(*table, in, k, room, indices.data(), values.data(), threshold),
                          expected.size());
                for (size_t i = 0; i < expected.size(); ++i) {
                  ASSERT_EQ(indices[i], expected[i]) << table->isa() << " n " << n << " k " << k
                                                     << " room " << room << " guess " << guess;
                  ASSERT_EQ(values[i], in[expected[i]]);
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(TopK, ANanIsNoThreshold) {
  std::vector<float> in(1000, 1.0f);
  in[500] = std::numeric_limits<float>::quiet_NaN();
  std::vector<uint32_t> indices(1000);
  std::vector<float> values(1000);
  float threshold = 1;
  EXPECT_EQ(top_k_near(kernels(), in, 1, 1000, indices.data(), values.data(), threshold), 1u);
  EXPECT_EQ(indices[0], 500u);
  EXPECT_EQ(threshold, 0);
}

TEST(ScatterAdd, AddsInOrderAndPutsBackWhatTopKTook) {
  std::vector<float> out = {1, 2, 3, 4};
  scatter_add(std::vector<uint32_t>{3, 0, 3}, std::vector<float>{0.5f, 1.0f, 0.25f}, out);
  EXPECT_EQ(out, (std::vector<float>{2, 2, 3, 4.75f}));

  std::vector<float> in = {5, -1, 0, 7, -7};
  std::vector<uint32_t> indices(3);
  std::vector<float> values(3);
  ASSERT_EQ(top_k(kernels(), in, 3, indices.data(), values.data()), 3u);
  std::vector<float> back(in.size());
  scatter_add(indices, values, back);
  EXPECT_EQ(back, (std::vector<float>{5, 0, 0, 7, -7}));
}

TEST(ScatterAddDeathTest, AnIndexBeyondTheEndIsABug) {
  std::vector<float> out(2);
  EXPECT_DEATH(scatter_add(std::vector<uint32_t>{2}, std::vector<float>{1}, out), "beyond");
}

}  // namespace
}  // namespace smartinf::kernels
