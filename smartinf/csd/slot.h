// One set of a device's fixed buffers, with everything a subgroup needs on its way through: the
// transfers in and out, and the job on its blocks. Allocated at open and used again and again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "smartinf/csd/device.h"
#include "smartinf/csd/processor.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

/// The master plane, of a mask of planes.
inline constexpr uint32_t kMasterMask = 1;

/// A transfer between a slot and the store, with what its completion needs to know.
struct Transfer {
  storage::SubgroupIo io;  // io.owner is this
  Slot* slot = nullptr;
  uint32_t task = 0;      // of the schedule, when it is one
  uint64_t begin_ns = 0;  // for a trace
};

/// The use of a slot; who hears of its transfers and its job follows from it.
///
///   kFree --Update--> kUpdating ----------------------------------> kFree   TransferHandler
///   kFree --ReadState--> kReading --transfer--> kDecoding --job--> kFree    StateAccess
///   kFree --WriteState--> kEncoding --job--> kWriting --transfer--> kFree   StateAccess
///   kFree --Flush--> kFlushing --transfer--> kFree                          StateFlush
///   kFree --Prefetch--> kPrefetching --transfer--> kFree                    StatePrefetch
///
/// Slots of another kind, with room for a master plane only:
///
///   kFree --ReadWeights--> kReadingWeights --transfer--> kCasting --job--> kFree   WeightsReader
///
/// A slot's gradient buffer is not part of this: between updates it is lent to the gradient memory,
/// whose spills LocalDevice writes.
enum class SlotState : uint8_t {
  kFree,
  kUpdating,
  kReading,
  kDecoding,
  kEncoding,
  kWriting,
  kFlushing,
  kPrefetching,
  kReadingWeights,
  kCasting,
};

struct Slot {
  std::span<std::byte> extent;
  std::span<std::byte>
      gradient;  // lent to the gradient memory between updates; empty: none spilled
  SlotState state = SlotState::kFree;
  Command* command = nullptr;  // ReadState, WriteState or ReadWeights being served
  uint32_t subgroup = 0;       // unless it is updating: index in the layout
  /// The subgroup whose committed state has been read into the extent, for the step's update.
  std::optional<uint32_t> prefetched;
  uint32_t cached_mask = 0;  // planes that the state cache had for it
  uint32_t task = 0;         // of the schedule: the update that is at the processor
  uint64_t update_ns = 0;    // when that began, for a trace

  Transfer state_in;
  Transfer gradient_in;
  Transfer master_out;
  Transfer moments_out;
  Transfer gradient_out;
  Job job;
};

}  // namespace smartinf::csd
