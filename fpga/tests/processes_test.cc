// The simulation itself: what hardware would not forgive must not pass here.
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <hls_stream.h>

namespace software {
namespace {

TEST(Processes, OrderIsKeptWhateverStalls) {
  for (uint64_t seed = 1; seed < 50; ++seed) {
    Simulation run({.seed = seed, .stall_one_in = 2, .stream_depth = static_cast<int>(seed % 4)});
    hls::stream<int, 3> numbers("numbers");
    std::vector<int> came;
    run.start("writer", [&] {
      for (int i = 0; i < 100; ++i) numbers.write(i);
    });
    run.start("reader", [&] {
      for (int i = 0; i < 100; ++i) came.push_back(numbers.read());
    });
    ASSERT_EQ(run.run(), "");
    for (int i = 0; i < 100; ++i) ASSERT_EQ(came[static_cast<size_t>(i)], i);
  }
}

// One path of two holds back more than the other has room for.
TEST(Processes, ADeadlockIsFoundAndNamed) {
  for (const int depth : {4, 10}) {
    Simulation run({.seed = 1, .stall_one_in = 0, .stream_depth = depth});
    hls::stream<int> straight("straight");
    hls::stream<int> around("around");
    hls::stream<int> back("back");
    run.start("fork", [&] {
      for (int i = 0; i < 40; ++i) {
        straight.write(i);
        around.write(i);
      }
    });
    run.start("eight at once", [&] {
      for (int i = 0; i < 40; i += 8) {
        for (int k = 0; k < 8; ++k) around.read();
        for (int k = 0; k < 8; ++k) back.write(k);
      }
    });
    run.start("join", [&] {
      for (int i = 0; i < 40; ++i) {
        back.read();
        straight.read();
      }
    });
    const std::string said = run.run();
    if (depth == 10) {
      EXPECT_EQ(said, "");
    } else {
      EXPECT_NE(said.find("fork waits for room in straight"), std::string::npos) << said;
      EXPECT_NE(said.find("eight at once waits for an element in around"), std::string::npos);
      EXPECT_NE(said.find("join waits for an element in back"), std::string::npos);
    }
  }
}

TEST(Processes, AStreamHasOneWriter) {
  Simulation run({});
  hls::stream<int, 8> numbers("numbers");
  run.start("one", [&] { numbers.write(1); });
  run.start("two", [&] { numbers.write(2); });
  EXPECT_NE(run.run().find("a second process writes"), std::string::npos);
}

TEST(Processes, ARegionEndsWithItsProcesses) {
  Simulation run({.seed = 3, .stall_one_in = 2, .stream_depth = 0});
  int ended = 0;
  run.start("owner", [&] {
    hls::stream<int> numbers("numbers");
    {
      Region region;
      region.start("writer", [&] {
        for (int i = 0; i < 9; ++i) numbers.write(i);
        ++ended;
      });
      region.start("reader", [&] {
        for (int i = 0; i < 9; ++i) numbers.read();
        ++ended;
      });
    }
    EXPECT_EQ(ended, 2);
  });
  EXPECT_EQ(run.run(), "");
}

}  // namespace
}  // namespace software
