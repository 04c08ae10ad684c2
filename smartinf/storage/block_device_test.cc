// Raw block devices, on a loop device over a small file. Skipped where loop devices cannot be made.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/storage/check_store.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using ::testing::HasSubstr;

class BlockDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "loop devices need root";
    file_ = (std::filesystem::temp_directory_path() /
             ("smartinf-loop-" + std::to_string(getpid()) + ".img"))
                .string();
    std::ofstream(file_).close();
    std::filesystem::resize_file(file_, 16 << 20);
    FILE* pipe = popen(("losetup -f --show " + file_ + " 2>/dev/null").c_str(), "r");
    char line[256] = {};
    if (pipe != nullptr && std::fgets(line, sizeof(line), pipe) != nullptr) device_ = line;
    if (pipe != nullptr) pclose(pipe);
    while (!device_.empty() && device_.back() == '\n') device_.pop_back();
    if (device_.empty()) GTEST_SKIP() << "no loop devices here";
    layout_.run = make_run_id();
    layout_.planes = {base::PlaneKind::kMaster};
    layout_.subgroups = {{base::SubgroupId{0}, 0, 100'000}};
  }
  void TearDown() override {
    if (!device_.empty()) (void)!std::system(("losetup -d " + device_).c_str());
    if (!file_.empty()) std::filesystem::remove(file_);
  }

  void write_byte(uint64_t offset, char value) {
    std::fstream device(device_, std::ios::in | std::ios::out | std::ios::binary);
    device.seekp(static_cast<std::streamoff>(offset));
    device.put(value);
  }
  /// Creates the store and its step 0.
  void create() {
    auto store = Store::create(device_, layout_, {});
    ASSERT_TRUE(store.ok()) << store.status().to_string();
    (*store)->begin_step(0);
    const base::SubgroupId id{0};
    const auto buffer = base::AlignedBuffer::allocate((*store)->extent_bytes(id));
    for (uint64_t block = 0; block < 2; ++block) {
      const uint64_t begin = block * base::kBlockElements * 4;
      (*store)->seal_block(
          id, 0, block,
          buffer->bytes().subspan(begin, block == 0 ? base::kBlockElements * 4 : 400'000 - begin));
    }
    SubgroupIo io;
    io.op = SubgroupIo::Op::kWrite;
    io.subgroup = id;
    io.buffer = buffer->bytes();
    (*store)->start(io);
    SubgroupIo* done = nullptr;
    ASSERT_EQ(*(*store)->poll({&done, 1}, std::chrono::seconds(20)), 1u);
    ASSERT_TRUE((*store)->prepare(0, "client_metadata").ok());
    ASSERT_TRUE((*store)->commit(0).ok());
  }

  std::string file_;
  std::string device_;
  StoreLayout layout_;
};

TEST_F(BlockDeviceTest, EmptyOnesAreTakenAndKept) {
  create();
  auto opened = Store::open(device_, {});
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  ASSERT_TRUE((*opened)->recover_to(0).ok());
  EXPECT_EQ((*opened)->client_metadata(), "client_metadata");
  const auto second = Store::open(device_, {});
  EXPECT_EQ(second.status().code(), ErrorCode::kBusy) << second.status().to_string();
  opened->reset();
  const auto again = Store::create(device_, layout_, {});
  EXPECT_EQ(again.status().code(), ErrorCode::kAlreadyExists);
  EXPECT_THAT(again.status().what(), HasSubstr(layout_.run.to_string()));
  size_t faults = 0;
  const auto count = [&](const StoreFault&) { ++faults; };
  ASSERT_TRUE(check_store(device_, {}, count).ok());
  EXPECT_EQ(faults, 0u);
  write_byte(65536 + 100, 'x');  // in superblock copy 1
  CheckOptions repair;
  repair.repair = true;
  const auto report = check_store(device_, repair, count);
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->faults_repaired, 1u);
  ASSERT_TRUE(check_store(device_, {}, count).ok());
  EXPECT_EQ(faults, 1u);
}

TEST_F(BlockDeviceTest, OthersAreLeftAloneUnlessForced) {
  write_byte((16 << 20) - 10, 'x');  // a partition table's second copy lies at the end
  const auto refused = Store::create(device_, layout_, {});
  EXPECT_EQ(refused.status().code(), ErrorCode::kAlreadyExists);
  EXPECT_EQ(Store::open(device_, {}).status().code(), ErrorCode::kCorrupt);
  StoreOptions force;
  force.force_block_device = true;
  EXPECT_TRUE(Store::create(device_, layout_, force).ok());
  // A creation that was interrupted is ours, and needs no force.
  EXPECT_TRUE(Store::create(device_, layout_, {}).ok());
}

TEST_F(BlockDeviceTest, ASpoolLiesBehindTheStoreAndTakesNoMoreThanItsRoom) {
  create();
  StoreOptions options;
  options.spool_bytes = 16 << 20;
  const base::Status large = Store::open(device_, options).status();
  EXPECT_EQ(large.code(), ErrorCode::kNoSpace) << large.to_string();
  EXPECT_THAT(large.to_string(), HasSubstr("the spool needs 16.0 MiB, and behind the store"));
  options.spool_bytes = 8 << 20;
  {
    auto store = Store::open(device_, options);
    ASSERT_TRUE(store.ok()) << store.status().to_string();
    ASSERT_TRUE((*store)->recover_to(0).ok());
    const auto data = base::AlignedBuffer::allocate(options.spool_bytes);
    const auto found = base::AlignedBuffer::allocate(options.spool_bytes);
    std::memset(data->data(), 0x5a, data->size());
    for (const auto& [op, buffer] : {std::pair{SubgroupIo::Op::kWriteSpool, data->bytes()},
                                     std::pair{SubgroupIo::Op::kReadSpool, found->bytes()}}) {
      SubgroupIo io;
      io.op = op;
      io.buffer = buffer;
      (*store)->start(io);
      SubgroupIo* done = nullptr;
      ASSERT_EQ(*(*store)->poll({&done, 1}, std::chrono::seconds(20)), 1u);
      ASSERT_TRUE(io.status.ok()) << io.status.to_string();
    }
    EXPECT_TRUE(std::ranges::equal(data->bytes(), found->bytes()));
  }
  size_t faults = 0;
  ASSERT_TRUE(check_store(device_, {}, [&](const StoreFault&) { ++faults; }).ok());
  EXPECT_EQ(faults, 0u);
}

TEST_F(BlockDeviceTest, TooSmall) {
  layout_.subgroups[0].count = 4'000'000;
  EXPECT_EQ(Store::create(device_, layout_, {}).status().code(), ErrorCode::kNoSpace);
}

}  // namespace
}  // namespace smartinf::storage
