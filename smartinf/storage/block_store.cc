#include "smartinf/storage/block_store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <ctime>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using base::StepNumber;

/// How long one look at the ring waits while a step's metadata is on its way.
constexpr std::chrono::milliseconds kMetadataWait{100};

bool is_write(const SubgroupIo& io) {
  return io.op == SubgroupIo::Op::kWrite || io.op == SubgroupIo::Op::kWriteGradient ||
         io.op == SubgroupIo::Op::kFlush;
}
bool is_gradient(const SubgroupIo& io) {
  return io.op == SubgroupIo::Op::kReadGradient || io.op == SubgroupIo::Op::kWriteGradient;
}

Transfer metadata_transfer(IoOp op, uint64_t offset_bytes, std::span<std::byte> buffer) {
  Transfer transfer;
  transfer.op = op;
  transfer.offset_bytes = offset_bytes;
  transfer.buffer = buffer;
  transfer.kind = base::TrafficKind::kMetadata;
  return transfer;
}

}  // namespace

void BlockStore::IoList::push(SubgroupIo* io) {
  io->next = nullptr;
  (first == nullptr ? first : last->next) = io;
  last = io;
}

SubgroupIo* BlockStore::IoList::pop() {
  SubgroupIo* io = first;
  if (io != nullptr) {
    first = io->next;
    io->next = nullptr;
  }
  return io;
}

BlockStore::BlockStore(Container container, StoreOptions options, StoreLayout layout,
                       Geometry geometry)
    : container_(std::move(container)),
      options_(std::move(options)),
      layout_(std::move(layout)),
      geometry_(std::move(geometry)),
      ring_name_(container_.ring->name()),
      device_seed_(device_seed(layout_.run, layout_.device_index)) {
  queue_ =
      std::make_unique<TransferQueue>(std::move(container_.ring), container_.file,
                                      container_.file_path, container_.direct, options_.watchdog);
}

BlockStore::~BlockStore() {
  // Before buffers and descriptors go.
  if (queue_->close().ok()) return;
  leak_in_flight(std::move(queue_));
  leak_in_flight(std::move(pieces_));
  leak_in_flight(std::move(metadata_));
  leak_in_flight(std::move(tables_));
  leak_in_flight(std::move(superblock_io_));
}

Status BlockStore::allocate() {
  if (options_.io_depth == 0 || options_.io_bytes < base::kIoAlignment ||
      options_.io_bytes % base::kIoAlignment != 0) {
    return Status(ErrorCode::kInvalidArgument,
                  "io_depth must be at least 1 and io_bytes a multiple of 4096");
  }
  // Metadata takes up to four transfers and finds room beside the pieces.
  if (queue_->depth() < 6) {
    return Status(ErrorCode::kInvalidArgument, "a store needs a ring of depth 6 or more");
  }
  options_.io_depth = std::min(options_.io_depth, (queue_->depth() - 4) / 2);
  SI_ASSIGN_OR_RETURN(tables_,
                      base::AlignedBuffer::allocate(kTablePlaces * geometry_.table_bytes_max()));
  SI_ASSIGN_OR_RETURN(superblock_io_,
                      base::AlignedBuffer::allocate(kSuperblockCopies * kSuperblockBytes));
  pieces_ = std::vector<Piece>(size_t{2} * options_.io_depth);
  for (Piece& piece : pieces_) {
    piece.transfer.owner = &piece;
    piece.next_free = free_piece_;
    free_piece_ = &piece;
  }
  uint64_t blocks = 0;
  for (size_t subgroup = 0; subgroup < geometry_.subgroups(); ++subgroup) {
    for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
      sealed_first_.push_back(blocks);
      blocks += geometry_.blocks(subgroup);
    }
  }
  sealed_.resize(blocks);
  held_.resize(sealed_first_.size());
  return Status();
}

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

  superblock_.magic = kSuperblockMagic;
  superblock_.version = kFormatVersion;
  superblock_.readable_since = readable_since(layout_.format);
  superblock_.phase = Phase::kCreating;
  superblock_.run = layout_.run.bytes;
  superblock_.device_index = layout_.device_index;
  superblock_.device_count = layout_.device_count;
  superblock_.slots = geometry_.slots();
  superblock_.container_bytes = geometry_.container_bytes();
  superblock_.layout_bytes = layout.size();
  superblock_.layout_checksum = header.checksum;
  superblock_.created_seconds = static_cast<uint64_t>(std::time(nullptr));
  superblock_.copied_step = layout_.copied_step;

  // The superblock first: on a block device it says whose leftovers the rest is.
  SI_RETURN_IF_ERROR(write_superblock(true));
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer padded,
                      base::AlignedBuffer::allocate(layout.size()));
  std::memcpy(padded.data(), layout.data(), layout.size());
  std::array<Transfer, kLayoutCopies> copies;
  for (uint32_t copy = 0; copy < kLayoutCopies; ++copy) {
    copies[copy] = metadata_transfer(IoOp::kWrite, geometry_.layout_offset(copy), padded.bytes());
  }
  SI_RETURN_IF_ERROR(write_metadata(copies));
  SI_RETURN_IF_ERROR(sync_container());
  SI_RETURN_IF_ERROR(write_superblock(true));  // the other pair of copies
  if (container_.publish) SI_RETURN_IF_ERROR(container_.publish());
  phase_ = StepPhase::kIdle;
  begin_step(0);
  return Status();
}

