#include "smartinf/engine/reshard.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/checkpoint_folder.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/kernels/update.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/plan/placement.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/erase.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;
namespace fs = std::filesystem;

namespace {

constexpr std::chrono::milliseconds kWait{100};
/// Of state on a drive that no target is on; for plan::place a device that is gone.
constexpr uint32_t kNoTarget = ~uint32_t{0};

/// Which file system holds a path, or will hold it.
std::optional<dev_t> file_system(std::filesystem::path path) {
  struct stat info {};
  while (stat(path.empty() ? "." : path.c_str(), &info) != 0) {
    if (!path.has_relative_path()) return std::nullopt;
    path = path.parent_path();
  }
  return S_ISBLK(info.st_mode) ? info.st_rdev : info.st_dev;
}

/// In a target whose state is replaced.
constexpr std::string_view kReplacementFolder = "smartinf.replacement";

/// One subgroup is read while another is written.
constexpr size_t kBuffers = 2;

class Resharder {
 public:
  Resharder(StoredRun& from, const std::vector<std::string>& targets, const ReshardOptions& options)
      : from_(from), targets_(targets), options_(options) {}

  Result<ReshardSummary> run() {
    Status status = copy();
    close_stores();
    if (status.ok()) status = take_places();
    if (status.ok()) return summary_;
    // Nothing half-made stays in the way.
    for (const uint32_t made : made_) clear(made);
    return status;
  }

 private:
  bool beside(uint32_t device) const { return places_[device] != targets_[device]; }

  void clear(uint32_t device) {
    const Status erased = storage::erase_store(places_[device]);
    if (!erased.ok()) base::log(base::LogLevel::kWarning, erased.to_string());
    if (beside(device)) (void)::rmdir(places_[device].c_str());
  }

  /// Where each target's store is made. What a target holds is locked until the end.
  Status choose_places() {
    places_ = targets_;
    locks_.resize(targets_.size());
    for (uint32_t device = 0; options_.replace && device < targets_.size(); ++device) {
      std::error_code error;
      const fs::path target = targets_[device];
      if (!fs::exists(target / storage::kStateFileName, error)) continue;
      SI_ASSIGN_OR_RETURN(locks_[device], storage::lock_container(targets_[device]));
      places_[device] = (target / kReplacementFolder).string();
      if (!fs::exists(places_[device], error)) continue;
      clear(device);  // of an attempt that was interrupted
    }
    return Status();
  }

  static Status exchange_states(const std::string& place, const std::string& target) {
    const std::string made = (fs::path(place) / storage::kStateFileName).string();
    const std::string old = (fs::path(target) / storage::kStateFileName).string();
    if (::renameat2(AT_FDCWD, made.c_str(), AT_FDCWD, old.c_str(), RENAME_EXCHANGE) == 0 ||
        ((errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) &&
         ::rename(made.c_str(), old.c_str()) == 0)) {
      return Status();
    }
    return base::errno_status(errno, "cannot put the new state in the old one's place", old);
  }

  /// The new states are whole and durable: they take the places of the old ones, all or none.
  Status take_places() {
    Status status;
    uint32_t taken = 0;
    for (; taken < targets_.size(); ++taken) {
      if (!beside(taken)) continue;
      status = exchange_states(places_[taken], targets_[taken]);
      if (!status.ok()) break;
    }
    if (!status.ok()) {
      while (taken-- > 0) {
        if (!beside(taken)) continue;
        const Status back = exchange_states(places_[taken], targets_[taken]);
        if (!back.ok()) base::log(base::LogLevel::kWarning, back.to_string());
      }
      return status;
    }
    for (uint32_t device = 0; device < targets_.size(); ++device) {
      if (!beside(device)) continue;
      SI_RETURN_IF_ERROR(sync_folder(targets_[device]));
      locks_[device].state.reset();  // of the old state, which lies in the other folder now
      clear(device);
    }
    return Status();
  }

  void close_stores() {
    bool hung = false;
    for (auto& store : stores_) {
      if (store == nullptr || store->close().ok()) continue;
      hung = true;
      storage::leak_in_flight(std::move(store));
    }
    if (hung) storage::leak_in_flight(std::move(buffers_));
    stores_.clear();
  }

  struct Buffer {
    base::AlignedBuffer own;  // unless lent
    std::span<std::byte> memory;
    storage::SubgroupIo io;
    bool flying = false;
  };

