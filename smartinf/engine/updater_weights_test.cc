// Weights that are fetched from the devices (UpdaterOptions::stream_weights), over every kind of
// device: the bits, the bytes, and that nothing waits for a fetch that never comes.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/ranks/test_crew.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater_kinds.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Status;
using ::testing::HasSubstr;

/// As run_steps() does it.
UpdateOptions options_for(double norm) {
  UpdateOptions options;
  options.gradient_scale = 0.25 * std::min(1.0, 1.0 / norm);
  options.groups = {{.lr = 0.01, .weight_decay = 0.1}, {.lr = 0.02, .weight_decay = 0}};
  return options;
}

/// Memory for all weights, into which they are fetched.
class Weights {
 public:
  explicit Weights(Updater& updater) : updater_(updater), values_(updater.space().count()) {
    for (uint64_t first = 0; first < values_.size();) {
      parts_.push_back(updater.subgroup_at(first));
      EXPECT_EQ(parts_.back().first, first);
      first += parts_.back().count;
    }
  }

  size_t parts() const { return parts_.size(); }
  const plan::Subgroup& part(size_t i) const { return parts_[i]; }
  Status fetch(size_t i, DataType type = DataType::kBf16) {
    return updater_.fetch_weights(parts_[i].first, type, values_.data() + parts_[i].first);
  }
  Status wait(size_t i) { return updater_.wait_fetched(parts_[i].first); }
  /// One after another, with some on their way.
  void fetch_all(bool reverse = false) {
    constexpr size_t kAhead = 2;
    const auto at = [&](size_t i) { return reverse ? parts() - 1 - i : i; };
    for (size_t i = 0; i < parts() + kAhead; ++i) {
      if (i < parts()) expect_ok(fetch(at(i)));
      if (i >= kAhead) expect_ok(wait(at(i - kAhead)));
    }
  }
  uint64_t fetched(bool reverse = false) {
    std::fill(values_.begin(), values_.end(), base::Bf16{});
    fetch_all(reverse);
    return digest(values_);
  }
  WeightsSink sink() {
    return [this](uint64_t first) { return values_.data() + first; };
  }
  uint64_t now() const { return digest(values_); }

 private:
  Updater& updater_;
  std::vector<base::Bf16> values_;
  std::vector<plan::Subgroup> parts_;
};

class StreamedWeights : public ::testing::TestWithParam<UpdaterKind> {
 protected:
  void SetUp() override {
    auto opened = place_->open();
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    updater_ = std::move(*opened);
    initialize(*updater_);
  }

  /// Backward: the last range comes first.
  void put_all(int step, const std::function<void()>& in_between = nullptr) {
    const plan::ParameterSpace& space = updater_->space();
    const auto gradient = contract_gradient(space.count(), step);
    for (size_t i = space.ranges().size(); i-- > 0;) {
      const plan::ParameterRange& range = space.ranges()[i];
      expect_ok(updater_->put_gradient(range.first, gradient.data() + range.first, DataType::kBf16,
                                       range.count));
      if (i == 2 && in_between) in_between();
    }
  }
  /// A step up to its update, of which no weights have a place.
  void update(int step, const WeightsSink& sink = nullptr) {
    expect_ok(updater_->begin_step());
    put_all(step);
    start_update(sink);
  }
  void start_update(const WeightsSink& sink = nullptr) {
    const auto summary = updater_->finish_gradients(0.25);
    expect_ok(summary.status());
    expect_ok(updater_->start_update(options_for(summary->norm), DataType::kBf16, sink));
  }
  void expect_reference_state() {
    EXPECT_EQ(updater_->committed_step(), static_cast<uint64_t>(kSteps));
    uint64_t state = 0;
    for (const auto& plane : all_planes(*updater_)) state = digest(plane, state);
    EXPECT_EQ(state, GetParam().reference().state);
  }

  const std::unique_ptr<StatePlace> place_ = GetParam().make_place();
  std::unique_ptr<Updater> updater_;
};

