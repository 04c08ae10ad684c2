#include "smartinf/engine/reshard.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/new_run.h"
#include "smartinf/kernels/update.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/plan/placement.h"
#include "smartinf/plan/row_schedule.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

/// Target of state on a drive that no target is on; for plan::place a device that is gone.
constexpr uint32_t kNoTarget = ~uint32_t{0};

/// A log of tables' rows is not made smaller than this by being shared out.
constexpr uint64_t kSharedLogBytesMin = 8 * base::kMiB;

/// Records of a device's part of all tables that are copied.
uint64_t device_bytes(const csd::DeviceTables& tables) {
  uint64_t bytes = 0;
  for (size_t t = 0; t < tables.placements.size(); ++t) {
    const storage::RowTableLayout& table = tables.layout.tables[t];
    if (table.kind != storage::RowTableKind::kScratch) bytes += table.rows * table.record_bytes;
  }
  return bytes;
}

/// One subgroup is read while another is written.
constexpr size_t kBuffers = 2;

class Resharder {
 public:
  Resharder(StoredRun& from, const DeviceSources& targets, const ReshardOptions& options)
      : from_(from), targets_(targets), options_(options) {}
  ~Resharder() {
    bool hung = false;
    for (const auto& made : made_) hung = !close(made) || hung;
    if (hung) storage::leak_in_flight(std::move(buffers_));
  }

  Result<ReshardSummary> run() {
    SI_RETURN_IF_ERROR(plan());
    SI_RETURN_IF_ERROR(create());
    SI_RETURN_IF_ERROR(allocate());
    for (size_t i = 0; i < subgroups_.size(); ++i) {
      if (!of_other_rank(owner_[i].value)) SI_RETURN_IF_ERROR(copy_subgroup(i));
    }
    for (Buffer& buffer : buffers_) SI_RETURN_IF_ERROR(wait_for(buffer));
    SI_RETURN_IF_ERROR(copy_tables());
    std::erase(made_, nullptr);
    for (const auto& made : made_) SI_RETURN_IF_ERROR(made->prepare(from_.client_metadata));
    for (const auto& made : made_) SI_RETURN_IF_ERROR(made->commit());
    for (const auto& made : made_) SI_RETURN_IF_ERROR(made->close());
    SI_RETURN_IF_ERROR(take_places());
    for (const auto& made : made_) SI_RETURN_IF_ERROR(made->finish());
    for (const auto& device : from_.devices) {
      summary_.blocks_without_checksum += device->blocks_without_checksum();
    }
    return summary_;
  }

 private:
  bool of_other_rank(size_t target) const {
    return options_.keep_places && from_.devices[target]->elsewhere();
  }

  static bool close(const std::unique_ptr<csd::NewState>& made) {
    return made == nullptr || made->close().ok();
  }

  /// The new states are whole and durable: they take the places of the old ones, all or none.
  Status take_places() {
    for (size_t taken = 0; taken < made_.size(); ++taken) {
      const Status status = made_[taken]->take_place();
      if (status.ok()) continue;
      while (taken-- > 0) {
        const Status back = made_[taken]->give_back();
        if (!back.ok()) base::log(base::LogLevel::kWarning, back.to_string());
      }
      return status;
    }
    return Status();
  }

  struct Buffer {
    base::AlignedBuffer own;  // unless lent
    std::span<std::byte> memory;
    csd::SubgroupWrite write;
    csd::NewState* to = nullptr;  // while it is under way
  };

  void plan_same_places() {
    for (const StoredRun::Piece& piece : from_.pieces) {
      const auto id = static_cast<uint32_t>(subgroups_.size());
      subgroups_.push_back({base::SubgroupId{id}, piece.first, piece.count});
      owner_.push_back(base::DeviceId{static_cast<uint32_t>(piece.device)});
    }
    summary_.subgroup_elements = from_.subgroup_elements();
  }

