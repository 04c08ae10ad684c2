#include "smartinf/storage/row_pump.h"

#include <algorithm>
#include <utility>

#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

constexpr std::chrono::seconds kWait{1};  // one look at the queue, which has the watchdog
constexpr size_t kSubmittedAtOnce = 8;    // the drive need not wait until all that came is used
constexpr uint64_t kScratchBytes = 2 * kRowHeaderBytes;

uint64_t homes_bytes(const RowGeometry& geometry) {
  return std::max(geometry.merge_home_bytes, RowGeometry::kReadsMax * geometry.read_bytes);
}

}  // namespace

uint64_t RowPump::memory_bytes(const RowGeometry& geometry) {
  return kScratchBytes + RowGeometry::kChunks * geometry.chunk_bytes + homes_bytes(geometry) +
         geometry.merge_staged_bytes;
}

Result<std::unique_ptr<RowPump>> RowPump::make(std::unique_ptr<TransferQueue> queue,
                                               const RowGeometry& geometry,
                                               base::TrafficCounter& traffic) {
  if (queue->depth() < 2 * RowGeometry::kChunks) {
    return Status(ErrorCode::kInvalidArgument, "rows of tables need a ring of depth 8 or more");
  }
  std::unique_ptr<RowPump> pump(new RowPump(std::move(queue), traffic));
  SI_ASSIGN_OR_RETURN(pump->memory_, base::AlignedBuffer::allocate(memory_bytes(geometry)));
  std::span<std::byte> left = pump->memory_.bytes();
  const auto take = [&](uint64_t bytes) {
    const auto taken = left.first(bytes);
    left = left.subspan(bytes);
    return taken;
  };
  pump->scratch_ = take(kScratchBytes);
  pump->pooled_ = std::min(pump->queue_->depth() - RowGeometry::kChunks, RowGeometry::kReadsMax);
  pump->pieces_ = std::make_unique<std::vector<Piece>>(pump->pooled_ + RowGeometry::kChunks);
  for (Piece& chunk : pump->chunks()) chunk.memory = take(geometry.chunk_bytes);
  pump->homes_ = take(homes_bytes(geometry));
  pump->staged_ = take(geometry.merge_staged_bytes);
  for (uint32_t i = 0; i < pump->pooled_; ++i) {
    Piece& piece = (*pump->pieces_)[i];
    piece.pooled = true;
    piece.memory = pump->homes_.subspan(i * geometry.read_bytes, geometry.read_bytes);
  }
  for (Piece& piece : *pump->pieces_) piece.transfer.owner = &piece;
  pump->finished_.reserve(pump->pooled_);
  pump->done_.resize(pump->queue_->depth());
  // A refusal costs speed only.
  (void)pump->queue_->ring().register_memory(pump->memory_.bytes());
  return pump;
}

RowPump::~RowPump() { (void)close(); }

Status RowPump::close() {
  Status closed = queue_->close();
  if (!closed.ok() && memory_.size() > 0) {
    leak_in_flight(std::move(pieces_));
    leak_in_flight(std::move(memory_));
  }
  return closed;
}

void RowPump::start(Piece& piece) {
  const Transfer& transfer = piece.transfer;
  transfer.op == IoOp::kRead ? traffic_.add_up(transfer.kind, transfer.buffer.size())
                             : traffic_.add_down(transfer.kind, transfer.buffer.size());
  piece.in_flight = true;
  queue_->start(piece.transfer);
}

Status RowPump::wait_for_some() {
  SI_ASSIGN_OR_RETURN(const size_t count, queue_->finish(done_, kWait));
  for (size_t i = 0; i < count; ++i) {
    auto* piece = static_cast<Piece*>(done_[i]->owner);
    piece->in_flight = false;
    if (piece->pooled) finished_.push_back(piece);
  }
  return Status();
}

Status RowPump::wait_for(Piece& piece) {
  while (piece.in_flight) SI_RETURN_IF_ERROR(wait_for_some());
  return piece.transfer.status;
}

Status RowPump::run(const std::function<bool(Piece&)>& next,
                    const std::function<Result<bool>(Piece&)>& done) {
  if (queue_->failed()) return wait_for_some();
  Status failure;
  uint32_t flying = 0;
  bool more = true;
  const auto start_next = [&](Piece& piece) {
    piece.transfer.kind = base::TrafficKind::kState;
    if (!more || !failure.ok() || !(more = next(piece))) return;
    start(piece);
    ++flying;
  };
  finished_.clear();
  for (uint32_t i = 0; i < pooled_ && more; ++i) start_next((*pieces_)[i]);
  while (flying > 0) {
    SI_RETURN_IF_ERROR(queue_->submit());
    SI_RETURN_IF_ERROR(wait_for_some());
    size_t taken = 0;
    for (Piece* piece : std::exchange(finished_, {})) {
      --flying;
      if (++taken % kSubmittedAtOnce == 0) SI_RETURN_IF_ERROR(queue_->submit());
      bool again = false;
      if (!piece->transfer.status.ok()) {
        if (failure.ok()) failure = piece->transfer.status;
      } else if (failure.ok()) {
        Result<bool> outcome = done(*piece);
        if (!outcome.ok()) failure = std::move(outcome).status();
        again = outcome.ok() && *outcome;
      }
      if (again) {
        start(*piece);
        ++flying;
      } else {
        start_next(*piece);
      }
    }
  }
  return failure;
}

Status RowPump::move(IoOp op, uint64_t offset_bytes, std::span<std::byte> bytes, uint64_t unit,
                     base::TrafficKind kind) {
  return run(
      [&, at = uint64_t{0}](Piece& piece) mutable {
        if (at == bytes.size()) return false;
        const uint64_t length = std::min(unit, bytes.size() - at);
        piece.transfer.op = op;
        piece.transfer.kind = kind;
        piece.transfer.offset_bytes = offset_bytes + at;
        piece.transfer.buffer = bytes.subspan(at, length);
        at += length;
        return true;
      },
      [](Piece&) -> Result<bool> { return false; });
}

Status RowPump::sync() {
  return run(
      [first = true](Piece& piece) mutable {
        piece.transfer.op = IoOp::kSync;
        piece.transfer.offset_bytes = 0;
        piece.transfer.buffer = {};
        return std::exchange(first, false);
      },
      [](Piece&) -> Result<bool> { return false; });
}

}  // namespace smartinf::storage
