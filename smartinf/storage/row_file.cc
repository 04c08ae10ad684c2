#include "smartinf/storage/row_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "smartinf/base/state_format.h"
#include "smartinf/storage/leak_in_flight.h"
#include "smartinf/storage/reserve_space.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;
using base::StepNumber;

namespace {

constexpr SpaceUse kUse{"rows of tables",
                        "use another device or one more, smaller tables or a smaller log of them"};
/// The byte of records that were never written, in a page of a kState table that was.
constexpr std::byte kUnwritten{0xff};

Status invalid(std::string what, std::string advice = {}) {
  return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
}

std::span<std::byte> record_at(const RowGeometry::Table& table, std::span<std::byte> page,
                               uint64_t slot) {
  return page.subspan(slot * table.record_bytes, table.record_bytes);
}

}  // namespace

Status RowFile::check(const RowFileLayout& layout) {
  uint64_t state_rows = 0;
  if (layout.tables.empty() || layout.tables.size() > kTablesMax) {
    return invalid(
        fmt::format("a file of {} tables; it has 1 to {}", layout.tables.size(), kTablesMax));
  }
  bool state = false;
  for (const RowTableLayout& table : layout.tables) {
    const uint32_t least = table.kind == RowTableKind::kState ? sizeof(uint32_t) : 1;
    if (table.record_bytes < least || table.record_bytes > base::kMiB || table.rows > kRowsMax) {
      return invalid(fmt::format("table {}: {} rows of {} bytes; a device takes up to {} rows, of "
                                 "{} bytes to 1 MiB",
                                 table.name, table.rows, table.record_bytes, kRowsMax, least),
                     "Use more devices.");
    }
    if (table.kind != RowTableKind::kState) continue;
    state = true;
    state_rows += table.rows;
  }
  if (state_rows > kRowsMax) {
    return invalid(fmt::format("the tables have {} rows on this device, which takes up to {}",
                               state_rows, kRowsMax),
                   "Use more devices.");
  }
  if (encode(layout).size() > kRowLayoutBytesMax) {
    return invalid("the description of the tables is too long");
  }
  const RowGeometry geometry(layout);
  if (state && (geometry.log_pages < geometry.log_pages_min() || geometry.log_pages >= kRowsMax)) {
    return invalid(fmt::format("a log of {} bytes for rows of tables; it takes {} to {} bytes here",
                               layout.log_bytes, geometry.log_pages_min() * geometry.log_page_bytes,
                               (kRowsMax - 1) * geometry.log_page_bytes),
                   "Choose another size of the log: several steps' rows should fit.");
  }
  return Status();
}

uint64_t RowFile::file_bytes(const RowFileLayout& layout) { return RowGeometry(layout).file_bytes; }

uint64_t RowFile::memory_bytes_max(const RowFileLayout& layout) {
  const RowGeometry geometry(layout);
  // A map that grows has its old entries beside the new ones for a moment.
  const uint64_t index = base::RowMap::memory_bytes(geometry.log_records_max);
  return RowPump::memory_bytes(geometry) + RowLog::memory_bytes(geometry) +
         geometry.generations_bytes + index + index / 2 + geometry.log_records_max * sizeof(Undo);
}

RowFile::RowFile(CachePlace place, std::chrono::nanoseconds watchdog)
    : directory_(std::move(place.directory)),
      descriptor_(std::move(place.descriptor)),
      size_bytes_(place.size_bytes),
      queue_(std::make_unique<TransferQueue>(std::move(place.ring), place.file,
                                             std::move(place.path), place.direct, watchdog)) {}

RowFile::~RowFile() { (void)close(); }

Status RowFile::close() {
  if (pump_ == nullptr) return queue_ == nullptr ? Status() : queue_->close();
  Status closed = pump_->close();
  if (!closed.ok() && generations_.size() > 0) leak_in_flight(std::move(generations_));
  return closed;
}