TEST_P(StreamedWeights, HaveTheBitsOfTheUpdateWheneverTheyAreFetched) {
  Weights weights(*updater_);
  EXPECT_EQ(weights.fetched(), loaded_weights(*updater_));
  const std::vector<uint64_t>& expected = GetParam().reference().weights;
  update(1);
  expect_ok(updater_->commit("between steps"));
  EXPECT_EQ(weights.fetched(), expected[0]);
  EXPECT_EQ(loaded_weights(*updater_), expected[0]);
  update(2);
  expect_ok(updater_->start_commit("while the update runs"));
  EXPECT_EQ(weights.fetched(), expected[1]);
  EXPECT_EQ(weights.fetched(true), expected[1]) << "once more, as backward does";
  expect_ok(updater_->wait_commit());
  update(3);
  EXPECT_EQ(weights.fetched(), expected[2]) << "before the commit is started";
  expect_ok(updater_->commit("the last one"));
  expect_reference_state();
}

TEST_P(StreamedWeights, AreTheCommittedOnesUntilTheUpdateIsStarted) {
  const std::vector<uint64_t>& expected = GetParam().reference().weights;
  Weights weights(*updater_);
  uint64_t before = loaded_weights(*updater_);
  const bool early = updater_->early_update_possible().ok();
  for (int step = 1; step <= kSteps; ++step) {
    expect_ok(updater_->begin_step());
    if (early && step > 1) {
      UpdateOptions guess =
          options_for(GetParam().reference().norms[static_cast<size_t>(step) - 1]);
      if (step == 3) guess.gradient_scale *= 2;
      expect_ok(updater_->start_early_update(guess, DataType::kBf16, nullptr, 0));
    }
    put_all(step, [&] { EXPECT_EQ(weights.fetched(true), before) << step; });
    start_update();
    expect_ok(updater_->start_commit(""));
    before = weights.fetched();
    EXPECT_EQ(before, expected[static_cast<size_t>(step) - 1]) << step;
  }
  expect_ok(updater_->wait_commit());
  expect_reference_state();
}

TEST_P(StreamedWeights, OfAnUpdateAreReadNeitherTwiceNorFromTheDrive) {
  Weights weights(*updater_);
  UpdaterTraffic traffic[2];
  for (const int step : {1, 2, 3}) {
    const UpdaterTraffic before = updater_->traffic();
    update(step, step < 3 ? weights.sink() : nullptr);
    expect_ok(updater_->start_commit(""));
    if (step == 3) {
      EXPECT_EQ(weights.fetched(), GetParam().reference().weights[2]);
    }
    expect_ok(updater_->wait_commit());
    if (step > 1) traffic[step - 2] = updater_->traffic().since(before);
  }
  // Where there are few slots, what was prefetched may make room for what is asked for first.
  const uint64_t again = GetParam().name == "LeastMemory" ? updater_->slots() * 12 * kBlock : 0;
  EXPECT_GE(traffic[1].store.up(TrafficKind::kState), traffic[0].store.up(TrafficKind::kState));
  EXPECT_LE(traffic[1].store.up(TrafficKind::kState),
            traffic[0].store.up(TrafficKind::kState) + again);
  EXPECT_EQ(traffic[1].host_link.up(TrafficKind::kWeight),
            traffic[0].host_link.up(TrafficKind::kWeight));
}

TEST_P(StreamedWeights, ThoseWithAPlaceNeedNoFetch) {
  Weights weights(*updater_);
  const auto resident = [](size_t i) { return i % 2 == 0; };
  const WeightsSink sink = [&](uint64_t first) {
    size_t i = 0;
    while (weights.part(i).first != first) ++i;
    return resident(i) ? weights.sink()(first) : nullptr;
  };
  update(1, sink);
  expect_ok(updater_->start_commit(""));
  for (size_t i = 0; i < weights.parts(); ++i) {
    if (resident(i)) {
      expect_ok(updater_->wait_weights(weights.part(i).first, weights.part(i).count));
    } else {
      expect_ok(weights.fetch(i));
      expect_ok(weights.wait(i));
    }
  }
  EXPECT_EQ(weights.now(), GetParam().reference().weights[0]);
  expect_ok(updater_->wait_commit());
}

