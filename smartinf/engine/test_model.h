// Code that the tests of updaters share: a parameter space, its gradients, kinds of updaters, and
// what a run of some steps comes to.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/test_scratch.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/fake_source.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {

using base::DataType;
using base::Scratch;
using base::StateFormat;
using base::TrafficKind;

constexpr uint64_t kBlock = base::kBlockElements;

inline plan::ParameterSpace contract_space() {
  plan::ParameterSpace space;
  EXPECT_TRUE(space.add("embed", {kBlock, 3}, 0).ok());
  EXPECT_TRUE(space.add("norm", {1000}, 1).ok());
  EXPECT_TRUE(space.add("ffn", {1300, 1024}, 0).ok());  // longer than one cut of a gradient
  EXPECT_TRUE(space.add("bias", {77}, 1).ok());
  return space;
}

/// Matrices of a space of one range.
inline std::vector<compress::MatrixLayout> flat_matrices(uint64_t elements) {
  plan::ParameterSpace space;
  EXPECT_TRUE(space.add("flat", {elements}, 0).ok());
  return compress::matrix_layouts(space);
}

/// Everything that must not depend on how the update was carried out.
struct Outcome {
  std::vector<double> norms;
  std::vector<uint64_t> weights;  // checksum of what came up, for each step
  uint64_t state = 0;             // checksum of all planes at the end
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

template <typename T>
inline uint64_t digest(const std::vector<T>& values, uint64_t seed = 0) {
  return base::checksum(std::as_bytes(std::span(values)), seed);
}

constexpr int kSteps = 3;

inline std::vector<base::Bf16> contract_gradient(uint64_t count, int step) {
  std::mt19937 random(static_cast<uint32_t>(step));
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<base::Bf16> values(count);
  for (base::Bf16& value : values) value = base::to_bf16(normal(random));
  return values;
}

inline void expect_ok(const base::Status& status) {
  ASSERT_TRUE(status.ok()) << status.to_string();
}

/// Range by range; those of one group may be skipped.
inline void put_gradients(Updater& updater, const std::vector<base::Bf16>& gradient,
                          std::optional<uint32_t> skipped_group) {
  for (const plan::ParameterRange& range : updater.space().ranges()) {
    if (range.group == skipped_group) {
      expect_ok(updater.skip_gradient(range.first, range.count));
    } else {
      expect_ok(updater.put_gradient(range.first, gradient.data() + range.first, DataType::kBf16,
                                     range.count));
    }
  }
}

inline uint64_t loaded_weights(Updater& updater) {
  std::vector<base::Bf16> loaded(updater.space().count());
  expect_ok(
      updater.load_weights(DataType::kBf16, [&](uint64_t first) { return loaded.data() + first; }));
  return digest(loaded);
}

/// The options of an early update, of a step whose own are given.
struct Guess {
  UpdateOptions options;
  double norm_max = 0;
};
using Guesses = std::function<Guess(int step, const UpdateOptions& right)>;

/// guesses: each step begins with an early update; norms: those of the steps, from the first on.
inline void run_steps(Updater& updater, int first_step, int last_step, Outcome& outcome,
                      const Guesses& guesses = nullptr, const std::vector<double>& norms = {}) {
  const plan::ParameterSpace& space = updater.space();
  std::vector<base::Bf16> weights(space.count());
  for (int step = first_step; step <= last_step; ++step) {
    const auto gradient = contract_gradient(space.count(), step);
    const auto options_for = [](double norm) {
      UpdateOptions options;
      options.gradient_scale = 0.25 * std::min(1.0, 1.0 / norm);
      options.groups = {{.lr = 0.01, .weight_decay = 0.1}, {.lr = 0.02, .weight_decay = 0}};
      return options;
    };
    const WeightsSink sink = [&](uint64_t first) { return weights.data() + first; };
    expect_ok(updater.begin_step());
    if (guesses) {
      const Guess guess = guesses(step, options_for(norms[static_cast<size_t>(step) - 1]));
      expect_ok(updater.start_early_update(guess.options, DataType::kBf16, sink, guess.norm_max));
    }
    // Backward: the last range comes first.
    for (auto range = space.ranges().rbegin(); range != space.ranges().rend(); ++range) {
      expect_ok(updater.put_gradient(range->first, gradient.data() + range->first, DataType::kBf16,
                                     range->count));
    }
    const auto summary = updater.finish_gradients(0.25);
    expect_ok(summary.status());
    outcome.norms.push_back(summary->norm);
    expect_ok(updater.start_update(options_for(summary->norm), DataType::kBf16, sink));
    expect_ok(updater.start_commit(fmt::format("after step {}", step)));
    expect_ok(updater.wait_weights(0, space.count()));
    outcome.weights.push_back(digest(weights));
  }
  expect_ok(updater.wait_commit());
  ASSERT_EQ(updater.committed_step(), static_cast<uint64_t>(last_step));
  uint64_t state = 0;
  std::vector<std::vector<float>> planes;
  expect_ok(updater.read_state(~0u, [&](uint64_t, std::span<const std::span<const float>> pieces) {
    planes.resize(pieces.size());
    for (size_t p = 0; p < pieces.size(); ++p) {
      planes[p].insert(planes[p].end(), pieces[p].begin(), pieces[p].end());
    }
    return base::Status();
  }));
  for (const auto& plane : planes) {
    ASSERT_EQ(plane.size(), space.count());
    state = digest(plane, state);
  }
  outcome.state = state;
  EXPECT_EQ(loaded_weights(updater), outcome.weights.back());
}

inline void initialize(Updater& updater) {
  ASSERT_TRUE(updater.fresh());
  expect_ok(updater.initialize(
      [](uint64_t first, std::span<float> out) {
        for (size_t i = 0; i < out.size(); ++i) {
          out[i] = 0.1f * std::sin(static_cast<float>(first + i));
        }
        return base::Status();
      },
      "start"));
}

/// The outcome that all must agree with: f32 planes in plain memory, one subgroup after another.
inline const Outcome& reference(DataType gradient_type) {
  const auto compute = [](DataType type) {
    UpdaterOptions options;
    options.gradient_type = type;
    std::vector<std::unique_ptr<DeviceSource>> sources;
    sources.push_back(std::make_unique<FakeSource>(std::make_shared<FakeDrive>(), "reference"));
    auto updater = Updater::open(options, contract_space(), std::move(sources));
    Outcome outcome;
    if (!updater.ok()) return outcome;
    initialize(**updater);
    run_steps(**updater, 1, kSteps, outcome);
    return outcome;
  };
  static const Outcome bf16 = compute(DataType::kBf16);
  static const Outcome f32 = compute(DataType::kF32);
  return gradient_type == DataType::kBf16 ? bf16 : f32;
}

/// Where the state of one test lies.
class StatePlace {
 public:
  virtual ~StatePlace() = default;
  /// Opens it, or makes it when there is none. One updater at a time.
  virtual base::Result<std::unique_ptr<Updater>> open() = 0;
};

struct UpdaterKind {
  std::string name;
  std::function<std::unique_ptr<StatePlace>()> make_place;
  /// The outcome of run_steps(), by arithmetic of the kind's own.
  std::function<const Outcome&()> reference;
  bool on_devices = true;  // else it can neither skip gradients nor edit the state
  bool in_place = false;   // an update cannot be aborted once it has begun
};

inline std::ostream& operator<<(std::ostream& out, const UpdaterKind& kind) {
  return out << kind.name;
}

struct Variant {
  std::string name;
  size_t devices = 1;
  uint64_t subgroup_elements = 4 * kBlock;
  UpdateWhere where = UpdateWhere::kDevice;
  plan::ScheduleVariant schedule = plan::ScheduleVariant::kOverlapped;
  storage::RingKind ring = storage::RingKind::kAuto;
  DataType gradient_type = DataType::kBf16;
  uint64_t gradient_budget_bytes = ~uint64_t{0};
  storage::Durability durability = storage::Durability::kStep;
  bool checksums = true;
  uint64_t memory_budget_bytes = 64 * base::kMiB;
  bool in_memory = false;     // emulated drives; else directories
  bool behind_links = false;  // of each drive, and one to the host
  bool unequal = false;       // each device as much faster than the one before
  uint64_t state_cache_bytes = 0;
};

/// Bytes of about half of the state of contract_space().
inline constexpr uint64_t kHalfOfState = 9 * base::kMiB;

inline std::ostream& operator<<(std::ostream& out, const Variant& variant) {
  return out << variant.name;
}

inline UpdaterOptions options_of(const Variant& variant, const Scratch& scratch) {
  UpdaterOptions options;
  for (size_t d = 0; d < variant.devices; ++d) {
    DeviceOptions device;
    device.path = scratch / fmt::format("device{}", d);
    device.bandwidth = variant.unequal ? static_cast<double>(d + 1) : 1;
    device.threads = 2;
    if (variant.behind_links) device.internal_link = {800'000'000, 600'000'000, d % 2 == 1, 20};
    options.devices.push_back(device);
  }
  if (variant.behind_links) options.host_link = {1'000'000'000, 1'000'000'000, true, 20};
  options.io_bytes = base::kMiB;
  options.io_depth = 4;
  options.subgroup_elements = variant.subgroup_elements;
  options.where = variant.where;
  options.schedule = variant.schedule;
  options.ring = variant.ring;
  options.gradient_type = variant.gradient_type;
  options.gradient_budget_bytes = variant.gradient_budget_bytes;
  options.durability = variant.durability;
  options.checksums = variant.checksums;
  options.memory_budget_bytes = variant.memory_budget_bytes;
  options.state_cache_bytes = variant.state_cache_bytes;
  return options;
}

/// Every plane of the state, end to end.
inline std::vector<std::vector<float>> all_planes(Updater& updater) {
  std::vector<std::vector<float>> planes;
  expect_ok(updater.read_state(~0u, [&](uint64_t, std::span<const std::span<const float>> pieces) {
    planes.resize(pieces.size());
    for (size_t p = 0; p < pieces.size(); ++p) {
      planes[p].insert(planes[p].end(), pieces[p].begin(), pieces[p].end());
    }
    return base::Status();
  }));
  return planes;
}

inline UpdaterOptions compressed_options(const Scratch& scratch, size_t devices = 1,
                                         uint64_t subgroup_blocks = 4) {
  Variant variant;
  variant.devices = devices;
  variant.subgroup_elements = subgroup_blocks * kBlock;
  UpdaterOptions options = options_of(variant, scratch);
  options.compress.density = 0.08;
  options.compress.residual_every = 1;
  return options;
}

inline Outcome compressed_run(const UpdaterOptions& options) {
  Outcome outcome;
  auto updater = Updater::open(options, contract_space());
  EXPECT_TRUE(updater.ok()) << updater.status().to_string();
  if (!updater.ok()) return outcome;
  initialize(**updater);
  run_steps(**updater, 1, kSteps, outcome);
  return outcome;
}

}  // namespace smartinf::engine