Status RowFile::take_layout(RowFileLayout layout, const RunId& file,
                            base::TrafficCounter& traffic) {
  layout_ = std::move(layout);
  geometry_ = RowGeometry(layout_);
  seeds_ = RowSeeds(layout_, file);
  SI_ASSIGN_OR_RETURN(generations_, base::AlignedBuffer::allocate(geometry_.generations_bytes));
  SI_ASSIGN_OR_RETURN(pump_, RowPump::make(std::move(queue_), geometry_, traffic));
  log_.emplace(*pump_, geometry_, seeds_);
  return Status();
}

/// Makes the file as large as its contents.
Status RowFile::reserve(bool sparse) {
  const uint64_t bytes = geometry_.file_bytes;
  if (!descriptor_.is_open()) {
    return bytes <= size_bytes_ ? Status() : no_space(kUse, path(), bytes, size_bytes_);
  }
  if (size_bytes_ > bytes || sparse) {
    if (ftruncate(descriptor_.get(), static_cast<off_t>(bytes)) != 0) {
      return base::errno_status(errno, "cannot change the file's size", path(), bytes);
    }
  } else if (size_bytes_ < bytes) {
    SI_RETURN_IF_ERROR(reserve_space(descriptor_.get(), bytes - size_bytes_, kUse, directory_,
                                     path(), size_bytes_));
  }
  size_bytes_ = bytes;
  return directory_.empty() ? Status() : sync_directory(directory_);
}

Result<std::unique_ptr<RowFile>> RowFile::create(CachePlace place, RowFileLayout layout,
                                                 std::chrono::nanoseconds watchdog,
                                                 base::TrafficCounter& traffic, bool sparse) {
  SI_RETURN_IF_ERROR(check(layout));
  std::unique_ptr<RowFile> file(new RowFile(std::move(place), watchdog));
  file->creating_ = true;
  file->header_.file = make_run_id();
  SI_RETURN_IF_ERROR(file->take_layout(std::move(layout), file->header_.file, traffic));
  SI_RETURN_IF_ERROR(file->reserve(sparse));
  // Headers of an earlier file first: from here on there is none, until the first step is prepared.
  RowPump& pump = *file->pump_;
  const auto zeros = pump.scratch().first(kRowHeaderBytes);
  std::ranges::fill(zeros, std::byte{0});
  constexpr auto kKind = base::TrafficKind::kMetadata;
  for (uint64_t i = 0; i < 2 * kRowHeaderCopies; ++i) {
    SI_RETURN_IF_ERROR(
        pump.move(IoOp::kWriteDurable, i * kRowHeaderStride, zeros, zeros.size(), kKind));
  }
  const std::vector<std::byte> text = encode(file->layout_);
  file->header_.layout_bytes = text.size();
  file->header_.layout_sum = base::checksum(std::span(text), kRowLayoutMagic);
  SI_ASSIGN_OR_RETURN(base::AlignedBuffer bytes,
                      base::AlignedBuffer::allocate(file->geometry_.layout_bytes));
  std::ranges::copy(text, bytes.data());
  Status written;
  for (uint64_t copy = 0; copy < 2 && written.ok(); ++copy) {
    written = pump.move(IoOp::kWrite, kRowLayoutOffset + copy * bytes.size(), bytes.bytes(),
                        bytes.size(), kKind);
  }
  if (!written.ok()) {
    if (!file->close().ok()) leak_in_flight(std::move(bytes));
    return written;
  }
  return file;
}

