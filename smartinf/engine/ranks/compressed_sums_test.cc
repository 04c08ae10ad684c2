#include "smartinf/engine/ranks/compressed_sums.h"

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_all.h"
#include "smartinf/compress/density.h"
#include "smartinf/engine/ranks/test_crew.h"
#include "smartinf/plan/micro_batches.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Status;
using compress::ValueEncoding;
using ::testing::HasSubstr;

std::vector<float> normal(uint64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> values(0.0f, 0.02f);
  std::vector<float> made(count);
  for (float& value : made) value = base::to_f32(base::to_bf16(values(random)));
  return made;
}

/// Two pieces, of which the second begins in the middle of a group of random numbers.
class Sums : public ::testing::Test {
 protected:
  explicit Sums(compress::CompressOptions options = {.density = 0.08, .residual_every = 0}) {
    auto made = CompressedSums::make(options, 1, {kFirst, kSecond});
    EXPECT_TRUE(made.ok());
    sums_ = std::move(*made);
    begin(1);
  }
  void begin(base::StepNumber step) { sums_->begin_step(step, team_); }
  std::vector<std::byte> message(const GradientTracker::Piece& piece, std::span<const float> sum) {
    std::vector<std::byte> made(sums_->bytes(piece.count));
    sums_->compress(piece, sum, made.data());
    return made;
  }
  std::vector<float> arrived(const GradientTracker::Piece& piece,
                             const std::vector<std::byte>& message, uint64_t from, uint64_t count) {
    std::vector<float> out(count), scratch;
    expect_ok(sums_->add(piece, message.data(), from, out, scratch));
    return out;
  }

  static constexpr GradientTracker::Piece kFirst{0, 0, kGradientPieceElements};
  static constexpr GradientTracker::Piece kSecond{1, kGradientPieceElements, 70001};
  base::ThreadTeam team_{1, "test"};
  std::unique_ptr<CompressedSums> sums_;
};

TEST_F(Sums, NothingOfThemIsLost) {
  // Of what is constant, about so much has arrived after some steps as was there.
  constexpr int kSteps = 40;
  const std::vector<float> sum = normal(kSecond.count, 1);
  std::vector<float> all(kSecond.count);
  for (int step = 1; step <= kSteps; ++step) {
    begin(static_cast<base::StepNumber>(step));
    const auto out = arrived(kSecond, message(kSecond, sum), 0, kSecond.count);
    for (size_t i = 0; i < all.size(); ++i) all[i] += out[i];
    sums_->committed();
  }
  double missing = 0, there = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    missing += std::abs(kSteps * sum[i] - all[i]);
    there += std::abs(kSteps * sum[i]);
  }
  EXPECT_LT(missing, 0.25 * there);  // without the residual 0.81
}

TEST_F(Sums, AreOfOneSizeAndShort) {
  const auto message_bytes = sums_->bytes(kFirst.count);
  EXPECT_EQ(message(kFirst, normal(kFirst.count, 1)).size(), message_bytes);
  EXPECT_EQ(message(kFirst, std::vector<float>(kFirst.count)).size(), message_bytes);
  EXPECT_LT(message_bytes, kFirst.count * 2 / 26);
  EXPECT_TRUE(sums_->pays(1000));
  EXPECT_FALSE(sums_->pays(20));
}

TEST_F(Sums, ArriveInParts) {
  const auto made = message(kSecond, normal(kSecond.count, 2));
  const auto whole = arrived(kSecond, made, 0, kSecond.count);
  const uint64_t cuts[] = {0, 5, 65536, 66000, kSecond.count};
  for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
    const auto part = arrived(kSecond, made, cuts[i], cuts[i + 1] - cuts[i]);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + static_cast<long>(cuts[i])));
  }
}

TEST_F(Sums, OfAStepThatWasAbortedAreThoseOfTheNext) {
  const std::vector<float> sum = normal(kFirst.count, 3);
  const auto first = message(kFirst, sum);
  begin(1);
  const auto again = message(kFirst, sum);
  EXPECT_EQ(again, first);
  sums_->committed();
  begin(2);
  const auto next = message(kFirst, sum);
  EXPECT_NE(next, first) << "with the residual";
  sums_->leave(kFirst.first, kFirst.count);
  sums_->committed();
  begin(2);
  EXPECT_EQ(message(kFirst, sum), next);
}

TEST_F(Sums, ThatAreNotFiniteSaySoAndKeepTheResidual) {
  const std::vector<float> sum = normal(kFirst.count, 4);
  message(kFirst, sum);
  sums_->committed();
  begin(2);
  const auto right = message(kFirst, sum);
  for (const float bad : {INFINITY, -INFINITY, NAN, 3.39e38f}) {
    std::vector<float> wrong = sum;
    wrong[100] = bad;
    for (const float value : arrived(kFirst, message(kFirst, wrong), 70000, 10)) {
      EXPECT_TRUE(std::isnan(value)) << bad;
    }
    sums_->committed();
    begin(2);
    EXPECT_EQ(message(kFirst, sum), right) << bad;
  }
}

