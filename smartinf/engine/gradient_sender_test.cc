#include "smartinf/engine/gradient_sender.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/kernels/update.h"

namespace smartinf::engine {
namespace {

using base::DataType;
using Bytes = std::vector<std::byte>;

/// Keeps what comes, by element of its subgroups, and who brought it.
class Recorder final : public csd::Device {
 public:
  explicit Recorder(uint64_t bytes) : gradient(bytes, std::byte{0x5a}) {}

  const csd::DeviceInfo& info() const override { return info_; }
  const storage::StoreLayout& layout() const override { return layout_; }
  storage::StoreState state() const override { return {}; }
  std::string client_metadata() const override { return {}; }
  base::Status recover_to(base::StepNumber) override { return base::Status(); }
  void submit(csd::Command& command) override {
    const std::lock_guard lock(mutex_);
    const auto& put = std::get<csd::PutGradient>(command.message);
    const uint64_t width = base::data_type_bytes(put.type);
    std::memcpy(gradient.data() + (first_of[put.subgroup.value] + put.first) * width, put.gradient,
                put.count * width);
    threads.insert(std::this_thread::get_id());
    elements += put.count;
    csd::Completion done;
    done.command = &command;
    if (put.subgroup.value == bad) {
      done.status = base::Status(base::ErrorCode::kIo, "asked to fail", "It is a test.");
    }
    command.replies->push(std::move(done));
  }
  base::TrafficReading host_traffic() const override { return {}; }
  base::TrafficReading store_traffic() const override { return {}; }
  uint64_t bytes_written_ever() const override { return 0; }

  void spill() { info_.gradients_spilled = true; }

  Bytes gradient;  // of the whole space; each device has its subgroups' places
  std::map<uint32_t, uint64_t> first_of;
  std::set<std::thread::id> threads;
  uint64_t elements = 0;
  uint32_t bad = ~0u;

 private:
  std::mutex mutex_;
  csd::DeviceInfo info_;
  storage::StoreLayout layout_;
};

/// A space whose parameters end anywhere, over two devices whose subgroups end elsewhere.
class GradientSenderTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(space_.add("a", {1000, 1300}, 0).ok());
    ASSERT_TRUE(space_.add("b", {77}, 0).ok());
    ASSERT_TRUE(space_.add("c", {3 * kGradientCutElements}, 0).ok());
    set_.subgroups = space_.subgroups(5 * base::kBlockElements);
    values_.resize(space_.count());
    for (uint64_t i = 0; i < values_.size(); ++i) {
      values_[i] = 1e-3f * static_cast<float>(static_cast<int64_t>(i * 2654435761u % 2001) - 1000);
    }
  }
  /// Devices that have seen nothing.
  void make_devices(DataType type) {
    set_.devices.clear();
    set_.owner.clear();
    recorders_ = {};
    for (auto*& recorder : recorders_) {
      auto made = std::make_unique<Recorder>(space_.count() * base::data_type_bytes(type));
      recorder = made.get();
      set_.devices.push_back(std::move(made));
    }
    for (const plan::Subgroup& subgroup : set_.subgroups) {
      const uint32_t device = subgroup.id.value % 2;
      set_.owner.push_back(base::DeviceId{device});
      recorders_[device]->first_of[subgroup.id.value] = subgroup.first;
    }
  }
  Bytes values_as(DataType type) const {
    Bytes out(values_.size() * base::data_type_bytes(type));
    kernels::kernels().cast_from_f32(values_.data(), out.data(), type, values_.size());
    return out;
  }
  /// Bytes that the devices got, subgroup by subgroup.
  Bytes arrived(DataType type) const {
    const uint64_t width = base::data_type_bytes(type);
    Bytes all(space_.count() * width);
    for (const plan::Subgroup& subgroup : set_.subgroups) {
      std::memcpy(all.data() + subgroup.first * width,
                  recorders_[subgroup.id.value % 2]->gradient.data() + subgroup.first * width,
                  subgroup.count * width);
    }
    return all;
  }

  plan::ParameterSpace space_;
  DeviceWatch watch_{std::chrono::minutes(1)};
  DeviceSet set_;
  std::array<Recorder*, 2> recorders_{};
  std::vector<float> values_;
};

