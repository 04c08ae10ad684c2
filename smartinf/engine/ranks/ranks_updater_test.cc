// Tests of what several ranks have beyond the contract of an updater (updater_contract.h, which
// they are held to as well): other numbers of ranks, sums over micro batches, and ranks that fail
// at any moment.
#include "smartinf/engine/ranks/ranks_updater.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_all.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/ranks/test_crew.h"
#include "smartinf/plan/micro_batches.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Status;
using ::testing::AllOf;
using ::testing::HasSubstr;

UpdateOptions update_options() {
  UpdateOptions options;
  options.groups.resize(2);
  return options;
}

TEST(Ranks, GoOnWithAnyNumberOfRanksAsOneProcessWould) {
  FakeRanksPlace place(false, 2, 3);
  Outcome outcome;
  {
    auto two = place.open();
    ASSERT_TRUE(two.ok()) << two.status().to_string();
    initialize(**two);
    run_steps(**two, 1, 1, outcome);
  }
  {
    auto alone = place.open_alone();
    ASSERT_TRUE(alone.ok()) << alone.status().to_string();
    run_steps(**alone, 2, 2, outcome);
  }
  place.set_ranks(5);
  auto five = place.open();
  ASSERT_TRUE(five.ok()) << five.status().to_string();
  run_steps(**five, 3, kSteps, outcome);
  EXPECT_EQ(outcome.norms, reference(DataType::kBf16).norms);
  EXPECT_EQ(outcome.weights, reference(DataType::kBf16).weights);
  EXPECT_EQ(outcome.state, reference(DataType::kBf16).state);
}

// ---- Micro batches.

using Leaves = std::vector<std::vector<float>>;

/// With all their digits, so that each order of adding them up gives bits of its own.
Leaves leaves_of(uint64_t count, uint64_t elements) {
  Leaves leaves;
  for (uint64_t leaf = 0; leaf < count; ++leaf) {
    std::vector<float>& values = leaves.emplace_back();
    for (const base::Bf16 value : contract_gradient(elements, static_cast<int>(leaf))) {
      values.push_back(base::to_f32(value) * 1.2345678f);
    }
  }
  return leaves;
}

/// Adds up as the tree is defined.
std::vector<float> tree_sum(const Leaves& leaves, uint64_t begin, uint64_t end) {
  if (end - begin == 1) return leaves[begin];
  uint64_t power = 1;
  while (2 * power < end - begin) power *= 2;
  std::vector<float> sum = tree_sum(leaves, begin, begin + power);
  const std::vector<float> right = tree_sum(leaves, begin + power, end);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += right[i];
  return sum;
}

/// The norm and the state after one step, of which each of so many ranks has its nodes.
std::pair<double, std::vector<std::vector<float>>> summed_step(size_t ranks, const Leaves& leaves) {
  FakeRanksPlace place(false, ranks, 2);
  place.options().gradient_type = DataType::kF32;
  auto opened = ranks == 1 ? place.open_alone() : place.open();
  EXPECT_TRUE(opened.ok()) << opened.status().to_string();
  Updater& all = **opened;
  initialize(all);
  const auto put = [&](size_t rank, Updater& updater) -> Status {
    const auto nodes = plan::summation_nodes(
        leaves.size(), plan::micro_batches_of(leaves.size(), static_cast<uint32_t>(rank),
                                              static_cast<uint32_t>(ranks)));
    Leaves sums;
    for (const auto& node : nodes) sums.push_back(tree_sum(leaves, node.begin, node.end));
    for (const plan::ParameterRange& range : updater.space().ranges()) {
      std::vector<const void*> values;
      for (const std::vector<float>& sum : sums) values.push_back(sum.data() + range.first);
      SI_RETURN_IF_ERROR(updater.put_gradient_sums(range.first, range.count,
                                                   {leaves.size(), DataType::kF32, values}));
    }
    return Status();
  };
  expect_ok(all.begin_step());
  expect_ok(ranks == 1 ? put(0, all) : static_cast<Crew&>(all).all(put));
  const auto summary = all.finish_gradients(1);
  expect_ok(summary.status());
  expect_ok(all.start_update(update_options(), DataType::kBf16, nullptr));
  expect_ok(all.commit(""));
  return {summary->norm, all_planes(all)};
}

