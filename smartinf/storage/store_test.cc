
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/erase.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/summary.h"
#include "smartinf/storage/tuning.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::PlaneKind;
using base::Status;
using base::StepNumber;
using base::SubgroupId;
using std::chrono::seconds;
using ::testing::HasSubstr;

StoreLayout small_layout() {
  StoreLayout layout;
  layout.run = make_run_id();
  layout.planes = {PlaneKind::kMaster, PlaneKind::kMomentum, PlaneKind::kVariance};
  layout.subgroups = {{SubgroupId{3}, 0, 3 * base::kBlockElements},
                      {SubgroupId{7}, 3 * base::kBlockElements, base::kBlockElements + 1001}};
  layout.gradient_spill_bytes = 2;
  layout.description = "{\"a\": 1}";
  return layout;
}

class StoreTest : public ::testing::TestWithParam<RingKind> {
 protected:
  void SetUp() override {
    if (GetParam() == RingKind::kUring && !probe_uring().ok()) {
      GTEST_SKIP() << probe_uring().to_string();
    }
    std::string name = (std::filesystem::temp_directory_path() / "smartinf-store-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
    options_.ring.kind = GetParam();
    options_.io_bytes = 64 * 1024;
    options_.io_depth = 3;
  }
  void TearDown() override {
    store_.reset();
    if (!path_.empty()) std::filesystem::remove_all(path_);
  }

  void create() {
    auto made = Store::create(path_, layout_, options_);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    store_ = std::move(*made);
  }
  void reopen() {
    store_.reset();
    auto opened = Store::open(path_, options_);
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    store_ = std::move(*opened);
  }

  /// Contents that depend on all that a block can be mistaken in.
  static void fill(std::span<std::byte> bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>((i * 131 + seed * 29 + (i >> 8)) & 0xff);
    }
  }
  uint64_t blocks(SubgroupId id) const {
    for (const StoredSubgroup& subgroup : layout_.subgroups) {
      if (subgroup.id == id) return base::divide_up(subgroup.count, base::kBlockElements);
    }
    return 0;
  }
  std::span<std::byte> block(std::span<std::byte> extent, SubgroupId id, size_t plane, uint64_t b) {
    const uint64_t begin = b * base::encoded_bytes(base::Encoding::kF32, base::kBlockElements);
    const uint64_t bytes = store_->plane_bytes(id, plane);
    return extent.subspan(store_->plane_offset(id, plane) + begin,
                          std::min(bytes - begin, base::kBlockElements * 4));
  }

  Status transfer(SubgroupIo& io) {
    store_->start(io);
    SubgroupIo* done = nullptr;
    auto count = store_->poll({&done, 1}, seconds(10));
    if (!count.ok()) return count.status();
    EXPECT_EQ(*count, 1u);
    EXPECT_EQ(done, &io);
    return io.status;
  }

  /// New contents of planes, sealed for the step in progress.
  base::AlignedBuffer contents(SubgroupId id, uint64_t seed, uint32_t mask = ~0u) {
    auto buffer = base::AlignedBuffer::allocate(store_->extent_bytes(id));
    for (size_t plane = 0; plane < layout_.planes.size(); ++plane) {
      if ((mask >> plane & 1u) == 0) continue;
      fill(buffer->bytes().subspan(store_->plane_offset(id, plane), store_->plane_bytes(id, plane)),
           seed + plane + id.value * 1000);
      for (uint64_t b = 0; b < blocks(id); ++b) {
        store_->seal_block(id, plane, b, block(buffer->bytes(), id, plane, b));
      }
    }
    return std::move(*buffer);
  }
  Status write(SubgroupId id, uint64_t seed, uint32_t mask = ~0u) {
    return write_from(contents(id, seed, mask), SubgroupIo::Op::kWrite, id, mask);
  }
  Status write_from(const base::AlignedBuffer& buffer, SubgroupIo::Op op, SubgroupId id,
                    uint32_t mask) {
    SubgroupIo io;
    io.op = op;
    io.subgroup = id;
    io.buffer = buffer.bytes();
    io.plane_mask = mask;
    return transfer(io);
  }

