// The spool of a device: what was put comes back, whatever else the device does meanwhile.
#include <optional>
#include <thread>

#include "smartinf/base/log.h"
#include "smartinf/storage/faulty_ring.h"

#include "tests/device_contract/contract.h"

namespace smartinf::csd {
namespace {

constexpr uint64_t kSpoolBytes = 4 * base::kMiB;

class DeviceSpool : public DeviceContract {
 protected:
  void SetUp() override {
    DeviceContract::SetUp();
    spool_bytes_ = kSpoolBytes;
  }

  static base::AlignedBuffer filled(uint64_t bytes, uint64_t seed) {
    auto buffer = base::AlignedBuffer::allocate(bytes);
    std::mt19937_64 random(seed);
    for (uint64_t& word : std::span(reinterpret_cast<uint64_t*>(buffer->data()), bytes / 8)) {
      word = random();
    }
    return std::move(*buffer);
  }
  static bool equal(const base::AlignedBuffer& a, const base::AlignedBuffer& b) {
    return std::ranges::equal(a.bytes(), b.bytes());
  }
  Status put_spool(uint64_t offset, const base::AlignedBuffer& data) {
    return run(PutSpool{offset, data.bytes()});
  }
  /// Whether what comes back is `data`.
  void expect_spooled(uint64_t offset, const base::AlignedBuffer& data) {
    const auto found = base::AlignedBuffer::allocate(data.size());
    const Status status = run(GetSpool{offset, found->bytes()});
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(equal(*found, data)) << "at " << offset;
  }
  /// Spans of several sizes, one behind the other, until the spool is full.
  std::vector<std::pair<uint64_t, base::AlignedBuffer>> spans(uint64_t seed) {
    std::vector<std::pair<uint64_t, base::AlignedBuffer>> all;
    uint64_t offset = 0;
    for (const uint64_t kib : {4, 1000, 260, 2832}) {
      all.emplace_back(offset, filled(kib * base::kKiB, seed + offset));
      offset += kib * base::kKiB;
    }
    EXPECT_EQ(offset, kSpoolBytes);
    return all;
  }
  /// Waits for kDone of the one command of `queue`.
  static Status wait(CompletionQueue& queue, const Command& command) {
    Completion done;
    if (!queue.pop(done, std::chrono::seconds(30)) || done.command != &command) {
      return Status(base::ErrorCode::kTimeout, "no completion");
    }
    return done.status;
  }
};

TEST_P(DeviceSpool, WhatComesBackIsWhatWentAndOnlyThat) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(device_->info().spool_bytes, kSpoolBytes);
  const auto host_before = device_->host_traffic();
  const auto store_before = device_->store_traffic();
  const auto all = spans(1);
  // All at once, in the order in which they end.
  std::vector<Command> puts(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    puts[i].message = PutSpool{all[i].first, all[i].second.bytes()};
    driver_.start(puts[i]);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    Completion done;
    ASSERT_TRUE(driver_.queue.pop(done, std::chrono::seconds(100)));
    ASSERT_TRUE(done.status.ok()) << done.status.to_string();
  }
  for (const auto& [offset, data] : all) expect_spooled(offset, data);
  for (const auto& moved :
       {device_->host_traffic().since(host_before), device_->store_traffic().since(store_before)}) {
    EXPECT_EQ(moved.down(base::TrafficKind::kActivation), kSpoolBytes);
    EXPECT_EQ(moved.up(base::TrafficKind::kActivation), kSpoolBytes);
    EXPECT_EQ(moved.up_total() + moved.down_total(), 2 * kSpoolBytes);
  }
  // One that was overwritten in part does not come back as a whole; its neighbours do.
  const auto over = filled(8 * base::kKiB, 9);
  ASSERT_TRUE(put_spool(all[1].first + 4096, over).ok());
  const auto found = base::AlignedBuffer::allocate(all[1].second.size());
  EXPECT_EQ(run(GetSpool{all[1].first, found->bytes()}).code(),
            base::ErrorCode::kFailedPrecondition);
  expect_spooled(all[0].first, all[0].second);
  expect_spooled(all[2].first, all[2].second);
  expect_spooled(all[1].first + 4096, over);
}

TEST_P(DeviceSpool, GradientsUpdateCommitAndAbortGoOnBesideItAndLeaveItAlone) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const auto all = spans(2);
  CompletionQueue queue;  // apart from the driver's
  CompletionQueue queue_of_second;
  const auto start = [&](Command& command, CompletionQueue& replies) {
    command.replies = &replies;
    device_->submit(command);
  };
  Command first{PutSpool{all[1].first, all[1].second.bytes()}};
  ASSERT_TRUE(run(BeginStep{1}).ok());
  start(first, queue);
  put_all(1);
  ASSERT_TRUE(wait(queue, first).ok());
  Update update = update_of(1);
  Command updating{update};
  driver_.start(updating);
  Command second{PutSpool{all[3].first, all[3].second.bytes()}};
  const auto found = base::AlignedBuffer::allocate(all[1].second.size());
  Command back{GetSpool{all[1].first, found->bytes()}};
  start(second, queue_of_second);
  start(back, queue);
  ASSERT_TRUE(wait(queue, back).ok());
  EXPECT_TRUE(equal(*found, all[1].second));
  const Status updated = driver_.wait_for(updating);
  ASSERT_TRUE(updated.ok()) << updated.to_string();
  finish_step(1);
  ASSERT_TRUE(wait(queue_of_second, second).ok());
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_spooled(all[1].first, all[1].second);
  expect_spooled(all[3].first, all[3].second);
  ASSERT_TRUE(run(BeginStep{2}).ok());
  put_all(2);
  ASSERT_TRUE(run(Abort{2}).ok());
  expect_spooled(all[1].first, all[1].second);
  expect_spooled(all[3].first, all[3].second);
  if (!GetParam().writes_postponed()) expect_state(reference);
}

