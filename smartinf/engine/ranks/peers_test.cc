// Ranks that have a run each and make every step together: one commit, one norm, one recovery.
#include "smartinf/engine/ranks/peers.h"

#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/fake_source.h"
#include "smartinf/engine/ranks/test_collectives.h"
#include "smartinf/engine/ranks/test_crew.h"
#include "smartinf/engine/test_model.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using base::StepNumber;
using testing::HasSubstr;

constexpr size_t kRanks = 2;
const Status kNotOpened(ErrorCode::kCancelled, "not opened");

/// Two ranks, each with a device, which outlives every opening.
class Peers {
 public:
  using Opened = std::array<Result<std::unique_ptr<Updater>>, kRanks>;

  Peers() {
    for (auto& drive : drives_) drive = std::make_shared<FakeDrive>();
  }
  /// One opening, over a new board.
  Opened open() {
    board_ = std::make_shared<Board>(kRanks);
    Opened opened = {kNotOpened, kNotOpened};
    on_all_ranks(kRanks, [&](size_t rank) {
      UpdaterOptions options;
      options.peers = std::make_shared<BoardRank>(*board_, static_cast<uint32_t>(rank));
      opened[rank] = Updater::open(options, space(rank), sources(rank));
    });
    return opened;
  }
  DeviceSources sources(size_t rank) {
    DeviceSources sources;
    sources.push_back(std::make_unique<FakeSource>(drives_[rank], fmt::format("device{}", rank)));
    return sources;
  }
  static plan::ParameterSpace space(size_t rank) {
    plan::ParameterSpace space;
    EXPECT_TRUE(space.add(fmt::format("part{}", rank), {kBlock * (rank + 1)}, 0).ok());
    return space;
  }
  Board& board() { return *board_; }
  FakeDrive& drive(size_t rank) { return *drives_[rank]; }

 private:
  std::array<std::shared_ptr<FakeDrive>, kRanks> drives_;
  std::shared_ptr<Board> board_;
};

std::vector<Status> on_each(Peers::Opened& opened,
                            const std::function<Status(size_t, Updater&)>& call) {
  std::vector<Status> said(kRanks);
  on_all_ranks(kRanks, [&](size_t rank) { said[rank] = call(rank, **opened[rank]); });
  return said;
}

void close(Peers::Opened& opened) {
  on_all_ranks(kRanks, [&](size_t rank) { opened[rank] = kNotOpened; });
}

Status initialize_rank(size_t, Updater& updater) {
  return updater.initialize(
      [](uint64_t, std::span<float> out) {
        std::ranges::fill(out, 1.0f);
        return Status();
      },
      "start");
}

/// norm: of all ranks, where it is asked for.
Status step(size_t, Updater& updater, double* norm = nullptr) {
  const uint64_t count = updater.space().count();
  const std::vector<float> gradient(count, 0.5f);
  SI_RETURN_IF_ERROR(updater.begin_step());
  SI_RETURN_IF_ERROR(updater.put_gradient(0, gradient.data(), DataType::kF32, count));
  SI_ASSIGN_OR_RETURN(const GradientSummary summary, updater.finish_gradients(1));
  if (norm != nullptr) *norm = summary.norm;
  UpdateOptions options;
  options.groups.resize(1);
  SI_RETURN_IF_ERROR(updater.start_update(options, DataType::kF32, nullptr));
  SI_RETURN_IF_ERROR(updater.start_commit("a step"));
  return updater.wait_commit();
}

TEST(Peers, AStepIsCommittedOnAllWithTheNormOfAll) {
  Peers peers;
  auto opened = peers.open();
  for (const Status& said : on_each(opened, initialize_rank)) expect_ok(said);
  std::array<double, kRanks> norms{};
  for (const Status& said :
       on_each(opened, [&](size_t rank, Updater&one) { return step(rank, one, &norms[rank]); })) {
    expect_ok(said);
  }
  EXPECT_EQ(norms[0], norms[1]);
  EXPECT_DOUBLE_EQ(norms[0], 0.5 * std::sqrt(3.0 * kBlock));
  close(opened);
  opened = peers.open();
  for (const auto& rank : opened) {
    expect_ok(rank.status());
    EXPECT_EQ((*rank)->committed_step(), 1u);
    EXPECT_EQ((*rank)->client_metadata(), "a step");
  }
}

