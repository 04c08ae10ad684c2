#include "smartinf/storage/cache_file.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/log.h"
#include "smartinf/base/test_scratch.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/erase.h"
#include "smartinf/storage/faulty_ring.h"
#include "smartinf/storage/memory_ring.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr uint64_t kBlock = 4096;
constexpr uint64_t kDiskBytes = 512 * base::kKiB;

CacheIdentity identity() {
  CacheIdentity identity;
  identity.job.bytes[0] = 7;
  identity.layers = 2;
  identity.block_bytes = kBlock;
  identity.block_tokens = 32;
  identity.text = "weights 1234";
  return identity;
}

class CacheFileTest : public testing::Test {
 protected:
  CachePlace place(const FaultOptions* faults = nullptr) {
    CachePlace place;
    place.path = "disk";
    place.direct = true;
    place.size_bytes = kDiskBytes;
    place.ring = make_memory_ring(disk_, power_, 32, 1);
    if (faults != nullptr) place.ring = make_faulty_ring(std::move(place.ring), *faults, nullptr);
    return place;
  }
  Result<std::unique_ptr<CacheFile>> open(CacheIdentity wanted = identity()) {
    return CacheFile::open(place(), std::move(wanted), ~uint64_t{0}, std::chrono::seconds(10),
                           traffic_);
  }
  void open_again(CacheIdentity wanted = identity()) {
    file_.reset();
    auto file = open(std::move(wanted));
    ASSERT_TRUE(file.ok()) << file.status().to_string();
    file_ = std::move(*file);
  }
  void SetUp() override { open_again(); }

  static void fill(std::span<std::byte> block, uint64_t id, uint32_t layer, uint64_t place) {
    for (size_t i = 0; i < block.size(); ++i) {
      block[i] = static_cast<std::byte>(id * 31 + layer * 7 + place * 3 + i);
    }
  }
  /// Writes the next whole block of a layer.
  Status append(uint64_t id, uint32_t layer) {
    CachedSequence& sequence = *file_->find(id);
    const uint64_t at = sequence.layers[layer].sums.size();
    base::AlignedBuffer block = std::move(*base::AlignedBuffer::allocate(kBlock));
    fill(block.bytes(), id, layer, at);
    SI_RETURN_IF_ERROR(file_->queue().run(IoOp::kWrite, file_->place_offset(sequence, layer, at),
                                          block.bytes(), block));
    sequence.layers[layer].sums.push_back(file_->checksum(id, layer, at, block.bytes()));
    return Status();
  }
  void append_to_all(uint64_t id) {
    for (uint32_t layer = 0; layer < 2; ++layer) ASSERT_TRUE(append(id, layer).ok());
  }
  /// Blocks of a sequence that pass their checksums; those that pass are what was written.
  uint64_t right_blocks(uint64_t id) {
    const CachedSequence* sequence = file_->find(id);
    if (sequence == nullptr) return 0;
    uint64_t right = 0;
    base::AlignedBuffer block = std::move(*base::AlignedBuffer::allocate(kBlock));
    for (uint32_t layer = 0; layer < 2; ++layer) {
      for (uint64_t at = 0; at < sequence->layers[layer].sums.size(); ++at) {
        EXPECT_TRUE(
            file_->queue()
                .run(IoOp::kRead, file_->place_offset(*sequence, layer, at), block.bytes(), block)
                .ok());
        if (file_->checksum(id, layer, at, block.bytes()) != sequence->layers[layer].sums[at]) {
          continue;
        }
        std::vector<std::byte> written(kBlock);
        fill(written, id, layer, at);
        EXPECT_TRUE(std::ranges::equal(written, block.bytes())) << "served, and wrong";
        ++right;
      }
    }
    return right;
  }

  MemoryDisk disk_{kDiskBytes};
  PowerSupply power_;
  base::TrafficCounter traffic_;
  std::unique_ptr<CacheFile> file_;
};

TEST_F(CacheFileTest, WhatWasSavedIsThereAgain) {
  ASSERT_TRUE(file_->add(5, 100).ok());
  append_to_all(5);
  append_to_all(5);
  file_->find(5)->layers[1].tail_tokens = 3;
  file_->find(5)->layers[1].tail_place = 1;
  ASSERT_TRUE(file_->save().ok());
  append_to_all(5);
  ASSERT_TRUE(file_->add(6, 32).ok());
  open_again();
  ASSERT_NE(file_->find(5), nullptr);
  EXPECT_EQ(file_->find(5)->tokens_max, 100u);
  EXPECT_EQ(file_->find(5)->layers[0].sums.size(), 2u) << "of the save";
  EXPECT_EQ(file_->find(5)->layers[1].tokens(32), 67u);
  EXPECT_EQ(file_->find(5)->layers[1].tail_place, 1u);
  EXPECT_EQ(right_blocks(5), 4u);
  EXPECT_EQ(file_->find(6), nullptr) << "was not saved";
  EXPECT_EQ(file_->saves(), 1u);
}

