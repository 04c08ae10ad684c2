#include "smartinf/storage/row_file.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/log.h"
#include "smartinf/base/test_scratch.h"
#include "smartinf/storage/faulty_ring.h"
#include "smartinf/storage/forwarding_ring.h"
#include "smartinf/storage/memory_ring.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr uint32_t kSmall = 0, kLarge = 1, kFeatures = 2, kSums = 3;  // tables

/// Two tables that steps change, one of pages of 8 KiB, so that the log's are as large. Of its 40
/// pages a step takes kStepPages, and 6 are kept for merges.
constexpr uint64_t kStepPages = 7;

RowFileLayout layout() {
  RowFileLayout layout;
  layout.run.bytes[3] = 9;
  layout.log_bytes = 40 * 8192;
  layout.tables = {{"small", RowTableKind::kState, 1000, 150},
                   {"large", RowTableKind::kState, 5000, 10},
                   {"features", RowTableKind::kData, 64, 200},
                   {"sums", RowTableKind::kScratch, 48, 300}};
  layout.description = "{}";
  return layout;
}

/// Versions of a row: the step that wrote it and one, in steps of a model; 0: never.
using Model = std::vector<std::vector<uint32_t>>;

std::vector<std::byte> record(uint32_t table, uint32_t row, uint32_t version) {
  std::vector<std::byte> bytes(layout().tables[table].record_bytes);
  uint32_t word = table * 7919 + row * 131 + version * 1000003;
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((word = word * 1664525 + 11) >> 24);
  store(std::span(bytes), bytes.size() - sizeof version, version);
  return bytes;
}

/// Requests of a kind fail once so many have not; -1: none does.
class FailingRing final : public ForwardingRing {
 public:
  FailingRing(std::unique_ptr<Ring> inner, int64_t* left, IoOp op)
      : ForwardingRing(std::move(inner)), left_(left), op_(op) {}
  Status submit(std::span<IoRequest* const> requests) override {
    std::vector<IoRequest*> passed;
    for (IoRequest* request : requests) {
      const bool counted = request->op == op_ && *left_ >= 0;
      (counted && *left_ == 0 ? refused_ : passed).push_back(request);
      if (counted && *left_ > 0) --*left_;
    }
    return ForwardingRing::submit(passed);
  }
  Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    if (refused_.empty()) return ForwardingRing::reap(done, wait);
    done[0] = refused_.back();
    refused_.pop_back();
    done[0]->outcome = -EIO;
    return size_t{1};
  }

 private:
  std::vector<IoRequest*> refused_;
  int64_t* left_;
  IoOp op_;
};

class RowFileTest : public testing::Test {
 protected:
  void SetUp() override {
    base::set_log_sink([](base::LogLevel, std::string_view) {});
    for (const RowTableLayout& table : layout().tables) model_.emplace_back(table.rows);
  }
  void TearDown() override { base::set_log_sink({}); }

