// The spool: room beside the state whose contents are of this process only.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "smartinf/storage/container.h"
#include "smartinf/storage/memory_store_test.h"
#include "smartinf/storage/store_test.h"

namespace smartinf::storage {
namespace {

using ::testing::HasSubstr;

class SpoolTest : public StoreTest {
 protected:
  static constexpr uint64_t kBytes = 512 * 1024;

  base::AlignedBuffer filled(uint64_t bytes, uint64_t seed) {
    auto buffer = base::AlignedBuffer::allocate(bytes);
    fill(buffer->bytes(), seed);
    return std::move(*buffer);
  }
  base::Status move(SubgroupIo::Op op, uint64_t offset, const base::AlignedBuffer& buffer) {
    SubgroupIo io;
    io.op = op;
    io.spool_offset_bytes = offset;
    io.buffer = buffer.bytes();
    return transfer(io);
  }
  base::Status expect_spooled(uint64_t offset, uint64_t bytes, uint64_t seed) {
    const auto wanted = filled(bytes, seed);
    const auto found = base::AlignedBuffer::allocate(bytes);
    SI_RETURN_IF_ERROR(move(SubgroupIo::Op::kReadSpool, offset, *found));
    EXPECT_EQ(std::memcmp(found->data(), wanted.data(), bytes), 0) << "at " << offset;
    return base::Status();
  }
};

TEST_P(SpoolTest, WhatComesBackIsWhatWentWhileStepsAreCommittedAndAborted) {
  options_.spool_bytes = kBytes;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_EQ(store_->spool_bytes(), kBytes);
  const auto first = filled(200 * 1024, 1);
  const auto second = filled(kBytes - 200 * 1024, 2);
  ASSERT_TRUE(move(SubgroupIo::Op::kWriteSpool, 0, first).ok());
  make_step(0, "zero");
  ASSERT_TRUE(move(SubgroupIo::Op::kWriteSpool, 200 * 1024, second).ok());
  store_->begin_step(1);
  ASSERT_TRUE(write(base::SubgroupId{3}, 99).ok());
  ASSERT_TRUE(store_->abort(1).ok());
  expect_step(0);
  EXPECT_TRUE(expect_spooled(200 * 1024, kBytes - 200 * 1024, 2).ok());
  EXPECT_TRUE(expect_spooled(0, 200 * 1024, 1).ok());
  EXPECT_EQ(store_->traffic().down(base::TrafficKind::kActivation), kBytes);
  EXPECT_EQ(store_->traffic().up(base::TrafficKind::kActivation), kBytes);
  reopen();
  ASSERT_TRUE(store_->recover_to(0).ok());
  expect_step(0);
}

TEST_P(SpoolTest, ItsFileIsSeenByNobodyAndItsSpaceIsTakenAtOnce) {
  const auto names = [&] {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      found.push_back(entry.path().filename().string());
    }
    return found;
  };
  create();
  make_step(0, "");
  const auto before = names();
  store_.reset();
  // Files left by a process that ends between making the file and taking its name away.
  std::filesystem::copy(std::filesystem::path(path_) / kLockFileName,
                        std::filesystem::path(path_) / kSpoolFileName);
  options_.spool_bytes = 64 * base::kMiB;
  reopen();
  EXPECT_THAT(names(), ::testing::UnorderedElementsAreArray(before));
  uint64_t taken = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iterator's own
    const auto target = std::filesystem::read_symlink(entry, gone).string();
    struct stat info {};
    if (target.find(kSpoolFileName) == std::string::npos) continue;
    ASSERT_EQ(stat(entry.path().c_str(), &info), 0);
    taken += static_cast<uint64_t>(info.st_blocks) * 512;
  }
  EXPECT_GE(taken, options_.spool_bytes);
}

TEST_P(SpoolTest, TooLargeASpoolSaysWhatItNeedsAndWhatIsFree) {
  options_.spool_bytes = uint64_t{1} << 52;
  const auto made = Store::create(path_, layout_, options_);
  ASSERT_EQ(made.status().code(), base::ErrorCode::kNoSpace) << made.status().to_string();
  EXPECT_THAT(made.status().to_string(), HasSubstr("4503599627370496 bytes) for the spool"));
  EXPECT_THAT(made.status().to_string(), HasSubstr("a smaller spool"));
  options_.spool_bytes = 0;
  create();  // nothing is in the way
}

INSTANTIATE_TEST_SUITE_P(Rings, SpoolTest, every_ring(), ring_test_name);

TEST(SpoolBehindAStore, HasTheRoomThatTheStoreLeaves) {
  MemoryStore memory(base::StateFormat::kF32, 64 * base::kKiB);
  ASSERT_TRUE(memory.create().ok());
  ASSERT_TRUE(memory.make_step(0).ok());
  const auto buffer = base::AlignedBuffer::allocate(64 * base::kKiB);
  std::memset(buffer->data(), 7, buffer->size());
  SubgroupIo io;
  io.op = SubgroupIo::Op::kWriteSpool;
  io.buffer = buffer->bytes();
  memory.store().start(io);
  SubgroupIo* done = nullptr;
  while (done == nullptr) {
    ASSERT_TRUE(memory.store().poll({&done, 1}, std::chrono::seconds(1)).ok());
  }
  ASSERT_TRUE(io.status.ok()) << io.status.to_string();
  bool equal = false;
  EXPECT_TRUE(memory.read_step(0, equal).ok());
  EXPECT_TRUE(equal) << "the state is what it was";
}

TEST(SpoolBehindAStore, IsRefusedWhereThereIsNoRoom) {
  MemoryStore memory;
  memory.options().spool_bytes = 64 * base::kKiB;
  const base::Status none = memory.create();
  EXPECT_EQ(none.code(), base::ErrorCode::kUnsupported) << none.to_string();
  EXPECT_THAT(none.to_string(), HasSubstr("Use a directory"));
  MemoryStore small(base::StateFormat::kF32, 4096);
  small.options().spool_bytes = 8192;
  EXPECT_EQ(small.create().code(), base::ErrorCode::kNoSpace);
}

}  // namespace
}  // namespace smartinf::storage