TEST_F(Sums, ThatAreDamagedAreRefused) {
  auto made = message(kFirst, normal(kFirst.count, 5));
  std::vector<float> out(kFirst.count), scratch;
  const GradientTracker::Piece other{1, 0, kFirst.count};
  EXPECT_EQ(sums_->add(other, made.data(), 0, out, scratch).code(), ErrorCode::kCorrupt);
  made[200] ^= std::byte{1};
  EXPECT_EQ(sums_->add(kFirst, made.data(), 0, out, scratch).code(), ErrorCode::kCorrupt);
}

// ---- Ranks.

using Leaves = std::vector<std::vector<float>>;

/// Micro batches, with values in a few of their elements only.
Leaves sparse_leaves(uint64_t count, uint64_t elements) {
  Leaves leaves;
  for (uint32_t leaf = 0; leaf < count; ++leaf) {
    std::vector<float>& values = leaves.emplace_back(normal(elements, leaf));
    for (uint64_t i = 0; i < elements; ++i) {
      if ((i * 7 + leaf) % 11 != 0) values[i] = 0;
    }
  }
  return leaves;
}

struct Step {
  double norm = 0;
  std::vector<std::vector<float>> planes;
  std::vector<uint64_t> sent;  // gradients, by rank
};

/// The gradient of a leaf, of the elements [begin, end).
Status put_leaf(Updater& updater, const Leaves& leaves, uint32_t leaf, uint64_t begin,
                uint64_t end) {
  for (const plan::ParameterRange& range : updater.space().ranges()) {
    std::vector<const void*> values;
    if (range.first >= begin && range.first < end) {
      values.push_back(leaves[leaf].data() + range.first);
    }
    SI_RETURN_IF_ERROR(updater.put_gradient_sums(range.first, range.count,
                                                 {leaves.size(), DataType::kF32, values}));
  }
  return Status();
}

/// Steps of so many replicas with a leaf each, of one or of two stages. aborts: before each step
/// there is one that is given up.
Step steps_of(FakeRanksPlace& place, uint32_t replicas, const Leaves& leaves, int steps = 1,
              bool aborts = false) {
  const uint64_t count = contract_space().count();
  std::vector<plan::RankSpan> stages = place.options().stages;
  if (stages.empty()) stages = {{0, count, 0, replicas}};
  const auto ranks = static_cast<uint32_t>(stages.size()) * replicas;
  auto opened = place.open_crew(std::make_shared<Board>(ranks));
  EXPECT_TRUE(opened.ok()) << opened.status().to_string();
  Crew& all = **opened;
  initialize(all);
  Step step;
  for (int i = 0; i < steps * (aborts ? 2 : 1); ++i) {
    expect_ok(all.begin_step());
    expect_ok(all.all([&](size_t rank, Updater& updater) {
      const plan::RankSpan& mine = stages[rank / replicas];
      return put_leaf(updater, leaves, static_cast<uint32_t>(rank) % replicas, mine.first,
                      mine.end());
    }));
    const auto summary = all.finish_gradients(1);
    expect_ok(summary.status());
    step.norm = summary->norm;
    if (aborts && i % 2 == 0) {
      expect_ok(all.abort());
      continue;
    }
    UpdateOptions options;
    options.groups.resize(2);
    expect_ok(all.start_update(options, DataType::kBf16, nullptr));
    expect_ok(all.commit(""));
  }
  step.planes = all_planes(all);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    step.sent.push_back(all.rank(rank).traffic().ranks.down(TrafficKind::kGradient));
  }
  return step;
}

UpdaterOptions& compress(FakeRanksPlace& place, double density = 0.2) {
  place.options().compress = {.density = density,
                              .values = ValueEncoding::kBf16,
                              .error_feedback = false,
                              .residual_every = 0};
  place.options().gradient_type = DataType::kF32;
  return place.options();
}

TEST(CompressedRanks, ThatSendAllThereIsHaveTheBitsOfDenseOnes) {
  for (const uint32_t replicas : {2, 3}) {
    const Leaves leaves = sparse_leaves(replicas, contract_space().count());
    FakeRanksPlace dense(false, replicas, 2), compressed(false, replicas, 2);
    dense.options().gradient_type = DataType::kF32;
    compress(compressed);
    const Step expected = steps_of(dense, replicas, leaves);
    const Step found = steps_of(compressed, replicas, leaves);
    EXPECT_EQ(found.norm, expected.norm);
    EXPECT_TRUE(found.planes == expected.planes) << replicas;
    for (uint32_t rank = 0; rank < replicas; ++rank) {
      EXPECT_LT(3 * found.sent[rank], expected.sent[rank]);
    }
  }
}