  CachePlace place() {
    CachePlace place;
    place.path = "disk";
    place.direct = true;
    place.size_bytes = disk_.contents().size();
    place.ring = make_memory_ring(disk_, power_, 24, 5);
    if (fail_op_) {
      place.ring = std::make_unique<FailingRing>(std::move(place.ring), &fail_left_, *fail_op_);
    }
    return place;
  }
  Status open(bool read_only = false) {
    file_.reset();
    SI_ASSIGN_OR_RETURN(file_, RowFile::open(place(), layout().run, record_,
                                             std::chrono::seconds(10), traffic_, read_only));
    return Status();
  }
  /// Half of the small table's pages, some rows of the features, nothing of the large one.
  Status create() {
    file_.reset();
    SI_ASSIGN_OR_RETURN(file_,
                        RowFile::create(place(), layout(), std::chrono::seconds(10), traffic_));
    file_->begin_step(0);
    std::vector<uint32_t> rows(78);
    std::iota(rows.begin(), rows.end(), 0u);
    SI_RETURN_IF_ERROR(put(kSmall, rows, 1));
    SI_RETURN_IF_ERROR(put(kFeatures, std::vector<uint32_t>{0, 1, 2, 70, 71, 199}, 1));
    SI_RETURN_IF_ERROR(put(kFeatures, std::vector<uint32_t>{3, 70}, 2));
    SI_ASSIGN_OR_RETURN(record_, file_->prepare(0));
    return file_->commit(0);
  }
  Status put(uint32_t table, const std::vector<uint32_t>& rows, uint32_t version) {
    SI_RETURN_IF_ERROR(file_->put(table, rows, records(table, rows, version)));
    for (const uint32_t row : rows) model_[table][row] = version;
    return Status();
  }
  static std::vector<std::byte> records(uint32_t table, const std::vector<uint32_t>& rows,
                                        uint32_t version) {
    std::vector<std::byte> bytes;
    for (const uint32_t row : rows) {
      const auto one = record(table, row, version);
      bytes.insert(bytes.end(), one.begin(), one.end());
    }
    return bytes;
  }
  /// Rows of a step: the same ones whenever it is made; some of them in every step.
  static std::vector<uint32_t> rows_of(uint32_t table, uint32_t step) {
    std::mt19937 random(step * 31 + table);
    std::vector<uint32_t> all(layout().tables[table].rows);
    std::iota(all.begin(), all.end(), 0u);
    std::shuffle(all.begin() + 3, all.end(), random);
    all.resize(table == kSmall ? 20 : 2);
    std::ranges::sort(all);
    return all;
  }
  Status append(uint32_t step) {
    file_->begin_step(step);
    const uint32_t version = step + 1;
    for (const uint32_t table : {kSmall, kLarge}) {
      const std::vector<uint32_t> rows = rows_of(table, step);
      if (table == kSmall) {  // twice: the later records count
        SI_RETURN_IF_ERROR(file_->append(table, rows, records(table, rows, version + 500)));
      }
      SI_RETURN_IF_ERROR(file_->append(table, rows, records(table, rows, version)));
      for (const uint32_t row : rows) next_[table][row] = version;
    }
    return Status();
  }
  bool has_room() const {
    return file_->log_used_bytes() + (kStepPages + 6) * 8192 <= file_->log_room_bytes();
  }
  /// A step that is made, or one that is made after it was aborted.
  Status step(uint32_t step, bool abort_first) {
    for (uint64_t pages = 3; !has_room(); ++pages) {
      SI_RETURN_IF_ERROR(file_->merge_some(pages));
    }
    if (step % 5 == 4) SI_RETURN_IF_ERROR(file_->merge_some(6));
    for (int attempt = abort_first ? 0 : 1; attempt < 2; ++attempt) {
      next_ = model_;
      SI_RETURN_IF_ERROR(append(step));
      prepared_.clear();
      if (attempt == 1 || step % 4 == 2) {
        SI_ASSIGN_OR_RETURN(prepared_, file_->prepare(step));
      }
      if (attempt == 0) {
        prepared_.clear();  // no superblock has it
        SI_RETURN_IF_ERROR(file_->abort(step));
      }
    }
    // The superblocks of the run, of which this one may be the last that is missing.
    if (!power_.pass()) return Status(ErrorCode::kIo, "the power is off");
    record_ = std::exchange(prepared_, {});
    model_ = next_;
    return file_->commit(step);
  }
  /// Reads everything, and compares it.
  Status compare(const Model& model) {
    for (uint32_t table = 0; table < model.size(); ++table) {
      std::vector<uint32_t> rows(model[table].size());
      std::iota(rows.begin(), rows.end(), 0u);
      std::vector<int> visits(rows.size());
      SI_RETURN_IF_ERROR(file_->read(table, rows, [&](size_t i, std::span<const std::byte> found) {
        ++visits[i];
        const uint32_t version = model[table][i];
        if (version == 0) {
          EXPECT_TRUE(std::ranges::all_of(found, [](std::byte b) { return b == std::byte{0}; }))
              << table << " " << i << " was never written";
          EXPECT_TRUE(found.empty() || table > kLarge);
        } else {
          EXPECT_TRUE(std::ranges::equal(found, record(table, rows[i], version)))
              << "table " << table << " row " << i << " version " << version << ", found "
              << (found.empty() ? 0u : load<uint32_t>(found, found.size() - 4));
        }
      }));
      EXPECT_TRUE(std::ranges::all_of(visits, [](int n) { return n == 1; }));
    }
    return Status();
  }
  std::vector<std::string> verify() {
    std::vector<std::string> found;
    EXPECT_TRUE(file_
                    ->verify(
                        [](uint64_t done, uint64_t all) {
                          EXPECT_LE(done, all);
                          return Status();
                        },
                        [&](const Status& damaged) { found.push_back(damaged.to_string()); })
                    .ok());
    return found;
  }

