// The spool over two devices: what was put comes back, is spread over both, and a device that fails
// holds up nobody.
#include "smartinf/engine/spool.h"

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/fake_device.h"
#include "smartinf/csd/fault_ring.h"
#include "smartinf/csd/test_device.h"
#include "smartinf/engine/fake_source.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {
namespace {

using base::AlignedBuffer;
using base::ErrorCode;
using base::kKiB;
using base::kMiB;
using base::Status;
using ::testing::HasSubstr;

AlignedBuffer filled(uint64_t bytes, uint64_t seed) {
  auto buffer = AlignedBuffer::allocate(bytes);
  std::mt19937_64 random(seed);
  for (uint64_t& word : std::span(reinterpret_cast<uint64_t*>(buffer->data()), bytes / 8)) {
    word = random();
  }
  return std::move(*buffer);
}

/// Two devices in memory with 2 MiB and 1 MiB of spool; the first one's drive goes by faults_.
class SpoolOverDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const uint64_t bytes : {2 * kMiB, kMiB}) {
      const bool first = devices_.empty();
      const auto layout = csd::test_layout(base::StateFormat::kF32, 0, 1);
      csd::LocalDeviceOptions options;
      options.path = options.name = first ? "drive-a" : "drive-b";
      options.store.io_bytes = 128 * kKiB;
      options.store.spool_bytes = bytes;
      if (first) {
        options.store.wrap_ring = [this](std::unique_ptr<storage::Ring> ring) {
          return std::make_unique<csd::FaultRing>(std::move(ring), faults_);
        };
      }
      auto drive = csd::EmulatedDrive::create(
          *csd::EmulatedDrive::size_for(layout, storage::Durability::kStep, bytes));
      ASSERT_TRUE(drive.ok());
      drives_.push_back(std::move(*drive));
      auto device = csd::create_emulated_device(options, layout, *drives_.back());
      ASSERT_TRUE(device.ok()) << device.status().to_string();
      devices_.push_back(std::move(*device));
    }
    faults_.kind = base::TrafficKind::kActivation;
    spool_ = std::make_unique<Spool>(devices_, watch_);
  }
  void TearDown() override { devices_.clear(); }

  Spool::Ticket put(const AlignedBuffer& data) {
    const auto ticket = spool_->put(data.bytes());
    EXPECT_TRUE(ticket.ok()) << ticket.status().to_string();
    return ticket.ok() ? *ticket : Spool::Ticket{};
  }
  void expect_back(Spool::Ticket ticket, const AlignedBuffer& data) {
    const auto out = AlignedBuffer::allocate(data.size());
    const Status started = spool_->start_get(ticket, out->bytes());
    ASSERT_TRUE(started.ok()) << started.to_string();
    const Status got = spool_->wait(ticket);
    ASSERT_TRUE(got.ok()) << got.to_string();
    EXPECT_TRUE(std::ranges::equal(out->bytes(), data.bytes()));
  }
  uint64_t written(size_t device) const {
    return devices_[device]->store_traffic().down(base::TrafficKind::kActivation);
  }

  csd::Faults faults_;
  DeviceWatch watch_{std::chrono::seconds(60)};
  std::unique_ptr<Spool> spool_;  // before the devices, which are destroyed first
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives_;
  std::vector<std::unique_ptr<csd::Device>> devices_;
};

