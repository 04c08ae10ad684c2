// In which order a store's transfers go to the drive.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/block_store.h"
#include "smartinf/storage/forwarding_ring.h"
#include "smartinf/storage/memory_ring.h"

namespace smartinf::storage {
namespace {

using Op = SubgroupIo::Op;

/// Notes a letter for every transfer of planes, gradients and the spool: what it is for, large
/// where it is written.
class RecordingRing final : public ForwardingRing {
 public:
  RecordingRing(std::unique_ptr<Ring> inner, std::string& record)
      : ForwardingRing(std::move(inner)), record_(record) {}
  base::Status submit(std::span<IoRequest* const> requests) override {
    for (const IoRequest* request : requests) {
      const char letter = base::traffic_kind_name(request->kind).front();
      if (letter == 'm') continue;  // metadata
      const bool write = request->op != IoOp::kRead;
      record_ += write ? static_cast<char>(letter - 'a' + 'A') : letter;
    }
    return ForwardingRing::submit(requests);
  }

 private:
  std::string& record_;
};

/// A store of two subgroups of one block each, with one transfer of 64 KiB in flight each way.
class IoPumpOrder : public ::testing::Test {
 protected:
  static constexpr uint64_t kSpoolPieces = 64;

  void SetUp() override {
    StoreLayout layout;
    layout.run = make_run_id();
    layout.planes = {base::PlaneKind::kMaster};
    layout.subgroups = {{base::SubgroupId{0}, 0, base::kBlockElements},
                        {base::SubgroupId{1}, base::kBlockElements, base::kBlockElements}};
    layout.gradient_spill_bytes = 2;
    StoreOptions options;
    options.checksums = false;
    options.io_bytes = base::kBlockElements;  // a quarter of a plane, half a gradient
    options.io_depth = 1;
    options.spool_bytes = kSpoolPieces * options.io_bytes;
    io_bytes_ = options.io_bytes;
    const auto geometry = Geometry::make(layout, 2);
    disk_ = std::make_unique<MemoryDisk>(geometry->container_bytes() + options.spool_bytes);
    auto ring = std::make_unique<RecordingRing>(make_memory_ring(*disk_, power_, 16, 1), record_);
    auto made =
        BlockStore::create(memory_container("disk", *disk_, std::move(ring)), layout, options);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    store_ = std::move(*made);
    store_->begin_step(0);
    start(Op::kWrite, 0);
    start(Op::kWrite, 1);
    finish();
    ASSERT_TRUE(store_->prepare(0, "").ok());
    ASSERT_TRUE(store_->commit(0).ok());
    store_->begin_step(1);
    record_.clear();
  }

  void start(Op op, uint32_t subgroup, std::optional<IoPriority> priority = {},
             uint64_t pieces = 2) {
    SubgroupIo& io = *ios_.emplace_back(std::make_unique<SubgroupIo>());
    io.op = op;
    io.priority = priority;
    io.subgroup = base::SubgroupId{subgroup};
    const bool spool = op == Op::kWriteSpool || op == Op::kReadSpool;
    buffers_.push_back(std::move(
        *base::AlignedBuffer::allocate(spool ? pieces * io_bytes_ : store_->extent_bytes_max())));
    io.buffer = buffers_.back().bytes();
    store_->start(io);
  }
  void finish() {
    for (size_t left = ios_.size(); left > 0;) {
      SubgroupIo* done = nullptr;
      const auto count = store_->poll({&done, 1}, std::chrono::seconds(10));
      ASSERT_TRUE(count.ok()) << count.status().to_string();
      if (*count == 0) continue;
      EXPECT_TRUE(done->status.ok()) << done->status.to_string();
      --left;
    }
    ios_.clear();
    buffers_.clear();
  }

  uint64_t io_bytes_ = 0;
  std::string record_;
  PowerSupply power_;
  std::unique_ptr<MemoryDisk> disk_;
  std::vector<base::AlignedBuffer> buffers_;
  std::vector<std::unique_ptr<SubgroupIo>> ios_;
  std::unique_ptr<BlockStore> store_;
};

TEST_F(IoPumpOrder, ALargeStateWriteGivesWayToActivationsAndThenGradientsBetweenItsPieces) {
  start(Op::kWrite, 0);  // its first piece goes at once
  start(Op::kWriteGradient, 1);
  start(Op::kWriteSpool, 0);
  finish();
  EXPECT_EQ(record_, "SAAGGSSS");
}

TEST_F(IoPumpOrder, WeightsAreReadBeforeActivationsAndThoseBeforeState) {
  start(Op::kRead, 0);
  start(Op::kReadSpool, 0);
  start(Op::kReadGradient, 1);
  start(Op::kRead, 1, IoPriority::kWeights);
  finish();
  EXPECT_EQ(record_, "sssssaaggsss") << "one piece of the state, then the weights";
}

TEST_F(IoPumpOrder, AmongEqualsTheFirstOneGoesFirst) {
  start(Op::kWriteSpool, 0, {}, 3);
  start(Op::kWriteSpool, 0, IoPriority::kState, 1);
  start(Op::kWrite, 0);
  finish();
  EXPECT_EQ(record_, "AAAASSSS");
}

// The other direction has transfers of its own in flight.
TEST_F(IoPumpOrder, AnUrgentReadTakesNothingFromWrites) {
  start(Op::kWrite, 0);
  start(Op::kReadSpool, 0, IoPriority::kWeights);
  EXPECT_EQ(record_, "Sa");
  finish();
}

TEST_F(IoPumpOrder, AStepIsPreparedWithoutWaitingForTheSpool) {
  start(Op::kWrite, 0);
  finish();
  start(Op::kWriteSpool, 0, IoPriority::kState, kSpoolPieces);
  ASSERT_TRUE(store_->prepare(1, "").ok());
  EXPECT_LT(store_->traffic().down(base::TrafficKind::kActivation), kSpoolPieces * io_bytes_);
  ASSERT_TRUE(store_->commit(1).ok());
  finish();
  EXPECT_EQ(store_->traffic().down(base::TrafficKind::kActivation), kSpoolPieces * io_bytes_);
}

}  // namespace
}  // namespace smartinf::storage