TEST(Ranks, AddUpMicroBatchesAlike) {
  for (const uint64_t count : {2, 5}) {
    const Leaves leaves = leaves_of(count, contract_space().count());
    const auto expected = summed_step(1, leaves);
    for (const size_t ranks : {2, 3}) {
      EXPECT_TRUE(summed_step(ranks, leaves) == expected)
          << ranks << " ranks, " << count << " micro batches";
    }
  }
}

/// The same step of stages with so many ranks each, which are cut in the middle of a subgroup. Each
/// has sums and gets weights of its elements alone.
void expect_stages_as_one(uint32_t replicas, const Leaves& leaves) {
  const uint32_t ranks = 2 * replicas;
  FakeRanksPlace place(false, ranks, ranks);
  place.options().gradient_type = DataType::kF32;
  const plan::ParameterSpace space = contract_space();
  const uint64_t cut = space.ranges()[2].first;
  ASSERT_NE(cut % kBlock, 0u);
  place.options().stages = {{0, cut, 0, replicas}, {cut, space.count() - cut, replicas, replicas}};
  auto opened = place.open_crew(std::make_shared<Board>(ranks));
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  Crew& all = **opened;
  initialize(all);
  expect_ok(all.begin_step());
  expect_ok(all.all([&](size_t rank, Updater& updater) -> Status {
    const auto range_of =
        plan::micro_batches_of(leaves.size(), static_cast<uint32_t>(rank) % replicas, replicas);
    Leaves sums;
    for (const auto& node : plan::summation_nodes(leaves.size(), range_of)) {
      sums.push_back(tree_sum(leaves, node.begin, node.end));
    }
    for (const plan::ParameterRange& range : updater.space().ranges()) {
      std::vector<const void*> values;
      const bool mine = (range.first >= cut) == (rank >= replicas);
      for (size_t i = 0; mine && i < sums.size(); ++i)
        values.push_back(sums[i].data() + range.first);
      SI_RETURN_IF_ERROR(updater.put_gradient_sums(range.first, range.count,
                                                   {leaves.size(), DataType::kF32, values}));
    }
    return Status();
  }));
  const auto summary = all.finish_gradients(1);
  expect_ok(summary.status());
  std::vector<std::vector<base::Bf16>> memory(ranks);
  expect_ok(all.all([&](size_t rank, Updater& updater) -> Status {
    memory[rank].resize(space.count());
    const auto sink = [&](uint64_t first) -> void* {
      const plan::Subgroup subgroup = updater.subgroup_at(first);
      const bool mine = rank < replicas ? first < cut : first + subgroup.count > cut;
      return mine ? memory[rank].data() + first : nullptr;
    };
    SI_RETURN_IF_ERROR(updater.start_update(update_options(), DataType::kBf16, sink));
    SI_RETURN_IF_ERROR(updater.wait_weights(0, updater.space().count()));
    return updater.commit("");
  }));
  EXPECT_EQ(summary->norm, summed_step(1, leaves).first);
  const auto planes = all_planes(all);
  EXPECT_TRUE(planes == summed_step(1, leaves).second);
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (uint64_t i = rank < replicas ? 0 : cut; i < (rank < replicas ? cut : space.count()); ++i) {
      ASSERT_EQ(memory[rank][i].bits, base::to_bf16(planes[0][i]).bits)
          << "rank " << rank << ", element " << i;
    }
  }
}

TEST(Ranks, StagesHaveGradientsAndWeightsOfTheirOwnAlone) {
  for (const uint32_t replicas : {1, 2}) {
    SCOPED_TRACE(replicas);
    expect_stages_as_one(replicas, leaves_of(5, contract_space().count()));
  }
}

TEST(Ranks, OtherSumsThanARankHasAreRefused) {
  FakeRanksPlace place(false, 2, 2);
  auto crew = place.open_crew(std::make_shared<Board>(2));
  ASSERT_TRUE(crew.ok());
  initialize(**crew);
  expect_ok((*crew)->begin_step());
  const std::vector<float> zeros(kBlock * 3);
  const void* const two[] = {zeros.data(), zeros.data()};
  for (const Status& status : (*crew)->each([&](size_t, Updater& updater) {
         return updater.put_gradient_sums(0, zeros.size(), {2, DataType::kF32, two});
       })) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(status.to_string(), HasSubstr("gave 2 sums of a gradient over 2 micro batches"));
  }
  expect_ok((*crew)->abort());
}

