#include "apps/crashtest/crash_scenario.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/row_commit.h"

namespace smartinf::crash {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using base::StepNumber;
using base::SubgroupId;
using storage::BlockStore;
using storage::SubgroupIo;

constexpr uint32_t kSubgroups = 2;
constexpr uint32_t kAllSubgroups = (1u << kSubgroups) - 1;
constexpr uint32_t kPlanes = 4;
constexpr uint32_t kResidualPlane = 3;
constexpr uint32_t kRingDepth = 24;
constexpr uint32_t kRecordBytes = 600;
constexpr uint64_t kLogPages = 30;  // of some steps of 40 rows: merges are needed
constexpr std::chrono::seconds kPatience{10};
constexpr StepNumber kGarbage = 1'000'000;  // in the place of a version

std::string client_metadata_of(StepNumber step) { return fmt::format("step {}", step); }

/// Whole 32-bit words of a plane, in any encoding.
uint64_t words(const BlockStore& store, uint32_t subgroup, uint32_t plane) {
  const uint64_t last = store.geometry().blocks(subgroup) - 1;
  return (store.geometry().block_offset(plane, last) +
          store.geometry().block_bytes(subgroup, plane, last)) /
         sizeof(uint32_t);
}

/// The second subgroup rests in every third step: what is not written keeps its state.
bool rests(uint32_t subgroup, StepNumber step) {
  return subgroup == 1 && step > 0 && step % 3 == 0;
}

/// One bit for each subgroup that the step changes.
uint32_t active(StepNumber step) {
  uint32_t subgroups = 0;
  for (uint32_t subgroup = 0; subgroup < kSubgroups; ++subgroup) {
    if (!rests(subgroup, step)) subgroups |= 1u << subgroup;
  }
  return subgroups;
}

/// The residual is written in every second step only, as with compress.residual_every = 2.
bool keeps(StepNumber step) { return step % 2 == 0; }

/// Takes part in the step that was aborted before this one.
enum class Abort { kNever, kUnprepared, kPartlyPrepared, kPrepared };
Abort abort_before(StepNumber step) {
  switch (step % 4) {
    case 0:
      return step == 0 ? Abort::kNever : Abort::kPrepared;
    case 1:
      return Abort::kNever;
    case 2:
      return Abort::kPartlyPrepared;
    default:
      return Abort::kUnprepared;
  }
}

}  // namespace

Scenario::Scenario(const ScenarioOptions& options) : options_(options) {
  // The run's name comes from the seed, so that a failing seed fails again.
  for (size_t i = 0; i < run_.bytes.size(); ++i) {
    run_.bytes[i] = static_cast<uint8_t>(base::mix_seed(options.seed, i));
  }
  devices_.resize(options.devices);
  for (uint32_t device = 0; device < options.devices; ++device) {
    const auto geometry = storage::Geometry::make(layout(device), 2);
    SI_CHECK(geometry.ok(), "the scenario's layout is impossible");
    disks_.emplace_back(geometry->container_bytes());
  }
  for (uint32_t device = 0; options.rows > 0 && device < options.devices; ++device) {
    const storage::RowFileLayout rows = row_layout(device);
    const Status usable = storage::RowFile::check(rows);
    SI_CHECK(usable.ok(), usable.to_string());
    disks_.emplace_back(storage::RowFile::file_bytes(rows));
  }
}

storage::RowFileLayout Scenario::row_layout(uint32_t device) const {
  storage::RowFileLayout layout;
  layout.run = run_;
  layout.device_index = device;
  layout.device_count = options_.devices;
  layout.log_bytes = kLogPages * base::kPageBytes * base::divide_up(options_.rows, 40);
  layout.tables = {{"rows", storage::RowTableKind::kState, kRecordBytes, options_.rows}};
  return layout;
}

storage::StoreLayout Scenario::layout(uint32_t device) const {
  storage::StoreLayout layout;
  layout.run = run_;
  layout.device_index = device;
  layout.device_count = options_.devices;
  layout.planes = {base::PlaneKind::kMaster, base::PlaneKind::kMomentum, base::PlaneKind::kVariance,
                   base::PlaneKind::kResidual};
  for (uint32_t subgroup = 0; subgroup < kSubgroups; ++subgroup) {
    layout.subgroups.push_back({SubgroupId{device * kSubgroups + subgroup}, 0,
                                subgroup == 0 ? options_.elements : options_.elements / 2 + 1});
  }
  layout.format = options_.format;
  layout.description = "crash test";
  return layout;
}

