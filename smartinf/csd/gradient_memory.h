// Where a device keeps the gradients of a step until its update: in memory up to a budget, the rest
// in the store's spill area, through buffers that the slots lend while no update runs.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/compress/message.h"
#include "smartinf/csd/element_ranges.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

/// Subgroups are named by their index in the layout.
/// Threads: begin_step from the thread that submits commands; put and put_compressed likewise, or,
/// where nothing is spilled, from several at once for different elements; written() from the one
/// that drives the store, the rest once all gradients of the step are there.
class GradientMemory {
 public:
  /// A complete gradient that must go to the spill area.
  struct Spill {
    uint32_t subgroup = 0;
    uint32_t buffer = 0;
    std::span<std::byte> bytes;  // as SubgroupIo wants it
  };
  /// Result of a piece: whether it made its subgroup's gradient complete, and whether that has to
  /// be spilled.
  struct Put {
    bool completed = false;
    std::optional<Spill> spill;
  };

  /// Keeps as many of the first subgroups in memory as `budget_bytes` holds: backward completes
  /// them last, so their update finds them there. Beyond the budget those that plan::cut_by_stage()
  /// made of a block: they are incomplete for long, and would take the buffers from all others.
  /// Errors: kOutOfMemory when not all fit and the layout has no spill area; kMismatch when the
  /// spill area was made for another type. compressed_block_bytes above 0: for put_compressed()
  /// instead of put(), all of it in memory; matrices: LocalDeviceOptions::matrices.
  static base::Result<std::unique_ptr<GradientMemory>> create(
      const storage::StoreLayout& layout, base::DataType type, uint64_t budget_bytes,
      bool checksums, uint64_t compressed_block_bytes = 0,
      std::span<const compress::MatrixLayout> matrices = {});

  /// Bytes that each scratch buffer must have; 0 when nothing is spilled.
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  void set_scratch(std::vector<std::span<std::byte>> buffers);

  uint64_t memory_bytes() const { return memory_.size(); }
  base::DataType type() const { return type_; }

  /// Forgets what was put before. Errors: kFailedPrecondition while spilled gradients are written.
  base::Status begin_step();
  /// Until the next step the first `count` buffers stay with their slots, which are in use.
  void reserve_buffers(uint32_t count);

  /// Copies [count] elements of `type` to elements [first, first + count) of a subgroup, cast when
  /// the types differ. When that completes a subgroup that is not in memory, it is handed out to be
  /// written; waits up to `wait` for a buffer while such writes are under way. Errors:
  /// kInvalidArgument for elements that the subgroup does not have or had before; kOutOfMemory when
  /// every buffer holds an incomplete gradient; kTimeout; what fail() was given.
  base::Result<Put> put(uint32_t subgroup, uint64_t first, uint64_t count, base::DataType type,
                        const void* gradient, std::chrono::nanoseconds wait);
  /// Copies a whole subgroup's message after checking it through; a bad one changes nothing.
  /// Errors: compress::CompressedView::parse's; kInvalidArgument for another subgroup's, one with
  /// factors of other matrices, one that is longer than there is room for, or a second one in a
  /// step.
  base::Status put_compressed(uint32_t subgroup, base::SubgroupId id,
                              std::span<const std::byte> message);
  bool compressed() const { return compressed_block_bytes_ > 0; }
  /// The message of a complete subgroup.
  compress::CompressedView message(uint32_t subgroup) const {
    const Entry& entry = entries_[subgroup];
    return compress::CompressedView::trusted({entry.memory, entry.message_bytes});
  }
  /// The buffer of a spill is free again.
  void written(const Spill& spill);
  /// Makes waiting and later puts fail.
  void fail(base::Status status);

  bool complete(uint32_t subgroup) const {
    return entries_[subgroup].copied == entries_[subgroup].count;
  }
  bool in_memory(uint32_t subgroup) const { return entries_[subgroup].memory != nullptr; }
  /// Gradient of a subgroup in memory: [count] of type(). 64-byte aligned.
  const std::byte* data(uint32_t subgroup) const { return entries_[subgroup].memory; }
  /// Checks a block that came back from the spill area against what was put.
  bool verify_block(uint32_t subgroup, uint64_t block, std::span<const std::byte> bytes) const;
  /// Checksum that verify_block() compares; none where checksums are off.
  std::optional<storage::BlockSum> expected_sum(uint32_t subgroup, uint64_t block) const;

 private:
  static constexpr uint32_t kNone = ~0u;

  struct Entry {
    uint64_t count = 0;                // elements
    ElementRanges received;            // of them, in this step; with mutex_
    std::atomic<uint64_t> copied = 0;  // of them, and in their place
    std::byte* memory = nullptr;
    uint64_t room_bytes = 0;                // at `memory`
    uint64_t message_bytes = 0;             // there now, when compressed
    uint64_t factors = 0;                   // factors that a message may have
    std::vector<uint32_t> runs;             // so many of them each
    uint32_t buffer = kNone;                // while incomplete and not in memory
    std::vector<uint64_t> block_checksums;  // of a spilled gradient
  };

  GradientMemory(const storage::StoreLayout& layout, base::DataType type, bool checksums);
  base::Result<uint32_t> take_buffer(std::chrono::nanoseconds wait);
  uint64_t seed(uint32_t subgroup, uint64_t block) const;

  base::DataType type_;
  bool checksums_;
  uint64_t compressed_block_bytes_ = 0;
  base::AlignedBuffer memory_;
  uint64_t buffer_bytes_ = 0;
  std::vector<Entry> entries_;

  std::vector<std::span<std::byte>> buffers_;
  std::mutex mutex_;  // of entries' `received`, and of what follows
  std::condition_variable freed_;
  std::vector<uint32_t> free_;  // indices of buffers_
  uint32_t being_written_ = 0;
  base::Status failure_;
};

}  // namespace smartinf::csd