// ---- Opening.

TEST(Ranks, AreRefusedWhereTheyWereGivenDifferentThings) {
  FakeRanksPlace place(false, 2, 2);
  const auto open = [&](const std::function<void(size_t, UpdaterOptions&)>& change) {
    Board board(2);
    std::vector<Status> said(2);
    on_all_ranks(2, [&](size_t rank) {
      UpdaterOptions options = place.options();
      options.collectives = std::make_shared<BoardRank>(board, static_cast<uint32_t>(rank));
      change(rank, options);
      said[rank] = Updater::open(options, contract_space(), place.sources()).status();
    });
    EXPECT_EQ(said[0].to_string(), said[1].to_string());
    return said[0].to_string();
  };
  EXPECT_THAT(open([](size_t rank, UpdaterOptions& options) {
                options.rule.beta1 += 0.01 * static_cast<double>(rank);
              }),
              HasSubstr("ranks 0 and 1 were given different optimizer"));
  EXPECT_THAT(open([](size_t rank, UpdaterOptions& options) {
                options.devices[1].rank = static_cast<uint32_t>(rank);
              }),
              HasSubstr("different devices"));
  EXPECT_THAT(open([](size_t, UpdaterOptions& options) { options.devices[1].rank = 2; }),
              HasSubstr("device drive1 belongs to rank 2, and there are 2 ranks"));
  EXPECT_THAT(open([](size_t rank, UpdaterOptions& options) {
                options.compress.density = 0.1 + 0.1 * static_cast<double>(rank);
                options.compress.residual_every = 0;
              }),
              HasSubstr("different compression"));
  EXPECT_THAT(open([](size_t rank, UpdaterOptions& options) {
                if (rank == 1) options.rule.eps = 0;
              }),
              HasSubstr("rank 1: eps is 0"));
  EXPECT_FALSE(place.drive(0).layout.has_value()) << "nothing was made";
}

TEST(Ranks, OfADeviceThatCannotBeMadeAllHear) {
  FakeRanksPlace place(false, 3, 3);
  place.drive(1).refuse_to_create = true;
  const auto refused = place.open();
  EXPECT_THAT(refused.status().to_string(), HasSubstr("rank 1: drive1: asked to refuse"));
  for (size_t d = 0; d < 3; ++d) EXPECT_FALSE(place.drive(d).layout.has_value());
}

TEST(Ranks, ADeviceThatNoSubgroupFallsToIsLeftOut) {
  FakeRanksPlace place(false, 3, 3);
  place.drive(2).capacity_bytes = 0;
  Outcome outcome;
  for (const int step : {1, 2}) {
    auto crew = place.open();
    ASSERT_TRUE(crew.ok()) << crew.status().to_string();
    if (step == 1) initialize(**crew);
    run_steps(**crew, step, step == 1 ? 1 : kSteps, outcome);
  }
  EXPECT_EQ(outcome.weights, reference(DataType::kBf16).weights);
}

TEST(Ranks, AMissingDeviceIsNamedToAll) {
  FakeRanksPlace place(false, 2, 2);
  {
    auto crew = place.open();
    ASSERT_TRUE(crew.ok());
    initialize(**crew);
  }
  place.drive(1).layout.reset();
  EXPECT_THAT(place.open().status().to_string(),
              HasSubstr("device drive1 holds no optimizer state, but device drive0 holds"));
}

// ---- Failures.

/// A step up to its commit, which goes on.
Status start_step(Updater& updater, int number, const WeightsSink& sink) {
  const auto gradient = contract_gradient(updater.space().count(), number);
  SI_RETURN_IF_ERROR(updater.begin_step());
  for (size_t i = updater.space().ranges().size(); i-- > 0;) {
    const plan::ParameterRange& range = updater.space().ranges()[i];
    SI_RETURN_IF_ERROR(updater.put_gradient(range.first, gradient.data() + range.first,
                                            DataType::kBf16, range.count));
  }
  SI_ASSIGN_OR_RETURN(const GradientSummary summary, updater.finish_gradients(1));
  UpdateOptions options = update_options();
  options.gradient_scale = std::min(1.0, 1 / summary.norm);
  SI_RETURN_IF_ERROR(updater.start_update(options, DataType::kBf16, sink));
  return updater.start_commit("after step " + std::to_string(number));
}

