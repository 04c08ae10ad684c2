// Units of weights through a window of slots: their bits, how often they are read, and what becomes
// of failures.
#include "smartinf/engine/layer_window.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater_kinds.h"
#include "smartinf/engine/weight_reader.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Status;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr uint32_t kUnits = 8;

/// Units of equal length, or the first of half of all; subgroups lie across their borders.
std::vector<plan::Unit> units_of(const Updater& updater, bool large_first = false) {
  const uint64_t count = updater.space().count();
  const uint64_t begin = large_first ? count / 2 : 0;
  std::vector<plan::Unit> units;
  for (uint32_t i = 0; i < kUnits; ++i) {
    const uint64_t first = i == 0 ? 0 : begin + (count - begin) * i / kUnits;
    const uint64_t end = begin + (count - begin) * (i + 1) / kUnits;
    units.push_back({first, end - first, i, 1});
  }
  return units;
}

std::vector<uint32_t> forward() {
  std::vector<uint32_t> order(kUnits);
  std::iota(order.begin(), order.end(), 0u);
  return order;
}

std::vector<uint32_t> forward_and_backward() {
  std::vector<uint32_t> order = forward();
  for (uint32_t unit = kUnits; unit-- > 0;) order.push_back(unit);
  return order;
}

std::vector<base::Bf16> all_weights(Updater& updater) {
  std::vector<base::Bf16> all(updater.space().count());
  expect_ok(
      updater.load_weights(DataType::kBf16, [&](uint64_t first) { return all.data() + first; }));
  return all;
}

/// The least that hold neighbours. Returns their memory, in which each byte is a slot's.
std::vector<std::byte> slots_for(const WeightSource& source, std::span<const plan::Unit> units,
                                 uint32_t count, std::vector<std::span<std::byte>>& slots) {
  const std::vector<uint64_t> sizes = window_slot_bytes(source, units, DataType::kBf16, count);
  std::vector<std::byte> memory(std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}));
  std::span<std::byte> left(memory);
  for (const uint64_t size : sizes) {
    slots.push_back(left.first(size));
    left = left.subspan(size);
  }
  return memory;
}

/// A window and its memory; the first units are resident.
class Window {
 public:
  Window(Updater& updater, uint32_t slots, uint32_t resident_units = 0, bool large_first = false)
      : updater_(updater),
        units_(units_of(updater, large_first)),
        resident_(updater.space().count()) {
    if (resident_units > 0) {
      const plan::Subgroup last = updater.subgroup_at(units_[resident_units - 1].end() - 1);
      resident_.resize(last.first + last.count);
    } else {
      resident_.clear();
    }
    LayerWindow::Options options;
    options.units = units_;
    memory_ = slots_for(updater, units_, slots, options.slots);
    options.resident = sink();
    options.wait_resident = [this](const plan::Subgroup& subgroup) {
      return updater_.wait_weights(subgroup.first, subgroup.count);
    };
    window_ = std::make_unique<LayerWindow>(updater, std::move(options));
  }

  LayerWindow& operator*() { return *window_; }
  LayerWindow* operator->() { return window_.get(); }
  void close() { window_.reset(); }
  WeightsSink sink() {
    return [this](uint64_t first) {
      return first < resident_.size() ? resident_.data() + first : nullptr;
    };
  }
  uint64_t resident_elements() const { return resident_.size(); }
  uint64_t memory_bytes() const { return memory_.size(); }

  /// Whether it has been got with these bits; it is still held then.
  testing::AssertionResult has(uint32_t unit, const std::vector<base::Bf16>& all) {
    const auto got = window_->get(unit);
    if (!got.ok()) return testing::AssertionFailure() << got.status().to_string();
    const uint64_t bytes = units_[unit].count * sizeof(base::Bf16);
    if (std::memcmp(*got, all.data() + units_[unit].first, bytes) == 0) {
      return testing::AssertionSuccess();
    }
    return testing::AssertionFailure() << "other bits of unit " << unit;
  }
  void expect(std::span<const uint32_t> order, const std::vector<base::Bf16>& all) {
    for (const uint32_t unit : order) {
      ASSERT_TRUE(has(unit, all));
      window_->release(unit);
    }
  }

 private:
  Updater& updater_;
  const std::vector<plan::Unit> units_;
  std::vector<base::Bf16> resident_;
  std::vector<std::byte> memory_;
  std::unique_ptr<LayerWindow> window_;
};

uint64_t weights_sent(const Updater& updater) {
  return updater.traffic().host_link.up(TrafficKind::kWeight) / sizeof(base::Bf16);
}

class LayerWindows : public ::testing::TestWithParam<UpdaterKind> {
 protected:
  void SetUp() override {
    auto opened = place_->open();
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    updater_ = std::move(*opened);
    initialize(*updater_);
    weights_ = all_weights(*updater_);
  }