storage::Container Scenario::container(uint32_t device) {
  const uint64_t seed = base::mix_seed(options_.seed, ++rings_made_);
  return storage::memory_container(
      fmt::format("disk {}", device), disks_[device],
      make_flawed_ring(
          storage::make_memory_ring(disks_[device], power_, kRingDepth, seed),
          options_.flaw == CommitFlaw::kRowsNoSync ? CommitFlaw::kNone : options_.flaw));
}

storage::CachePlace Scenario::row_place(uint32_t device) {
  const CommitFlaw flaw = options_.flaw == CommitFlaw::kSuperblockFirst ? CommitFlaw::kNone
                          : options_.flaw == CommitFlaw::kRowsNoSync    ? CommitFlaw::kNoSync
                                                                        : options_.flaw;
  storage::MemoryDisk& disk = disks_[options_.devices + device];
  const uint64_t seed = base::mix_seed(options_.seed, ++rings_made_);
  storage::CachePlace place;
  place.path = fmt::format("rows {}", device);
  place.direct = true;
  place.size_bytes = disk.contents().size();
  place.ring = make_flawed_ring(storage::make_memory_ring(disk, power_, kRingDepth, seed), flaw);
  return place;
}

/// The toy update folded up: what an element is after `step`.
uint32_t Scenario::word(uint32_t device, uint32_t subgroup, uint32_t plane, uint64_t index,
                        StepNumber step) const {
  uint64_t value = base::mix_seed(base::mix_seed(device * 16 + subgroup * 4 + plane, index), 17);
  for (StepNumber made = 1; made <= step; ++made) {
    if (plane == kResidualPlane && !keeps(made)) continue;
    if (!rests(subgroup, made)) value = base::mix_seed(value & 0xffffffffu, made);
  }
  return static_cast<uint32_t>(value);
}

/// Each once in four steps, and in one step with four consecutive seeds.
Scenario::Guess Scenario::guess_in(StepNumber step) const {
  if (step == 0) return Guess::kNone;  // there is no committed state that an update could read
  return static_cast<Guess>((options_.seed + step) % 4);
}

/// The subgroups whose gradients are complete before the guess is known to be right or wrong: none,
/// some or all. A wrong guess may be that a subgroup does not rest.
uint32_t Scenario::guessed(uint32_t device, StepNumber step) const {
  const auto drawn = static_cast<uint32_t>(
      base::mix_seed(base::mix_seed(options_.seed, 3000 + device), step) & kAllSubgroups);
  return guess_in(step) == Guess::kRight ? drawn & active(step) : drawn;
}

Status Scenario::create() {
  storage::StoreOptions options;
  options.io_bytes = 2 * base::kIoAlignment;
  options.io_depth = 4;
  for (uint32_t device = 0; device < options_.devices; ++device) {
    SI_ASSIGN_OR_RETURN(devices_[device].store,
                        BlockStore::create(container(device), layout(device), options));
    if (options_.rows == 0) continue;
    SI_ASSIGN_OR_RETURN(
        devices_[device].rows,
        storage::RowFile::create(row_place(device), row_layout(device), kPatience, traffic_));
  }
  return Status();
}

Status Scenario::open(bool with_flaw) {
  storage::StoreOptions options;
  options.io_bytes = 2 * base::kIoAlignment;
  options.io_depth = 4;
  const CommitFlaw flaw = options_.flaw;
  if (!with_flaw) options_.flaw = CommitFlaw::kNone;
  Status status;
  for (uint32_t device = 0; device < options_.devices && status.ok(); ++device) {
    auto opened = BlockStore::open(container(device), options);
    if (opened.ok()) {
      devices_[device].store = std::move(*opened);
    } else {
      status = opened.status();
    }
  }
  options_.flaw = flaw;
  return status;
}

Status Scenario::read(uint32_t device, SubgroupId id, std::span<std::byte> buffer) {
  SubgroupIo io;
  io.op = SubgroupIo::Op::kRead;
  io.subgroup = id;
  io.buffer = buffer;
  devices_[device].store->start(io);
  SubgroupIo* done = nullptr;
  SI_ASSIGN_OR_RETURN(const size_t count,
                      devices_[device].store->poll({&done, 1}, std::chrono::seconds(10)));
  SI_CHECK(count == 1 && done == &io, "a read that does not end");
  return io.status;
}