Result<std::unique_ptr<BlockStore>> BlockStore::open(Container container,
                                                     const StoreOptions& options) {
  const std::string file_path = container.file_path;
  const auto at = [&](uint64_t offset, uint64_t length) {
    return base::ErrorPlace{file_path, offset, length, 0};
  };
  const std::string_view restore = "Run smartinf fsck; restore the device from a checkpoint.";
  Superblock superblock{};
  StoreLayout layout;
  Geometry geometry;
  {
    // A queue of its own until the layout is known; the ring goes on to the store.
    TransferQueue queue(std::move(container.ring), container.file, file_path, container.direct,
                        options.watchdog);
    const auto read = [&](uint64_t offset, base::AlignedBuffer& into) {
      return queue.run(IoOp::kRead, offset, into.bytes(), into);
    };
    if (container.size_bytes < kSuperblockAreaBytes) {
      return Status(ErrorCode::kCorrupt, "the container is cut short", std::string(restore),
                    at(0, container.size_bytes));
    }
    SI_ASSIGN_OR_RETURN(base::AlignedBuffer area,
                        base::AlignedBuffer::allocate(kSuperblockAreaBytes));
    SI_RETURN_IF_ERROR(read(0, area));
    uint32_t bad = 0;
    Result<Superblock> chosen = choose_superblock(area.bytes(), &bad);
    if (!chosen.ok()) {
      const ErrorCode code = chosen.status().code();
      return Status(code == ErrorCode::kMismatch ? code : ErrorCode::kCorrupt,
                    "no superblock can be used: " + chosen.status().what(),
                    code == ErrorCode::kMismatch ? chosen.status().advice() : std::string(restore),
                    at(0, kSuperblockAreaBytes));
    }
    superblock = *chosen;
    for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
      if ((bad >> copy & 1u) == 0) continue;
      base::log(
          base::LogLevel::kWarning,
          fmt::format("{}: superblock copy {} at offset {} is damaged; another one is used, and "
                      "the next steps replace it",
                      file_path, copy, superblock_offset(copy)));
    }
    if (superblock.container_bytes > container.size_bytes) {
      return Status(ErrorCode::kCorrupt,
                    fmt::format("the container has {} bytes where {} belong", container.size_bytes,
                                superblock.container_bytes),
                    std::string(restore), at(0, container.size_bytes));
    }
    SI_ASSIGN_OR_RETURN(
        base::AlignedBuffer record,
        base::AlignedBuffer::allocate(base::round_up(superblock.layout_bytes, base::kIoAlignment)));
    Result<StoreLayout> parsed = Status(ErrorCode::kCorrupt, "no layout record");
    for (uint32_t copy = 0; copy < kLayoutCopies && !parsed.ok(); ++copy) {
      const uint64_t offset = kSuperblockAreaBytes + copy * record.size();
      const Status status = read(offset, record);
      if (queue.failed()) return status;
      parsed = status.ok() ? parse_layout(record.bytes(), superblock) : Result<StoreLayout>(status);
      if (parsed.ok()) break;
      if (superblock.phase == Phase::kCreating) continue;
      base::log(base::LogLevel::kWarning,
                fmt::format("{}: layout copy {} at offset {} cannot be used: {}", file_path, copy,
                            offset, parsed.status().what()));
    }
    if (!parsed.ok()) {
      if (superblock.phase == Phase::kCreating) {
        return Status(ErrorCode::kFailedPrecondition, "the device's creation was interrupted",
                      "Start the run again: it starts over.", at(0, 0));
      }
      return Status(ErrorCode::kCorrupt, parsed.status().what(), std::string(restore),
                    at(kSuperblockAreaBytes, kLayoutCopies * record.size()));
    }
    layout = std::move(*parsed);
    Result<Geometry> made = Geometry::make(layout, superblock.slots);
    if (!made.ok() || made->container_bytes() != superblock.container_bytes) {
      return Status(ErrorCode::kCorrupt, "the layout record contradicts the superblock",
                    std::string(restore), at(kSuperblockAreaBytes, record.size()));
    }
    geometry = std::move(*made);
    container.ring = queue.release_ring();
  }
  StoreOptions kept = options;
  // What the container was made with decides: its slots cannot be changed.
  const Durability made_with = superblock.slots == 1 ? Durability::kNone : Durability::kStep;
  if (kept.durability != made_with) {
    base::log(base::LogLevel::kInfo,
              fmt::format("{}: made with durability \"{}\", which stays", file_path,
                          made_with == Durability::kNone ? "none" : "step"));
    kept.durability = made_with;
  }
  std::unique_ptr<BlockStore> store(new BlockStore(std::move(container), std::move(kept),
                                                   std::move(layout), std::move(geometry)));
  SI_RETURN_IF_ERROR(store->allocate());
  store->superblock_ = superblock;
  store->written_before_ = superblock.bytes_written_ever;
  return store;
}

