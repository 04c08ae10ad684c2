#include "smartinf/storage/store_test.h"

#include <gmock/gmock.h>

#include "smartinf/storage/erase.h"
#include "smartinf/storage/format.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Status;
using base::SubgroupId;
using ::testing::HasSubstr;

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
  EXPECT_THAT(status.what(), HasSubstr("checksums are missing"));
  ASSERT_TRUE(store_->abort(1).ok());
  expect_step(0);
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

INSTANTIATE_TEST_SUITE_P(Rings, StoreTest, every_ring(), ring_test_name);

TEST(RunIds, AreRandomAndReadable) {
  const RunId a = make_run_id();
  EXPECT_NE(a, make_run_id());
  EXPECT_EQ(a.to_string().size(), 32u);
}

}  // namespace
}  // namespace smartinf::storage
