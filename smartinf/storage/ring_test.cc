#include "smartinf/storage/ring.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/storage/file_descriptor.h"

namespace smartinf::storage {
namespace {

using std::chrono::seconds;

/// Every kind of ring keeps the same promises.
class RingTest : public ::testing::TestWithParam<RingKind> {
 protected:
  void SetUp() override {
    if (GetParam() == RingKind::kUring && !probe_uring().ok()) {
      GTEST_SKIP() << probe_uring().to_string();
    }
    auto made = make_ring(RingOptions{GetParam(), 16, 4});
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    ring_ = std::move(*made);
    std::string name = (std::filesystem::temp_directory_path() / "smartinf-ring-XXXXXX").string();
    file_ = FileDescriptor(mkstemp(name.data()));
    ASSERT_TRUE(file_.is_open());
    unlink(name.c_str());
    index_ = *ring_->add_file(file_.get(), name);
    memory_ = std::move(*base::AlignedBuffer::allocate(1 << 20));
  }

  IoRequest request(IoOp op, uint64_t offset, std::span<std::byte> buffer) {
    IoRequest made;
    made.op = op;
    made.file = index_;
    made.offset_bytes = offset;
    made.buffer = buffer;
    return made;
  }

  int64_t run(IoRequest& one) {
    IoRequest* pointer = &one;
    EXPECT_TRUE(ring_->submit({&pointer, 1}).ok());
    IoRequest* done = nullptr;
    const auto count = ring_->reap({&done, 1}, seconds(10));
    EXPECT_TRUE(count.ok() && *count == 1);
    EXPECT_EQ(done, &one);
    return one.outcome;
  }

  std::unique_ptr<Ring> ring_;
  FileDescriptor file_;
  uint32_t index_ = 0;
  base::AlignedBuffer memory_;
};

TEST_P(RingTest, ReadsWhatWasWritten) {
  const std::span<std::byte> out = memory_.bytes().first(8192);
  const std::span<std::byte> in = memory_.bytes().subspan(8192, 8192);
  for (const IoOp op : {IoOp::kWrite, IoOp::kWriteDurable}) {
    std::memset(out.data(), op == IoOp::kWrite ? 1 : 2, out.size());
    IoRequest write = request(op, 4096, out);
    EXPECT_EQ(run(write), 8192);
    IoRequest read = request(IoOp::kRead, 4096, in);
    EXPECT_EQ(run(read), 8192);
    EXPECT_EQ(std::memcmp(in.data(), out.data(), in.size()), 0);
  }
  IoRequest sync = request(IoOp::kSync, 0, {});
  EXPECT_EQ(run(sync), 0);
}

TEST_P(RingTest, RegisteredMemoryGivesTheSame) {
  (void)ring_->register_memory(memory_.bytes().first(65536));
  (void)ring_->register_memory(memory_.bytes().subspan(65536, 65536));
  // Within the first, within the second, across both, outside both.
  for (const uint64_t at : {0u, 65536u, 61440u, 262144u}) {
    std::memset(memory_.data() + at, static_cast<int>(at >> 12), 8192);
    IoRequest write = request(IoOp::kWrite, at, memory_.bytes().subspan(at, 8192));
    EXPECT_EQ(run(write), 8192);
    std::vector<std::byte> back(8192);
    IoRequest read = request(IoOp::kRead, at, back);
    EXPECT_EQ(run(read), 8192);
    EXPECT_EQ(std::memcmp(back.data(), memory_.data() + at, 8192), 0) << at;
  }
}

TEST_P(RingTest, ManyAtOnceAllComplete) {
  std::array<IoRequest, 16> requests;
  std::array<IoRequest*, 16> pointers;
  for (size_t round = 0; round < 20; ++round) {
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i] = request(IoOp::kWrite, i * 4096, memory_.bytes().subspan(i * 4096, 4096));
      pointers[i] = &requests[i];
    }
    ASSERT_TRUE(ring_->submit(pointers).ok());
    size_t finished = 0;
    std::array<IoRequest*, 5> done{};
    while (finished < requests.size()) {
      const auto count = ring_->reap(done, seconds(10));
      ASSERT_TRUE(count.ok());
      ASSERT_GT(*count, 0u);
      for (size_t i = 0; i < *count; ++i) EXPECT_EQ(done[i]->outcome, 4096);
      finished += *count;
    }
    EXPECT_EQ(finished, requests.size());
  }
}

TEST_P(RingTest, ReportsErrnoAndShortReads) {
  IoRequest beyond = request(IoOp::kRead, 1 << 20, memory_.bytes().first(4096));
  EXPECT_EQ(run(beyond), 0);
  ASSERT_EQ(ftruncate(file_.get(), 1000), 0);
  IoRequest cut = request(IoOp::kRead, 0, memory_.bytes().first(4096));
  EXPECT_EQ(run(cut), 1000);
  const int closed =
      static_cast<int>(*ring_->add_file(open("/dev/null", O_RDONLY | O_CLOEXEC), ""));
  IoRequest denied = request(IoOp::kWrite, 0, memory_.bytes().first(4096));
  denied.file = static_cast<uint32_t>(closed);
  EXPECT_EQ(run(denied), -EBADF);
}

TEST_P(RingTest, WaitsNoLongerThanTold) {
  IoRequest* done = nullptr;
  const auto none = ring_->reap({&done, 1}, seconds(3600));
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(*none, 0u);  // nothing is in flight: nothing to wait for
}

INSTANTIATE_TEST_SUITE_P(Kinds, RingTest, ::testing::Values(RingKind::kUring, RingKind::kThreads),
                         [](const auto& kind) {
                           return kind.param == RingKind::kUring ? "uring" : "threads";
                         });

TEST(MakeRing, AutoAlwaysGivesOne) {
  const auto ring = make_ring(RingOptions{});
  ASSERT_TRUE(ring.ok());
  EXPECT_EQ((*ring)->name(), probe_uring().ok() ? "io_uring" : "threads");
}

}  // namespace
}  // namespace smartinf::storage