  Status plan() {
    if (options_.keep_places) {
      plan_same_places();
      return Status();
    }
    const plan::ParameterSpace& space = from_.description.space;
    plan::MemoryPlanInput input;
    input.budget_bytes = options_.memory_budget_bytes;
    input.elements = space.count();
    input.format = options_.format;
    input.planes = from_.layout().planes;
    input.subgroup_elements =
        options_.subgroup_elements != 0 ? options_.subgroup_elements : from_.subgroup_elements();
    // Memory that is lent holds a subgroup of its lender's.
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
    subgroups_ = plan::cut_by_stage(space.subgroups(subgroup_elements), options_.stages);
    summary_.subgroup_elements = subgroup_elements;

    StateSize size;
    size.format = options_.format;
    size.planes = input.planes;
    size.durability = options_.durability;
    size.gradient_spill_bytes = from_.layout().gradient_spill_bytes;
    size.subgroup_elements = subgroup_elements;
    SI_ASSIGN_OR_RETURN(Placement placement,
                        place_state(size, subgroups_, targets_, options_.bandwidths,
                                    present_owners(), options_.stages));
    owner_ = std::move(placement.owner);
    for (uint32_t device = 0; device < targets_.size(); ++device) {
      if (std::any_of(owner_.begin(), owner_.end(),
                      [&](base::DeviceId owner_id) { return owner_id.value == device; })) {
        continue;
      }
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("nothing of the state would be kept here: it has {} subgroups of "
                                "{}, and {} are free",
                                subgroups_.size(), base::format_bytes(size.subgroup_bytes()),
                                placement.free_text),
                    "Leave this place out, or free space there.",
                    base::ErrorPlace{targets_[device]->name(), {}, {}, 0});
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
      const std::string drive = from_.devices[source]->drive();
      for (uint32_t target = 0; !drive.empty() && target < targets_.size(); ++target) {
        if (paired[target] || targets_[target]->drive() != drive) continue;
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
    description.devices = options_.names;
    for (size_t i = 0; options_.names.empty() && i < targets_.size(); ++i) {
      description.devices.push_back(targets_[i]->name());
    }
    geometry_.resize(targets_.size());
    position_.resize(subgroups_.size());
    storage::StoreLayout layout;
    layout.run = options_.keep_run ? from_.layout().run : storage::make_run_id();
    layout.device_count = static_cast<uint32_t>(targets_.size());
    layout.format = options_.format;
    layout.planes = from_.layout().planes;
    layout.gradient_spill_bytes = from_.layout().gradient_spill_bytes;
    layout.description = to_json(description);
    layout.copied_step = from_.step;
    const csd::NewStateOptions new_state{options_.durability, options_.replace};
    made_.resize(targets_.size());
    // Devices come last that cannot keep the old state until the new one is whole.
    for (const bool keeps : {true, false}) {
      for (uint32_t device = 0; device < targets_.size(); ++device) {
        if (of_other_rank(device) || targets_[device]->keeps_replaced() != keeps) continue;
        set_device(layout, base::DeviceId{device}, subgroups_, owner_);
        for (size_t i = 0; i < layout.subgroups.size(); ++i) {
          position_[layout.subgroups[i].id.value] = i;
        }
        SI_ASSIGN_OR_RETURN(made_[device], targets_[device]->create_state(layout, new_state));
        SI_ASSIGN_OR_RETURN(geometry_[device], storage::Geometry::make(layout, 1));
        if (from_.tables != nullptr) SI_RETURN_IF_ERROR(create_tables(layout.run, device));
      }
    }
    summary_.run = layout.run;
    summary_.step = from_.step;
    return Status();
  }

  /// Shares of rows are those of parameters, as when a run begins.
  std::vector<uint8_t> chunks() const {
    if (options_.keep_places) return from_.tables->tables().chunks;
    std::vector<double> elements(targets_.size());
    for (const plan::Subgroup& subgroup : subgroups_) {
      elements[owner_[subgroup.id.value].value] += static_cast<double>(subgroup.count);
    }
    return plan::row_pattern(elements);
  }

  /// Index, devices and log of a target's rows. A checkpoint keeps them, and takes no space for the
  /// log.
  storage::RowFileLayout row_layout(uint32_t device) const {
    if (options_.keep_places) return from_.devices[device]->tables().value()->layout();
    storage::RowFileLayout layout;
    layout.device_index = device;
    layout.device_count = static_cast<uint32_t>(targets_.size());
    const uint64_t log_bytes = from_.tables->log_bytes();
    layout.log_bytes =
        std::max(log_bytes / layout.device_count, std::min(kSharedLogBytesMin, log_bytes));
    return layout;
  }

  Status create_tables(const storage::RunId& run, uint32_t device) {
    const csd::RunTables tables{from_.tables->tables().tables, chunks()};
    const storage::RowFileLayout layout = row_layout(device);
    tables_.resize(targets_.size());
    SI_ASSIGN_OR_RETURN(tables_[device], csd::device_tables(tables, run, layout.device_index,
                                                            layout.device_count, layout.log_bytes));
    bytes_total_ += device_bytes(tables_[device]);
    return made_[device]
        ->create_tables(tables_[device].layout, options_.durability == storage::Durability::kNone)
        .with_context("device " + targets_[device]->name());
  }

  Status copy_tables() {
    for (size_t device = 0; device < tables_.size(); ++device) {
      if (made_[device] == nullptr) continue;
      const uint64_t before = bytes_done_;
      SI_RETURN_IF_ERROR(from_.tables->copy_to(tables_[device], *made_[device], [&](uint64_t done) {
        bytes_done_ = before + done;
        return options_.progress ? options_.progress(bytes_done_, bytes_total_) : Status();
      }));
    }
    return Status();
  }

  Status allocate() {
    uint64_t extent_bytes = 0;
    for (size_t device = 0; device < geometry_.size(); ++device) {
      if (of_other_rank(device)) continue;
      const storage::Geometry& geometry = geometry_[device];
      extent_bytes =
          std::max(extent_bytes, base::round_up(geometry.extent_bytes_max(), base::kIoAlignment));
      for (size_t i = 0; i < geometry.subgroups(); ++i) bytes_total_ += geometry.extent_bytes(i);
    }
    summary_.state_bytes = bytes_total_;
    if (extent_bytes == 0) return Status();
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
    csd::NewState* const to = std::exchange(buffer.to, nullptr);
    return to == nullptr ? Status() : to->wait(buffer.write);
  }

  Status copy_subgroup(size_t index) {
    Buffer& buffer = buffers_[index % buffers_.size()];
    SI_RETURN_IF_ERROR(wait_for(buffer));
    const uint32_t device = owner_[index].value;
    const storage::Geometry& geometry = geometry_[device];
    const size_t position = position_[index];
    for (size_t plane = 0; plane < from_.layout().planes.size(); ++plane) {
      SI_RETURN_IF_ERROR(fill_plane(subgroups_[index], plane,
                                    buffer.memory.subspan(geometry.plane_offset(position, plane),
                                                          geometry.plane_bytes(position, plane))));
    }
    buffer.write.subgroup = position;
    buffer.write.memory = buffer.memory;
    buffer.to = made_[device].get();
    buffer.to->start(buffer.write);
    bytes_done_ += geometry.extent_bytes(position);
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
      csd::Snapshot& snapshot = *from_.devices[piece.device];
      const uint64_t within = subgroup.first + done - piece.first;
      const uint64_t block = within / base::kBlockElements;
      uint64_t count = std::min(subgroup.count - done, piece.count - within);
      const std::span<std::byte> rest = out.subspan(done / base::kBlockElements * stride);
      if (old == encoding(plane)) {
        const uint64_t blocks = base::divide_up(count, base::kBlockElements);
        SI_RETURN_IF_ERROR(snapshot.read_blocks(piece.subgroup, plane, block, blocks,
                                                rest.first(base::encoded_bytes(old, count))));
      } else {
        count = std::min(count, base::kBlockElements);
        const auto encoded = std::span<std::byte>(encoded_).first(base::encoded_bytes(old, count));
        SI_RETURN_IF_ERROR(snapshot.read_blocks(piece.subgroup, plane, block, 1, encoded));
        kernels::kernels().decode_block(old, kind, encoded.data(), values_.data(), count);
        kernels::kernels().encode_block(encoding(plane), kind, values_.data(), rest.data(), count,
                                        subgroup.first + done, from_.step, options_.seed);
      }
      done += count;
    }
    return Status();
  }

