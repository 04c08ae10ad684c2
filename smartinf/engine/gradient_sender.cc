#include "smartinf/engine/gradient_sender.h"

#include <algorithm>
#include <utility>

#include "smartinf/kernels/update.h"

namespace smartinf::engine {

GradientSender::GradientSender(const DeviceSet& set, GradientTracker& tracker,
                               base::ThreadTeam& team, base::DataType type, DeviceWatch& watch)
    : set_(set), gradient_tracker_(tracker), team_(team), type_(type) {
  for (const auto& device : set_.devices) {
    const csd::DeviceInfo& info = device->info();
    spilled_ = spilled_ || (info.gradients_spilled && !info.of_other_rank);
  }
  for (uint32_t worker = 0; worker < team_.size(); ++worker) {
    lanes_.push_back(std::make_unique<Lane>(watch));
  }
}

GradientSender::Failure GradientSender::put(std::span<const GradientTracker::Piece> pieces,
                                            uint64_t first, const void* gradient,
                                            base::DataType type, std::span<std::byte> cast_memory) {
  SI_CHECK(type == type_ || cast_memory.size() >= team_.size() * kCastBytes,
           "casting needs memory for each thread");
  const auto* bytes = static_cast<const std::byte*>(gradient);
  const auto one = [&](uint32_t worker, size_t index) {
    Lane& lane = *lanes_[worker];
    if (!lane.failure.status.ok()) return;
    const GradientTracker::Piece& piece = pieces[index];
    const std::byte* values = bytes + (piece.first - first) * base::data_type_bytes(type);
    if (type != type_) {
      wait(lane, 0);  // the memory is used again
      std::byte* memory = cast_memory.data() + worker * kCastBytes;
      auto* wide = reinterpret_cast<float*>(memory);
      std::byte* narrow = memory + kGradientPieceElements * sizeof(float);
      const kernels::KernelTable& table = kernels::kernels();
      const float* floats = wide;
      if (type == base::DataType::kF32) {
        floats = reinterpret_cast<const float*>(values);
      } else {
        table.cast_to_f32(values, type, wide, piece.count);
      }
      values = memory;
      if (type_ != base::DataType::kF32) {
        table.cast_from_f32(floats, narrow, type_, piece.count);
        values = narrow;
      }
    }
    if (piece.measured) gradient_tracker_.measure(piece, values, type_);
    send(lane, piece.first, values, piece.count);
  };
  if (spilled_) {
    for (size_t i = 0; i < pieces.size(); ++i) one(0, i);
  } else {
    team_.run(pieces.size(), one);
  }
  return finish();
}

GradientSender::Failure GradientSender::put_zeros(uint64_t first, uint64_t count,
                                                  std::span<const std::byte> zeros) {
  const uint64_t at_once = zeros.size() / base::data_type_bytes(type_);
  for (uint64_t done = 0; done < count; done += std::min(at_once, count - done)) {
    send(*lanes_.front(), first + done, zeros.data(), std::min(at_once, count - done));
  }
  return finish();
}

void GradientSender::send(Lane& lane, uint64_t first, const std::byte* gradient, uint64_t count) {
  for (size_t i = set_.subgroup_at(first); count > 0; ++i) {
    const plan::Subgroup& subgroup = set_.subgroups[i];
    const uint64_t within = first - subgroup.first;
    const uint64_t here = std::min(count, subgroup.count - within);
    if (set_.is_here(subgroup.id)) {
      wait(lane, Lane::kCommandsMax - 1);
      if (!lane.failure.status.ok()) return;
      lane.replies.submit(set_.device_of(subgroup.id),
                          csd::PutGradient{subgroup.id, within, here, type_, gradient});
    }
    gradient += here * base::data_type_bytes(type_);
    first += here;
    count -= here;
  }
}

void GradientSender::wait(Lane& lane, size_t in_flight_max) {
  while (lane.replies.owed() > in_flight_max) {
    csd::Completion completion = lane.replies.next();
    if (completion.status.ok() || !lane.failure.status.ok()) continue;
    lane.failure = {std::move(completion.status),
                    static_cast<const csd::Device*>(completion.command->owner)};
  }
}

GradientSender::Failure GradientSender::finish() {
  Failure first;
  for (const auto& lane : lanes_) {
    wait(*lane, 0);
    Failure failure = std::exchange(lane->failure, Failure{});
    if (first.status.ok()) first = std::move(failure);
  }
  return first;
}

}  // namespace smartinf::engine