  Status copy() {
    SI_RETURN_IF_ERROR(plan());
    SI_RETURN_IF_ERROR(choose_places());
    SI_RETURN_IF_ERROR(create());
    SI_RETURN_IF_ERROR(allocate());
    for (size_t i = 0; i < subgroups_.size(); ++i) {
      SI_RETURN_IF_ERROR(copy_subgroup(i));
    }
    for (size_t b = 0; b < buffers_.size(); ++b) SI_RETURN_IF_ERROR(wait_for(buffers_[b]));
    for (auto& store : stores_)
      SI_RETURN_IF_ERROR(store->prepare(from_.step, from_.client_metadata));
    for (auto& store : stores_) SI_RETURN_IF_ERROR(store->commit(from_.step));
    for (const auto& reader : from_.devices) {
      summary_.blocks_without_checksum += reader->blocks_without_checksum();
    }
    return Status();
  }

  Status plan() {
    const plan::ParameterSpace& space = from_.description.space;
    plan::MemoryPlanInput input;
    input.budget_bytes = options_.memory_budget_bytes;
    input.elements = space.count();
    input.format = options_.format;
    input.planes = from_.layout().planes;
    input.subgroup_elements =
        options_.subgroup_elements != 0 ? options_.subgroup_elements : from_.subgroup_elements();
    // What is lent holds a subgroup of its lender's.
    uint64_t subgroup_elements = from_.subgroup_elements();
    if (options_.scratch_memory.empty()) {
      auto memory = plan::plan_memory(input);
      if (!memory.ok() && options_.subgroup_elements == 0) {
        input.subgroup_elements = 0;
        memory = plan::plan_memory(input);
      }
      if (!memory.ok()) return std::move(memory).status();
      subgroup_elements = memory->subgroup_elements;
    }
    // Every device gets something.
    const uint64_t share = space.count() / targets_.size() / base::kBlockElements;
    if (options_.subgroup_elements == 0 && share > 0) {
      subgroup_elements = std::min(subgroup_elements, share * base::kBlockElements);
    }
    subgroups_ = space.subgroups(subgroup_elements);
    summary_.subgroup_elements = subgroup_elements;

    UpdaterOptions look;
    for (const std::string& target : targets_) look.devices.emplace_back().path = target;
    const auto sources = local_sources(look);
    const uint64_t slots = options_.durability == storage::Durability::kStep ? 2 : 1;
    const uint64_t each =
        slots * plan::state_bytes(options_.format, input.planes, subgroup_elements) +
        subgroup_elements * from_.layout().gradient_spill_bytes;
    std::vector<plan::DeviceCapacity> capacities;
    std::string free_text;
    for (size_t i = 0; i < sources.size(); ++i) {
      SI_ASSIGN_OR_RETURN(const uint64_t free_bytes, sources[i]->capacity_bytes());
      plan::DeviceCapacity capacity;
      capacity.elements_max = free_bytes / each * subgroup_elements;
      if (!options_.bandwidths.empty()) capacity.bandwidth = options_.bandwidths[i];
      capacities.push_back(capacity);
      free_text += fmt::format("{}{} on {}", free_text.empty() ? "" : ", ",
                               base::format_bytes(free_bytes), targets_[i]);
    }
    auto owner = plan::place(subgroups_, capacities, present_owners());
    if (!owner.ok() && owner.status().code() == ErrorCode::kNoSpace) {
      return Status(ErrorCode::kNoSpace,
                    fmt::format("the state needs {}, free are {}",
                                base::format_bytes(each * subgroups_.size()), free_text),
                    "Free space there, or name another or a further place.");
    }
    SI_ASSIGN_OR_RETURN(owner_, std::move(owner));
    for (uint32_t device = 0; device < targets_.size(); ++device) {
      if (std::any_of(owner_.begin(), owner_.end(),
                      [&](base::DeviceId owner_id) { return owner_id.value == device; })) {
        continue;
      }
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("nothing of the state would be kept here: it has {} subgroups of "
                                "{}, and free are {}",
                                subgroups_.size(), base::format_bytes(each), free_text),
                    "Leave this place out, or free space there.",
                    base::ErrorPlace{targets_[device], {}, {}, 0});
    }
    return Status();
  }

  /// The target on whose drive each subgroup lies now, so that no more than it takes goes from one
  /// drive to another. Of several directories on one file system the n-th source is paired with the
  /// n-th target.
  std::vector<base::DeviceId> present_owners() const {
    std::vector<uint32_t> target_of(from_.devices.size(), kNoTarget);
    std::vector<bool> paired(targets_.size(), false);
    for (size_t source = 0; source < from_.devices.size(); ++source) {
      const auto drive = file_system(from_.devices[source]->path());
      for (uint32_t target = 0; drive && target < targets_.size(); ++target) {
        if (paired[target] || file_system(targets_[target]) != drive) continue;
        target_of[source] = target;
        paired[target] = true;
        break;
      }
    }
    std::vector<base::DeviceId> owners;
    for (const plan::Subgroup& subgroup : subgroups_) {
      owners.push_back(base::DeviceId{target_of[from_.at(subgroup.first).device]});
    }
    return owners;
  }

