// Tests of who may open a store's container, and of what is refused or left alone.
#include "smartinf/storage/container.h"

#include <fstream>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "smartinf/storage/erase.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/store_test.h"
#include "smartinf/storage/summary.h"
#include "smartinf/storage/tuning.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Status;
using base::SubgroupId;
using ::testing::HasSubstr;

class ContainerTest : public StoreTest {};

TEST_P(ContainerTest, LockedByName) {
  create();
  make_step(0, "");
  const auto second = Store::open(path_, options_);
  EXPECT_EQ(second.status().code(), ErrorCode::kBusy);
  EXPECT_THAT(second.status().what(), HasSubstr(std::to_string(getpid())));
  EXPECT_EQ(Store::create(path_, layout_, options_).status().code(), ErrorCode::kBusy);
  EXPECT_TRUE(Store::peek(path_).ok());
  store_.reset();
  const auto again = Store::create(path_, layout_, options_);
  EXPECT_EQ(again.status().code(), ErrorCode::kAlreadyExists);
  EXPECT_THAT(again.status().what(), HasSubstr(layout_.run.to_string()));
}

TEST_P(ContainerTest, ADeletedLockFileLetsNobodyIn) {
  create();
  make_step(0, "");
  ASSERT_TRUE(std::filesystem::remove(std::filesystem::path(path_) / "smartinf.lock"));
  const auto second = Store::open(path_, options_);
  EXPECT_EQ(second.status().code(), ErrorCode::kBusy);
  EXPECT_THAT(second.status().what(), HasSubstr(std::to_string(getpid())));
  EXPECT_EQ(Store::create(path_, layout_, options_).status().code(), ErrorCode::kBusy);
  EXPECT_EQ(lock_container(path_).status().code(), ErrorCode::kBusy);
  EXPECT_EQ(erase_store(path_).code(), ErrorCode::kBusy);
  make_step(1, "");
  store_.reset();
  EXPECT_TRUE(lock_container(path_).ok());
}

TEST_P(ContainerTest, ANewerSuperblockIsNeverOverwritten) {
  create();
  make_step(0, "");
  // As a second process would write it that no lock has kept away.
  const std::string file = (std::filesystem::path(path_) / "smartinf.state").string();
  std::vector<std::byte> area(kSuperblockAreaBytes);
  const int state = ::open(file.c_str(), O_RDWR);
  ASSERT_GE(state, 0);
  ASSERT_EQ(pread(state, area.data(), area.size(), 0), static_cast<ssize_t>(area.size()));
  auto newer = choose_superblock(area);
  ASSERT_TRUE(newer.ok());
  newer->sequence += 5;
  newer->copy = 3;
  seal_superblock(*newer);
  ASSERT_EQ(pwrite(state, &*newer, sizeof(*newer), 3 * kSuperblockStride),
            static_cast<ssize_t>(sizeof(*newer)));
  ASSERT_EQ(fsync(state), 0);
  store_->begin_step(1);
  for (const StoredSubgroup& subgroup : layout_.subgroups) {
    ASSERT_TRUE(write(subgroup.id, 10).ok());
  }
  const Status status = store_->prepare(1, "");
  EXPECT_EQ(status.code(), ErrorCode::kBusy);
  EXPECT_THAT(status.to_string(), HasSubstr("another process has written"));
  store_.reset();
  ASSERT_EQ(pread(state, area.data(), area.size(), 0), static_cast<ssize_t>(area.size()));
  EXPECT_EQ(choose_superblock(area)->sequence, newer->sequence);
  ::close(state);
}

TEST_P(ContainerTest, AFifoIsRefusedAtOnce) {
  const std::string fifo = (std::filesystem::path(path_) / "smartinf.state").string();
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const Status& status :
       {Store::open(path_, options_).status(), Store::create(path_, layout_, options_).status(),
        Store::peek(path_).status(), summarize(path_).status()}) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
    EXPECT_THAT(status.to_string(), HasSubstr("not a regular file"));
  }
  const std::string tuning = (std::filesystem::path(path_) / "smartinf.tuning").string();
  ASSERT_EQ(mkfifo(tuning.c_str(), 0600), 0);
  EXPECT_FALSE(recall_tuning(path_).has_value());
}

