#include "smartinf/serve/reliable_link.h"

#include <array>
#include <deque>
#include <memory>
#include <random>

#include <gtest/gtest.h>

namespace smartinf::serve::wire {
namespace {

/// A frame's content is its place among those of its side: moved, so that one is there once.
using Frame = std::unique_ptr<uint64_t>;
using Link = ReliableLink<Frame>;

/// Traffic in one direction of a connection: frames and acknowledgements in order, of which a break
/// takes the last ones.
struct OnTheWay {
  uint64_t number = 0;  // 0: an acknowledgement
  uint64_t value = 0;   // of it
};

struct Side {
  Link link;
  uint64_t put = 0;
  uint64_t came = 0;
  std::deque<OnTheWay> pipe;  // to the other side
};

void send_some(Side& side, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    if (side.link.ack_due()) side.pipe.push_back({0, side.link.ack()});
    if (!side.link.has_next()) return;
    const auto [number, frame] = side.link.next();
    side.pipe.push_back({number, *frame});
  }
}

void receive_some(Side& from, Side& to, uint64_t count) {
  for (uint64_t i = 0; i < count && !from.pipe.empty(); ++i) {
    const OnTheWay came = from.pipe.front();
    from.pipe.pop_front();
    if (came.number == 0) {
      ASSERT_TRUE(to.link.acknowledge(came.value).has_value());
      continue;
    }
    const Link::Came what = to.link.take(came.number, 1000);
    ASSERT_NE(what, Link::Came::kGap);
    if (what == Link::Came::kNew) {
      ASSERT_EQ(came.value, to.came) << "each once and in order";
      ++to.came;
    }
  }
}

TEST(ReliableLink, EachFrameComesOnceAndInOrderOverConnectionsThatBreak) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](uint64_t bound) { return uint64_t{random()} % bound; };
    std::array<Side, 2> sides;
    const auto connect_again =
        [&] {  // both say how far they are, which the next break may cut short
          for (Side& side : sides) side.pipe.clear();
          for (size_t i = 0; i < 2; ++i) {
            if (below(4) == 0) return false;
            EXPECT_TRUE(sides[i].link.resume(sides[1 - i].link.ack()).has_value());
          }
          return true;
        };
    for (int round = 0; round < 200; ++round) {
      for (Side& side : sides) {
        for (uint64_t i = below(40); i > 0; --i) {
          ++side.put;
          ASSERT_EQ(side.link.put(std::make_unique<uint64_t>(side.put - 1)), side.put);
        }
        send_some(side, below(40));
      }
      receive_some(sides[0], sides[1], below(40));
      receive_some(sides[1], sides[0], below(40));
      if (below(5) == 0) {
        while (!connect_again()) {
        }
      }
    }
    for (int round = 0; round < 2; ++round) {
      for (Side& side : sides) send_some(side, side.put + 1);
      receive_some(sides[0], sides[1], ~uint64_t{0});
      receive_some(sides[1], sides[0], ~uint64_t{0});
    }
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(sides[i].came, sides[1 - i].put);
      EXPECT_LT(sides[i].link.kept(), 128u) << "what came is let go";
      EXPECT_TRUE(sides[i].link.acknowledge(sides[1 - i].link.ack()).has_value());
      EXPECT_EQ(sides[i].link.kept(), 0u);
    }
  }
}

TEST(ReliableLink, WhatCannotBeIsRefused) {
  ReliableLink<int> link;
  EXPECT_EQ(link.last(), 0u);
  EXPECT_FALSE(link.acknowledge(1).has_value());
  link.put(7);
  link.put(8);
  EXPECT_EQ(link.next().number, 1u);
  EXPECT_FALSE(link.acknowledge(2).has_value()) << "of what was not sent";
  EXPECT_FALSE(link.resume(2).has_value());
  EXPECT_FALSE(link.resume(~uint64_t{0}).has_value());
  EXPECT_EQ(link.next().frame, 8);
  EXPECT_EQ(link.resume(0)->size(), 0u);
  EXPECT_EQ(link.next().frame, 7) << "sent again";
  EXPECT_EQ(link.acknowledge(2)->size(), 2u) << "it came over the first connection";
  EXPECT_FALSE(link.has_next());
  EXPECT_FALSE(link.resume(1).has_value()) << "it was let go";
  EXPECT_TRUE(link.resume(2).has_value());

  EXPECT_EQ(link.take(2, 1), ReliableLink<int>::Came::kGap);
  EXPECT_EQ(link.take(1, 1), ReliableLink<int>::Came::kNew);
  EXPECT_EQ(link.take(1, 1), ReliableLink<int>::Came::kAgain);
  EXPECT_EQ(link.received(), 1u);
  EXPECT_FALSE(link.ack_due());
  link.take(2, uint64_t{4} << 20);
  EXPECT_TRUE(link.ack_due());
  EXPECT_EQ(link.ack(), 2u);
  EXPECT_FALSE(link.ack_due());
}

}  // namespace
}  // namespace smartinf::serve::wire