StoreState BlockStore::state() const {
  StoreState state;
  state.run = layout_.run;
  state.device_index = layout_.device_index;
  state.device_count = layout_.device_count;
  state.committed_step = superblock_.committed_step;
  state.prepared_step = superblock_.prepared_step;
  state.torn = phase_ == StepPhase::kUnrecovered && superblock_.in_place_step != 0;
  state.initialized = superblock_.phase != Phase::kCreating && !state.torn;
  state.complete = superblock_.phase == Phase::kComplete;
  state.copied_step = superblock_.copied_step;
  return state;
}

std::span<std::byte> BlockStore::table(StepNumber step) const {
  return tables_.bytes().subspan(step % kTablePlaces * geometry_.table_bytes_max(),
                                 geometry_.table_bytes_max());
}

PlaneRecord BlockStore::record(StepNumber step, size_t subgroup, size_t plane) const {
  PlaneRecord found;
  std::memcpy(&found, table(step).data() + geometry_.record_offset(subgroup, plane), sizeof(found));
  return found;
}

void BlockStore::set_record(StepNumber step, size_t subgroup, size_t plane,
                            const PlaneRecord& record) {
  std::memcpy(table(step).data() + geometry_.record_offset(subgroup, plane), &record,
              sizeof(record));
}

uint64_t* BlockStore::checksums(StepNumber step, size_t subgroup, size_t plane) const {
  // Records are multiples of 8 bytes on an aligned image.
  return reinterpret_cast<uint64_t*>(table(step).data() + geometry_.record_offset(subgroup, plane) +
                                     sizeof(PlaneRecord));
}

std::string BlockStore::client_metadata() const {
  if (phase_ == StepPhase::kUnrecovered || superblock_.phase != Phase::kComplete) return {};
  const std::span<std::byte> image = table(superblock_.committed_step);
  TableHeader header;
  std::memcpy(&header, image.data(), sizeof(header));
  return std::string(reinterpret_cast<const char*>(image.data() + geometry_.table_records_bytes()),
                     header.client_metadata_bytes);
}

Status BlockStore::read_table(StepNumber step, uint64_t bytes, uint64_t expected_checksum) {
  const std::span<std::byte> image = table(step);
  const uint64_t length = base::round_up(bytes, base::kIoAlignment);
  Status last(ErrorCode::kCorrupt, "the superblock gives the table an impossible length");
  if (length > image.size() || bytes < geometry_.table_records_bytes()) return last;
  const uint64_t seed = table_seed(layout_.run, layout_.device_index, step);
  for (uint32_t copy = 0; copy < kTableCopies; ++copy) {
    std::array<Transfer, 1> read{
        metadata_transfer(IoOp::kRead, geometry_.table_offset(step, copy), image.first(length))};
    last = move_metadata(read);
    if (last.ok()) {
      traffic_.add_up(base::TrafficKind::kMetadata, length);
      last = check_table(image.first(length), geometry_, seed, step);
    }
    if (last.ok()) {
      TableHeader header;
      std::memcpy(&header, image.data(), sizeof(header));
      if (header.checksum == expected_checksum) return Status();
      last = Status(ErrorCode::kCorrupt, "the table belongs to another attempt at this step");
    }
    base::log(base::LogLevel::kWarning,
              fmt::format("{}: copy {} of the table of step {} at offset {} cannot be used: {}",
                          container_.file_path, copy, step, geometry_.table_offset(step, copy),
                          last.what()));
  }
  return Status(last.code(), fmt::format("no table of step {} can be used: {}", step, last.what()),
                "Run smartinf fsck; restore the device from a checkpoint.",
                base::ErrorPlace{container_.file_path, geometry_.table_offset(step, 0),
                                 length * kTableCopies, 0});
}

Status BlockStore::recover_to(StepNumber step) {
  SI_CHECK(phase_ == StepPhase::kUnrecovered, "recover_to comes once, after open");
  if (!state().initialized) {
    return Status(ErrorCode::kFailedPrecondition,
                  superblock_.in_place_step != 0 ? std::string(kTornState)
                                                 : "the device's creation was interrupted",
                  "Delete the device's state and start over, or restore a checkpoint.",
                  base::ErrorPlace{container_.file_path, {}, {}, 0});
  }
  const bool to_prepared = step == superblock_.prepared_step;
  if (!to_prepared && step != superblock_.committed_step) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("the device holds steps {} and {}, not {}",
                              superblock_.committed_step, superblock_.prepared_step, step),
                  {}, base::ErrorPlace{container_.file_path, {}, {}, 0});
  }
  const uint64_t bytes =
      to_prepared ? superblock_.prepared_table_bytes : superblock_.committed_table_bytes;
  const uint64_t checksum =
      to_prepared ? superblock_.prepared_table_checksum : superblock_.committed_table_checksum;
  SI_RETURN_IF_ERROR(read_table(step, bytes, checksum));

  // What was found may only be in a cache: whoever wrote it died before syncing. After this it is
  // on the medium, and the pair it came from is the one to spare.
  written_pair_ = superblock_.copy % kSuperblockPairs;
  if (!options_.read_only) SI_RETURN_IF_ERROR(sync_container());
  const bool changed = superblock_.committed_step != step || superblock_.prepared_step != step ||
                       superblock_.phase != Phase::kComplete;
  superblock_.committed_step = superblock_.prepared_step = step;
  superblock_.committed_table_bytes = superblock_.prepared_table_bytes = bytes;
  superblock_.committed_table_checksum = superblock_.prepared_table_checksum = checksum;
  superblock_.phase = Phase::kComplete;
  // Who only reads goes by the decision, and leaves it to the next writer to make it durable.
  if (changed && !options_.read_only) {
    SI_RETURN_IF_ERROR(check_newest());
    SI_RETURN_IF_ERROR(write_superblock(true));
  }
  phase_ = StepPhase::kIdle;
  return Status();
}