/// Reads the newest header that is whole and the layout, and makes ready for them.
Status RowFile::read_header(base::TrafficCounter& traffic) {
  SI_ASSIGN_OR_RETURN(auto memory, base::AlignedBuffer::allocate(kRowHeaderBytes));
  std::optional<RowHeader> newest;
  for (uint64_t i = 0; i < 2 * kRowHeaderCopies; ++i) {
    if (size_bytes_ < i * kRowHeaderStride + kRowHeaderBytes) break;
    SI_RETURN_IF_ERROR(queue_->run(IoOp::kRead, i * kRowHeaderStride, memory.bytes(), memory));
    const auto header = decode_row_header(memory.bytes());
    if (header && (!newest || header->sequence > newest->sequence)) newest = header;
  }
  const base::ErrorPlace place{queue_->path(), 0, {}, 0};
  const Status unreadable(ErrorCode::kCorrupt, "no header of the tables' rows is whole",
                          std::string(kDamagedRowsAdvice), place);
  if (!newest) return unreadable;
  if (newest->version > kRowFormatVersion) {
    return Status(ErrorCode::kMismatch,
                  fmt::format("the tables' rows are of version {}, and this program reads up to {}",
                              newest->version, kRowFormatVersion),
                  "Use a newer program.", place);
  }
  const uint64_t bytes = base::round_up(newest->layout_bytes, base::kIoAlignment);
  if (newest->layout_bytes > kRowLayoutBytesMax) return unreadable;
  SI_ASSIGN_OR_RETURN(memory, base::AlignedBuffer::allocate(bytes));
  for (uint64_t copy = 0; copy < 2; ++copy) {
    SI_RETURN_IF_ERROR(
        queue_->run(IoOp::kRead, kRowLayoutOffset + copy * bytes, memory.bytes(), memory));
    const auto text = memory.bytes().first(newest->layout_bytes);
    if (base::checksum(text, kRowLayoutMagic) != newest->layout_sum) continue;
    std::optional<RowFileLayout> layout = decode_row_layout(text);
    if (!layout || !check(*layout).ok()) return unreadable;
    header_ = *newest;
    return take_layout(std::move(*layout), header_.file, traffic);
  }
  return unreadable;
}

Result<RowFileLayout> RowFile::peek(CachePlace place) {
  base::TrafficCounter ignored;
  RowFile file(std::move(place), std::chrono::minutes(1));
  SI_RETURN_IF_ERROR(file.read_header(ignored));
  RowFileLayout layout = file.layout_;
  SI_RETURN_IF_ERROR(file.close());
  return layout;
}

Result<std::unique_ptr<RowFile>> RowFile::open(CachePlace place, const RunId& run,
                                               std::string_view commit_record,
                                               std::chrono::nanoseconds watchdog,
                                               base::TrafficCounter& traffic, bool read_only) {
  const base::ErrorPlace where{place.path, {}, {}, 0};
  if (commit_record.empty()) {
    return Status(ErrorCode::kFailedPrecondition,
                  "the creation of the tables' rows was interrupted", "Start the run again.",
                  where);
  }
  const std::optional<RowCommit> commit = decode_row_commit(commit_record);
  if (!commit) {
    return Status(ErrorCode::kMismatch, "the state's record of its tables is not understood",
                  "Use the program that made it, or a newer one.", where);
  }
  std::unique_ptr<RowFile> file(new RowFile(std::move(place), watchdog));
  file->read_only_ = read_only;
  SI_RETURN_IF_ERROR(file->read_header(traffic));
  if (file->layout_.run != run || file->header_.file != commit->file) {
    return Status(ErrorCode::kMismatch,
                  "the tables' rows there are not those of the state beside them",
                  "Put back the file that belongs to the state.", where);
  }
  SI_RETURN_IF_ERROR(file->recover(*commit));
  return file;
}

const RowFileLayout& RowFile::layout() const { return layout_; }
const std::string& RowFile::path() const {
  return pump_ != nullptr ? pump_->path() : queue_->path();
}

Status RowFile::usable() const {
  if (!failed_) return Status();
  return Status(ErrorCode::kFailedPrecondition,
                "a merge of the tables' rows has failed before, so they cannot be used",
                "Open the run again, which finishes it.", base::ErrorPlace{path(), {}, {}, 0});
}

/// 0: never written.
uint8_t& RowFile::generation(uint32_t table, uint64_t page) const {
  return reinterpret_cast<uint8_t*>(generations_.data())[geometry_.tables[table].first_page + page];
}