  MemoryDisk disk_{RowFile::file_bytes(layout())};
  PowerSupply power_;
  base::TrafficCounter traffic_;
  std::unique_ptr<RowFile> file_;
  std::string record_, prepared_;
  Model model_, next_;
  std::optional<IoOp> fail_op_;
  int64_t fail_left_ = -1;
};

TEST_F(RowFileTest, StepsAndMergesKeepTheNewestRecords) {
  ASSERT_TRUE(create().ok());
  ASSERT_TRUE(compare(model_).ok());
  for (uint32_t s = 1; s <= 30; ++s) {
    const Status status = step(s, s % 3 == 0);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_TRUE(compare(model_).ok());
    if (s % 7 == 0) {
      const Status opened = open();
      ASSERT_TRUE(opened.ok()) << opened.to_string();
      const Status compared = compare(model_);
      ASSERT_TRUE(compared.ok()) << compared.to_string();
    }
  }
  EXPECT_TRUE(verify().empty());
  EXPECT_GT(file_->counts().merges, 0u);
  EXPECT_GT(file_->counts().records_superseded, 0u);
  EXPECT_EQ(*RowFile::peek(place()), layout());
}

TEST_F(RowFileTest, RecordsOfTheStepInProgressAreRead) {
  ASSERT_TRUE(create().ok());
  ASSERT_TRUE(step(1, false).ok());
  next_ = model_;
  ASSERT_TRUE(append(2).ok());
  ASSERT_TRUE(compare(next_).ok());
  ASSERT_TRUE(file_->prepare(2).ok());
  ASSERT_TRUE(compare(next_).ok());
  ASSERT_TRUE(file_->abort(2).ok());
  ASSERT_TRUE(compare(model_).ok());
  ASSERT_TRUE(open().ok());
  ASSERT_TRUE(compare(model_).ok());
}

TEST_F(RowFileTest, PowerCutAnywhereLeavesTheCommittedStep) {
  ASSERT_TRUE(create().ok());
  file_.reset();
  const MemoryDisk made = disk_;
  const Model initial = model_;
  const std::string first = record_;
  constexpr uint32_t kSteps = 11;
  uint64_t forward = 0, again = 0, merges = 0, generations = 0, cuts = 0;
  for (uint64_t cut = 0;; ++cut) {
    bool all = false;
    for (uint32_t fate = 0; fate < kCutFates; ++fate) {
      SCOPED_TRACE(testing::Message() << "cut after " << cut << ", fate " << fate);
      disk_ = made;
      model_ = initial;
      record_ = first;
      ASSERT_TRUE(open().ok());
      power_.cut_after(cut);
      uint32_t at = 1;
      Status status;
      for (; at <= kSteps && status.ok(); ++at) status = step(at, at % 3 == 0);
      all = power_.on();
      merges += file_->counts().merges;
      file_.reset();
      power_.restore();
      disk_.settle(static_cast<CutFate>(fate), cut);
      uint32_t next = status.ok() ? at : at - 1;
      // A step that was prepared may be the decided one, as where all devices have prepared it.
      if (!prepared_.empty() && fate % 2 == 0) {
        record_ = std::exchange(prepared_, {});
        model_ = next_;
        ++next;
        ++forward;
      }
      // The power goes again while it is opened.
      power_.cut_after(fate == 0 ? cut % 61 : cut % 13);
      again += open().ok() ? 0 : 1;
      file_.reset();
      power_.restore();
      disk_.settle(static_cast<CutFate>((fate + 1) % kCutFates), cut + 1);
      status = open(/*read_only=*/true);
      ASSERT_TRUE(status.ok()) << status.to_string();
      ASSERT_TRUE(verify().empty());
      status = compare(model_);
      ASSERT_TRUE(status.ok()) << "read only: " << status.to_string();
      status = open();
      ASSERT_TRUE(status.ok()) << status.to_string();
      status = compare(model_);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (uint32_t more = 0; more < 4; ++more) {
        status = step(next + more, false);
        ASSERT_TRUE(status.ok()) << status.to_string();
      }
      while (file_->must_merge(1000)) ASSERT_TRUE(file_->merge_some(9).ok());
      generations += file_->counts().merges;
      ASSERT_TRUE(open().ok());
      status = compare(model_);
      ASSERT_TRUE(status.ok()) << status.to_string();
      ASSERT_TRUE(verify().empty());
      ASSERT_FALSE(HasFailure());
      ++cuts;
    }
    if (all) break;
  }
  EXPECT_GT(forward, 0u);
  EXPECT_GT(again, 0u);
  EXPECT_GT(merges, 0u);
  EXPECT_GT(generations, 0u);
  RecordProperty("cuts", static_cast<int>(cuts));
}