TEST_F(SpoolOverDevices, ManySpansComeBackInAnyOrderAndFillTheDevicesEvenly) {
  std::vector<AlignedBuffer> data;
  std::vector<Spool::Ticket> tickets;
  for (uint64_t i = 0; i < 24; ++i) {
    data.push_back(filled((4 + 4 * (i * 7 % 31)) * kKiB, i));
    tickets.push_back(put(data.back()));
  }
  for (const Spool::Ticket ticket : tickets) EXPECT_TRUE(spool_->wait(ticket).ok());
  const uint64_t all = spool_->used_bytes();
  EXPECT_EQ(written(0) + written(1), all);
  EXPECT_NEAR(static_cast<double>(written(0)), 2.0 / 3 * static_cast<double>(all), 128 * 1024.0);
  std::vector<AlignedBuffer> out;
  for (size_t i = data.size(); i-- > 0;) {
    out.push_back(std::move(*AlignedBuffer::allocate(data[i].size())));
    ASSERT_TRUE(spool_->start_get(tickets[i], out.back().bytes()).ok());
  }
  for (size_t i = 0; i < data.size(); ++i) {
    ASSERT_TRUE(spool_->wait(tickets[i]).ok());
    EXPECT_TRUE(std::ranges::equal(out[data.size() - 1 - i].bytes(), data[i].bytes()));
    spool_->drop(tickets[i]);
  }
  EXPECT_EQ(spool_->used_bytes(), 0u);
  EXPECT_EQ(spool_->counts().put_bytes, all);
  EXPECT_EQ(spool_->counts().got_bytes, all);
  EXPECT_EQ(spool_->counts().copied_bytes, 0u);
  EXPECT_EQ(spool_->counts().used_bytes_max, all);
}

TEST_F(SpoolOverDevices, TheSameSpansAreAlwaysPlacedAlike) {
  std::array<uint64_t, 2> before{};
  for (int round = 0; round < 2; ++round) {
    std::vector<Spool::Ticket> tickets;
    const auto data = filled(64 * kKiB, 1);
    const std::array<uint64_t, 2> from{written(0), written(1)};
    for (int i = 0; i < 10; ++i) tickets.push_back(put(data));
    for (const Spool::Ticket ticket : tickets) spool_->drop(ticket);
    const std::array<uint64_t, 2> moved{written(0) - from[0], written(1) - from[1]};
    if (round == 1) {
      EXPECT_EQ(moved, before);
    }
    before = moved;
  }
}

TEST_F(SpoolOverDevices, WhatIsWantedBackWhileItIsWrittenIsCopiedAndNeedsNoDrive) {
  faults_.what = csd::Faults::What::kHoldWrites;
  const auto data = filled(100 * kKiB, 3);
  const Spool::Ticket ticket = put(data);  // to the first device, which says nothing
  expect_back(ticket, data);
  EXPECT_EQ(spool_->counts().copied_bytes, data.size());
  EXPECT_EQ(devices_[0]->store_traffic().up(base::TrafficKind::kActivation), 0u);
  faults_.what = csd::Faults::What::kNothing;
  spool_->drop(ticket);
  EXPECT_EQ(written(0), data.size()) << "dropped when the drive needs the data no more";
  EXPECT_EQ(spool_->used_bytes(), 0u);
}

TEST_F(SpoolOverDevices, WhetherItIsWrittenCanBeAskedWithoutWaiting) {
  faults_.what = csd::Faults::What::kHoldWrites;
  const auto data = filled(100 * kKiB, 12);
  const Spool::Ticket held = put(data);   // to the first device
  const Spool::Ticket other = put(data);  // to the second one
  while (!spool_->settled(other)) std::this_thread::yield();
  EXPECT_FALSE(spool_->settled(held));
  faults_.what = csd::Faults::What::kNothing;
  while (!spool_->settled(held)) std::this_thread::yield();
  ASSERT_TRUE(spool_->wait(held).ok());
  expect_back(held, data);
  spool_->drop(held);
  spool_->drop(other);
}

TEST_F(SpoolOverDevices, AfterTheWaitItComesFromTheDriveAndAsOftenAsItIsWanted) {
  auto data = filled(100 * kKiB, 4);
  const auto same = filled(100 * kKiB, 4);
  const Spool::Ticket ticket = put(data);
  ASSERT_TRUE(spool_->wait(ticket).ok());
  std::ranges::fill(data.bytes(), std::byte{0});  // it is the caller's again
  expect_back(ticket, same);
  expect_back(ticket, same);
  EXPECT_EQ(spool_->counts().got_bytes, 2 * data.size());
  EXPECT_EQ(spool_->counts().copied_bytes, 0u);
  spool_->drop(ticket);
}

