// Groups and pairs of ranks, over the board that stands for processes in tests.
// tests/rank_calls_test.py has the same over processes.
#include "smartinf/engine/ranks/collectives.h"

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/ranks/test_collectives.h"

namespace smartinf::engine {
namespace {

using base::Status;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename Body>
void on_ranks(Board& board, uint32_t world, const Body& body) {
  std::vector<std::jthread> threads;
  for (uint32_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      BoardRank ranks(board, rank);
      body(ranks);
    });
  }
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(Collectives, AGroupCallsAmongItselfInItsOrder) {
  Board board(4);
  std::array<std::vector<std::string>, 4> heard;
  on_ranks(board, 4, [&](Collectives& ranks) {
    const std::array<uint32_t, 2> back{3, 1};
    const std::array<uint32_t, 2> front{0, 2};
    auto one = ranks.group(back);
    auto other = ranks.group(front);
    ASSERT_TRUE(one.ok() && other.ok());
    const bool in_back = ranks.rank() % 2 == 1;
    EXPECT_EQ(*one == nullptr, !in_back);
    Collectives& mine = in_back ? **one : **other;
    auto texts = all_gather(mine, Channel::kControl, std::to_string(ranks.rank()));
    ASSERT_TRUE(texts.ok());
    heard[ranks.rank()] = *texts;
    EXPECT_EQ(mine.rank_of_run(mine.rank()), ranks.rank());
    EXPECT_EQ(mine.group(front).status().code(), base::ErrorCode::kUnsupported);
  });
  EXPECT_THAT(heard[3], ElementsAre("3", "1"));
  EXPECT_EQ(heard[1], heard[3]);
  EXPECT_THAT(heard[0], ElementsAre("0", "2"));
}

TEST(Collectives, MessagesOfAPairComeInTheirOrderBesideOtherCalls) {
  Board board(2);
  on_ranks(board, 2, [&](Collectives& ranks) {
    const std::array<std::string, 2> texts{"first", "later"};
    std::array<std::string, 2> came{"     ", "     "};
    std::vector<std::unique_ptr<Collectives::Pending>> pending;
    // Rank 1 asks for them before the collective call, rank 0 sends them behind it.
    if (ranks.rank() == 0) {
      ASSERT_TRUE(ranks.barrier(Channel::kGradients).ok());
    }
    for (size_t i = 0; i < 2; ++i) {
      auto started =
          ranks.rank() == 0
              ? ranks.send(Channel::kGradients, bytes_of(texts[i]), 1)
              : ranks.receive(Channel::kGradients, std::as_writable_bytes(std::span(came[i])), 0);
      ASSERT_TRUE(started.ok());
      pending.push_back(std::move(*started));
    }
    if (ranks.rank() == 1) {
      ASSERT_TRUE(ranks.barrier(Channel::kGradients).ok());
    }
    for (const auto& one : pending) EXPECT_TRUE(one->wait().ok());
    if (ranks.rank() == 1) {
      EXPECT_EQ(came, texts);
    }
  });
}

TEST(Collectives, WhoFailsIsNamedToAGroupAndAPairByItsNumberInTheRun) {
  Board board(3);
  on_ranks(board, 3, [&](Collectives& ranks) {
    const std::array<uint32_t, 2> members{1, 2};
    auto group = ranks.group(members);
    ASSERT_TRUE(group.ok());
    if (ranks.rank() == 0) return;
    const Status mine = ranks.rank() == 2 ? Status(base::ErrorCode::kNoSpace, "is full") : Status();
    EXPECT_THAT(all_ok(**group, Channel::kControl, "call", mine).what(),
                HasSubstr("rank 2: is full"));
    std::array<std::byte, 4> bytes{};
    if (ranks.rank() == 2) {
      ranks.failed(Status(base::ErrorCode::kIo, "has died"));
      return;
    }
    auto message = (*group)->receive(Channel::kWeights, bytes, 1);
    const Status status = message.ok() ? (*message)->wait() : message.status();
    EXPECT_THAT(status.what(), HasSubstr("rank 2: has died"));
  });
}

}  // namespace
}  // namespace smartinf::engine
