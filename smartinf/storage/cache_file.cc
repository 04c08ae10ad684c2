#include "smartinf/storage/cache_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/codec.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/leak_in_flight.h"
#include "smartinf/storage/reserve_space.h"

namespace smartinf::storage {

/// Fields of a header behind its checksum; zeros fill the rest.
struct CacheHeader {
  uint32_t version = kCacheFormatVersion;
  CacheIdentity identity;
  uint64_t mark = 0;
  uint64_t table_offset = 0;
  uint64_t table_bytes = 0;
  uint64_t table_sum = 0;
};

template <typename Wire>
void describe(Wire& wire, CacheHeader& header) {
  auto& [version, identity, mark, table_offset, table_bytes, table_sum] = header;
  auto& [job, device_index, device_count, layers, block_bytes, block_tokens, text] = identity;
  wire(version, job.bytes, device_index, device_count, layers, block_bytes, block_tokens, text,
       mark, table_offset, table_bytes, table_sum);
}

namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr SpaceUse kUse{"keys and values",
                        "use another device or one more, or fewer sequences at a time"};
constexpr uint64_t kTablesBytesMax = uint64_t{1} << 34;
constexpr uint64_t kFileBytesMax = uint64_t{1} << 60;
constexpr uint64_t kTokensMax = uint64_t{1} << 40;
constexpr uint32_t kTailPlaces = 2;

constexpr uint64_t kHeadBytes = 2 * sizeof(uint64_t);  // magic and checksum

uint64_t word(std::span<const std::byte> bytes, uint64_t offset) {
  uint64_t value = 0;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

void encode(const CacheHeader& header, std::span<std::byte> out) {
  std::ranges::fill(out, std::byte{0});
  base::Encoder wire;
  describe(wire, const_cast<CacheHeader&>(header));
  const std::vector<std::byte> bytes = wire.take();
  std::ranges::copy(bytes, out.begin() + kHeadBytes);
  const uint64_t head[] = {kCacheMagic, base::checksum(out.subspan(kHeadBytes), kCacheMagic)};
  std::memcpy(out.data(), head, sizeof head);
}

/// Nullopt: not whole, or nothing was ever there.
std::optional<CacheHeader> decode(std::span<const std::byte> bytes) {
  if (word(bytes, 0) != kCacheMagic) return std::nullopt;
  if (word(bytes, 8) != base::checksum(bytes.subspan(kHeadBytes), kCacheMagic)) return std::nullopt;
  base::Decoder wire(bytes.subspan(kHeadBytes));
  CacheHeader header;
  describe(wire, header);
  if (!wire.ok()) return std::nullopt;
  return header;
}

uint64_t table_seed(uint64_t mark) { return base::mix_seed(kCacheTableMagic, mark); }

Status mismatch(const CacheIdentity& found, const CacheIdentity& wanted, const std::string& path) {
  const auto name = [](const CacheIdentity& one) {
    return fmt::format(
        "job {}, device {} of {}, {} layers, blocks of {} tokens in {} bytes, \"{}\"",
        one.job.to_string(), one.device_index + 1, one.device_count, one.layers, one.block_tokens,
        one.block_bytes, one.text);
  };
  return Status(
      ErrorCode::kMismatch,
      "the keys and values there are another job's: " + name(found) + ", and not " + name(wanted),
      "Resume that job with the options that it was started with, start afresh, or use "
      "another directory.",
      base::ErrorPlace{path, {}, {}, 0});
}

Status check(const CacheIdentity& identity) {
  if (identity.layers > 0 && identity.block_tokens > 0 && identity.block_bytes > 0 &&
      identity.block_bytes % base::kIoAlignment == 0 &&
      identity.block_bytes <= kFileBytesMax / identity.layers &&
      identity.text.size() <= kCacheIdentityBytesMax) {
    return Status();
  }
  return Status(ErrorCode::kInvalidArgument, "a cache of no layers, or of blocks of no size");
}

/// The same job's, of other devices than it has now.
bool of_other_devices(CacheIdentity found, const CacheIdentity& wanted) {
  found.device_index = wanted.device_index;
  found.device_count = wanted.device_count;
  return found == wanted;
}

}  // namespace

CacheFile::CacheFile(CachePlace place, CacheIdentity identity, uint64_t bytes_max,
                     std::chrono::nanoseconds watchdog, base::TrafficCounter& traffic)
    : directory_(std::move(place.directory)),
      descriptor_(std::move(place.descriptor)),
      queue_(std::make_unique<TransferQueue>(std::move(place.ring), place.file,
                                             std::move(place.path), place.direct, watchdog)),
      bytes_max_(bytes_max),
      size_bytes_(place.size_bytes),
      traffic_(traffic) {
  take_identity(std::move(identity));
  used_[0] = kCacheDataOffset;
}

void CacheFile::take_identity(CacheIdentity identity) {
  identity_ = std::move(identity);
  uint64_t words[2];
  std::memcpy(words, identity_.job.bytes.data(), sizeof words);
  seed_ = base::mix_seed(base::mix_seed(words[0], words[1]), identity_.device_index);
}

Result<std::unique_ptr<CacheFile>> CacheFile::open(CachePlace place, CacheIdentity identity,
                                                   uint64_t bytes_max,
                                                   std::chrono::nanoseconds watchdog,
                                                   base::TrafficCounter& traffic) {
  SI_RETURN_IF_ERROR(check(identity));
  if (place.size_bytes < kCacheDataOffset) {
    return no_space(kUse, place.path, kCacheDataOffset, place.size_bytes);
  }
  std::unique_ptr<CacheFile> file(
      new CacheFile(std::move(place), std::move(identity), bytes_max, watchdog, traffic));
  SI_ASSIGN_OR_RETURN(file->memory_, base::AlignedBuffer::allocate(kCacheHeaderBytes));
  SI_RETURN_IF_ERROR(file->load(/*whoever=*/false));
  return file;
}

Result<std::unique_ptr<CacheFile>> CacheFile::open_saved(const std::string& directory) {
  static base::TrafficCounter ignored;
  SI_ASSIGN_OR_RETURN(CachePlace place, open_cache_to_read(directory, kCacheFileName));
  std::unique_ptr<CacheFile> file(
      new CacheFile(std::move(place), {}, 0, std::chrono::minutes(1), ignored));
  SI_ASSIGN_OR_RETURN(file->memory_, base::AlignedBuffer::allocate(kCacheHeaderBytes));
  SI_RETURN_IF_ERROR(file->load(/*whoever=*/true));
  if (file->saves() > 0) return file;
  return Status(ErrorCode::kNotFound, "no keys and values were saved", {},
                base::ErrorPlace{file->path(), {}, {}, 0});
}

Status CacheFile::erase(CachePlace& place) {
  SI_ASSIGN_OR_RETURN(base::AlignedBuffer zeros, base::AlignedBuffer::allocate(kCacheHeaderBytes));
  TransferQueue queue(std::move(place.ring), place.file, place.path, place.direct,
                      std::chrono::minutes(1));
  Status status;
  for (uint64_t i = 0; i < 2 && status.ok(); ++i) {
    status = queue.run(IoOp::kWriteDurable, i * kCacheHeaderStride, zeros.bytes(), zeros);
  }
  if (!queue.failed()) place.ring = queue.release_ring();
  return status;
}

Status CacheFile::run(IoOp op, uint64_t offset_bytes, std::span<std::byte> bytes) {
  SI_RETURN_IF_ERROR(queue_->run(op, offset_bytes, bytes, memory_));
  constexpr auto kKind = base::TrafficKind::kMetadata;
  op == IoOp::kRead ? traffic_.add_up(kKind, bytes.size()) : traffic_.add_down(kKind, bytes.size());
  return Status();
}

/// Takes up the newest save that is whole. whoever: of whatever job.
Status CacheFile::load(bool whoever) {
  std::array<std::optional<CacheHeader>, 2> headers;
  bool something = false;
  for (size_t i = 0; i < 2; ++i) {
    const auto bytes = memory_.bytes().first(kCacheHeaderBytes);
    SI_RETURN_IF_ERROR(run(IoOp::kRead, i * kCacheHeaderStride, bytes));
    something =
        something || std::ranges::any_of(bytes, [](std::byte b) { return b != std::byte{0}; });
    headers[i] = decode(bytes);
    if (headers[i] && headers[i]->version > kCacheFormatVersion) {
      return Status(ErrorCode::kMismatch,
                    fmt::format("the keys and values there are of version {}, and this program "
                                "reads {}",
                                headers[i]->version, kCacheFormatVersion),
                    "Use a newer smartinf, or start afresh.", base::ErrorPlace{path(), {}, {}, 0});
    }
    if (!headers[i] || headers[i]->identity == identity_ || whoever) continue;
    if (of_other_devices(headers[i]->identity, identity_)) return forget_all();
    return mismatch(headers[i]->identity, identity_, path());
  }
  if (!something) return Status();
  std::ranges::sort(
      headers, [](const auto& a, const auto& b) { return (a ? a->mark : 0) > (b ? b->mark : 0); });
  for (const std::optional<CacheHeader>& header : headers) {
    if (!header || !check(header->identity).ok()) continue;
    take_identity(header->identity);
    if (read_table(*header).ok()) {
      mark_ = header->mark;
      return Status();
    }
    sequences_.clear();
    used_ = {{0, kCacheDataOffset}};
    tables_ = {};
  }
  return Status(ErrorCode::kCorrupt,
                "no list of the keys and values there is whole, so none of them can be used",
                "Start afresh: everything in it is computed again. Look at the drive's health "
                "(smartctl -a).",
                base::ErrorPlace{path(), {}, {}, 0});
}

Status CacheFile::forget_all() {
  const auto zeros = memory_.bytes().first(kCacheHeaderBytes);
  std::ranges::fill(zeros, std::byte{0});
  for (uint64_t i = 0; i < 2; ++i) {
    SI_RETURN_IF_ERROR(run(IoOp::kWriteDurable, i * kCacheHeaderStride, zeros));
  }
  return Status();
}

Status CacheFile::read_table(const CacheHeader& header) {
  const Status wrong(ErrorCode::kCorrupt, "the list of a cache is not whole");
  const uint64_t room = base::round_up(header.table_bytes, uint64_t{base::kIoAlignment});
  if (header.table_bytes > kTablesBytesMax || header.table_offset < kCacheDataOffset ||
      header.table_offset % base::kIoAlignment != 0 || header.table_offset > size_bytes_ ||
      room > size_bytes_ - header.table_offset) {
    return wrong;
  }
  SI_ASSIGN_OR_RETURN(memory_, base::AlignedBuffer::allocate(std::max(room, kCacheHeaderBytes)));
  SI_RETURN_IF_ERROR(run(IoOp::kRead, header.table_offset, memory_.bytes().first(room)));
  const auto table = memory_.bytes().first(header.table_bytes);
  if (base::checksum(table, table_seed(header.mark)) != header.table_sum) return wrong;
  base::Decoder wire(table);
  uint64_t count = 0;
  wire(count);
  tables_[header.mark % 2] = Extent{header.table_offset, room};
  used_[header.table_offset] = room;
  for (uint64_t i = 0; i < count && wire.ok(); ++i) {
    CachedSequence sequence;
    wire(sequence.id, sequence.tokens_max, sequence.offset_bytes);
    if (!wire.ok() || sequence.tokens_max > kTokensMax) return wrong;
    sequence.layers.resize(identity_.layers);
    for (CachedLayer& layer : sequence.layers) {
      wire(layer.sums, layer.tail_tokens, layer.tail_place, layer.tail_sum);
      if (!wire.ok() || layer.tokens(identity_.block_tokens) > sequence.tokens_max ||
          layer.tail_tokens >= identity_.block_tokens || layer.tail_place >= kTailPlaces) {
        return wrong;
      }
    }
    const uint64_t extent = extent_bytes(sequence.tokens_max);
    if (sequence.offset_bytes > size_bytes_ || extent > size_bytes_ - sequence.offset_bytes ||
        !used_.emplace(sequence.offset_bytes, extent).second) {
      return wrong;
    }
    const uint64_t id = sequence.id;
    sequences_.emplace(id, std::move(sequence));
  }
  if (!wire.done()) return wrong;
  uint64_t end = 0;
  for (const auto& [offset, size] : used_) {
    if (offset < end) return wrong;
    end = offset + size;
  }
  return Status();
}

std::vector<std::byte> CacheFile::encode_table() const {
  base::Encoder wire;
  wire(uint64_t{sequences_.size()});
  for (const auto& [id, sequence] : sequences_) {
    wire(id, sequence.tokens_max, sequence.offset_bytes);
    for (const CachedLayer& layer : sequence.layers) {
      wire(layer.sums, layer.tail_tokens, layer.tail_place, layer.tail_sum);
    }
  }
  return wire.take();
}

CachedSequence* CacheFile::find(uint64_t id) {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : &found->second;
}

uint64_t CacheFile::blocks(const CachedSequence& sequence) const {
  return base::divide_up(sequence.tokens_max, uint64_t{identity_.block_tokens});
}

/// ~0: more than any drive has.
uint64_t CacheFile::extent_bytes(uint64_t tokens_max) const {
  const uint64_t places =
      base::divide_up(tokens_max, uint64_t{identity_.block_tokens}) + kTailPlaces;
  const uint64_t place_bytes = identity_.layers * identity_.block_bytes;
  return places > kFileBytesMax / place_bytes ? ~uint64_t{0} : places * place_bytes;
}

uint64_t CacheFile::place_offset(const CachedSequence& sequence, uint32_t layer,
                                 uint64_t place) const {
  const uint64_t places = blocks(sequence) + kTailPlaces;
  return sequence.offset_bytes + (layer * places + place) * identity_.block_bytes;
}

uint64_t CacheFile::checksum(uint64_t sequence, uint32_t layer, uint64_t place,
                             std::span<const std::byte> block) const {
  const uint64_t whose = base::mix_seed(base::mix_seed(seed_, sequence), layer);
  return base::checksum(block, base::mix_seed(whose, place));
}

Status CacheFile::damaged(const CachedSequence& sequence, uint32_t layer, uint64_t place) const {
  return Status(
      ErrorCode::kCorrupt,
      fmt::format("block {} of sequence {} in layer {} is not what was written", place, sequence.id,
                  layer),
      "Its keys and values can be computed again from its tokens. Look at the drive's health "
      "(smartctl -a).",
      base::ErrorPlace{path(), place_offset(sequence, layer, place), identity_.block_bytes, 0});
}

/// The first hole that is large enough, or behind everything.
Result<CacheFile::Extent> CacheFile::reserve(uint64_t bytes) {
  uint64_t at = 0;
  for (const auto& [offset, size] : used_) {
    if (offset - at >= bytes) break;
    at = offset + size;
  }
  uint64_t used = 0;
  for (const auto& [offset, size] : used_) used += size;
  const uint64_t room = descriptor_.is_open() ? bytes_max_ : std::min(bytes_max_, size_bytes_);
  if (bytes > room || at > room - bytes) {
    return no_space(kUse, path(), bytes, room - std::min(room, used));
  }
  if (at + bytes > size_bytes_) {
    SI_RETURN_IF_ERROR(reserve_space(descriptor_.get(), at + bytes - size_bytes_, kUse, directory_,
                                     path(), size_bytes_));
    size_bytes_ = at + bytes;
  }
  used_[at] = bytes;
  return Extent{at, bytes};
}

void CacheFile::release(const Extent& extent) { used_.erase(extent.offset_bytes); }

Result<CachedSequence*> CacheFile::add(uint64_t id, uint64_t tokens_max) {
  if (tokens_max == 0 || tokens_max > kTokensMax) {
    return Status(ErrorCode::kInvalidArgument, "a sequence of no tokens, or of too many");
  }
  if (find(id) != nullptr) {
    return Status(ErrorCode::kAlreadyExists, fmt::format("sequence {} is there already", id));
  }
  SI_ASSIGN_OR_RETURN(const Extent extent, reserve(extent_bytes(tokens_max)));
  CachedSequence& sequence = sequences_[id];
  sequence.id = id;
  sequence.tokens_max = tokens_max;
  sequence.offset_bytes = extent.offset_bytes;
  sequence.layers.resize(identity_.layers);
  return &sequence;
}

void CacheFile::remove(uint64_t id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return;
  used_.erase(found->second.offset_bytes);
  sequences_.erase(found);
}

uint64_t CacheFile::saved_bytes(const CachedSequence& sequence) const {
  uint64_t blocks = 0;
  for (const CachedLayer& layer : sequence.layers) {
    blocks += layer.sums.size() + (layer.tail_tokens > 0 ? 1 : 0);
  }
  return blocks * identity_.block_bytes;
}

Status CacheFile::verify(const std::function<Status(uint64_t, uint64_t)>& progress,
                         const std::function<void(const Status&)>& found) {
  constexpr uint64_t kReadBytes = 4 * base::kMiB;
  const uint64_t bytes = identity_.block_bytes;
  const uint64_t at_once = std::max<uint64_t>(1, kReadBytes / bytes);
  SI_ASSIGN_OR_RETURN(memory_, base::AlignedBuffer::allocate(at_once * bytes));
  uint64_t all = 0;
  uint64_t done = 0;
  for (const auto& [id, sequence] : sequences_) all += saved_bytes(sequence);
  const auto verify_some = [&](const CachedSequence& sequence, uint32_t layer, uint64_t first,
                               std::span<const uint64_t> sums) {
    const auto some = memory_.bytes().first(sums.size() * bytes);
    const Status read =
        queue_->run(IoOp::kRead, place_offset(sequence, layer, first), some, memory_);
    if (!read.ok()) found(read);
    for (uint64_t i = 0; i < sums.size() && read.ok(); ++i) {
      const auto block = some.subspan(i * bytes, bytes);
      if (checksum(sequence.id, layer, first + i, block) != sums[i]) {
        found(damaged(sequence, layer, first + i));
      }
    }
    done += some.size();
    return progress(done, all);
  };
  for (const auto& [id, sequence] : sequences_) {
    for (uint32_t l = 0; l < sequence.layers.size(); ++l) {
      const CachedLayer& layer = sequence.layers[l];
      const std::span<const uint64_t> sums = layer.sums;
      for (uint64_t first = 0; first < sums.size(); first += at_once) {
        const auto some = sums.subspan(first, std::min(at_once, sums.size() - first));
        SI_RETURN_IF_ERROR(verify_some(sequence, l, first, some));
      }
      if (layer.tail_tokens == 0) continue;
      const uint64_t place = blocks(sequence) + layer.tail_place;
      SI_RETURN_IF_ERROR(verify_some(sequence, l, place, {&layer.tail_sum, 1}));
    }
  }
  return Status();
}

Status CacheFile::save() {
  // Blocks before the tables that vouch for them.
  SI_RETURN_IF_ERROR(run(IoOp::kSync, 0, {}));
  const std::vector<std::byte> table = encode_table();
  const uint64_t mark = mark_ + 1;
  std::optional<Extent>& place = tables_[mark % 2];  // of the save before the last one
  const uint64_t bytes = base::round_up(uint64_t{table.size()}, uint64_t{base::kIoAlignment});
  if (place && place->bytes < bytes) {
    release(*place);
    place.reset();
  }
  if (!place) {
    SI_ASSIGN_OR_RETURN(place, reserve(bytes));
  }
  if (memory_.size() < bytes) {
    SI_ASSIGN_OR_RETURN(memory_, base::AlignedBuffer::allocate(bytes));
  }
  std::ranges::copy(table, memory_.data());
  std::fill(memory_.data() + table.size(), memory_.data() + bytes, std::byte{0});
  SI_RETURN_IF_ERROR(run(IoOp::kWrite, place->offset_bytes, memory_.bytes().first(bytes)));
  SI_RETURN_IF_ERROR(run(IoOp::kSync, 0, {}));
  CacheHeader header;
  header.identity = identity_;
  header.mark = mark;
  header.table_offset = place->offset_bytes;
  header.table_bytes = table.size();
  header.table_sum = base::checksum(std::span(table), table_seed(mark));
  const auto out = memory_.bytes().first(kCacheHeaderBytes);
  encode(header, out);
  SI_RETURN_IF_ERROR(run(IoOp::kWriteDurable, mark % 2 * kCacheHeaderStride, out));
  mark_ = mark;
  return Status();
}

}  // namespace smartinf::storage