TEST(Peers, WhatOneRankFailsWithIsTheErrorOfAllAndNobodyCommits) {
  Peers peers;
  auto opened = peers.open();
  for (const Status& said : on_each(opened, initialize_rank)) expect_ok(said);
  const auto edit = [](size_t failing) {
    return [failing](size_t rank, Updater& updater) {
      return updater.edit_state(
          [&](uint64_t, std::span<const std::span<float>>) -> Result<bool> {
            if (rank == failing) return Status(ErrorCode::kCancelled, "no more");
            return true;
          },
          "edited");
    };
  };
  for (const Status& said : on_each(opened, edit(1))) {
    EXPECT_EQ(said.code(), ErrorCode::kCancelled);
    EXPECT_THAT(said.to_string(), HasSubstr("rank 1: no more"));
  }
  const auto without_gradient = on_each(opened, [](size_t rank, Updater& updater) {
    SI_RETURN_IF_ERROR(updater.begin_step());
    if (rank == 0) {
      const std::vector<float> gradient(updater.space().count());
      expect_ok(updater.put_gradient(0, gradient.data(), DataType::kF32, gradient.size()));
    }
    return updater.finish_gradients(1).status();
  });
  for (const Status& said : without_gradient) {
    EXPECT_THAT(said.to_string(), HasSubstr("rank 1: "));
    EXPECT_THAT(said.to_string(), HasSubstr("part1"));
  }
  for (const Status& said : on_each(opened, [](size_t, Updater& one) { return one.abort(); })) {
    expect_ok(said);
  }
  for (const auto& rank : opened) EXPECT_EQ((*rank)->committed_step(), 0u);
  for (const Status& said : on_each(opened, edit(kRanks))) expect_ok(said);
  for (const auto& rank : opened) EXPECT_EQ((*rank)->committed_step(), 1u);
}

// At each of its collective calls, so also between prepare and commit, and between commit and the
// answer that all have committed.
TEST(Peers, ARankThatDiesLeavesAllOnOneSideOfTheStep) {
  size_t rolled_forward = 0, rolled_back = 0;
  for (const auto fault : {Board::Fault::kDies, Board::Fault::kHangs, Board::Fault::kDeaf}) {
    for (uint64_t call = 0;; ++call) {
      SCOPED_TRACE(fmt::format("call {}", call));
      Peers peers;
      auto opened = peers.open();
      for (const Status& said : on_each(opened, initialize_rank)) expect_ok(said);
      const uint64_t before = peers.board().calls(1);
      peers.board().fail_at(1, before + call, fault);
      const std::vector<Status> said =
          on_each(opened, [](size_t rank, Updater& one) { return step(rank, one); });
      if (peers.board().calls(1) <= before + call) break;  // the step has fewer calls
      if (!said[0].ok()) {
        EXPECT_THAT(said[0].to_string(), HasSubstr("rank 1"));
      }
      close(opened);
      opened = peers.open();
      for (const auto& rank : opened) expect_ok(rank.status());
      const StepNumber recovered = (*opened[0])->committed_step();
      EXPECT_EQ((*opened[1])->committed_step(), recovered);
      if (said[0].ok() || said[1].ok()) {
        EXPECT_EQ(recovered, 1u);
      }
      ++(recovered == 1 ? rolled_forward : rolled_back);
      for (const Status& again :
           on_each(opened, [](size_t rank, Updater&one) { return step(rank, one); })) {
        expect_ok(again);
      }
      ASSERT_LT(call, 100u);
    }
  }
  EXPECT_GT(rolled_forward, 0u);
  EXPECT_GT(rolled_back, 0u);
}

// ---- Recovery.

/// (initialized, committed, prepared); none: empty.
using Holding = std::optional<std::tuple<bool, StepNumber, StepNumber>>;

