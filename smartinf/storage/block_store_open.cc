// BlockStore: how one is made, and how one is opened.
#include <array>
#include <cstring>
#include <ctime>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/block_store.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;
using base::StepNumber;

Result<std::unique_ptr<BlockStore>> BlockStore::create(Container container,
                                                       const StoreLayout& layout,
                                                       const StoreOptions& options) {
  const uint32_t slots = options.durability == Durability::kStep ? 2 : 1;
  SI_ASSIGN_OR_RETURN(Geometry geometry, Geometry::make(layout, slots));
  if (container.size_bytes < geometry.container_bytes()) {
    return Status(ErrorCode::kNoSpace, "the container is smaller than its contents", {},
                  base::ErrorPlace{container.file_path, {}, container.size_bytes, 0});
  }
  std::unique_ptr<BlockStore> store(
      new BlockStore(std::move(container), options, layout, std::move(geometry)));
  SI_RETURN_IF_ERROR(store->allocate());
  SI_RETURN_IF_ERROR(store->format_container());
  return store;
}

Status BlockStore::format_container() {
  const std::vector<std::byte> layout = encode_layout(layout_);
  SI_CHECK(layout.size() == geometry_.layout_bytes(), "layout and geometry disagree");
  LayoutHeader header;
  std::memcpy(&header, layout.data(), sizeof(header));

  superblock().magic = kSuperblockMagic;
  superblock().version = kFormatVersion;
  superblock().readable_since = readable_since(layout_.format);
  superblock().phase = Phase::kCreating;
  superblock().run = layout_.run.bytes;
  superblock().device_index = layout_.device_index;
  superblock().device_count = layout_.device_count;
  superblock().slots = geometry_.slots();
  superblock().container_bytes = geometry_.container_bytes();
  superblock().layout_bytes = layout.size();
  superblock().layout_checksum = header.checksum;
  superblock().created_seconds = static_cast<uint64_t>(std::time(nullptr));
  superblock().copied_step = layout_.copied_step;

  // The superblock first: on a block device it says whose leftovers the rest is.
  SI_RETURN_IF_ERROR(superblocks_.write(true));
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer padded,
                      base::AlignedBuffer::allocate(layout.size()));
  std::memcpy(padded.data(), layout.data(), layout.size());
  std::array<Transfer, kLayoutCopies> copies;
  for (uint32_t copy = 0; copy < kLayoutCopies; ++copy) {
    copies[copy] = metadata_transfer(IoOp::kWrite, geometry_.layout_offset(copy), padded.bytes());
  }
  SI_RETURN_IF_ERROR(pump_.write_metadata(copies));
  SI_RETURN_IF_ERROR(superblocks_.sync());
  SI_RETURN_IF_ERROR(superblocks_.write(true));  // the other pair of copies
  if (container_.publish) SI_RETURN_IF_ERROR(container_.publish());
  phase_ = StepPhase::kIdle;
  begin_step(0);
  return Status();
}

namespace {

constexpr std::string_view kRestore = "Run smartinf fsck; restore the device from a checkpoint.";

/// Reads what a container says of itself, before there is a store.
class Opening {
 public:
  Opening(Container& container, const StoreOptions& options)
      : file_path_(container.file_path),
        size_bytes_(container.size_bytes),
        queue_(std::move(container.ring), container.file, container.file_path, container.direct,
               options.watchdog) {}

  /// The newest superblock that can be used.
  Result<Superblock> superblock();
  /// The layout that the container was made with. Errors: kFailedPrecondition, its creation was
  /// interrupted.
  Result<StoreLayout> layout(const Superblock& superblock);
  /// Errors: kCorrupt, layout and superblock do not belong together.
  Result<Geometry> geometry(const Superblock& superblock, const StoreLayout& layout) const;

  std::unique_ptr<Ring> release_ring() { return queue_.release_ring(); }

 private:
  Status read(uint64_t offset, base::AlignedBuffer& into) {
    return queue_.run(IoOp::kRead, offset, into.bytes(), into);
  }
  base::ErrorPlace at(uint64_t offset, uint64_t length) const {
    return base::ErrorPlace{file_path_, offset, length, 0};
  }