Status Scenario::verify(uint32_t device, uint32_t subgroup, std::span<const std::byte> buffer) {
  const BlockStore& store = *devices_[device].store;
  const SubgroupId id = store.layout().subgroups[subgroup].id;
  for (size_t plane = 0; plane < kPlanes; ++plane) {
    for (uint64_t block = 0; block < store.geometry().blocks(subgroup); ++block) {
      SI_RETURN_IF_ERROR(store.verify_block(
          id, plane, block,
          buffer.subspan(
              store.plane_offset(id, plane) + store.geometry().block_offset(plane, block),
              store.geometry().block_bytes(subgroup, plane, block))));
    }
  }
  return Status();
}

bool Scenario::stays_in_memory(uint32_t device, uint32_t subgroup) const {
  return base::mix_seed(options_.seed, 1000 + device * kSubgroups + subgroup) % 2 == 0;
}

Status Scenario::write_step(uint32_t device, StepNumber step, uint32_t subgroups,
                            Contents contents) {
  const bool garbage = contents != Contents::kOfStep;
  BlockStore& store = *devices_[device].store;
  store.begin_step(step);
  std::vector<base::AlignedBuffer> buffers;
  std::vector<SubgroupIo> ios(kSubgroups);
  size_t started = 0;
  for (uint32_t subgroup = 0; subgroup < kSubgroups; ++subgroup) {
    if ((subgroups >> subgroup & 1u) == 0) continue;
    const storage::StoredSubgroup& stored = store.layout().subgroups[subgroup];
    InMemory passing;
    const bool stays = stays_in_memory(device, subgroup);
    InMemory& here = stays ? devices_[device].in_memory[subgroup] : passing;
    if (here.buffer.size() == 0) {
      SI_ASSIGN_OR_RETURN(here.buffer,
                          base::AlignedBuffer::allocate(store.extent_bytes(stored.id)));
    }
    const std::span<std::byte> bytes = here.buffer.bytes();
    if (step > 0) {
      if (!here.current) SI_RETURN_IF_ERROR(read(device, stored.id, bytes));
      SI_RETURN_IF_ERROR(verify(device, subgroup, bytes));
    }
    here.current = !garbage;  // garbage is aborted or written over
    if (!stays) buffers.push_back(std::move(here.buffer));
    const bool kept = keeps(step) || contents == Contents::kAborted;
    for (uint32_t plane = 0; plane < kPlanes; ++plane) {
      auto* values =
          reinterpret_cast<uint32_t*>(bytes.data() + store.plane_offset(stored.id, plane));
      if (plane == kResidualPlane && !kept) continue;
      for (uint64_t i = 0; i < words(store, subgroup, plane); ++i) {
        if (step == 0 || plane == kResidualPlane) {
          values[i] = word(device, subgroup, plane, i, step);
        } else if (!rests(subgroup, step)) {
          values[i] = static_cast<uint32_t>(base::mix_seed(values[i], step));
        }
        if (garbage) values[i] ^= 0x5a5a5a5au;
      }
      for (uint64_t block = 0; block < store.geometry().blocks(subgroup); ++block) {
        store.seal_block(stored.id, plane, block,
                         bytes.subspan(store.plane_offset(stored.id, plane) +
                                           store.geometry().block_offset(plane, block),
                                       store.geometry().block_bytes(subgroup, plane, block)));
      }
    }
    ios[subgroup].op = SubgroupIo::Op::kWrite;
    ios[subgroup].subgroup = stored.id;
    ios[subgroup].buffer = bytes;
    if (!kept) ios[subgroup].plane_mask = (1u << kResidualPlane) - 1;
  }
  for (SubgroupIo& io : ios) {
    if (io.buffer.empty()) continue;
    store.start(io);
    ++started;
  }
  while (started > 0) {
    SubgroupIo* done = nullptr;
    SI_ASSIGN_OR_RETURN(const size_t count, store.poll({&done, 1}, std::chrono::seconds(10)));
    SI_CHECK(count == 1, "a write that does not end");
    --started;
    if (!done->status.ok()) {
      // Buffers stay until nothing is in flight.
      while (started > 0) {
        SI_ASSIGN_OR_RETURN(const size_t more, store.poll({&done, 1}, std::chrono::seconds(10)));
        started -= more;
      }
      return Status(ErrorCode::kIo, "a write failed");
    }
  }
  return Status();
}

