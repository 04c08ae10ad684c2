// The inputs of units between forward and backward: where the model computes, or in the host's
// memory and on the devices.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include <c10/core/Event.h>
#include <torch/types.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/spool.h"

namespace smartinf::train {

/// A pass uses each input in forward, soon after it was made, and once more in backward, which goes
/// from the last unit to the first; so the inputs of the first units are wanted last, and are the
/// ones that are written to the devices.
///
/// Threads: one caller. Errors: StatusError of the devices.
class UnitInputs {
 public:
  /// Inputs stay the tensors that they are.
  UnitInputs() = default;
  /// `buffers` inputs of at most `input_bytes` each are in the host's memory at a time, which is
  /// allocated here, pinned beside an accelerator; the others are in `spool`, which outlives this.
  /// At least buffers_min(batches of a pass). Errors: kOutOfMemory.
  static base::Result<UnitInputs> make(engine::Spool& spool, torch::Device accelerator,
                                       uint64_t buffers, uint64_t input_bytes);
  static uint64_t buffers_min(uint64_t batches) { return batches + kOnTheirWay; }
  UnitInputs(UnitInputs&&) = default;
  UnitInputs& operator=(UnitInputs&&) = default;
  ~UnitInputs();

  /// A pass begins; what was kept before is dropped. Inputs of units below `units`, all of one
  /// shape and type.
  void begin(size_t units, size_t batches);
  /// The unit's input of a batch has been made; all batches of a unit before the next unit's.
  void put(size_t unit, size_t batch, torch::Tensor input);
  /// In forward: it stays.
  torch::Tensor get(size_t unit, size_t batch);
  /// In backward, which begins with the first call: batch after batch of the last unit, then of the
  /// one before. It is there until the next call, and not kept any longer.
  torch::Tensor take(size_t unit, size_t batch);

 private:
  /// Buffers beyond a unit's batches: inputs that are being written or read.
  static constexpr uint64_t kOnTheirWay = 4;

  struct Entry {
    torch::Tensor made;              // until forward has used it; without a spool until backward
    std::optional<uint32_t> buffer;  // that it lies in
    std::optional<engine::Spool::Ticket> ticket;
    bool used = false;  // in forward
    bool writing = false;
    bool reading = false;
  };
  Entry& at(size_t unit, size_t batch) { return entries_[unit * batches_ + batch]; }
  Entry& in_backward(size_t use);
  uint32_t take_buffer();
  void write_out();
  void finish_write();
  void read(Entry& entry);
  void read_ahead();
  void drop(Entry& entry);
  torch::Tensor tensor_in(uint32_t buffer);
  std::span<std::byte> bytes_of(uint32_t buffer) {
    return bytes_.subspan(buffer * buffer_bytes_, buffer_bytes_);
  }
  void copy_started(uint32_t buffer);
  void wait_copied(uint32_t buffer);

  engine::Spool* spool_ = nullptr;
  base::AlignedBuffer memory_;
  torch::Tensor pinned_;            // beside an accelerator, instead
  std::span<std::byte> bytes_;      // all buffers
  std::vector<c10::Event> copied_;  // by buffer: the last copy from or to the accelerator
  uint64_t buffer_bytes_ = 0;
  std::vector<uint32_t> free_;  // buffers

  size_t batches_ = 0;
  std::vector<Entry> entries_;  // by unit and batch
  std::vector<int64_t> sizes_;  // of an input
  torch::TensorOptions options_;
  std::deque<Entry*> writing_;  // oldest first
  Entry* taken_ = nullptr;      // by the last take()
  size_t next_read_ = 0;        // in backward's order
};

}  // namespace smartinf::train