  std::string file_path_;
  uint64_t size_bytes_;
  TransferQueue queue_;  // of its own until the layout is known; the ring goes on to the store
};

Result<Superblock> Opening::superblock() {
  if (size_bytes_ < kSuperblockAreaBytes) {
    return Status(ErrorCode::kCorrupt, "the container is cut short", std::string(kRestore),
                  at(0, size_bytes_));
  }
  SI_ASSIGN_OR_RETURN(base::AlignedBuffer area,
                      base::AlignedBuffer::allocate(kSuperblockAreaBytes));
  SI_RETURN_IF_ERROR(read(0, area));
  uint32_t bad = 0;
  Result<Superblock> chosen = choose_superblock(area.bytes(), &bad);
  if (!chosen.ok()) {
    const ErrorCode code = chosen.status().code();
    return Status(code == ErrorCode::kMismatch ? code : ErrorCode::kCorrupt,
                  "no copy of the superblock can be used: " + chosen.status().what(),
                  code == ErrorCode::kMismatch ? chosen.status().advice() : std::string(kRestore),
                  at(0, kSuperblockAreaBytes));
  }
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    if ((bad >> copy & 1u) == 0) continue;
    base::log(base::LogLevel::kWarning,
              fmt::format("{}: superblock copy {} at offset {} is damaged; another copy is used, "
                          "and the next steps overwrite this one",
                          file_path_, copy, superblock_offset(copy)));
  }
  if (chosen->container_bytes > size_bytes_) {
    return Status(ErrorCode::kCorrupt,
                  fmt::format("the container has {} bytes instead of {}", size_bytes_,
                              chosen->container_bytes),
                  std::string(kRestore), at(0, size_bytes_));
  }
  return chosen;
}

Result<StoreLayout> Opening::layout(const Superblock& superblock) {
  SI_ASSIGN_OR_RETURN(
      base::AlignedBuffer record,
      base::AlignedBuffer::allocate(base::round_up(superblock.layout_bytes, base::kIoAlignment)));
  Result<StoreLayout> parsed = Status(ErrorCode::kCorrupt, "the layout record cannot be used");
  for (uint32_t copy = 0; copy < kLayoutCopies; ++copy) {
    const uint64_t offset = kSuperblockAreaBytes + copy * record.size();
    const Status status = read(offset, record);
    if (queue_.failed()) return status;
    parsed = status.ok() ? parse_layout(record.bytes(), superblock) : Result<StoreLayout>(status);
    if (parsed.ok()) return parsed;
    if (superblock.phase == Phase::kCreating) continue;
    base::log(base::LogLevel::kWarning,
              fmt::format("{}: layout copy {} at offset {} cannot be used: {}", file_path_, copy,
                          offset, parsed.status().what()));
  }
  if (superblock.phase == Phase::kCreating) {
    return Status(ErrorCode::kFailedPrecondition, "the device's creation was interrupted",
                  "Start the run again: the creation starts over.", at(0, 0));
  }
  return Status(ErrorCode::kCorrupt, parsed.status().what(), std::string(kRestore),
                at(kSuperblockAreaBytes, kLayoutCopies * record.size()));
}

Result<Geometry> Opening::geometry(const Superblock& superblock, const StoreLayout& layout) const {
  Result<Geometry> made = Geometry::make(layout, superblock.slots);
  if (made.ok() && made->container_bytes() == superblock.container_bytes) return made;
  return Status(
      ErrorCode::kCorrupt, "the layout record contradicts the superblock", std::string(kRestore),
      at(kSuperblockAreaBytes, base::round_up(superblock.layout_bytes, base::kIoAlignment)));
}

}  // namespace

Result<std::unique_ptr<BlockStore>> BlockStore::open(Container container,
                                                     const StoreOptions& options) {
  Opening opening(container, options);
  SI_ASSIGN_OR_RETURN(const Superblock superblock, opening.superblock());
  SI_ASSIGN_OR_RETURN(StoreLayout layout, opening.layout(superblock));
  SI_ASSIGN_OR_RETURN(Geometry geometry, opening.geometry(superblock, layout));
  container.ring = opening.release_ring();

  StoreOptions kept = options;
  // The container's own durability decides: its slots cannot be changed.
  const Durability made_with = superblock.slots == 1 ? Durability::kNone : Durability::kStep;
  if (kept.durability != made_with) {
    base::log(base::LogLevel::kInfo,
              fmt::format("{}: it was made with durability \"{}\", which cannot be changed",
                          container.file_path, made_with == Durability::kNone ? "none" : "step"));
    kept.durability = made_with;
  }
  std::unique_ptr<BlockStore> store(new BlockStore(std::move(container), std::move(kept),
                                                   std::move(layout), std::move(geometry)));
  SI_RETURN_IF_ERROR(store->allocate());
  store->superblocks_.set_found(superblock);
  return store;
}

}  // namespace smartinf::storage
