// For tests: a small store on a disk in memory, and steps whose contents can be told apart.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/block_store.h"
#include "smartinf/storage/memory_ring.h"

namespace smartinf::storage {

class MemoryStore {
 public:
  explicit MemoryStore(base::StateFormat format = base::StateFormat::kF32,
                       uint64_t spool_bytes = 0) {
    layout_.run = make_run_id();
    layout_.format = format;
    layout_.planes = {base::PlaneKind::kMaster, base::PlaneKind::kMomentum,
                      base::PlaneKind::kVariance};
    layout_.subgroups = {{base::SubgroupId{0}, 0, base::kBlockElements + 3000},
                         {base::SubgroupId{1}, 100'000, 5000}};
    layout_.description = "test";
    geometry_ = std::move(*Geometry::make(layout_, 2));
    disk_ = std::make_unique<MemoryDisk>(geometry_.container_bytes() + spool_bytes);
    options_.spool_bytes = spool_bytes;
    options_.io_bytes = 64 * base::kKiB;
    options_.io_depth = 4;
  }

  /// Puts rings between the store and the disk; empty: nothing.
  using Wrap = std::function<std::unique_ptr<Ring>(std::unique_ptr<Ring>)>;

  Container container(const Wrap& wrap = {}) {
    std::unique_ptr<Ring> ring = make_memory_ring(*disk_, power_, 16, 99);
    if (wrap) ring = wrap(std::move(ring));
    return memory_container("disk", *disk_, std::move(ring));
  }
  base::Status create(const Wrap& wrap = {}) {
    SI_ASSIGN_OR_RETURN(store_, BlockStore::create(container(wrap), layout_, options_));
    return base::Status();
  }
  base::Status open(const Wrap& wrap = {}) {
    store_.reset();
    SI_ASSIGN_OR_RETURN(store_, BlockStore::open(container(wrap), options_));
    return base::Status();
  }
  void close() { store_.reset(); }

  BlockStore& store() { return *store_; }
  MemoryDisk& disk() { return *disk_; }
  PowerSupply& power() { return power_; }
  const Geometry& geometry() const { return geometry_; }
  StoreOptions& options() { return options_; }

  /// Writes every plane of every subgroup and prepares.
  base::Status prepare_step(base::StepNumber step) {
    store_->begin_step(step);
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      const base::SubgroupId id = layout_.subgroups[i].id;
      SI_ASSIGN_OR_RETURN(const base::AlignedBuffer buffer,
                          base::AlignedBuffer::allocate(store_->extent_bytes(id)));
      fill(buffer.bytes(), step, i);
      for (size_t plane = 0; plane < 3; ++plane) {
        for (uint64_t block = 0; block < geometry_.blocks(i); ++block) {
          store_->seal_block(id, plane, block, part(buffer.bytes(), i, plane, block));
        }
      }
      SI_RETURN_IF_ERROR(move(SubgroupIo::Op::kWrite, id, buffer.bytes()));
    }
    return store_->prepare(step, "step " + std::to_string(step));
  }
  base::Status make_step(base::StepNumber step) {
    SI_RETURN_IF_ERROR(prepare_step(step));
    return store_->commit(step);
  }
  /// Reads and verifies everything; `equal` says whether it is what make_step(step) wrote.
  base::Status read_step(base::StepNumber step, bool& equal) {
    equal = true;
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      const base::SubgroupId id = layout_.subgroups[i].id;
      const uint64_t bytes = store_->extent_bytes(id);
      SI_ASSIGN_OR_RETURN(const base::AlignedBuffer buffer, base::AlignedBuffer::allocate(bytes));
      SI_ASSIGN_OR_RETURN(const base::AlignedBuffer wanted, base::AlignedBuffer::allocate(bytes));
      SI_RETURN_IF_ERROR(move(SubgroupIo::Op::kRead, id, buffer.bytes()));
      fill(wanted.bytes(), step, i);
      for (size_t plane = 0; plane < 3; ++plane) {
        for (uint64_t block = 0; block < geometry_.blocks(i); ++block) {
          const auto found = part(buffer.bytes(), i, plane, block);
          SI_RETURN_IF_ERROR(store_->verify_block(id, plane, block, found));
          const auto right = part(wanted.bytes(), i, plane, block);
          equal = equal && std::equal(found.begin(), found.end(), right.begin());
        }
      }
    }
    return base::Status();
  }

 private:
  static void fill(std::span<std::byte> bytes, base::StepNumber step, size_t subgroup) {
    uint64_t word = step * 1000003 + subgroup * 7919 + 1;
    for (uint64_t& out : std::span(reinterpret_cast<uint64_t*>(bytes.data()), bytes.size() / 8)) {
      out = word = word * 6364136223846793005u + 1442695040888963407u;
    }
  }
  std::span<std::byte> part(std::span<std::byte> extent, size_t subgroup, size_t plane,
                            uint64_t block) const {
    return extent.subspan(
        geometry_.plane_offset(subgroup, plane) + geometry_.block_offset(plane, block),
        geometry_.block_bytes(subgroup, plane, block));
  }
  base::Status move(SubgroupIo::Op op, base::SubgroupId id, std::span<std::byte> buffer) {
    SubgroupIo io;
    io.op = op;
    io.subgroup = id;
    io.buffer = buffer;
    store_->start(io);
    SubgroupIo* done = nullptr;
    for (size_t count = 0; count == 0;) {
      SI_ASSIGN_OR_RETURN(count, store_->poll({&done, 1}, std::chrono::seconds(10)));
    }
    return io.status;
  }

  StoreLayout layout_;
  Geometry geometry_;
  StoreOptions options_;
  PowerSupply power_;
  std::unique_ptr<MemoryDisk> disk_;
  std::unique_ptr<BlockStore> store_;
};

}  // namespace smartinf::storage
