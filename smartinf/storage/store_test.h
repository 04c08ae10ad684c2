// For tests: a store in a directory of its own, through each kind of ring, and steps whose contents
// can be told apart.
#pragma once

#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/test_scratch.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/ring.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

inline StoreLayout small_layout() {
  StoreLayout layout;
  layout.run = make_run_id();
  layout.planes = {base::PlaneKind::kMaster, base::PlaneKind::kMomentum,
                   base::PlaneKind::kVariance};
  layout.subgroups = {{base::SubgroupId{3}, 0, 3 * base::kBlockElements},
                      {base::SubgroupId{7}, 3 * base::kBlockElements, base::kBlockElements + 1001}};
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
    options_.ring.kind = GetParam();
    options_.io_bytes = 64 * 1024;
    options_.io_depth = 3;
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
  uint64_t blocks(base::SubgroupId id) const {
    for (const StoredSubgroup& subgroup : layout_.subgroups) {
      if (subgroup.id == id) return base::divide_up(subgroup.count, base::kBlockElements);
    }
    return 0;
  }
  std::span<std::byte> block(std::span<std::byte> extent, base::SubgroupId id, size_t plane,
                             uint64_t b) {
    const uint64_t begin = b * base::encoded_bytes(base::Encoding::kF32, base::kBlockElements);
    const uint64_t bytes = store_->plane_bytes(id, plane);
    return extent.subspan(store_->plane_offset(id, plane) + begin,
                          std::min(bytes - begin, base::kBlockElements * 4));
  }

  base::Status transfer(SubgroupIo& io) {
    store_->start(io);
    SubgroupIo* done = nullptr;
    auto count = store_->poll({&done, 1}, std::chrono::seconds(10));
    if (!count.ok()) return count.status();
    EXPECT_EQ(*count, 1u);
    EXPECT_EQ(done, &io);
    return io.status;
  }

  /// New contents of planes, sealed for the step in progress.
  base::AlignedBuffer contents(base::SubgroupId id, uint64_t seed, uint32_t mask = ~0u) {
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
  base::Status write(base::SubgroupId id, uint64_t seed, uint32_t mask = ~0u) {
    return write_from(contents(id, seed, mask), SubgroupIo::Op::kWrite, id, mask);
  }
  base::Status write_from(const base::AlignedBuffer& buffer, SubgroupIo::Op op, base::SubgroupId id,
                          uint32_t mask) {
    SubgroupIo io;
    io.op = op;
    io.subgroup = id;
    io.buffer = buffer.bytes();
    io.plane_mask = mask;
    return transfer(io);
  }

  /// Reads, verifies and compares.
  base::Status expect(base::SubgroupId id, uint64_t seed, uint32_t mask = ~0u) {
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
    return base::Status();
  }

  void make_step(base::StepNumber step, const std::string& client_metadata) {
    store_->begin_step(step);
    for (const StoredSubgroup& subgroup : layout_.subgroups) {
      ASSERT_TRUE(write(subgroup.id, step * 10).ok());
    }
    const base::Status prepared = store_->prepare(step, client_metadata);
    ASSERT_TRUE(prepared.ok()) << prepared.to_string();
    ASSERT_TRUE(store_->commit(step).ok());
  }
  void expect_step(base::StepNumber step) {
    for (const StoredSubgroup& subgroup : layout_.subgroups) {
      const base::Status status = expect(subgroup.id, step * 10);
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }

  const base::Scratch scratch_;
  std::string path_ = scratch_.path().string();
  StoreLayout layout_ = small_layout();
  StoreOptions options_;
  std::unique_ptr<Store> store_;
};

/// Every ring, for INSTANTIATE_TEST_SUITE_P.
inline auto every_ring() { return ::testing::Values(RingKind::kUring, RingKind::kThreads); }
inline std::string ring_test_name(const ::testing::TestParamInfo<RingKind>& kind) {
  return kind.param == RingKind::kUring ? "uring" : "threads";
}

}  // namespace smartinf::storage
