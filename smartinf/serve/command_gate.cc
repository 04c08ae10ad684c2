#include "smartinf/serve/command_gate.h"

#include <algorithm>
#include <string>
#include <unordered_set>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/row_file.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Status;

constexpr uint32_t kGroupsMax = uint32_t{1} << 16;
constexpr uint32_t kWeightReadSlotsMax = 64;
constexpr uint64_t kCompressedBlockBytesMax = uint64_t{1} << 20;
// Rows of a matrix, at most; what MatrixSamples multiplies fits 64 bits.
constexpr uint64_t kRowsMax = uint64_t{1} << 33;
constexpr uint64_t kElementsMax = plan::ParameterSpace::kElementsMax;
// Two updates can be under way: one as gradients become complete, and what ends it.
constexpr uint32_t kUpdatesMax = 2;

Status refused(std::string what) {
  return Status(ErrorCode::kInvalidArgument, std::move(what),
                "The server does not pass it on to its device.");
}
Status out_of_order(std::string what) {
  return Status(ErrorCode::kFailedPrecondition, std::move(what));
}

uint64_t end_of(const storage::StoreLayout& layout) {
  uint64_t end = 0;
  for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
    end = std::max(end, subgroup.first_element + subgroup.count);
  }
  return end;
}

}  // namespace

Status check_layout(const storage::StoreLayout& layout, storage::Durability durability,
                    uint64_t spool_bytes, uint64_t bytes_max) {
  const uint32_t slots = durability == storage::Durability::kNone ? 1 : 2;
  if (layout.planes.empty() || layout.planes.size() > base::kPlaneKindNames.size() ||
      layout.planes.front() != base::PlaneKind::kMaster) {
    return refused("a state whose first plane is not the master weights");
  }
  // Ascending: each once, a residual last.
  if (!std::ranges::is_sorted(layout.planes) ||
      std::ranges::adjacent_find(layout.planes) != layout.planes.end()) {
    return refused("a state with planes twice or in another order");
  }
  if (layout.device_count == 0 || layout.device_index >= layout.device_count ||
      (layout.gradient_spill_bytes != 0 && layout.gradient_spill_bytes != 2 &&
       layout.gradient_spill_bytes != 4)) {
    return refused("a layout that contradicts itself");
  }
  for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
    if (subgroup.count == 0 || subgroup.count > kElementsMax ||
        subgroup.first_element > kElementsMax - subgroup.count ||
        subgroup.first_element % base::kBlockElements != 0) {
      return refused(fmt::format("subgroup {} is nowhere in a parameter space", subgroup.id.value));
    }
  }
  SI_ASSIGN_OR_RETURN(const storage::Geometry geometry, storage::Geometry::make(layout, slots));
  const uint64_t bytes = geometry.container_bytes();
  if (bytes > bytes_max || spool_bytes > bytes_max - bytes) {
    return Status(ErrorCode::kNoSpace,
                  fmt::format("the state needs {} with its spool of {}, and a client may have {} "
                              "there",
                              base::format_bytes(bytes), base::format_bytes(spool_bytes),
                              base::format_bytes(bytes_max)),
                  "Give the model more devices, or the device a larger quota (quota in the "
                  "server's file).");
  }
  return Status();
}

Status check_tables(const storage::RowFileLayout& layout, uint64_t others_bytes,
                    uint64_t quota_bytes) {
  SI_RETURN_IF_ERROR(storage::RowFile::check(layout));
  const uint64_t bytes = storage::RowFile::file_bytes(layout);
  if (quota_bytes == 0 || (others_bytes <= quota_bytes && bytes <= quota_bytes - others_bytes)) {
    return Status();
  }
  return Status(ErrorCode::kNoSpace,
                fmt::format("the tables need {} beside the state, and a client may have {} there",
                            base::format_bytes(bytes), base::format_bytes(quota_bytes)),
                "Give the model more devices, or the device a larger quota (quota in the server's "
                "file).");
}

