// A computational storage device: storage, memory and a processor that owns subgroups. The
// interface is shaped like messages (caller-owned command records, completions in a queue), because
// the same calls work across a thread, a network and an OpenCL queue.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

struct Command;
class Snapshot;  // snapshot.h

/// What a device says of a command. Update says kWeightsReady once per subgroup that it updates,
/// then kDone once all state is written; every other message has kDone only.
struct Completion {
  enum class Event : uint8_t { kWeightsReady, kDone };
  Command* command = nullptr;
  Event event = Event::kDone;
  base::SubgroupId subgroup;  // for kWeightsReady
  base::Status status;
};

/// Completions of any number of devices, in the order in which they came.
/// Bound: one entry per command in flight and one per subgroup of an update.
class CompletionQueue {
 public:
  void push(Completion completion);
  /// The next one; waits for it. False when `wait` passed without one.
  bool pop(Completion& out, std::chrono::nanoseconds wait);

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Completion> entries_;
};

// ---- The messages. Memory that one points to is the caller's and stays as it is until kDone.

/// Begins the step after the committed one (0: the first state); its gradients may follow at once.
struct BeginStep {
  base::StepNumber step = 0;
};

/// In a step, a hint that changes no result: the first subgroups of the update to come, in its
/// order. While gradients come in, their state is read into memory that is free, until another
/// command comes that is queued. Answered at once.
struct Prefetch {
  std::vector<base::SubgroupId> subgroups;
};

/// A piece of a subgroup's gradient goes down. Pieces do not overlap; together they are all of it.
struct PutGradient {
  base::SubgroupId subgroup;
  uint64_t first = 0;  // element within the subgroup
  uint64_t count = 0;  // elements
  base::DataType type = base::DataType::kBf16;
  const void* gradient = nullptr;  // [count] of type
};

/// A whole subgroup's gradient goes down compressed (compressed_gradient.h), for devices that were
/// made for it (LocalDeviceOptions::compressed_block_bytes).
struct PutCompressedGradient {
  base::SubgroupId subgroup;
  std::span<const std::byte> message;
};

/// Where an update's new weights of one subgroup go.
struct SubgroupUpdate {
  base::SubgroupId subgroup;
  void* weights_out = nullptr;  // [count] of Update::weights_type; null: not wanted
  /// Where samples of the new variances go: those of the whole space (compress::MatrixSamples), of
  /// which the subgroup's are written. For rules that keep one and devices that know the space's
  /// matrices (SI_CHECK); null: not wanted.
  base::Bf16* samples_out = nullptr;
};

/// Updates these subgroups, in this order, from their committed state, whatever the step has made
/// of it before; weights come up one subgroup at a time.
struct Update {
  base::DataType weights_type = base::DataType::kBf16;
  std::vector<kernels::StepScalars> scalars;  // one entry per group of the parameter space
  std::vector<SubgroupUpdate> updates;
  /// Right after BeginStep, before any gradient: each subgroup is updated when its gradient has
  /// become complete, the last one first when several are. Done when all are, or when a StopUpdate
  /// or an Update without keep_updated follows, which lets those finish that have begun.
  /// Errors: kUnsupported where the committed state does not stay beside the new one, and for
  /// compressed gradients.
  bool as_completed = false;
  /// Subgroups that the step has updated already are left as they are, and not reported again. An
  /// update as_completed that runs goes on to its end before this one; all gradients must be there.
  bool keep_updated = false;
  /// A subgroup without weights_out is taken up only when a ReadWeights of this step and of
  /// weights_type has come for it, in the order in which they come, or after a FinishUpdate: the
  /// update follows whoever uses the weights at his pace. Commands behind it wait as ever. Errors:
  /// kInvalidArgument with as_completed.
  bool weights_on_demand = false;
};

/// Ends an update of subgroups as their gradients become complete; no other.
struct StopUpdate {};

/// Nobody will ask for weights any more: an update with weights_on_demand takes up what is left.
struct FinishUpdate {};