Status RowFile::damaged_home(uint32_t table, uint64_t page) const {
  const Table& one = geometry_.tables[table];
  const uint64_t first = page * one.records_per_page;
  return Status(ErrorCode::kCorrupt,
                fmt::format("rows {} to {} of table {}, as this device counts them, are not what "
                            "was written",
                            first, std::min(one.rows, first + one.records_per_page) - 1,
                            layout_.tables[table].name),
                std::string(kDamagedRowsAdvice),
                base::ErrorPlace{path(), geometry_.home_offset(one, page), one.page_bytes, 0});
}

Status RowFile::verify_home(uint32_t table, uint64_t page, std::span<const std::byte> bytes) const {
  if (whole(bytes, seeds_.home(table, page, generation(table, page)))) return Status();
  // The log has what a merge changes there; the rest was checked when the file was opened.
  if (std::ranges::binary_search(unfinished_, geometry_.tables[table].first_page + page)) {
    return Status();
  }
  return damaged_home(table, page);
}

void RowFile::fill_unwritten(uint32_t table, std::span<std::byte> page) const {
  const Table& one = geometry_.tables[table];
  const uint64_t records = one.records_per_page * one.record_bytes;
  std::ranges::fill(page, std::byte{0});
  if (one.kind == RowTableKind::kState) std::ranges::fill(page.first(records), kUnwritten);
}

/// Empty: a record that fill_unwritten() has put there.
std::span<const std::byte> RowFile::written(const Table& table,
                                            std::span<const std::byte> record) const {
  if (table.kind != RowTableKind::kState ||
      load<uint32_t>(record, record.size() - sizeof(uint32_t)) != ~uint32_t{0} ||
      std::ranges::any_of(record, [](std::byte b) { return b != kUnwritten; })) {
    return record;
  }
  return {};
}

/// The piece's transfer of so many adjacent pages at most; false: they do not fit.
bool RowFile::add_run(RowPump::Piece& piece, uint32_t table, uint64_t first, uint64_t pages) const {
  const Table& one = geometry_.tables[table];
  if (pages * one.page_bytes > piece.memory.size()) return false;
  piece.transfer.offset_bytes = geometry_.home_offset(one, first);
  piece.transfer.buffer = piece.memory.first(pages * one.page_bytes);
  piece.first = first;
  piece.count = pages;
  return true;
}

Status RowFile::visit_log_page(uint32_t table, std::span<const std::byte> page, size_t begin,
                               size_t end, std::span<const uint32_t> rows, const Visit& visit) {
  const std::span<const uint32_t> there = log_->rows_of(page);
  SI_CHECK(RowLog::head_of(page).table == table, "a page of another table");
  for (size_t k = begin; k < end; ++k) {
    const size_t i = logs_[k].item;
    // The last one: a row that came again in its step is there twice.
    size_t at = there.size();
    while (at > 0 && there[at - 1] != rows[i]) --at;
    SI_CHECK(at > 0, "a row that is not in its page of the log");
    visit(i, log_->record_of(page, at - 1));
  }
  return Status();
}

