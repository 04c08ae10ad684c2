#include "smartinf/storage/io_pump.h"

#include <algorithm>
#include <utility>

#include "smartinf/base/clock.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

/// How long one look at the ring waits while a step's metadata is on its way.
constexpr std::chrono::milliseconds kMetadataWait{100};

base::TrafficKind kind_of(const SubgroupIo& io) {
  if (is_spool(io)) return base::TrafficKind::kActivation;
  return is_gradient(io) ? base::TrafficKind::kGradient : base::TrafficKind::kState;
}

IoPriority priority_of(const SubgroupIo& io) {
  if (io.priority.has_value()) return *io.priority;
  if (is_spool(io)) return IoPriority::kActivations;
  return is_gradient(io) ? IoPriority::kGradients : IoPriority::kState;
}

bool counts_as_write(const SubgroupIo& io) { return is_write(io) && !is_spool(io); }

}  // namespace

Transfer metadata_transfer(IoOp op, uint64_t offset_bytes, std::span<std::byte> buffer) {
  Transfer transfer;
  transfer.op = op;
  transfer.offset_bytes = offset_bytes;
  transfer.buffer = buffer;
  transfer.kind = base::TrafficKind::kMetadata;
  return transfer;
}

void IoPump::IoList::push(SubgroupIo* io) {
  io->next = nullptr;
  (first == nullptr ? first : last->next) = io;
  last = io;
}

SubgroupIo* IoPump::IoList::pop() {
  SubgroupIo* io = first;
  if (io != nullptr) {
    first = io->next;
    io->next = nullptr;
  }
  return io;
}

IoPump::IoPump(std::unique_ptr<TransferQueue> queue, Owner& owner)
    : owner_(owner), queue_(std::move(queue)) {}

IoPump::~IoPump() {
  if (queue_->close().ok()) return;
  leak_in_flight(std::move(queue_));
  leak_in_flight(std::move(pieces_));
  leak_in_flight(std::move(metadata_));
}

Status IoPump::allocate(uint32_t io_depth) {
  // Metadata takes up to four transfers and finds room beside the pieces.
  if (queue_->depth() < kMetadataMax + 2) {
    return Status(ErrorCode::kInvalidArgument, "a store needs a ring of depth 6 or more");
  }
  io_depth_ = std::min(io_depth, static_cast<uint32_t>(queue_->depth() - kMetadataMax) / 2);
  pieces_ = std::vector<Piece>(size_t{2} * io_depth_);
  for (Piece& piece : pieces_) {
    piece.transfer.owner = &piece;
    piece.next_free = free_piece_;
    free_piece_ = &piece;
  }
  return Status();
}

Status IoPump::register_memory(std::span<std::byte> memory) {
  SI_CHECK(queue_->in_flight() == 0, "register_memory while transfers are in flight");
  return queue_->ring().register_memory(memory);
}

void IoPump::start(SubgroupIo& io) {
  io.next_offset_bytes = 0;
  io.transfers_in_flight = 0;
  io.all_started = false;
  ++open_;
  if (counts_as_write(io)) ++writes_open_;
  Waiting& waiting = is_write(io) ? waiting_writes_ : waiting_reads_;
  waiting[static_cast<size_t>(priority_of(io))].push(&io);
  pump();
}

void IoPump::start_pieces(Waiting& waiting, bool write) {
  while (pieces_in_flight_[write] < io_depth_) {
    const auto list = std::find_if(waiting.begin(), waiting.end(),
                                   [](const IoList& some) { return some.first != nullptr; });
    if (list == waiting.end()) return;
    SubgroupIo& io = *list->first;
    const Span span = io.status.ok() ? owner_.next_span(io) : Span{};
    if (span.length > 0) {
      start_piece(io, span, write);
      continue;
    }
    (void)list->pop();
    io.all_started = true;
    finish_if_done(io);
  }
}

