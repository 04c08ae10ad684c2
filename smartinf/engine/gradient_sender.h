// Hands a step's dense gradients to the devices: casts, measures and copies them, piece by piece,
// on several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/csd/device.h"
#include "smartinf/engine/device_replies.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/gradient_tracker.h"

namespace smartinf::engine {

class GradientSender {
 public:
  /// Bytes of casting memory that each thread of a team needs.
  static constexpr uint64_t kCastBytes = kGradientPieceElements * (sizeof(float) + 2);

  /// type: of gradients on their way to the devices. All that is referred to outlives the sender.
  /// Where a device spills gradients to its store one thread does everything: the drive is what is
  /// waited for there, and the spill buffers are few.
  GradientSender(const DeviceSet& set, GradientTracker& tracker, base::ThreadTeam& team,
                 base::DataType type, DeviceWatch& watch);

  struct Failure {
    base::Status status;
    const csd::Device* device = nullptr;  // whose it is
  };
  /// Sends [count] elements from `first` on, but for those of subgroups elsewhere: gradient is
  /// [count] of `type`, and free again when this returns. What is measured is what the devices get.
  /// cast_memory: kCastBytes for each thread of the team, used when the types differ.
  Failure put(std::span<const GradientTracker::Piece> pieces, uint64_t first, const void* gradient,
              base::DataType type, std::span<std::byte> cast_memory);
  /// The same for elements whose gradient is zero, which are not measured. zeros: zero bytes.
  Failure put_zeros(uint64_t first, uint64_t count, std::span<const std::byte> zeros);

 private:
  /// Work that one thread has under way.
  struct Lane {
    static constexpr size_t kCommandsMax = 64;
    explicit Lane(DeviceWatch& watch) : replies(watch) {}
    DeviceReplies replies;
    Failure failure;
  };
  /// Returns with commands in flight.
  void send(Lane& lane, uint64_t first, const std::byte* gradient, uint64_t count);
  void wait(Lane& lane, size_t in_flight_max);
  Failure finish();

  const DeviceSet& set_;
  GradientTracker& gradient_tracker_;
  base::ThreadTeam& team_;
  const base::DataType type_;
  bool spilled_ = false;
  std::vector<std::unique_ptr<Lane>> lanes_;  // by worker of the team
};

}  // namespace smartinf::engine