Status check_share(const storage::StoreLayout& layout, const csd::DeviceShare& share) {
  if (share.weight_read_slots > kWeightReadSlotsMax ||
      share.compressed_block_bytes > kCompressedBlockBytesMax) {
    return refused("options for a device that no engine gives");
  }
  const uint64_t end = end_of(layout);
  uint64_t next = 0;
  for (const plan::GroupSpan& span : share.groups) {
    if (span.first != next || span.count == 0 || span.count > kElementsMax - next ||
        span.group >= kGroupsMax) {
      return refused("parameter groups that do not follow each other");
    }
    next += span.count;
  }
  if (!share.groups.empty() && next < end) {
    return refused("parameter groups that do not cover the device's elements");
  }
  next = 0;
  uint64_t samples = 0;
  for (const compress::MatrixLayout& matrix : share.matrices) {
    if (matrix.first != next || matrix.rows == 0 || matrix.columns == 0 || matrix.rows > kRowsMax ||
        matrix.columns > kRowsMax || matrix.columns > kElementsMax / matrix.rows ||
        matrix.count() > kElementsMax - next || matrix.samples != samples) {
      return refused("matrices that do not follow each other");
    }
    next = matrix.end();
    samples += compress::MatrixSamples{matrix}.count();
  }
  if (!share.matrices.empty() && next < end) {
    return refused("matrices that do not cover the device's elements");
  }
  return Status();
}

Status CommandGate::admit(const CommandBody& body, const csd::DeviceSpace& space,
                          const storage::StoreState& state) {
  if (const auto* recover = std::get_if<RecoverTo>(&body)) {
    if (recovered_ || begun_) return out_of_order("a device is recovered once, after opening");
    if (recover->step != state.committed_step && recover->step != state.prepared_step) {
      return refused(
          fmt::format("a recovery to step {}, which the device does not hold", recover->step));
    }
    recovered_ = true;
    return Status();
  }
  if (const auto* cache = std::get_if<CacheState>(&body)) {
    if (cached_ || begun_) return out_of_order("what stays in memory is said once, after opening");
    std::unordered_set<base::SubgroupId> once;
    for (const base::SubgroupId subgroup : cache->subgroups) {
      if (space.find(subgroup) == nullptr || !once.insert(subgroup).second) {
        return refused(fmt::format("subgroup {} twice, or of another device", subgroup.value));
      }
    }
    cached_ = true;
    return Status();
  }
  if (!recovered_) return out_of_order("the device has not been recovered");
  begun_ = true;
  return admit_message(std::get<csd::Message>(body), state);
}

Status CommandGate::admit_message(const csd::Message& message, const storage::StoreState& state) {
  const bool gradient = std::holds_alternative<csd::PutGradient>(message) ||
                        std::holds_alternative<csd::PutCompressedGradient>(message);
  if (std::holds_alternative<csd::BeginStep>(message) && updates_ > 0) {
    return out_of_order("a step begins when the update of the one before has ended");
  }
  if (gradient && late_updates_ > 0) {
    return out_of_order("a gradient comes when an update has all of them");
  }
  if (std::holds_alternative<csd::Prefetch>(message) && !state.initialized) {
    return out_of_order("there is no committed state to read");
  }
  const auto* update = std::get_if<csd::Update>(&message);
  if (update == nullptr) return Status();
  if (!state.initialized) return out_of_order("there is no committed state to update");
  if (updates_ >= kUpdatesMax) return out_of_order("more updates than a step has");
  ++updates_;
  if (update->mode != plan::UpdateMode::kAsCompleted) ++late_updates_;
  return Status();
}

void CommandGate::finished(const csd::Message& message) {
  const auto* update = std::get_if<csd::Update>(&message);
  if (update == nullptr) return;
  --updates_;
  if (update->mode != plan::UpdateMode::kAsCompleted) --late_updates_;
}

}  // namespace smartinf::serve::wire
