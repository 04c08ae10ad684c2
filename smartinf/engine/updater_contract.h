// The contract of engine::Updater as tests, which every kind of updater passes wherever it lives: a
// test program includes this once and instantiates UpdaterContract with its kinds. Whatever they
// are made of, the same gradients give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater.h"
#include "smartinf/storage/store.h"

namespace smartinf::engine {

class UpdaterContract : public ::testing::TestWithParam<UpdaterKind> {
 protected:
  std::unique_ptr<Updater> open() {
    auto updater = place_->open();
    EXPECT_TRUE(updater.ok()) << updater.status().to_string();
    return std::move(updater).value();
  }
  std::unique_ptr<Updater> open_fresh() {
    auto updater = open();
    initialize(*updater);
    return updater;
  }
  /// As a run ends; to be opened again.
  static void close(std::unique_ptr<Updater> updater) { expect_ok(updater->flush()); }

  static UpdateOptions update_options() {
    UpdateOptions options;
    options.groups.resize(2);
    return options;
  }
  /// A step up to its update.
  static void put_all(Updater& updater, int seed) {
    const auto gradient = contract_gradient(updater.space().count(), seed);
    expect_ok(updater.begin_step());
    expect_ok(updater.put_gradient(0, gradient.data(), DataType::kBf16, gradient.size()));
    expect_ok(updater.finish_gradients(1).status());
  }

