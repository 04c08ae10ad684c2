// Crash tests over a remote device: its server ends at every boundary of the I/O of a prepare and
// of a commit, while the client waits for the answer, and another one is started on what is left.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <random>

#include "smartinf/serve/test_session.h"
#include "smartinf/storage/forwarding_ring.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Status;
using storage::IoOp;
using storage::IoRequest;

enum class End {
  kKilled,     // the process is gone; the drive has what was written
  kPowerLoss,  // the drive has what was synced, and of the rest nothing or some sectors, by seed
};

/// Shared with the ring of whatever device is open on the drive.
struct Crash {
  std::mutex mutex;
  bool armed = false;
  uint64_t events = 0;  // since it was armed: what is submitted, and what is reaped
  uint64_t at = 0;
  std::vector<std::byte> image;    // of the drive at that event
  std::vector<std::byte> durable;  // what is there now whatever happens
  std::function<void()> cut;       // the client hears nothing any more
};

class CrashRing final : public storage::ForwardingRing {
 public:
  CrashRing(std::unique_ptr<storage::Ring> inner, Crash& crash, std::span<const std::byte> drive)
      : ForwardingRing(std::move(inner)), crash_(crash), drive_(drive) {}

  Status submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* request : requests) {
      event();
      SI_RETURN_IF_ERROR(ForwardingRing::submit({&request, 1}));
      const std::lock_guard lock(crash_.mutex);
      if (request->op == IoOp::kSync) crash_.durable.assign(drive_.begin(), drive_.end());
      if (request->op == IoOp::kWriteDurable) {
        std::memcpy(crash_.durable.data() + request->offset_bytes, request->buffer.data(),
                    request->buffer.size());
      }
    }
    return Status();
  }
  base::Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    const auto count = ForwardingRing::reap(done, wait);
    if (count.ok() && *count > 0) event();
    return count;
  }

 private:
  void event() {
    const std::lock_guard lock(crash_.mutex);
    if (!crash_.armed || crash_.events++ != crash_.at) return;
    crash_.image.assign(drive_.begin(), drive_.end());
    crash_.armed = false;
    crash_.cut();
  }

  Crash& crash_;
  const std::span<const std::byte> drive_;
};

class RemoteRestart : public RemoteSession, public testing::WithParamInterface<End> {
 protected:
  RemoteRestart() {
    crash_.cut = [this] {
      durable_at_end_ = crash_.durable;
      proxy_->lead_to(1);  // nobody listens there
      proxy_->cut();
    };
    wrap_ring_ = [this](std::unique_ptr<storage::Ring> ring) {
      return std::make_unique<CrashRing>(std::move(ring), crash_, drive_->contents());
    };
  }
  /// Another server, on a drive with these contents.
  void restart_on(const std::vector<std::byte>& contents) {
    server_.reset();
    std::ranges::copy(contents, drive_->contents().begin());
    crash_.durable = contents;
    start_server();
  }
  std::vector<std::byte> left_by(End end, uint64_t seed) const {
    if (end == End::kKilled) return crash_.image;
    std::vector<std::byte> left = durable_at_end_;
    constexpr size_t kSector = 64;  // less than any drive's
    std::mt19937_64 random(seed);
    for (size_t at = 0; seed % 2 == 1 && at < left.size(); at += kSector) {
      const size_t size = std::min(kSector, left.size() - at);
      if (std::memcmp(&left[at], &crash_.image[at], size) == 0 || random() % 2 == 0) continue;
      std::memcpy(&left[at], &crash_.image[at], size);
    }
    return left;
  }
  bool has_ended() {
    const std::lock_guard lock(crash_.mutex);
    return !crash_.image.empty();
  }
  /// Step 2 is under way and not prepared.
  void begin_step_2(const std::vector<std::byte>& after_step_1) {
    device_.reset();
    restart_on(after_step_1);
    ASSERT_OK(open());
    ASSERT_OK(driver_.run(csd::BeginStep{2}));
    ASSERT_OK(driver_.put_all(layout_, 2));
    ASSERT_OK(driver_.update(layout_, 2));
  }
  /// Makes the session, but does not recover.
  storage::StoreState reopen() {
    device_.reset();
    source_ = remote_source(remote());
    auto device = source_->open(share_);
    EXPECT_TRUE(device.ok()) << device.status().to_string();
    if (!device.ok()) return {};
    device_ = std::move(*device);
    driver_.drive(*device_);
    return device_->state();
  }

  Crash crash_;
  std::vector<std::byte> durable_at_end_;
};

TEST_P(RemoteRestart, InAPrepareOrACommitEndsOnOneSide) {
  crash_.durable.assign(drive_->contents().begin(), drive_->contents().end());
  ASSERT_OK(create());
  ASSERT_OK(step(1));
  device_.reset();
  server_.reset();
  const std::vector<std::byte> after_step_1(drive_->contents().begin(), drive_->contents().end());
  uint64_t old = 0, prepared = 0, committed = 0;
  for (uint64_t at = 0;; ++at) {
    SCOPED_TRACE("event " + std::to_string(at));
    begin_step_2(after_step_1);
    if (HasFatalFailure()) return;
    {
      const std::lock_guard lock(crash_.mutex);
      crash_.events = 0;
      crash_.at = at;
      crash_.image.clear();
      crash_.armed = true;
    }
    std::jthread restarter([&](const std::stop_token& stop) {
      while (!stop.stop_requested() && !has_ended())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (has_ended()) restart_on(left_by(GetParam(), at));
    });
    Status status = driver_.prepare(2);
    const bool committing = status.ok();
    if (committing) status = driver_.run(csd::Commit{2});
    restarter.request_stop();
    restarter.join();
    if (!has_ended()) {  // there are no more events
      ASSERT_OK(status);
      break;
    }
    // Asked for again, it is not taken for done, nor done on a device that was not recovered.
    EXPECT_EQ(status.code(), ErrorCode::kUnavailable) << status.to_string();
    const storage::StoreState state = reopen();
    ASSERT_TRUE(state.committed_step == 1 || (committing && state.committed_step == 2));
    const bool ready = state.committed_step == 1 && state.prepared_step == 2;
    ++(state.committed_step == 2 ? committed : ready ? prepared : old);
    // Where it is prepared the other devices decide.
    const uint64_t step_left = ready ? 1 + at / 2 % 2 : state.committed_step;
    ASSERT_OK(device_->recover_to(step_left));
    expect_state_after(step_left);
    if (step_left == 1) ASSERT_OK(step(2));
    expect_state_after(2);
  }
  EXPECT_GT(old, 0u);
  EXPECT_GT(prepared, 1u);
  // A commit that follows is only written: with all devices prepared, it is decided.
  EXPECT_TRUE(committed > 0 || GetParam() == End::kPowerLoss);
}

INSTANTIATE_TEST_SUITE_P(Remote, RemoteRestart, testing::Values(End::kKilled, End::kPowerLoss));

}  // namespace
}  // namespace smartinf::serve::wire
