#include "smartinf/storage/tuning.h"

#include <fstream>

#include "smartinf/storage/erase.h"
#include "smartinf/storage/store_test.h"

namespace smartinf::storage {
namespace {

using base::SubgroupId;

class TuningTest : public StoreTest {};

TEST_P(TuningTest, MeasuringFollowsNoLink) {
  const std::string victim = (std::filesystem::path(path_) / "victim").string();
  std::ofstream(victim) << "precious";
  std::filesystem::create_symlink(victim, std::filesystem::path(path_) / "smartinf.measure");
  std::filesystem::create_symlink(victim, std::filesystem::path(path_) / "smartinf.tuning");
  MeasureOptions quick;
  quick.file_bytes = 32 << 20;
  quick.seconds = 0.01;
  (void)measure_io(path_, quick);
  (void)remember_tuning(path_, IoTuning{2 << 20, 16, 1.5e9, 1e9});
  std::string text;
  std::ifstream(victim) >> text;
  EXPECT_EQ(text, "precious");
}

TEST_P(TuningTest, DriveLimitChangesNothing) {
  for (const Durability durability : {Durability::kStep, Durability::kNone}) {
    options_.durability = durability;
    create();
    make_step(0, "");
    make_step(1, "one");
    const uint64_t state =
        store_->extent_bytes(SubgroupId{3}) + store_->extent_bytes(SubgroupId{7});
    store_.reset();
    const auto limit = drive_limit(path_, options_, 1);
    ASSERT_TRUE(limit.ok()) << limit.status().to_string();
    EXPECT_EQ(limit->read_bytes, state);
    EXPECT_GE(limit->written_bytes, state);
    EXPECT_GT(limit->seconds, 0);
    reopen();
    EXPECT_FALSE(store_->state().torn);
    EXPECT_EQ(store_->state().prepared_step, 1u);
    ASSERT_TRUE(store_->recover_to(1).ok());
    expect_step(1);
    make_step(2, "two");
    expect_step(2);
    store_.reset();
    ASSERT_TRUE(erase_store(path_).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Rings, TuningTest, every_ring(), ring_test_name);

TEST(Tuning, IsRememberedAndDistrusted) {
  const base::Scratch scratch;
  const std::string path = scratch.path().string();
  EXPECT_FALSE(recall_tuning(path).has_value());
  ASSERT_TRUE(remember_tuning(path, IoTuning{2 << 20, 16, 1.5e9, 1e9}).ok());
  const auto found = recall_tuning(path);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->io_bytes, 2u << 20);
  EXPECT_EQ(found->io_depth, 16u);
  EXPECT_EQ(found->write_bytes_per_second, 1e9);
  // One file serves what is made below it, whether it is there yet or not; the nearest counts.
  const auto below = scratch.path() / "runs" / "state";
  EXPECT_EQ(recall_tuning(below.string()).value_or(IoTuning{}).io_depth, 16u);
  std::filesystem::create_directories(below);
  ASSERT_TRUE(remember_tuning(below.parent_path().string(), IoTuning{2 << 20, 32, 1, 1}).ok());
  EXPECT_EQ(recall_tuning(below.string()).value_or(IoTuning{}).io_depth, 32u);
  EXPECT_FALSE(recall_tuning("/proc/self").has_value());
  ASSERT_TRUE(remember_tuning(path, IoTuning{1000, 16, 0, 0}).ok());
  EXPECT_FALSE(recall_tuning(path).has_value());
  MeasureOptions quick;
  quick.file_bytes = 32 << 20;
  quick.seconds = 0.002;
  const auto measured = measure_io(path, quick);
  ASSERT_TRUE(measured.ok()) << measured.status().to_string();
  EXPECT_GT(measured->read_bytes_per_second, 0);
  EXPECT_GT(measured->write_bytes_per_second, 0);
  EXPECT_EQ(measured->sync_bytes_per_second, 0) << "not asked for";
  EXPECT_EQ(measured->reads_alone_bytes_per_second, 0);
  quick.sync = true;
  const auto synced = measure_io(path, quick);
  ASSERT_TRUE(synced.ok()) << synced.status().to_string();
  // No time worth saying, or at least a fiftieth of what the writes take.
  EXPECT_GT(synced->reads_alone_bytes_per_second, 1e6);
  const double rate = synced->sync_bytes_per_second;
  EXPECT_TRUE(rate == 0 || (rate > 1e6 && rate < 51 * synced->write_bytes_per_second)) << rate;
  quick.sync = false;
  quick.memory_bytes = 16 << 20;
  const auto small = measure_io(path, quick);
  ASSERT_TRUE(small.ok()) << small.status().to_string();
  EXPECT_LE(2 * small->io_bytes * small->io_depth, quick.memory_bytes);
}

}  // namespace
}  // namespace smartinf::storage