/// A step from beginning to end; the first failure ends it.
Status step(Updater& updater, int number, const WeightsSink& sink) {
  SI_RETURN_IF_ERROR(start_step(updater, number, sink));
  SI_RETURN_IF_ERROR(updater.wait_weights(0, updater.space().count()));
  return updater.wait_commit();
}

/// The same with only the first half of the weights in memory; the others are fetched, some of them
/// once more, as a backward does.
Status streamed_step(Updater& updater, int number, std::vector<base::Bf16>& weights) {
  const uint64_t half = updater.space().count() / 2;
  SI_RETURN_IF_ERROR(start_step(updater, number, [&](uint64_t first) {
    return first < half ? weights.data() + first : nullptr;
  }));
  SI_RETURN_IF_ERROR(updater.wait_weights(0, half));
  std::vector<uint64_t> fetched;
  for (uint64_t at = half; at < updater.space().count();) {
    const plan::Subgroup subgroup = updater.subgroup_at(at);
    if (subgroup.first >= half) fetched.push_back(subgroup.first);
    at = subgroup.first + subgroup.count;
  }
  for (const int times : {1, 2}) {
    for (const uint64_t first : fetched) {
      if (times == 2)
        std::fill_n(weights.begin() + static_cast<ptrdiff_t>(first), 50, base::Bf16{});
      SI_RETURN_IF_ERROR(updater.fetch_weights(first, DataType::kBf16, weights.data() + first));
    }
    for (const uint64_t first : fetched) SI_RETURN_IF_ERROR(updater.wait_fetched(first));
  }
  return updater.wait_commit();
}

/// Two ranks over a model of four subgroups, so that everything can be tried at each moment.
class FailingRanks : public ::testing::Test {
 protected:
  static constexpr size_t kRanks = 2;

  static plan::ParameterSpace two_groups() {
    plan::ParameterSpace space;
    EXPECT_TRUE(space.add("first", {kBlock + 100}, 0).ok());
    EXPECT_TRUE(space.add("second", {3 * kBlock}, 1).ok());
    return space;
  }
  struct Opened {
    std::vector<std::unique_ptr<Updater>> ranks;
    std::vector<Status> said;
  };
  Opened open(Board& board) {
    Opened opened{std::vector<std::unique_ptr<Updater>>(kRanks), std::vector<Status>(kRanks)};
    on_all_ranks(kRanks, [&](size_t rank) {
      UpdaterOptions options = place_.options();
      options.collectives = std::make_shared<BoardRank>(board, static_cast<uint32_t>(rank));
      auto updater = Updater::open(options, model_, place_.sources());
      opened.said[rank] = updater.status();
      if (updater.ok()) opened.ranks[rank] = std::move(*updater);
    });
    return opened;
  }
  static void close(Opened& opened) {
    on_all_ranks(kRanks, [&](size_t rank) { opened.ranks[rank].reset(); });
  }
  static Status fill(uint64_t first, std::span<float> out) {
    for (size_t i = 0; i < out.size(); ++i) out[i] = 0.1f * static_cast<float>((first + i) % 7);
    return Status();
  }
  /// Each rank goes on alone until something fails: opens, makes the first state, takes two steps.
  std::vector<Status> run(Board& board) {
    std::vector<Status> said(kRanks);
    on_all_ranks(kRanks, [&](size_t rank) {
      UpdaterOptions options = place_.options();
      options.collectives = std::make_shared<BoardRank>(board, static_cast<uint32_t>(rank));
      said[rank] = [&]() -> Status {
        SI_ASSIGN_OR_RETURN(auto updater, Updater::open(options, model_, place_.sources()));
        std::vector<base::Bf16> weights(model_.count());
        // Destroyed before the weights.
        const std::unique_ptr<Updater> held = std::move(updater);
        if (held->fresh()) SI_RETURN_IF_ERROR(held->initialize(fill, "start"));
        while (held->committed_step() < 2) {
          SI_RETURN_IF_ERROR(
              streamed_step(*held, static_cast<int>(held->committed_step()) + 1, weights));
        }
        return Status();
      }();
      // A process that ends is seen to be gone.
      if (!said[rank].ok()) options.collectives->failed(said[rank]);
    });
    return said;
  }
  std::vector<std::vector<float>> state_alone() {
    auto alone = Updater::open(place_.options(), model_, place_.sources());
    EXPECT_TRUE(alone.ok()) << alone.status().to_string();
    EXPECT_EQ((*alone)->committed_step(), 2u);
    EXPECT_EQ((*alone)->client_metadata(), "after step 2");
    return all_planes(**alone);
  }

