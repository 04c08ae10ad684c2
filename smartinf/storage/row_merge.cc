// Records from the log to their homes, and the same again after a crash: a page that was torn has
// its unchanged records still, which its masked checksum shows, and the log has the others.
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "smartinf/storage/row_file.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;

/// Records of one merge and the pages that they go to, both in the pump's memory.
struct RowFile::Batch {
  struct Record {
    uint32_t table = 0;
    uint16_t slot = 0;  // in its page
    uint64_t page = 0;
    std::span<const std::byte> bytes;
  };
  struct Home {
    uint32_t table = 0;
    uint64_t page = 0;
    size_t begin = 0, end = 0;  // of records
    std::span<std::byte> bytes;
    uint64_t masked_sum = 0;
  };
  std::vector<Record> records;
  std::vector<Home> homes;
  uint64_t tail = 0;   // the log's when all of it is at home
  bool again = false;  // its masked sums are from the log, and homes may be old, new or torn
};

namespace {

/// Zeros in place of the records that a batch changes, then the checksum of what stays.
template <typename Home, typename Records>
uint64_t masked_sum(const Home& home, const Records& records, uint64_t record_bytes,
                    uint64_t seed) {
  for (size_t i = home.begin; i < home.end; ++i) {
    std::ranges::fill(home.bytes.subspan(records[i].slot * record_bytes, record_bytes),
                      std::byte{0});
  }
  return page_sum(home.bytes, seed);
}

}  // namespace

/// Takes the newest records of the log's pages up to `until`, as far as there is room, and makes a
/// list of their homes.
Status RowFile::take_records(uint64_t until, Batch& batch) {
  batch.records.reserve(RowGeometry::kMergeRecordsMax);
  uint64_t home_bytes = 0;
  uint64_t staged_bytes = 0;
  batch.tail = log_->tail();
  SI_RETURN_IF_ERROR(
      log_->read(log_->tail(), until, [&](uint64_t n, std::span<std::byte> page) -> Result<bool> {
        if (!log_->verify(n, page)) return log_->damaged(n);
        counts_.merge_read_bytes += page.size();
        const LogPageHead head = RowLog::head_of(page);
        if (head.kind == LogPageKind::kData) {
          const Table& one = geometry_.tables[head.table];
          if (batch.records.size() + head.count > RowGeometry::kMergeRecordsMax ||
              home_bytes + head.count * one.page_bytes > geometry_.merge_home_bytes ||
              staged_bytes + head.count * one.record_bytes > geometry_.merge_staged_bytes) {
            return false;
          }
          const auto slot = static_cast<uint32_t>(n % geometry_.log_pages);
          const std::span<const uint32_t> rows = log_->rows_of(page);
          for (size_t i = rows.size(); i-- > 0;) {  // of a row's records in a page, the last
            const uint32_t key = key_of(one, rows[i]);
            if (index_.find(key) != slot) {
              ++counts_.records_superseded;
              continue;
            }
            if (read_only_) undo_.push_back({key, slot});
            index_.erase(key);
            const auto bytes = pump_->staged().subspan(staged_bytes, one.record_bytes);
            std::ranges::copy(log_->record_of(page, i), bytes.begin());
            staged_bytes += one.record_bytes;
            home_bytes += one.page_bytes;
            batch.records.push_back({head.table,
                                     static_cast<uint16_t>(rows[i] % one.records_per_page),
                                     rows[i] / one.records_per_page, bytes});
          }
        }
        batch.tail = n + 1;
        return true;
      }));
  std::ranges::sort(batch.records, {}, [](const Batch::Record& record) {
    return std::tuple(record.table, record.page, record.slot);
  });
  uint64_t at = 0;
  for (size_t i = 0; i < batch.records.size(); ++i) {
    const Batch::Record& record = batch.records[i];
    if (batch.homes.empty() || batch.homes.back().table != record.table ||
        batch.homes.back().page != record.page) {
      const uint64_t bytes = geometry_.tables[record.table].page_bytes;
      batch.homes.push_back(
          {record.table, record.page, i, i, pump_->homes().subspan(at, bytes), 0});
      at += bytes;
    }
    batch.homes.back().end = i + 1;
  }
  return Status();
}

