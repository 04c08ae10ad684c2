#include "smartinf/engine/whole_state.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "smartinf/base/check.h"

namespace smartinf::engine {

using base::Status;
using csd::Completion;

namespace {

/// Elements of one plane in one command when state is read.
constexpr uint64_t kReadElementsMax = 4 * base::kBlockElements;

}  // namespace

WholeState::WholeState(const DeviceSet& set, size_t plane_count, base::AlignedBuffer staging,
                       DeviceWatch& watch)
    : set_(set), plane_count_(plane_count), staging_(std::move(staging)), replies_(watch) {}

Status WholeState::on_device(csd::Device& device, csd::Message message) {
  replies_.submit(device, std::move(message));
  return replies_.next().status;
}

Status WholeState::on_all_devices(const csd::Message& message) {
  for (const auto& device : set_.devices) replies_.submit(*device, message);
  Status result;
  while (replies_.owed() > 0) {
    Status status = replies_.next().status;
    if (result.ok()) result = std::move(status);
  }
  return result;
}

Status WholeState::fill(const Fill& fill) {
  // Two halves: one is filled while the other is being written.
  auto* floats = reinterpret_cast<float*>(staging_.data());
  const uint64_t half_elements = staging_.size() / sizeof(float) / 2;
  std::array<const csd::Command*, 2> halves{};  // in flight
  Status result;
  const auto finish_one = [&] {
    Completion completion = replies_.next();
    for (auto& half : halves) {
      if (half == completion.command) half = nullptr;
    }
    if (result.ok()) result = std::move(completion.status);
  };
  for (const plan::Subgroup& subgroup : set_.subgroups) {
    if (!set_.is_here(subgroup.id)) continue;
    if (halves[0] != nullptr && halves[1] != nullptr) finish_one();
    if (!result.ok()) break;
    SI_CHECK(subgroup.count <= half_elements, "a subgroup fits half of the staging buffer");
    const size_t half = halves[0] == nullptr ? 0 : 1;
    float* buffer = floats + half * half_elements;
    result = fill(subgroup.first, std::span<float>(buffer, subgroup.count));
    if (!result.ok()) break;
    halves[half] = replies_.submit(set_.device_of(subgroup.id),
                                   csd::WriteState{subgroup.id, subgroup.count, {buffer}});
  }
  while (replies_.owed() > 0) finish_one();
  return result;
}

Status WholeState::read(uint32_t plane_mask, size_t plane_count, const Visit& visit,
                        const Choice& chosen) {
  size_t wanted = 0;
  for (size_t p = 0; p < plane_count; ++p) wanted += (plane_mask >> p) & 1u;
  if (wanted == 0) return Status();

  // The staging buffer as a ring of pieces; reads run ahead, visits follow in order.
  const uint64_t floats = staging_.size() / sizeof(float);
  uint64_t piece = std::min(kReadElementsMax, floats / wanted / 2);
  piece = piece / base::kBlockElements * base::kBlockElements;
  SI_CHECK(piece > 0, "the staging buffer holds a block of every plane twice");
  const size_t pieces = floats / (piece * wanted);

  struct Piece {
    const csd::Command* command = nullptr;  // in flight
    uint64_t first = 0;
    std::array<std::span<const float>, 4> planes;
    Status status;
  };
  std::vector<Piece> ring(pieces);
  size_t next_subgroup = 0;
  uint64_t next_within = 0;
  size_t sent = 0;
  size_t visited = 0;
  auto* memory = reinterpret_cast<float*>(staging_.data());
  const auto send = [&] {
    const plan::Subgroup& subgroup = set_.subgroups[next_subgroup];
    Piece& slot = ring[sent % pieces];
    slot = Piece{};
    slot.first = subgroup.first + next_within;
    csd::ReadState read{subgroup.id, next_within, std::min(piece, subgroup.count - next_within)};
    float* out = memory + (sent % pieces) * piece * wanted;
    for (size_t p = 0; p < plane_count; ++p) {
      if (((plane_mask >> p) & 1u) == 0) continue;
      read.planes[p] = out;
      slot.planes[p] = {out, read.count};
      out += piece;
    }
    next_within += read.count;
    if (next_within == subgroup.count) {
      ++next_subgroup;
      next_within = 0;
    }
    ++sent;
    slot.command = replies_.submit(set_.device_of(subgroup.id), read);
  };
  const auto more = [&] {
    const size_t count = set_.subgroups.size();
    for (; next_subgroup < count; ++next_subgroup) {
      const plan::Subgroup& subgroup = set_.subgroups[next_subgroup];
      if (set_.is_here(subgroup.id) && (!chosen || chosen(subgroup))) return true;
    }
    return false;
  };
  Status result;
  while (visited < sent || (result.ok() && more())) {
    while (result.ok() && more() && sent - visited < pieces) send();
    Piece& oldest = ring[visited % pieces];
    while (oldest.command != nullptr) {
      Completion completion = replies_.next();
      for (Piece& candidate : ring) {
        if (candidate.command != completion.command) continue;
        candidate.command = nullptr;
        candidate.status = std::move(completion.status);
        break;
      }
    }
    if (result.ok()) result = std::move(oldest.status);
    if (result.ok()) {
      result = visit(oldest.first,
                     std::span<const std::span<const float>>(oldest.planes.data(), plane_count));
    }
    ++visited;
  }
  return result;
}

Status WholeState::edit(const Edit& edit) {
  uint64_t count_max = 0;
  for (const plan::Subgroup& subgroup : set_.subgroups) {
    count_max = std::max(count_max, subgroup.count);
  }
  SI_ASSIGN_OR_RETURN(edit_memory_,
                      base::AlignedBuffer::allocate(count_max * plane_count_ * sizeof(float)));
  auto* floats = reinterpret_cast<float*>(edit_memory_.data());
  for (const plan::Subgroup& subgroup : set_.subgroups) {
    if (!set_.is_here(subgroup.id)) continue;
    csd::ReadState read{subgroup.id, 0, subgroup.count};
    csd::WriteState write{subgroup.id, subgroup.count, {}, (1u << plane_count_) - 1};
    std::array<std::span<float>, 4> planes;
    for (size_t p = 0; p < plane_count_; ++p) {
      read.planes[p] = floats + p * count_max;
      write.planes[p] = read.planes[p];
      planes[p] = {read.planes[p], subgroup.count};
    }
    SI_RETURN_IF_ERROR(on_device(set_.device_of(subgroup.id), read));
    SI_ASSIGN_OR_RETURN(const bool changed, edit(subgroup.first, std::span<const std::span<float>>(
                                                                     planes.data(), plane_count_)));
    if (changed) SI_RETURN_IF_ERROR(on_device(set_.device_of(subgroup.id), write));
  }
  edit_memory_ = base::AlignedBuffer();
  return Status();
}

}  // namespace smartinf::engine