  const plan::ParameterSpace model_ = two_groups();
  FakeRanksPlace place_{true, kRanks, 2};
};

/// A rank dies or hangs at each of its calls in turn; whatever that was, the other one hears who it
/// was, and both go on from where all of them were.
TEST_F(FailingRanks, LoseNoStepAndNameTheRankWhereverItFails) {
  FakeRanksPlace undisturbed(true, kRanks, 2);
  std::swap(place_, undisturbed);
  Board board(kRanks);
  for (const Status& status : run(board)) expect_ok(status);
  const uint64_t calls = board.calls(1);
  const auto expected = state_alone();
  std::swap(place_, undisturbed);
  ASSERT_GT(calls, 50u);

  std::vector<size_t> resumed_from(3, 0);
  const auto fail_at = [&](uint64_t call, Board::Fault fault) {
    SCOPED_TRACE(fmt::format("call {}, fault {}", call, static_cast<int>(fault)));
    place_ = FakeRanksPlace(true, kRanks, 2);
    Board failing(kRanks);
    failing.fail_at(1, call, fault);
    const std::vector<Status> said = run(failing);
    // The other rank may have heard all of the last call, whatever that was.
    EXPECT_FALSE(said[1].ok());
    const bool hangs = fault == Board::Fault::kHangs;
    if (!said[0].ok()) {
      EXPECT_THAT(said[0].to_string(),
                  HasSubstr(hangs ? "rank 1: does not answer" : "rank 1: has died"));
    }
    ++resumed_from[std::min<uint64_t>(place_.drive(1).state.committed_step, 2)];
    Board again(kRanks);
    for (const Status& status : run(again)) expect_ok(status);
    EXPECT_TRUE(state_alone() == expected);
  };
  for (uint64_t call = 0; call < calls; call += base::test_all() && !base::kSanitized ? 1 : 3) {
    fail_at(call, Board::Fault::kDeaf);
    if (call % 4 == 0) fail_at(call, Board::Fault::kDies);
    if (call % 4 == 2) fail_at(call, Board::Fault::kHangs);
  }
  for (const size_t times : resumed_from) EXPECT_GT(times, 0u);
}

TEST_F(FailingRanks, ARankThatComesLateIsWaitedFor) {
  for (const uint64_t call : {3, 30, 60}) {
    place_ = FakeRanksPlace(true, kRanks, 2);
    Board board(kRanks);
    board.fail_at(0, call, Board::Fault::kLate);
    for (const Status& status : run(board)) expect_ok(status);
  }
}

/// Fails each command of a step in turn.
TEST_F(FailingRanks, ADevicesFailureIsHeardByAllAndTheStepTakenBack) {
  FakeRanksPlace undisturbed(true, kRanks, 2);
  std::swap(place_, undisturbed);
  {
    Board board(kRanks);
    for (const Status& status : run(board)) expect_ok(status);
  }
  const auto expected = state_alone();
  std::swap(place_, undisturbed);
  const csd::Message messages[] = {csd::BeginStep{}, csd::PutGradient{}, csd::Update{},
                                   csd::Prepare{}};
  for (const csd::Message& message : messages) {
    SCOPED_TRACE(csd::message_name(message));
    place_ = FakeRanksPlace(true, kRanks, 2);
    Board board(kRanks);
    Opened opened = open(board);
    std::vector<std::vector<base::Bf16>> weights(kRanks, std::vector<base::Bf16>(model_.count()));
    const auto each = [&](const std::function<Status(size_t, Updater&)>& call) {
      std::vector<Status> said(kRanks);
      on_all_ranks(kRanks, [&](size_t rank) { said[rank] = call(rank, *opened.ranks[rank]); });
      EXPECT_EQ(said[0].to_string(), said[1].to_string());
      return said[0];
    };
    const auto take_step = [&](size_t rank, Updater& updater) {
      return step(updater, static_cast<int>(updater.committed_step()) + 1,
                  [&, rank](uint64_t first) { return weights[rank].data() + first; });
    };
    expect_ok(each([](size_t, Updater& updater) { return updater.initialize(fill, "start"); }));
    expect_ok(each(take_step));
    place_.drive(1).fail_next = message;
    const Status failed = each(take_step);
    EXPECT_THAT(failed.to_string(), AllOf(HasSubstr("rank 1"), HasSubstr("drive1")));
    expect_ok(each([](size_t, Updater& updater) { return updater.abort(); }));
    for (const auto& rank : opened.ranks) EXPECT_EQ(rank->committed_step(), 1u);
    expect_ok(each(take_step));
    close(opened);
    EXPECT_TRUE(state_alone() == expected);
  }
}