/// In creation every other row gets its first record.
bool Scenario::touched(uint32_t device, uint32_t row, StepNumber step) const {
  if (step == 0) return row % 2 == 0;
  return base::mix_seed(base::mix_seed(options_.seed, 5000 + device), step * 4096 + row) % 2 == 0;
}

std::vector<std::byte> Scenario::record(uint32_t device, uint32_t row, StepNumber version) const {
  std::vector<std::byte> bytes(kRecordBytes);
  for (size_t at = 0; at + sizeof(uint32_t) <= bytes.size(); at += sizeof(uint32_t)) {
    const auto word = static_cast<uint32_t>(
        base::mix_seed(base::mix_seed(options_.seed, device * 65536 + row), version * 1024 + at));
    std::memcpy(bytes.data() + at, &word, sizeof word);
  }
  const auto updated = static_cast<uint32_t>(version);
  std::memcpy(bytes.data() + bytes.size() - sizeof updated, &updated, sizeof updated);
  return bytes;
}

/// May come several times in a step.
Status Scenario::write_rows(uint32_t device, StepNumber step, Contents contents) {
  storage::RowFile* const file = devices_[device].rows.get();
  if (file == nullptr) return Status();
  std::vector<uint32_t> rows;
  std::vector<std::byte> records;
  for (uint32_t row = 0; row < options_.rows; ++row) {
    if (!touched(device, row, step)) continue;
    rows.push_back(row);
    const auto one = record(device, row, contents == Contents::kOfStep ? step : kGarbage);
    records.insert(records.end(), one.begin(), one.end());
  }
  bool& appending = devices_[device].appending;
  if (!appending) {
    doing("merge of rows");
    while (file->must_merge(2 * rows.size())) SI_RETURN_IF_ERROR(file->merge_some());
    doing("rows");
    file->begin_step(step);
    appending = true;
  }
  return step == 0 ? file->put(0, rows, records) : file->append(0, rows, records);
}

Status Scenario::abort_everywhere(StepNumber step) {
  doing("abort");
  for (Device& device : devices_) {
    SI_RETURN_IF_ERROR(device.store->abort(step));
    if (std::exchange(device.appending, false)) SI_RETURN_IF_ERROR(device.rows->abort(step));
  }
  return Status();
}

Status Scenario::prepare(Device& device, StepNumber step, const std::string& metadata) {
  std::string record;
  if (device.rows != nullptr) {
    SI_ASSIGN_OR_RETURN(record, device.rows->prepare(step));
  }
  return device.store->prepare(step, storage::join_row_commit(metadata, record));
}

Status Scenario::commit(uint32_t device, StepNumber step) {
  SI_RETURN_IF_ERROR(devices_[device].store->commit(step));
  devices_[device].appending = false;
  if (devices_[device].rows == nullptr) return Status();
  return devices_[device].rows->commit(step);
}

/// Perhaps a part of the step is written before it is known whether the guess is right: then comes
/// the rest, or everything again from the committed state.
Status Scenario::write_everywhere(StepNumber step) {
  const auto write = [&](std::string_view moment, Contents contents, auto subgroups) -> Status {
    doing(moment);
    for (uint32_t device = 0; device < options_.devices; ++device) {
      SI_RETURN_IF_ERROR(write_step(device, step, subgroups(device), contents));
      SI_RETURN_IF_ERROR(write_rows(device, step, contents));
    }
    return Status();
  };
  const auto whole = [&](uint32_t) { return active(step); };
  const auto early = [&](uint32_t device) { return guessed(device, step); };
  const auto rest = [&](uint32_t device) { return active(step) & ~guessed(device, step); };
  const auto again = [&](uint32_t device) { return active(step) | guessed(device, step); };
  switch (guess_in(step)) {
    case Guess::kNone:
      break;
    case Guess::kRight:
      SI_RETURN_IF_ERROR(write("right guess", Contents::kOfStep, early));
      return write("rest after a right guess", Contents::kOfStep, rest);
    case Guess::kWrong:
      SI_RETURN_IF_ERROR(write("wrong guess", Contents::kWrong, early));
      return write("again after a wrong guess", Contents::kOfStep, again);
    case Guess::kAborted:
      SI_RETURN_IF_ERROR(write("guess that is aborted", Contents::kWrong, early));
      SI_RETURN_IF_ERROR(abort_everywhere(step));
      break;
  }
  return write("write", Contents::kOfStep, whole);
}

