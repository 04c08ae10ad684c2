#include "smartinf/storage/check_store.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/leak_in_flight.h"
#include "smartinf/storage/transfer_queue.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr std::chrono::seconds kPatience{60};
constexpr std::string_view kNoOtherCopy =
    "It cannot be brought back from this device: restore the last checkpoint.";
constexpr std::string_view kRepair = "Another copy serves. smartinf fsck --repair writes it anew.";

uint64_t align_down(uint64_t value) { return value - value % base::kIoAlignment; }
uint64_t align_up(uint64_t value) { return base::round_up(value, base::kIoAlignment); }

class Checker {
 public:
  Checker(Container& container, const CheckOptions& options,
          const std::function<void(const StoreFault&)>& visit)
      : container_(container),
        options_(options),
        visit_(visit),
        queue_(std::move(container.ring), container.file, container.file_path, container.direct,
               kPatience) {}

  ~Checker() {
    // Before buffers go.
    if (queue_.close().ok()) return;
    leak_in_flight(std::move(pieces_));
    leak_in_flight(std::move(table_));
  }

  Result<CheckReport> run() {
    SI_ASSIGN_OR_RETURN(const bool usable, check_superblocks());
    if (!usable || !report_.state.initialized) return report_;
    SI_ASSIGN_OR_RETURN(const bool known, check_layout());
    if (!known) return report_;
    SI_ASSIGN_OR_RETURN(const bool listed, check_tables());
    if (listed) SI_RETURN_IF_ERROR(check_blocks());
    return report_;
  }

 private:
  /// A run of blocks of one plane, read with one transfer.
  struct Piece {
    Transfer transfer;
    base::AlignedBuffer memory;
    size_t subgroup = 0;
    size_t plane = 0;
    uint64_t first_block = 0;
    uint64_t blocks = 0;
    uint64_t skip_bytes = 0;  // before the first block: transfers begin on a boundary
  };

  void report(FaultKind kind, std::string what, std::string_view advice, uint64_t offset,
              uint64_t length, bool costs_state, bool repaired = false) {
    StoreFault fault;
    fault.kind = kind;
    fault.costs_state = costs_state;
    fault.repaired = repaired;
    fault.status = Status(kind == FaultKind::kUnreadable ? ErrorCode::kIo : ErrorCode::kCorrupt,
                          std::move(what), repaired ? "It was written anew." : std::string(advice),
                          base::ErrorPlace{container_.file_path, offset, length, 0});
    ++report_.faults;
    if (repaired) ++report_.faults_repaired;
    report_.state_lost = report_.state_lost || costs_state;
    visit_(fault);
  }

  /// After a failure of the queue itself (queue_.failed()) `memory` is gone and nothing goes on.
  Status transfer(IoOp op, uint64_t offset, std::span<std::byte> bytes,
                  base::AlignedBuffer& memory) {
    if (op == IoOp::kRead) report_.bytes_read += bytes.size();
    return queue_.run(op, offset, bytes, memory);
  }