TEST_F(RowFileTest, FlippedStaleAndExchangedPagesAreFound) {
  ASSERT_TRUE(create().ok());
  const std::vector<std::byte> old(disk_.contents().begin(), disk_.contents().end());
  for (uint32_t s = 1; s <= 12; ++s) ASSERT_TRUE(step(s, false).ok());
  file_.reset();
  const std::vector<std::byte> now(disk_.contents().begin(), disk_.contents().end());
  const RowGeometry geometry(layout());
  struct Page {
    uint64_t offset = 0, bytes = 0;
  };
  std::vector<Page> pages;
  for (const RowGeometry::Table& table : geometry.tables) {
    if (table.kind == RowTableKind::kScratch) continue;
    for (uint64_t p = 0; p < table.pages; ++p) {
      pages.push_back({geometry.home_offset(table, p), table.page_bytes});
    }
  }
  for (uint64_t n = 0; n < geometry.log_pages; ++n) {
    pages.push_back({geometry.log_offset(n), geometry.log_page_bytes});
  }
  const auto restore = [&] { std::ranges::copy(now, disk_.contents().begin()); };
  const auto part = [](std::span<const std::byte> bytes, const Page& page) {
    return bytes.subspan(page.offset, page.bytes);
  };
  uint64_t flipped = 0, stale = 0, exchanged = 0, unused = 0, refused = 0;
  ASSERT_TRUE(open().ok());
  for (size_t i = 0; i < pages.size(); ++i) {
    const Page& page = pages[i];
    const auto found = [&](bool opened_again) {
      const Status status = opened_again ? open() : Status();
      const bool bad = !status.ok() || !verify().empty();
      if (!status.ok()) {
        EXPECT_EQ(status.code(), ErrorCode::kCorrupt) << status.to_string();
      } else if (bad) {
        const Status read = compare(model_);
        if (!read.ok()) {
          EXPECT_EQ(read.code(), ErrorCode::kCorrupt) << read.to_string();
          ++refused;  // and otherwise its rows' newest records are elsewhere
        }
      }
      restore();
      if (opened_again) {
        EXPECT_TRUE(open().ok());
      }
      return bad;
    };
    disk_.contents()[page.offset + (i * 37) % page.bytes] ^= std::byte{16};
    if (!found(false)) {
      ++unused;
      continue;
    }
    ++flipped;
    disk_.contents()[page.offset + (i * 41) % page.bytes] ^= std::byte{2};
    EXPECT_TRUE(found(true)) << "opened again, page at " << page.offset;
    if (!std::ranges::equal(part(old, page), part(now, page))) {
      std::ranges::copy(part(old, page), disk_.contents().begin() + page.offset);
      EXPECT_TRUE(found(i % 2 == 0)) << "stale page at " << page.offset;
      ++stale;
    }
    for (const size_t other : {i + 1, i + 3}) {
      if (other >= pages.size() || pages[other].bytes != page.bytes) continue;
      if (std::ranges::equal(part(now, pages[other]), part(now, page))) continue;
      std::ranges::copy(part(now, pages[other]), disk_.contents().begin() + page.offset);
      std::ranges::copy(part(now, page), disk_.contents().begin() + pages[other].offset);
      EXPECT_TRUE(found(i % 2 == 1)) << "exchanged pages at " << page.offset;
      ++exchanged;
    }
  }
  EXPECT_GT(flipped, 30u);
  EXPECT_GT(stale, 20u);
  EXPECT_GT(exchanged, 30u);
  EXPECT_GT(unused, 0u);
  EXPECT_GT(refused, 60u);
  // Named with table, rows and place.
  disk_.contents()[geometry.home_offset(geometry.tables[kSmall], 2) + 5] ^= std::byte{1};
  const std::vector<std::string> named = verify();
  ASSERT_EQ(named.size(), 1u);
  EXPECT_NE(named[0].find("rows 8 to 11 of table small"), std::string::npos) << named[0];
  EXPECT_NE(named[0].find(std::to_string(geometry.home_offset(geometry.tables[kSmall], 2))),
            std::string::npos);
}