void IoPump::start_piece(SubgroupIo& io, const Span& span, bool write) {
  Piece& piece = *free_piece_;
  free_piece_ = piece.next_free;
  piece.io = &io;
  piece.write = write;
  piece.transfer.op = write ? IoOp::kWrite : IoOp::kRead;
  piece.transfer.spool = is_spool(io);
  piece.transfer.offset_bytes = span.offset_bytes;
  piece.transfer.buffer = io.buffer.subspan(span.buffer_offset, span.length);
  piece.transfer.kind = kind_of(io);
  ++io.transfers_in_flight;
  ++pieces_in_flight_[write];
  queue_->start(piece.transfer);
}

void IoPump::pump() {
  if (!ring_failure_.ok()) return;
  start_pieces(waiting_reads_, false);
  start_pieces(waiting_writes_, true);
  // Reported by the next poll or prepare: start() has no way to.
  if (Status status = queue_->submit(); !status.ok()) ring_failure_ = std::move(status);
}

void IoPump::finish_piece(Piece& piece) {
  SubgroupIo& io = *piece.io;
  --io.transfers_in_flight;
  --pieces_in_flight_[piece.write];
  if (piece.transfer.status.ok()) {
    if (piece.write) {
      traffic_.add_down(piece.transfer.kind, piece.transfer.buffer.size());
    } else {
      traffic_.add_up(piece.transfer.kind, piece.transfer.buffer.size());
    }
  } else if (io.status.ok()) {
    io.status = piece.transfer.status;
  }
  piece.next_free = free_piece_;
  free_piece_ = &piece;
  finish_if_done(io);
}

void IoPump::finish_if_done(SubgroupIo& io) {
  if (!io.all_started || io.transfers_in_flight > 0) return;
  --open_;
  if (counts_as_write(io)) --writes_open_;
  owner_.on_finished(io);
  finished_.push(&io);
}

Status IoPump::step_queue(std::chrono::nanoseconds wait) {
  pump();
  if (!ring_failure_.ok()) return ring_failure_;
  std::array<Transfer*, 32> done{};
  const Result<size_t> count = queue_->finish(done, wait);
  if (!count.ok()) {
    // Transfers in flight may never come back: nothing that it uses can be used again.
    ring_failure_ = count.status();
    return ring_failure_;
  }
  for (size_t i = 0; i < *count; ++i) {
    if (done[i]->owner == nullptr) {
      --metadata_open_;
    } else {
      finish_piece(*static_cast<Piece*>(done[i]->owner));
    }
  }
  pump();
  return Status();
}

Result<size_t> IoPump::poll(std::span<SubgroupIo*> done, std::chrono::nanoseconds wait) {
  const uint64_t start_ns = base::now_ns();
  if (open_ > 0) SI_RETURN_IF_ERROR(step_queue(std::chrono::nanoseconds(0)));
  while (finished_.first == nullptr && open_ > 0) {
    const auto spent = std::chrono::nanoseconds(base::now_ns() - start_ns);
    if (spent >= wait) break;
    SI_RETURN_IF_ERROR(step_queue(wait - spent));
  }
  size_t count = 0;
  while (count < done.size() && finished_.first != nullptr) done[count++] = finished_.pop();
  return count;
}

Status IoPump::drain_writes() {
  while (writes_open_ > 0) SI_RETURN_IF_ERROR(step_queue(kMetadataWait));
  return Status();
}

Status IoPump::read_metadata(std::span<const Transfer> transfers) {
  // After a failure of the ring the last ones may still be in flight.
  if (!ring_failure_.ok()) return ring_failure_;
  SI_CHECK(transfers.size() <= metadata_->size(), "more metadata at once than there is room for");
  for (size_t i = 0; i < transfers.size(); ++i) {
    (*metadata_)[i] = transfers[i];
    queue_->start((*metadata_)[i]);
    ++metadata_open_;
  }
  while (metadata_open_ > 0) SI_RETURN_IF_ERROR(step_queue(kMetadataWait));
  for (size_t i = 0; i < transfers.size(); ++i) {
    if (!(*metadata_)[i].status.ok()) return (*metadata_)[i].status;
  }
  return Status();
}

Status IoPump::write_metadata(std::span<const Transfer> transfers) {
  SI_RETURN_IF_ERROR(read_metadata(transfers));
  for (const Transfer& transfer : transfers) {
    traffic_.add_down(base::TrafficKind::kMetadata, transfer.buffer.size());
  }
  return Status();
}

}  // namespace smartinf::storage