/// Nobody goes on with weights that are none.
TEST_F(FailingRanks, WeightsThatADeviceCouldNotMakeAreAnErrorOfAll) {
  Board board(kRanks);
  Opened opened = open(board);
  on_all_ranks(kRanks, [&](size_t rank) {
    Updater& updater = *opened.ranks[rank];
    expect_ok(updater.initialize(fill, "start"));
    if (rank == 1) place_.drive(1).fail_next = csd::Update{};
    std::vector<base::Bf16> weights(model_.count());
    expect_ok(start_step(updater, 1, [&](uint64_t first) { return weights.data() + first; }));
    const Status failed = updater.wait_weights(0, model_.count());
    EXPECT_THAT(failed.to_string(), AllOf(HasSubstr("rank 1"), HasSubstr("drive1")));
    EXPECT_FALSE(updater.wait_commit().ok());
    EXPECT_EQ(updater.committed_step(), 0u);
    expect_ok(step(updater, 1, nullptr));
  });
  close(opened);
}

TEST_F(FailingRanks, ACommitThatFailsOnADeviceIsSettledByOpeningAgain) {
  Board board(kRanks);
  place_.drive(1).fail_next.reset();
  Opened opened = open(board);
  on_all_ranks(kRanks, [&](size_t rank) {
    Updater& updater = *opened.ranks[rank];
    expect_ok(updater.initialize(fill, "start"));
    if (rank == 1) place_.drive(1).fail_next = csd::Commit{};
    const Status failed = step(updater, 1, nullptr);
    EXPECT_THAT(failed.to_string(), AllOf(HasSubstr("rank 1"), HasSubstr("drive1")));
    EXPECT_FALSE(updater.begin_step().ok());
  });
  close(opened);
  Board again(kRanks);
  for (const Status& status : run(again)) expect_ok(status);
  state_alone();
}

TEST_F(FailingRanks, CallsThatAreNotTheSameAreAnErrorOfBoth) {
  Board board(kRanks);
  Opened opened = open(board);
  on_all_ranks(kRanks, [&](size_t rank) {
    Updater& updater = *opened.ranks[rank];
    expect_ok(updater.initialize(fill, "start"));
    const Status status = rank == 0 ? updater.begin_step() : updater.flush();
    EXPECT_EQ(status.code(), ErrorCode::kFailedPrecondition);
    EXPECT_THAT(status.to_string(), HasSubstr("rank 0 is at begin_step, and rank 1 at flush"));
  });
  close(opened);
}

/// Else their weights would drift apart without a word.
TEST_F(FailingRanks, UpdatesThatAreNotTheSameAreAnErrorOfBoth) {
  Board board(kRanks);
  Opened opened = open(board);
  on_all_ranks(kRanks, [&](size_t rank) {
    Updater& updater = *opened.ranks[rank];
    expect_ok(updater.initialize(fill, "start"));
    const auto gradient = contract_gradient(model_.count(), 1);
    expect_ok(updater.begin_step());
    expect_ok(updater.put_gradient(0, gradient.data(), DataType::kBf16, gradient.size()));
    expect_ok(updater.finish_gradients(1).status());
    UpdateOptions options = update_options();
    options.groups[1].lr *= static_cast<double>(rank + 1);
    EXPECT_EQ(updater.start_update(options, DataType::kBf16, nullptr).code(),
              ErrorCode::kFailedPrecondition);
    expect_ok(updater.abort());
    EXPECT_EQ(updater.committed_step(), 0u);
  });
  close(opened);
}