uint64_t BlockStore::extent_bytes(base::SubgroupId subgroup) const {
  return geometry_.extent_bytes(geometry_.index_of(subgroup));
}
uint64_t BlockStore::plane_offset(base::SubgroupId subgroup, size_t plane) const {
  return geometry_.plane_offset(geometry_.index_of(subgroup), plane);
}
uint64_t BlockStore::plane_bytes(base::SubgroupId subgroup, size_t plane) const {
  return geometry_.plane_bytes(geometry_.index_of(subgroup), plane);
}
uint64_t BlockStore::gradient_bytes(base::SubgroupId subgroup) const {
  return geometry_.gradient_bytes(geometry_.index_of(subgroup));
}

Status BlockStore::register_memory(std::span<std::byte> memory) {
  SI_CHECK(queue_->in_flight() == 0, "register_memory while transfers are in flight");
  return queue_->ring().register_memory(memory);
}

void BlockStore::begin_step(StepNumber step) {
  const bool fresh = superblock_.phase == Phase::kCreating;
  // create() begins step 0; until something is written a copy may ask for the step it is of.
  const bool begun = phase_ == StepPhase::kWriting && (step == step_ || (fresh && !step_written_));
  SI_CHECK(phase_ == StepPhase::kIdle || begun,
           "begin_step while another step is in progress, or before recover_to");
  SI_CHECK(fresh || step == superblock_.committed_step + 1, "steps follow each other");
  if (phase_ == StepPhase::kWriting && step_written_) return;
  phase_ = StepPhase::kWriting;
  step_ = step;
  step_written_ = false;
  step_failure_ = Status();
  std::fill(sealed_.begin(), sealed_.end(), uint8_t{0});
  begin_table(step);
}

void BlockStore::begin_table(StepNumber step) {
  const std::span<std::byte> image = table(step);
  if (superblock_.phase == Phase::kCreating) {
    std::fill(image.begin(), image.end(), std::byte{0});
    for (size_t subgroup = 0; subgroup < geometry_.subgroups(); ++subgroup) {
      for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
        PlaneRecord empty{};
        empty.blocks = static_cast<uint32_t>(geometry_.blocks(subgroup));
        set_record(step, subgroup, plane, empty);
      }
    }
    return;
  }
  const std::span<std::byte> current = table(superblock_.committed_step);
  std::memcpy(image.data(), current.data(), geometry_.table_records_bytes());
}

Status BlockStore::begin_writing() {
  SI_CHECK(phase_ == StepPhase::kWriting, "a write before begin_step");
  if (step_written_) return Status();
  step_written_ = true;
  if (durable() || superblock_.phase == Phase::kCreating) return Status();
  // From here on the old state is being overwritten; after a crash it must not be taken for one.
  superblock_.in_place_step = step_;
  Status written = write_superblock(false);
  if (!written.ok()) step_failure_ = written;
  return written;
}

Status BlockStore::hold(base::SubgroupId id, uint32_t plane_mask) {
  SI_CHECK(!durable(), "planes held in memory are of no durable step");
  SI_CHECK(superblock_.phase != Phase::kCreating, "a store's first step is on the drive");
  SI_RETURN_IF_ERROR(begin_writing());
  note_written_planes(geometry_.index_of(id), plane_mask, true);
  return Status();
}

Status BlockStore::finish_flush() {
  SI_CHECK(phase_ == StepPhase::kIdle && writes_open_ == 0, "a flush within a step");
  SI_CHECK(held_count_ == 0, "planes that are held were not flushed");
  if (superblock_.in_place_step == 0) return Status();
  const StepNumber before = std::exchange(superblock_.in_place_step, 0);
  Status written = write_superblock(false);
  if (!written.ok()) superblock_.in_place_step = before;
  return written;
}

void BlockStore::forget_held(size_t subgroup, uint32_t plane_mask) {
  for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
    if ((plane_mask >> plane & 1u) == 0) continue;
    held_count_ -= std::exchange(held_[subgroup * geometry_.planes() + plane], uint8_t{0});
  }
}