TEST_F(RowFileTest, APageOfAnAbortedAttemptIsFoundInTheLog) {
  ASSERT_TRUE(create().ok());
  next_ = model_;
  ASSERT_TRUE(append(1).ok());
  ASSERT_TRUE(file_->prepare(1).ok());
  const RowGeometry geometry(layout());
  const auto first = disk_.contents().subspan(geometry.log_offset(0), geometry.log_page_bytes);
  const std::vector<std::byte> attempt(first.begin(), first.end());
  ASSERT_TRUE(file_->abort(1).ok());
  ASSERT_TRUE(append(3).ok());  // other rows in the same place of the log
  file_->begin_step(3);
  record_ = *file_->prepare(3);
  ASSERT_TRUE(file_->commit(3).ok());
  std::ranges::copy(attempt, first.begin());
  EXPECT_EQ(verify().size(), 1u) << "whole, of the same number, and not the one that was committed";
  EXPECT_EQ(open().code(), ErrorCode::kCorrupt);
}

TEST_F(RowFileTest, DamagedHeadersLayoutsAndGenerations) {
  ASSERT_TRUE(create().ok());
  for (uint32_t s = 1; s <= 12; ++s) ASSERT_TRUE(step(s, false).ok());
  const uint64_t merges = file_->counts().merges;
  file_.reset();
  const std::vector<std::byte> now(disk_.contents().begin(), disk_.contents().end());
  ASSERT_GT(merges, 1u);
  const RowGeometry geometry(layout());
  // One copy of each is enough.
  for (const uint64_t at : {header_offset(0, 0), header_offset(1, 0), kRowLayoutOffset}) {
    disk_.contents()[at + 20] ^= std::byte{1};
    ASSERT_TRUE(open().ok());
    EXPECT_TRUE(compare(model_).ok());
    std::ranges::copy(now, disk_.contents().begin());
  }
  // The newest header is gone, so that an older one, which is whole, must not be believed.
  const auto newer = [&](uint64_t place) {
    return decode_row_header(disk_.contents().subspan(header_offset(place, 0), kRowHeaderBytes))
        ->sequence;
  };
  const uint64_t place = newer(1) > newer(0) ? 1 : 0;
  for (uint64_t copy = 0; copy < 2; ++copy) {
    disk_.contents()[header_offset(place, copy) + 20] ^= std::byte{1};
  }
  EXPECT_EQ(open().code(), ErrorCode::kCorrupt);
  std::ranges::copy(now, disk_.contents().begin());
  for (uint64_t which = 0; which < 2; ++which) {
    disk_.contents()[geometry.generations_offset(which)] ^= std::byte{1};
  }
  EXPECT_EQ(open().code(), ErrorCode::kCorrupt);
}

TEST_F(RowFileTest, AFullLogCostsTheStepAndNothingElse) {
  ASSERT_TRUE(create().ok());
  uint32_t s = 1;
  Status status;
  for (; s < 20; ++s) {  // without merges
    next_ = model_;
    status = append(s);
    if (!status.ok()) break;
    record_ = *file_->prepare(s);
    ASSERT_TRUE(file_->commit(s).ok());
    model_ = next_;
  }
  EXPECT_EQ(status.code(), ErrorCode::kNoSpace) << status.to_string();
  EXPECT_TRUE(file_->must_merge(48));
  EXPECT_TRUE(file_->wants_merge());
  ASSERT_TRUE(file_->abort(s).ok());
  ASSERT_TRUE(compare(model_).ok());
  while (file_->must_merge(48)) ASSERT_TRUE(file_->merge_some().ok());
  ASSERT_TRUE(step(s, false).ok());
  ASSERT_TRUE(open().ok());
  ASSERT_TRUE(compare(model_).ok());
}

TEST_F(RowFileTest, SupersededRecordsAreNotMerged) {
  ASSERT_TRUE(create().ok());
  const std::vector<uint32_t> rows{1, 2, 3};
  for (uint32_t s = 1; s <= 8; ++s) {
    file_->begin_step(s);
    ASSERT_TRUE(file_->append(kSmall, rows, records(kSmall, rows, s + 1)).ok());
    record_ = *file_->prepare(s);
    ASSERT_TRUE(file_->commit(s).ok());
  }
  while (file_->must_merge(1000)) ASSERT_TRUE(file_->merge_some().ok());
  EXPECT_EQ(file_->counts().records_merged, 3u);
  EXPECT_EQ(file_->counts().records_superseded, 21u);
  EXPECT_EQ(file_->counts().merge_home_bytes, 4096u);
  for (const uint32_t row : rows) model_[kSmall][row] = 9;
  ASSERT_TRUE(compare(model_).ok());
}

