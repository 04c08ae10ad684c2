// One set of a device's fixed buffers, with everything a subgroup needs on its way through: the
// transfers in and out, and the work on its blocks. Allocated at open and used again and again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/state_format.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/gradient_memory.h"
#include "smartinf/csd/options.h"
#include "smartinf/csd/processor.h"
#include "smartinf/kernels/update.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

class SlotUser;

/// A transfer between a slot and the store, with what its completion needs to know.
struct Transfer {
  storage::SubgroupIo io;  // io.owner is this
  Slot* slot = nullptr;
  SlotUser* user = nullptr;  // hears of its completion
  uint32_t task = 0;         // of the schedule, when it is one
  uint64_t begin_ns = 0;     // for a trace
};

/// The planes of a subgroup in slot memory, block by block.
class PlaneBlocks {
 public:
  PlaneBlocks() = default;
  /// memory_mask: planes that were here already, not read from the drive for this.
  PlaneBlocks(storage::Store& store, uint32_t subgroup, std::span<std::byte> extent,
              uint32_t memory_mask = 0);

  const storage::StoredSubgroup& subgroup() const { return *subgroup_; }
  base::StateFormat format() const { return store_->layout().format; }
  std::span<const base::PlaneKind> planes() const { return store_->layout().planes; }
  uint64_t blocks() const;
  uint64_t elements(uint64_t block) const;
  base::Encoding encoding(size_t plane) const;
  std::span<std::byte> bytes(size_t plane, uint64_t block) const;
  base::Status verify(size_t plane, uint64_t block) const;
  void seal(size_t plane, uint64_t block) const;

 private:
  storage::Store* store_ = nullptr;
  const storage::StoredSubgroup* subgroup_ = nullptr;
  std::span<std::byte> extent_;
  uint32_t memory_mask_ = 0;
};

/// Verifies, updates and seals: the block's state is read from memory once and written once.
class UpdateWork final : public BlockWork {
 public:
  /// gradient: [count] of the memory's type; from_spill: check it against what was put.
  void prepare(const PlaneBlocks& planes, const Update& update, size_t entry, uint32_t subgroup,
               const std::byte* gradient, bool from_spill, const GradientMemory& memory,
               const LocalDeviceOptions& options);
  base::Status run_block(uint64_t block) override;

 private:
  /// The squares of a block as its message has them, in memory of the thread's own.
  std::span<const kernels::SquaresRow> take_squares(const compress::CompressedView& message,
                                                    uint64_t block);
  void send_samples(uint64_t block);

  PlaneBlocks planes_;
  const Update* update_ = nullptr;
  std::byte* weights_out_ = nullptr;
  base::Bf16* samples_out_ = nullptr;
  uint32_t subgroup_ = 0;  // index in the layout
  const std::byte* gradient_ = nullptr;
  bool from_spill_ = false;
  const GradientMemory* memory_ = nullptr;
  const LocalDeviceOptions* options_ = nullptr;
};

/// Planes to f32 in the caller's memory (ReadState::planes).
class DecodeWork final : public BlockWork {
 public:
  DecodeWork() { trace_name_ = "decode"; }
  /// Those of cached_mask come from `cached`, which is in memory. Returns the number of blocks;
  /// block 0 of the work is the first one that the command wants.
  uint64_t prepare(const PlaneBlocks& planes, const PlaneBlocks& cached, uint32_t cached_mask,
                   const ReadState& read);
  base::Status run_block(uint64_t block) override;

 private:
  PlaneBlocks planes_;
  PlaneBlocks cached_;
  uint32_t cached_mask_ = 0;
  const ReadState* read_ = nullptr;
};

/// Planes from f32 in the caller's memory; those not given become zero.
class EncodeWork final : public BlockWork {
 public:
  EncodeWork() { trace_name_ = "encode"; }
  void prepare(const PlaneBlocks& planes, const WriteState& write);
  base::Status run_block(uint64_t block) override;

 private:
  PlaneBlocks planes_;
  const WriteState* write_ = nullptr;
};

/// Who occupies a slot, and who hears of what was started.
class SlotUser {
 public:
  virtual ~SlotUser() = default;
  virtual void on_transfer(Transfer& transfer) = 0;
  virtual void on_work(Slot& slot, BlockWork& work) = 0;
};

struct Slot {
  std::span<std::byte> extent;
  std::span<std::byte>
      gradient;                // lent to the gradient memory between updates; empty: none spilled
  SlotUser* user = nullptr;    // null: free
  Command* command = nullptr;  // ReadState or WriteState being served...
  bool transferring = false;   // ...between slot and store, not at the processor
  uint32_t cached_mask = 0;    // planes that the state cache had for it
  uint32_t task = 0;           // the update's, of the schedule; else the subgroup
  uint64_t update_ns = 0;      // when the update began, for a trace

  Transfer state_in;
  Transfer gradient_in;
  Transfer master_out;
  Transfer moments_out;
  Transfer gradient_out;

  UpdateWork update;
  DecodeWork decode;
  EncodeWork encode;
};

}  // namespace smartinf::csd
