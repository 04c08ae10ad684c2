#include "smartinf/storage/row_log.h"

#include <algorithm>

#include <fmt/format.h>

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;

RowLog::RowLog(RowPump& pump, const RowGeometry& geometry, const RowSeeds& seeds)
    : pump_(pump), geometry_(geometry), seeds_(seeds), sums_(geometry.log_pages) {}

void RowLog::set_ends(uint64_t tail, const Mark& mark) {
  tail_ = tail;
  head_ = mark.head;
  chain_ = mark.chain;
}

void RowLog::seal_open() {
  if (open_.empty()) return;
  const uint64_t number = head_ - 1;
  store(open_, offsetof(LogPageHead, chain), chain_);
  seal(open_, seeds_.log_page(number));
  chain_ = stored_sum(open_);
  sums_[number % geometry_.log_pages] = static_cast<uint32_t>(chain_);
  open_ = {};
}

/// Writes the sealed pages of the chunk that were not written yet, and goes on with the next one.
void RowLog::start_write() {
  Chunk& chunk = chunks_[chunk_];
  if (chunk.written == chunk.pages) return;
  RowPump::Piece& piece = pump_.chunks()[chunk_];
  piece.transfer.op = IoOp::kWrite;
  piece.transfer.kind = base::TrafficKind::kState;
  piece.transfer.offset_bytes = geometry_.log_offset(chunk.first);
  piece.transfer.buffer = piece.memory.first(chunk.pages * geometry_.log_page_bytes);
  chunk.written = chunk.pages;
  pump_.start(piece);
  chunk_ = (chunk_ + 1) % chunks_.size();
  // The next one's place in memory is still needed if its write has not come to its end.
}

Status RowLog::begin_page() {
  seal_open();
  const bool wraps = head_ % geometry_.log_pages == 0;
  if (chunks_[chunk_].pages == pages_per_chunk() || (wraps && chunks_[chunk_].pages > 0)) {
    start_write();
    SI_RETURN_IF_ERROR(pump_.submit());
  }
  Chunk& chunk = chunks_[chunk_];
  if (chunk.written == chunk.pages) {
    SI_RETURN_IF_ERROR(pump_.wait_for(pump_.chunks()[chunk_]));
    chunk = {head_, 0, 0};
  }
  open_ = page_in(chunk_, chunk.pages++);
  std::ranges::fill(open_, std::byte{0});
  ++head_;
  return Status();
}

Result<std::optional<RowLog::Place>> RowLog::append(uint32_t table, uint32_t row,
                                                    base::StepNumber step, uint64_t keep) {
  const uint64_t fits = geometry_.tables[table].records_per_log_page;
  LogPageHead head = open_.empty() ? LogPageHead{} : head_of(open_);
  if (open_.empty() || head.table != table || head.count == fits) {
    if (used() + keep + 1 > geometry_.log_pages) return std::optional<Place>();
    SI_RETURN_IF_ERROR(begin_page());
    head = {.step = step, .table = table, .kind = LogPageKind::kData};
  }
  const uint64_t i = head.count++;
  store(open_, 0, head);
  store(open_, sizeof head + i * sizeof row, row);
  const uint64_t bytes = geometry_.tables[table].record_bytes;
  return std::optional<Place>(Place{static_cast<uint32_t>((head_ - 1) % geometry_.log_pages),
                                    open_.subspan(record_offset(table) + i * bytes, bytes)});
}

Result<std::span<std::byte>> RowLog::begin_merge_page() {
  SI_CHECK(used() < geometry_.log_pages, "the log has no room for a merge");
  SI_RETURN_IF_ERROR(begin_page());
  return open_;
}

Status RowLog::flush() {
  seal_open();
  start_write();
  SI_RETURN_IF_ERROR(pump_.submit());
  Status first;
  for (RowPump::Piece& piece : pump_.chunks()) {
    Status status = pump_.wait_for(piece);
    if (first.ok()) first = std::move(status);
  }
  return first;
}

void RowLog::forget_chunks() {
  chunks_ = {};
  for (RowPump::Piece& piece : pump_.chunks()) piece.transfer.status = Status();
}