  void start_update(const WeightsSink& sink = nullptr) {
    expect_ok(updater_->begin_step());
    put_gradients(*updater_, contract_gradient(updater_->space().count(), ++step_), std::nullopt);
    const auto summary = updater_->finish_gradients(1);
    expect_ok(summary.status());
    UpdateOptions options;
    options.groups = {{.lr = 0.01, .weight_decay = 0.1}, {.lr = 0.02, .weight_decay = 0}};
    expect_ok(updater_->start_update(options, DataType::kBf16, sink));
  }

  const std::unique_ptr<StatePlace> place_ = GetParam().make_place();
  std::unique_ptr<Updater> updater_;
  std::vector<base::Bf16> weights_;  // of step 0
  int step_ = 0;
};

TEST_P(LayerWindows, ReadEachSubgroupOnceInAForward) {
  for (const uint32_t slots : {2, 3, 5}) {
    Window window(*updater_, slots);
    const uint64_t before = weights_sent(*updater_);
    window->start(forward());
    window.expect(forward(), weights_);
    EXPECT_EQ(weights_sent(*updater_) - before, weights_.size()) << slots;
    EXPECT_EQ(window->misses(), 0u);
  }
}

TEST_P(LayerWindows, KeepForBackwardWhatForwardUsedLast) {
  for (const uint32_t slots : {2, 3, 5}) {
    Window window(*updater_, slots);
    const uint64_t before = weights_sent(*updater_);
    window->start(forward_and_backward());
    window.expect(forward_and_backward(), weights_);
    const uint64_t first_kept = units_of(*updater_)[kUnits - slots].first;
    EXPECT_EQ(weights_sent(*updater_) - before,
              weights_.size() + updater_->subgroup_at(first_kept).first)
        << slots;
    EXPECT_EQ(window->hits(), 2 * kUnits);
    EXPECT_EQ(window->misses(), 0u);
  }
}

TEST_P(LayerWindows, HaveOneLargeSlotForALargeUnit) {
  for (const uint32_t slots : {2, 3, 4}) {
    Window window(*updater_, slots, 0, /*large_first=*/true);
    EXPECT_LT(window.memory_bytes(), (slots + 4) * weights_.size() / 4) << "half of them once";
    for (int pass = 0; pass < 2; ++pass) {
      window->start(forward_and_backward());
      window.expect(forward_and_backward(), weights_);
    }
    EXPECT_EQ(window->misses(), 0u) << slots;
    EXPECT_EQ(window->more_bytes(), 0u) << slots;
    window->start(std::vector<uint32_t>{6, 7, 0});
    ASSERT_TRUE(window.has(6, weights_));
    window->release(6);
    ASSERT_TRUE(window.has(7, weights_));
    ASSERT_TRUE(window.has(0, weights_)) << "a tied head's, beside its norm's";
    EXPECT_EQ(window->more_bytes(), 0u) << slots;
    window->release(7);
    window->release(0);
  }
}

/// In any order and with any held together, as long as they are no more than the slots.
TEST_P(LayerWindows, HaveOneMoreSlotWhereUnitsAreHeldThatAreNoNeighbours) {
  std::mt19937 random(7);
  constexpr uint32_t kSlots = 3;
  Window window(*updater_, kSlots, 0, /*large_first=*/true);
  std::vector<uint32_t> held;
  for (int use = 0; use < 200; ++use) {
    if (use % 20 == 0) window->start(forward_and_backward());
    const auto unit = static_cast<uint32_t>(random() % kUnits);
    if (std::ranges::find(held, unit) == held.end()) {
      ASSERT_TRUE(window.has(unit, weights_)) << use;
      held.push_back(unit);
    }
    while (!held.empty() && (random() % 2 == 0 || held.size() == kSlots)) {
      const size_t gone = random() % held.size();
      window->release(held[gone]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(gone));
    }
  }
  for (const uint32_t unit : held) window->release(unit);
  EXPECT_GT(window->more_bytes(), 0u);
  EXPECT_LT(window->more_bytes(), 3 * weights_.size()) << "as if each slot held the largest unit";
}

TEST_P(LayerWindows, GiveUnitsOutOfOrderToo) {
  for (const uint32_t slots : {1, 2, 3}) {
    SCOPED_TRACE(slots);
    Window window(*updater_, slots);
    window.expect(std::vector<uint32_t>{4, 4, 0}, weights_);
    EXPECT_EQ(window->misses(), 2u) << "without an order";
    window->start(forward());
    const std::vector<uint32_t> other = {6, 0, 7, 7, 3, 2, 5, 1, 4, 0};
    window.expect(other, weights_);
    EXPECT_GT(window->misses(), 2u);
    window->start(forward());
    window.expect(forward(), weights_);
  }
}