TEST_P(StreamedWeights, NothingWaitsForAFetchThatNeverComes) {
  const std::vector<std::pair<std::string, std::function<Status()>>> ends = {
      {"wait_weights", [&] { return updater_->wait_weights(0, updater_->space().count()); }},
      {"commit", [&] { return updater_->commit(""); }},
      {"flush", [&] { return updater_->flush(); }},
      {"abort", [&] { return updater_->abort(); }},
      {"begin_step", [&] { return updater_->begin_step(); }},
      {"the destructor",
       [&] {
         updater_.reset();
         return Status();
       }},
  };
  for (const auto& [name, end] : ends) {
    SCOPED_TRACE(name);
    update(1);
    const bool commits = name != "commit" && name != "wait_weights" && name != "abort";
    if (commits) expect_ok(updater_->start_commit(""));
    const Status status = end();
    EXPECT_TRUE(status.ok()) << status.to_string();
    if (name == "wait_weights") expect_ok(updater_->commit(""));
    if (name == "begin_step") expect_ok(updater_->abort());
  }
}

TEST_P(StreamedWeights, ASecondFetchInAStepComesAfterItsCommit) {
  Weights weights(*updater_);
  update(1);
  expect_ok(weights.fetch(0));
  expect_ok(weights.wait(0));
  expect_ok(weights.fetch(0));
  EXPECT_EQ(weights.fetch(0).code(), ErrorCode::kFailedPrecondition) << "it is under way";
  const Status early = weights.wait(0);
  EXPECT_EQ(early.code(), ErrorCode::kFailedPrecondition) << early.to_string();
  EXPECT_THAT(early.to_string(), HasSubstr("start_commit()"));
  expect_ok(updater_->start_commit(""));
  expect_ok(weights.wait(0));
  EXPECT_EQ(weights.fetched(), GetParam().reference().weights[0]);
  expect_ok(updater_->wait_commit());
}

TEST_P(StreamedWeights, OfAStepThatIsAbortedCanBeAskedForAgain) {
  if (GetParam().in_place) GTEST_SKIP() << "an update cannot be aborted";
  Weights weights(*updater_);
  const uint64_t before = loaded_weights(*updater_);
  update(1);
  expect_ok(weights.fetch(0));
  expect_ok(weights.wait(0));
  expect_ok(weights.fetch(0));
  expect_ok(updater_->abort());
  EXPECT_EQ(weights.wait(0).code(), ErrorCode::kCancelled);
  EXPECT_EQ(weights.fetched(), before);
  update(1);
  expect_ok(updater_->start_commit(""));
  EXPECT_EQ(weights.fetched(), GetParam().reference().weights[0]);
  expect_ok(updater_->wait_commit());
}

INSTANTIATE_TEST_SUITE_P(All, StreamedWeights, ::testing::ValuesIn(all_kinds(true)),
                         [](const auto& kind) { return kind.param.name; });

// ---- Errors.

INSTANTIATE_TEST_SUITE_P(Ranks, StreamedWeights, ::testing::ValuesIn(ranks_kinds(true)),
                         [](const auto& kind) { return kind.param.name; });

TEST(FetchedWeights, AreRefusedWhereTheyCannotBeHad) {
  FakesPlace place;
  const auto plain = place.open();
  ASSERT_TRUE(plain.ok());
  base::Bf16 none{};
  const Status unsupported = (*plain)->fetch_weights(0, DataType::kBf16, &none);
  EXPECT_EQ(unsupported.code(), ErrorCode::kUnsupported);
  EXPECT_THAT(unsupported.to_string(), HasSubstr("stream_weights"));

  FakesPlace streaming(true);
  const auto updater = streaming.open();
  ASSERT_TRUE(updater.ok());
  Weights weights(**updater);
  EXPECT_EQ(weights.fetch(0).code(), ErrorCode::kFailedPrecondition) << "nothing is there";
  initialize(**updater);
  EXPECT_EQ(weights.wait(0).code(), ErrorCode::kFailedPrecondition);
  EXPECT_EQ((*updater)->fetch_weights(1, DataType::kBf16, &none).code(),
            ErrorCode::kInvalidArgument);
}