TEST_F(RowFileTest, FailedWritesCostTheStepOrTheMerge) {
  for (const IoOp op : {IoOp::kWrite, IoOp::kSync, IoOp::kWriteDurable}) {
    uint64_t failures = 0, merges_failed = 0;
    for (int64_t n = 0; n < 40; ++n) {
      SCOPED_TRACE(testing::Message() << "op " << static_cast<int>(op) << " from " << n);
      fail_op_.reset();
      SetUp();
      model_.resize(layout().tables.size());
      for (auto& table : model_) std::ranges::fill(table, 0u);
      ASSERT_TRUE(create().ok());
      fail_op_ = op;
      fail_left_ = -1;
      ASSERT_TRUE(open().ok());
      fail_left_ = n;
      Status status;
      uint32_t s = 1;
      for (; s <= 8 && status.ok(); ++s) status = step(s, false);
      if (!status.ok()) {
        ++failures;
        EXPECT_EQ(status.code(), ErrorCode::kIo) << status.to_string();
        fail_left_ = -1;
        const Status aborted = file_->abort(s - 1);
        if (aborted.ok()) {
          ASSERT_TRUE(compare(model_).ok());
          ASSERT_TRUE(step(s - 1, false).ok());
        } else {
          ++merges_failed;
          EXPECT_EQ(aborted.code(), ErrorCode::kFailedPrecondition) << aborted.to_string();
        }
      }
      fail_op_.reset();
      ASSERT_TRUE(open().ok());
      status = compare(model_);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    EXPECT_GT(merges_failed, 0u);
    if (op != IoOp::kWriteDurable) {
      EXPECT_GT(failures, merges_failed);
    }
  }
}

TEST_F(RowFileTest, TheIndexGrowsWithTheLog) {
  RowFileLayout many = layout();
  many.tables = {{"one number a row", RowTableKind::kState, 12, 100'000}};
  many.log_bytes = 8 * base::kMiB;
  disk_ = MemoryDisk(RowFile::file_bytes(many));
  auto made = RowFile::create(place(), many, std::chrono::seconds(10), traffic_);
  ASSERT_TRUE(made.ok());
  RowFile& file = **made;
  file.begin_step(0);
  ASSERT_TRUE(file.prepare(0).ok());
  ASSERT_TRUE(file.commit(0).ok());
  std::string commit;
  for (uint32_t s = 1; s <= 3; ++s) {
    std::vector<uint32_t> rows;
    std::vector<uint32_t> words;
    for (uint32_t row = s; row < 100'000; row += 2) {
      rows.push_back(row);
      words.insert(words.end(), {row * 3, s, s});
    }
    file.begin_step(s);
    ASSERT_TRUE(file.append(0, rows, std::as_bytes(std::span(words))).ok());
    commit = *file.prepare(s);
    ASSERT_TRUE(file.commit(s).ok());
  }
  const auto check_all = [](RowFile& one) {
    std::vector<uint32_t> rows(100'000);
    std::iota(rows.begin(), rows.end(), 0u);
    uint64_t right = 0;
    EXPECT_TRUE(one.read(0, rows,
                         [&](size_t i, std::span<const std::byte> found) {
                           const uint32_t step = i == 0 ? 0 : i == 1 ? 1 : i % 2 == 0 ? 2 : 3;
                           right += step == 0 ? found.empty()
                                              : load<uint32_t>(found, 0) == i * 3 &&
                                                    load<uint32_t>(found, 8) == step;
                         })
                    .ok());
    EXPECT_EQ(right, 100'000u);
  };
  check_all(file);
  while (file.must_merge(1u << 30)) {
    ASSERT_TRUE(file.merge_some().ok());
  }
  check_all(file);
  made->reset();
  auto opened = RowFile::open(place(), many.run, commit, std::chrono::seconds(10), traffic_);
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  check_all(**opened);
}

TEST_F(RowFileTest, ATornPageKeepsItsOtherRecordsOrIsRefused) {
  ASSERT_TRUE(create().ok());
  file_->begin_step(1);
  ASSERT_TRUE(file_->append(kSmall, std::vector<uint32_t>{1}, record(kSmall, 1, 2)).ok());
  model_[kSmall][1] = 2;
  record_ = *file_->prepare(1);
  ASSERT_TRUE(file_->commit(1).ok());
  const MemoryDisk before = disk_;
  const RowGeometry geometry(layout());
  const auto home = [&] { return disk_.contents().subspan(geometry.tables[0].offset_bytes, 4096); };
  const std::vector<std::byte> old(home().begin(), home().end());
  uint64_t torn = 0;
  for (uint64_t cut = 0;; ++cut) {
    disk_ = before;
    ASSERT_TRUE(open().ok());
    power_.cut_after(cut);
    const bool merged = file_->merge_some().ok();
    file_.reset();
    power_.restore();
    disk_.settle(CutFate::kTorn, cut);
    if (merged) break;
    if (std::ranges::equal(home(), old)) continue;
    const MemoryDisk after = disk_;
    ASSERT_TRUE(open().ok());
    if (file_->counts().merges == 0) continue;  // the new header is there
    ++torn;
    file_.reset();
    disk_ = after;
    home()[1005] ^= std::byte{1};  // of the record that changes: it is in the log
    ASSERT_TRUE(open().ok());
    EXPECT_TRUE(compare(model_).ok());
    file_.reset();
    disk_ = after;
    home()[5] ^= std::byte{1};  // of another one
    const Status status = open();
    EXPECT_EQ(status.code(), ErrorCode::kCorrupt) << status.to_string();
    EXPECT_NE(status.to_string().find("rows 0 to 3 of table small"), std::string::npos);
  }
  EXPECT_GT(torn, 0u);
}

TEST_F(RowFileTest, AMergeOfManyPagesIsDoneOrNotBegun) {
  RowFileLayout many = layout();
  many.tables = {{"one number a row", RowTableKind::kState, 12, 60'000}};
  many.log_bytes = 80 * 4096;
  disk_ = MemoryDisk(RowFile::file_bytes(many));
  const auto open_many = [&] {
    file_.reset();
    auto file = RowFile::open(place(), many.run, record_, std::chrono::seconds(10), traffic_);
    if (file.ok()) file_ = std::move(*file);
    return file.status();
  };
  auto made = RowFile::create(place(), many, std::chrono::seconds(10), traffic_);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  file_ = std::move(*made);
  std::map<uint32_t, uint32_t> newest;
  for (uint32_t s = 0; s <= 2; ++s) {
    file_->begin_step(s);
    std::vector<uint32_t> rows, words;
    for (uint32_t row = s * 7; s > 0 && row < 60'000; row += 31 + s) {
      rows.push_back(row);
      words.insert(words.end(), {row, s, s});
      newest[row] = s;
    }
    ASSERT_TRUE(file_->append(0, rows, std::as_bytes(std::span(words))).ok());
    record_ = *file_->prepare(s);
    ASSERT_TRUE(file_->commit(s).ok());
  }
  file_.reset();
  const MemoryDisk before = disk_;
  std::vector<uint32_t> all(60'000);
  std::iota(all.begin(), all.end(), 0u);
  uint64_t log_bytes = 0;
  for (uint64_t cut = 0;; ++cut) {
    disk_ = before;
    ASSERT_TRUE(open_many().ok());
    power_.cut_after(cut);
    const bool merged = file_->merge_some().ok();
    log_bytes = file_->counts().merge_log_bytes;
    file_.reset();
    power_.restore();
    disk_.settle(static_cast<CutFate>(cut % kCutFates), cut);
    const Status opened = open_many();
    ASSERT_TRUE(opened.ok()) << "cut after " << cut << ": " << opened.to_string();
    uint64_t right = 0;
    const Status read = file_->read(0, all, [&](size_t i, std::span<const std::byte> found) {
      const auto at = newest.find(all[i]);
      right += found.empty() ? at == newest.end()
                             : at != newest.end() && load<uint32_t>(found, 4) == at->second;
    });
    ASSERT_TRUE(read.ok()) << "cut after " << cut << ": " << read.to_string();
    ASSERT_EQ(right, all.size()) << "cut after " << cut;
    if (merged) break;
  }
  EXPECT_GE(log_bytes, 2u * 4096);
}

TEST_F(RowFileTest, ScratchIsWrittenAtAnyTimeAndGoneWhenClosed) {
  ASSERT_TRUE(create().ok());
  ASSERT_TRUE(put(kSums, {0, 5, 290}, 4).ok());
  ASSERT_TRUE(step(1, false).ok());
  ASSERT_TRUE(put(kSums, {5, 6}, 5).ok());
  ASSERT_TRUE(compare(model_).ok());
  EXPECT_EQ(put(kSmall, {1}, 5).code(), ErrorCode::kFailedPrecondition);
  EXPECT_EQ(put(kFeatures, {1}, 5).code(), ErrorCode::kFailedPrecondition);
  ASSERT_TRUE(open().ok());
  std::ranges::fill(model_[kSums], 0u);
  ASSERT_TRUE(compare(model_).ok());
}

TEST_F(RowFileTest, WhatCannotBeMadeOrOpenedSaysWhy) {
  ASSERT_TRUE(create().ok());
  file_.reset();
  const auto open_as = [&](const RunId& run, std::string_view commit) {
    return RowFile::open(place(), run, commit, std::chrono::seconds(10), traffic_).status();
  };
  EXPECT_EQ(open_as(layout().run, "").code(), ErrorCode::kFailedPrecondition);
  EXPECT_EQ(open_as(layout().run, "rows9").code(), ErrorCode::kMismatch);
  EXPECT_EQ(open_as({}, record_).code(), ErrorCode::kMismatch);
  const std::string old = record_;
  SetUp();
  model_.resize(layout().tables.size());
  ASSERT_TRUE(create().ok());  // the same run's, made anew
  EXPECT_EQ(open_as(layout().run, old).code(), ErrorCode::kMismatch);
  RowFileLayout bad = layout();
  bad.log_bytes = 8192;
  EXPECT_NE(RowFile::check(bad).to_string().find("163840"), std::string::npos)
      << RowFile::check(bad).to_string();
  bad = layout();
  bad.tables[0].rows = uint64_t{1} << 33;
  EXPECT_EQ(RowFile::check(bad).code(), ErrorCode::kInvalidArgument);
  bad = layout();
  bad.tables[0].rows = 100'000;
  const auto full = RowFile::create(place(), bad, std::chrono::seconds(10), traffic_).status();
  EXPECT_EQ(full.code(), ErrorCode::kNoSpace);
  EXPECT_NE(full.to_string().find(std::to_string(RowFile::file_bytes(bad))), std::string::npos);
}

TEST(RowFileInADirectory, IsMadeOpenedAndMadeAnew) {
  const base::Scratch scratch;
  const std::string directory = scratch.path().string();
  base::TrafficCounter traffic;
  StoreOptions options;
  options.ring.kind = RingKind::kThreads;
  EXPECT_EQ(open_cache_place(directory, kRowFileName, 0, options).status().code(),
            ErrorCode::kNotFound);
  std::string commit;
  for (const uint64_t log_pages : {60, 40}) {  // the second time smaller
    RowFileLayout wanted = layout();
    wanted.log_bytes = log_pages * 8192;
    auto place = open_cache_place(directory, kRowFileName, kRowLayoutOffset, options);
    ASSERT_TRUE(place.ok()) << place.status().to_string();
    auto file = RowFile::create(std::move(*place), wanted, std::chrono::seconds(9), traffic);
    ASSERT_TRUE(file.ok()) << file.status().to_string();
    EXPECT_EQ(std::filesystem::file_size(scratch / std::string(kRowFileName)),
              RowFile::file_bytes(wanted));
    (*file)->begin_step(0);
    const std::vector<uint32_t> rows{7};
    ASSERT_TRUE((*file)->put(kSmall, rows, record(kSmall, 7, 1)).ok());
    commit = *(*file)->prepare(0);
    ASSERT_TRUE((*file)->commit(0).ok());
  }
  auto place = open_cache_to_read(directory, kRowFileName);
  ASSERT_TRUE(place.ok());
  const auto read = RowFile::open(std::move(*place), layout().run, commit, std::chrono::seconds(9),
                                  traffic, /*read_only=*/true);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  const std::vector<uint32_t> rows{7};
  bool right = false;
  ASSERT_TRUE((*read)
                  ->read(kSmall, rows,
                         [&](size_t, std::span<const std::byte> found) {
                           right = std::ranges::equal(found, record(kSmall, 7, 1));
                         })
                  .ok());
  EXPECT_TRUE(right);
}

}  // namespace
}  // namespace smartinf::storage