/// A whole subgroup's weights: its master plane, cast as an update casts it. Not queued behind
/// other commands: it is served while gradients come in, while an update runs and between steps,
/// for devices with memory for it (LocalDeviceOptions::weight_read_slots). Of the committed step
/// they are read from the drive or the state cache, unless a Commit of the next step waits already;
/// a Commit waits for those that came before it. Of the step in progress, whose BeginStep has come,
/// they are written to weights_out by the update that makes them, if this is there before it takes
/// the subgroup up and that update is not as_completed, which may be done again; else they are read
/// after the Commit. Errors: kUnsupported without memory for it; kFailedPrecondition for another
/// step, for a second one that would wait for the same subgroup, before there is a committed state,
/// and where the step in progress overwrites the subgroup in place (durability "none"); kCancelled
/// when the step that it waits for is aborted; the update's error when that fails; kCorrupt.
struct ReadWeights {
  base::SubgroupId subgroup;
  base::StepNumber step = 0;
  base::DataType type = base::DataType::kBf16;
  void* weights_out = nullptr;  // [count] of type
};

/// Elements [first, first + count) of a subgroup's planes, decoded to f32: of the committed step.
struct ReadState {
  base::SubgroupId subgroup;
  uint64_t first = 0;  // a multiple of kBlockElements
  uint64_t count = 0;
  std::array<float*, 4> planes{};  // [count] for each plane of the layout; null: not wanted
};

/// A whole subgroup's planes from f32, as state of the step that has begun.
struct WriteState {
  base::SubgroupId subgroup;
  uint64_t count = 0;                    // elements of the subgroup
  std::array<const float*, 4> planes{};  // [count] for each plane of the layout; null: zeros
  uint32_t plane_mask = ~0u;             // bit i: the i-th plane of the layout; others stay
  /// [count], the residual plane as it is stored, in place of its f32; or null. It comes over the
  /// host link and is counted there as state.
  const base::Bf16* residual = nullptr;
};

/// Makes the step durable beside the committed one, with the caller's own bytes.
struct Prepare {
  base::StepNumber step = 0;
  std::string client_metadata;
};

/// Makes the prepared step the committed one. Asked for again, it has the same answer: a reply may
/// be lost. Errors: kFailedPrecondition for a step that is neither prepared nor the committed one.
struct Commit {
  base::StepNumber step = 0;
};

/// Forgets the step that has begun or is prepared; its update ends as kCancelled, also one that
/// waits to start. Has the same answer when it is asked for again; without such a step there is
/// nothing to do.
/// Errors: kFailedPrecondition for the committed step, or while another one is in progress.
struct Abort {
  base::StepNumber step = 0;
};

/// Between steps: writes what the state cache holds and the drive does not.
struct Flush {};

/// Bytes that come back within this process: to offset_bytes of the device's spool
/// (DeviceInfo::spool_bytes), which belongs to no step. Whole or an error; until kDone nobody gets
/// them. What lay there before is lost. Carried out beside everything else, also while an update
/// runs. Memory, size and offset are multiples of base::kIoAlignment. Errors: kInvalidArgument;
/// kNoSpace, it reaches beyond the spool; kFailedPrecondition, what lies there is being moved;
/// kUnsupported, there is no spool; the drive's. After kTimeout a drive that hangs may still read
/// the memory, for as long as the process lives.
struct PutSpool {
  uint64_t offset_bytes = 0;
  std::span<const std::byte> bytes;
};

/// Brings back what one PutSpool put at the same offset: all of it. Errors: as above, and
/// kFailedPrecondition for what was not put; kCorrupt. The step can then be repeated: the state is
/// not touched. After kTimeout a drive that hangs may still write to the memory.
struct GetSpool {
  uint64_t offset_bytes = 0;
  std::span<std::byte> out;
};