TEST_P(DeviceSpool, IsRefusedWhereItDoesNotFitOrIsNotAligned) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  using base::ErrorCode;
  const auto data = filled(kSpoolBytes, 3);
  const Status beyond = put_spool(4096, data);
  EXPECT_EQ(beyond.code(), ErrorCode::kNoSpace);
  EXPECT_NE(beyond.to_string().find("drive-a"), std::string::npos) << beyond.to_string();
  EXPECT_EQ(run(PutSpool{~uint64_t{4095}, data.bytes()}).code(), ErrorCode::kNoSpace);
  EXPECT_EQ(run(PutSpool{512, data.bytes().first(4096)}).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(run(PutSpool{0, data.bytes().first(4000)}).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(run(PutSpool{0, data.bytes().subspan(512, 4096)}).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(run(PutSpool{0, {}}).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(run(GetSpool{0, data.bytes().first(4096)}).code(), ErrorCode::kFailedPrecondition);
  ASSERT_TRUE(put_spool(0, data).ok());
  EXPECT_EQ(run(GetSpool{0, data.bytes().first(4096)}).code(), ErrorCode::kFailedPrecondition);
}

TEST_P(DeviceSpool, IsGoneWhenTheDeviceIsClosedAndTheStateIsNot) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  const auto data = filled(64 * base::kKiB, 4);
  ASSERT_TRUE(put_spool(0, data).ok());
  open();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(run(GetSpool{0, data.bytes()}).code(), base::ErrorCode::kFailedPrecondition);
  spool_bytes_ = 0;
  if (!GetParam().fake) {
    open();
    ASSERT_FALSE(HasFatalFailure());
    const Status none = put_spool(0, data);
    EXPECT_EQ(none.code(), base::ErrorCode::kUnsupported) << none.to_string();
  }
  ReferenceModel reference(layout_, groups_);
  expect_state(reference);
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceSpool, testing::ValuesIn([] {
                           std::vector<Kind> chosen;
                           for (const Kind& kind : kinds()) {
                             static constexpr std::array<std::string_view, 10> kNames = {
                                 "memory",
                                 "fake",
                                 "local",
                                 "local_threads_ring",
                                 "local_spilled",
                                 "behind_links",
                                 "host_update",
                                 "no_checksums",
                                 "scratch_half_in_memory",
                                 "remote"};
                             if (std::ranges::find(kNames, kind.name) != kNames.end())
                               chosen.push_back(kind);
                           }
                           return chosen;
                         }()),
                         [](const testing::TestParamInfo<Kind>& kind) { return kind.param.name; });
INSTANTIATE_TEST_SUITE_P(OpenCl, DeviceSpool,
                         testing::ValuesIn(opencl_kinds({"opencl", "opencl_peer_spilled"})),
                         [](const auto& param) { return param.param.name; });

// ---- A drive that fails.

class DeviceSpoolFaults : public DeviceSpool {
 protected:
  void SetUp() override {
    DeviceSpool::SetUp();
    faulty_ = true;
    faults_.kind = base::TrafficKind::kActivation;
    create();
  }
  /// A step is made after all that, and gives what it would have given.
  void expect_step_works() {
    faults_.what = Faults::What::kNothing;
    ReferenceModel reference(layout_, groups_);
    step(1);
    finish_step(1);
    reference.step(1, GetParam().gradient_type, GetParam().weights_type);
    expect_state(reference);
  }
};

TEST_P(DeviceSpoolFaults, AFlippedBitIsFoundAndTheNextReadIsRight) {
  const auto data = filled(kSpoolBytes, 5);
  ASSERT_TRUE(put_spool(0, data).ok());
  faults_.after = 2;
  faults_.what = Faults::What::kFlipReads;
  const auto found = base::AlignedBuffer::allocate(kSpoolBytes);
  const Status damaged = run(GetSpool{0, found->bytes()});
  EXPECT_EQ(damaged.code(), base::ErrorCode::kCorrupt) << damaged.to_string();
  EXPECT_NE(damaged.to_string().find("drive-a"), std::string::npos) << damaged.to_string();
  EXPECT_NE(damaged.to_string().find("offset"), std::string::npos) << damaged.to_string();
  EXPECT_NE(damaged.to_string().find("the step can be repeated"), std::string::npos);
  faults_.what = Faults::What::kNothing;
  expect_spooled(0, data);
  expect_step_works();
}

TEST_P(DeviceSpoolFaults, AWriteThatTheDriveLostIsFound) {
  const auto old = filled(64 * base::kKiB, 6);
  const auto data = filled(64 * base::kKiB, 7);
  ASSERT_TRUE(put_spool(0, old).ok());
  faults_.what = Faults::What::kDropWrites;
  ASSERT_TRUE(put_spool(0, data).ok());
  faults_.what = Faults::What::kNothing;
  const auto found = base::AlignedBuffer::allocate(data.size());
  EXPECT_EQ(run(GetSpool{0, found->bytes()}).code(), base::ErrorCode::kCorrupt);
}

TEST_P(DeviceSpoolFaults, AFailingDriveIsNamedAndTheStepDoesNotFailWithIt) {
  const auto data = filled(kSpoolBytes, 8);
  ReferenceModel reference(layout_, groups_);
  ASSERT_TRUE(run(BeginStep{1}).ok());
  faults_.what = Faults::What::kFailWrites;
  const Status written = put_spool(0, data);
  EXPECT_EQ(written.code(), base::ErrorCode::kIo) << written.to_string();
  EXPECT_NE(written.to_string().find("drive-a"), std::string::npos) << written.to_string();
  const auto found = base::AlignedBuffer::allocate(kSpoolBytes);
  EXPECT_EQ(run(GetSpool{0, found->bytes()}).code(), base::ErrorCode::kFailedPrecondition)
      << "it was not written as a whole";
  faults_.what = Faults::What::kNothing;
  ASSERT_TRUE(put_spool(0, data).ok());
  faults_.what = Faults::What::kFailReads;
  const Status read = run(GetSpool{0, found->bytes()});
  EXPECT_EQ(read.code(), base::ErrorCode::kIo) << read.to_string();
  put_all(1);
  ASSERT_TRUE(run(update_of(1)).ok());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
}

TEST_P(DeviceSpoolFaults, WhatIsBeingMovedIsNotOverwrittenAndUpdatesDoNotWaitForIt) {
  const auto data = filled(64 * base::kKiB, 9);  // a drive takes only so many at once
  faults_.what = Faults::What::kHoldWrites;
  CompletionQueue queue;
  Command put{PutSpool{0, data.bytes()}};
  put.replies = &queue;
  device_->submit(put);
  EXPECT_EQ(put_spool(4096, filled(4096, 1)).code(), base::ErrorCode::kFailedPrecondition);
  const auto found = base::AlignedBuffer::allocate(data.size());
  EXPECT_EQ(run(GetSpool{0, found->bytes()}).code(), base::ErrorCode::kFailedPrecondition);
  step(1);
  finish_step(1);
  Completion early;
  EXPECT_FALSE(queue.pop(early, std::chrono::nanoseconds(0))) << "the drive has not said so";
  faults_.what = Faults::What::kNothing;
  ASSERT_TRUE(wait(queue, put).ok());
  expect_spooled(0, data);
}

TEST_P(DeviceSpoolFaults, ClosingWaitsForWhatIsUnderWay) {
  const auto data = filled(kSpoolBytes, 10);
  faults_.what = Faults::What::kHoldWrites;
  CompletionQueue queue;
  Command put{PutSpool{0, data.bytes()}};
  put.replies = &queue;
  device_->submit(put);
  while (faults_.done == 0) std::this_thread::yield();
  std::jthread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it is closing by then
    faults_.what = Faults::What::kNothing;
  });
  device_.reset();
  Completion done;
  ASSERT_TRUE(queue.pop(done, std::chrono::nanoseconds(0))) << "not answered";
  EXPECT_TRUE(done.status.ok()) << done.status.to_string();
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceSpoolFaults, testing::ValuesIn([] {
                           Kind memory;
                           memory.name = "memory";
                           Kind local;
                           local.name = "local";
                           local.memory = false;
                           return std::vector<Kind>{memory, local};
                         }()),
                         [](const testing::TestParamInfo<Kind>& kind) { return kind.param.name; });