void BlockStore::note_written_planes(size_t subgroup, uint32_t plane_mask, bool held) {
  const bool fresh = superblock_.phase == Phase::kCreating;
  forget_held(subgroup, plane_mask);
  for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
    if ((plane_mask >> plane & 1u) == 0) continue;
    if (held) {
      held_[subgroup * geometry_.planes() + plane] = 1;
      ++held_count_;
    }
    PlaneRecord written = record(step_, subgroup, plane);
    const uint32_t current = fresh ? 0 : record(superblock_.committed_step, subgroup, plane).slot;
    written.step = step_;
    written.slot = static_cast<uint8_t>(fresh ? 0 : shadow_slot(current));
    written.flags = options_.checksums ? kPlaneWritten | kPlaneSealed : kPlaneWritten;
    set_record(step_, subgroup, plane, written);
  }
}

void BlockStore::start(SubgroupIo& io) {
  const size_t subgroup = geometry_.index_of(io.subgroup);
  SI_CHECK(reinterpret_cast<uintptr_t>(io.buffer.data()) % base::kIoAlignment == 0,
           "a transfer's buffer must be aligned to kIoAlignment");
  uint64_t needed_bytes = geometry_.gradient_bytes(subgroup);
  if (!is_gradient(io)) {
    const uint32_t last = std::bit_width(io.plane_mask);
    needed_bytes = geometry_.plane_offset(subgroup, std::min<size_t>(last, geometry_.planes()));
  }
  SI_CHECK(io.buffer.size() >= needed_bytes, "a transfer's buffer is smaller than its planes");
  io.status = Status();
  io.next_offset_bytes = 0;
  io.transfers_in_flight = 0;
  io.all_started = false;
  if (io.op == SubgroupIo::Op::kWrite && phase_ != StepPhase::kWriteBenchmark) {
    io.status = begin_writing();
    note_written_planes(subgroup, io.plane_mask, false);
  } else if (io.op == SubgroupIo::Op::kFlush) {
    SI_CHECK(phase_ == StepPhase::kIdle && !durable(), "a flush within a step");
  } else if (io.op == SubgroupIo::Op::kRead) {
    SI_CHECK(phase_ != StepPhase::kUnrecovered && superblock_.phase != Phase::kCreating,
             "a read before there is a committed step");
  }
  if (is_write(io)) {
    ++writes_open_;
    waiting_writes_.push(&io);
  } else {
    ++reads_open_;
    waiting_reads_.push(&io);
  }
  pump();
}

BlockStore::Span BlockStore::next_span(SubgroupIo& io) const {
  const size_t subgroup = geometry_.index_of(io.subgroup);
  Span span;
  if (is_gradient(io)) {
    span.buffer_offset = io.next_offset_bytes;
    span.offset_bytes = geometry_.gradient_offset(subgroup) + io.next_offset_bytes;
    span.length =
        std::min(options_.io_bytes, geometry_.gradient_bytes(subgroup) - io.next_offset_bytes);
    io.next_offset_bytes += span.length;
    return span;
  }
  // Planes follow each other in an extent: those that take part and lie in the same slot go
  // together.
  const bool write = io.op == SubgroupIo::Op::kWrite;
  const bool write_benchmark = write && phase_ == StepPhase::kWriteBenchmark;
  const StepNumber step = write && !write_benchmark ? step_ : superblock_.committed_step;
  uint32_t slot = 0;
  for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
    const uint64_t begin = geometry_.plane_offset(subgroup, plane);
    const uint64_t end = geometry_.plane_offset(subgroup, plane + 1);
    if (end <= io.next_offset_bytes) continue;
    const bool wanted = (io.plane_mask >> plane & 1u) != 0;
    uint32_t plane_slot = wanted ? record(step, subgroup, plane).slot : 0;
    if (write_benchmark) plane_slot = shadow_slot(plane_slot);
    if (span.length == 0) {
      if (!wanted) {
        io.next_offset_bytes = end;
        continue;
      }
      slot = plane_slot;
      span.buffer_offset = std::max(begin, io.next_offset_bytes);
    } else if (!wanted || plane_slot != slot) {
      break;
    }
    span.length = end - span.buffer_offset;
    if (span.length >= options_.io_bytes) {
      span.length = options_.io_bytes;
      break;
    }
  }
  span.offset_bytes = geometry_.extent_offset(subgroup, slot) + span.buffer_offset;
  if (span.length > 0) io.next_offset_bytes = span.buffer_offset + span.length;
  return span;
}

void BlockStore::start_pieces(IoList& list, bool write) {
  while (list.first != nullptr && pieces_in_flight_[write] < options_.io_depth) {
    SubgroupIo& io = *list.first;
    const Span span = io.status.ok() ? next_span(io) : Span{};
    if (span.length == 0) {
      (void)list.pop();
      io.all_started = true;
      finish_if_done(io);
      continue;
    }
    Piece& piece = *free_piece_;
    free_piece_ = piece.next_free;
    piece.io = &io;
    piece.write = write;
    piece.transfer.op = write ? IoOp::kWrite : IoOp::kRead;
    piece.transfer.offset_bytes = span.offset_bytes;
    piece.transfer.buffer = io.buffer.subspan(span.buffer_offset, span.length);
    piece.transfer.kind =
        is_gradient(io) ? base::TrafficKind::kGradient : base::TrafficKind::kState;
    ++io.transfers_in_flight;
    ++pieces_in_flight_[write];
    queue_->start(piece.transfer);
  }
}

