// Compressed gradients: whatever carries them, the same bits; the residual is state.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/compress/matrix_layout.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {
namespace {

TEST(Compression, SendingEverythingIsTheSameAsNotCompressing) {
  Scratch scratch;
  UpdaterOptions options = compressed_options(scratch, 2);
  options.compress.density = 1;
  options.compress.values = compress::ValueEncoding::kF32;
  options.compress.error_feedback = false;
  EXPECT_EQ(compressed_run(options), reference(DataType::kBf16));
}

TEST(Compression, GivesTheSameBitsHoweverTheStateIsLaidOut) {
  using compress::ValueEncoding;
  for (const auto& [density, feedback, values] :
       {std::tuple{0.01, true, compress::ValueEncoding::kBf16},
        {0.01, false, compress::ValueEncoding::kBf16},
        {0.08, true, compress::ValueEncoding::kSign},
        {1.0, true, compress::ValueEncoding::kSign}}) {
    std::optional<Outcome> first;
    for (const auto& [devices, blocks] : {std::pair{1, 4}, {3, 1}}) {
      Scratch scratch;
      UpdaterOptions options =
          compressed_options(scratch, static_cast<size_t>(devices), static_cast<uint64_t>(blocks));
      options.compress.error_feedback = feedback;
      options.compress.density = density;
      options.compress.values = values;
      options.compress.warmup_steps = 2;
      const Outcome outcome = compressed_run(options);
      if (!first) first = outcome;
      EXPECT_EQ(outcome, *first) << devices << " devices";
    }
    EXPECT_NE(*first, reference(DataType::kBf16));
  }
}

TEST(Compression, TheDensityIsTheShareThatIsSent) {
  EXPECT_EQ(compress::values_per_block(0.01, kBlock), 655u);
  EXPECT_EQ(compress::values_per_block(0.08, kBlock), 5243u);
  EXPECT_EQ(compress::values_per_block(0.08, 1000), 80u);
  EXPECT_EQ(compress::values_per_block(1e-7, kBlock), 1u);
  EXPECT_EQ(compress::values_per_block(1, kBlock), kBlock);
}

TEST(Compression, TheDensityFallsDuringTheWarmUp) {
  compress::CompressOptions options;
  options.density = 0.01;
  EXPECT_EQ(compress::density_of_step(options, 1), 0.01);
  EXPECT_EQ(compress::density_max(options), 0.01);
  options.warmup_steps = 10;
  EXPECT_EQ(compress::density_of_step(options, 1), compress::kWarmupDensity);
  EXPECT_NEAR(compress::density_of_step(options, 6), std::sqrt(0.01 * compress::kWarmupDensity),
              1e-12);
  EXPECT_EQ(compress::density_of_step(options, 11), 0.01);
  EXPECT_EQ(compress::density_max(options), compress::kWarmupDensity);
  options.density = 0.5;  // more than a warm-up begins with
  EXPECT_EQ(compress::density_of_step(options, 1), 0.5);
  EXPECT_EQ(compress::density_max(options), 0.5);
}

TEST(Compression, SaysWhatIsSentAndWhatBecomesOfTheRest) {
  compress::CompressOptions options;
  options.density = 0.08;
  EXPECT_EQ(
      compress::describe_compression(options),
      "the largest 8 % of the elements as signs; the rest (the residual) stays in host memory "
      "and is sent later; the devices write it every 16 steps (residual_every)");
  options.residual_every = 1;
  EXPECT_THAT(compress::describe_compression(options), ::testing::HasSubstr("residual_every = 16"));
  options.density = 0.01;
  options.warmup_steps = 50;
  options.residual_every = 0;
  options.values = compress::ValueEncoding::kF16;
  EXPECT_EQ(compress::describe_compression(options),
            "the largest 1 % of the elements after 50 steps in f16; the rest (the residual) "
            "stays in host memory and is sent later; it is lost when the run stops (residual_every "
            "= 0)");
  options.error_feedback = false;
  EXPECT_THAT(compress::describe_compression(options),
              ::testing::EndsWith("(error_feedback = false)"));
}

TEST(Compression, AStepAbortedKeepsWhatWasKept) {
  Scratch scratch;
  const Outcome expected = compressed_run(compressed_options(scratch));
  Scratch other_scratch;
  auto updater = Updater::open(compressed_options(other_scratch), contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  Outcome outcome;
  run_steps(**updater, 1, 1, outcome);
  const auto other = contract_gradient(contract_space().count(), 99);
  // A skipped step ends before its update; one that fails ends after it.
  for (const bool updated : {false, true}) {
    expect_ok((*updater)->begin_step());
    expect_ok((*updater)->put_gradient(0, other.data(), DataType::kBf16, other.size()));
    expect_ok((*updater)->finish_gradients(1).status());
    UpdateOptions update;
    update.groups.resize(2);
    if (updated) expect_ok((*updater)->start_update(update, DataType::kBf16, nullptr));
    expect_ok((*updater)->abort());
  }
  run_steps(**updater, 2, kSteps, outcome);
  EXPECT_EQ(outcome, expected);
}

TEST(Compression, WhatIsKeptIsPartOfTheState) {
  for (const compress::ValueEncoding values :
       {compress::ValueEncoding::kBf16, compress::ValueEncoding::kSign}) {
    Scratch scratch;
    UpdaterOptions options = compressed_options(scratch);
    options.compress.values = values;
    const Outcome expected = compressed_run(options);
    // Opened again after step 2, having kept it: in every step; in every second; in every third,
    // but asked to; in every third, and so not.
    struct Case {
      uint64_t every;
      bool asked;
      bool exact;
    };
    for (const Case& one :
         {Case{1, false, true}, {2, false, true}, {3, true, true}, {3, false, false}}) {
      Scratch own;
      options = compressed_options(own, 2);
      options.compress.values = values;
      options.compress.residual_every = one.every;
      Outcome outcome;
      {
        auto updater = Updater::open(options, contract_space());
        ASSERT_TRUE(updater.ok()) << updater.status().to_string();
        initialize(**updater);
        run_steps(**updater, 1, 1, outcome);
        if (one.asked) (*updater)->compression()->write_residual();
        run_steps(**updater, 2, 2, outcome);
        EXPECT_EQ((*updater)->client_metadata(), "after step 2");
      }
      auto updater = Updater::open(options, contract_space());
      ASSERT_TRUE(updater.ok()) << updater.status().to_string();
      EXPECT_EQ((*updater)->client_metadata(), "after step 2");
      EXPECT_EQ(loaded_weights(**updater) == outcome.weights.back(), one.exact);
      run_steps(**updater, 3, kSteps, outcome);
      EXPECT_EQ(outcome == expected, one.exact) << "every " << one.every << " steps";
    }
  }
}

TEST(Compression, WeightsComeUpAsIfWhatIsKeptHadArrived) {
  const plan::ParameterSpace space = contract_space();
  for (const base::StateFormat format :
       {base::StateFormat::kF32, base::StateFormat::kBf16, base::StateFormat::kQ8}) {
    for (const bool ahead : {true, false}) {
      Scratch scratch;
      UpdaterOptions options = compressed_options(scratch, 2);
      options.format = format;
      options.compress.error_feedback = ahead;
      auto updater = Updater::open(options, space);
      ASSERT_TRUE(updater.ok()) << updater.status().to_string();
      initialize(**updater);
      Outcome outcome;
      run_steps(**updater, 1, 2, outcome);  // what came up is what is loaded
      std::vector<float> master, variances, weights;
      expect_ok(
          (*updater)->read_state(5, [&](uint64_t, std::span<const std::span<const float>> planes) {
            master.insert(master.end(), planes[0].begin(), planes[0].end());
            variances.insert(variances.end(), planes[2].begin(), planes[2].end());
            return base::Status();
          }));
      expect_ok((*updater)->read_weights([&](uint64_t first, std::span<const float> some) {
        EXPECT_EQ(first, weights.size());
        weights.insert(weights.end(), some.begin(), some.end());
        return base::Status();
      }));
      if (!ahead) {
        EXPECT_EQ(weights, master);
        continue;
      }
      const base::Bf16* residual = (*updater)->compression()->state().residual;
      const double bias = 1 - std::pow(options.rule.beta2, 2);
      double farthest = 0;
      for (const compress::MatrixLayout& matrix : compress::matrix_layouts(space)) {
        const double lr = space.ranges()[matrix.range].group == 0 ? 0.01 : 0.02;
        const compress::MatrixSamples samples{matrix};
        const auto variance = [&](uint64_t row, uint64_t column) {
          return base::to_f32(
              base::to_bf16(variances[matrix.first + row * matrix.columns + column]));
        };
        double both = 0;
        std::vector<double> of_columns(matrix.columns);
        for (uint64_t s = 0; s < samples.sampled_rows(); ++s) {
          for (uint64_t c = 0; c < matrix.columns; ++c)
            of_columns[c] += variance(samples.row(s), c);
        }
        for (uint64_t s = 0; s < samples.sampled_columns(); ++s) {
          both += of_columns[samples.column(s)];
        }
        for (uint64_t row = 0; row < matrix.rows; ++row) {
          double of_row = 0;
          for (uint64_t s = 0; s < samples.sampled_columns(); ++s) {
            of_row += variance(row, samples.column(s));
          }
          for (uint64_t column = 0; column < matrix.columns; ++column) {
            const uint64_t i = matrix.first + row * matrix.columns + column;
            const double v = of_row * of_columns[column] / both;
            const double steps = std::clamp<double>(
                base::to_f32(residual[i]) / (std::sqrt(v / bias) + options.rule.eps),
                -kernels::kStepAheadMost, kernels::kStepAheadMost);
            ASSERT_NEAR(weights[i], master[i] - lr * steps, 1e-5 * lr + 2e-7) << i;
            farthest = std::max(farthest, std::abs(steps));
          }
        }
      }
      EXPECT_GT(farthest, 1);
    }
  }
}

TEST(Compression, WeightsOfAGroupThatIsSkippedStayWhereTheyAre) {
  const plan::ParameterSpace space = contract_space();
  Scratch scratch;
  const UpdaterOptions options = compressed_options(scratch, 2, 1);
  auto updater = Updater::open(options, space);
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  std::vector<float> weights(space.count());
  std::vector<float> before;
  for (int step = 1; step <= 2; ++step) {
    const auto gradient = contract_gradient(space.count(), step);
    expect_ok((*updater)->begin_step());
    put_gradients(**updater, gradient, step == 2 ? std::optional(1u) : std::nullopt);
    expect_ok((*updater)->finish_gradients(1).status());
    UpdateOptions update;
    // The rate of a group that is skipped is not looked at.
    update.groups = {{.lr = 0.01}, {.lr = step == 1 ? 0.02 : 0.5, .skip = step == 2}};
    before = weights;
    expect_ok((*updater)->start_update(update, DataType::kF32,
                                       [&](uint64_t first) { return weights.data() + first; }));
    expect_ok((*updater)->wait_weights(0, space.count()));
    expect_ok((*updater)->commit("after step"));
  }
  for (const plan::ParameterRange& range : space.ranges()) {
    const auto from = static_cast<ptrdiff_t>(range.first);
    EXPECT_EQ(std::equal(weights.begin() + from,
                         weights.begin() + from + static_cast<ptrdiff_t>(range.count),
                         before.begin() + from),
              range.group == 1)
        << range.name;
  }
  updater->reset();
  updater = Updater::open(options, space);
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  std::vector<float> loaded(space.count());
  expect_ok((*updater)->load_weights(DataType::kF32,
                                     [&](uint64_t first) { return loaded.data() + first; }));
  EXPECT_EQ(loaded, weights);
}

TEST(Compression, WhatIsKeptSurvivesAnEditOfTheState) {
  std::optional<Outcome> first;
  for (const bool reopened : {false, true}) {
    Scratch scratch;
    const UpdaterOptions options = compressed_options(scratch, 2);
    auto updater = Updater::open(options, contract_space());
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    initialize(**updater);
    Outcome outcome;
    run_steps(**updater, 1, 1, outcome);
    const auto edit = [](uint64_t, std::span<const std::span<float>> planes) -> base::Result<bool> {
      planes[0][0] = 1;
      return true;
    };
    expect_ok((*updater)->edit_state(edit, "edited"));
    if (reopened) {
      updater->reset();
      updater = Updater::open(options, contract_space());
      ASSERT_TRUE(updater.ok()) << updater.status().to_string();
      EXPECT_EQ((*updater)->client_metadata(), "edited");
    }
    run_steps(**updater, 3, 3, outcome);
    if (!first) first = outcome;
    EXPECT_EQ(outcome, *first);
  }
}

TEST(Compression, WhatIsKeptCanBeReplaced) {
  Scratch scratch;
  const Outcome expected = compressed_run(compressed_options(scratch));
  // Copied by hand, planes and residual, onto other devices, whose steps count from 1 again.
  Scratch from;
  auto first = Updater::open(compressed_options(from), contract_space());
  ASSERT_TRUE(first.ok()) << first.status().to_string();
  initialize(**first);
  Outcome outcome;
  run_steps(**first, 1, 2, outcome);
  std::array<std::vector<float>, 3> state;
  expect_ok((*first)->read_state(7, [&](uint64_t, std::span<const std::span<const float>> planes) {
    for (size_t p = 0; p < state.size(); ++p) {
      state[p].insert(state[p].end(), planes[p].begin(), planes[p].end());
    }
    return base::Status();
  }));
  const base::Bf16* first_residual = (*first)->compression()->state().residual;
  ASSERT_NE(first_residual, nullptr);
  const std::vector<base::Bf16> residual(first_residual, first_residual + contract_space().count());

  const auto copy = [&](uint64_t at, std::span<const std::span<float>> planes) {
    for (size_t p = 0; p < state.size(); ++p) {
      std::copy_n(state[p].begin() + static_cast<ptrdiff_t>(at), planes[p].size(),
                  planes[p].begin());
    }
    return base::Result<bool>(true);
  };
  for (const uint64_t every : {uint64_t{0}, uint64_t{1}}) {
    for (const bool reopened : {false, true}) {
      if (every == 0 && reopened) continue;  // nothing is kept
      Scratch own;
      UpdaterOptions options = compressed_options(own, 2, 1);
      options.compress.residual_every = every;
      auto updater = Updater::open(options, contract_space());
      ASSERT_TRUE(updater.ok()) << updater.status().to_string();
      initialize(**updater);
      expect_ok((*updater)->edit_state(copy, "copied", {residual.data(), {}}));
      // Steps 1 and 2 of these devices; nothing changes but the number.
      expect_ok((*updater)->edit_state(nullptr, "again"));
      if (reopened) {
        updater->reset();
        updater = Updater::open(options, contract_space());
        ASSERT_TRUE(updater.ok()) << updater.status().to_string();
      }
      Outcome rest = outcome;
      run_steps(**updater, 3, kSteps, rest);
      EXPECT_EQ(rest, expected) << "every " << every;
    }
  }
}

TEST(Compression, GoesOnAfterReshardingAsIfNothingHadHappened) {
  Scratch scratch;
  const Outcome expected = compressed_run(compressed_options(scratch));
  Scratch from;
  Outcome outcome;
  {
    auto updater = Updater::open(compressed_options(from, 2), contract_space());
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    initialize(**updater);
    run_steps(**updater, 1, 2, outcome);
  }
  Scratch to;
  UpdaterOptions options = compressed_options(to, 3, 1);
  std::vector<std::string> targets;
  for (const DeviceOptions& device : options.devices) targets.push_back(device.path);
  {
    auto run = open_stored_run(sources_at({from / "device0", from / "device1"}),
                               storage::ReaderLock::kTake);
    ASSERT_TRUE(run.ok()) << run.status().to_string();
    ReshardOptions reshard_options;
    reshard_options.subgroup_elements = kBlock;
    const auto done = reshard(*run, sources_at(targets), reshard_options);
    ASSERT_TRUE(done.ok()) << done.status().to_string();
  }
  auto updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  run_steps(**updater, 3, kSteps, outcome);
  EXPECT_EQ(outcome, expected);
}

TEST(Compression, CountedBytesAreTwoPercentAndLess) {
  struct Case {
    compress::ValueEncoding values;
    bool kept;
    double share;  // sent
    double bytes;  // a parameter, at most
  };
  using compress::ValueEncoding;
  for (const Case& one : {Case{compress::ValueEncoding::kBf16, false, 0.01, 0.04},
                          {compress::ValueEncoding::kBf16, true, 0.01, 0.04},
                          {compress::ValueEncoding::kSign, true, 0.08, 0.07}}) {
    Scratch scratch;
    // Large subgroups: every message has factors of the columns that it holds.
    UpdaterOptions options = compressed_options(scratch, 2, 12);
    options.compress.density = one.share;
    options.compress.values = one.values;
    if (!one.kept) options.compress.residual_every = 0;
    auto updater = Updater::open(options, contract_space());
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    initialize(**updater);
    const UpdaterTraffic before = (*updater)->traffic();
    Outcome outcome;
    run_steps(**updater, 1, 1, outcome);
    const auto count = static_cast<double>(contract_space().count());
    const base::TrafficReading host = (*updater)->traffic().host_link.since(before.host_link);
    const compress::CompressionSummary summary = (*updater)->compression()->summary();
    EXPECT_EQ(host.down(TrafficKind::kGradient), summary.bytes);
    EXPECT_LE(static_cast<double>(summary.bytes), one.bytes * count);
    EXPECT_NEAR(static_cast<double>(summary.values), one.share * count, 30);
    EXPECT_GT(summary.residual_norm, 0);
    EXPECT_EQ(host.down(TrafficKind::kState), one.kept ? 2 * contract_space().count() : 0);
    // The dense form would be 2 bytes a parameter, on the device too. Samples of these small
    // matrices' variances take 0.07.
    EXPECT_LT(static_cast<double>((*updater)->gradient_memory_bytes()), 4.2 * count);
  }
}

TEST(Compression, RefusesWhatCannotWork) {
  Scratch scratch;
  const auto code = [&](auto change) {
    UpdaterOptions options = compressed_options(scratch);
    change(options);
    const auto updater = Updater::open(options, contract_space());
    return updater.ok() ? base::ErrorCode::kOk : updater.status().code();
  };
  using base::ErrorCode;
  EXPECT_EQ(code([](auto& o) { o.where = UpdateWhere::kHost; }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.compress.density = -0.1; }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.compress.density = 1.5; }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.gradient_budget_bytes = 1000; }), ErrorCode::kOutOfMemory);
  // A run that was begun without compression has no room for a residual.
  UpdaterOptions plain = compressed_options(scratch);
  plain.compress = {};
  compressed_run(plain);
  EXPECT_EQ(code([](auto&) {}), ErrorCode::kMismatch);
  EXPECT_EQ(code([](auto& o) { o.compress.residual_every = 0; }), ErrorCode::kOk);
}

}  // namespace
}  // namespace smartinf::engine