/// Reads the pages as they are on the drive and checks them.
Status RowFile::read_homes(Batch& batch) {
  size_t at = 0;
  const auto next = [&](RowPump::Piece& piece) {
    for (; at < batch.homes.size(); ++at) {
      Batch::Home& home = batch.homes[at];
      if (generation(home.table, home.page) == 0) {
        fill_unwritten(home.table, home.bytes);
        continue;
      }
      piece.begin = at++;
      piece.transfer.op = IoOp::kRead;
      piece.transfer.offset_bytes = geometry_.home_offset(geometry_.tables[home.table], home.page);
      piece.transfer.buffer = home.bytes;
      counts_.merge_read_bytes += home.bytes.size();
      return true;
    }
    return false;
  };
  return pump_->run(next, [&](RowPump::Piece& piece) -> Result<bool> {
    const Batch::Home& home = batch.homes[piece.begin];
    const uint8_t now = generation(home.table, home.page);
    if (whole(home.bytes, seeds_.home(home.table, home.page, now))) return false;
    if (!batch.again) return damaged_home(home.table, home.page);
    if (whole(home.bytes, seeds_.home(home.table, home.page, next_generation(now)))) return false;
    const uint64_t sum = masked_sum(home, batch.records, geometry_.tables[home.table].record_bytes,
                                    seeds_.masked(home.table, home.page));
    if (sum != home.masked_sum) return damaged_home(home.table, home.page);
    return false;
  });
}

/// Puts the records in, in memory.
void RowFile::change_homes(Batch& batch) {
  for (Batch::Home& home : batch.homes) {
    const uint64_t record_bytes = geometry_.tables[home.table].record_bytes;
    home.masked_sum =
        masked_sum(home, batch.records, record_bytes, seeds_.masked(home.table, home.page));
    for (size_t i = home.begin; i < home.end; ++i) {
      std::ranges::copy(batch.records[i].bytes,
                        home.bytes.subspan(batch.records[i].slot * record_bytes).begin());
    }
    seal(home.bytes,
         seeds_.home(home.table, home.page, next_generation(generation(home.table, home.page))));
  }
}

/// Durably says which pages are about to be written.
Status RowFile::append_merge_pages(const Batch& batch) {
  const uint64_t before = log_->head();
  for (size_t i = 0; i < batch.homes.size();) {
    SI_ASSIGN_OR_RETURN(const std::span<std::byte> page, log_->begin_merge_page());
    const uint64_t room = page.size() - kPageSumBytes;
    LogPageHead head{.step = step_, .tail = batch.tail, .kind = LogPageKind::kMerge};
    for (uint64_t at = sizeof head; i < batch.homes.size(); ++i, ++head.count) {
      const Batch::Home& home = batch.homes[i];
      const size_t slots = home.end - home.begin;
      if (at + sizeof(MergeEntry) + slots * sizeof(uint16_t) > room) break;
      store(page, at,
            MergeEntry{static_cast<uint32_t>(home.page), static_cast<uint16_t>(home.table),
                       static_cast<uint16_t>(slots), home.masked_sum});
      at += sizeof(MergeEntry);
      for (size_t k = home.begin; k < home.end; ++k, at += sizeof(uint16_t)) {
        store(page, at, batch.records[k].slot);
      }
    }
    head.last = i == batch.homes.size() ? 1 : 0;
    store(page, 0, head);
  }
  SI_RETURN_IF_ERROR(log_->flush());
  counts_.merge_log_bytes += (log_->head() - before) * geometry_.log_page_bytes;
  return pump_->sync();
}

/// Writes the changed pages, and gives the log's room free.
Status RowFile::write_home(const Batch& batch) {
  size_t at = 0;
  const auto next = [&](RowPump::Piece& piece) {
    if (at == batch.homes.size()) return false;
    const Batch::Home& home = batch.homes[at++];
    uint64_t bytes = home.bytes.size();
    while (at < batch.homes.size() && batch.homes[at].table == home.table &&
           batch.homes[at].page == batch.homes[at - 1].page + 1 &&
           bytes + home.bytes.size() <= geometry_.read_bytes) {
      bytes += home.bytes.size();
      ++at;
    }
    piece.transfer.op = IoOp::kWrite;
    piece.transfer.offset_bytes = geometry_.home_offset(geometry_.tables[home.table], home.page);
    piece.transfer.buffer = {home.bytes.data(), bytes};
    counts_.merge_home_bytes += bytes;
    return true;
  };
  if (!batch.homes.empty()) {
    SI_RETURN_IF_ERROR(pump_->run(next, [](RowPump::Piece&) -> Result<bool> { return false; }));
    SI_RETURN_IF_ERROR(pump_->sync());
  }
  for (const Batch::Home& home : batch.homes) {
    uint8_t& now = generation(home.table, home.page);
    now = next_generation(now);
  }
  // Merge pages that the generations on the drive lack must stay in the log.
  if (batch.tail > header_.generations_from) SI_RETURN_IF_ERROR(write_generations());
  header_.tail = batch.tail;
  SI_RETURN_IF_ERROR(write_header());
  log_->set_tail(batch.tail);
  counts_.records_merged += batch.records.size();
  ++counts_.merges;
  return Status();
}