void BlockStore::pump() {
  if (!ring_failure_.ok()) return;
  start_pieces(waiting_reads_, false);
  start_pieces(waiting_writes_, true);
  // Reported by the next poll or prepare: start() has no way to.
  if (Status status = queue_->submit(); !status.ok()) ring_failure_ = std::move(status);
}

void BlockStore::finish_piece(Piece& piece) {
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

void BlockStore::finish_if_done(SubgroupIo& io) {
  if (!io.all_started || io.transfers_in_flight > 0) return;
  if (is_write(io)) {
    --writes_open_;
    if (io.op == SubgroupIo::Op::kFlush) {
      if (io.status.ok()) forget_held(geometry_.index_of(io.subgroup), io.plane_mask);
    } else if (!io.status.ok() && step_failure_.ok()) {
      step_failure_ = io.status;
    }
  } else {
    --reads_open_;
  }
  finished_.push(&io);
}

Status BlockStore::step_queue(std::chrono::nanoseconds wait) {
  pump();
  if (!ring_failure_.ok()) return ring_failure_;
  std::array<Transfer*, 32> done{};
  const Result<size_t> count = queue_->finish(done, wait);
  if (!count.ok()) {
    // What is in flight may never come back: nothing that it uses can be used again.
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

Result<size_t> BlockStore::poll(std::span<SubgroupIo*> done, std::chrono::nanoseconds wait) {
  const uint64_t start_ns = base::now_ns();
  if (reads_open_ + writes_open_ > 0) SI_RETURN_IF_ERROR(step_queue(std::chrono::nanoseconds(0)));
  while (finished_.first == nullptr && reads_open_ + writes_open_ > 0) {
    const auto spent = std::chrono::nanoseconds(base::now_ns() - start_ns);
    if (spent >= wait) break;
    SI_RETURN_IF_ERROR(step_queue(wait - spent));
  }
  size_t count = 0;
  while (count < done.size() && finished_.first != nullptr) done[count++] = finished_.pop();
  return count;
}

Status BlockStore::drain(bool writes_only) {
  while (writes_open_ > 0 || (!writes_only && reads_open_ > 0)) {
    SI_RETURN_IF_ERROR(step_queue(kMetadataWait));
  }
  return Status();
}

Status BlockStore::move_metadata(std::span<const Transfer> transfers) {
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

Status BlockStore::write_metadata(std::span<const Transfer> transfers) {
  SI_RETURN_IF_ERROR(move_metadata(transfers));
  for (const Transfer& transfer : transfers) {
    traffic_.add_down(base::TrafficKind::kMetadata, transfer.buffer.size());
  }
  return Status();
}

Status BlockStore::sync_container() {
  const std::array<Transfer, 1> sync{metadata_transfer(IoOp::kSync, 0, {})};
  const Status synced = write_metadata(sync);
  // The last superblock that was written whole is on the medium now, however it was written. After
  // a failure it may be nowhere, and a later sync would not say so.
  if (synced.ok()) {
    durable_pair_ = written_pair_;
  } else {
    written_pair_ = durable_pair_;
  }
  return synced;
}

void BlockStore::begin_write_benchmark() {
  SI_CHECK(phase_ == StepPhase::kIdle, "a write benchmark while a step is in progress");
  phase_ = StepPhase::kWriteBenchmark;
}

Status BlockStore::end_write_benchmark() {
  SI_CHECK(phase_ == StepPhase::kWriteBenchmark, "no write benchmark to end");
  SI_RETURN_IF_ERROR(drain(true));
  if (durable()) SI_RETURN_IF_ERROR(sync_container());
  phase_ = StepPhase::kIdle;
  return Status();
}

Status BlockStore::write_superblock(bool durably) {
  // Never the pair that holds the last one known to be on the medium.
  const uint32_t pair = 1 - durable_pair_;
  ++superblock_.sequence;
  superblock_.bytes_written_ever = bytes_written_ever();
  std::array<Transfer, kSuperblockCopies / kSuperblockPairs> copies;
  for (uint32_t i = 0; i < copies.size(); ++i) {
    superblock_.copy = pair + i * kSuperblockPairs;
    seal_superblock(superblock_);
    const std::span<std::byte> image =
        superblock_io_.bytes().subspan(superblock_.copy * kSuperblockBytes, kSuperblockBytes);
    std::memcpy(image.data(), &superblock_, sizeof(superblock_));
    copies[i] = metadata_transfer(durably ? IoOp::kWriteDurable : IoOp::kWrite,
                                  superblock_offset(superblock_.copy), image);
  }
  SI_RETURN_IF_ERROR(write_metadata(copies));
  written_pair_ = pair;
  // Without durability nothing is synced: at least the pairs take turns.
  if (durably || !durable()) durable_pair_ = pair;
  return Status();
}

Status BlockStore::check_newest() {
  std::array<Transfer, kSuperblockCopies> reads;
  const std::span<std::byte> images = superblock_io_.bytes();
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    reads[copy] = metadata_transfer(IoOp::kRead, superblock_offset(copy),
                                    images.subspan(copy * kSuperblockBytes, kSuperblockBytes));
  }
  // A copy that cannot be read leaves what was written there last, which is not newer.
  if (!move_metadata(reads).ok() && !ring_failure_.ok()) return ring_failure_;
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    traffic_.add_up(base::TrafficKind::kMetadata, kSuperblockBytes);
    const Result<Superblock> found =
        parse_superblock(images.subspan(copy * kSuperblockBytes, kSuperblockBytes), copy);
    if (!found.ok() || found->sequence <= superblock_.sequence) continue;
    return Status(
        ErrorCode::kBusy,
        fmt::format("another process has written to the device since it was opened: its "
                    "state stands at step {}",
                    found->committed_step),
        "Stop all but one of the processes that use this device. Nothing of theirs was "
        "overwritten.",
        base::ErrorPlace{container_.file_path, superblock_offset(copy), kSuperblockBytes, 0});
  }
  return Status();
}

Status BlockStore::verify_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                                std::span<const std::byte> bytes) const {
  const size_t index = geometry_.index_of(subgroup);
  const StepNumber step = superblock_.committed_step;
  const PlaneRecord found = record(step, index, plane);
  SI_CHECK(bytes.size() == geometry_.block_bytes(index, plane, block), "a block of another size");
  if (!options_.checksums || (found.flags & kPlaneSealed) == 0) return Status();
  const BlockIdentity identity{subgroup.value, static_cast<uint32_t>(plane), block, found.slot,
                               found.step};
  if (block_checksum(bytes, device_seed_, identity) == checksums(step, index, plane)[block]) {
    return Status();
  }
  return Status(
      ErrorCode::kCorrupt,
      fmt::format("block {} of the {} plane of subgroup {} is not what step {} wrote", block,
                  base::plane_kind_name(layout_.planes[plane]), subgroup.value, found.step),
      "It was damaged on the drive or by the path to it. Run smartinf fsck to see what else is, "
      "and "
      "restore the last checkpoint.",
      base::ErrorPlace{container_.file_path,
                       geometry_.extent_offset(index, found.slot) +
                           geometry_.plane_offset(index, plane) +
                           geometry_.block_offset(plane, block),
                       bytes.size(), 0});
}

void BlockStore::seal_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                            std::span<const std::byte> bytes) {
  if (!options_.checksums) return;
  SI_CHECK(phase_ == StepPhase::kWriting, "a seal outside a step");
  const size_t index = geometry_.index_of(subgroup);
  SI_CHECK(bytes.size() == geometry_.block_bytes(index, plane, block), "a block of another size");
  const bool fresh = superblock_.phase == Phase::kCreating;
  const uint32_t slot =
      fresh ? 0 : shadow_slot(record(superblock_.committed_step, index, plane).slot);
  const BlockIdentity identity{subgroup.value, static_cast<uint32_t>(plane), block, slot, step_};
  checksums(step_, index, plane)[block] = block_checksum(bytes, device_seed_, identity);
  sealed_[sealed_first_[index * geometry_.planes() + plane] + block] = 1;
}