  Status create() {
    RunDescription description = from_.description;
    description.devices = options_.names.empty() ? targets_ : options_.names;
    storage::StoreLayout layout;
    layout.run = options_.keep_run ? from_.layout().run : storage::make_run_id();
    layout.device_count = static_cast<uint32_t>(targets_.size());
    layout.format = options_.format;
    layout.planes = from_.layout().planes;
    layout.gradient_spill_bytes = from_.layout().gradient_spill_bytes;
    layout.description = to_json(description);
    layout.copied_step = from_.step;
    storage::StoreOptions store_options;
    store_options.ring.kind = options_.ring;
    store_options.durability = options_.durability;
    stores_.resize(targets_.size());
    // Block devices last: there the old state cannot stay until the new one is whole.
    for (const bool block_devices : {false, true}) {
      for (uint32_t device = 0; device < targets_.size(); ++device) {
        std::error_code error;
        if (fs::is_block_file(targets_[device], error) != block_devices) continue;
        if (block_devices && options_.replace) {
          SI_RETURN_IF_ERROR(storage::erase_store(targets_[device]));
        }
        layout.device_index = device;
        layout.subgroups.clear();
        for (const plan::Subgroup& subgroup : subgroups_) {
          if (owner_[subgroup.id.value].value != device) continue;
          layout.subgroups.push_back({subgroup.id, subgroup.first, subgroup.count});
        }
        auto store = storage::Store::create(places_[device], layout, store_options);
        if (!store.ok()) {
          return std::move(store).status().with_context("device " + targets_[device]);
        }
        made_.push_back(device);
        (*store)->begin_step(from_.step);
        stores_[device] = std::move(*store);
      }
    }
    summary_.run = layout.run;
    summary_.step = from_.step;
    return Status();
  }

  Status allocate() {
    uint64_t extent_bytes = 0;
    for (const auto& store : stores_) {
      extent_bytes =
          std::max(extent_bytes, base::round_up(store->extent_bytes_max(), base::kIoAlignment));
    }
    for (size_t i = 0; i < subgroups_.size(); ++i) {
      bytes_total_ += stores_[owner_[i].value]->extent_bytes(subgroups_[i].id);
    }
    summary_.state_bytes = bytes_total_;
    buffers_ = std::vector<Buffer>(std::min(kBuffers, subgroups_.size()));
    std::vector<std::span<std::byte>> scratch = options_.scratch_memory;
    for (Buffer& buffer : buffers_) {
      const auto enough =
          std::find_if(scratch.begin(), scratch.end(),
                       [&](std::span<std::byte> memory) { return memory.size() >= extent_bytes; });
      if (enough != scratch.end()) {
        buffer.memory = enough->first(extent_bytes);
        *enough = enough->subspan(extent_bytes);
        continue;
      }
      // A lender with one slot in all: one buffer, and nothing overlaps.
      if (&buffer != &buffers_.front() && !scratch.empty()) {
        buffers_.resize(1);
        break;
      }
      SI_ASSIGN_OR_RETURN(buffer.own, base::AlignedBuffer::allocate(extent_bytes));
      buffer.memory = buffer.own.bytes();
    }
    if (options_.format != from_.layout().format) {
      encoded_.resize(base::encoded_bytes(base::Encoding::kF32, base::kBlockElements));
      values_.resize(base::kBlockElements);
    }
    return Status();
  }

  Status wait_for(Buffer& buffer) {
    if (!buffer.flying) return Status();
    storage::Store& store = *static_cast<storage::Store*>(buffer.io.owner);
    while (buffer.flying) {
      std::array<storage::SubgroupIo*, kBuffers> done{};
      SI_ASSIGN_OR_RETURN(const size_t count, store.poll(done, kWait));
      for (size_t i = 0; i < count; ++i) {
        for (Buffer& other : buffers_) {
          if (&other.io == done[i]) other.flying = false;
        }
      }
    }
    return buffer.io.status;
  }