TEST_F(SpoolOverDevices, AFullSpoolSaysSoAndHasRoomAgainWhenSpansAreDropped) {
  std::vector<Spool::Ticket> tickets;
  const auto data = filled(256 * kKiB, 5);
  for (int i = 0; i < 12; ++i) tickets.push_back(put(data));
  const Status full = spool_->put(data.bytes()).status();
  EXPECT_EQ(full.code(), ErrorCode::kNoSpace);
  EXPECT_THAT(full.to_string(),
              HasSubstr("no room for 256 KiB in one piece: 0 B of its 3.00 MiB are free"));
  // Holes beside each other become one, whatever the order.
  for (const size_t i : {4, 0, 11, 7, 2, 9, 1, 10, 3, 5, 8, 6}) spool_->drop(tickets[i]);
  const auto large = filled(2 * kMiB, 6);
  const Spool::Ticket ticket = put(large);
  ASSERT_TRUE(spool_->wait(ticket).ok());
  expect_back(ticket, large);
  spool_->drop(ticket);
}

TEST_F(SpoolOverDevices, MemoryThatIsNotAlignedAndOtherSizesAreRefused) {
  const auto data = filled(16 * kKiB, 7);
  EXPECT_EQ(spool_->put(data.bytes().first(1000)).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(spool_->put(data.bytes().subspan(64, 4096)).status().code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(spool_->put({}).status().code(), ErrorCode::kInvalidArgument);
  const Spool::Ticket ticket = put(data);
  EXPECT_EQ(spool_->start_get(ticket, data.bytes().first(4096)).code(),
            ErrorCode::kInvalidArgument);
  spool_->drop(ticket);
}

TEST_F(SpoolOverDevices, AFailingDriveIsNamedAndTheOthersSpansComeBack) {
  faults_.what = csd::Faults::What::kFailWrites;
  const auto data = filled(200 * kKiB, 8);
  const Spool::Ticket bad = put(data);
  const Spool::Ticket good = put(data);
  const Status failed = spool_->wait(bad);
  EXPECT_EQ(failed.code(), ErrorCode::kIo);
  EXPECT_THAT(failed.to_string(), HasSubstr("drive-a"));
  const auto out = AlignedBuffer::allocate(data.size());
  EXPECT_EQ(spool_->start_get(bad, out->bytes()).code(), ErrorCode::kIo);
  ASSERT_TRUE(spool_->wait(good).ok());
  expect_back(good, data);
  spool_->drop(bad);
  spool_->drop(good);
  EXPECT_EQ(spool_->used_bytes(), 0u);
  faults_.what = csd::Faults::What::kNothing;
  const Spool::Ticket again = put(data);
  ASSERT_TRUE(spool_->wait(again).ok());
  faults_.what = csd::Faults::What::kFlipReads;
  ASSERT_TRUE(spool_->start_get(again, out->bytes()).ok());
  EXPECT_EQ(spool_->wait(again).code(), ErrorCode::kCorrupt);
  faults_.what = csd::Faults::What::kNothing;
  expect_back(again, data);  // it was damaged on its way only
}

/// A device that was given up may answer after all.
TEST_F(SpoolOverDevices, MemoryThatALateDeviceMayUseStays) {
  DeviceWatch impatient(std::chrono::milliseconds(60));
  Spool spool(devices_, impatient);
  const auto data = filled(100 * kKiB, 11);
  const auto ticket = spool.put(data.bytes());
  ASSERT_TRUE(ticket.ok() && spool.wait(*ticket).ok());
  faults_.what = csd::Faults::What::kHoldReads;
  auto memory = AlignedBuffer::allocate(data.size());
  ASSERT_TRUE(spool.start_get(*ticket, memory->bytes()).ok());
  const Status late = spool.wait(*ticket);
  EXPECT_EQ(late.code(), ErrorCode::kTimeout) << late.to_string();
  spool.drop(*ticket);
  const std::span<const std::byte> out = memory->bytes();
  spool.retire(std::make_shared<AlignedBuffer>(std::move(*memory)));
  faults_.what = csd::Faults::What::kNothing;
  devices_.clear();  // waits for what they still do
  EXPECT_TRUE(std::ranges::equal(out, data.bytes()));
}

// ---- Through an updater.

TEST(SpoolOfAnUpdater, IsThereWhenItWasAskedForAndStepsGoOnBesideIt) {
  const Scratch scratch;
  UpdaterOptions options =
      options_of({.name = "", .devices = 2, .subgroup_elements = kBlock}, scratch);
  options.devices[0].bandwidth = 3;
  options.devices[1].bandwidth = 1;
  options.spool_bytes = 4 * kMiB;
  auto updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  ASSERT_NE((*updater)->spool(), nullptr);
  Spool& spool = *(*updater)->spool();
  EXPECT_EQ(spool.size_bytes(), 4 * kMiB);
  EXPECT_THAT((*updater)->describe_devices()[0], HasSubstr("a spool of 3.00 MiB"));
  initialize(**updater);
  const auto data = filled(kMiB, 9);
  const auto first = spool.put(data.bytes());
  const auto second = spool.put(data.bytes());
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(spool.wait(*first).ok());
  Outcome outcome;
  run_steps(**updater, 1, 2, outcome);
  const auto out = AlignedBuffer::allocate(kMiB);
  ASSERT_TRUE(spool.start_get(*first, out->bytes()).ok());
  ASSERT_TRUE(spool.wait(*first).ok());
  EXPECT_TRUE(std::ranges::equal(out->bytes(), data.bytes()));
  updater->reset();  // with a span that nobody has waited for

  options.spool_bytes = 0;
  updater = Updater::open(options, contract_space());
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  EXPECT_EQ((*updater)->spool(), nullptr);
  EXPECT_EQ((*updater)->committed_step(), 2u);
}

TEST(SpoolOfAnUpdater, ADeviceThatVanishesHoldsUpNobody) {
  UpdaterOptions options;
  options.subgroup_elements = kBlock;
  options.spool_bytes = 2 * kMiB;
  options.device_silence_max = std::chrono::milliseconds(60);
  std::vector<std::shared_ptr<csd::FakeDrive>> drives;
  std::vector<std::unique_ptr<DeviceSource>> sources;
  for (const char* name : {"drive-a", "drive-b"}) {
    drives.push_back(std::make_shared<csd::FakeDrive>());
    sources.push_back(std::make_unique<FakeSource>(drives.back(), name));
  }
  auto updater = Updater::open(options, contract_space(), std::move(sources));
  ASSERT_TRUE(updater.ok()) << updater.status().to_string();
  initialize(**updater);
  Spool& spool = *(*updater)->spool();
  drives[0]->silent_from = csd::PutSpool{};
  const auto data = filled(64 * kKiB, 10);
  const auto lost = spool.put(data.bytes());
  const auto kept = spool.put(data.bytes());
  ASSERT_TRUE(lost.ok() && kept.ok());
  const Status gone = spool.wait(*lost);
  EXPECT_EQ(gone.code(), ErrorCode::kTimeout) << gone.to_string();
  EXPECT_THAT(gone.to_string(), HasSubstr("drive-a"));
  ASSERT_TRUE(spool.wait(*kept).ok());
  const auto out = AlignedBuffer::allocate(data.size());
  ASSERT_TRUE(spool.start_get(*kept, out->bytes()).ok());
  ASSERT_TRUE(spool.wait(*kept).ok());
  spool.drop(*lost);
  spool.drop(*kept);
  EXPECT_FALSE((*updater)->begin_step().ok()) << "it was given up for good";
}

}  // namespace
}  // namespace smartinf::engine