Status RowLog::roll_back(const Mark& mark) {
  open_ = {};
  for (RowPump::Piece& piece : pump_.chunks()) {
    (void)pump_.wait_for(piece);
    if (piece.in_flight) return pump_.wait_for(piece);  // it hangs
  }
  forget_chunks();
  head_ = mark.head;
  chain_ = mark.chain;
  return Status();
}

std::span<const std::byte> RowLog::in_memory(uint32_t slot) const {
  const uint64_t number = number_of(slot);
  for (size_t c = 0; c < chunks_.size(); ++c) {
    if (number >= chunks_[c].first && number < chunks_[c].first + chunks_[c].pages) {
      return page_in(c, number - chunks_[c].first);
    }
  }
  return {};
}

bool RowLog::verify(uint64_t number, std::span<const std::byte> page) const {
  return static_cast<uint32_t>(stored_sum(page)) == sums_[number % geometry_.log_pages] &&
         whole(page, seeds_.log_page(number));
}

Status RowLog::damaged(uint64_t number) const {
  return Status(
      ErrorCode::kCorrupt,
      fmt::format("page {} of the log of tables' rows is not what was written", number),
      std::string(kDamagedRowsAdvice),
      base::ErrorPlace{pump_.path(), geometry_.log_offset(number), geometry_.log_page_bytes, 0});
}

bool RowLog::accept(uint64_t number, std::span<const std::byte> page, bool any_chain) {
  if (!whole(page, seeds_.log_page(number))) return false;
  if (!any_chain && head_of(page).chain != chain_) return false;
  chain_ = stored_sum(page);
  sums_[number % geometry_.log_pages] = static_cast<uint32_t>(chain_);
  head_ = number + 1;
  return true;
}

Status RowLog::read(uint64_t from, uint64_t to,
                    const std::function<Result<bool>(uint64_t, std::span<std::byte>)>& visit) {
  forget_chunks();
  const uint64_t pages = geometry_.log_pages;
  const uint64_t bytes = geometry_.log_page_bytes;
  uint64_t next = from;
  const auto start_next = [&](size_t c) {
    chunks_[c] = {next, 0, 0};
    if (next == to) return;
    const uint64_t count = std::min({pages_per_chunk(), to - next, pages - next % pages});
    RowPump::Piece& piece = pump_.chunks()[c];
    piece.transfer.op = IoOp::kRead;
    piece.transfer.kind = base::TrafficKind::kState;
    piece.transfer.offset_bytes = geometry_.log_offset(next);
    piece.transfer.buffer = piece.memory.first(count * bytes);
    pump_.start(piece);
    chunks_[c].pages = count;
    next += count;
  };
  for (size_t c = 0; c < chunks_.size(); ++c) start_next(c);
  Status status = pump_.submit();
  bool more = true;
  for (size_t c = 0; status.ok() && more && chunks_[c].pages > 0; c = (c + 1) % chunks_.size()) {
    status = pump_.wait_for(pump_.chunks()[c]);
    for (uint64_t i = 0; status.ok() && more && i < chunks_[c].pages; ++i) {
      Result<bool> outcome = visit(chunks_[c].first + i, page_in(c, i));
      if (outcome.ok()) {
        more = *outcome;
      } else {
        status = std::move(outcome).status();
      }
    }
    if (!status.ok() || !more) break;
    start_next(c);
    status = pump_.submit();
  }
  for (RowPump::Piece& piece : pump_.chunks()) {
    const Status last = pump_.wait_for(piece);
    if (piece.in_flight) return last;  // it hangs
  }
  forget_chunks();
  chunk_ = 0;
  return status;
}

std::span<const uint32_t> RowLog::rows_of(std::span<const std::byte> page) const {
  return {reinterpret_cast<const uint32_t*>(page.data() + sizeof(LogPageHead)),
          head_of(page).count};
}

std::span<const std::byte> RowLog::record_of(std::span<const std::byte> page, uint64_t i) const {
  const uint32_t table = head_of(page).table;
  const uint64_t bytes = geometry_.tables[table].record_bytes;
  return page.subspan(record_offset(table) + i * bytes, bytes);
}

}  // namespace smartinf::storage
