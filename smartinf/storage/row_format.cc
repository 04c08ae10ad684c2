#include "smartinf/storage/row_format.h"

#include <algorithm>
#include <cstdio>

#include <fmt/format.h>

#include "smartinf/base/codec.h"
#include "smartinf/base/row_pages.h"
#include "smartinf/storage/row_layout_fields.h"

namespace smartinf::storage {
namespace {

constexpr uint64_t kHeadBytes = 2 * sizeof(uint64_t);  // magic and checksum
static_assert(base::kRowLogHeadBytes == sizeof(LogPageHead));
static_assert(base::kRowMergeEntryBytesMin == kMergeEntryBytesMin);

std::array<uint64_t, 2> words_of(const RunId& id) {
  std::array<uint64_t, 2> words{};
  std::memcpy(words.data(), id.bytes.data(), sizeof words);
  return words;
}

}  // namespace

template <typename Wire>
void describe(Wire& wire, RowHeader& header) {
  auto& [version, file, sequence, layout_bytes, layout_sum, tail, place, sum, from] = header;
  wire(version, file.bytes, sequence, layout_bytes, layout_sum, tail, place, sum, from);
}

void encode(const RowHeader& header, std::span<std::byte> out) {
  std::ranges::fill(out, std::byte{0});
  base::Encoder wire;
  describe(wire, const_cast<RowHeader&>(header));
  std::ranges::copy(wire.take(), out.begin() + kHeadBytes);
  store(out, 0, kRowMagic);
  store(out, 8, base::checksum(out.subspan(kHeadBytes), kRowMagic));
}

std::optional<RowHeader> decode_row_header(std::span<const std::byte> bytes) {
  if (load<uint64_t>(bytes, 0) != kRowMagic) return std::nullopt;
  if (load<uint64_t>(bytes, 8) != base::checksum(bytes.subspan(kHeadBytes), kRowMagic)) {
    return std::nullopt;
  }
  base::Decoder wire(bytes.subspan(kHeadBytes));
  RowHeader header;
  describe(wire, header);
  if (!wire.ok()) return std::nullopt;
  return header;
}

std::vector<std::byte> encode(const RowFileLayout& layout) {
  base::Encoder wire;
  describe(wire, const_cast<RowFileLayout&>(layout));
  return wire.take();
}

std::optional<RowFileLayout> decode_row_layout(std::span<const std::byte> bytes) {
  base::Decoder wire(bytes);
  RowFileLayout layout;
  describe(wire, layout);
  if (!wire.done()) return std::nullopt;
  return layout;
}

std::string encode(const RowCommit& commit) {
  return fmt::format("rows1 {} {:016x} {:016x} {}", commit.file.to_string(), commit.head,
                     commit.chain, commit.tables);
}

std::optional<RowCommit> decode_row_commit(std::string_view text) {
  RowCommit commit;
  std::array<char, 33> file{};
  unsigned long long head = 0;
  unsigned long long chain = 0;
  int end = 0;
  if (std::sscanf(std::string(text).c_str(), "rows1 %32[0-9a-f] %16llx %16llx%n", file.data(),
                  &head, &chain, &end) != 3 ||
      static_cast<size_t>(end) >= text.size()) {
    return std::nullopt;
  }
  commit.tables = text.substr(static_cast<size_t>(end) + 1);
  for (size_t i = 0; i < commit.file.bytes.size(); ++i) {
    unsigned byte = 0;
    if (std::sscanf(&file[2 * i], "%2x", &byte) != 1) return std::nullopt;
    commit.file.bytes[i] = static_cast<uint8_t>(byte);
  }
  commit.head = head;
  commit.chain = chain;
  if (encode(commit) != text) return std::nullopt;
  return commit;
}

std::string tables_of_row_commit(std::string_view text) {
  const std::optional<RowCommit> commit = decode_row_commit(text);
  return commit ? commit->tables : "of a newer program";
}

RowGeometry::RowGeometry(const RowFileLayout& layout) {
  constexpr uint64_t kUnit = base::kRowPageUnit;
  log_page_bytes = kUnit;
  uint64_t page_bytes_max = kUnit;
  for (const RowTableLayout& one : layout.tables) {
    page_bytes_max = std::max(page_bytes_max, base::page_bytes(one.record_bytes));
    if (one.kind != RowTableKind::kState) continue;
    log_page_bytes = std::max(log_page_bytes, base::row_log_page_bytes(one.record_bytes));
  }
  log_pages = layout.log_bytes / log_page_bytes;
  uint64_t keys = 0;
  uint64_t slots_max = 1;
  uint64_t log_page_records = 0;
  merge_home_bytes = merge_staged_bytes = kMergeBytes;
  for (const RowTableLayout& one : layout.tables) {
    Table& table = tables.emplace_back();
    table.kind = one.kind;
    table.record_bytes = one.record_bytes;
    table.page_bytes = base::page_bytes(one.record_bytes);
    table.records_per_page = base::records_per_page(one.record_bytes);
    table.rows = one.rows;
    table.pages = base::row_pages(one.rows, one.record_bytes);
    table.first_page = pages;
    pages += table.pages;
    table.first_key = keys;
    if (one.kind != RowTableKind::kState) continue;
    keys += one.rows;
    table.records_per_log_page = base::records_per_row_log_page(log_page_bytes, one.record_bytes);
    log_page_records = std::max(log_page_records, table.records_per_log_page);
    slots_max = std::max(slots_max, table.records_per_page);
    merge_home_bytes =
        std::max(merge_home_bytes, 8 * table.records_per_log_page * table.page_bytes);
    merge_staged_bytes =
        std::max(merge_staged_bytes, 8 * table.records_per_log_page * one.record_bytes);
  }
  static_assert(kMergeRecordsMax >= 8 * base::kRowLogRecordsMax);
  merge_staged_bytes = std::min(merge_staged_bytes, merge_home_bytes);
  log_records_max = std::min(keys, log_pages * log_page_records);
  const uint64_t entry_max = sizeof(MergeEntry) + sizeof(uint16_t) * slots_max;
  merge_pages_max =
      base::divide_up(kMergeRecordsMax * kMergeEntryBytesMin, log_payload() - entry_max) + 1;
  chunk_bytes = std::max(log_page_bytes, kChunkBytes / log_page_bytes * log_page_bytes);
  read_bytes = std::max({kReadBytes, page_bytes_max, log_page_bytes});

  layout_bytes = base::round_up(uint64_t{encode(layout).size()}, kUnit);
  generations_offset_bytes = kRowLayoutOffset + 2 * layout_bytes;
  generations_bytes = base::round_up(std::max<uint64_t>(pages, 1), kUnit);
  log_offset_bytes = generations_offset(2);
  file_bytes = log_offset_bytes + log_pages * log_page_bytes;
  for (Table& table : tables) {
    table.offset_bytes = file_bytes;
    file_bytes += table.pages * table.page_bytes;
  }
}

RowSeeds::RowSeeds(const RowFileLayout& layout, const RunId& file) {
  const auto run = words_of(layout.run);
  const auto own = words_of(file);
  file_ = base::mix_seed(base::mix_seed(run[0], run[1]), layout.device_index);
  file_ = base::mix_seed(base::mix_seed(file_, own[0]), own[1]);
  log_ = base::mix_seed(file_, 0);
}

}  // namespace smartinf::storage