TEST_F(GradientSenderTest, AnyNumberOfThreadsGivesTheSameGradientAndNorm) {
  for (const DataType given : {DataType::kF32, DataType::kBf16, DataType::kF16}) {
    for (const DataType sent : {DataType::kF32, DataType::kBf16}) {
      const Bytes gradient = values_as(given);
      std::optional<Bytes> first;
      double norm = 0;
      for (const uint32_t threads : {1u, 2u, 7u}) {
        make_devices(sent);
        base::ThreadTeam team(threads, "test");
        GradientTracker tracker(space_);
        GradientSender sender(set_, tracker, team, sent, watch_);
        Bytes cast_memory(threads * GradientSender::kCastBytes);
        tracker.begin();
        // The last parameter in two parts, the end first.
        const uint64_t cut = space_.find("c")->first + kGradientCutElements;
        for (const auto& [from, to] :
             std::vector<std::pair<uint64_t, uint64_t>>{{cut, space_.count()}, {0, cut}}) {
          const auto pieces = tracker.take(from, to - from);
          ASSERT_TRUE(pieces.ok()) << pieces.status().to_string();
          const auto failure =
              sender.put(*pieces, from, gradient.data() + from * base::data_type_bytes(given),
                         given, cast_memory);
          ASSERT_TRUE(failure.status.ok());
        }
        EXPECT_EQ(recorders_[0]->elements + recorders_[1]->elements, space_.count());
        const auto summary = tracker.finish(1);
        ASSERT_TRUE(summary.ok());
        if (!first) {
          first = arrived(sent);
          norm = summary->norm;
          double sum = 0;
          for (const float value : values_) sum += double{value} * double{value};
          EXPECT_NEAR(norm, std::sqrt(sum), 2e-3 * std::sqrt(sum));  // of what was cast
        }
        EXPECT_TRUE(arrived(sent) == *first) << threads << " threads";
        EXPECT_EQ(summary->norm, norm) << threads << " threads";
      }
      if (given == sent) {
        EXPECT_TRUE(*first == gradient);
      }
    }
  }
}

/// The tree of sums is that of whole cuts, measured at once, which states written earlier went by.
TEST_F(GradientSenderTest, ANormIsThatOfWholeCuts) {
  GradientTracker tracker(space_);
  tracker.begin();
  const auto pieces = tracker.take(0, space_.count());
  ASSERT_TRUE(pieces.ok());
  for (const auto& piece : *pieces) {
    tracker.measure(piece, values_.data() + piece.first, DataType::kF32);
  }
  double sum = 0;
  for (const plan::ParameterRange& range : space_.ranges()) {
    for (uint64_t at = 0; at < range.count; at += kGradientCutElements) {
      const uint64_t count = std::min(kGradientCutElements, range.count - at);
      const float* cut = values_.data() + range.first + at;
      sum += kernels::kernels().partial_norm(cut, DataType::kF32, count).sum_of_squares;
    }
  }
  const auto summary = tracker.finish(1);
  ASSERT_TRUE(summary.ok());
  EXPECT_EQ(summary->norm, std::sqrt(sum));
}

TEST_F(GradientSenderTest, SpilledGradientsComeFromOneThread) {
  make_devices(DataType::kF32);
  recorders_[1]->spill();
  base::ThreadTeam team(4, "test");
  GradientTracker tracker(space_);
  GradientSender sender(set_, tracker, team, DataType::kF32, watch_);
  const auto pieces = tracker.take(0, space_.count());
  ASSERT_TRUE(pieces.ok());
  ASSERT_TRUE(sender.put(*pieces, 0, values_.data(), DataType::kF32, {}).status.ok());
  for (const Recorder* recorder : recorders_) {
    EXPECT_EQ(recorder->threads, std::set{std::this_thread::get_id()});
  }
}

TEST_F(GradientSenderTest, NamesTheDeviceThatFailed) {
  make_devices(DataType::kF32);
  recorders_[1]->bad = 3;
  base::ThreadTeam team(3, "test");
  GradientTracker tracker(space_);
  GradientSender sender(set_, tracker, team, DataType::kF32, watch_);
  const auto pieces = tracker.take(0, space_.count());
  ASSERT_TRUE(pieces.ok());
  const auto failure = sender.put(*pieces, 0, values_.data(), DataType::kF32, {});
  EXPECT_EQ(failure.status.code(), base::ErrorCode::kIo);
  EXPECT_EQ(failure.device, recorders_[1]);
  // A failure is not remembered.
  recorders_[1]->bad = ~0u;
  const Bytes zeros(4096);
  EXPECT_TRUE(sender.put_zeros(70'000, 900'000, zeros).status.ok());
  const Bytes all = arrived(DataType::kF32);
  const auto* floats = reinterpret_cast<const float*>(all.data());
  for (uint64_t i = 70'000; i < 970'000; ++i) ASSERT_EQ(floats[i], 0) << i;
}

TEST_F(GradientSenderTest, WhatIsNotFiniteNamesTheParameter) {
  for (const uint64_t at : {uint64_t{0}, space_.find("b")->first + 76, space_.count() - 1}) {
    GradientTracker tracker(space_);
    const auto pieces = tracker.take(0, space_.count());
    ASSERT_TRUE(pieces.ok());
    std::vector<float> values = values_;
    values[at] = std::numeric_limits<float>::quiet_NaN();
    for (const auto& piece : *pieces) {
      tracker.measure(piece, values.data() + piece.first, DataType::kF32);
    }
    const auto summary = tracker.finish(1);
    ASSERT_TRUE(summary.ok());
    EXPECT_FALSE(summary->finite);
    EXPECT_EQ(summary->first_bad, space_.ranges()[space_.index_at(at)].name);
  }
}

}  // namespace
}  // namespace smartinf::engine
