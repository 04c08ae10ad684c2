// A store's transfers on their way: SubgroupIos cut into pieces, of which io_depth are in flight
// per direction, the most urgent ones first, and metadata, which is waited for. What is read or
// written where, its owner says.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/storage/store.h"
#include "smartinf/storage/transfer_queue.h"

namespace smartinf::storage {

inline bool is_write(const SubgroupIo& io) {
  return io.op == SubgroupIo::Op::kWrite || io.op == SubgroupIo::Op::kWriteGradient ||
         io.op == SubgroupIo::Op::kFlush || io.op == SubgroupIo::Op::kWriteSpool;
}
inline bool is_gradient(const SubgroupIo& io) {
  return io.op == SubgroupIo::Op::kReadGradient || io.op == SubgroupIo::Op::kWriteGradient;
}

/// A transfer of metadata, for IoPump::read_metadata and write_metadata.
Transfer metadata_transfer(IoOp op, uint64_t offset_bytes, std::span<std::byte> buffer);

/// Threads: one at a time.
class IoPump {
 public:
  /// Transfers of metadata at once, at most.
  static constexpr size_t kMetadataMax = 4;

  /// Where the next piece of a SubgroupIo goes; length 0: there is none.
  struct Span {
    uint64_t buffer_offset = 0;
    uint64_t offset_bytes = 0;
    uint64_t length = 0;
  };
  /// Called on the pump's thread, from within its functions; neither may call the pump.
  class Owner {
   public:
    /// Takes the next piece, of at most io_bytes, and moves io.next_offset_bytes behind it.
    virtual Span next_span(SubgroupIo& io) const = 0;
    /// All of it has been moved, or io.status says why not. poll() gives it out later.
    virtual void on_finished(const SubgroupIo& io) = 0;

   protected:
    ~Owner() = default;
  };

  /// `owner` outlives the pump.
  IoPump(std::unique_ptr<TransferQueue> queue, Owner& owner);
  /// As close(). After a failure what the pump owns is leaked; what its owner lent is the owner's.
  ~IoPump();
  IoPump(const IoPump&) = delete;
  IoPump& operator=(const IoPump&) = delete;

  /// Makes room for so many pieces per direction, or as many as the ring has room for beside
  /// metadata. Errors: kInvalidArgument, the ring is not deep enough for any.
  base::Status allocate(uint32_t io_depth);
  base::Status register_memory(std::span<std::byte> memory);
  /// See TransferQueue::set_spool_file.
  void set_spool_file(uint32_t file, std::string path) {
    queue_->set_spool_file(file, std::move(path));
  }
  /// See TransferQueue::close.
  base::Status close() { return queue_->close(); }

  /// Starts a SubgroupIo, unless its status says that it has failed already. Any number.
  void start(SubgroupIo& io);
  /// See Store::poll.
  base::Result<size_t> poll(std::span<SubgroupIo*> done, std::chrono::nanoseconds wait);
  /// Waits until no SubgroupIo that writes is in flight, but for the spool's.
  base::Status drain_writes();
  bool writes_open() const { return writes_open_ > 0; }

  /// Moves metadata, at most kMetadataMax transfers, and waits for all of it. Errors: the first
  /// transfer's that failed; the ring's own, after which nothing can be moved any more (failed()).
  base::Status read_metadata(std::span<const Transfer> transfers);
  /// Syncs too. What was moved counts as written only when all of it was.
  base::Status write_metadata(std::span<const Transfer> transfers);
  /// Failure of the ring itself: what is in flight may never come back, and nothing goes on after
  /// it.
  const base::Status& failure() const { return ring_failure_; }

  /// Up: read from the drive; down: written to it. Metadata that is read its reader counts, with
  /// count_metadata_read: not all that was asked for can be used.
  base::TrafficReading traffic() const { return traffic_.read(); }
  void count_metadata_read(uint64_t bytes) { traffic_.add_up(base::TrafficKind::kMetadata, bytes); }

 private:
  /// A piece of a SubgroupIo on its way, at most io_bytes long.
  struct Piece {
    Transfer transfer;
    SubgroupIo* io = nullptr;
    Piece* next_free = nullptr;
    bool write = false;
  };
  /// First in, first out through SubgroupIo::next.
  struct IoList {
    SubgroupIo* first = nullptr;
    SubgroupIo* last = nullptr;
    void push(SubgroupIo* io);
    SubgroupIo* pop();
  };
  using Waiting = std::array<IoList, kIoPriorities>;

  void pump();
  void start_pieces(Waiting& waiting, bool write);
  void start_piece(SubgroupIo& io, const Span& span, bool write);
  void finish_piece(Piece& piece);
  void finish_if_done(SubgroupIo& io);
  base::Status step_queue(std::chrono::nanoseconds wait);

  Owner& owner_;
  std::unique_ptr<TransferQueue> queue_;
  base::Status ring_failure_;
  uint32_t io_depth_ = 0;
  std::vector<Piece> pieces_;  // 2 x io_depth, from the start
  Piece* free_piece_ = nullptr;
  // In flight for as long as the drive wants: neither on the stack nor tied to this object.
  std::unique_ptr<std::array<Transfer, kMetadataMax>> metadata_ =
      std::make_unique<std::array<Transfer, kMetadataMax>>();
  std::array<uint32_t, 2> pieces_in_flight_{};  // reads, writes
  uint32_t open_ = 0;                           // SubgroupIos that are not finished
  uint32_t writes_open_ = 0;                    // of them, those that write a step
  uint32_t metadata_open_ = 0;
  Waiting waiting_reads_;
  Waiting waiting_writes_;
  IoList finished_;
  base::TrafficCounter traffic_;
};

}  // namespace smartinf::storage