TEST_P(ContainerTest, SummaryTellsStateAndLayoutOfAStoreInUse) {
  create();
  make_step(0, "");
  const auto summary = summarize(path_);  // while the store is open and locked
  ASSERT_TRUE(summary.ok()) << summary.status().to_string();
  EXPECT_TRUE(summary->state.initialized);
  EXPECT_EQ(summary->state.run, layout_.run);
  EXPECT_EQ(summary->layout.description, layout_.description);
  ASSERT_EQ(summary->layout.subgroups.size(), 2u);
  EXPECT_EQ(summary->layout.subgroups[1].count, layout_.subgroups[1].count);
  EXPECT_EQ(summary->slots, 2u);
  EXPECT_EQ(summary->superblock_copies_damaged, 0u);
  const int file = open(summary->file_path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(pwrite(file, "x", 1, 20), 1);  // in the first copy of the superblock
  ASSERT_EQ(pwrite(file, "x", 1, kSuperblockAreaBytes + 20), 1);  // in the first layout record
  close(file);
  const auto damaged = summarize(path_);
  ASSERT_TRUE(damaged.ok()) << damaged.status().to_string();
  EXPECT_EQ(damaged->superblock_copies_damaged, 1u);
  EXPECT_EQ(damaged->layout.description, layout_.description);
  EXPECT_EQ(summarize(path_ + "/none").status().code(), ErrorCode::kNotFound);
}

TEST_P(ContainerTest, InterruptedCreationStartsOver) {
  create();
  store_->begin_step(0);
  ASSERT_TRUE(write(SubgroupId{3}, 1).ok());
  store_.reset();
  auto seen = Store::peek(path_);
  ASSERT_TRUE(seen.ok());
  EXPECT_FALSE(seen->initialized);
  create();
  make_step(0, "");
  expect_step(0);
}

TEST_P(ContainerTest, BadPaths) {
  EXPECT_EQ(Store::open(path_ + "/none", options_).status().code(), ErrorCode::kNotFound);
  EXPECT_EQ(Store::open(path_, options_).status().code(), ErrorCode::kNotFound);
  EXPECT_EQ(Store::peek(path_).status().code(), ErrorCode::kNotFound);
  EXPECT_TRUE(std::filesystem::is_empty(path_)) << "looking must leave nothing behind";
  const std::string file = path_ + "/file";
  std::ofstream(file) << "text";
  EXPECT_EQ(Store::create(file, layout_, options_).status().code(), ErrorCode::kInvalidArgument);
  // Directories are made, with their parents.
  path_ += "/a/b";
  create();
  store_.reset();
  path_ = path_.substr(0, path_.size() - 4);
}

TEST_P(ContainerTest, ForeignStateFileIsNotTouched) {
  const std::string file = path_ + "/smartinf.state";
  std::ofstream(file) << std::string(100000, 'x');
  EXPECT_EQ(Store::create(path_, layout_, options_).status().code(), ErrorCode::kAlreadyExists);
  EXPECT_EQ(std::filesystem::file_size(file), 100000u);
  EXPECT_EQ(Store::open(path_, options_).status().code(), ErrorCode::kCorrupt);
}

TEST_P(ContainerTest, FullDiskIsFoundAtCreation) {
  struct statvfs info {};
  ASSERT_EQ(statvfs(path_.c_str(), &info), 0);
  const uint64_t available = uint64_t{info.f_bavail} * info.f_frsize;
  layout_.subgroups[0].count = available / 12;
  const auto made = Store::create(path_, layout_, options_);
  EXPECT_EQ(made.status().code(), ErrorCode::kNoSpace);
  EXPECT_THAT(made.status().what(), HasSubstr("are free"));
  EXPECT_FALSE(std::filesystem::exists(path_ + "/smartinf.state.creating"));
}

INSTANTIATE_TEST_SUITE_P(Rings, ContainerTest, every_ring(), ring_test_name);

}  // namespace
}  // namespace smartinf::storage