Status RowFile::merge_some(uint64_t log_pages_max) {
  SI_RETURN_IF_ERROR(usable());
  SI_CHECK(log_->head() == base_.head && !prepared_, "a merge within a step");
  if (log_->tail() >= committed_head_) return Status();
  Batch batch;
  failed_ = true;  // until all of it has succeeded
  const uint64_t most = std::min(committed_head_ - log_->tail(), log_pages_max);
  SI_RETURN_IF_ERROR(take_records(log_->tail() + most, batch));
  if (!batch.homes.empty()) {
    SI_RETURN_IF_ERROR(read_homes(batch));
    change_homes(batch);
    SI_RETURN_IF_ERROR(append_merge_pages(batch));
  }
  SI_RETURN_IF_ERROR(write_home(batch));
  base_ = log_->mark();
  failed_ = false;
  return Status();
}

Status RowFile::accept_data(std::span<const std::byte> page, uint64_t number) {
  const LogPageHead head = RowLog::head_of(page);
  if (head.table >= geometry_.tables.size() ||
      geometry_.tables[head.table].kind != RowTableKind::kState ||
      head.count > geometry_.tables[head.table].records_per_log_page) {
    return log_->damaged(number);
  }
  const Table& one = geometry_.tables[head.table];
  for (const uint32_t row : log_->rows_of(page)) {
    if (row >= one.rows) return log_->damaged(number);
    index_.set(key_of(one, row), static_cast<uint32_t>(number % geometry_.log_pages));
  }
  return Status();
}

namespace {

/// visit(entry, slots) of a merge page; false: its entries are not whole.
template <typename Visit>
bool for_entries(std::span<const std::byte> page, const RowGeometry& geometry, const Visit& visit) {
  const LogPageHead head = RowLog::head_of(page);
  const uint64_t room = page.size() - kPageSumBytes;
  uint64_t at = sizeof head;
  std::vector<uint16_t> slots;
  for (uint32_t i = 0; i < head.count; ++i) {
    if (at + sizeof(MergeEntry) > room) return false;
    const auto entry = load<MergeEntry>(page, at);
    at += sizeof entry;
    if (entry.table >= geometry.tables.size() || entry.page >= geometry.tables[entry.table].pages ||
        at + entry.count * sizeof(uint16_t) > room) {
      return false;
    }
    slots.clear();
    for (uint32_t k = 0; k < entry.count; ++k, at += sizeof(uint16_t)) {
      slots.push_back(load<uint16_t>(page, at));
    }
    visit(entry, std::span<const uint16_t>(slots));
  }
  return true;
}

}  // namespace

/// A merge that is done.
Status RowFile::accept_merge(std::span<const std::byte> page, uint64_t number) {
  const bool in_generations = number < header_.generations_from;
  const bool entries_whole =
      for_entries(page, geometry_, [&](const MergeEntry& entry, std::span<const uint16_t>) {
        if (in_generations) return;
        uint8_t& now = generation(entry.table, entry.page);
        now = next_generation(now);
      });
  return entries_whole ? Status() : log_->damaged(number);
}

/// Pages that a merge was writing, as the log has them.
struct RowFile::Unfinished {
  struct Home {
    MergeEntry entry;
    std::vector<uint16_t> slots;
  };
  std::vector<Home> homes;
  uint64_t tail = 0;  // the log's when they are written; 0: there is no such merge
};

Status RowFile::recover(const RowCommit& commit) {
  if (size_bytes_ < geometry_.file_bytes || header_.generations_place > 1 ||
      header_.generations_from < header_.tail || commit.head < header_.tail ||
      commit.head - header_.tail > geometry_.log_pages) {
    return lost();
  }
  SI_RETURN_IF_ERROR(read_generations());
  SI_RETURN_IF_ERROR(read_committed(commit));
  Unfinished merge;
  SI_RETURN_IF_ERROR(read_merges(merge));
  if (base_.head < header_.generations_from || merge.tail > committed_head_) return lost();
  return merge.tail > 0 ? finish(merge) : Status();
}

/// An older header was found, or an end of the log that others speak of was not.
Status RowFile::lost() const {
  return Status(ErrorCode::kCorrupt,
                "the newest header or pages of the log of the tables' rows are missing",
                std::string(kDamagedRowsAdvice), base::ErrorPlace{path(), {}, {}, 0});
}