TEST_P(LayerWindows, CopyWhatTheyShareWithTheResidentUnits) {
  Window window(*updater_, 2, 3);
  expect_ok(updater_->load_weights(DataType::kBf16, window.sink()));
  start_update(window.sink());
  expect_ok(updater_->start_commit(""));
  window->updated();
  const std::vector<uint32_t> order = {3, 4, 5, 6, 7};
  const uint64_t before = weights_sent(*updater_);
  window->start(order);
  std::vector<std::vector<base::Bf16>> got;
  const std::vector<plan::Unit> units = units_of(*updater_);
  for (const uint32_t unit : order) {
    const auto weights = window->get(unit);
    ASSERT_TRUE(weights.ok()) << weights.status().to_string();
    const auto* values = reinterpret_cast<const base::Bf16*>(*weights);
    got.emplace_back(values, values + units[unit].count);
    window->release(unit);
  }
  expect_ok(updater_->wait_commit());
  EXPECT_LE(weights_sent(*updater_) - before, weights_.size()) << "with the resident ones";
  const std::vector<base::Bf16> expected = all_weights(*updater_);
  for (size_t i = 0; i < order.size(); ++i) {
    const plan::Unit& unit = units[order[i]];
    EXPECT_EQ(0, std::memcmp(got[i].data(), expected.data() + unit.first,
                             unit.count * sizeof(base::Bf16)))
        << order[i];
  }
}

TEST_P(LayerWindows, GiveTheWeightsOfTheUpdateThatWasStartedLast) {
  Window window(*updater_, 3);
  window->start(forward_and_backward());
  window.expect(forward_and_backward(), weights_);
  start_update();
  window->updated();
  window->start(forward());
  std::vector<base::Bf16> seen;
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    const auto weights = window->get(unit);
    ASSERT_TRUE(weights.ok()) << weights.status().to_string();
    const auto* values = reinterpret_cast<const base::Bf16*>(*weights);
    seen.insert(seen.end(), values, values + units_of(*updater_)[unit].count);
    window->release(unit);
    if (unit == kUnits / 2) expect_ok(updater_->start_commit(""));
  }
  window->start(forward_and_backward());
  window.expect(forward_and_backward(), seen);
  expect_ok(updater_->wait_commit());
  EXPECT_EQ(digest(seen), loaded_weights(*updater_));
  EXPECT_NE(digest(seen), digest(weights_));
}

TEST_P(LayerWindows, GiveTheCommittedWeightsAfterAnAbort) {
  if (GetParam().in_place) GTEST_SKIP() << "an update cannot be aborted";
  Window window(*updater_, 3);
  for (const uint32_t used : {0, 1, 3}) {
    start_update();
    window->updated();
    window->start(forward());
    for (uint32_t unit = 0; unit < used; ++unit) {
      expect_ok(window->get(unit).status());
      window->release(unit);
    }
    expect_ok(updater_->abort());
    window->updated();
    window->start(forward());
    window.expect(forward(), weights_);
  }
}

TEST_P(LayerWindows, LeaveNothingUnderWay) {
  for (const bool updating : {false, true}) {
    if (updating) start_update();
    for (uint32_t used = 0; used < 3; ++used) {
      Window window(*updater_, 3);
      window->start(forward());
      for (uint32_t unit = 0; unit < used; ++unit) {
        expect_ok(window->get(unit).status());
        window->release(unit);
      }
      window.close();
      if (updating && used == 0) expect_ok(updater_->start_commit(""));
    }
    expect_ok(updater_->wait_commit());
    Window window(*updater_, 2);
    window->start(forward());
    window.expect(forward(), all_weights(*updater_));
  }
}

TEST_P(LayerWindows, RefuseAUnitWhenEverySlotIsHeld) {
  Window window(*updater_, 2);
  window->start(forward());
  ASSERT_TRUE(window.has(0, weights_));
  ASSERT_TRUE(window.has(1, weights_));
  ASSERT_TRUE(window.has(1, weights_)) << "it is held twice";
  EXPECT_TRUE(window->has_come(1));
  EXPECT_FALSE(window->has_come(2));
  EXPECT_EQ(window->get(2).status().code(), ErrorCode::kFailedPrecondition);
  window->release(1);
  EXPECT_EQ(window->get(2).status().code(), ErrorCode::kFailedPrecondition);
  window->release(1);
  EXPECT_TRUE(window.has(2, weights_));
  EXPECT_TRUE(window.has(0, weights_));
}

std::vector<UpdaterKind> some_kinds() {
  std::vector<UpdaterKind> kinds;
  for (UpdaterKind& kind : all_kinds(true)) {
    for (const char* name : {"Fakes", "OneDevice", "SmallestSubgroups", "InPlace"}) {
      if (kind.name == name) kinds.push_back(std::move(kind));
    }
  }
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Some, LayerWindows, ::testing::ValuesIn(some_kinds()),
                         [](const auto& kind) { return kind.param.name; });

