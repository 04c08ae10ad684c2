// Gradients on their way from an accelerator whose copies come late.
#include "smartinf/train/gradient_copies.h"

#include <algorithm>
#include <deque>
#include <random>
#include <utility>

#include <gtest/gtest.h>

#include "tests/accelerator/accelerator.h"

namespace smartinf::train {
namespace {

using test_accelerator::smartinf_test_accelerator_hold_copies;

class LateGradients : public testing::Test {
 protected:
  static constexpr uint64_t kElements = 4096;

  LateGradients() {
    const test_accelerator::Options late{.delay_us = 200};
    test_accelerator::smartinf_test_accelerator_set_options(&late);
    copies_.emplace(streams_, torch::kFloat32, kElements);
  }

  /// A gradient whose elements are all its number.
  void start(uint64_t number, uint64_t elements) {
    copies_->start(number, torch::full({static_cast<int64_t>(elements)}, static_cast<float>(number),
                                       torch::dtype(torch::kFloat32).device(streams_.device())));
  }
  void expect_next(uint64_t number, uint64_t elements) {
    const GradientCopies::Copied copied = copies_->next();
    EXPECT_EQ(copied.first, number);
    ASSERT_EQ(copied.count, elements);
    const auto* values = static_cast<const float*>(copied.values);
    EXPECT_TRUE(std::all_of(values, values + elements,
                            [&](float value) { return value == static_cast<float>(number); }))
        << number;
  }

  const CopyStreams streams_{torch::Device(torch::kPrivateUse1, 0)};
  std::optional<GradientCopies> copies_;
};

TEST_F(LateGradients, NobodyWaitsWhileThereIsRoom) {
  smartinf_test_accelerator_hold_copies(true);  // who waits now waits for ever
  for (uint64_t number = 1; number <= 4; ++number) {
    ASSERT_TRUE(copies_->fits(kElements / 4));
    start(number, kElements / 4);
  }
  EXPECT_FALSE(copies_->fits(1));
  EXPECT_FALSE(copies_->next_is_there());
  smartinf_test_accelerator_hold_copies(false);
  for (uint64_t number = 1; number <= 4; ++number) expect_next(number, kElements / 4);
  EXPECT_TRUE(copies_->empty());
  EXPECT_TRUE(copies_->fits(kElements));
}

TEST_F(LateGradients, ComeInTheirOrderWhateverTheirSizes) {
  std::mt19937 random(1);
  std::deque<std::pair<uint64_t, uint64_t>> under_way;
  for (uint64_t number = 1; number <= 300; ++number) {
    const uint64_t elements = 1 + random() % (random() % 8 == 0 ? kElements : kElements / 4);
    while (!copies_->fits(elements)) {
      ASSERT_FALSE(under_way.empty());
      expect_next(under_way.front().first, under_way.front().second);
      under_way.pop_front();
    }
    start(number, elements);
    under_way.emplace_back(number, elements);
  }
  for (const auto& [number, elements] : under_way) expect_next(number, elements);
  EXPECT_EQ(test_accelerator::smartinf_test_accelerator_order_errors(), 0u);
}

}  // namespace
}  // namespace smartinf::train
