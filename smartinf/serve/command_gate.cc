#include "smartinf/serve/command_gate.h"

#include <algorithm>
#include <bit>
#include <string>
#include <unordered_set>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/compress/message.h"
#include "smartinf/storage/format.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr uint32_t kGroupsMax = uint32_t{1} << 16;
constexpr uint32_t kWeightReadSlotsMax = 64;
constexpr uint64_t kCompressedBlockBytesMax = uint64_t{1} << 20;
// Of a matrix; what MatrixSamples multiplies fits 64 bits.
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

CommandGate::CommandGate(const storage::StoreLayout& layout, const csd::DeviceShare& share,
                         bool created)
    : layout_(layout),
      share_(share),
      samples_(compress::sample_count(share.matrices)),
      recovered_(created) {
  for (size_t i = 0; i < layout.subgroups.size(); ++i) {
    index_[layout.subgroups[i].id] = i;
    elements_ += layout.subgroups[i].count;
  }
  for (const plan::GroupSpan& span : share.groups) groups_ = std::max(groups_, span.group + 1);
}

const storage::StoredSubgroup* CommandGate::find(base::SubgroupId subgroup) const {
  const auto found = index_.find(subgroup);
  return found == index_.end() ? nullptr : &layout_.subgroups[found->second];
}

Result<uint64_t> CommandGate::payload_bytes(const CommandBody& body) const {
  const auto subgroup_of = [&](base::SubgroupId id) -> Result<const storage::StoredSubgroup*> {
    if (const storage::StoredSubgroup* found = find(id); found != nullptr) return found;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("subgroup {} belongs to another device", id.value));
  };
  if (const auto* put = std::get_if<Gradient>(&body)) {
    SI_ASSIGN_OR_RETURN(const auto* subgroup, subgroup_of(put->subgroup));
    if (put->first > subgroup->count || put->count > subgroup->count - put->first) {
      return refused(fmt::format("gradient elements {} and {} following of a subgroup of {}",
                                 put->first, put->count, subgroup->count));
    }
    return put->count * base::data_type_bytes(put->type);
  }
  if (const auto* given = std::get_if<StateGiven>(&body)) {
    SI_ASSIGN_OR_RETURN(const auto* subgroup, subgroup_of(given->subgroup));
    const bool residual = layout_.planes.back() == base::PlaneKind::kResidual;
    if (given->count != subgroup->count || (given->planes >> layout_.planes.size()) != 0 ||
        (given->residual && !residual)) {
      return refused(
          fmt::format("elements 0 and {} following of subgroup {} cannot be "
                      "transferred",
                      given->count, given->subgroup.value));
    }
    return subgroup->count * (sizeof(float) * static_cast<uint64_t>(std::popcount(given->planes)) +
                              (given->residual ? sizeof(base::Bf16) : 0));
  }
  // For these the frame says how much comes; how much may come is the account's and theirs.
  if (const auto* put = std::get_if<CompressedGradient>(&body)) {
    SI_RETURN_IF_ERROR(subgroup_of(put->subgroup).status());
    return ~uint64_t{0};
  }
  if (std::holds_alternative<SpoolGiven>(body)) return ~uint64_t{0};
  return uint64_t{0};
}

Status CommandGate::admit(const CommandBody& body, const storage::StoreState& state) {
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
      if (find(subgroup) == nullptr || !once.insert(subgroup).second) {
        return refused(fmt::format("subgroup {} twice, or of another device", subgroup.value));
      }
    }
    cached_ = true;
    return Status();
  }
  if (!recovered_) return out_of_order("the device has not been recovered");
  begun_ = true;
  if (std::holds_alternative<csd::BeginStep>(body) && updates_ > 0) {
    return out_of_order("a step begins when the update of the one before has ended");
  }
  const bool gradient =
      std::holds_alternative<Gradient>(body) || std::holds_alternative<CompressedGradient>(body);
  if (gradient && late_updates_ > 0) {
    return out_of_order("a gradient comes when an update has all of them");
  }
  if (const auto* prefetch = std::get_if<csd::Prefetch>(&body)) {
    if (!state.initialized) return out_of_order("there is no committed state to read");
    if (prefetch->subgroups.size() > layout_.subgroups.size()) {
      return refused("more subgroups than the device has");
    }
  }
  if (const auto* prepare = std::get_if<csd::Prepare>(&body)) {
    if (prepare->client_metadata.size() > storage::Store::kClientMetadataBytesMax) {
      return refused(fmt::format("{} bytes of metadata where {} may come",
                                 prepare->client_metadata.size(),
                                 storage::Store::kClientMetadataBytesMax));
    }
  }
  if (const auto* wanted = std::get_if<StateWanted>(&body)) {
    const storage::StoredSubgroup* subgroup = find(wanted->subgroup);
    if (subgroup == nullptr || (wanted->planes >> layout_.planes.size()) != 0 ||
        wanted->first > subgroup->count || wanted->count > subgroup->count - wanted->first) {
      return refused(
          fmt::format("elements {} and {} following of subgroup {} cannot be "
                      "transferred",
                      wanted->first, wanted->count, wanted->subgroup.value));
    }
  }
  if (const auto* read = std::get_if<ReadWanted>(&body); read != nullptr) {
    if (find(read->subgroup) == nullptr) {
      return refused(fmt::format("subgroup {} belongs to another device", read->subgroup.value));
    }
  }
  if (const auto* update = std::get_if<UpdateWanted>(&body)) return admit_update(*update, state);
  return Status();
}

Status CommandGate::admit_update(const UpdateWanted& update, const storage::StoreState& state) {
  if (!state.initialized) return out_of_order("there is no committed state to update");
  if (updates_ >= kUpdatesMax) return out_of_order("more updates than a step has");
  if (update.scalars.size() < groups_ || update.scalars.size() > kGroupsMax) {
    return refused(
        fmt::format("an update for {} of {} parameter groups", update.scalars.size(), groups_));
  }
  const kernels::UpdateRule rule = update.scalars.front().rule;
  for (const kernels::StepScalars& scalars : update.scalars) {
    if (scalars.rule != rule) return refused("an update by more than one rule");
  }
  const bool samples_known =
      !share_.matrices.empty() && kernels::takes_factored_second_moment(rule);
  std::unordered_set<base::SubgroupId> once;
  for (const WeightsWanted& entry : update.updates) {
    if (!once.insert(entry.subgroup).second) {
      return refused(fmt::format("an update of subgroup {} twice", entry.subgroup.value));
    }
    if (find(entry.subgroup) == nullptr) {
      return refused(fmt::format("subgroup {} belongs to another device", entry.subgroup.value));
    }
    if (entry.samples && !samples_known) {
      return refused(
          "samples of variances, of a device that knows no matrices or of a rule "
          "without them");
    }
  }
  ++updates_;
  if (!update.as_completed) ++late_updates_;
  return Status();
}

void CommandGate::finished(const CommandBody& body) {
  const auto* update = std::get_if<UpdateWanted>(&body);
  if (update == nullptr) return;
  --updates_;
  if (!update->as_completed) --late_updates_;
}

}  // namespace smartinf::serve::wire
