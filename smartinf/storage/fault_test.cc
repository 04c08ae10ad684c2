// The store on a ring that misbehaves: what can be cured is, what cannot is a typed error, and no
// wrong number is ever taken for a right one.
#include <atomic>
#include <cerrno>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/log.h"
#include "smartinf/storage/faulty_ring.h"
#include "smartinf/storage/forwarding_ring.h"
#include "smartinf/storage/memory_store_test.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Status;
using ::testing::HasSubstr;

MemoryStore::Wrap faulty(const FaultOptions& options, FaultCounts* counts) {
  return [options, counts](std::unique_ptr<Ring> inner) {
    return make_faulty_ring(std::move(inner), options, counts);
  };
}

TEST(Faults, PassingOnesAreCured) {
  FaultCounts counts;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    FaultOptions options;
    options.seed = seed;
    options.short_transfer = 0.2;
    options.interrupted = 0.1;
    options.try_again = 0.1;
    options.delayed = 0.3;
    MemoryStore memory;
    ASSERT_TRUE(memory.create(faulty(options, &counts)).ok());
    for (base::StepNumber step = 0; step < 4; ++step) {
      const Status status = memory.make_step(step);
      ASSERT_TRUE(status.ok()) << "seed " << seed << ": " << status.to_string();
      bool equal = false;
      ASSERT_TRUE(memory.read_step(step, equal).ok());
      EXPECT_TRUE(equal);
    }
    ASSERT_TRUE(memory.open(faulty(options, &counts)).ok());
    ASSERT_TRUE(memory.store().recover_to(3).ok());
  }
  EXPECT_GT(counts.visible, 1000u) << "the ring behaved too well to show anything";
}

TEST(Faults, SomeErrorsOfTheMediumAreCuredAndLastingOnesAreTyped) {
  uint64_t failed = 0;
  uint64_t done = 0;
  for (uint64_t seed = 1; seed <= 90; ++seed) {
    FaultCounts counts;
    FaultOptions options;
    options.seed = seed;
    options.io_error = seed % 3 == 0 ? 0.02 : 0.3;
    options.no_space = seed % 2 == 0 ? 0.02 : 0;
    MemoryStore memory;
    ASSERT_TRUE(memory.create().ok());
    ASSERT_TRUE(memory.make_step(0).ok());
    base::StepNumber committed = 0;
    ASSERT_TRUE(memory.open().ok());
    ASSERT_TRUE(memory.store().recover_to(0).ok());
    memory.close();
    if (!memory.open(faulty(options, &counts)).ok()) continue;
    if (!memory.store().recover_to(0).ok()) continue;
    bool broken = false;
    for (int attempt = 0; attempt < 6 && !broken; ++attempt) {
      const Status status = memory.prepare_step(committed + 1);
      if (status.ok()) {
        ++done;
        ASSERT_TRUE(memory.store().commit(++committed).ok());
        continue;
      }
      ++failed;
      EXPECT_TRUE(status.code() == ErrorCode::kIo || status.code() == ErrorCode::kNoSpace);
      EXPECT_FALSE(status.place().path.empty());
      EXPECT_TRUE(status.place().offset_bytes.has_value());
      EXPECT_TRUE(status.place().length_bytes.has_value());
      EXPECT_NE(status.place().system_errno, 0);
      EXPECT_FALSE(status.advice().empty());
      broken = !memory.store().abort(committed + 1).ok();
    }
    // A new process on a healthy ring finds the last committed step; a broken abort may also
    // have left the step it could not abort, whole.
    ASSERT_TRUE(memory.open().ok());
    const StoreState state = memory.store().state();
    ASSERT_GE(state.prepared_step, committed);
    ASSERT_LE(state.prepared_step, committed + (broken ? 1 : 0));
    ASSERT_TRUE(memory.store().recover_to(state.prepared_step).ok());
    bool equal = false;
    const Status read = memory.read_step(state.prepared_step, equal);
    ASSERT_TRUE(read.ok()) << "seed " << seed << ": " << read.to_string();
    EXPECT_TRUE(equal) << "seed " << seed;
  }
  EXPECT_GT(failed, 20u);
  EXPECT_GT(done, 20u);
}