Status BlockStore::check_written(StepNumber step) const {
  for (size_t subgroup = 0; subgroup < geometry_.subgroups(); ++subgroup) {
    for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
      const PlaneRecord found = record(step, subgroup, plane);
      if ((found.flags & kPlaneWritten) == 0) {
        return Status(ErrorCode::kFailedPrecondition,
                      fmt::format("the {} plane of subgroup {} has not been written",
                                  base::plane_kind_name(layout_.planes[plane]),
                                  layout_.subgroups[subgroup].id.value));
      }
      if (found.step != step || (found.flags & kPlaneSealed) == 0 || !step_written_) continue;
      const auto first =
          sealed_.begin() +
          static_cast<std::ptrdiff_t>(sealed_first_[subgroup * geometry_.planes() + plane]);
      const auto last = first + static_cast<std::ptrdiff_t>(geometry_.blocks(subgroup));
      if (std::find(first, last, uint8_t{0}) != last) {
        return Status(ErrorCode::kFailedPrecondition,
                      fmt::format("the {} plane of subgroup {} was written but not sealed",
                                  base::plane_kind_name(layout_.planes[plane]),
                                  layout_.subgroups[subgroup].id.value));
      }
    }
  }
  return Status();
}

Status BlockStore::finish_table(StepNumber step, const std::string& client_metadata) {
  const std::span<std::byte> image = table(step);
  TableHeader header{};
  header.magic = kTableMagic;
  header.step = step;
  header.client_metadata_bytes = client_metadata.size();
  header.bytes = geometry_.table_records_bytes() + client_metadata.size();
  std::memcpy(image.data(), &header, sizeof(header));
  std::memcpy(image.data() + geometry_.table_records_bytes(), client_metadata.data(),
              client_metadata.size());
  const uint64_t length = base::round_up(header.bytes, base::kIoAlignment);
  std::fill(image.begin() + static_cast<std::ptrdiff_t>(header.bytes),
            image.begin() + static_cast<std::ptrdiff_t>(length), std::byte{0});
  header.checksum = base::checksum(image.subspan(16, header.bytes - 16),
                                   table_seed(layout_.run, layout_.device_index, step));
  std::memcpy(image.data(), &header, sizeof(header));
  superblock_.prepared_table_bytes = header.bytes;
  superblock_.prepared_table_checksum = header.checksum;

  std::array<Transfer, kTableCopies> copies;
  for (uint32_t copy = 0; copy < kTableCopies; ++copy) {
    copies[copy] =
        metadata_transfer(IoOp::kWrite, geometry_.table_offset(step, copy), image.first(length));
  }
  return write_metadata(copies);
}