class Looked final : public DeviceSource {
 public:
  Looked(Holding holding, bool& erased) : holding_(holding), erased_(erased) {}
  const std::string& name() const override { return name_; }
  std::string place() const override { return name_; }
  Result<std::optional<storage::StoreState>> peek() override {
    if (!holding_) return std::optional<storage::StoreState>();
    storage::StoreState state;
    std::tie(state.initialized, state.committed_step, state.prepared_step) = *holding_;
    return std::optional(state);
  }
  Result<double> bandwidth() override { return 1.0; }
  Result<uint64_t> capacity_bytes() override { return uint64_t{0}; }
  Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout&,
                                              const DeviceShare&) override {
    return Status(ErrorCode::kUnsupported, "");
  }
  Result<std::unique_ptr<csd::Device>> open(const DeviceShare&) override {
    return Status(ErrorCode::kUnsupported, "");
  }
  Status erase() override {
    erased_ = true;
    return Status();
  }

 private:
  const std::string name_ = "looked at";
  const Holding holding_;
  bool& erased_;
};

TEST(Peers, RecoverToTheNewestStepThatAllHavePrepared) {
  struct Case {
    Holding first, second;
    std::optional<StepNumber> step;
    std::string error;
    bool erased = false;
  };
  const auto holds = [](StepNumber committed, StepNumber prepared) {
    return Holding({true, committed, prepared});
  };
  const Case cases[] = {
      {{}, {}, {}, ""},
      {holds(4, 5), holds(5, 5), 5, ""},  // the other has committed what is prepared here
      {holds(5, 5), holds(4, 5), 5, ""},
      {holds(4, 5), holds(4, 4), 4, ""},  // aborted there
      {holds(4, 5), holds(4, 5), 5, ""},  // nobody has committed, all could
      {holds(3, 4), holds(5, 5), {}, "older copy"},
      {holds(3, 4), {}, {}, "rank 1: empty"},
      {holds(0, 0), {}, {}, "", true},  // killed while the run was made
      {holds(0, 0), Holding({false, 0, 0}), {}, "", true},
  };
  for (const Case& one : cases) {
    Board board(kRanks);
    std::array<bool, kRanks> erased{};
    std::vector<Result<std::optional<StepNumber>>> found(kRanks, kNotOpened);
    on_all_ranks(kRanks, [&](size_t rank) {
      BoardRank peer(board, static_cast<uint32_t>(rank));
      DeviceSources sources;
      sources.push_back(std::make_unique<Looked>(rank == 0 ? one.first : one.second, erased[rank]));
      found[rank] = agree_on_step(peer, sources);
    });
    for (const auto& step : found) {
      EXPECT_EQ(step.ok(), one.error.empty());
      if (step.ok()) {
        EXPECT_EQ(*step, one.step);
      } else {
        EXPECT_EQ(step.status().code(), ErrorCode::kMismatch);
        EXPECT_THAT(step.status().to_string(), HasSubstr(one.error));
      }
    }
    EXPECT_EQ(erased[0], one.erased);
  }
}

TEST(Peers, DevicesOfAnotherRunAreRefused) {
  Peers peers, others;
  for (Peers* each : {&peers, &others}) {
    auto opened = each->open();
    for (const Status& said : on_each(opened, initialize_rank)) expect_ok(said);
    if (each == &others) {
      const auto said = on_each(opened, [](size_t, Updater& updater) {
        return updater.edit_state(nullptr, "of another run");
      });
      for (const Status& status : said) expect_ok(status);
    } else {
      for (const Status& said :
           on_each(opened, [](size_t rank, Updater&one) { return step(rank, one); })) {
        expect_ok(said);
      }
    }
    close(opened);
  }
  std::swap(peers.drive(1), others.drive(1));
  for (const auto& rank : peers.open()) {
    EXPECT_EQ(rank.status().code(), ErrorCode::kMismatch);
    EXPECT_THAT(rank.status().to_string(), HasSubstr("states of different runs"));
  }
}

}  // namespace
}  // namespace smartinf::engine
