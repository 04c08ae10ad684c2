// A file system that fills up and one that goes read-only, on an ext4 in a small file. Skipped
// where such a one cannot be mounted.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Status;

class FileSystemTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "mounting needs root";
    root_ = (std::filesystem::temp_directory_path() / ("smartinf-fs-" + std::to_string(getpid())))
                .string();
    mount_ = root_ + "/mount";
    std::filesystem::create_directories(mount_);
    std::ofstream(root_ + "/image").close();
    std::filesystem::resize_file(root_ + "/image", 32 << 20);
    mounted_ = run("mkfs.ext4 -q " + root_ + "/image") &&
               run("mount -o loop,errors=remount-ro " + root_ + "/image " + mount_);
    if (!mounted_) GTEST_SKIP() << "no ext4 can be mounted here";
    layout_.run = make_run_id();
    layout_.planes = {base::PlaneKind::kMaster};
    layout_.subgroups = {{base::SubgroupId{0}, 0, base::kBlockElements}};
  }
  void TearDown() override {
    store_.reset();
    if (mounted_) (void)run("umount " + mount_);
    if (!root_.empty()) std::filesystem::remove_all(root_);
  }
  static bool run(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }

  /// "loop3": ours, and nobody else's file system is made to fail.
  std::string loop_device() const {
    std::ifstream mounts("/proc/self/mounts");
    for (std::string device, where, rest;
         mounts >> device >> where && std::getline(mounts, rest);) {
      if (where == mount_) return std::filesystem::path(device).filename().string();
    }
    return "none";
  }

  Status make_step(base::StepNumber step) {
    const base::SubgroupId id{0};
    const auto buffer = base::AlignedBuffer::allocate(store_->extent_bytes(id));
    store_->begin_step(step);
    store_->seal_block(id, 0, 0, buffer->bytes().first(base::kBlockElements * 4));
    SI_RETURN_IF_ERROR(move(SubgroupIo::Op::kWrite, buffer->bytes()));
    SI_RETURN_IF_ERROR(store_->prepare(step, ""));
    return store_->commit(step);
  }
  Status move(SubgroupIo::Op op, std::span<std::byte> buffer) {
    SubgroupIo io;
    io.op = op;
    io.buffer = buffer;
    store_->start(io);
    SubgroupIo* done = nullptr;
    for (size_t count = 0; count == 0;) {
      SI_ASSIGN_OR_RETURN(count, store_->poll({&done, 1}, std::chrono::seconds(10)));
    }
    return io.status;
  }
  void create() {
    auto made = Store::create(mount_ + "/device", layout_, {});
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    store_ = std::move(*made);
    ASSERT_TRUE(make_step(0).ok());
  }

  std::string root_;
  std::string mount_;
  bool mounted_ = false;
  StoreLayout layout_;
  std::unique_ptr<Store> store_;
};

TEST_F(FileSystemTest, FullAtCreationOrNever) {
  layout_.subgroups[0].count = 8 << 20;
  EXPECT_EQ(Store::create(mount_ + "/device", layout_, {}).status().code(), ErrorCode::kNoSpace);
  layout_.subgroups[0].count = base::kBlockElements;
  create();
  (void)run("dd if=/dev/zero of=" + mount_ + "/filler bs=64k");
  ASSERT_EQ(std::filesystem::space(mount_).available, 0u);
  for (base::StepNumber step = 1; step < 5; ++step) {
    const Status status = make_step(step);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST_F(FileSystemTest, ReadOnlyIsATypedErrorAndTheCommittedStepStands) {
  create();
  ASSERT_TRUE(make_step(1).ok());
  // The same as ext4 does by itself after an error on the drive.
  std::ofstream trigger("/sys/fs/ext4/" + loop_device() + "/trigger_fs_error");
  trigger << "test" << std::flush;
  if (!trigger) {
    GTEST_SKIP() << "no way to make the file system fail";
  }
  const Status status = make_step(2);
  ASSERT_FALSE(status.ok());
  EXPECT_FALSE(status.place().path.empty());
  EXPECT_NE(status.place().system_errno, 0);
  EXPECT_FALSE(status.advice().empty());
  const auto buffer = base::AlignedBuffer::allocate(store_->extent_bytes(base::SubgroupId{0}));
  ASSERT_TRUE(move(SubgroupIo::Op::kRead, buffer->bytes()).ok());
  EXPECT_TRUE(
      store_
          ->verify_block(base::SubgroupId{0}, 0, 0, buffer->bytes().first(base::kBlockElements * 4))
          .ok());
}

}  // namespace
}  // namespace smartinf::storage