Status BlockStore::prepare(StepNumber step, const std::string& client_metadata) {
  SI_CHECK(client_metadata.size() <= kClientMetadataBytesMax,
           "the client metadata is longer than kClientMetadataBytesMax");
  SI_CHECK(phase_ == StepPhase::kWriting && step == step_, "prepare of a step that was not begun");
  SI_RETURN_IF_ERROR(drain(true));
  if (!step_failure_.ok()) return step_failure_;
  SI_RETURN_IF_ERROR(check_written(step));
  SI_RETURN_IF_ERROR(check_newest());

  const Superblock before = superblock_;
  const auto attempt = [&]() -> Status {
    SI_RETURN_IF_ERROR(finish_table(step, client_metadata));
    // Planes and table are on the medium before a superblock speaks of them.
    if (durable()) SI_RETURN_IF_ERROR(sync_container());
    phase_ = StepPhase::kPreparing;
    superblock_.prepared_step = step;
    if (superblock_.phase == Phase::kCreating) {
      // The first state may be of a later step than 0; there is none before it.
      superblock_.phase = Phase::kPrepared;
      superblock_.committed_step = step;
    }
    return write_superblock(durable());
  };
  const Status status = attempt();
  if (status.ok()) {
    phase_ = StepPhase::kPrepared;
    return Status();
  }
  // What is said of the prepared step goes back; where the copies stand does not.
  superblock_.committed_step = before.committed_step;
  superblock_.prepared_step = before.prepared_step;
  superblock_.prepared_table_bytes = before.prepared_table_bytes;
  superblock_.prepared_table_checksum = before.prepared_table_checksum;
  superblock_.phase = before.phase;
  return status;
}

Status BlockStore::commit(StepNumber step) {
  SI_CHECK(phase_ == StepPhase::kPrepared && step == step_,
           "commit of a step that is not prepared");
  const bool first = superblock_.phase != Phase::kComplete;
  superblock_.committed_step = step;
  superblock_.committed_table_bytes = superblock_.prepared_table_bytes;
  superblock_.committed_table_checksum = superblock_.prepared_table_checksum;
  superblock_.phase = Phase::kComplete;
  superblock_.in_place_step = held_count_ > 0 ? step : 0;
  // All devices have prepared the step, so recovery finds it whether this superblock arrives or not
  // (docs/format.md): it needs no sync, and its failure is not the step's. The first one is
  // synced, because from then on create() must refuse to start over.
  const Status written = write_superblock(durable() && first);
  phase_ = StepPhase::kIdle;
  if (first) return written;
  if (!written.ok()) {
    base::log(base::LogLevel::kWarning,
              fmt::format("step {} stands, but its commit could not be noted: {}", step,
                          written.to_string()));
  }
  return Status();
}

Status BlockStore::abort(StepNumber step) {
  SI_CHECK(phase_ == StepPhase::kWriting || phase_ == StepPhase::kPreparing ||
               phase_ == StepPhase::kPrepared,
           "abort without a step in progress");
  SI_CHECK(step == step_, "abort of another step");
  const Status drained = drain(true);
  if (!drained.ok()) {
    phase_ = StepPhase::kBroken;
    return drained;
  }
  if (!durable() && step_written_) {
    phase_ = StepPhase::kBroken;
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("step {} overwrote the state in place and cannot be aborted", step),
                  "Use durability = \"step\" where steps may have to be aborted.",
                  base::ErrorPlace{container_.file_path, {}, {}, 0});
  }
  if (phase_ != StepPhase::kWriting) {
    // A superblock that speaks of the step is on the drive, or may be.
    if (Status newest = check_newest(); !newest.ok()) {
      phase_ = StepPhase::kBroken;
      return newest;
    }
    superblock_.prepared_step = superblock_.committed_step;
    superblock_.prepared_table_bytes = superblock_.committed_table_bytes;
    superblock_.prepared_table_checksum = superblock_.committed_table_checksum;
    if (superblock_.phase == Phase::kPrepared) {
      superblock_.phase = Phase::kCreating;
      superblock_.committed_step = superblock_.prepared_step = 0;
    }
    const Status written = write_superblock(durable());
    if (!written.ok()) {
      phase_ = StepPhase::kBroken;
      return Status(written).with_context("a prepared step cannot be aborted");
    }
  }
  phase_ = StepPhase::kIdle;
  return Status();
}

uint64_t BlockStore::bytes_written_ever() const {
  return written_before_ + traffic_.read().down_total();
}

}  // namespace smartinf::storage
