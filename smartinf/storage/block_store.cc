#include "smartinf/storage/block_store.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/leak_in_flight.h"
#include "smartinf/storage/state_reader.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;
using base::StepNumber;

BlockStore::BlockStore(Container container, StoreOptions options, StoreLayout layout,
                       Geometry geometry)
    : container_(std::move(container)),
      options_(std::move(options)),
      layout_(std::move(layout)),
      geometry_(std::move(geometry)),
      ring_name_(container_.ring->name()),
      device_seed_(device_seed(layout_.run, layout_.device_index)),
      pump_(std::make_unique<TransferQueue>(std::move(container_.ring), container_.file,
                                            container_.file_path, container_.direct,
                                            options_.watchdog),
            *this),
      superblocks_(pump_, container_.file_path, durable()),
      table_(geometry_, layout_) {}

BlockStore::~BlockStore() {
  // Before buffers and descriptors go.
  if (pump_.close().ok()) return;
  leak_in_flight(table_.take_memory());
  leak_in_flight(superblocks_.take_memory());
}

Status BlockStore::allocate() {
  if (options_.io_depth == 0 || options_.io_bytes < base::kIoAlignment ||
      options_.io_bytes % base::kIoAlignment != 0) {
    return Status(ErrorCode::kInvalidArgument,
                  "io_depth must be at least 1 and io_bytes a multiple of 4096");
  }
  SI_RETURN_IF_ERROR(place_spool());
  SI_RETURN_IF_ERROR(pump_.allocate(options_.io_depth));
  SI_RETURN_IF_ERROR(table_.allocate());
  return superblocks_.allocate();
}

Status BlockStore::place_spool() {
  if (options_.spool_bytes == 0) return Status();
  if (options_.spool_bytes % base::kIoAlignment != 0) {
    return Status(ErrorCode::kInvalidArgument, "spool_bytes must be a multiple of 4096");
  }
  if (container_.spool.has_value()) {
    pump_.set_spool_file(container_.spool->index, container_.spool->path);
    return Status();
  }
  // Behind the store, where nothing of it lies.
  spool_first_byte_ = base::round_up(geometry_.container_bytes(), base::kIoAlignment);
  const uint64_t room = container_.size_bytes - std::min(container_.size_bytes, spool_first_byte_);
  if (room < options_.spool_bytes) {
    return Status(room == 0 ? ErrorCode::kUnsupported : ErrorCode::kNoSpace,
                  fmt::format("the spool needs {}, and behind the store there are {}",
                              base::format_bytes(options_.spool_bytes), base::format_bytes(room)),
                  "Use a directory on a file system, or a block device with more room.", place());
  }
  pump_.set_spool_file(container_.file, container_.file_path);
  return Status();
}

StoreState BlockStore::state() const {
  StoreState state;
  state.run = layout_.run;
  state.device_index = layout_.device_index;
  state.device_count = layout_.device_count;
  state.committed_step = superblock().committed_step;
  state.prepared_step = superblock().prepared_step;
  state.torn = phase_ == StepPhase::kUnrecovered && superblock().in_place_step != 0;
  state.initialized = !creating() && !state.torn;
  state.complete = superblock().phase == Phase::kComplete;
  state.copied_step = superblock().copied_step;
  return state;
}

std::string BlockStore::client_metadata() const {
  if (phase_ == StepPhase::kUnrecovered || superblock().phase != Phase::kComplete) return {};
  return table_.client_metadata(superblock().committed_step);
}

