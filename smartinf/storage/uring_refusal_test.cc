// io_uring that takes no requests: for a while, or for good. Its submission is put off here, in
// front of liburing's own.
#include <array>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "smartinf/storage/file_descriptor.h"
#include "smartinf/storage/transfer_queue.h"

struct io_uring;

namespace {
std::atomic<int> refusals{0};  // so many submissions are refused...
std::atomic<int> with_errno{EAGAIN};
std::atomic<int> refused{0};
}  // namespace

extern "C" int io_uring_submit(io_uring* ring) {
  using Submit = int (*)(io_uring*);
  static const auto next = reinterpret_cast<Submit>(dlsym(RTLD_NEXT, "io_uring_submit"));
  if (refusals > 0) {
    --refusals;
    ++refused;
    return -with_errno;
  }
  return next(ring);
}

namespace smartinf::storage {
namespace {

class UringRefusal : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!probe_uring().ok()) GTEST_SKIP() << probe_uring().to_string();
    std::string name = (std::filesystem::temp_directory_path() / "smartinf-uring-XXXXXX").string();
    file_ = FileDescriptor(mkstemp(name.data()));
    ASSERT_TRUE(file_.is_open());
    (void)unlink(name.c_str());
    ASSERT_EQ(ftruncate(file_.get(), 1 << 20), 0);
    RingOptions options;
    options.kind = RingKind::kUring;
    options.depth = 8;
    auto ring = make_ring(options);
    ASSERT_TRUE(ring.ok()) << ring.status().to_string();
    ASSERT_TRUE((*ring)->add_file(file_.get(), "the file").ok());
    queue_ = std::make_unique<TransferQueue>(std::move(*ring), 0, "the file", false,
                                             std::chrono::seconds(60));
    buffer_ = std::move(*base::AlignedBuffer::allocate(8 * 4096));
  }
  void TearDown() override { refusals = 0; }

  /// Reads with all transfers at once; how each of them ended.
  std::vector<base::Status> read_all() {
    std::array<Transfer, 8> transfers;
    for (size_t i = 0; i < transfers.size(); ++i) {
      transfers[i].offset_bytes = i * 4096;
      transfers[i].buffer = buffer_.bytes().subspan(i * 4096, 4096);
      queue_->start(transfers[i]);
    }
    while (queue_->in_flight() > 0) {
      std::array<Transfer*, 3> done{};
      const auto count = queue_->finish(done, std::chrono::seconds(10));
      EXPECT_TRUE(count.ok()) << count.status().to_string();
      if (!count.ok()) break;
    }
    std::vector<base::Status> ends;
    for (Transfer& transfer : transfers) ends.push_back(std::move(transfer.status));
    return ends;
  }

  FileDescriptor file_;
  std::unique_ptr<TransferQueue> queue_;
  base::AlignedBuffer buffer_;
};

TEST_F(UringRefusal, ForAWhileIsWaitedOut) {
  refused = 0;
  refusals = 5;
  for (const base::Status& status : read_all()) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(refused, 5);
}

TEST_F(UringRefusal, ForGoodIsATypedErrorAfterABoundedTime) {
  with_errno = EAGAIN;
  refusals = 1 << 30;
  for (int again = 0; again < 2; ++again) {
    for (const base::Status& status : read_all()) {
      EXPECT_EQ(status.place().system_errno, EAGAIN);
      EXPECT_EQ(status.place().path, "the file");
      EXPECT_TRUE(status.place().offset_bytes.has_value());
      EXPECT_FALSE(status.advice().empty());
    }
  }
  EXPECT_LT(refused, 100) << "asked a bounded number of times";
  refusals = 0;
  EXPECT_TRUE(queue_->close().ok()) << "nothing is in flight";
}

}  // namespace
}  // namespace smartinf::storage
