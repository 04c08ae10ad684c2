// Slots of random units in several orders of use: what fits, and what is there in time.
#include "smartinf/plan/slots.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

using ::testing::ElementsAre;

using Sizes = std::vector<uint64_t>;
using Order = std::vector<uint32_t>;

/// Many equal ones, some small ones and some large ones, as models have them.
Sizes random_sizes(std::mt19937& random, size_t units) {
  Sizes sizes;
  for (size_t i = 0; i < units; ++i) {
    const uint64_t any = 1 + random() % 100;
    sizes.push_back(random() % 3 == 0 ? any : 10);
  }
  return sizes;
}

bool fit(Sizes units, Sizes slots) {
  std::ranges::sort(units, std::greater());
  std::ranges::sort(slots, std::greater());
  if (units.size() > slots.size()) return false;
  return std::ranges::equal(units, std::span(slots).first(units.size()), std::less_equal());
}

bool all_neighbours_fit(const Sizes& units, const Sizes& slots) {
  for (size_t first = 0; first < units.size(); ++first) {
    Sizes neighbours;
    for (size_t i = 0; i < slots.size(); ++i) {
      neighbours.push_back(units[(first + i) % units.size()]);
    }
    if (!fit(neighbours, slots)) return false;
  }
  return true;
}

TEST(SlotSizes, OneIsAsLargeAsTheEmbedding) {
  EXPECT_THAT(slot_sizes(Sizes{60, 10, 10, 10, 10, 1}, 3), ElementsAre(60, 10, 10));
  EXPECT_THAT(slot_sizes(Sizes{60, 10, 10, 10, 10, 60}, 3), ElementsAre(60, 60, 10));
  EXPECT_THAT(slot_sizes(Sizes{10, 60}, 3), ElementsAre(60, 10));
  const std::vector<Unit> units{{0, 60, 0, 0}, {60, 10, 0, 1}, {70, 10, 1, 1}, {80, 1, 0, 0}};
  EXPECT_EQ(slot_elements(units, 2), 70u);
}

TEST(SlotSizes, HoldAnyNeighboursAndNoneIsLargerThanNeedBe) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const Sizes units = random_sizes(random, 1 + random() % 12);
    const auto count = static_cast<uint32_t>(1 + random() % 5);
    Sizes slots = slot_sizes(units, count);
    ASSERT_EQ(slots.size(), std::min<size_t>(count, units.size()));
    ASSERT_TRUE(std::ranges::is_sorted(slots, std::greater()));
    ASSERT_TRUE(all_neighbours_fit(units, slots)) << trial;
    for (uint64_t& slot : slots) {
      --slot;
      ASSERT_FALSE(all_neighbours_fit(units, slots)) << trial;
      ++slot;
    }
  }
}

/// Units that pass through slots as a window has them pass.
class Walk {
 public:
  Walk(Sizes units, const Sizes& slots, Order order)
      : units_(std::move(units)), order_(std::move(order)) {
    for (const uint64_t size : slots) slots_.push_back({size});
    read_ahead();
  }

  /// Whether it found a slot.
  bool get(uint32_t unit) {
    next_ = next_use(uses(), unit) + 1;
    Slot* slot = of(unit);
    if (slot == nullptr) {
      ++misses;
      const auto chosen = choose_slot(slots_, uses(), unit);
      if (!chosen) return false;
      slot = &slots_[*chosen];
      load(unit, *slot);
    }
    slot->held = true;
    read_ahead();
    return true;
  }
  void release(uint32_t unit) {
    of(unit)->held = false;
    read_ahead();
  }
  Slot* of(uint32_t unit) {
    const auto found = std::ranges::find(slots_, std::optional(unit), &Slot::unit);
    return found == slots_.end() ? nullptr : &*found;
  }

  int misses = 0;
  int loads = 0;

 private:
  Uses uses() const { return {order_, next_, units_}; }
  void load(uint32_t unit, Slot& slot) {
    EXPECT_FALSE(slot.held);
    EXPECT_LE(units_[unit], slot.size);
    slot.unit = unit;
    ++loads;
  }
  void read_ahead() {
    for (size_t use = next_; use < order_.size(); ++use) {
      if (of(order_[use]) != nullptr) continue;
      const auto chosen = choose_slot(slots_, uses(), order_[use], use);
      if (!chosen) return;
      load(order_[use], slots_[*chosen]);
    }
  }

