// Transfers of a file of tables' rows and the memory that they move: pages through a pool of
// buffers with the queue kept full, pieces of the log that are written while their owner goes on,
// and what is waited for at once.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/row_format.h"
#include "smartinf/storage/transfer_queue.h"

namespace smartinf::storage {

/// Threads: one at a time.
class RowPump {
 public:
  struct Piece {
    Transfer transfer;
    std::span<std::byte> memory;
    bool in_flight = false;
    bool pooled = false;
    // The user's own.
    uint64_t first = 0, count = 0;
    size_t begin = 0, end = 0;
    bool log = false;
  };

  static base::Result<std::unique_ptr<RowPump>> make(std::unique_ptr<TransferQueue> queue,
                                                     const RowGeometry& geometry,
                                                     base::TrafficCounter& traffic);
  /// Memory that a pump takes.
  static uint64_t memory_bytes(const RowGeometry& geometry);
  /// As TransferQueue's; after a failure what is in flight is leaked.
  ~RowPump();
  base::Status close();

  /// next: fills op, offset_bytes and buffer of a piece's transfer, or says that there is no more.
  /// done: what becomes of a transfer that succeeded: true, the piece moves again. Errors: the
  /// first of a transfer or of done; then no more is started and all has come to its end.
  base::Status run(const std::function<bool(Piece&)>& next,
                   const std::function<base::Result<bool>(Piece&)>& done);
  /// Moves bytes of long-lived memory, in transfers of `unit`, all in flight together as far as
  /// there is room.
  base::Status move(IoOp op, uint64_t offset_bytes, std::span<std::byte> bytes, uint64_t unit,
                    base::TrafficKind kind);
  base::Status sync();

  /// Pieces of the log: RowGeometry::kChunks.
  std::span<Piece> chunks() { return {pieces_->data() + pooled_, RowGeometry::kChunks}; }
  void start(Piece& piece);
  base::Status submit() { return queue_->submit(); }
  /// Waits until it is done. Errors: the transfer's, the queue's.
  base::Status wait_for(Piece& piece);

  /// Memory of one header or so; of a merge's pages, which are also the pool's; of its records.
  std::span<std::byte> scratch() const { return scratch_; }
  std::span<std::byte> homes() const { return homes_; }
  std::span<std::byte> staged() const { return staged_; }
  const std::string& path() const { return queue_->path(); }

 private:
  RowPump(std::unique_ptr<TransferQueue> queue, base::TrafficCounter& traffic)
      : queue_(std::move(queue)), traffic_(traffic) {}
  base::Status wait_for_some();

  std::unique_ptr<TransferQueue> queue_;
  base::AlignedBuffer memory_;
  std::unique_ptr<std::vector<Piece>>
      pieces_;  // not moved: in flight for as long as the drive likes
  uint32_t pooled_ = 0;
  std::vector<Piece*> finished_;  // of the pool, capacity: pooled_
  std::vector<Transfer*> done_;
  std::span<std::byte> scratch_, homes_, staged_;
  base::TrafficCounter& traffic_;
};

}  // namespace smartinf::storage