TEST_F(CacheFileTest, VerifyingNamesEachDamagedBlock) {
  for (const uint64_t id : {5, 6}) {
    ASSERT_TRUE(file_->add(id, 100).ok());
    append_to_all(id);
    append_to_all(id);
  }
  std::vector<std::string> found;
  uint64_t done = 0;
  const auto verify = [&] {
    found.clear();
    return file_->verify(
        [&](uint64_t now, uint64_t all) {
          done = now;
          EXPECT_LE(now, all);
          return Status();
        },
        [&](const Status& damaged) { found.push_back(damaged.to_string()); });
  };
  ASSERT_TRUE(verify().ok());
  EXPECT_TRUE(found.empty());
  EXPECT_EQ(done, 8 * kBlock);
  file_->find(6)->layers[1].sums[1] ^= 1;
  file_->find(5)->layers[0].tail_tokens = 3;  // never written
  ASSERT_TRUE(verify().ok());
  ASSERT_EQ(found.size(), 2u);
  EXPECT_NE(found[0].find("of sequence 5 in layer 0"), std::string::npos) << found[0];
  EXPECT_NE(found[1].find("block 1 of sequence 6 in layer 1"), std::string::npos) << found[1];
  const Status stopped =
      file_->verify([](uint64_t, uint64_t) { return Status(ErrorCode::kCancelled, "stop"); },
                    [](const Status&) {});
  EXPECT_EQ(stopped.code(), ErrorCode::kCancelled);
}

TEST_F(CacheFileTest, NothingSavedIsAnEmptyFile) {
  ASSERT_TRUE(file_->add(5, 100).ok());
  append_to_all(5);
  open_again();
  EXPECT_TRUE(file_->sequences().empty());
}

TEST_F(CacheFileTest, AnotherJobsIsRefusedAndNamed) {
  ASSERT_TRUE(file_->save().ok());
  CacheIdentity other = identity();
  other.text = "weights 99";
  const auto file = open(other);
  EXPECT_EQ(file.status().code(), ErrorCode::kMismatch);
  EXPECT_NE(file.status().to_string().find("weights 1234"), std::string::npos);
  EXPECT_NE(file.status().to_string().find("weights 99"), std::string::npos);
  CachePlace erased = place();
  ASSERT_TRUE(CacheFile::erase(erased).ok());
  EXPECT_TRUE(open(other).ok());
}

TEST_F(CacheFileTest, WhatTheJobHadOnOtherDevicesIsForgotten) {
  ASSERT_TRUE(file_->add(5, 100).ok());
  append_to_all(5);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(file_->save().ok());
  CacheIdentity other = identity();
  other.device_count = 2;
  file_.reset();
  auto file = open(other);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_TRUE((*file)->sequences().empty());
  ASSERT_TRUE((*file)->add(6, 32).ok());
  ASSERT_TRUE((*file)->save().ok());
  file->reset();
  file = open(other);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_NE((*file)->find(6), nullptr);
  EXPECT_EQ((*file)->find(5), nullptr);
  other.job.bytes[0] ^= 1;
  file->reset();
  EXPECT_EQ(open(other).status().code(), ErrorCode::kMismatch) << "another job's";
}

TEST_F(CacheFileTest, RoomIsUsedAgainAndAFullFileSaysWhatIsMissing) {
  // 2 layers of 32 blocks and 2: 272 KiB of 384.
  ASSERT_TRUE(file_->add(1, 1024).ok());
  const Status full = file_->add(2, 1024).status();
  EXPECT_EQ(full.code(), ErrorCode::kNoSpace);
  EXPECT_NE(full.to_string().find("278528"), std::string::npos) << full.to_string();
  EXPECT_NE(full.to_string().find("114688"), std::string::npos) << full.to_string();
  EXPECT_EQ(file_->find(2), nullptr);
  EXPECT_EQ(file_->add(1, 5).status().code(), ErrorCode::kAlreadyExists);
  file_->remove(1);
  EXPECT_TRUE(file_->add(2, 1024).ok());
}

TEST_F(CacheFileTest, BlocksOfAnotherPlaceSequenceOrLayerDoNotPass) {
  ASSERT_TRUE(file_->add(1, 64).ok());
  ASSERT_TRUE(file_->add(2, 64).ok());
  std::vector<std::byte> block(kBlock);
  const uint64_t sum = file_->checksum(1, 0, 0, block);
  EXPECT_NE(sum, file_->checksum(2, 0, 0, block));
  EXPECT_NE(sum, file_->checksum(1, 1, 0, block));
  EXPECT_NE(sum, file_->checksum(1, 0, 1, block));
  CacheIdentity other = identity();
  other.device_index = 1;
  other.device_count = 2;
  EXPECT_NE(sum, (*open(other))->checksum(1, 0, 0, block));
  // A sequence that has the room of one that was saved: the old one's blocks are found stale.
  append_to_all(1);
  ASSERT_TRUE(file_->save().ok());
  file_->remove(1);
  ASSERT_TRUE(file_->add(3, 64).ok());
  append_to_all(3);
  open_again();
  EXPECT_EQ(right_blocks(1), 0u);
}

