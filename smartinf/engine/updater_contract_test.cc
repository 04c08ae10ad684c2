// One suite for every kind of updater over real devices: whatever the devices, their number, the
// cut into subgroups, the schedule, the ring, the place of the update or of the gradients, the same
// gradients give the same bits.
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/gradient_compressor.h"
#include "smartinf/csd/fault_ring.h"
#include "smartinf/engine/compressed_sender.h"
#include "smartinf/engine/device_build.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/fake_source.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/engine/updater.h"
#include "smartinf/kernels/feedback.h"

namespace smartinf::engine {
namespace {

using base::DataType;
using base::StateFormat;
using base::TrafficKind;

constexpr uint64_t kBlock = base::kBlockElements;

plan::ParameterSpace contract_space() {
  plan::ParameterSpace space;
  EXPECT_TRUE(space.add("embed", {kBlock, 3}, 0).ok());
  EXPECT_TRUE(space.add("norm", {1000}, 1).ok());
  EXPECT_TRUE(space.add("ffn", {1300, 1024}, 0).ok());  // longer than one cut of a gradient
  EXPECT_TRUE(space.add("bias", {77}, 1).ok());
  return space;
}

/// Of one range.
std::vector<compress::MatrixLayout> flat_matrices(uint64_t elements) {
  plan::ParameterSpace space;
  EXPECT_TRUE(space.add("flat", {elements}, 0).ok());
  return compress::matrix_layouts(space);
}

/// A directory that goes away with the test.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "smartinf-XXXXXX").string();
    SI_CHECK(mkdtemp(pattern.data()) != nullptr, "no temporary directory");
    path_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

/// Everything that must not depend on how the update was carried out.
struct Outcome {
  std::vector<double> norms;
  std::vector<uint64_t> weights;  // checksum of what came up, for each step
  uint64_t state = 0;             // checksum of all planes at the end
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

template <typename T>
uint64_t digest(const std::vector<T>& values, uint64_t seed = 0) {
  return base::checksum(std::as_bytes(std::span(values)), seed);
}

constexpr int kSteps = 3;

std::vector<base::Bf16> contract_gradient(uint64_t count, int step) {
  std::mt19937 random(static_cast<uint32_t>(step));
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<base::Bf16> values(count);
  for (base::Bf16& value : values) value = base::to_bf16(normal(random));
  return values;
}

void expect_ok(const base::Status& status) { ASSERT_TRUE(status.ok()) << status.to_string(); }

/// Range by range; those of one group may be skipped.
void put_gradients(Updater& updater, const std::vector<base::Bf16>& gradient,
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

uint64_t loaded_weights(Updater& updater) {
  std::vector<base::Bf16> loaded(updater.space().count());
  expect_ok(
      updater.load_weights(DataType::kBf16, [&](uint64_t first) { return loaded.data() + first; }));
  return digest(loaded);
}

void run_steps(Updater& updater, int first_step, int last_step, Outcome& outcome) {
  const plan::ParameterSpace& space = updater.space();
  std::vector<base::Bf16> weights(space.count());
  for (int step = first_step; step <= last_step; ++step) {
    const auto gradient = contract_gradient(space.count(), step);
    expect_ok(updater.begin_step());
    // Backward: the last range comes first.
    for (auto range = space.ranges().rbegin(); range != space.ranges().rend(); ++range) {
      expect_ok(updater.put_gradient(range->first, gradient.data() + range->first, DataType::kBf16,
                                     range->count));
    }
    const auto summary = updater.finish_gradients(0.25);
    expect_ok(summary.status());
    outcome.norms.push_back(summary->norm);
    UpdateOptions options;
    options.gradient_scale = 0.25 * std::min(1.0, 1.0 / summary->norm);
    options.groups = {{.lr = 0.01, .weight_decay = 0.1}, {.lr = 0.02, .weight_decay = 0}};
    expect_ok(updater.start_update(options, DataType::kBf16,
                                   [&](uint64_t first) { return weights.data() + first; }));
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

void initialize(Updater& updater) {
  ASSERT_TRUE(updater.fresh());
  expect_ok(updater.initialize(
      [](uint64_t first, std::span<float> out) {
        for (size_t i = 0; i < out.size(); ++i) {
          out[i] = 0.1f * std::sin(static_cast<float>(first + i));
        }
      },
      "start"));
}

/// What all must agree with: f32 planes in plain memory, one subgroup after another.
const Outcome& reference(DataType gradient_type) {
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

std::ostream& operator<<(std::ostream& out, const Variant& variant) { return out << variant.name; }

UpdaterOptions options_of(const Variant& variant, const Scratch& scratch) {
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

class UpdaterContract : public ::testing::TestWithParam<Variant> {
 protected:
  base::Result<std::unique_ptr<Updater>> open() {
    if (!GetParam().in_memory) return Updater::open(options_, contract_space());
    while (drives_.size() < options_.devices.size()) {
      SI_ASSIGN_OR_RETURN(auto drive, csd::EmulatedDrive::create(64 * base::kMiB));
      drives_.push_back(std::move(drive));
    }
    return Updater::open(options_, contract_space(), emulated_sources(options_, drives_));
  }

  Scratch scratch_;
  UpdaterOptions options_ = options_of(GetParam(), scratch_);
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives_;
};

TEST_P(UpdaterContract, SameGradientsGiveTheSameBits) {
  Outcome outcome;
  {
    auto updater = open();
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    initialize(**updater);
    run_steps(**updater, 1, 2, outcome);
    EXPECT_LE((*updater)->memory_bytes(), options_.memory_budget_bytes);
    EXPECT_EQ((*updater)->describe_devices().size(), options_.devices.size());
  }
  // The last step after opening again.
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_FALSE((*updater)->fresh());
  EXPECT_EQ((*updater)->committed_step(), 2u);
  EXPECT_EQ((*updater)->client_metadata(), "after step 2");
  run_steps(**updater, 3, kSteps, outcome);
  EXPECT_EQ(outcome.norms, reference(GetParam().gradient_type).norms);
  EXPECT_EQ(outcome.weights, reference(GetParam().gradient_type).weights);
  EXPECT_EQ(outcome.state, reference(GetParam().gradient_type).state);
}

TEST_P(UpdaterContract, AStepAbortedLeavesNoTrace) {
  if (GetParam().durability == storage::Durability::kNone) {
    GTEST_SKIP() << "updates in place cannot be aborted";
  }
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  Outcome outcome;
  run_steps(**updater, 1, 1, outcome);
  const uint64_t count = contract_space().count();
  const auto other = contract_gradient(count, 99);
  for (const bool updated : {false, true}) {
    expect_ok((*updater)->begin_step());
    expect_ok((*updater)->put_gradient(0, other.data(), DataType::kBf16, count));
    if (updated) {
      expect_ok((*updater)->finish_gradients(1).status());
      UpdateOptions update;
      update.groups.resize(2);
      expect_ok((*updater)->start_update(update, DataType::kBf16, nullptr));
    }
    expect_ok((*updater)->abort());
    EXPECT_EQ((*updater)->committed_step(), 1u);
  }
  run_steps(**updater, 2, kSteps, outcome);
  EXPECT_EQ(outcome, reference(GetParam().gradient_type));
}

/// Bytes of a step over the host link and on the drive, exact but for metadata.
TEST_P(UpdaterContract, CountedBytesAreThoseOfTheScheme) {
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  const UpdaterTraffic before = (*updater)->traffic();
  Outcome outcome;
  const uint64_t count = contract_space().count();
  std::vector<base::Bf16> weights(count);
  const auto gradient = contract_gradient(count, 1);
  expect_ok((*updater)->begin_step());
  expect_ok((*updater)->put_gradient(0, gradient.data(), DataType::kBf16, count));
  expect_ok((*updater)->finish_gradients(1).status());
  UpdateOptions update;
  update.groups.resize(2);
  expect_ok((*updater)->start_update(update, DataType::kBf16,
                                     [&](uint64_t first) { return weights.data() + first; }));
  expect_ok((*updater)->commit("one step"));
  const base::TrafficReading host = (*updater)->traffic().host_link.since(before.host_link);
  const base::TrafficReading store = (*updater)->traffic().store.since(before.store);
  const uint64_t gradient_bytes = count * base::data_type_bytes(GetParam().gradient_type);
  const bool spilled = GetParam().gradient_budget_bytes == 0;
  // Planes of a subgroup are padded to pages, so the state is counted with that.
  const uint64_t padding = 3 * 4096 * 2 * (count / kBlock + 1);
  EXPECT_GE(store.up(TrafficKind::kState), 12 * count);
  EXPECT_LE(store.up(TrafficKind::kState), 12 * count + padding);
  if (GetParam().durability == storage::Durability::kStep) {
    EXPECT_EQ(store.down(TrafficKind::kState), store.up(TrafficKind::kState));
  } else {  // what stays in memory is not written
    EXPECT_LE(store.down(TrafficKind::kState), store.up(TrafficKind::kState));
  }
  if (GetParam().where == UpdateWhere::kDevice) {
    EXPECT_EQ(host.down(TrafficKind::kGradient), gradient_bytes);
    EXPECT_EQ(host.up(TrafficKind::kWeight), 2 * count);
    EXPECT_EQ(host.up(TrafficKind::kState), 0u);
    EXPECT_EQ(host.down(TrafficKind::kState), 0u);
  } else {
    EXPECT_EQ(host.up(TrafficKind::kState), store.up(TrafficKind::kState));
    EXPECT_EQ(host.down(TrafficKind::kState), store.down(TrafficKind::kState));
    EXPECT_GE(host.up(TrafficKind::kGradient), spilled ? gradient_bytes : 0);
    EXPECT_LE(host.up(TrafficKind::kGradient), spilled ? gradient_bytes + padding : 0);
    EXPECT_EQ(host.down(TrafficKind::kGradient), host.up(TrafficKind::kGradient));
  }
}

/// Every plane of the state, end to end.
std::vector<std::vector<float>> all_planes(Updater& updater) {
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

// What has a gradient changes as if everything had one; what has none keeps its bits and, where a
// whole subgroup is left alone, is not even read.
TEST_P(UpdaterContract, SkippedRangesStayAsTheyAre) {
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  const plan::ParameterSpace& space = (*updater)->space();
  const auto gradient = contract_gradient(space.count(), 1);
  std::vector<base::Bf16> weights(space.count());
  const auto step = [&](uint32_t skipped_group) {
    expect_ok((*updater)->begin_step());
    put_gradients(**updater, gradient, skipped_group);
    expect_ok((*updater)->finish_gradients(1).status());
    UpdateOptions update;
    update.groups.resize(2);
    const auto sink = [&](uint64_t first) { return weights.data() + first; };
    EXPECT_EQ((*updater)->start_update(update, DataType::kBf16, sink).code(),
              base::ErrorCode::kInvalidArgument);  // no gradient, and not said to be skipped
    update.groups[skipped_group].skip = true;
    expect_ok((*updater)->start_update(update, DataType::kBf16, sink));
    expect_ok((*updater)->wait_weights(0, space.count()));
    expect_ok((*updater)->commit("skipped"));
  };
  const auto before = all_planes(**updater);
  const uint64_t read_before = (*updater)->traffic().store.up(TrafficKind::kState);
  step(0);  // only norm and bias, 1077 elements, are updated
  const uint64_t read = (*updater)->traffic().store.up(TrafficKind::kState) - read_before;
  if (GetParam().subgroup_elements == kBlock) {
    EXPECT_LE(read, 3 * 12 * kBlock);
  }
  const auto between = all_planes(**updater);
  step(1);
  const auto after = all_planes(**updater);
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
  {
    auto updater = open();
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    initialize(**updater);
    expect_ok((*updater)->edit_state(
        [&](uint64_t first, std::span<const std::span<float>> planes) -> base::Result<bool> {
          if (first == 0) return false;
          for (size_t p = 0; p < planes.size(); ++p) {
            for (size_t i = 0; i < planes[p].size(); ++i) {
              planes[p][i] += static_cast<float>(p + 1) + static_cast<float>(first + i);
            }
          }
          return true;
        },
        "edited"));
    EXPECT_EQ((*updater)->committed_step(), 1u);
  }
  auto updater = open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_EQ((*updater)->client_metadata(), "edited");
  const auto planes = all_planes(**updater);
  const uint64_t edited_from = std::min(options_.subgroup_elements, (*updater)->space().count());
  for (uint64_t i = 0; i < (*updater)->space().count(); ++i) {
    const float start = 0.1f * std::sin(static_cast<float>(i));
    for (size_t p = 0; p < planes.size(); ++p) {
      const float old = p == 0 ? start : 0.0f;
      const float wanted =
          i < edited_from ? old : old + (static_cast<float>(p + 1) + static_cast<float>(i));
      ASSERT_EQ(planes[p][i], wanted) << "element " << i << " plane " << p;
    }
  }
  // A failing edit changes nothing.
  if (GetParam().durability == storage::Durability::kNone) return;
  EXPECT_EQ(
      (*updater)
          ->edit_state(
              [&](uint64_t first, std::span<const std::span<float>> pieces) -> base::Result<bool> {
                if (first > 0) return base::Status(base::ErrorCode::kCancelled, "enough");
                pieces[0][0] = 42;
                return true;
              },
              "never")
          .code(),
      edited_from < (*updater)->space().count() ? base::ErrorCode::kCancelled
                                                : base::ErrorCode::kOk);
  if (edited_from < (*updater)->space().count()) {
    EXPECT_EQ((*updater)->client_metadata(), "edited");
    EXPECT_EQ(all_planes(**updater), planes);
  }
}

/// Of contract_space().
constexpr uint64_t kHalfOfState = 9 * base::kMiB;

const Variant kVariants[] = {
    {.name = "OneDevice"},
    {.name = "TwoDevices", .devices = 2},
    {.name = "ThreeDevices", .devices = 3},
    {.name = "SmallestSubgroups", .devices = 2, .subgroup_elements = kBlock},
    {.name = "OneSubgroup", .subgroup_elements = 64 * kBlock, .memory_budget_bytes = base::kGiB},
    {.name = "LeastMemory", .subgroup_elements = kBlock, .memory_budget_bytes = 8 * base::kMiB},
    {.name = "Naive", .devices = 2, .schedule = plan::ScheduleVariant::kNaive},
    {.name = "Early", .devices = 2, .schedule = plan::ScheduleVariant::kEarly},
    {.name = "ThreadRing", .devices = 2, .ring = storage::RingKind::kThreads},
    {.name = "Spilled", .devices = 2, .gradient_budget_bytes = 0},
    {.name = "HalfSpilled", .gradient_budget_bytes = 2 * base::kMiB},
    {.name = "InPlace", .devices = 2, .durability = storage::Durability::kNone},
    {.name = "NoChecksums", .checksums = false},
    {.name = "F32Gradients", .gradient_type = DataType::kF32},
    {.name = "HostUpdate", .devices = 2, .where = UpdateWhere::kHost},
    {.name = "HostUpdateAsInThePaper",
     .devices = 3,
     .where = UpdateWhere::kHost,
     .gradient_type = DataType::kF32,
     .gradient_budget_bytes = 0},
    {.name = "HostUpdateNaive",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .schedule = plan::ScheduleVariant::kNaive},
    {.name = "UnequalDevices", .devices = 3, .subgroup_elements = kBlock, .unequal = true},
    {.name = "InMemory", .devices = 2, .in_memory = true},
    {.name = "InMemoryHostUpdate",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .in_memory = true},
    {.name = "BehindLinks", .devices = 2, .behind_links = true},
    {.name = "InMemoryBehindLinks", .devices = 3, .in_memory = true, .behind_links = true},
    {.name = "HostUpdateBehindLinks",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .behind_links = true},
    {.name = "InMemoryHostUpdateBehindLinks",
     .devices = 3,
     .where = UpdateWhere::kHost,
     .in_memory = true,
     .behind_links = true},
    {.name = "AllCached", .devices = 2, .in_memory = true, .state_cache_bytes = base::kGiB},
    {.name = "UnequalDevicesHalfCached",
     .devices = 3,
     .subgroup_elements = kBlock,
     .in_memory = true,
     .unequal = true,
     .state_cache_bytes = kHalfOfState},
    {.name = "HostUpdateSpilledHalfCached",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .behind_links = true,
     .state_cache_bytes = kHalfOfState},
    {.name = "InPlaceHalfCached",
     .devices = 2,
     .subgroup_elements = kBlock,
     .durability = storage::Durability::kNone,
     .state_cache_bytes = kHalfOfState},
};

INSTANTIATE_TEST_SUITE_P(All, UpdaterContract, ::testing::ValuesIn(kVariants),
                         [](const auto& variant) { return variant.param.name; });

// ---- A drive that fails in the middle of a step, over whole devices.

/// Devices in memory, of which the last one's drive fails on request.
class FailingSource final : public DeviceSource {
 public:
  FailingSource(const UpdaterOptions& options, DeviceBuild build, csd::EmulatedDrive& drive,
                csd::Faults* faults)
      : options_(options), build_(std::move(build)), drive_(drive), faults_(faults) {}
  const std::string& name() const override { return build_.device.name; }
  std::string place() const override { return build_.device.path; }
  base::Result<std::optional<storage::StoreState>> peek() override { return drive_.peek(); }
  base::Result<double> bandwidth() override { return 1.0; }
  base::Result<uint64_t> capacity_bytes() override { return drive_.size_bytes(); }
  base::Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                                    const DeviceShare& share) override {
    return csd::create_emulated_device(device_options(share), layout, drive_);
  }
  base::Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) override {
    return csd::open_emulated_device(device_options(share), drive_);
  }
  base::Status erase() override { return base::Status(); }

 private:
  csd::LocalDeviceOptions device_options(const DeviceShare& share) const {
    csd::LocalDeviceOptions result = build_.options(options_, share);
    if (faults_ == nullptr) return result;
    result.store.wrap_ring = [faults = faults_](std::unique_ptr<storage::Ring> ring) {
      return std::make_unique<csd::FaultRing>(std::move(ring), *faults);
    };
    return result;
  }
  const UpdaterOptions options_;
  const DeviceBuild build_;
  csd::EmulatedDrive& drive_;
  csd::Faults* const faults_;
};

class FailingDrive
    : public ::testing::TestWithParam<std::tuple<UpdateWhere, csd::Faults::What, uint64_t>> {};

TEST_P(FailingDrive, IsNamedAndTheLastCommittedStepStands) {
  const auto [where, what, state_cache_bytes] = GetParam();
  const Scratch scratch;
  const UpdaterOptions options = options_of({.name = "",
                                             .devices = 2,
                                             .subgroup_elements = kBlock,
                                             .where = where,
                                             .state_cache_bytes = state_cache_bytes},
                                            scratch);
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives;
  std::vector<std::unique_ptr<DeviceSource>> sources;
  csd::Faults faults;
  for (DeviceBuild& build : device_builds(options)) {
    auto drive = csd::EmulatedDrive::create(64 * base::kMiB);
    ASSERT_TRUE(drive.ok());
    drives.push_back(std::move(*drive));
    csd::Faults* of_this = drives.size() == 2 ? &faults : nullptr;
    sources.push_back(
        std::make_unique<FailingSource>(options, std::move(build), *drives.back(), of_this));
  }
  auto updater = Updater::open(options, contract_space(), std::move(sources));
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  Outcome outcome;
  run_steps(**updater, 1, 1, outcome);
  const auto committed = all_planes(**updater);

  const uint64_t count = contract_space().count();
  const auto gradient = contract_gradient(count, 99);
  expect_ok((*updater)->begin_step());
  expect_ok((*updater)->put_gradient(0, gradient.data(), DataType::kBf16, count));
  expect_ok((*updater)->finish_gradients(1).status());
  faults.after = 3;  // in the middle
  faults.what = what;
  UpdateOptions update;
  update.groups.resize(2);
  expect_ok((*updater)->start_update(update, DataType::kBf16, nullptr));
  const base::Status failed = (*updater)->commit("never");
  faults.what = csd::Faults::What::kNothing;
  EXPECT_GT(faults.done, 0u);
  EXPECT_EQ(failed.code(), base::ErrorCode::kIo) << failed.to_string();
  EXPECT_THAT(failed.to_string(), ::testing::HasSubstr(options.devices[1].path));
  EXPECT_EQ((*updater)->committed_step(), 1u);
  EXPECT_EQ((*updater)->client_metadata(), "after step 1");
  EXPECT_EQ(all_planes(**updater), committed);
  run_steps(**updater, 2, kSteps, outcome);
  EXPECT_EQ(outcome, reference(DataType::kBf16));
}

INSTANTIATE_TEST_SUITE_P(BothUpdaters, FailingDrive,
                         ::testing::Combine(::testing::Values(UpdateWhere::kDevice,
                                                              UpdateWhere::kHost),
                                            ::testing::Values(csd::Faults::What::kFailReads,
                                                              csd::Faults::What::kFailWrites),
                                            ::testing::Values(0, kHalfOfState)));

// ---- State that stays in memory.

/// Bytes of state that a step moves, in each direction and out of memory.
struct StepMoved {
  uint64_t read = 0;
  uint64_t written = 0;
  uint64_t cached = 0;
};
StepMoved moved_in_step(Updater& updater, int step) {
  const UpdaterTraffic before = updater.traffic();
  const uint64_t count = updater.space().count();
  const auto gradient = contract_gradient(count, step);
  expect_ok(updater.begin_step());
  expect_ok(updater.put_gradient(0, gradient.data(), DataType::kBf16, count));
  expect_ok(updater.finish_gradients(1).status());
  UpdateOptions update;
  update.groups.resize(2);
  expect_ok(updater.start_update(update, DataType::kBf16, nullptr));
  expect_ok(updater.commit("moved"));
  const UpdaterTraffic moved = updater.traffic().since(before);
  return {moved.store.up(TrafficKind::kState), moved.store.down(TrafficKind::kState),
          moved.state_bytes_cached};
}

TEST(StateCache, SavesReadsOfTheSlowestDeviceFirst) {
  const Scratch scratch;
  UpdaterOptions options = options_of(
      {.name = "", .devices = 2, .subgroup_elements = kBlock, .state_cache_bytes = 8 * base::kMiB},
      scratch);
  auto updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  const StepMoved first = moved_in_step(**updater, 1);
  EXPECT_EQ(first.cached, 0u);
  const StepMoved second = moved_in_step(**updater, 2);
  EXPECT_EQ(second.cached, (*updater)->state_cache_bytes());
  EXPECT_LE(second.cached, options.state_cache_bytes);
  // What is left is less than a subgroup, and the last one, which is shorter, counts as whole.
  EXPECT_GT(second.cached, options.state_cache_bytes - 2 * 12 * kBlock);
  EXPECT_EQ(second.read, first.read - second.cached);
  EXPECT_EQ(second.written, first.written);
  EXPECT_LE((*updater)->memory_bytes(), options.memory_budget_bytes);
  // The state is where it was; now one of its devices is said to be slow, and gets it all.
  updater->reset();
  options.devices[0].bandwidth = 10;
  updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  (void)moved_in_step(**updater, 3);
  const UpdaterTraffic before = (*updater)->traffic();
  (void)moved_in_step(**updater, 4);
  const UpdaterTraffic moved = (*updater)->traffic().since(before);
  EXPECT_EQ(moved.store_by_device[0].up(TrafficKind::kState),
            moved.store_by_device[0].down(TrafficKind::kState));
  EXPECT_EQ(moved.store_by_device[1].up(TrafficKind::kState) + moved.state_bytes_cached,
            moved.store_by_device[1].down(TrafficKind::kState));
}

TEST(StateCache, InPlaceStateIsWrittenWhenAskedForAndAtTheEnd) {
  const Scratch scratch;
  const UpdaterOptions options = options_of({.name = "",
                                             .devices = 2,
                                             .durability = storage::Durability::kNone,
                                             .state_cache_bytes = kHalfOfState},
                                            scratch);
  const std::vector<std::string> paths = {options.devices[0].path, options.devices[1].path};
  const auto stored_step = [&] {
    const auto run = open_stored_run(paths, storage::ReaderLock::kLeave);
    return run.ok() ? run->step : ~base::StepNumber{0};
  };
  auto updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  expect_ok((*updater)->flush());  // nothing is there yet
  initialize(**updater);
  const StepMoved first = moved_in_step(**updater, 1);
  const StepMoved second = moved_in_step(**updater, 2);
  EXPECT_EQ(second.read, first.read - second.cached);
  EXPECT_EQ(second.written, second.read);
  EXPECT_THAT(open_stored_run(paths, storage::ReaderLock::kLeave).status().to_string(),
              ::testing::HasSubstr("in memory only"));
  expect_ok((*updater)->flush());
  EXPECT_EQ(stored_step(), 2u);
  const auto planes = all_planes(**updater);
  updater->reset();
  updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_EQ(all_planes(**updater), planes);
  (void)moved_in_step(**updater, 3);
  const auto newer = all_planes(**updater);
  EXPECT_EQ((*updater)->begin_step().code(), base::ErrorCode::kOk);
  EXPECT_EQ((*updater)->flush().code(), base::ErrorCode::kFailedPrecondition);
  updater->reset();  // in a step that has not changed anything
  EXPECT_EQ(stored_step(), 3u);
  updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_EQ(all_planes(**updater), newer);
}

// ---- Instruction sets. The table is chosen once in a process, so each gets one of its own.

/// Run by the test below with SMARTINF_FORCE_ISA set; prints what must not depend on it.
TEST(InstructionSet, DISABLED_PrintOutcome) {
  const Scratch scratch;
  auto updater = Updater::open(options_of({.name = "", .devices = 2}, scratch), contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  Outcome outcome;
  run_steps(**updater, 1, kSteps, outcome);
  fmt::print("outcome of {}: {:a} {:x} {:x}\n", kernels::kernels().isa(),
             fmt::join(outcome.norms, " "), fmt::join(outcome.weights, " "), outcome.state);
}

TEST(InstructionSet, AllGiveTheSameBits) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  std::string expected;
  for (const kernels::KernelTable* table : kernels::supported_tables()) {
    const std::string isa(table->isa());
    const std::string command = fmt::format(
        "SMARTINF_FORCE_ISA={} '{}' --gtest_also_run_disabled_tests "
        "--gtest_filter=InstructionSet.DISABLED_PrintOutcome",
        isa, self);
    FILE* output = popen(command.c_str(), "r");
    ASSERT_NE(output, nullptr);
    std::string said;
    std::array<char, 512> line;
    const std::string prefix = fmt::format("outcome of {}: ", isa);
    while (fgets(line.data(), static_cast<int>(line.size()), output) != nullptr) {
      if (std::string_view(line.data()).starts_with(prefix)) said = line.data() + prefix.size();
    }
    ASSERT_EQ(pclose(output), 0) << command;
    ASSERT_FALSE(said.empty()) << isa << " did not run";
    if (expected.empty()) expected = said;
    EXPECT_EQ(said, expected) << isa;
  }
}

// ---- Compressed gradients: whatever carries them, the same bits; what they keep is state.

UpdaterOptions compressed_options(const Scratch& scratch, size_t devices = 1,
                                  uint64_t subgroup_blocks = 4) {
  Variant variant;
  variant.devices = devices;
  variant.subgroup_elements = subgroup_blocks * kBlock;
  UpdaterOptions options = options_of(variant, scratch);
  options.compress.density = 0.08;
  options.compress.residual_every = 1;
  return options;
}

Outcome compressed_run(const UpdaterOptions& options) {
  Outcome outcome;
  auto updater = Updater::open(options, contract_space());
  EXPECT_TRUE(updater.ok()) << updater.status().to_string();
  if (!updater.ok()) return outcome;
  initialize(**updater);
  run_steps(**updater, 1, kSteps, outcome);
  return outcome;
}

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
  EXPECT_EQ(compress::describe_compression(options),
            "the largest 8 % of the elements as signs; the rest waits in host memory and is sent "
            "later, and is written every 16 steps (residual_every)");
  options.residual_every = 1;
  EXPECT_THAT(compress::describe_compression(options), ::testing::HasSubstr("residual_every = 16"));
  options.density = 0.01;
  options.warmup_steps = 50;
  options.residual_every = 0;
  options.values = compress::ValueEncoding::kF16;
  EXPECT_EQ(compress::describe_compression(options),
            "the largest 1 % of the elements after 50 steps in f16; the rest waits in host memory "
            "and is sent later, or lost when the run stops (residual_every = 0)");
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
        if (one.asked) (*updater)->keep_residual();
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
      const base::Bf16* kept = (*updater)->residual();
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
            const double steps =
                std::clamp<double>(base::to_f32(kept[i]) / (std::sqrt(v / bias) + options.rule.eps),
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
  const base::Bf16* kept = (*first)->residual();
  ASSERT_NE(kept, nullptr);
  const std::vector<base::Bf16> residual(kept, kept + contract_space().count());

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
      expect_ok((*updater)->edit_state(copy, "copied", residual.data()));
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

// ---- Several processes share a run: each prepares, then all commit.

TEST(HeldCommit, IsRealOnlyWhenItIsFinished) {
  Scratch scratch;
  Variant variant;
  variant.devices = 2;
  UpdaterOptions options = options_of(variant, scratch);
  const auto open = [&] {
    auto updater = Updater::open(options, contract_space());
    EXPECT_TRUE(updater.ok()) << updater.status().to_string();
    return std::move(updater).value();
  };
  const auto prepare = [&](Updater& updater) {
    const auto gradient = contract_gradient(contract_space().count(), 1);
    expect_ok(updater.begin_step());
    expect_ok(updater.put_gradient(0, gradient.data(), DataType::kBf16, gradient.size()));
    expect_ok(updater.finish_gradients(1).status());
    UpdateOptions update;
    update.groups.resize(2);
    expect_ok(updater.start_update(update, DataType::kBf16, nullptr));
    expect_ok(updater.start_commit("held"));
    expect_ok(updater.wait_commit());
    EXPECT_EQ(updater.committed_step(), 0u);
    EXPECT_FALSE(updater.begin_step().ok());
  };
  options.external_commit = true;
  auto updater = open();
  initialize(*updater);
  const std::string before = updater->client_metadata();
  EXPECT_FALSE(updater->commit_prepared().ok());
  prepare(*updater);
  expect_ok(updater->abort());
  EXPECT_EQ(updater->committed_step(), 0u);
  prepare(*updater);

  // The processes end here; what they agree on decides.
  updater.reset();
  options.recover_to = 2;
  EXPECT_EQ(Updater::open(options, contract_space()).status().code(), base::ErrorCode::kMismatch);
  options.recover_to = 0;
  updater = open();
  EXPECT_EQ(updater->client_metadata(), before);
  prepare(*updater);
  updater.reset();
  options.recover_to = 1;
  updater = open();
  EXPECT_EQ(updater->client_metadata(), "held");
  EXPECT_EQ(updater->committed_step(), 1u);

  expect_ok(updater->edit_state(nullptr, "edited"));
  EXPECT_EQ(updater->committed_step(), 1u);
  expect_ok(updater->commit_prepared());
  EXPECT_EQ(updater->committed_step(), 2u);
  EXPECT_EQ(updater->client_metadata(), "edited");
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
    auto run = open_stored_run({from / "device0", from / "device1"}, storage::ReaderLock::kTake);
    ASSERT_TRUE(run.ok()) << run.status().to_string();
    ReshardOptions reshard_options;
    reshard_options.subgroup_elements = kBlock;
    const auto done = reshard(*run, targets, reshard_options);
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
    // Large subgroups: every one tells of the columns that it holds.
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
    const compress::CompressionSummary summary = (*updater)->compression();
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

/// Keeps the messages that reach it, until one of `bad` comes.
class Recorder final : public csd::Device {
 public:
  const csd::DeviceInfo& info() const override { return info_; }
  const storage::StoreLayout& layout() const override { return layout_; }
  storage::StoreState state() const override { return {}; }
  std::string client_metadata() const override { return {}; }
  base::Status recover_to(base::StepNumber) override { return base::Status(); }
  void submit(csd::Command& command) override {
    const std::lock_guard lock(mutex_);
    const auto& put = std::get<csd::PutCompressedGradient>(command.message);
    messages[put.subgroup.value].assign(put.message.begin(), put.message.end());
    csd::Completion done;
    done.command = &command;
    if (put.subgroup.value == bad) {
      done.status = base::Status(base::ErrorCode::kCorrupt, "asked to fail", "It is a test.");
    }
    command.replies->push(std::move(done));
  }
  base::TrafficReading host_traffic() const override { return {}; }
  base::TrafficReading store_traffic() const override { return {}; }
  uint64_t bytes_written_ever() const override { return 0; }

  std::map<uint32_t, std::vector<std::byte>> messages;
  uint32_t bad = ~0u;

 private:
  std::mutex mutex_;
  csd::DeviceInfo info_;
  storage::StoreLayout layout_;
};

TEST(Compression, ThreadsChangeNothing) {
  constexpr uint32_t kSubgroups = 23;
  constexpr uint64_t kElements = (kSubgroups - 1) * kBlock + 1234;
  std::vector<plan::Subgroup> subgroups;
  for (uint32_t i = 0; i < kSubgroups; ++i) {
    const uint64_t first = i * kBlock;
    subgroups.push_back({base::SubgroupId{i}, first, std::min(kBlock, kElements - first)});
  }
  for (const compress::ValueEncoding values :
       {compress::ValueEncoding::kBf16, compress::ValueEncoding::kSign}) {
    std::optional<compress::CompressionSummary> first_summary;
    std::map<uint32_t, std::vector<std::byte>> first_messages;
    for (const uint32_t threads : {1u, 2u, 7u}) {
      Recorder recorder;
      compress::CompressOptions options;
      options.values = values;
      options.density = 0.08;
      auto made =
          compress::GradientCompressor::make(options, kElements, 1, flat_matrices(kElements));
      ASSERT_TRUE(made.ok());
      base::ThreadTeam team(threads, "test");
      DeviceWatch watch{std::chrono::minutes(1)};
      CompressedSender sender(**made, team, watch);
      std::vector<CompressedSender::Piece> pieces;
      for (const plan::Subgroup& subgroup : subgroups) pieces.push_back({&subgroup, &recorder, {}});
      for (int step = 1; step <= 3; ++step) {
        const auto gradient = contract_gradient(kElements, step);
        (*made)->begin_step();
        (*made)->put(0, gradient.data(), DataType::kBf16, kElements);
        (*made)->begin_update(static_cast<uint64_t>(step), 1, 1, {}, team);
        ASSERT_TRUE(sender.send(pieces).status.ok());
        if (step < 3) (*made)->commit();
      }
      const compress::CompressionSummary summary = (*made)->summary();
      if (!first_summary) {
        first_summary = summary;
        first_messages = recorder.messages;
      }
      EXPECT_TRUE(recorder.messages == first_messages) << threads << " threads";
      EXPECT_EQ(summary.residual_norm, first_summary->residual_norm);
      EXPECT_EQ(summary.values, first_summary->values);
      EXPECT_EQ(summary.bytes, first_summary->bytes);
      recorder.bad = 11;
      const auto failure = sender.send(pieces);
      EXPECT_EQ(failure.status.code(), base::ErrorCode::kCorrupt);
      EXPECT_EQ(failure.device, &recorder);
      EXPECT_EQ(failure.subgroup.value, 11u);
    }
    EXPECT_EQ(first_messages.size(), kSubgroups);
  }
}

TEST(Compression, AGroupThatIsSkippedKeepsItsResidual) {
  const auto message_of = [](compress::GradientCompressor& compressor,
                             compress::CompressedWriter& writer,
                             std::span<const plan::GroupSpan> out) {
    compress::GradientCompressor::Scratch scratch;
    const auto message = compressor.compress(scratch, writer, {base::SubgroupId{0}, 0, 1000}, out);
    std::vector<base::Bf16> values(1000);
    compress::CompressedView::parse(message)->expand_block(
        0, reinterpret_cast<std::byte*>(values.data()));
    return values;
  };
  for (const compress::ValueEncoding values :
       {compress::ValueEncoding::kBf16, compress::ValueEncoding::kSign}) {
    compress::CompressOptions options;
    options.values = values;
    options.density = 0.08;
    auto made = compress::GradientCompressor::make(options, 1000, 1, {});
    ASSERT_TRUE(made.ok());
    compress::GradientCompressor& compressor = **made;
    compress::CompressedWriter writer;
    const std::vector<float> ones(1000, 1.0f);
    const auto step = [&](uint64_t number, std::span<const plan::GroupSpan> out) {
      compressor.begin_step();
      compressor.put(0, ones.data(), DataType::kF32, 1000);
      base::ThreadTeam alone(1, "test");
      compressor.begin_update(number, 1, 1, {}, alone);
      auto sent = message_of(compressor, writer, out);
      compressor.commit();
      return sent;
    };
    step(1, {});
    const std::vector<plan::GroupSpan> out = {{0, 500, 0}};
    const auto second = step(2, out);
    for (size_t i = 0; i < 500; ++i) ASSERT_EQ(second[i].bits, 0) << i;
    const auto third = step(3, {});
    // 80 went in the first step, from the front: their place has 1 or 2, others of the
    // front 2 kept and new, the rest of the second half 3.
    for (size_t i = 0; i < 1000; ++i) {
      ASSERT_TRUE(third[i].bits == 0 || base::to_f32(third[i]) == 3.0f) << i;
    }
  }
}

/// Nothing gets lost: what was sent and what is kept sum to what came in.
TEST(Compression, SentAndKeptSumToTheGradients) {
  constexpr uint64_t kElements = kBlock + 777;
  for (const compress::ValueEncoding values :
       {compress::ValueEncoding::kBf16, compress::ValueEncoding::kSign}) {
    compress::CompressOptions options;
    options.values = values;
    options.density = values == compress::ValueEncoding::kSign ? 0.4 : 0.05;
    auto made = compress::GradientCompressor::make(options, kElements, 1, flat_matrices(kElements));
    ASSERT_TRUE(made.ok());
    compress::GradientCompressor::Scratch scratch;
    compress::CompressedWriter writer;
    std::vector<double> owed(kElements);
    std::vector<base::Bf16> arrived(kElements);
    for (int step = 1; step <= 30; ++step) {
      const auto gradient = contract_gradient(kElements, step);
      const double scale = step % 3 == 0 ? 0.5 : 1;  // a clipped step
      (*made)->begin_step();
      (*made)->put(0, gradient.data(), DataType::kBf16, kElements);
      base::ThreadTeam alone(1, "test");
      (*made)->begin_update(static_cast<uint64_t>(step), scale, 1, {}, alone);
      const auto message =
          (*made)->compress(scratch, writer, {base::SubgroupId{0}, 0, kElements}, {});
      const auto view = compress::CompressedView::parse(message);
      ASSERT_TRUE(view.ok());
      for (uint64_t b = 0; b < view->blocks(); ++b) {
        view->expand_block(b, reinterpret_cast<std::byte*>(arrived.data() + b * kBlock));
      }
      for (uint64_t i = 0; i < kElements; ++i) {
        owed[i] += scale * base::to_f32(gradient[i]) - base::to_f32(arrived[i]);
      }
      if (step < 30) (*made)->commit();
    }
    const base::Bf16* kept = (*made)->next_residual(0);
    double squares = 0;
    double error = 0;
    double bias = 0;
    for (uint64_t i = 0; i < kElements; ++i) {
      const double difference = owed[i] - base::to_f32(kept[i]);
      squares += owed[i] * owed[i];
      error += difference * difference;
      bias += difference;
    }
    EXPECT_NEAR(std::sqrt(squares), (*made)->summary().residual_norm, 0.01 * std::sqrt(squares));
    // 30 roundings to 8 bits, each stochastic: seen 0.9 %.
    EXPECT_LT(std::sqrt(error), 0.02 * std::sqrt(squares));
    // Rounding to nearest would be as small, but the errors must not add up to one side.
    EXPECT_LT(std::abs(bias), 4 * std::sqrt(error));
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
  // A run that was begun without is not one that can keep.
  UpdaterOptions plain = compressed_options(scratch);
  plain.compress = {};
  compressed_run(plain);
  EXPECT_EQ(code([](auto&) {}), ErrorCode::kMismatch);
  EXPECT_EQ(code([](auto& o) { o.compress.residual_every = 0; }), ErrorCode::kOk);
}

}  // namespace
}  // namespace smartinf::engine