  const Sizes units_;
  const Order order_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

Order forward(size_t units) {
  Order order(units);
  std::iota(order.begin(), order.end(), 0u);
  return order;
}

/// There and back, once and again; tied: the head behind the last unit has the first one's weights.
Order there_and_back(size_t units, bool tied) {
  Order order = forward(units);
  if (tied) order.push_back(0);
  for (auto unit = static_cast<uint32_t>(units); unit-- > 0;) order.push_back(unit);
  order.insert(order.end(), order.begin(), order.begin() + static_cast<std::ptrdiff_t>(order.size()));
  return order;
}

TEST(Slots, UnitsThatAreUsedOneByOneAreThereInTime) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 3000; ++trial) {
    const size_t count = 2 + random() % 12;
    const Sizes units = random_sizes(random, count);
    const auto slots = static_cast<uint32_t>(2 + random() % 4);
    Order order = there_and_back(count, random() % 2 == 0);
    if (trial % 3 == 0) {
      order = forward(count);
      order.insert(order.end(), order.begin(), order.end());
    }
    Walk walk(units, slot_sizes(units, slots), order);
    for (const uint32_t unit : order) {
      ASSERT_TRUE(walk.get(unit));
      walk.release(unit);
    }
    EXPECT_EQ(walk.misses, 0) << trial;
  }
}

/// A tied head holds the last unit and the first; what is computed again in backward may hold a
/// block while the one before is wanted.
TEST(Slots, NeighboursThatAreHeldTogetherFindTheirs) {
  for (size_t count = 3; count < 14; ++count) {
    Sizes units(count, 10);
    units.front() = 60;
    units.back() = 1;
    for (const size_t together : {2, 3}) {
      Walk walk(units, slot_sizes(units, static_cast<uint32_t>(together) + 1),
                there_and_back(count, true));
      std::vector<uint32_t> held;
      for (const uint32_t unit : there_and_back(count, true)) {
        if (std::erase(held, unit) == 0 && held.size() == together) {
          walk.release(held.front());
          held.erase(held.begin());
        }
        ASSERT_TRUE(walk.get(unit)) << unit << " of " << count;
        held.push_back(unit);
      }
    }
  }
}

TEST(Slots, WhatIsReadAheadTakesTheLargeSlotOnlyFarFromTheLargeUnit) {
  const Sizes units{60, 10, 10, 10, 10, 10, 10, 1};
  const Order order = there_and_back(units.size(), true);
  Walk walk(units, slot_sizes(units, 3), order);
  std::vector<uint32_t> in_large;
  for (size_t use = 0; use < 9; ++use) {
    ASSERT_TRUE(walk.get(order[use]));
    if (walk.of(order[use])->size == 60) in_large.push_back(order[use]);
    walk.release(order[use]);
  }
  EXPECT_THAT(in_large, ElementsAre(0, 3, 0)) << "not the last two before it is wanted again";
}

TEST(Slots, OfEmptyOnesAUnitTakesTheSmallestThatHoldsIt) {
  const Sizes units{60, 10, 10, 20};
  std::vector<Slot> slots{{60}, {20}, {10}};
  EXPECT_EQ(choose_slot(slots, {{}, 0, units}, 1), 2u);
  EXPECT_EQ(choose_slot(slots, {{}, 0, units}, 3), 1u);
  slots[0].held = true;
  EXPECT_EQ(choose_slot(slots, {{}, 0, units}, 0), std::nullopt);
}

TEST(Slots, WithEqualOnesTheUnitThatIsUsedLastGoes) {
  const Sizes units(8, 10);
  const Order order{0, 1, 2, 3, 0, 4};
  std::vector<Slot> slots{{10, 3}, {10, 0}, {10, 1}};
  EXPECT_EQ(choose_slot(slots, {order, 1, units}, 2), 1u);
  slots[1].held = true;
  EXPECT_EQ(choose_slot(slots, {order, 1, units}, 2), 0u);
  EXPECT_EQ(choose_slot(slots, {order, 1, units}, 2, 2), 0u);
  EXPECT_EQ(choose_slot(slots, {order, 1, units}, 4, 5), std::nullopt) << "all are used before";
  slots[0].unit = 7;
  EXPECT_EQ(choose_slot(slots, {order, 1, units}, 4, 5), 0u);
}

TEST(Slots, SubgroupsGoBeyondUnitsOnBothSides) {
  const std::vector<Unit> units = {{0, 10, 0, 0}, {10, 25, 0, 1}, {35, 7, 0, 0}};
  EXPECT_EQ(slot_padding_elements(units, 1), 0u);
  EXPECT_EQ(slot_padding_elements(units, 8), 7u) << "elements 8 to 40";
  EXPECT_EQ(slot_padding_elements(units, 100), 35u) << "all 42";
}

}  // namespace
}  // namespace smartinf::plan
