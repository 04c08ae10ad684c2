// The whole state on all devices, written or read by the caller of the updater: filled at the
// beginning, read, edited. And other messages whose answers are waited for in the same call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/engine/device_replies.h"
#include "smartinf/engine/device_set.h"

namespace smartinf::engine {

/// Reads and writes the whole state; each of several ranks what its own devices have.
/// Threads: one caller, with no step being committed.
class WholeState {
 public:
  using Fill = std::function<base::Status(uint64_t first, std::span<float> out)>;
  using Visit =
      std::function<base::Status(uint64_t first, std::span<const std::span<const float>> planes)>;
  using Choice = std::function<bool(const plan::Subgroup& subgroup)>;
  using Edit =
      std::function<base::Result<bool>(uint64_t first, std::span<const std::span<float>> planes)>;

  /// plane_count: of the rule. staging: DeviceSet::staging_bytes. The devices of the set are
  /// destroyed before this, everything else of it and the watch after.
  WholeState(const DeviceSet& set, size_t plane_count, base::AlignedBuffer staging,
             DeviceWatch& watch);

  /// The message to every device; waits for all.
  base::Status on_all_devices(const csd::Message& message);
  /// Writes the master weights of the step that has begun; other planes are zeros. A failure of
  /// `fill` ends it.
  base::Status fill(const Fill& fill);
  /// Reads the committed state as Updater::read_state() does, of the first `plane_count` planes of
  /// the layout, which may be one more than the rule has: the residual. chosen: the subgroups that
  /// are read; null: all.
  base::Status read(uint32_t plane_mask, size_t plane_count, const Visit& visit,
                    const Choice& chosen = nullptr);
  /// Rewrites planes of the rule in the step that has begun, as Updater::edit_state() does.
  base::Status edit(const Edit& edit);

  size_t plane_count() const { return plane_count_; }
  /// Nobody uses it between calls.
  std::span<std::byte> memory() const { return staging_.bytes(); }

 private:
  base::Status on_device(csd::Device& device, csd::Message message);

  const DeviceSet& set_;
  const size_t plane_count_;
  base::AlignedBuffer staging_;
  base::AlignedBuffer edit_memory_;  // of an edit; stays after one that failed (DeviceReplies)
  DeviceReplies replies_;
};

}  // namespace smartinf::engine