Status RowFile::read(uint32_t table, std::span<const uint32_t> rows, const Visit& visit) {
  SI_RETURN_IF_ERROR(usable());
  const Table& one = geometry_.tables[table];
  SI_CHECK(rows.empty() || rows.back() < one.rows, "a row that the table does not have");
  homes_.clear();
  logs_.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t slot =
        one.kind == RowTableKind::kState ? index_.find(key_of(one, rows[i])) : base::RowMap::kNone;
    const uint64_t page = rows[i] / one.records_per_page;
    if (slot != base::RowMap::kNone) {
      logs_.push_back({slot, i});
    } else if (generation(table, page) == 0) {
      visit(i, {});
    } else {
      homes_.push_back({page, i});
    }
  }
  std::ranges::sort(logs_, {}, &PageItem::page);
  size_t home = 0;
  size_t log = 0;
  // The items of one page, and of those behind it that a piece has room for.
  const auto take_run = [&](RowPump::Piece& piece, const std::vector<PageItem>& items, size_t& at,
                            uint64_t page_bytes) {
    piece.begin = at;
    piece.first = items[at].page;
    piece.count = 1;
    const uint64_t room = piece.memory.size() / page_bytes;
    for (++at; at < items.size(); ++at) {
      const uint64_t behind = items[at].page - piece.first;
      if (behind > piece.count || behind >= room) break;
      if (piece.log && behind == piece.count &&
          !log_->in_memory(static_cast<uint32_t>(items[at].page)).empty()) {
        break;
      }
      piece.count = std::max(piece.count, behind + 1);
    }
    piece.end = at;
    piece.transfer.op = IoOp::kRead;
    piece.transfer.buffer = piece.memory.first(piece.count * page_bytes);
  };
  const auto next = [&](RowPump::Piece& piece) {
    if (home < homes_.size()) {
      piece.log = false;
      take_run(piece, homes_, home, one.page_bytes);
      piece.transfer.offset_bytes = geometry_.home_offset(one, piece.first);
      counts_.home_pages_read += piece.count;
      return true;
    }
    while (log < logs_.size()) {
      const auto slot = static_cast<uint32_t>(logs_[log].page);
      if (const auto page = log_->in_memory(slot); !page.empty()) {
        const size_t begin = log;
        while (log < logs_.size() && logs_[log].page == slot) ++log;
        (void)visit_log_page(table, page, begin, log, rows, visit);
        continue;
      }
      piece.log = true;
      take_run(piece, logs_, log, geometry_.log_page_bytes);
      piece.transfer.offset_bytes = geometry_.log_offset(slot);
      counts_.log_pages_read += piece.count;
      return true;
    }
    return false;
  };
  const auto done = [&](RowPump::Piece& piece) -> Result<bool> {
    const std::vector<PageItem>& items = piece.log ? logs_ : homes_;
    const uint64_t page_bytes = piece.log ? geometry_.log_page_bytes : one.page_bytes;
    for (size_t k = piece.begin; k < piece.end;) {
      const uint64_t number = items[k].page;
      const auto page = piece.memory.subspan((number - piece.first) * page_bytes, page_bytes);
      size_t end = k;
      while (end < piece.end && items[end].page == number) ++end;
      if (piece.log) {
        const uint64_t absolute = log_->number_of(static_cast<uint32_t>(number));
        if (!log_->verify(absolute, page)) return log_->damaged(absolute);
        SI_RETURN_IF_ERROR(visit_log_page(table, page, k, end, rows, visit));
      } else {
        SI_RETURN_IF_ERROR(verify_home(table, number, page));
        for (; k < end; ++k) {
          const uint64_t slot = rows[items[k].item] % one.records_per_page;
          visit(items[k].item, written(one, record_at(one, page, slot)));
        }
      }
      k = end;
    }
    return false;
  };
  return pump_->run(next, done);
}