  Status copy_subgroup(size_t index) {
    Buffer& buffer = buffers_[index % buffers_.size()];
    SI_RETURN_IF_ERROR(wait_for(buffer));
    const plan::Subgroup& subgroup = subgroups_[index];
    storage::Store& store = *stores_[owner_[index].value];
    for (size_t plane = 0; plane < from_.layout().planes.size(); ++plane) {
      const std::span<std::byte> bytes = buffer.memory.subspan(
          store.plane_offset(subgroup.id, plane), store.plane_bytes(subgroup.id, plane));
      SI_RETURN_IF_ERROR(fill_plane(subgroup, plane, bytes));
      const uint64_t stride = base::encoded_bytes(encoding(plane), base::kBlockElements);
      for (uint64_t block = 0; block * stride < bytes.size(); ++block) {
        store.seal_block(subgroup.id, plane, block,
                         bytes.subspan(block * stride,
                                       std::min<uint64_t>(stride, bytes.size() - block * stride)));
      }
    }
    buffer.io = storage::SubgroupIo{};
    buffer.io.op = storage::SubgroupIo::Op::kWrite;
    buffer.io.subgroup = subgroup.id;
    buffer.io.buffer = buffer.memory;
    buffer.io.owner = &store;
    buffer.flying = true;
    store.start(buffer.io);
    bytes_done_ += store.extent_bytes(subgroup.id);
    return options_.progress ? options_.progress(bytes_done_, bytes_total_) : Status();
  }

  base::Encoding encoding(size_t plane) const {
    return base::plane_encoding(options_.format, from_.layout().planes[plane]);
  }

  /// A plane of a new subgroup, out of the old subgroups that hold its elements.
  Status fill_plane(const plan::Subgroup& subgroup, size_t plane, std::span<std::byte> out) {
    const base::PlaneKind kind = from_.layout().planes[plane];
    const base::Encoding old = base::plane_encoding(from_.layout().format, kind);
    const uint64_t stride = base::encoded_bytes(encoding(plane), base::kBlockElements);
    for (uint64_t done = 0; done < subgroup.count;) {
      const StoredRun::Piece& piece = from_.at(subgroup.first + done);
      storage::StateReader& reader = *from_.devices[piece.device];
      const uint64_t within = subgroup.first + done - piece.first;
      const uint64_t block = within / base::kBlockElements;
      uint64_t count = std::min(subgroup.count - done, piece.count - within);
      const std::span<std::byte> rest = out.subspan(done / base::kBlockElements * stride);
      if (old == encoding(plane)) {
        const uint64_t blocks = base::divide_up(count, base::kBlockElements);
        SI_RETURN_IF_ERROR(reader.read_blocks(piece.subgroup, plane, block, blocks,
                                              rest.first(base::encoded_bytes(old, count))));
      } else {
        count = std::min(count, base::kBlockElements);
        const auto encoded = std::span<std::byte>(encoded_).first(base::encoded_bytes(old, count));
        SI_RETURN_IF_ERROR(reader.read_blocks(piece.subgroup, plane, block, 1, encoded));
        kernels::kernels().decode_block(old, kind, encoded.data(), values_.data(), count);
        kernels::kernels().encode_block(encoding(plane), kind, values_.data(), rest.data(), count,
                                        subgroup.first + done, from_.step, options_.seed);
      }
      done += count;
    }
    return Status();
  }

  StoredRun& from_;
  const std::vector<std::string>& targets_;
  const ReshardOptions& options_;
  ReshardSummary summary_;
  std::vector<plan::Subgroup> subgroups_;
  std::vector<base::DeviceId> owner_;
  std::vector<std::string> places_;  // of the targets; another one where a state is replaced
  std::vector<storage::ContainerLock> locks_;
  std::vector<uint32_t> made_;
  std::vector<std::byte> encoded_;
  std::vector<float> values_;
  uint64_t bytes_done_ = 0;
  uint64_t bytes_total_ = 0;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<storage::Store>> stores_;  // last: waits for what is in flight
};

}  // namespace

Result<ReshardSummary> reshard(StoredRun& from, const std::vector<std::string>& targets,
                               const ReshardOptions& options) {
  if (targets.empty()) {
    return Status(ErrorCode::kInvalidArgument, "no device is named for the state to go to",
                  "Name at least one directory or block device.");
  }
  for (auto target = targets.begin(); target != targets.end(); ++target) {
    if (std::find(targets.begin(), target, *target) == target) continue;
    return Status(ErrorCode::kInvalidArgument, "a device is named twice",
                  "Give every device a directory of its own.",
                  base::ErrorPlace{*target, {}, {}, 0});
  }
  return Resharder(from, targets, options).run();
}

}  // namespace smartinf::engine