Status RowFile::read_generations() {
  const uint64_t offset = geometry_.generations_offset(header_.generations_place);
  SI_RETURN_IF_ERROR(pump_->move(IoOp::kRead, offset, generations_.bytes(), base::kMiB,
                                 base::TrafficKind::kMetadata));
  if (base::checksum(generations_.bytes(), seeds_.generations(header_.generations_from)) !=
      header_.generations_sum) {
    return Status(
        ErrorCode::kCorrupt, "the list of pages of the tables' rows is not what was written",
        std::string(kDamagedRowsAdvice), base::ErrorPlace{path(), offset, generations_.size(), 0});
  }
  for (const Table& one : geometry_.tables) {
    if (one.kind != RowTableKind::kScratch) continue;
    std::ranges::fill(generations_.bytes().subspan(one.first_page, one.pages), std::byte{0});
  }
  return Status();
}

/// The log up to what the step has committed.
Status RowFile::read_committed(const RowCommit& commit) {
  const uint64_t tail = header_.tail;
  log_->set_ends(tail, {tail, 0});
  const Status read =
      log_->read(tail, commit.head, [&](uint64_t n, std::span<std::byte> page) -> Result<bool> {
        if (!log_->accept(n, page, /*any_chain=*/n == tail && n > 0)) return log_->damaged(n);
        const LogPageHead head = RowLog::head_of(page);
        if (head.kind == LogPageKind::kMerge && head.tail > tail) return lost();
        SI_RETURN_IF_ERROR(head.kind == LogPageKind::kData ? accept_data(page, n)
                                                           : accept_merge(page, n));
        return true;
      });
  SI_RETURN_IF_ERROR(read);
  if (commit.head > tail && log_->mark().chain != commit.chain) {
    return log_->damaged(commit.head - 1);
  }
  log_->set_ends(tail, {commit.head, commit.chain});
  committed_head_ = commit.head;
  base_ = log_->mark();
  return Status();
}

/// Merges since then: batches of which all pages are there. The last one may not be done.
Status RowFile::read_merges(Unfinished& unfinished) {
  const uint64_t tail = header_.tail;
  std::vector<std::vector<std::byte>> batch;
  const auto take_batch = [&](uint64_t first, uint64_t batch_tail) {
    for (size_t i = 0; i < batch.size(); ++i) {
      if (batch_tail <= tail) {
        SI_RETURN_IF_ERROR(accept_merge(batch[i], first + i));
        continue;
      }
      unfinished.tail = batch_tail;
      const auto add = [&](const MergeEntry& entry, std::span<const uint16_t> slots) {
        unfinished.homes.push_back({entry, {slots.begin(), slots.end()}});
      };
      if (!for_entries(batch[i], geometry_, add)) return log_->damaged(first + i);
    }
    return Status();
  };
  const Status read = log_->read(committed_head_, tail + geometry_.log_pages,
                                 [&](uint64_t n, std::span<std::byte> page) -> Result<bool> {
                                   if (!log_->accept(n, page, /*any_chain=*/false)) return false;
                                   const LogPageHead head = RowLog::head_of(page);
                                   if (head.kind != LogPageKind::kMerge) return false;
                                   batch.emplace_back(page.begin(), page.end());
                                   if (head.last == 0) return true;
                                   SI_RETURN_IF_ERROR(take_batch(n + 1 - batch.size(), head.tail));
                                   batch.clear();
                                   base_ = log_->mark();
                                   return unfinished.tail == 0;
                                 });
  log_->set_ends(tail, base_);
  return read;
}

Status RowFile::finish(const Unfinished& merge) {
  Batch batch;
  batch.again = true;
  SI_RETURN_IF_ERROR(take_records(merge.tail, batch));
  bool same = batch.tail == merge.tail && batch.homes.size() == merge.homes.size();
  for (size_t i = 0; same && i < merge.homes.size(); ++i) {
    const auto& [entry, slots] = merge.homes[i];
    Batch::Home& home = batch.homes[i];
    home.masked_sum = entry.masked_sum;
    const auto records = std::span(batch.records).subspan(home.begin, home.end - home.begin);
    same = home.table == entry.table && home.page == entry.page &&
           std::ranges::equal(records, slots, {}, &Batch::Record::slot);
  }
  if (!same) return lost();
  SI_RETURN_IF_ERROR(read_homes(batch));
  if (read_only_) {  // what it moves is still in the log
    for (const Undo& taken : undo_) index_.set(taken.key, taken.slot);
    undo_.clear();
    for (const Batch::Home& home : batch.homes) {
      unfinished_.push_back(geometry_.tables[home.table].first_page + home.page);
    }
    return Status();
  }
  change_homes(batch);
  return write_home(batch);
}

}  // namespace smartinf::storage