  Result<bool> check_superblocks() {
    SI_ASSIGN_OR_RETURN(base::AlignedBuffer area,
                        base::AlignedBuffer::allocate(kSuperblockAreaBytes));
    if (container_.size_bytes < kSuperblockAreaBytes) {
      report(FaultKind::kContainer, "the container is cut short", kNoOtherCopy, 0,
             container_.size_bytes, true);
      return false;
    }
    // Copy by copy: one that cannot be read leaves the others.
    std::array<Status, kSuperblockCopies> readable;
    for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
      readable[copy] = transfer(IoOp::kRead, superblock_offset(copy), image(area, copy), area);
      if (queue_.failed()) return readable[copy];
    }
    const Result<Superblock> chosen = choose_superblock(area.bytes());
    if (!chosen.ok()) {
      if (chosen.status().code() == ErrorCode::kMismatch) return chosen.status();
      report(FaultKind::kContainer, "no superblock can be used: " + chosen.status().what(),
             kNoOtherCopy, 0, kSuperblockAreaBytes, true);
      return false;
    }
    superblock_ = *chosen;
    for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
      const Result<Superblock> found = parse_superblock(image(area, copy), copy);
      if (found.ok() && readable[copy].ok()) continue;
      bool repaired = false;
      if (options_.repair) {
        // From its twin, which was written with it; else from the newest.
        const uint32_t twin = (copy + kSuperblockPairs) % kSuperblockCopies;
        const Result<Superblock> other = parse_superblock(image(area, twin), twin);
        Superblock fresh = other.ok() ? *other : superblock_;
        fresh.copy = copy;
        seal_superblock(fresh);
        std::memcpy(image(area, copy).data(), &fresh, sizeof(fresh));
        const Status written =
            transfer(IoOp::kWriteDurable, superblock_offset(copy), image(area, copy), area);
        if (queue_.failed()) return written;
        repaired = written.ok();
      }
      report(FaultKind::kSuperblock,
             fmt::format("superblock copy {} cannot be used: {}", copy,
                         readable[copy].ok() ? found.status().what() : readable[copy].what()),
             kRepair, superblock_offset(copy), kSuperblockBytes, false, repaired);
    }
    report_.state.run.bytes = superblock_.run;
    report_.state.device_index = superblock_.device_index;
    report_.state.device_count = superblock_.device_count;
    report_.state.committed_step = superblock_.committed_step;
    report_.state.prepared_step = superblock_.prepared_step;
    report_.state.torn = superblock_.in_place_step != 0;
    report_.state.initialized = superblock_.phase != Phase::kCreating && !report_.state.torn;
    report_.bytes_written_ever = superblock_.bytes_written_ever;
    report_.created_seconds = superblock_.created_seconds;
    if (superblock_.container_bytes > container_.size_bytes) {
      report(FaultKind::kContainer,
             fmt::format("the container has {} bytes where {} belong", container_.size_bytes,
                         superblock_.container_bytes),
             kNoOtherCopy, 0, container_.size_bytes, true);
    }
    return true;
  }

  static std::span<std::byte> image(const base::AlignedBuffer& area, uint32_t copy) {
    return area.bytes().subspan(superblock_offset(copy), kSuperblockBytes);
  }

  /// Checks copies that lie one after another: reports the bad ones, repairs them from a good one.
  /// The good one is left in `good`.
  template <typename Check, typename Offset>
  Result<bool> check_copies(FaultKind kind, std::string_view name, uint32_t count, uint64_t length,
                            const Offset& offset_of, const Check& check,
                            base::AlignedBuffer& good) {
    SI_ASSIGN_OR_RETURN(base::AlignedBuffer bytes, base::AlignedBuffer::allocate(length));
    std::vector<Status> statuses;
    bool found = false;
    for (uint32_t copy = 0; copy < count; ++copy) {
      Status status = transfer(IoOp::kRead, offset_of(copy), bytes.bytes(), bytes);
      if (queue_.failed()) return status;
      if (status.ok()) status = check(bytes.bytes());
      if (status.ok() && !found) {
        found = true;
        std::swap(good, bytes);
        if (bytes.size() == 0) {
          SI_ASSIGN_OR_RETURN(bytes, base::AlignedBuffer::allocate(length));
        }
      }
      statuses.push_back(std::move(status));
    }
    for (uint32_t copy = 0; copy < count; ++copy) {
      if (statuses[copy].ok()) continue;
      bool repaired = false;
      if (found && options_.repair) {
        const Status written = transfer(IoOp::kWriteDurable, offset_of(copy), good.bytes(), good);
        if (queue_.failed()) return written;
        repaired = written.ok();
      }
      report(kind,
             fmt::format("copy {} of the {} cannot be used: {}", copy, name, statuses[copy].what()),
             found ? kRepair : kNoOtherCopy, offset_of(copy), length, !found, repaired);
    }
    return found;
  }

  Result<bool> check_layout() {
    const uint64_t length = align_up(superblock_.layout_bytes);
    if (kSuperblockAreaBytes + kLayoutCopies * length > container_.size_bytes) {
      report(FaultKind::kLayout, "the layout record lies behind the container's end", kNoOtherCopy,
             kSuperblockAreaBytes, length, true);
      return false;
    }
    base::AlignedBuffer record;
    SI_ASSIGN_OR_RETURN(const bool found,
                        check_copies(
                            FaultKind::kLayout, "layout record", kLayoutCopies, length,
                            [&](uint32_t copy) { return kSuperblockAreaBytes + copy * length; },
                            [&](std::span<const std::byte> bytes) {
                              return parse_layout(bytes, superblock_).status();
                            },
                            record));
    if (!found) return false;
    SI_ASSIGN_OR_RETURN(layout_, parse_layout(record.bytes(), superblock_));
    Result<Geometry> made = Geometry::make(layout_, superblock_.slots);
    if (!made.ok() || made->container_bytes() != superblock_.container_bytes) {
      report(FaultKind::kLayout, "the layout record contradicts the superblock", kNoOtherCopy,
             kSuperblockAreaBytes, length, true);
      return false;
    }
    geometry_ = std::move(*made);
    return true;
  }

  Result<bool> check_tables() {
    const base::StepNumber step = options_.step.value_or(superblock_.prepared_step);
    if (step != superblock_.prepared_step && step != superblock_.committed_step) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("the device holds steps {} and {}, not {}",
                                superblock_.committed_step, superblock_.prepared_step, step),
                    {}, base::ErrorPlace{container_.file_path, {}, {}, 0});
    }
    report_.checked_step = step;
    const bool prepared = step == superblock_.prepared_step;
    const uint64_t bytes =
        prepared ? superblock_.prepared_table_bytes : superblock_.committed_table_bytes;
    const uint64_t checksum =
        prepared ? superblock_.prepared_table_checksum : superblock_.committed_table_checksum;
    if (bytes < geometry_.table_records_bytes() || bytes > geometry_.table_bytes_max()) {
      report(FaultKind::kTable, "the superblock gives the table an impossible length", kNoOtherCopy,
             geometry_.table_offset(step, 0), bytes, true);
      return false;
    }
    return check_copies(
        FaultKind::kTable, fmt::format("table of step {}", step), kTableCopies, align_up(bytes),
        [&](uint32_t copy) { return geometry_.table_offset(step, copy); },
        [&](std::span<const std::byte> table) -> Status {
          SI_RETURN_IF_ERROR(check_table(
              table, geometry_, table_seed(layout_.run, layout_.device_index, step), step));
          TableHeader header;
          std::memcpy(&header, table.data(), sizeof(header));
          if (header.checksum == checksum) return Status();
          return Status(ErrorCode::kCorrupt, "it belongs to another attempt at this step");
        },
        table_);
  }

  PlaneRecord record(size_t subgroup, size_t plane) const {
    PlaneRecord found;
    std::memcpy(&found, table_.data() + geometry_.record_offset(subgroup, plane), sizeof(found));
    return found;
  }

  /// Sets the piece to the next run of blocks. False: there is none.
  bool next_piece(Piece& piece) {
    while (at_subgroup_ < geometry_.subgroups()) {
      const uint64_t blocks = geometry_.blocks(at_subgroup_);
      if (at_plane_ == geometry_.planes()) {
        at_plane_ = 0;
        ++at_subgroup_;
        continue;
      }
      const PlaneRecord found = record(at_subgroup_, at_plane_);
      if ((found.flags & kPlaneSealed) == 0) {
        report_.blocks_without_checksum += blocks;
        at_block_ = blocks;
      }
      if (at_block_ >= blocks) {
        at_block_ = 0;
        ++at_plane_;
        continue;
      }
      const uint64_t plane_begin = geometry_.extent_offset(at_subgroup_, found.slot) +
                                   geometry_.plane_offset(at_subgroup_, at_plane_);
      const uint64_t begin = plane_begin + geometry_.block_offset(at_plane_, at_block_);
      piece.subgroup = at_subgroup_;
      piece.plane = at_plane_;
      piece.first_block = at_block_;
      piece.blocks = 0;
      piece.skip_bytes = begin - align_down(begin);
      uint64_t end = begin;
      while (at_block_ < blocks) {
        const uint64_t block_end = plane_begin + geometry_.block_offset(at_plane_, at_block_) +
                                   geometry_.block_bytes(at_subgroup_, at_plane_, at_block_);
        if (align_up(block_end) - align_down(begin) > piece.memory.size()) break;
        end = block_end;
        ++piece.blocks;
        ++at_block_;
      }
      SI_CHECK(piece.blocks > 0, "a block that does not fit its buffer");
      piece.transfer.op = IoOp::kRead;
      piece.transfer.offset_bytes = align_down(begin);
      piece.transfer.buffer = piece.memory.bytes().first(align_up(end) - align_down(begin));
      piece.transfer.owner = &piece;
      return true;
    }
    return false;
  }

  void check_piece(const Piece& piece) {
    const PlaneRecord found = record(piece.subgroup, piece.plane);
    const base::SubgroupId id = layout_.subgroups[piece.subgroup].id;
    const auto plane_name = base::plane_kind_name(layout_.planes[piece.plane]);
    const uint64_t plane_begin = geometry_.extent_offset(piece.subgroup, found.slot) +
                                 geometry_.plane_offset(piece.subgroup, piece.plane);
    if (!piece.transfer.status.ok()) {
      report(FaultKind::kUnreadable,
             fmt::format("blocks {} to {} of the {} plane of subgroup {} cannot be read: {}",
                         piece.first_block, piece.first_block + piece.blocks - 1, plane_name,
                         id.value, piece.transfer.status.what()),
             kNoOtherCopy, piece.transfer.offset_bytes, piece.transfer.buffer.size(), true);
      return;
    }
    const uint64_t seed = device_seed(layout_.run, layout_.device_index);
    uint64_t offset = piece.skip_bytes;
    for (uint64_t i = 0; i < piece.blocks; ++i) {
      const uint64_t block = piece.first_block + i;
      const uint64_t length = geometry_.block_bytes(piece.subgroup, piece.plane, block);
      uint64_t wanted = 0;
      std::memcpy(&wanted,
                  table_.data() + geometry_.record_offset(piece.subgroup, piece.plane) +
                      sizeof(PlaneRecord) + 8 * block,
                  sizeof(wanted));
      const BlockIdentity identity{id.value, static_cast<uint32_t>(piece.plane), block, found.slot,
                                   found.step};
      ++report_.blocks_checked;
      if (block_checksum(piece.transfer.buffer.subspan(offset, length), seed, identity) != wanted) {
        report(FaultKind::kBlock,
               fmt::format("block {} of the {} plane of subgroup {} is not what step {} wrote",
                           block, plane_name, id.value, found.step),
               kNoOtherCopy, plane_begin + geometry_.block_offset(piece.plane, block), length,
               true);
      }
      offset += length;
    }
  }

  Status check_blocks() {
    // Room for a block of the largest encoding at any alignment.
    const uint64_t least =
        base::encoded_bytes(base::Encoding::kF32, base::kBlockElements) + 2 * base::kIoAlignment;
    const uint64_t depth = std::clamp<uint64_t>(options_.memory_bytes / least, 1,
                                                std::min(options_.io_depth, queue_.depth()));
    const uint64_t each =
        std::clamp<uint64_t>(options_.memory_bytes / depth, least, 4 * base::kMiB + least);
    uint64_t total = 0;
    for (size_t i = 0; i < geometry_.subgroups(); ++i) {
      total += geometry_.blocks(i) * geometry_.planes();
    }
    pieces_ = std::vector<Piece>(depth);
    for (Piece& piece : pieces_) {
      SI_ASSIGN_OR_RETURN(piece.memory, base::AlignedBuffer::allocate(align_down(each)));
      if (!next_piece(piece)) break;
      queue_.start(piece.transfer);
    }
    while (queue_.in_flight() > 0) {
      std::array<Transfer*, 8> done{};
      SI_ASSIGN_OR_RETURN(const size_t count, queue_.finish(done, kPatience));
      for (size_t i = 0; i < count; ++i) {
        Piece& piece = *static_cast<Piece*>(done[i]->owner);
        report_.bytes_read += piece.transfer.buffer.size();
        check_piece(piece);
        if (next_piece(piece)) queue_.start(piece.transfer);
      }
      if (options_.progress) {
        SI_RETURN_IF_ERROR(
            options_.progress(report_.blocks_checked + report_.blocks_without_checksum, total));
      }
    }
    return Status();
  }

  Container& container_;
  const CheckOptions& options_;
  const std::function<void(const StoreFault&)>& visit_;
  CheckReport report_;
  Superblock superblock_{};
  StoreLayout layout_;
  Geometry geometry_;
  base::AlignedBuffer table_;
  size_t at_subgroup_ = 0;
  size_t at_plane_ = 0;
  uint64_t at_block_ = 0;
  std::vector<Piece> pieces_;
  TransferQueue queue_;
};

}  // namespace

std::string_view fault_kind_name(FaultKind kind) {
  switch (kind) {
    case FaultKind::kContainer:
      return "container";
    case FaultKind::kSuperblock:
      return "superblock";
    case FaultKind::kLayout:
      return "layout";
    case FaultKind::kTable:
      return "table";
    case FaultKind::kBlock:
      return "block";
    case FaultKind::kUnreadable:
      return "unreadable";
  }
  return "?";
}

Result<CheckReport> check_container(Container container, const CheckOptions& options,
                                    const std::function<void(const StoreFault&)>& visit) {
  return Checker(container, options, visit).run();
}

Result<CheckReport> check_store(const std::string& path, const CheckOptions& options,
                                const std::function<void(const StoreFault&)>& visit) {
  StoreOptions store_options;
  store_options.ring = options.ring;
  store_options.io_depth = options.io_depth;
  store_options.read_only = !options.repair;
  SI_ASSIGN_OR_RETURN(Container container, open_container(path, store_options));
  return check_container(std::move(container), options, visit);
}

}  // namespace smartinf::storage