// ---- Failures.

/// Wherever it happens, the unit that is asked for again comes, and all others with their bits.
TEST(LayerWindow, AFailingDeviceIsNamedAndUnitsCanBeAskedForAgain) {
  FakesPlace place(true);
  const auto opened = place.open();
  ASSERT_TRUE(opened.ok());
  Updater& updater = **opened;
  initialize(updater);
  const std::vector<base::Bf16> weights = all_weights(updater);
  for (const uint32_t slots : {2, 3, 5}) {
    for (uint32_t after = 0; after < kUnits; ++after) {
      SCOPED_TRACE(std::to_string(slots) + " slots, after " + std::to_string(after));
      Window window(updater, slots);
      window->start(forward_and_backward());
      std::vector<Status> failures;
      const std::vector<uint32_t> order = forward_and_backward();
      for (size_t use = 0; use < order.size(); ++use) {
        if (use == after) place.drive(1).fail_next = csd::ReadWeights{};
        const plan::Unit unit = units_of(updater)[order[use]];
        const auto weights_of = window->get(order[use]);
        if (weights_of.ok()) {
          EXPECT_EQ(0, std::memcmp(*weights_of, weights.data() + unit.first,
                                   unit.count * sizeof(base::Bf16)));
          window->release(order[use]);
          continue;
        }
        failures.push_back(weights_of.status());
        ASSERT_TRUE(window.has(order[use], weights)) << use;
        window->release(order[use]);
      }
      if (place.drive(1).fail_next.has_value()) {  // no unit is read any more
        place.drive(1).fail_next.reset();
        continue;
      }
      ASSERT_THAT(failures, SizeIs(1));
      EXPECT_EQ(failures[0].code(), ErrorCode::kIo);
      EXPECT_THAT(failures[0].to_string(), HasSubstr("drive1"));
      window->updated();
    }
  }
}

/// A unit that is held keeps its weights when the next one fails, and is released as ever.
TEST(LayerWindow, AUnitThatIsHeldStaysWhenAnotherFails) {
  FakesPlace place(true);
  const auto opened = place.open();
  ASSERT_TRUE(opened.ok());
  initialize(**opened);
  const std::vector<base::Bf16> weights = all_weights(**opened);
  Window window(**opened, 2);
  ASSERT_TRUE(window.has(3, weights));
  for (const size_t d : {0, 1}) place.drive(d).fail_next = csd::ReadWeights{};
  EXPECT_EQ(window->get(4).status().code(), ErrorCode::kIo);
  for (const size_t d : {0, 1}) place.drive(d).fail_next.reset();
  ASSERT_TRUE(window.has(3, weights));
  ASSERT_TRUE(window.has(4, weights)) << "with what it shares with the one before";
  window->release(3);
  window->release(3);
  window->release(4);
  window->updated();
}

/// Reads that do not return before they are let go.
class HangingFiles final : public WeightFileSet {
 public:
  Status read(const plan::Subgroup&, DataType, std::byte* out) const override {
    let_go.wait(false);
    *out = std::byte{1};
    ++done;
    return Status();
  }
  std::string path_of(const plan::Subgroup&) const override { return "/drive1/weights"; }

  std::atomic<bool> let_go = false;
  mutable std::atomic<int> done = 0;
};

TEST(LayerWindow, ReadsThatHangHoldNobodyUpAndKeepTheirMemory) {
  const auto files = std::make_shared<HangingFiles>();
  auto memory = std::make_shared<std::vector<std::byte>>(8 * base::kBlockElements);
  const std::weak_ptr<std::vector<std::byte>> kept = memory;
  {
    WeightReader reader(2 * base::kBlockElements, base::kBlockElements, files);
    reader.set_silence_max(std::chrono::milliseconds(50));
    LayerWindow::Options options;
    options.units = {{0, base::kBlockElements, 0, 1},
                     {base::kBlockElements, base::kBlockElements, 1, 1}};
    options.type = DataType::kF32;
    options.slots = {std::span(*memory).first(4 * base::kBlockElements),
                     std::span(*memory).last(4 * base::kBlockElements)};
    options.slots_owner = std::move(memory);
    LayerWindow window(reader, std::move(options));
    window.start(std::vector<uint32_t>{0, 1});
    for (int i = 0; i < 2; ++i) {
      const Status status = window.get(0).status();
      EXPECT_EQ(status.code(), ErrorCode::kTimeout);
      EXPECT_THAT(status.to_string(), HasSubstr("/drive1/weights"));
    }
  }
  EXPECT_FALSE(kept.expired());
  files->let_go = true;
  files->let_go.notify_all();
  while (files->done < 2) std::this_thread::yield();
}

}  // namespace
}  // namespace smartinf::engine