/// A visit that fails on one of them.
TEST_F(FailingRanks, AReadThatOneOfThemEndsIsEndedByAll) {
  Board board(kRanks);
  Opened opened = open(board);
  for (const size_t who : {0, 1}) {
    on_all_ranks(kRanks, [&](size_t rank) {
      Updater& updater = *opened.ranks[rank];
      if (updater.fresh()) expect_ok(updater.initialize(fill, "start"));
      const Status status = updater.read_state(1, [&](uint64_t first, auto) {
        return rank == who && first >= kBlock ? Status(ErrorCode::kCancelled, "enough") : Status();
      });
      EXPECT_EQ(status.code(), ErrorCode::kCancelled);
      EXPECT_THAT(status.to_string(), HasSubstr("rank " + std::to_string(who) + ": enough"));
    });
  }
  close(opened);
}

// ---- Checkpoints.

TEST(Ranks, WriteOneCheckpointTogether) {
  RanksPlace place({.name = "", .devices = 3}, 2, false);
  auto crew = place.open_crew();
  ASSERT_TRUE(crew.ok()) << crew.status().to_string();
  initialize(**crew);
  Outcome outcome;
  run_steps(**crew, 1, 2, outcome);
  const auto planes = all_planes(**crew);
  expect_ok((*crew)->flush());
  CheckpointOptions options;
  options.folder = place.path("checkpoints");
  options.trainer = "the trainer's";
  std::vector<CheckpointSummary> made(2);
  for (const bool existed : {false, true}) {
    expect_ok((*crew)->all([&](size_t rank, Updater& updater) -> Status {
      SI_ASSIGN_OR_RETURN(made[rank], write_checkpoint(updater, options));
      return Status();
    }));
    for (const CheckpointSummary& summary : made) {
      EXPECT_EQ(summary.existed, existed);
      EXPECT_EQ(summary.path, made[0].path);
      EXPECT_EQ(summary.step, 2u);
    }
  }
  const auto checkpoint = read_checkpoint(made[0].path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
  EXPECT_EQ(checkpoint->trainer, "the trainer's");
  EXPECT_EQ(checkpoint->devices.size(), 3u);
  auto run = open_checkpoint(*checkpoint);
  ASSERT_TRUE(run.ok()) << run.status().to_string();
  EXPECT_EQ(run->client_metadata, "after step 2");
  ElementReader reader(*run);
  for (size_t plane = 0; plane < planes.size(); ++plane) {
    std::vector<float> values(planes[plane].size());
    expect_ok(reader.read(plane, 0, values));
    EXPECT_TRUE(values == planes[plane]) << "plane " << plane;
  }

  // One of them cannot write: nothing is left of it.
  std::filesystem::create_directory(place.path("other"));
  options.path = place.path("other") + "/taken";
  std::filesystem::create_directory(options.path);
  std::ofstream(options.path + "/file") << "not a checkpoint";
  const Status refused = (*crew)->all(
      [&](size_t, Updater& updater) { return write_checkpoint(updater, options).status(); });
  EXPECT_EQ(refused.code(), ErrorCode::kAlreadyExists) << refused.to_string();
  run_steps(**crew, 3, kSteps, outcome);
  EXPECT_EQ(outcome.weights, reference(DataType::kBf16).weights);
}

// ---- Bytes.

TEST(Ranks, CountWhatTheySendEachOther) {
  FakeRanksPlace place(false, 2, 2);
  auto board = std::make_shared<Board>(2);
  auto crew = place.open_crew(board);
  ASSERT_TRUE(crew.ok());
  initialize(**crew);
  const UpdaterTraffic before = (*crew)->traffic();
  std::vector<base::Bf16> weights((*crew)->space().count());
  expect_ok(step(**crew, 1, [&](uint64_t first) { return weights.data() + first; }));
  const UpdaterTraffic after = (*crew)->traffic().since(before);
  const uint64_t elements = weights.size();
  // Each element's weights go to the one rank that has not got them.
  EXPECT_EQ(after.ranks.down(TrafficKind::kWeight), 2 * elements);
  EXPECT_EQ(after.ranks.up(TrafficKind::kWeight), 2 * elements);
  // Its gradient goes to the one that has; with subgroups as small as a block it goes to the one
  // that measures it as well.
  EXPECT_GE(after.ranks.down(TrafficKind::kGradient), 2 * elements);
  EXPECT_LE(after.ranks.down(TrafficKind::kGradient), 2 * 2 * elements);
  EXPECT_EQ(after.ranks.down(TrafficKind::kGradient), after.ranks.up(TrafficKind::kGradient));
}

}  // namespace
}  // namespace smartinf::engine