TEST_F(CacheFileTest, DamagedHeadersAndTablesGiveTheSaveBefore) {
  ASSERT_TRUE(file_->add(1, 64).ok());
  append_to_all(1);
  ASSERT_TRUE(file_->save().ok());
  append_to_all(1);
  ASSERT_TRUE(file_->save().ok());
  const std::vector<std::byte> whole(disk_.contents().begin(), disk_.contents().end());
  const auto flip = [&](uint64_t at) { disk_.contents()[at] ^= std::byte{4}; };
  // The header of mark 2 lies at 0, that of mark 1 behind it; tables behind the sequence.
  const uint64_t table = kCacheDataOffset + 2 * 4 * kBlock;
  for (const uint64_t at : {uint64_t{0}, uint64_t{9}, uint64_t{40}, table + kBlock + 8}) {
    flip(at);
    open_again();
    EXPECT_EQ(right_blocks(1), 2u) << at;
    EXPECT_EQ(file_->saves(), 1u);
    std::ranges::copy(whole, disk_.contents().begin());
  }
  flip(kCacheHeaderStride + 20);
  open_again();
  EXPECT_EQ(right_blocks(1), 4u);
  flip(20);
  EXPECT_EQ(open().status().code(), ErrorCode::kCorrupt);
}

TEST_F(CacheFileTest, PowerCutAnywhereLeavesTheLastSaveOrTheNextOne) {
  base::set_log_sink([](base::LogLevel, std::string_view) {});
  uint64_t next_saves = 0;
  for (uint64_t cut = 0;; ++cut) {
    disk_ = MemoryDisk(kDiskBytes);
    open_again();
    ASSERT_TRUE(file_->add(1, 256).ok());
    append_to_all(1);
    ASSERT_TRUE(file_->save().ok());
    power_.cut_after(cut);
    Status status = append(1, 0);
    if (status.ok()) status = append(1, 1);
    if (status.ok()) status = file_->save();
    const bool all = power_.on();
    file_.reset();
    power_.restore();
    disk_.settle(static_cast<CutFate>(cut % kCutFates), cut);
    open_again();
    ASSERT_NE(file_, nullptr) << "cut after " << cut;
    EXPECT_EQ(file_->find(1)->layers[0].sums.size(), file_->saves());
    EXPECT_EQ(right_blocks(1), 2 * file_->saves()) << "cut after " << cut;
    if (all) {
      EXPECT_EQ(file_->saves(), 2u);
    }
    next_saves += file_->saves() - 1;
    if (all) break;
  }
  base::set_log_sink({});
  EXPECT_GT(next_saves, 0u);
}

TEST(CacheFileInADirectory, GrowsAndIsOpenedAgain) {
  const base::Scratch scratch;
  base::TrafficCounter traffic;
  StoreOptions options;
  options.ring.kind = RingKind::kThreads;
  for (int round = 0; round < 2; ++round) {
    auto place =
        open_cache_place(scratch.path().string(), kCacheFileName, kCacheDataOffset, options);
    ASSERT_TRUE(place.ok()) << place.status().to_string();
    auto file = CacheFile::open(std::move(*place), identity(), base::kMiB, std::chrono::seconds(9),
                                traffic);
    ASSERT_TRUE(file.ok()) << file.status().to_string();
    EXPECT_EQ((*file)->sequences().size(), round == 0 ? 0u : 1u);
    if (round == 1) break;
    ASSERT_TRUE((*file)->add(3, 320).ok());
    EXPECT_EQ((*file)->add(4, 64000).status().code(), ErrorCode::kNoSpace);
    ASSERT_TRUE((*file)->save().ok());
  }
  const std::string directory = scratch.path().string();
  const auto saved = CacheFile::open_saved(directory);
  ASSERT_TRUE(saved.ok()) << saved.status().to_string();
  EXPECT_EQ((*saved)->identity(), identity());
  EXPECT_EQ((*saved)->sequences().size(), 1u);
  // A state beside it stays.
  const std::string file = scratch / "smartinf.cache";
  const std::string state = scratch / std::string(kStateFileName);
  std::ofstream(state) << "state";
  {
    const auto lock = lock_container(directory);
    ASSERT_TRUE(lock.ok()) << lock.status().to_string();
    EXPECT_EQ(erase_cache(directory).code(), ErrorCode::kBusy);
    EXPECT_TRUE(std::filesystem::exists(file));
  }
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(erase_cache(directory).ok());
  EXPECT_FALSE(std::filesystem::exists(file));
  EXPECT_TRUE(std::filesystem::exists(state));
  EXPECT_EQ(CacheFile::open_saved(directory).status().code(), ErrorCode::kNotFound);
  std::ofstream(file) << "keys";
  ASSERT_TRUE(erase_store(directory).ok());
  EXPECT_FALSE(std::filesystem::exists(file));
}

}  // namespace
}  // namespace smartinf::storage