Status RowFile::put(uint32_t table, std::span<const uint32_t> rows,
                    std::span<const std::byte> records) {
  SI_RETURN_IF_ERROR(usable());
  const Table& one = geometry_.tables[table];
  SI_CHECK(rows.empty() || rows.back() < one.rows, "a row that the table does not have");
  SI_CHECK(records.size() == rows.size() * one.record_bytes, "records of another size");
  if (one.kind != RowTableKind::kScratch && !creating_) {
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("table {} is committed, so its rows are written by steps only",
                              layout_.tables[table].name));
  }
  const auto page_of = [&](size_t i) { return rows[i] / one.records_per_page; };
  const auto end_of_page = [&](size_t i) {
    const uint64_t page = page_of(i);
    while (i < rows.size() && page_of(i) == page) ++i;
    return i;
  };
  // Whether what the page has in its other rows must be read first.
  const auto keeps_some = [&](uint64_t page, size_t count) {
    return generation(table, page) != 0 &&
           count < std::min(one.records_per_page, one.rows - page * one.records_per_page);
  };
  const auto compose = [&](RowPump::Piece& piece, bool was_read) {
    size_t i = piece.begin;
    for (uint64_t page = piece.first; page < piece.first + piece.count; ++page) {
      const auto bytes =
          piece.memory.subspan((page - piece.first) * one.page_bytes, one.page_bytes);
      if (!was_read) fill_unwritten(table, bytes);
      for (; i < piece.end && page_of(i) == page; ++i) {
        std::ranges::copy(records.subspan(i * one.record_bytes, one.record_bytes),
                          record_at(one, bytes, rows[i] % one.records_per_page).begin());
      }
      uint8_t& now = generation(table, page);
      now = next_generation(now);
      seal(bytes, seeds_.home(table, page, now));
    }
    piece.transfer.op = IoOp::kWrite;
  };
  size_t at = 0;
  const auto next = [&](RowPump::Piece& piece) {
    if (at == rows.size()) return false;
    const uint64_t first = page_of(at);
    piece.begin = at;
    at = end_of_page(at);
    const bool reads = keeps_some(first, at - piece.begin);
    uint64_t pages = 1;
    while (!reads && at < rows.size() && page_of(at) == first + pages) {
      const size_t end = end_of_page(at);
      if (keeps_some(first + pages, end - at) || !add_run(piece, table, first, pages + 1)) {
        break;
      }
      ++pages;
      at = end;
    }
    piece.end = at;
    (void)add_run(piece, table, first, pages);
    piece.transfer.op = IoOp::kRead;
    if (!reads) compose(piece, false);
    return true;
  };
  return pump_->run(next, [&](RowPump::Piece& piece) -> Result<bool> {
    if (piece.transfer.op == IoOp::kWrite) return false;
    SI_RETURN_IF_ERROR(verify_home(table, piece.first, piece.transfer.buffer));
    compose(piece, true);
    return true;
  });
}

void RowFile::begin_step(StepNumber step) {
  step_ = step;
  prepared_ = false;
}

Status RowFile::append(uint32_t table, std::span<const uint32_t> rows,
                       std::span<const std::byte> records) {
  SI_RETURN_IF_ERROR(usable());
  const Table& one = geometry_.tables[table];
  SI_CHECK(one.kind == RowTableKind::kState, "steps write kState tables only");
  SI_CHECK(rows.empty() || rows.back() < one.rows, "a row that the table does not have");
  SI_CHECK(records.size() == rows.size() * one.record_bytes, "records of another size");
  for (size_t i = 0; i < rows.size(); ++i) {
    SI_ASSIGN_OR_RETURN(const auto place,
                        log_->append(table, rows[i], step_, geometry_.merge_pages_max));
    if (!place) {
      const uint64_t step_pages = log_->head() - base_.head;
      return Status(
          ErrorCode::kNoSpace,
          fmt::format("the log of the tables' rows is full: this step has {} in it so far, and {} "
                      "of {} are earlier steps'",
                      base::format_bytes(step_pages * geometry_.log_page_bytes),
                      base::format_bytes((base_.head - log_->tail()) * geometry_.log_page_bytes),
                      base::format_bytes(log_room_bytes())),
          "The last committed step stands. Use fewer rows a step, or a new run with a larger log.",
          base::ErrorPlace{path(), {}, {}, 0});
    }
    std::ranges::copy(records.subspan(i * one.record_bytes, one.record_bytes),
                      place->record.begin());
    const uint32_t key = key_of(one, rows[i]);
    undo_.push_back({key, index_.find(key)});
    index_.set(key, place->slot);
  }
  counts_.records_appended += rows.size();
  return Status();
}