using Message = std::variant<BeginStep, Prefetch, PutGradient, PutCompressedGradient, Update,
                             StopUpdate, ReadState, WriteState, Prepare, Commit, Abort, Flush,
                             FinishUpdate, ReadWeights, PutSpool, GetSpool>;

/// As in error texts and traces: "begin step".
std::string_view message_name(const Message& message);

/// A message on its way. Owned by the caller, not moved and not touched between submit() and kDone,
/// or until the device is destroyed.
struct Command {
  Message message;
  CompletionQueue* replies = nullptr;
  void* owner = nullptr;  // the caller's own

  /// The message if it is of this type, else null.
  template <typename Type>
  const Type* as() const {
    return std::get_if<Type>(&message);
  }
};

struct DeviceInfo {
  std::string name;  // as in messages: the recipe's name or path
  std::string kind;  // "local", "emulated local" (behind links), "emulated" (in memory), ...
  std::string ring;
  uint32_t slots = 0;
  uint64_t memory_bytes = 0;  // slots
  uint64_t gradient_memory_bytes = 0;
  bool gradients_spilled = false;     // some of them go to the store's spill area
  base::Status updates_as_completed;  // why Update::as_completed cannot be asked for; ok: it can
  uint32_t threads = 0;               // processor threads
  uint64_t state_cache_bytes = 0;
  uint32_t cached_subgroups = 0;
  uint64_t spool_bytes = 0;        // room for PutSpool
  uint32_t weight_read_slots = 0;  // their memory is part of memory_bytes
  /// Another process drives it. What stands for it here takes every command and does nothing.
  bool elsewhere = false;
  uint32_t rank = 0;  // of several that share a run, the one that drives it
};

/// Threads: submit() from one thread at a time, but for gradients where gradients are not
/// spilled (DeviceInfo): those of different elements may come from several threads at once; and but
/// for the spool's, which may come from another one.
/// Completions are pushed from the device's own threads or from within submit().
class Device {
 public:
  /// Waits for what is in flight, but no longer than the device's own watchdog; no memory of a
  /// command is read or written afterwards.
  virtual ~Device() = default;

  virtual const DeviceInfo& info() const = 0;
  virtual const storage::StoreLayout& layout() const = 0;
  virtual storage::StoreState state() const = 0;
  virtual std::string client_metadata() const = 0;
  /// Once after opening, before any command: the step that recovery decided on.
  virtual base::Status recover_to(base::StepNumber step) = 0;

  /// Once after opening, before any command: the state of these subgroups of the layout stays in
  /// this machine's memory from its first update on, and is not read from the drive again. Steps
  /// are written as ever; with durability "none" cached subgroups are written by Flush, and when
  /// the device is closed between steps.
  /// Errors: kOutOfMemory; kUnsupported for a device that has no such memory.
  virtual base::Status cache_state(std::span<const base::SubgroupId> subgroups);

  /// Takes the command. Never fails: a failure is the completion's status. Commands of one device
  /// are carried out in order, but for gradients, which may complete early, ReadWeights, and the
  /// spool's.
  virtual void submit(Command& command) = 0;

  /// Over the host link: up are weights (and state, for a host update), down are gradients.
  virtual base::TrafficReading host_traffic() const = 0;
  /// At the drive: up is read, down is written.
  virtual base::TrafficReading store_traffic() const = 0;
  virtual uint64_t bytes_written_ever() const = 0;
  /// Of state that was in memory and would have been read from the drive.
  virtual uint64_t state_bytes_cached() const { return 0; }

  /// The committed state, opened for reading. Between steps, after a Flush; to be read before the
  /// step after the next one is begun. Errors: as the store says; kUnsupported for a device that
  /// cannot give one.
  virtual base::Result<std::unique_ptr<Snapshot>> snapshot();

  /// Buffers of this machine that nobody uses until the next BeginStep, ReadState or WriteState:
  /// the slots of a device that has them here. To be used while no command is under way.
  virtual std::span<std::byte> scratch_memory() { return {}; }
};

}  // namespace smartinf::csd