Result<std::unique_ptr<StateReader>> BlockStore::read_committed() const {
  if (!container_.open_to_read) {
    return Status(ErrorCode::kUnsupported, "this drive cannot be read beside its store");
  }
  SI_ASSIGN_OR_RETURN(ReadOnlyContainer container, container_.open_to_read());
  return StateReader::open(std::move(container), container_.path);
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

std::optional<BlockSum> BlockStore::expected_sum(base::SubgroupId subgroup, size_t plane,
                                                 uint64_t block) const {
  const size_t index = geometry_.index_of(subgroup);
  const StepNumber step = superblock().committed_step;
  const PlaneRecord found = table_.record(step, index, plane);
  if (!options_.checksums || (found.flags & kPlaneSealed) == 0) return std::nullopt;
  const BlockIdentity identity{subgroup.value, static_cast<uint32_t>(plane), block, found.slot,
                               found.step};
  return BlockSum{block_seed(device_seed_, identity), table_.checksum(step, index, plane, block)};
}

Status BlockStore::verify_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                                std::span<const std::byte> bytes) const {
  const size_t index = geometry_.index_of(subgroup);
  SI_CHECK(bytes.size() == geometry_.block_bytes(index, plane, block), "a block of another size");
  const std::optional<BlockSum> expected = expected_sum(subgroup, plane, block);
  if (!expected || base::checksum(bytes, expected->seed) == expected->checksum) return Status();
  const PlaneRecord found = table_.record(superblock().committed_step, index, plane);
  return Status(
      ErrorCode::kCorrupt,
      fmt::format("block {} of the {} plane of subgroup {} has a wrong checksum for step {}", block,
                  base::plane_kind_name(layout_.planes[plane]), subgroup.value, found.step),
      "It was damaged on the drive or on its way from there. Run smartinf fsck to find further "
      "damage, and restore the last checkpoint.",
      base::ErrorPlace{container_.file_path,
                       geometry_.extent_offset(index, found.slot) +
                           geometry_.plane_offset(index, plane) +
                           geometry_.block_offset(plane, block),
                       bytes.size(), 0});
}

std::optional<uint64_t> BlockStore::seal_seed(base::SubgroupId subgroup, size_t plane,
                                              uint64_t block) const {
  if (!options_.checksums) return std::nullopt;
  SI_CHECK(phase_ == StepPhase::kWriting, "a seal outside a step");
  const size_t index = geometry_.index_of(subgroup);
  return block_seed(device_seed_, {subgroup.value, static_cast<uint32_t>(plane), block,
                                   written_slot(index, plane), step_});
}

void BlockStore::seal_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                            std::span<const std::byte> bytes) {
  const std::optional<uint64_t> seed = seal_seed(subgroup, plane, block);
  if (!seed) return;
  SI_CHECK(bytes.size() == geometry_.block_bytes(geometry_.index_of(subgroup), plane, block),
           "a block of another size");
  seal_block(subgroup, plane, block, base::checksum(bytes, *seed));
}

void BlockStore::seal_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                            uint64_t checksum) {
  table_.set_checksum(step_, geometry_.index_of(subgroup), plane, block, checksum);
}

Status BlockStore::read_table(StepNumber step, uint64_t bytes, uint64_t expected_checksum) {
  const std::span<std::byte> image = table_.image(step);
  const uint64_t length = base::round_up(bytes, base::kIoAlignment);
  Status last(ErrorCode::kCorrupt, "the superblock gives the table an impossible length");
  if (length > image.size() || bytes < geometry_.table_records_bytes()) return last;
  const uint64_t seed = table_seed(layout_.run, layout_.device_index, step);
  for (uint32_t copy = 0; copy < kTableCopies; ++copy) {
    std::array<Transfer, 1> read{
        metadata_transfer(IoOp::kRead, geometry_.table_offset(step, copy), image.first(length))};
    last = pump_.read_metadata(read);
    if (last.ok()) {
      pump_.count_metadata_read(length);
      last = check_table(image.first(length), geometry_, seed, step);
    }
    if (last.ok()) {
      if (table_.header(step).checksum == expected_checksum) return Status();
      last = Status(ErrorCode::kCorrupt, "the table belongs to another attempt at this step");
    }
    base::log(base::LogLevel::kWarning,
              fmt::format("{}: copy {} of the table of step {} at offset {} cannot be used: {}",
                          container_.file_path, copy, step, geometry_.table_offset(step, copy),
                          last.what()));
  }
  return Status(last.code(),
                fmt::format("no copy of the table of step {} can be used: {}", step, last.what()),
                "Run smartinf fsck; restore the device from a checkpoint.",
                base::ErrorPlace{container_.file_path, geometry_.table_offset(step, 0),
                                 length * kTableCopies, 0});
}