Result<std::string> RowFile::prepare(StepNumber step) {
  SI_RETURN_IF_ERROR(usable());
  SI_CHECK(step == step_ && !prepared_, "prepare of another step");
  SI_RETURN_IF_ERROR(log_->flush());
  const RowLog::Mark mark = log_->mark();
  if (creating_) {
    SI_RETURN_IF_ERROR(write_generations());
    SI_RETURN_IF_ERROR(write_header());
  } else if (mark.head != base_.head) {
    SI_RETURN_IF_ERROR(pump_->sync());
  }
  counts_.log_bytes += (mark.head - base_.head) * geometry_.log_page_bytes;
  prepared_ = true;
  constexpr size_t kNameMax = 200;
  std::string tables = layout_.tables.front().name.substr(0, kNameMax);
  if (layout_.tables.size() > 1) {
    tables += fmt::format(" and {} more", layout_.tables.size() - 1);
  }
  return encode(RowCommit{header_.file, mark.head, mark.chain, std::move(tables)});
}

Status RowFile::commit(StepNumber step) {
  SI_RETURN_IF_ERROR(usable());
  SI_CHECK(step == step_ && prepared_, "commit of a step that is not prepared");
  base_ = log_->mark();
  committed_head_ = base_.head;
  undo_.clear();
  creating_ = false;
  prepared_ = false;
  return Status();
}

Status RowFile::abort(StepNumber step) {
  SI_RETURN_IF_ERROR(usable());
  SI_CHECK(step == step_, "abort of another step");
  prepared_ = false;
  SI_RETURN_IF_ERROR(log_->roll_back(base_));
  for (; !undo_.empty(); undo_.pop_back()) {
    const Undo& last = undo_.back();
    if (last.slot == base::RowMap::kNone) {
      index_.erase(last.key);
    } else {
      index_.set(last.key, last.slot);
    }
  }
  return Status();
}

/// Makes the homes written so far and their generations durable, in the place that is not in use.
Status RowFile::write_generations() {
  header_.generations_place = 1 - header_.generations_place;
  header_.generations_from = log_->head();
  header_.generations_sum =
      base::checksum(generations_.bytes(), seeds_.generations(header_.generations_from));
  SI_RETURN_IF_ERROR(pump_->move(IoOp::kWrite,
                                 geometry_.generations_offset(header_.generations_place),
                                 generations_.bytes(), base::kMiB, base::TrafficKind::kMetadata));
  counts_.merge_metadata_bytes += generations_.size();
  return pump_->sync();
}

Status RowFile::write_header() {
  ++header_.sequence;
  const auto bytes = pump_->scratch().first(kRowHeaderBytes);
  encode(header_, bytes);
  for (uint64_t copy = 0; copy < kRowHeaderCopies; ++copy) {
    SI_RETURN_IF_ERROR(pump_->move(IoOp::kWriteDurable, header_offset(header_.sequence % 2, copy),
                                   bytes, bytes.size(), base::TrafficKind::kMetadata));
  }
  counts_.merge_metadata_bytes += kRowHeaderCopies * bytes.size();
  return Status();
}

uint64_t RowFile::log_used_bytes() const { return log_->used() * geometry_.log_page_bytes; }
uint64_t RowFile::log_room_bytes() const { return geometry_.log_pages * geometry_.log_page_bytes; }
RowFile::Counts RowFile::counts() const { return counts_; }

bool RowFile::wants_merge() const {
  return log_->tail() < committed_head_ && log_->used() * 4 > geometry_.log_pages * 3;
}

bool RowFile::must_merge(uint64_t records_to_come) const {
  uint64_t fewest = ~uint64_t{0};
  uint64_t tables = 0;
  for (const Table& table : geometry_.tables) {
    if (table.kind != RowTableKind::kState) continue;
    fewest = std::min(fewest, table.records_per_log_page);
    ++tables;
  }
  if (tables == 0 || log_->tail() >= committed_head_) return false;
  const uint64_t pages = base::divide_up(records_to_come, fewest) + tables;
  return log_->used() + pages + geometry_.merge_pages_max > geometry_.log_pages;
}