TEST(Faults, SilentOnesAreNeverTakenForTheState) {
  uint64_t refused = 0;
  FaultCounts counts;
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    FaultOptions options;
    options.seed = seed;
    options.flipped_bit = 0.01;
    options.misdirected = 0.01;
    options.lost = 0.01;
    MemoryStore memory;
    if (!memory.create(faulty(options, &counts)).ok()) continue;
    bool whole = true;
    for (base::StepNumber step = 0; step < 3 && whole; ++step) whole = memory.make_step(step).ok();
    if (!whole) continue;
    bool equal = false;
    for (int reader = 0; reader < 2; ++reader) {
      // First with the process that wrote, then with a new one on a healthy ring.
      if (reader == 1) {
        if (!memory.open().ok() || memory.store().state().prepared_step != 2 ||
            !memory.store().recover_to(2).ok()) {
          ++refused;
          break;
        }
      }
      if (memory.read_step(2, equal).ok()) {
        EXPECT_TRUE(equal) << "seed " << seed << ": a wrong number was taken for a right one";
      } else {
        ++refused;
      }
    }
  }
  EXPECT_GT(counts.silent, 100u);
  EXPECT_GT(refused, 20u);
}

/// Refuses the superblock writes that are not synced: those of commit().
class NoCommitRing final : public ForwardingRing {
 public:
  explicit NoCommitRing(std::unique_ptr<Ring> inner) : ForwardingRing(std::move(inner)) {}
  Status submit(std::span<IoRequest* const> requests) override {
    std::vector<IoRequest*> passed;
    for (IoRequest* request : requests) {
      const bool commit =
          request->op == IoOp::kWrite && request->offset_bytes < kSuperblockAreaBytes;
      (commit ? refused_ : passed).push_back(request);
    }
    return ForwardingRing::submit(passed);
  }
  base::Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    if (refused_.empty()) return ForwardingRing::reap(done, wait);
    done[0] = refused_.back();
    refused_.pop_back();
    done[0]->outcome = -EIO;
    return size_t{1};
  }

 private:
  std::vector<IoRequest*> refused_;
};

TEST(Faults, FailedCommitSuperblockNeverCostsTheLastGoodOne) {
  for (uint64_t cut = 0;; ++cut) {
    MemoryStore memory;
    const auto wrap = [](std::unique_ptr<Ring> inner) -> std::unique_ptr<Ring> {
      return std::make_unique<NoCommitRing>(std::move(inner));
    };
    ASSERT_TRUE(memory.create(wrap).ok());
    ASSERT_TRUE(memory.make_step(0).ok());
    ASSERT_TRUE(memory.make_step(1).ok()) << "a step is decided by prepare";
    memory.power().cut_after(cut);
    const bool whole = memory.make_step(2).ok() && memory.power().on();
    memory.close();
    memory.disk().settle(CutFate::kTorn, cut);
    memory.power().restore();
    const Status opened = memory.open();
    ASSERT_TRUE(opened.ok()) << "event " << cut << ": " << opened.to_string();
    const base::StepNumber step = memory.store().state().prepared_step;
    ASSERT_GE(step, 1u);
    ASSERT_TRUE(memory.store().recover_to(step).ok());
    bool equal = false;
    ASSERT_TRUE(memory.read_step(step, equal).ok());
    EXPECT_TRUE(equal);
    if (whole) break;
  }
}

/// Keeps completions back until told.
class HangingRing final : public ForwardingRing {
 public:
  explicit HangingRing(std::unique_ptr<Ring> inner, std::atomic<bool>& hanging)
      : ForwardingRing(std::move(inner)), hanging_(hanging) {}
  base::Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    if (!hanging_) return ForwardingRing::reap(done, wait);
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(wait, std::chrono::milliseconds(5)));
    return size_t{0};
  }

 private:
  std::atomic<bool>& hanging_;
};