  /// Reads, verifies and compares.
  Status expect(SubgroupId id, uint64_t seed, uint32_t mask = ~0u) {
    const auto buffer = base::AlignedBuffer::allocate(store_->extent_bytes(id));
    SubgroupIo io;
    io.op = SubgroupIo::Op::kRead;
    io.subgroup = id;
    io.buffer = buffer->bytes();
    io.plane_mask = mask;
    SI_RETURN_IF_ERROR(transfer(io));
    for (size_t plane = 0; plane < layout_.planes.size(); ++plane) {
      if ((mask >> plane & 1u) == 0) continue;
      for (uint64_t b = 0; b < blocks(id); ++b) {
        SI_RETURN_IF_ERROR(
            store_->verify_block(id, plane, b, block(buffer->bytes(), id, plane, b)));
      }
      std::vector<std::byte> wanted(store_->plane_bytes(id, plane));
      fill(wanted, seed + plane + id.value * 1000);
      EXPECT_EQ(std::memcmp(wanted.data(), buffer->data() + store_->plane_offset(id, plane),
                            wanted.size()),
                0)
          << "subgroup " << id.value << " plane " << plane;
    }
    return Status();
  }

  void make_step(StepNumber step, const std::string& client_metadata) {
    store_->begin_step(step);
    for (const StoredSubgroup& subgroup : layout_.subgroups) {
      ASSERT_TRUE(write(subgroup.id, step * 10).ok());
    }
    const Status prepared = store_->prepare(step, client_metadata);
    ASSERT_TRUE(prepared.ok()) << prepared.to_string();
    ASSERT_TRUE(store_->commit(step).ok());
  }
  void expect_step(StepNumber step) {
    for (const StoredSubgroup& subgroup : layout_.subgroups) {
      const Status status = expect(subgroup.id, step * 10);
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }

  std::string path_;
  StoreLayout layout_ = small_layout();
  StoreOptions options_;
  std::unique_ptr<Store> store_;
};

TEST_P(StoreTest, StepsSurviveReopening) {
  create();
  EXPECT_FALSE(store_->state().initialized);
  make_step(0, "zero");
  make_step(1, "one");
  make_step(2, "two");
  expect_step(2);
  reopen();
  EXPECT_EQ(store_->layout().run, layout_.run);
  EXPECT_EQ(store_->layout().description, layout_.description);
  EXPECT_EQ(store_->layout().planes, layout_.planes);
  EXPECT_TRUE(store_->state().initialized);
  EXPECT_EQ(store_->state().committed_step, 2u);
  ASSERT_TRUE(store_->recover_to(2).ok());
  EXPECT_EQ(store_->client_metadata(), "two");
  expect_step(2);
  make_step(3, "");
  expect_step(3);
  EXPECT_EQ(store_->client_metadata(), "");
  const auto seen = Store::peek(path_);
  ASSERT_TRUE(seen.ok());
  EXPECT_EQ(seen->committed_step, 3u);
}

TEST_P(StoreTest, PlanesNotWrittenKeepTheirState) {
  create();
  make_step(0, "");
  store_->begin_step(1);
  ASSERT_TRUE(write(SubgroupId{3}, 100, 0b010).ok());
  ASSERT_TRUE(store_->prepare(1, "").ok());
  ASSERT_TRUE(store_->commit(1).ok());
  EXPECT_TRUE(expect(SubgroupId{3}, 0, 0b101).ok());
  EXPECT_TRUE(expect(SubgroupId{3}, 100, 0b010).ok());
  EXPECT_TRUE(expect(SubgroupId{7}, 0).ok());
}

TEST_P(StoreTest, TheFirstStepMayBeALaterOne) {
  for (const Durability durability : {Durability::kStep, Durability::kNone}) {
    options_.durability = durability;
    create();
    store_->begin_step(41);
    for (const StoredSubgroup& subgroup : layout_.subgroups) {
      ASSERT_TRUE(write(subgroup.id, 410).ok());
    }
    reopen();  // nothing is there before it is prepared
    EXPECT_FALSE(store_->state().initialized);
    store_.reset();
    create();
    store_->begin_step(41);
    for (const StoredSubgroup& subgroup : layout_.subgroups) {
      ASSERT_TRUE(write(subgroup.id, 410).ok());
    }
    ASSERT_TRUE(store_->prepare(41, "copied").ok());
    reopen();  // prepared everywhere is as good as committed
    EXPECT_EQ(store_->state().committed_step, 41u);
    EXPECT_EQ(store_->state().prepared_step, 41u);
    const std::vector<StoreState> alone{store_->state()};
    EXPECT_EQ(*recovery_step(alone), 41u);
    ASSERT_TRUE(store_->recover_to(41).ok());
    EXPECT_EQ(store_->client_metadata(), "copied");
    expect_step(41);
    make_step(42, "trained on");
    reopen();
    ASSERT_TRUE(store_->recover_to(42).ok());
    expect_step(42);
    store_.reset();
    ASSERT_TRUE(erase_store(path_).ok());
  }
}

TEST_P(StoreTest, AFirstStepThatIsAbortedLeavesNothing) {
  create();
  store_->begin_step(41);
  for (const StoredSubgroup& subgroup : layout_.subgroups) {
    ASSERT_TRUE(write(subgroup.id, 410).ok());
  }
  ASSERT_TRUE(store_->prepare(41, "").ok());
  ASSERT_TRUE(store_->abort(41).ok());
  EXPECT_FALSE(store_->state().initialized);
  make_step(7, "seven");
  expect_step(7);
}

TEST_P(StoreTest, AbortedBeforeAndAfterPrepare) {
  create();
  make_step(0, "zero");
  make_step(1, "one");
  for (const bool prepare : {false, true}) {
    store_->begin_step(2);
    ASSERT_TRUE(write(SubgroupId{3}, 77).ok());
    if (prepare) {
      ASSERT_TRUE(store_->prepare(2, "never").ok());
    }
    ASSERT_TRUE(store_->abort(2).ok());
    EXPECT_EQ(store_->state().prepared_step, 1u);
    expect_step(1);
    reopen();
    EXPECT_EQ(store_->state().prepared_step, 1u);
    ASSERT_TRUE(store_->recover_to(1).ok());
    EXPECT_EQ(store_->client_metadata(), "one");
    expect_step(1);
  }
  make_step(2, "two");
  expect_step(2);
}

TEST_P(StoreTest, PreparedStepRollsForwardOrBack) {
  create();
  make_step(0, "zero");
  for (const bool forward : {false, true}) {
    store_->begin_step(1);
    for (const StoredSubgroup& subgroup : layout_.subgroups) {
      ASSERT_TRUE(write(subgroup.id, 10).ok());
    }
    ASSERT_TRUE(store_->prepare(1, "one").ok());
    reopen();
    EXPECT_EQ(store_->state().committed_step, 0u);
    EXPECT_EQ(store_->state().prepared_step, 1u);
    ASSERT_TRUE(store_->recover_to(forward ? 1 : 0).ok());
    EXPECT_EQ(store_->client_metadata(), forward ? "one" : "zero");
    expect_step(forward ? 1 : 0);
    EXPECT_EQ(store_->state().prepared_step, forward ? 1u : 0u);
  }
}

TEST_P(StoreTest, GradientsAreSpilled) {
  create();
  make_step(0, "");
  const SubgroupId id{7};
  const auto out = base::AlignedBuffer::allocate(store_->gradient_bytes(id));
  const auto in = base::AlignedBuffer::allocate(store_->gradient_bytes(id));
  fill(out->bytes(), 5);
  SubgroupIo io;
  io.subgroup = id;
  io.op = SubgroupIo::Op::kWriteGradient;
  io.buffer = out->bytes();
  ASSERT_TRUE(transfer(io).ok());
  io.op = SubgroupIo::Op::kReadGradient;
  io.buffer = in->bytes();
  ASSERT_TRUE(transfer(io).ok());
  EXPECT_EQ(std::memcmp(in->data(), out->data(), store_->gradient_bytes(id)), 0);
  EXPECT_EQ(store_->traffic().up(base::TrafficKind::kGradient), store_->gradient_bytes(id));
  expect_step(0);
}

TEST_P(StoreTest, CountsBytes) {
  create();
  make_step(0, "");
  const uint64_t state = store_->extent_bytes(SubgroupId{3}) + store_->extent_bytes(SubgroupId{7});
  EXPECT_EQ(store_->traffic().down(base::TrafficKind::kState), state);
  expect_step(0);
  EXPECT_EQ(store_->traffic().up(base::TrafficKind::kState), state);
  make_step(1, "");
  const uint64_t ever = store_->bytes_written_ever();
  EXPECT_GE(ever, 2 * state);
  EXPECT_EQ(store_->traffic().down_total(), ever);
  reopen();
  // The superblock counts everything up to itself.
  EXPECT_NEAR(static_cast<double>(store_->bytes_written_ever()), static_cast<double>(ever), 16384);
}

TEST_P(StoreTest, WrongBlockIsFound) {
  create();
  make_step(0, "");
  make_step(1, "");
  const SubgroupId id{7};
  const auto buffer = base::AlignedBuffer::allocate(store_->extent_bytes(id));
  SubgroupIo io;
  io.subgroup = id;
  io.buffer = buffer->bytes();
  ASSERT_TRUE(transfer(io).ok());
  const std::span<std::byte> last = block(buffer->bytes(), id, 2, 1);
  EXPECT_TRUE(store_->verify_block(id, 2, 1, last).ok());
  last[last.size() - 1] ^= std::byte{1};
  const Status status = store_->verify_block(id, 2, 1, last);
  EXPECT_EQ(status.code(), ErrorCode::kCorrupt);
  EXPECT_THAT(status.to_string(), HasSubstr("block 1 of the variance plane of subgroup 7"));
  last[last.size() - 1] ^= std::byte{1};
  // The same bytes as another block, plane or subgroup of the same size.
  EXPECT_FALSE(store_->verify_block(id, 1, 1, last).ok());
  EXPECT_FALSE(store_->verify_block(SubgroupId{3}, 0, 0, block(buffer->bytes(), id, 0, 0)).ok());
}

TEST_P(StoreTest, UnsealedOrMissingPlanesAreNotPrepared) {
  create();
  store_->begin_step(0);
  ASSERT_TRUE(write(SubgroupId{3}, 0).ok());
  EXPECT_EQ(store_->prepare(0, "").code(), ErrorCode::kFailedPrecondition);
  ASSERT_TRUE(store_->abort(0).ok());
  make_step(0, "");
  store_->begin_step(1);
  const auto buffer = base::AlignedBuffer::allocate(store_->extent_bytes(SubgroupId{3}));
  SubgroupIo io;
  io.op = SubgroupIo::Op::kWrite;
  io.subgroup = SubgroupId{3};
  io.buffer = buffer->bytes();
  ASSERT_TRUE(transfer(io).ok());
  const Status status = store_->prepare(1, "");
  EXPECT_EQ(status.code(), ErrorCode::kFailedPrecondition);
  EXPECT_THAT(status.what(), HasSubstr("not sealed"));
  ASSERT_TRUE(store_->abort(1).ok());
  expect_step(0);
}

TEST_P(StoreTest, LockedByName) {
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

TEST_P(StoreTest, ADeletedLockFileLetsNobodyIn) {
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

TEST_P(StoreTest, ANewerSuperblockIsNeverOverwritten) {
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

TEST_P(StoreTest, AFifoIsRefusedAtOnce) {
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

TEST_P(StoreTest, MeasuringFollowsNoLink) {
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

TEST_P(StoreTest, SummaryTellsStateAndLayoutOfAStoreInUse) {
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

TEST_P(StoreTest, InterruptedCreationStartsOver) {
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

TEST_P(StoreTest, BadPaths) {
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

TEST_P(StoreTest, ForeignStateFileIsNotTouched) {
  const std::string file = path_ + "/smartinf.state";
  std::ofstream(file) << std::string(100000, 'x');
  EXPECT_EQ(Store::create(path_, layout_, options_).status().code(), ErrorCode::kAlreadyExists);
  EXPECT_EQ(std::filesystem::file_size(file), 100000u);
  EXPECT_EQ(Store::open(path_, options_).status().code(), ErrorCode::kCorrupt);
}

TEST_P(StoreTest, FullDiskIsFoundAtCreation) {
  struct statvfs info {};
  ASSERT_EQ(statvfs(path_.c_str(), &info), 0);
  const uint64_t available = uint64_t{info.f_bavail} * info.f_frsize;
  layout_.subgroups[0].count = available / 12;
  const auto made = Store::create(path_, layout_, options_);
  EXPECT_EQ(made.status().code(), ErrorCode::kNoSpace);
  EXPECT_THAT(made.status().what(), HasSubstr("are free"));
  EXPECT_FALSE(std::filesystem::exists(path_ + "/smartinf.state.creating"));
}

TEST_P(StoreTest, DurabilityNoneTakesHalfTheSpace) {
  options_.durability = Durability::kNone;
  create();
  make_step(0, "zero");
  make_step(1, "one");
  expect_step(1);
  EXPECT_LT(std::filesystem::file_size(path_ + "/smartinf.state"),
            Geometry::make(layout_, 2)->container_bytes() - store_->extent_bytes(SubgroupId{3}));
  reopen();
  EXPECT_FALSE(store_->state().torn);
  ASSERT_TRUE(store_->recover_to(1).ok());
  EXPECT_EQ(store_->client_metadata(), "one");
  expect_step(1);
  // A step without writes can be aborted, one with writes cannot.
  store_->begin_step(2);
  EXPECT_TRUE(store_->abort(2).ok());
  store_->begin_step(2);
  ASSERT_TRUE(write(SubgroupId{3}, 1).ok());
  EXPECT_EQ(store_->abort(2).code(), ErrorCode::kFailedPrecondition);
  reopen();
  EXPECT_TRUE(store_->state().torn);
  EXPECT_EQ(store_->recover_to(1).code(), ErrorCode::kFailedPrecondition);
  EXPECT_EQ(recovery_step(std::vector{store_->state()}).status().code(),
            ErrorCode::kFailedPrecondition);
}

TEST_P(StoreTest, PlanesHeldInMemoryAreTornUntilTheyAreFlushed) {
  options_.durability = Durability::kNone;
  create();
  make_step(0, "zero");
  store_->begin_step(1);
  ASSERT_TRUE(store_->hold(SubgroupId{3}, 0b111).ok());
  EXPECT_TRUE(Store::peek(path_)->torn) << "what is in memory is being changed";
  const base::AlignedBuffer held = contents(SubgroupId{3}, 100);
  ASSERT_TRUE(write(SubgroupId{7}, 100).ok());
  ASSERT_TRUE(store_->prepare(1, "one").ok());
  ASSERT_TRUE(store_->commit(1).ok());
  EXPECT_FALSE(store_->state().torn);
  EXPECT_TRUE(Store::peek(path_)->torn);
  // A step that writes nothing changes nothing of that, committed or aborted.
  store_->begin_step(2);
  EXPECT_TRUE(store_->abort(2).ok());
  store_->begin_step(2);
  ASSERT_TRUE(store_->prepare(2, "two").ok());
  ASSERT_TRUE(store_->commit(2).ok());
  EXPECT_TRUE(Store::peek(path_)->torn);
  // Planes that are written are held no more; the others are still to be flushed.
  store_->begin_step(3);
  ASSERT_TRUE(write(SubgroupId{3}, 300, 0b010).ok());
  ASSERT_TRUE(store_->prepare(3, "three").ok());
  ASSERT_TRUE(store_->commit(3).ok());
  EXPECT_TRUE(Store::peek(path_)->torn);
  ASSERT_TRUE(write_from(held, SubgroupIo::Op::kFlush, SubgroupId{3}, 0b101).ok());
  EXPECT_TRUE(Store::peek(path_)->torn);
  ASSERT_TRUE(store_->finish_flush().ok());
  reopen();
  EXPECT_FALSE(store_->state().torn);
  ASSERT_TRUE(store_->recover_to(3).ok());
  EXPECT_TRUE(expect(SubgroupId{3}, 100, 0b101).ok());
  EXPECT_TRUE(expect(SubgroupId{3}, 300, 0b010).ok());
  EXPECT_TRUE(expect(SubgroupId{7}, 100).ok());
  // A step that changes what is held cannot be aborted, whatever was written.
  store_->begin_step(4);
  ASSERT_TRUE(store_->hold(SubgroupId{3}, 0b111).ok());
  EXPECT_EQ(store_->abort(4).code(), ErrorCode::kFailedPrecondition);
  EXPECT_TRUE(Store::peek(path_)->torn);
}

TEST_P(StoreTest, WithoutChecksumsNothingIsCheckedOrSealed) {
  options_.checksums = false;
  create();
  make_step(0, "");
  expect_step(0);
  store_.reset();
  options_.checksums = true;
  reopen();
  ASSERT_TRUE(store_->recover_to(0).ok());
  expect_step(0);  // written without: cannot be checked, is not refused
  make_step(1, "");
  expect_step(1);
}

TEST_P(StoreTest, DriveLimitChangesNothing) {
  create();
  make_step(0, "");
  make_step(1, "one");
  const uint64_t state = store_->extent_bytes(SubgroupId{3}) + store_->extent_bytes(SubgroupId{7});
  store_.reset();
  const auto limit = drive_limit(path_, options_, 1);
  ASSERT_TRUE(limit.ok()) << limit.status().to_string();
  EXPECT_EQ(limit->read_bytes, state);
  EXPECT_GE(limit->written_bytes, state);
  EXPECT_GT(limit->seconds, 0);
  reopen();
  ASSERT_TRUE(store_->recover_to(1).ok());
  expect_step(1);
}

INSTANTIATE_TEST_SUITE_P(Rings, StoreTest, ::testing::Values(RingKind::kUring, RingKind::kThreads),
                         [](const auto& kind) {
                           return kind.param == RingKind::kUring ? "uring" : "threads";
                         });

TEST(RunIds, AreRandomAndReadable) {
  const RunId a = make_run_id();
  EXPECT_NE(a, make_run_id());
  EXPECT_EQ(a.to_string().size(), 32u);
}

TEST(Tuning, IsRememberedAndDistrusted) {
  std::string path = (std::filesystem::temp_directory_path() / "smartinf-tuning-XXXXXX").string();
  ASSERT_NE(mkdtemp(path.data()), nullptr);
  EXPECT_FALSE(recall_tuning(path).has_value());
  ASSERT_TRUE(remember_tuning(path, IoTuning{2 << 20, 16, 1.5e9, 1e9}).ok());
  const auto found = recall_tuning(path);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->io_bytes, 2u << 20);
  EXPECT_EQ(found->io_depth, 16u);
  EXPECT_EQ(found->write_bytes_per_second, 1e9);
  ASSERT_TRUE(remember_tuning(path, IoTuning{1000, 16, 0, 0}).ok());
  EXPECT_FALSE(recall_tuning(path).has_value());
  MeasureOptions quick;
  quick.file_bytes = 32 << 20;
  quick.seconds = 0.002;
  const auto measured = measure_io(path, quick);
  ASSERT_TRUE(measured.ok()) << measured.status().to_string();
  EXPECT_GT(measured->read_bytes_per_second, 0);
  EXPECT_GT(measured->write_bytes_per_second, 0);
  quick.memory_bytes = 16 << 20;
  const auto small = measure_io(path, quick);
  ASSERT_TRUE(small.ok()) << small.status().to_string();
  EXPECT_LE(2 * small->io_bytes * small->io_depth, quick.memory_bytes);
  std::filesystem::remove_all(path);
}

}  // namespace
}  // namespace smartinf::storage