Status Scenario::make_step(StepNumber step) {
  const Abort abort = abort_before(step);
  if (abort != Abort::kNever) {
    doing("write that is aborted");
    for (uint32_t device = 0; device < options_.devices; ++device) {
      SI_RETURN_IF_ERROR(write_step(device, step, kAllSubgroups, Contents::kAborted));
      SI_RETURN_IF_ERROR(write_rows(device, step, Contents::kAborted));
    }
    const uint32_t prepared = abort == Abort::kPrepared         ? options_.devices
                              : abort == Abort::kPartlyPrepared ? 1
                                                                : 0;
    for (uint32_t device = 0; device < prepared; ++device) {
      SI_RETURN_IF_ERROR(prepare(devices_[device], step, "aborted"));
    }
    SI_RETURN_IF_ERROR(abort_everywhere(step));
  }
  SI_RETURN_IF_ERROR(write_everywhere(step));
  doing("prepare");
  for (Device& device : devices_) {
    SI_RETURN_IF_ERROR(prepare(device, step, client_metadata_of(step)));
  }
  doing("commit");
  for (uint32_t device = 0; device < options_.devices; ++device) {
    SI_RETURN_IF_ERROR(commit(device, step));
  }
  // commit() says ok without power too: it is decided.
  acknowledged_ = step;
  return Status();
}

Status Scenario::all_steps() {
  SI_RETURN_IF_ERROR(create());
  for (StepNumber step = 0; step <= options_.steps && power_.on(); ++step) {
    SI_RETURN_IF_ERROR(make_step(step));
  }
  return Status();
}

void Scenario::run(uint64_t cut_events) {
  if (cut_events != ~uint64_t{0}) power_.cut_after(cut_events);
  const Status status = all_steps();
  SI_CHECK(status.ok() || !power_.on(), status.to_string());
  for (Device& device : devices_) device.close();
}

void Scenario::settle(storage::CutFate fate, uint64_t seed) {
  for (Device& device : devices_) device.in_memory.clear();
  for (uint32_t disk = 0; disk < disks_.size(); ++disk) {
    disks_[disk].settle(fate, base::mix_seed(seed, disk));
  }
  power_.restore();
}

Result<StepNumber> Scenario::recover() {
  SI_RETURN_IF_ERROR(open(false));
  std::vector<storage::StoreState> states;
  for (const Device& device : devices_) states.push_back(device.store->state());
  SI_ASSIGN_OR_RETURN(const StepNumber step, storage::recovery_step(states));
  for (Device& device : devices_) SI_RETURN_IF_ERROR(device.store->recover_to(step));
  const CommitFlaw flaw = std::exchange(options_.flaw, CommitFlaw::kNone);
  Status status;
  for (uint32_t device = 0; device < options_.devices && options_.rows > 0 && status.ok();
       ++device) {
    auto opened = storage::RowFile::open(
        row_place(device), run_,
        storage::split_row_commit(devices_[device].store->client_metadata()).record, kPatience,
        traffic_);
    status = opened.status();
    if (opened.ok()) devices_[device].rows = std::move(*opened);
  }
  options_.flaw = flaw;
  SI_RETURN_IF_ERROR(status);
  return step;
}

void Scenario::recover_and_cut(uint64_t cut_events) {
  power_.cut_after(cut_events);
  (void)recover();
  for (Device& device : devices_) device.close();
}