Status BlockStore::recover_to(StepNumber step) {
  SI_CHECK(phase_ == StepPhase::kUnrecovered, "recover_to comes once, after open");
  if (!state().initialized) {
    return Status(ErrorCode::kFailedPrecondition,
                  superblock().in_place_step != 0 ? std::string(kTornState)
                                                  : "the device's creation was interrupted",
                  "Restore a checkpoint, or start the run anew in another directory.", place());
  }
  const bool to_prepared = step == superblock().prepared_step;
  if (!to_prepared && step != superblock().committed_step) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("the device holds steps {} and {}, not {}",
                              superblock().committed_step, superblock().prepared_step, step),
                  {}, place());
  }
  const uint64_t bytes =
      to_prepared ? superblock().prepared_table_bytes : superblock().committed_table_bytes;
  const uint64_t checksum =
      to_prepared ? superblock().prepared_table_checksum : superblock().committed_table_checksum;
  SI_RETURN_IF_ERROR(read_table(step, bytes, checksum));

  // A superblock that was found may only be in a cache: whoever wrote it died before syncing. After
  // this it is on the medium, and the pair it came from is the one to spare.
  superblocks_.keep_found();
  if (!options_.read_only) SI_RETURN_IF_ERROR(superblocks_.sync());
  const bool changed = superblock().committed_step != step || superblock().prepared_step != step ||
                       superblock().phase != Phase::kComplete;
  superblock().committed_step = superblock().prepared_step = step;
  superblock().committed_table_bytes = superblock().prepared_table_bytes = bytes;
  superblock().committed_table_checksum = superblock().prepared_table_checksum = checksum;
  superblock().phase = Phase::kComplete;
  // A reader goes by the decision, and leaves it to the next writer to make it durable.
  if (changed && !options_.read_only) {
    SI_RETURN_IF_ERROR(superblocks_.check_newest());
    SI_RETURN_IF_ERROR(superblocks_.write(true));
  }
  phase_ = StepPhase::kIdle;
  return Status();
}

void BlockStore::begin_step(StepNumber step) {
  const bool fresh = creating();
  // create() begins step 0; until something is written a copy may ask for the step it is of.
  const bool begun = phase_ == StepPhase::kWriting && (step == step_ || (fresh && !step_written_));
  SI_CHECK(phase_ == StepPhase::kIdle || begun,
           "begin_step while another step is in progress, or before recover_to");
  SI_CHECK(fresh || step == superblock().committed_step + 1, "steps follow each other");
  if (phase_ == StepPhase::kWriting && step_written_) return;
  phase_ = StepPhase::kWriting;
  step_ = step;
  step_written_ = false;
  step_failure_ = Status();
  if (fresh) {
    table_.begin_first(step);
  } else {
    table_.begin_after(superblock().committed_step);
  }
}

Status BlockStore::begin_writing() {
  SI_CHECK(phase_ == StepPhase::kWriting, "a write before begin_step");
  if (step_written_) return Status();
  step_written_ = true;
  if (durable() || creating()) return Status();
  // From here on the old state is being overwritten; after a crash it must not be taken for one.
  superblock().in_place_step = step_;
  Status written = superblocks_.write(false);
  if (!written.ok()) step_failure_ = written;
  return written;
}

Status BlockStore::hold(base::SubgroupId id, uint32_t plane_mask) {
  SI_CHECK(!durable(), "planes held in memory are of no durable step");
  SI_CHECK(!creating(), "a store's first step is on the drive");
  SI_RETURN_IF_ERROR(begin_writing());
  const size_t subgroup = geometry_.index_of(id);
  table_.hold(subgroup, plane_mask);
  note_written_planes(subgroup, plane_mask);
  return Status();
}

Status BlockStore::finish_flush() {
  SI_CHECK(phase_ == StepPhase::kIdle && !pump_.writes_open(), "a flush within a step");
  SI_CHECK(!table_.any_held(), "planes that are held were not flushed");
  if (superblock().in_place_step == 0) return Status();
  const StepNumber before = std::exchange(superblock().in_place_step, 0);
  Status written = superblocks_.write(false);
  if (!written.ok()) superblock().in_place_step = before;
  return written;
}

uint32_t BlockStore::written_slot(size_t subgroup, size_t plane) const {
  if (creating()) return 0;
  return shadow_slot(table_.record(superblock().committed_step, subgroup, plane).slot);
}

void BlockStore::note_written_planes(size_t subgroup, uint32_t plane_mask) {
  for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
    if ((plane_mask >> plane & 1u) == 0) continue;
    table_.note_written(step_, subgroup, plane, written_slot(subgroup, plane), options_.checksums);
  }
}