/// A write on its way to a disk that does not answer while `hanging`.
class Watchdog : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(memory_.create().ok());
    ASSERT_TRUE(memory_.make_step(0).ok());
    memory_.close();
    ASSERT_TRUE(buffer_.ok());
    transfer_.offset_bytes = 8192;
    transfer_.buffer = buffer_->bytes();
    queue_.emplace(
        std::make_unique<HangingRing>(make_memory_ring(memory_.disk(), power_, 4, 1), hanging_), 0,
        "disk", true, std::chrono::milliseconds(20));
  }
  base::Result<size_t> finish(std::chrono::nanoseconds wait) {
    return queue_->finish({&done_, 1}, wait);
  }

  PowerSupply power_;
  std::atomic<bool> hanging_{true};
  MemoryStore memory_;
  const base::Result<base::AlignedBuffer> buffer_ = base::AlignedBuffer::allocate(4096);
  Transfer transfer_;
  std::optional<TransferQueue> queue_;
  Transfer* done_ = nullptr;
};

TEST_F(Watchdog, NamesTheRequestThatHangs) {
  std::vector<std::string> remarks;
  base::set_log_sink([&](base::LogLevel, std::string_view text) { remarks.emplace_back(text); });
  queue_->start(transfer_);
  const auto result = finish(std::chrono::seconds(10));
  base::set_log_sink({});
  hanging_ = false;
  EXPECT_EQ(result.status().code(), ErrorCode::kTimeout);
  EXPECT_EQ(result.status().place().offset_bytes, 8192u);
  ASSERT_FALSE(remarks.empty()) << "said before it is given up";
  EXPECT_THAT(remarks[0], HasSubstr("offset 8192"));
}

// Ctrl-Z and fg: the answer was there long ago, and nobody could look.
TEST_F(Watchdog, DoesNotCountTimeInWhichTheProcessStoodStill) {
  queue_->start(transfer_);
  const auto before = finish(std::chrono::seconds(0));
  ASSERT_TRUE(before.ok() && before.value() == 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  const auto at_once = finish(std::chrono::seconds(0));
  ASSERT_TRUE(at_once.ok()) << at_once.status().to_string();
  EXPECT_EQ(at_once.value(), 0u);
  hanging_ = false;
  const auto answered = finish(std::chrono::seconds(10));
  ASSERT_TRUE(answered.ok()) << answered.status().to_string();
  EXPECT_EQ(answered.value(), 1u);
  EXPECT_EQ(done_, &transfer_);
}

/// Fails as a whole while a sync is on its way, and works again afterwards.
class BreakingRing final : public ForwardingRing {
 public:
  BreakingRing(std::unique_ptr<Ring> inner, std::atomic<bool>& armed)
      : ForwardingRing(std::move(inner)), armed_(armed) {}
  Status submit(std::span<IoRequest* const> requests) override {
    for (const IoRequest* request : requests) {
      fail_ = fail_ || (request->op == IoOp::kSync && armed_.exchange(false));
    }
    return ForwardingRing::submit(requests);
  }
  base::Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    if (std::exchange(fail_, false)) return Status(ErrorCode::kIo, "asked to break", "A test.");
    return ForwardingRing::reap(done, wait);
  }

 private:
  std::atomic<bool>& armed_;
  bool fail_ = false;
};

// Transfers in flight may come back at any time: their memory is kept, and nothing goes on.
TEST(Faults, NothingGoesOnAfterTheRingFailed) {
  std::atomic<bool> armed{false};
  MemoryStore memory;
  ASSERT_TRUE(memory
                  .create([&](std::unique_ptr<Ring> inner) {
                    return std::make_unique<BreakingRing>(std::move(inner), armed);
                  })
                  .ok());
  ASSERT_TRUE(memory.make_step(0).ok());
  armed = true;
  EXPECT_THAT(memory.prepare_step(1).to_string(), HasSubstr("asked to break"));
  EXPECT_TRUE(memory.store().abort(1).ok()) << "nothing spoke of it yet";
  EXPECT_THAT(memory.prepare_step(1).to_string(), HasSubstr("asked to break"));
  memory.close();
  ASSERT_TRUE(memory.open().ok());
  ASSERT_TRUE(memory.store().recover_to(0).ok());
  bool equal = false;
  EXPECT_TRUE(memory.read_step(0, equal).ok());
  EXPECT_TRUE(equal);
}

}  // namespace
}  // namespace smartinf::storage