  StoredRun& from_;
  const DeviceSources& targets_;
  const ReshardOptions& options_;
  ReshardSummary summary_;
  std::vector<plan::Subgroup> subgroups_;
  std::vector<base::DeviceId> owner_;
  std::vector<size_t> position_;             // of every subgroup in its device's layout
  std::vector<storage::Geometry> geometry_;  // of every target
  std::vector<std::byte> encoded_;
  std::vector<float> values_;
  std::vector<csd::DeviceTables> tables_;  // of every target; empty: the run has none
  uint64_t bytes_done_ = 0;
  uint64_t bytes_total_ = 0;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<csd::NewState>> made_;  // by target
};

}  // namespace

Result<ReshardSummary> reshard(StoredRun& from, const DeviceSources& targets,
                               const ReshardOptions& options) {
  if (targets.empty()) {
    return Status(ErrorCode::kInvalidArgument, "no device is named for the state to go to",
                  "Name at least one directory or block device.");
  }
  std::set<std::string> places;
  for (const auto& target : targets) {
    if (places.insert(target->place()).second) continue;
    return Status(ErrorCode::kInvalidArgument, "a device is named twice",
                  "Give every device a directory of its own.",
                  base::ErrorPlace{target->name(), {}, {}, 0});
  }
  return Resharder(from, targets, options).run();
}

}  // namespace smartinf::engine