  const std::unique_ptr<StatePlace> place_ = GetParam().make_place();
};

TEST_P(UpdaterContract, SameGradientsGiveTheSameBits) {
  Outcome outcome;
  auto updater = open_fresh();
  run_steps(*updater, 1, 2, outcome);
  close(std::move(updater));
  // The last step after opening again.
  updater = open();
  EXPECT_FALSE(updater->fresh());
  EXPECT_EQ(updater->committed_step(), 2u);
  EXPECT_EQ(updater->client_metadata(), "after step 2");
  run_steps(*updater, 3, kSteps, outcome);
  const Outcome& expected = GetParam().reference();
  EXPECT_EQ(outcome.norms, expected.norms);
  EXPECT_EQ(outcome.weights, expected.weights);
  EXPECT_EQ(outcome.state, expected.state);
}

/// A guess of a step's options changes when it is updated, and nothing else: neither one that is
/// right, nor one that turns out wrong at the end, nor one that is known to be wrong before.
TEST_P(UpdaterContract, EarlyUpdatesGiveTheSameBits) {
  const Outcome& expected = GetParam().reference();
  const auto updater = open_fresh();
  const bool possible = updater->early_update_possible().ok();
  if (!possible) {
    expect_ok(updater->begin_step());
    EXPECT_EQ(updater->start_early_update(update_options(), DataType::kBf16, nullptr, 0).code(),
              base::ErrorCode::kUnsupported);
    expect_ok(updater->abort());
  }
  const auto guesses = [](int step, const UpdateOptions& right) {
    Guess guess{right};
    if (step == 1) return guess;
    guess.options.gradient_scale *= 1.5;
    if (step == 2) guess.options.groups[1].skip = true;
    if (step == 3) guess.norm_max = 0.1;  // the first piece's is more
    return guess;
  };
  Outcome outcome;
  run_steps(*updater, 1, kSteps, outcome, possible ? Guesses(guesses) : nullptr, expected.norms);
  EXPECT_EQ(outcome, expected);
}

/// State that was updated early has to stay as it was.
TEST_P(UpdaterContract, AnEarlyUpdateIsTakenBack) {
  const auto updater = open_fresh();
  if (const base::Status possible = updater->early_update_possible(); !possible.ok()) {
    GTEST_SKIP() << possible.to_string();
  }
  const plan::ParameterSpace& space = updater->space();
  std::vector<base::Bf16> weights(space.count());
  const WeightsSink sink = [&](uint64_t first) { return weights.data() + first; };
  const auto before = all_planes(*updater);
  UpdateOptions options;
  options.groups.resize(2);
  const auto begin_with_all_gradients = [&] {
    expect_ok(updater->begin_step());
    expect_ok(updater->start_early_update(options, DataType::kBf16, sink, 0));
    put_gradients(*updater, contract_gradient(space.count(), 7), std::nullopt);
    expect_ok(updater->finish_gradients(1).status());
  };
  begin_with_all_gradients();
  expect_ok(updater->abort());
  EXPECT_EQ(all_planes(*updater), before);

  // One that gradients are missing for cannot end by itself. Whether it has started is up to the
  // device.
  for (int attempt = 0; attempt < 5; ++attempt) {
    expect_ok(updater->begin_step());
    expect_ok(updater->start_early_update(options, DataType::kBf16, sink, 0));
    expect_ok(updater->abort());
  }
  EXPECT_EQ(all_planes(*updater), before);

  begin_with_all_gradients();
  UpdateOptions nothing = options;
  for (auto& group : nothing.groups) group.skip = true;
  expect_ok(updater->start_update(nothing, DataType::kBf16, sink));
  expect_ok(updater->wait_weights(0, space.count()));
  expect_ok(updater->commit("nothing changed"));
  EXPECT_EQ(all_planes(*updater), before);
  EXPECT_EQ(loaded_weights(*updater), digest(weights));
}

TEST_P(UpdaterContract, AStepAbortedLeavesNoTrace) {
  const auto updater = open_fresh();
  Outcome outcome;
  run_steps(*updater, 1, 1, outcome);
  const uint64_t count = updater->space().count();
  const auto other = contract_gradient(count, 99);
  for (const bool whole : {false, true}) {
    expect_ok(updater->begin_step());
    expect_ok(updater->put_gradient(0, other.data(), DataType::kBf16, whole ? count : 3 * kBlock));
    if (whole) expect_ok(updater->finish_gradients(1).status());
    expect_ok(updater->abort());
    EXPECT_EQ(updater->committed_step(), 1u);
  }
  if (!GetParam().in_place) {
    put_all(*updater, 99);
    expect_ok(updater->start_update(update_options(), DataType::kBf16, nullptr));
    expect_ok(updater->abort());
    EXPECT_EQ(updater->committed_step(), 1u);
  }
  run_steps(*updater, 2, kSteps, outcome);
  EXPECT_EQ(outcome, GetParam().reference());
}

/// An updater that says that it has aborted has, and one that cannot says so and does not go on.
TEST_P(UpdaterContract, AnUpdateIsAbortedOrNothingGoesOn) {
  const auto updater = open_fresh();
  const auto before = all_planes(*updater);
  put_all(*updater, 99);
  expect_ok(updater->start_update(update_options(), DataType::kBf16, nullptr));
  expect_ok(updater->wait_weights(0, updater->space().count()));
  const base::Status aborted = updater->abort();
  EXPECT_EQ(updater->committed_step(), 0u);
  if (aborted.ok()) {
    EXPECT_EQ(all_planes(*updater), before);
    return;
  }
  EXPECT_TRUE(GetParam().in_place) << aborted.to_string();
  EXPECT_EQ(updater->begin_step().code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_EQ(updater->read_state(1, [](uint64_t, auto) { return base::Status(); }).code(),
            base::ErrorCode::kFailedPrecondition);
}

TEST_P(UpdaterContract, CallsOutOfOrderAreRefused) {
  constexpr base::ErrorCode kRefused = base::ErrorCode::kFailedPrecondition;
  auto updater = open();
  std::vector<base::Bf16> weights(updater->space().count());
  const WeightsSink sink = [&](uint64_t first) { return weights.data() + first; };
  const auto start_update = [&] {
    return updater->start_update(update_options(), DataType::kBf16, sink);
  };
  EXPECT_TRUE(updater->fresh());
  EXPECT_THAT(updater->begin_step().to_string(), ::testing::HasSubstr("initialize()"));
  EXPECT_EQ(updater->load_weights(DataType::kBf16, sink).code(), kRefused);
  expect_ok(updater->flush());
  initialize(*updater);
  EXPECT_EQ(updater->client_metadata(), "start");

  // Between steps.
  EXPECT_EQ(
      updater->initialize([](uint64_t, std::span<float>) { return base::Status(); }, "").code(),
      kRefused);
  EXPECT_EQ(updater->put_gradient(0, weights.data(), DataType::kBf16, weights.size()).code(),
            kRefused);
  EXPECT_EQ(updater->finish_gradients(1).status().code(), kRefused);
  EXPECT_EQ(start_update().code(), kRefused);
  EXPECT_EQ(updater->wait_weights(0, 1).code(), kRefused);
  EXPECT_EQ(updater->start_commit("").code(), kRefused);
  expect_ok(updater->wait_commit());
  expect_ok(updater->abort());

  // In one.
  expect_ok(updater->begin_step());
  EXPECT_EQ(updater->begin_step().code(), kRefused);
  EXPECT_EQ(updater->load_weights(DataType::kBf16, sink).code(), kRefused);
  EXPECT_EQ(updater->read_weights([](uint64_t, auto) { return base::Status(); }).code(), kRefused);
  EXPECT_EQ(updater->flush().code(), kRefused);
  EXPECT_EQ(start_update().code(), kRefused);
  EXPECT_EQ(updater->start_commit("").code(), kRefused);
  expect_ok(updater->abort());
  put_all(*updater, 1);
  expect_ok(updater->finish_gradients(1).status());
  EXPECT_EQ(updater->put_gradient(0, weights.data(), DataType::kBf16, weights.size()).code(),
            kRefused);
  UpdateOptions one_group;
  one_group.groups.resize(1);
  EXPECT_EQ(updater->start_update(one_group, DataType::kBf16, sink).code(),
            base::ErrorCode::kInvalidArgument);
  expect_ok(start_update());
  EXPECT_EQ(start_update().code(), kRefused);
  EXPECT_EQ(updater->begin_step().code(), kRefused);
  EXPECT_EQ(updater->finish_gradients(1).status().code(), kRefused);
  const std::string too_long(storage::Store::kClientMetadataBytesMax + 1, 'x');
  EXPECT_EQ(updater->start_commit(too_long).code(), base::ErrorCode::kInvalidArgument);
  expect_ok(updater->commit("one step"));
  EXPECT_EQ(updater->committed_step(), 1u);
  EXPECT_EQ(updater->client_metadata(), "one step");
  EXPECT_EQ(updater->start_commit("").code(), kRefused);
  EXPECT_EQ(loaded_weights(*updater), digest(weights));
}

TEST_P(UpdaterContract, GradientPiecesAreHeldToTheirContract) {
  const auto updater = open_fresh();
  const uint64_t count = updater->space().count();
  const auto values = contract_gradient(count, 1);
  const auto put = [&](uint64_t first, uint64_t some) {
    return updater->put_gradient(first, values.data(), DataType::kBf16, some);
  };
  expect_ok(updater->begin_step());
  EXPECT_EQ(put(0, count + 1).code(), base::ErrorCode::kInvalidArgument);
  EXPECT_EQ(put(~0ull, 2).code(), base::ErrorCode::kInvalidArgument);
  const base::Status cut = put(0, 77);
  EXPECT_EQ(cut.code(), base::ErrorCode::kInvalidArgument);
  EXPECT_THAT(cut.to_string(),
              ::testing::HasSubstr("a piece of the gradient of embed ends at its element 77"));
  expect_ok(put(0, 3 * kBlock));
  const base::Status twice = put(0, count);
  EXPECT_EQ(twice.code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_THAT(twice.to_string(), ::testing::HasSubstr("gradient of embed"));
  expect_ok(put(3 * kBlock, 1000));
  expect_ok(put(3 * kBlock + 1000, Updater::kGradientCutElements));
  const base::Status missing = updater->finish_gradients(1).status();
  EXPECT_EQ(missing.code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_THAT(missing.to_string(),
              ::testing::HasSubstr("the gradient of ffn is missing from its element 1048576 on"));
  EXPECT_EQ(updater->start_update(update_options(), DataType::kBf16, nullptr).code(),
            base::ErrorCode::kFailedPrecondition);
  expect_ok(updater->abort());
}

TEST_P(UpdaterContract, TheNormDependsOnNothingButTheValues) {
  const auto updater = open_fresh();
  const auto values = contract_gradient(updater->space().count(), 7);
  double expected = 0;
  for (const base::Bf16 value : values) expected += std::pow(base::to_f32(value), 2.0);
  std::vector<double> norms;
  for (const bool reversed : {false, true}) {
    std::vector<plan::ParameterRange> ranges = updater->space().ranges();
    if (reversed) std::reverse(ranges.begin(), ranges.end());
    expect_ok(updater->begin_step());
    for (const plan::ParameterRange& range : ranges) {
      expect_ok(updater->put_gradient(range.first, values.data() + range.first, DataType::kBf16,
                                      range.count));
    }
    const auto summary = updater->finish_gradients(0.5);
    expect_ok(summary.status());
    norms.push_back(summary->norm);
    EXPECT_TRUE(summary->finite);
    expect_ok(updater->abort());
  }
  EXPECT_EQ(norms[0], norms[1]);
  EXPECT_NEAR(norms[0], 0.5 * std::sqrt(expected), 1e-9 * norms[0]);  // added up in another order
}

TEST_P(UpdaterContract, AGradientThatIsNotFiniteNamesTheFirstParameter) {
  const auto updater = open_fresh();
  auto values = contract_gradient(updater->space().count(), 3);
  values[3 * kBlock + 5] = base::to_bf16(std::numeric_limits<float>::quiet_NaN());
  values.back() = base::to_bf16(std::numeric_limits<float>::infinity());
  expect_ok(updater->begin_step());
  expect_ok(updater->put_gradient(0, values.data(), DataType::kBf16, values.size()));
  const auto summary = updater->finish_gradients(1);
  expect_ok(summary.status());
  EXPECT_FALSE(summary->finite);
  EXPECT_EQ(summary->first_bad, "norm");
  expect_ok(updater->abort());
  EXPECT_EQ(updater->committed_step(), 0u);
}

TEST_P(UpdaterContract, StateIsReadOnceAndInOrder) {
  const auto updater = open_fresh();
  Outcome outcome;
  run_steps(*updater, 1, 1, outcome);
  const auto all = all_planes(*updater);
  uint64_t next = 0;
  expect_ok(updater->read_state(
      0b101, [&](uint64_t first, std::span<const std::span<const float>> planes) {
        EXPECT_EQ(first, next);
        EXPECT_EQ(planes.size(), 3u);
        EXPECT_TRUE(planes[1].empty());
        EXPECT_EQ(planes[0].size(), planes[2].size());
        for (const size_t p : {0, 2}) {
          EXPECT_TRUE(std::equal(planes[p].begin(), planes[p].end(),
                                 all[p].begin() + static_cast<ptrdiff_t>(first)));
        }
        next += planes[0].size();
        return base::Status();
      }));
  EXPECT_EQ(next, updater->space().count());
  const auto cancel = [](uint64_t, auto) { return base::Status(base::ErrorCode::kCancelled, "x"); };
  EXPECT_EQ(updater->read_state(1, cancel).code(), base::ErrorCode::kCancelled);
  expect_ok(updater->read_state(0, cancel));  // nothing is wanted
}

// Ranges that have a gradient change as if everything had one; a range that has none keeps its bits
// and, where a whole subgroup is left alone, is not even read.
TEST_P(UpdaterContract, SkippedRangesStayAsTheyAre) {
  const auto updater = open_fresh();
  if (!GetParam().on_devices) {
    expect_ok(updater->begin_step());
    EXPECT_EQ(updater->skip_gradient(0, kBlock).code(), base::ErrorCode::kUnsupported);
    return;
  }
  const plan::ParameterSpace& space = updater->space();
  const auto gradient = contract_gradient(space.count(), 1);
  std::vector<base::Bf16> weights(space.count());
  const auto step = [&](uint32_t skipped_group) {
    expect_ok(updater->begin_step());
    put_gradients(*updater, gradient, skipped_group);
    expect_ok(updater->finish_gradients(1).status());
    UpdateOptions update;
    update.groups.resize(2);
    const auto sink = [&](uint64_t first) { return weights.data() + first; };
    EXPECT_EQ(updater->start_update(update, DataType::kBf16, sink).code(),
              base::ErrorCode::kInvalidArgument);  // no gradient, and not said to be skipped
    update.groups[skipped_group].skip = true;
    expect_ok(updater->start_update(update, DataType::kBf16, sink));
    expect_ok(updater->wait_weights(0, space.count()));
    expect_ok(updater->commit("skipped"));
  };
  const auto before = all_planes(*updater);
  const uint64_t read_before = updater->traffic().store.up(TrafficKind::kState);
  step(0);  // only norm and bias, 1077 elements, are updated
  const uint64_t read = updater->traffic().store.up(TrafficKind::kState) - read_before;
  if (updater->subgroup_elements() == kBlock) {
    EXPECT_LE(read, 3 * 12 * kBlock);
  }
  const auto between = all_planes(*updater);
  step(1);
  const auto after = all_planes(*updater);
  for (const plan::ParameterRange& range : space.ranges()) {
    for (uint64_t i = range.first; i < range.first + range.count; ++i) {
      for (size_t p = 0; p < before.size(); ++p) {
        const auto& same = range.group == 0 ? before : after;
        ASSERT_EQ(between[p][i], same[p][i]) << range.name << " element " << i << " plane " << p;
      }
      // The moment tells who was updated; a gradient of exactly 0 is rare enough not to be asked.
      if (base::to_f32(gradient[i]) != 0) {
        ASSERT_NE(after[1][i], 0.0f) << range.name << " element " << i;
      }
    }
  }
}

TEST_P(UpdaterContract, EditedStateIsKept) {
  auto updater = open_fresh();
  const auto edit = [&](uint64_t first,
                        std::span<const std::span<float>> planes) -> base::Result<bool> {
    if (first == 0) return false;
    for (size_t p = 0; p < planes.size(); ++p) {
      for (size_t i = 0; i < planes[p].size(); ++i) {
        planes[p][i] += static_cast<float>(p + 1) + static_cast<float>(first + i);
      }
    }
    return true;
  };
  if (!GetParam().on_devices) {
    EXPECT_EQ(updater->edit_state(edit, "edited").code(), base::ErrorCode::kUnsupported);
    return;
  }
  expect_ok(updater->edit_state(edit, "edited"));
  EXPECT_EQ(updater->committed_step(), 1u);
  close(std::move(updater));

  updater = open();
  EXPECT_EQ(updater->client_metadata(), "edited");
  const auto planes = all_planes(*updater);
  const uint64_t count = updater->space().count();
  const uint64_t edited_from = std::min(updater->subgroup_elements(), count);
  for (uint64_t i = 0; i < count; ++i) {
    const float start = 0.1f * std::sin(static_cast<float>(i));
    for (size_t p = 0; p < planes.size(); ++p) {
      const float old = p == 0 ? start : 0.0f;
      const float wanted =
          i < edited_from ? old : old + (static_cast<float>(p + 1) + static_cast<float>(i));
      ASSERT_EQ(planes[p][i], wanted) << "element " << i << " plane " << p;
    }
  }
  // A failing edit changes nothing.
  if (GetParam().in_place || edited_from == count) return;
  const auto fail = [&](uint64_t first,
                        std::span<const std::span<float>> pieces) -> base::Result<bool> {
    if (first > 0) return base::Status(base::ErrorCode::kCancelled, "enough");
    pieces[0][0] = 42;
    return true;
  };
  EXPECT_EQ(updater->edit_state(fail, "never").code(), base::ErrorCode::kCancelled);
  EXPECT_EQ(updater->client_metadata(), "edited");
  EXPECT_EQ(all_planes(*updater), planes);
}

}  // namespace smartinf::engine