std::string Scenario::compare(StepNumber step) {
  for (uint32_t device = 0; device < options_.devices; ++device) {
    BlockStore& store = *devices_[device].store;
    const std::string metadata = storage::split_row_commit(store.client_metadata()).client_metadata;
    if (metadata != client_metadata_of(step)) {
      return fmt::format("device {} has the client metadata \"{}\" at step {}", device, metadata,
                         step);
    }
    if (std::string wrong = compare_rows(device, step); !wrong.empty()) return wrong;
    for (uint32_t subgroup = 0; subgroup < kSubgroups; ++subgroup) {
      const storage::StoredSubgroup& stored = store.layout().subgroups[subgroup];
      const auto buffer = base::AlignedBuffer::allocate(store.extent_bytes(stored.id));
      SI_CHECK(buffer.ok(), "no memory");
      Status status = read(device, stored.id, buffer->bytes());
      if (status.ok()) status = verify(device, subgroup, buffer->bytes());
      if (!status.ok()) return status.to_string();
      for (uint32_t plane = 0; plane < kPlanes; ++plane) {
        const auto* values =
            reinterpret_cast<uint32_t*>(buffer->data() + store.plane_offset(stored.id, plane));
        for (uint64_t i = 0; i < words(store, subgroup, plane); ++i) {
          if (values[i] != word(device, subgroup, plane, i, step)) {
            return fmt::format("device {}, subgroup {}, plane {}, word {} differs at step {}",
                               device, subgroup, plane, i, step);
          }
        }
      }
    }
  }
  return {};
}

std::string Scenario::compare_rows(uint32_t device, StepNumber step) {
  if (devices_[device].rows == nullptr) return {};
  std::vector<uint32_t> rows(options_.rows);
  std::iota(rows.begin(), rows.end(), 0u);
  std::string wrong;
  const Status status =
      devices_[device].rows->read(0, rows, [&](size_t i, std::span<const std::byte> found) {
        std::vector<std::byte> right;
        for (StepNumber made = 0; made <= step; ++made) {
          if (touched(device, rows[i], made)) right = record(device, rows[i], made);
        }
        if (std::ranges::equal(found, right)) return;
        wrong = fmt::format("device {}, row {} differs at step {}", device, rows[i], step);
      });
  return status.ok() ? wrong : status.to_string();
}

std::string Scenario::recover_and_judge() {
  const Result<StepNumber> step = recover();
  if (!step.ok()) {
    const bool start_over = !acknowledged_.has_value();
    if (!start_over) return "no recovery: " + step.status().to_string();
    // Nothing was promised yet: a new creation must work on what is left.
    for (Device& device : devices_) device.close();
    const CommitFlaw flaw = options_.flaw;
    options_.flaw = CommitFlaw::kNone;
    Status status = create();
    if (status.ok()) status = make_step(0);
    options_.flaw = flaw;
    acknowledged_.reset();  // the next fate of the same cut begins where this one did
    if (!status.ok()) return "cannot start over: " + status.to_string();
    return compare(0);
  }
  if (acknowledged_.has_value() && *step < *acknowledged_) {
    return fmt::format("step {} was committed, recovery finds step {}", *acknowledged_, *step);
  }
  if (*step > 0 && (!acknowledged_.has_value() || *step > *acknowledged_ + 1)) {
    return fmt::format("recovery finds step {}, which nobody made", *step);
  }
  // A step that was aborted after all had prepared it may be found again while its aborting
  // is not complete: it is whole and belongs to one attempt. Everything else is the undisturbed
  // run's.
  std::string wrong;
  bool aborted = true;
  for (const Device& device : devices_)
    aborted =
        aborted &&
        storage::split_row_commit(device.store->client_metadata()).client_metadata == "aborted";
  if (!aborted) wrong = compare(*step);
  if (aborted && (*step <= acknowledged_.value_or(0))) {
    wrong = fmt::format("step {} was aborted and has returned", *step);
  }
  if (wrong.empty() && !aborted) {
    const Status written = write_everywhere(*step + 1);
    if (!written.ok()) wrong = "cannot go on: " + written.to_string();
    for (Device& device : devices_) {
      const Status status =
          wrong.empty() ? prepare(device, *step + 1, client_metadata_of(*step + 1)) : Status();
      if (!status.ok()) wrong = "cannot go on: " + status.to_string();
    }
    for (uint32_t device = 0; device < options_.devices; ++device) {
      if (wrong.empty() && !commit(device, *step + 1).ok()) wrong = "cannot commit";
    }
    if (wrong.empty()) wrong = compare(*step + 1);
  }
  for (Device& device : devices_) device.close();
  return wrong;
}

}  // namespace smartinf::crash