// ---- Faults by seed, of the spool's part of the drive only (and of syncs, which an I/O error
// would fail).

TEST(DeviceSpoolOnABadDrive, WhatComesBackIsRightOrAnErrorAndTheStateIsNotTouched) {
  base::set_log_sink([](base::LogLevel, std::string_view) {});
  const auto layout = test_layout(StateFormat::kF32, 0);
  const storage::StoredSubgroup& last = layout.subgroups.back();
  const uint64_t store_bytes = *EmulatedDrive::size_for(layout, storage::Durability::kStep);
  uint64_t right = 0;
  uint64_t wrong = 0;
  storage::FaultCounts counts;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    LocalDeviceOptions options;
    options.path = options.name = "drive-c";
    options.groups = test_groups(last.first_element + last.count);
    options.store.io_bytes = 128 * base::kKiB;
    options.store.spool_bytes = kSpoolBytes;
    options.store.wrap_ring = [&](std::unique_ptr<storage::Ring> ring) {
      storage::FaultOptions faults;
      faults.seed = seed;
      faults.short_transfer = faults.interrupted = faults.try_again = faults.delayed = 0.05;
      faults.no_space = faults.flipped_bit = faults.misdirected = faults.lost = 0.02;
      faults.from_offset_bytes = store_bytes;
      return storage::make_faulty_ring(std::move(ring), faults, &counts);
    };
    auto drive = EmulatedDrive::create(store_bytes + kSpoolBytes);
    ASSERT_TRUE(drive.ok());
    auto device = create_emulated_device(options, layout, **drive);
    ASSERT_TRUE(device.ok()) << device.status().to_string();
    DeviceDriver driver;
    driver.drive(**device);
    ASSERT_TRUE(driver.make_start(layout).ok());
    ASSERT_TRUE(driver.run(BeginStep{1}).ok());
    constexpr uint64_t kSpan = 512 * base::kKiB;
    const auto data = base::AlignedBuffer::allocate(kSpan);
    const auto found = base::AlignedBuffer::allocate(kSpan);
    for (uint64_t offset = 0; offset < kSpoolBytes; offset += kSpan) {
      std::mt19937_64 random(seed + offset);
      for (std::byte& byte : data->bytes()) byte = static_cast<std::byte>(random());
      Status status = driver.run(PutSpool{offset, data->bytes()});
      if (status.ok()) status = driver.run(GetSpool{offset, found->bytes()});
      if (status.ok()) {
        ++right;
        EXPECT_TRUE(std::ranges::equal(found->bytes(), data->bytes())) << "seed " << seed;
      } else {
        ++wrong;
        EXPECT_NE(status.to_string().find("drive-c"), std::string::npos) << status.to_string();
      }
    }
    ASSERT_TRUE(driver.put_all(layout, 1).ok());
    ASSERT_TRUE(driver.update(layout, 1).ok());
    const Status committed = driver.finish_step(1);
    EXPECT_TRUE(committed.ok()) << committed.to_string();
  }
  base::set_log_sink({});
  EXPECT_GT(right, 20u);
  EXPECT_GT(wrong, 20u);
  EXPECT_GT(counts.silent, 20u);
}

}  // namespace
}  // namespace smartinf::csd