void BlockStore::start(SubgroupIo& io) {
  if (is_spool(io)) {
    SI_CHECK(io.buffer.size() % base::kIoAlignment == 0 &&
                 reinterpret_cast<uintptr_t>(io.buffer.data()) % base::kIoAlignment == 0 &&
                 io.spool_offset_bytes % base::kIoAlignment == 0,
             "a spool's transfers are aligned to kIoAlignment");
    SI_CHECK(io.spool_offset_bytes <= options_.spool_bytes &&
                 io.buffer.size() <= options_.spool_bytes - io.spool_offset_bytes,
             "a transfer outside the spool");
    io.status = Status();
    return pump_.start(io);
  }
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
  if (io.op == SubgroupIo::Op::kWrite) {
    io.status = begin_writing();
    table_.forget_held(subgroup, io.plane_mask);
    note_written_planes(subgroup, io.plane_mask);
  } else if (io.op == SubgroupIo::Op::kFlush) {
    SI_CHECK(phase_ == StepPhase::kIdle && !durable(), "a flush within a step");
  } else if (io.op == SubgroupIo::Op::kRead) {
    SI_CHECK(phase_ != StepPhase::kUnrecovered && !creating(),
             "a read before there is a committed step");
  }
  pump_.start(io);
}

/// The next piece of what lies in one piece, from offset_bytes on.
IoPump::Span BlockStore::next_span_within(SubgroupIo& io, uint64_t offset_bytes,
                                          uint64_t bytes) const {
  IoPump::Span span;
  span.buffer_offset = io.next_offset_bytes;
  span.offset_bytes = offset_bytes + io.next_offset_bytes;
  span.length = std::min(options_.io_bytes, bytes - io.next_offset_bytes);
  io.next_offset_bytes += span.length;
  return span;
}