TEST(CompressedRanks, OfTheFirstStagesAloneSendMessages) {
  const Leaves leaves = sparse_leaves(2, contract_space().count());
  const plan::ParameterSpace space = contract_space();
  const uint64_t cut = space.ranges()[2].first;
  std::vector<Step> found;
  for (const uint32_t stages : {0, 1, 2}) {
    FakeRanksPlace place(false, 4, 4);
    compress(place).compress.stages = stages;
    place.options().stages = {{0, cut, 0, 2}, {cut, space.count() - cut, 2, 2}};
    found.push_back(steps_of(place, 2, leaves));
    EXPECT_TRUE(found.back().planes == found.front().planes) << stages;
    EXPECT_EQ(found.back().norm, found.front().norm);
  }
  for (uint32_t rank = 0; rank < 4; ++rank) {
    EXPECT_LT(3 * found[2].sent[rank], found[0].sent[rank]);
    EXPECT_EQ(found[1].sent[rank], rank < 2 ? found[2].sent[rank] : found[0].sent[rank]);
  }
}

TEST(CompressedRanks, HaveTheSameBitsWithOtherDevicesAndSubgroups) {
  const Leaves leaves = sparse_leaves(2, contract_space().count());
  std::vector<Step> found;
  for (const auto& [devices, subgroup] : {std::pair(2, kBlock), std::pair(3, 4 * kBlock)}) {
    FakeRanksPlace place(false, 2, static_cast<size_t>(devices));
    place.options().subgroup_elements = subgroup;
    place.options().compress = {.density = 0.02, .residual_every = 0};
    found.push_back(steps_of(place, 2, leaves, 3));
  }
  EXPECT_EQ(found[1].norm, found[0].norm);
  EXPECT_TRUE(found[1].planes == found[0].planes);
}

TEST(CompressedRanks, CarryResidualsOfCommittedStepsAlone) {
  const Leaves leaves = sparse_leaves(2, contract_space().count());
  const auto planes = [&](bool feedback, int steps, bool aborts) {
    FakeRanksPlace place(false, 2, 2);
    compress(place, 0.02).compress.error_feedback = feedback;
    return steps_of(place, 2, leaves, steps, aborts).planes;
  };
  EXPECT_TRUE(planes(true, 1, false) == planes(false, 1, false));
  const auto two = planes(true, 2, false);
  EXPECT_FALSE(two == planes(false, 2, false));
  EXPECT_TRUE(planes(true, 2, true) == two);
}

TEST(CompressedRanks, SendOneMessageOfEachPieceToWhoHasTheState) {
  FakeRanksPlace place(false, 2, 1);  // one device, which rank 0 has
  place.options().compress = {.density = 0.08, .residual_every = 0};
  const Step step = steps_of(place, 2, sparse_leaves(2, contract_space().count()));
  const auto sums = CompressedSums::make(place.options().compress, 0, {});
  base::ThreadTeam team(1, "test");
  (*sums)->begin_step(1, team);
  uint64_t bytes = 0;
  const plan::ParameterSpace space = contract_space();
  for (const GradientTracker::Piece& piece : GradientTracker(space).all_pieces()) {
    bytes += (*sums)->bytes(piece.count);
  }
  EXPECT_EQ(step.sent, (std::vector<uint64_t>{0, bytes}));
  EXPECT_NEAR(static_cast<double>(bytes),
              compress::bytes_per_element(place.options().compress) *
                  static_cast<double>(contract_space().count()),
              0.01 * static_cast<double>(bytes));
}

TEST(CompressedRanks, AreRefusedWithWhatToDo) {
  const auto refused = [](auto change) {
    FakeRanksPlace place(false, 2, 2);
    compress(place);
    change(place.options());
    auto crew = place.open_crew(std::make_shared<Board>(2));
    EXPECT_FALSE(crew.ok());
    return crew.status().to_string();
  };
  EXPECT_THAT(refused([](UpdaterOptions& options) {
                options.compress = {.density = 0.1, .residual_every = 16};
              }),
              HasSubstr("compress.residual_every is 16, but the residuals of several ranks are "
                        "not stored"));
  EXPECT_THAT(refused([](UpdaterOptions& options) {
                const uint64_t count = contract_space().count();
                options.stages = {{0, kBlock, 0, 1}, {kBlock, count - kBlock, 1, 1}};
              }),
              HasSubstr("each stage is one rank's"));
}

}  // namespace
}  // namespace smartinf::engine
