// Bytes of units and micro batches between forward and backward, in a fixed number of buffers of
// the host's memory; what has no room there is on the devices.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include <c10/core/Event.h>
#include <torch/types.h>

#include "smartinf/engine/spool.h"
#include "smartinf/train/copy_streams.h"

namespace smartinf::train {

/// Backward goes from the last unit to the first, so the bytes of the first units are wanted last,
/// and are the ones that are written to the devices.
///
/// Beside an accelerator buffers are pinned, and copies run on streams of their own: bytes leave
/// while the next ones are made, and come to one of two places there while the current stream
/// computes with the other.
///
/// Threads: one caller. Errors: StatusError of the devices; torch throws.
class SpooledBuffers {
 public:
  /// Buffers beyond those that cannot be written: what is on its way.
  static constexpr uint64_t kOnTheirWay = 4;

  /// Bytes of an entry: [N] of uint8 where the model computes, to be at an offset.
  struct Part {
    torch::Tensor bytes_N;
    uint64_t offset = 0;
  };

  /// All of the host's memory is allocated here: `buffers` of at most `bytes` each, at least
  /// kOnTheirWay. Spool and streams outlive this.
  SpooledBuffers(engine::Spool& spool, const CopyStreams& streams, uint64_t buffers,
                 uint64_t bytes);
  SpooledBuffers(SpooledBuffers&&) = default;
  SpooledBuffers& operator=(SpooledBuffers&&) = delete;
  ~SpooledBuffers();

  uint64_t bytes_max() const { return buffer_bytes_; }
  /// Entries that stay in memory; of more, so many are written.
  uint64_t in_memory() const { return buffers_.size() - kOnTheirWay; }
  /// Before the first pass: to be used for measuring.
  std::span<std::byte> memory();
  /// Seconds that the caller has waited for the devices.
  double waited_s() const { return waited_s_; }

  /// A pass begins; what was kept before is dropped.
  void begin(size_t units, size_t batches);
  /// Copies the parts of an entry, once the current stream has made them. Beside an accelerator the
  /// copy before this one is done then: no more than two entries are there at once. At most as many
  /// as there are buffers beyond kOnTheirWay stay unreleased.
  void put(size_t unit, size_t batch, std::span<const Part> parts);
  /// Without an accelerator: the entry's bytes in its buffer, until release().
  torch::Tensor kept(size_t unit, size_t batch);
  /// Lets an entry leave memory: it is not read before take().
  void release(size_t unit, size_t batch);
  /// In backward, which begins with the first call: batch after batch of the last unit, then of the
  /// one before; those that were not put may be left out. The entry's bytes where the model
  /// computes, for the current stream, until the next call; not kept any longer.
  torch::Tensor take(size_t unit, size_t batch);

 private:
  struct Buffer {
    torch::Tensor bytes_N;
    std::optional<c10::Event> copied;  // to or from the accelerator, the last time
  };
  /// On the accelerator.
  struct Place {
    torch::Tensor bytes_N;
    c10::Event used;  // recorded where the model computes
  };
  struct Entry {
    std::optional<uint32_t> buffer;
    std::optional<engine::Spool::Ticket> ticket;
    bool released = false;
    bool writing = false;
    bool reading = false;
  };
  Entry& at(size_t unit, size_t batch) { return entries_[unit * batches_ + batch]; }
  Entry& in_backward(size_t use);
  bool beside() const { return streams_->beside(); }
  uint32_t take_buffer();
  void write_out();
  void write(Entry& entry);
  void finish_write();
  void read(Entry& entry);
  void read_ahead();
  void drop(Entry& entry);
  torch::Tensor to_accelerator(Buffer& buffer);
  /// To be read or written by devices: copies from and to it are done.
  std::span<std::byte> for_devices(uint32_t buffer);
  /// Errors are thrown; the time is counted.
  void wait_for(engine::Spool::Ticket ticket);

  engine::Spool* spool_;
  const CopyStreams* streams_;
  uint64_t buffer_bytes_;
  torch::Tensor memory_N_;
  std::vector<Buffer> buffers_;
  std::vector<uint32_t> free_;        // of buffers_
  std::optional<uint32_t> last_put_;  // beside an accelerator: the buffer
  std::vector<Place> places_;         // in backward
  size_t taken_count_ = 0;            // of the pass
  double waited_s_ = 0;

  size_t batches_ = 0;
  std::vector<Entry> entries_;  // by unit and batch
  std::deque<Entry*> writing_;  // oldest first
  Entry* taken_ = nullptr;      // by the last take()
  size_t next_read_ = 0;        // in backward's order
};

}  // namespace smartinf::train