IoPump::Span BlockStore::next_span(SubgroupIo& io) const {
  if (is_spool(io)) {
    return next_span_within(io, spool_first_byte_ + io.spool_offset_bytes, io.buffer.size());
  }
  if (is_gradient(io)) {
    const size_t subgroup = geometry_.index_of(io.subgroup);
    return next_span_within(io, geometry_.gradient_offset(subgroup),
                            geometry_.gradient_bytes(subgroup));
  }
  // Planes follow each other in an extent: those that take part and lie in the same slot go
  // together.
  const size_t subgroup = geometry_.index_of(io.subgroup);
  const StepNumber step = io.op == SubgroupIo::Op::kWrite ? step_ : superblock().committed_step;
  IoPump::Span span;
  uint32_t slot = 0;
  for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
    const uint64_t begin = geometry_.plane_offset(subgroup, plane);
    const uint64_t end = geometry_.plane_offset(subgroup, plane + 1);
    if (end <= io.next_offset_bytes) continue;
    const bool wanted = (io.plane_mask >> plane & 1u) != 0;
    const uint32_t plane_slot = wanted ? table_.record(step, subgroup, plane).slot : 0;
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

void BlockStore::on_finished(const SubgroupIo& io) {
  if (!is_write(io) || is_spool(io)) return;
  if (io.op == SubgroupIo::Op::kFlush) {
    if (io.status.ok()) table_.forget_held(geometry_.index_of(io.subgroup), io.plane_mask);
  } else if (!io.status.ok() && step_failure_.ok()) {
    step_failure_ = io.status;
  }
}

Status BlockStore::sync() {
  SI_RETURN_IF_ERROR(pump_.drain_writes());
  return durable() ? superblocks_.sync() : Status();
}

Status BlockStore::write_table(StepNumber step, const std::string& client_metadata) {
  const std::span<std::byte> image = table_.finish(step, client_metadata);
  const TableHeader header = table_.header(step);
  superblock().prepared_table_bytes = header.bytes;
  superblock().prepared_table_checksum = header.checksum;
  std::array<Transfer, kTableCopies> copies;
  for (uint32_t copy = 0; copy < kTableCopies; ++copy) {
    copies[copy] = metadata_transfer(IoOp::kWrite, geometry_.table_offset(step, copy), image);
  }
  return pump_.write_metadata(copies);
}

Status BlockStore::prepare(StepNumber step, const std::string& client_metadata) {
  SI_CHECK(client_metadata.size() <= kClientMetadataBytesMax,
           "the client metadata is longer than kClientMetadataBytesMax");
  SI_CHECK(phase_ == StepPhase::kWriting && step == step_, "prepare of a step that was not begun");
  SI_RETURN_IF_ERROR(pump_.drain_writes());
  if (!step_failure_.ok()) return step_failure_;
  SI_RETURN_IF_ERROR(table_.check_written(step, step_written_));
  SI_RETURN_IF_ERROR(superblocks_.check_newest());

  const Superblock before = superblock();
  const auto attempt = [&]() -> Status {
    SI_RETURN_IF_ERROR(write_table(step, client_metadata));
    // Planes and table are on the medium before a superblock speaks of them.
    if (durable()) SI_RETURN_IF_ERROR(superblocks_.sync());
    phase_ = StepPhase::kPreparing;
    superblock().prepared_step = step;
    if (creating()) {
      // The first state may be of a later step than 0; there is none before it.
      superblock().phase = Phase::kPrepared;
      superblock().committed_step = step;
    }
    return superblocks_.write(durable());
  };
  const Status status = attempt();
  if (status.ok()) {
    phase_ = StepPhase::kPrepared;
    return Status();
  }
  // The fields of the prepared step go back; those that say where the copies stand do not.
  superblock().committed_step = before.committed_step;
  superblock().prepared_step = before.prepared_step;
  superblock().prepared_table_bytes = before.prepared_table_bytes;
  superblock().prepared_table_checksum = before.prepared_table_checksum;
  superblock().phase = before.phase;
  return status;
}

Status BlockStore::commit(StepNumber step) {
  SI_CHECK(phase_ == StepPhase::kPrepared && step == step_,
           "commit of a step that is not prepared");
  const bool first = superblock().phase != Phase::kComplete;
  superblock().committed_step = step;
  superblock().committed_table_bytes = superblock().prepared_table_bytes;
  superblock().committed_table_checksum = superblock().prepared_table_checksum;
  superblock().phase = Phase::kComplete;
  superblock().in_place_step = table_.any_held() ? step : 0;
  // All devices have prepared the step, so recovery finds it whether this superblock arrives or not
  // (docs/format.md): it needs no sync, and its failure is not the step's. The first one is
  // synced, because from then on create() must refuse to start over.
  const Status written = superblocks_.write(durable() && first);
  phase_ = StepPhase::kIdle;
  if (first) return written;
  if (!written.ok()) {
    base::log(base::LogLevel::kWarning,
              fmt::format("step {} is committed, but its superblock could not be written: {}", step,
                          written.to_string()));
  }
  return Status();
}

Status BlockStore::abort(StepNumber step) {
  SI_CHECK(phase_ == StepPhase::kWriting || phase_ == StepPhase::kPreparing ||
               phase_ == StepPhase::kPrepared,
           "abort without a step in progress");
  SI_CHECK(step == step_, "abort of another step");
  const Status drained = pump_.drain_writes();
  if (!drained.ok()) {
    phase_ = StepPhase::kBroken;
    return drained;
  }
  if (!durable() && step_written_) {
    phase_ = StepPhase::kBroken;
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("step {} overwrote the state in place and cannot be aborted", step),
                  "Use durability = \"step\" where steps may have to be aborted.", place());
  }
  if (phase_ != StepPhase::kWriting) {
    // A superblock that speaks of the step is on the drive, or may be.
    if (Status newest = superblocks_.check_newest(); !newest.ok()) {
      phase_ = StepPhase::kBroken;
      return newest;
    }
    superblock().prepared_step = superblock().committed_step;
    superblock().prepared_table_bytes = superblock().committed_table_bytes;
    superblock().prepared_table_checksum = superblock().committed_table_checksum;
    if (superblock().phase == Phase::kPrepared) {
      superblock().phase = Phase::kCreating;
      superblock().committed_step = superblock().prepared_step = 0;
    }
    const Status written = superblocks_.write(durable());
    if (!written.ok()) {
      phase_ = StepPhase::kBroken;
      return Status(written).with_context("a prepared step cannot be aborted");
    }
  }
  phase_ = StepPhase::kIdle;
  return Status();
}

}  // namespace smartinf::storage