Status RowFile::verify(const std::function<Status(uint64_t, uint64_t)>& progress,
                       const std::function<void(const Status&)>& found) {
  SI_RETURN_IF_ERROR(usable());
  uint64_t all = log_->used() * geometry_.log_page_bytes;
  for (uint32_t t = 0; t < geometry_.tables.size(); ++t) {
    const Table& one = geometry_.tables[t];
    for (uint64_t page = 0; page < one.pages; ++page) {
      if (generation(t, page) != 0) all += one.page_bytes;
    }
  }
  uint64_t done_bytes = 0;
  const Status log_read =
      log_->read(log_->tail(), log_->head(), [&](uint64_t n, auto page) -> Result<bool> {
        if (!log_->verify(n, page)) found(log_->damaged(n));
        done_bytes += page.size();
        SI_RETURN_IF_ERROR(progress(done_bytes, all));
        return true;
      });
  // A drive's error ends a table, or the log, and not the others.
  const auto go_on = [&](const Status& status) {
    if (status.code() != ErrorCode::kIo) return status;
    found(status);
    return Status();
  };
  SI_RETURN_IF_ERROR(go_on(log_read));
  for (uint32_t t = 0; t < geometry_.tables.size(); ++t) {
    const Table& one = geometry_.tables[t];
    uint64_t at = 0;
    const auto next = [&](RowPump::Piece& piece) {
      while (at < one.pages && generation(t, at) == 0) ++at;
      if (at == one.pages) return false;
      const uint64_t first = at;
      for (++at; at < one.pages && generation(t, at) != 0; ++at) {
        if (!add_run(piece, t, first, at - first + 1)) break;
      }
      piece.transfer.op = IoOp::kRead;
      return add_run(piece, t, first, at - first);
    };
    const auto done = [&](RowPump::Piece& piece) -> Result<bool> {
      for (uint64_t i = 0; i < piece.count; ++i) {
        const uint64_t page = piece.first + i;
        const auto bytes = piece.memory.subspan(i * one.page_bytes, one.page_bytes);
        if (Status status = verify_home(t, page, bytes); !status.ok()) found(status);
      }
      done_bytes += piece.transfer.buffer.size();
      SI_RETURN_IF_ERROR(progress(done_bytes, all));
      return false;
    };
    SI_RETURN_IF_ERROR(go_on(pump_->run(next, done)));
  }
  return Status();
}

Result<std::unique_ptr<RowFile>> open_row_file(
    const std::function<Result<CachePlace>(std::string_view)>& place, const RunId& run,
    std::string_view commit_record, std::chrono::nanoseconds watchdog,
    base::TrafficCounter& traffic, bool read_only) {
  const auto open = [&](std::string_view name) -> Result<std::unique_ptr<RowFile>> {
    SI_ASSIGN_OR_RETURN(CachePlace there, place(name));
    return RowFile::open(std::move(there), run, commit_record, watchdog, traffic, read_only);
  };
  auto file = open(kRowFileName);
  const ErrorCode code = file.status().code();
  if (file.ok() || (code != ErrorCode::kMismatch && code != ErrorCode::kNotFound)) return file;
  auto other = open(kNewRowFileName);
  if (!other.ok()) {
    if (code != ErrorCode::kNotFound) return file;
    return Status(code,
                  fmt::format("the state's tables ({}) are not beside it",
                              tables_of_row_commit(commit_record)),
                  fmt::format("Put {} back, or restore a checkpoint.", kRowFileName));
  }
  if (read_only) return other;
  const std::filesystem::path path = (*other)->path();
  SI_RETURN_IF_ERROR((*other)->close());
  const std::string named = (path.parent_path() / kRowFileName).string();
  if (std::rename(path.c_str(), named.c_str()) != 0) {
    return base::errno_status(errno, "cannot put the new tables in the old ones' place", named);
  }
  SI_RETURN_IF_ERROR(sync_directory(path.parent_path().string()));
  return open(kRowFileName);
}

Result<std::unique_ptr<RowFile>> open_rows_to_read(const std::string& directory, const RunId& run,
                                                   std::string_view commit_record,
                                                   base::TrafficCounter& traffic) {
  return open_row_file([&](std::string_view name) { return open_cache_to_read(directory, name); },
                       run, commit_record, std::chrono::minutes(1), traffic, /*read_only=*/true);
}

}  // namespace smartinf::storage