TEST(FetchedWeights, DoNotGoWithCompression) {
  const Scratch scratch;
  UpdaterOptions options = compressed_options(scratch);
  options.stream_weights = true;
  const Status refused = Updater::open(options, contract_space()).status();
  EXPECT_EQ(refused.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(refused.to_string(), HasSubstr("stream_weights with compression"));
}

TEST(FetchedWeights, AFailingDeviceIsNamedAndTheyCanBeFetchedAgain) {
  FakesPlace place(true);
  const auto updater = place.open();
  ASSERT_TRUE(updater.ok());
  initialize(**updater);
  Weights weights(**updater);
  place.drive(1).fail_next = csd::ReadWeights{};
  std::vector<Status> failures;
  for (size_t i = 0; i < weights.parts(); ++i) {
    expect_ok(weights.fetch(i));
    const Status status = weights.wait(i);
    if (status.ok()) continue;
    failures.push_back(status);
    expect_ok(weights.fetch(i));
    expect_ok(weights.wait(i));
  }
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].code(), ErrorCode::kIo);
  EXPECT_THAT(failures[0].to_string(), HasSubstr("drive1"));
  EXPECT_EQ(weights.now(), loaded_weights(**updater));
}

TEST(FetchedWeights, AnUpdateThatFailsFailsTheFetchesThatWaitForIt) {
  FakesPlace place(true);
  const auto updater = place.open();
  ASSERT_TRUE(updater.ok());
  initialize(**updater);
  Weights weights(**updater);
  const uint64_t before = loaded_weights(**updater);
  const auto gradient = contract_gradient((*updater)->space().count(), 1);
  expect_ok((*updater)->begin_step());
  expect_ok((*updater)->put_gradient(0, gradient.data(), DataType::kBf16, gradient.size()));
  expect_ok((*updater)->finish_gradients(1).status());
  place.drive(0).fail_next = csd::Update{};
  expect_ok((*updater)->start_update(options_for(1), DataType::kBf16, nullptr));
  expect_ok((*updater)->start_commit(""));
  const Status committed = (*updater)->wait_commit();
  EXPECT_THAT(committed.to_string(), HasSubstr("drive0"));
  EXPECT_EQ(weights.fetched(), before);
}

TEST(LoadedWeights, AreReadOnlyWhereThereIsAPlaceForThem) {
  DevicesPlace place({.name = "", .devices = 2, .subgroup_elements = kBlock});
  const auto updater = place.open();
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  constexpr uint64_t kPlaces = 5 * kBlock;
  std::vector<base::Bf16> all((*updater)->space().count());
  std::vector<base::Bf16> some(kPlaces);
  expect_ok((*updater)->load_weights(DataType::kBf16,
                                     [&](uint64_t first) { return all.data() + first; }));
  const auto read = [&] { return (*updater)->traffic().store.up(TrafficKind::kState); };
  const uint64_t before = read();
  expect_ok((*updater)->load_weights(DataType::kBf16, [&](uint64_t first) {
    return first < kPlaces ? some.data() + first : nullptr;
  }));
  EXPECT_EQ(read() - before, kPlaces * sizeof(float));
  EXPECT_EQ(0, std::memcmp(some.data(), all.data(), kPlaces * sizeof(base::Bf16)));
}

/// An update that waits for the trainer, who may compute for as long as he likes, is no reason to
/// give up its device; weights that it owes are.
TEST(FetchedWeights, ADeviceIsGivenUpWhenItOwesThemAndNotWhileItsUpdateWaits) {
  FakesPlace place(true);
  place.options().device_silence_max = std::chrono::milliseconds(100);
  const auto updater = place.open();
  ASSERT_TRUE(updater.ok());
  initialize(**updater);
  Weights weights(**updater);
  const auto gradient = contract_gradient((*updater)->space().count(), 1);
  expect_ok((*updater)->begin_step());
  expect_ok((*updater)->put_gradient(0, gradient.data(), DataType::kBf16, gradient.size()));
  expect_ok((*updater)->finish_gradients(1).status());
  expect_ok((*updater)->start_update(options_for(1), DataType::kBf16, nullptr));
  expect_ok((*updater)->start_commit(""));
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  weights.fetch_all();
  expect_ok((*updater)->wait_commit());
  EXPECT_EQ(weights.now(), loaded_weights(**updater));

  for (const size_t d : {0, 1}) place.drive(d).silent_from = csd::ReadWeights{};
  expect_ok(weights.fetch(0));
  const Status status = weights.wait(0);
  EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
  EXPECT_THAT(status.to_string(), HasSubstr("read weights"));
}

}  // namespace
}  // namespace smartinf::engine
