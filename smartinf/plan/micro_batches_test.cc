#include "smartinf/plan/micro_batches.h"

#include <cmath>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

/// The tree as it is defined, in parentheses.
std::string tree(uint64_t lo, uint64_t hi) {
  if (hi - lo == 1) return std::to_string(lo);
  uint64_t power = 1;
  while (2 * power < hi - lo) power *= 2;
  return "(" + tree(lo, lo + power) + "+" + tree(lo + power, hi) + ")";
}

class Texts {
 public:
  explicit Texts(uint64_t count) : sum_(count) {}
  void push(MicroBatchRange node, std::string text) {
    stack_.push_back(std::move(text));
    for (uint32_t added = sum_.push(node); added > 0; --added) {
      const std::string top = stack_.back();
      stack_.pop_back();
      stack_.back() = "(" + stack_.back() + "+" + top + ")";
    }
    EXPECT_EQ(stack_.size(), sum_.sums().size());
  }
  const std::vector<std::string>& stack() const { return stack_; }
  std::span<const MicroBatchRange> sums() const { return sum_.sums(); }

 private:
  MicroBatchSum sum_;
  std::vector<std::string> stack_;
};

TEST(MicroBatches, AreAllDealtOutInOrder) {
  for (const uint64_t count :
       {uint64_t{1}, uint64_t{2}, uint64_t{7}, uint64_t{64}, uint64_t{1} << 63}) {
    for (const uint32_t world : {1u, 2u, 3u, 8u}) {
      uint64_t end = 0;
      for (uint32_t rank = 0; rank < world; ++rank) {
        const MicroBatchRange range = micro_batches_of(count, rank, world);
        EXPECT_EQ(range.begin, end);
        EXPECT_LE(range.size(), count / world + 1);
        EXPECT_GE(range.size(), count / world);
        end = range.end;
      }
      EXPECT_EQ(end, count);
    }
  }
}

TEST(MicroBatches, TheSumIsTheSameForAnyNumberOfRanks) {
  EXPECT_EQ(tree(0, 7), "(((0+1)+(2+3))+((4+5)+6))");
  for (uint64_t count = 1; count <= 21; ++count) {
    for (uint32_t world = 1; world <= 9; ++world) {
      Texts all(count);
      for (uint32_t rank = 0; rank < world; ++rank) {
        const MicroBatchRange range = micro_batches_of(count, rank, world);
        Texts mine(count);
        for (uint64_t i = range.begin; i < range.end; ++i) {
          mine.push({i, i + 1}, std::to_string(i));
          const auto partial = static_cast<size_t>(
              count > 1 ? std::floor(std::log2(static_cast<double>(count - 1))) + 1 : 1);
          if (world == 1) {
            EXPECT_LE(mine.stack().size(), partial);
          }
        }
        const auto nodes = summation_nodes(count, range);
        ASSERT_EQ(std::vector(mine.sums().begin(), mine.sums().end()), nodes);
        for (size_t i = 0; i < nodes.size(); ++i) all.push(nodes[i], mine.stack()[i]);
      }
      ASSERT_EQ(all.stack().size(), 1u);
      EXPECT_EQ(all.stack().front(), tree(0, count)) << world << " ranks";
    }
  }
}

TEST(MicroBatches, OnlyNodesOfTheTreeAreNodes) {
  EXPECT_TRUE(is_summation_node(7, {4, 7}));
  EXPECT_TRUE(is_summation_node(7, {6, 7}));
  EXPECT_TRUE(is_summation_node(7, {0, 4}));
  EXPECT_FALSE(is_summation_node(7, {1, 3}));
  EXPECT_FALSE(is_summation_node(7, {5, 7}));
  EXPECT_FALSE(is_summation_node(7, {3, 3}));
  EXPECT_FALSE(is_summation_node(7, {4, 8}));
}

}  // namespace
}  // namespace smartinf::plan
