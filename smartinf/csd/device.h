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
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

enum class CommandKind : uint8_t {
  kBeginStep,    // step number; gradients may follow
  kPutGradient,  // a piece of a subgroup's gradient goes down; its memory is free at completion
  kUpdate,       // update these subgroups, in this order; weights come up one subgroup at a time
  kReadState,    // one subgroup's planes decoded to f32 (export, checkpoint, resume: master only)
  kWriteState,   // one subgroup's planes from f32 (initialization, import)
  kPrepare,
  kCommit,
  kTakeBack,
  kFlush,  // between steps: writes what the state cache holds and the drive does not
};

struct Command;

/// What a device says of a command. kUpdate says kWeightsReady once per subgroup, then kDone once
/// all state is written; every other kind says kDone only.
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

/// Where an update's new weights of one subgroup go.
struct SubgroupUpdate {
  base::SubgroupId subgroup;
  void* weights_out = nullptr;  // [count] of Command::type, valid until kDone; null: not wanted
  /// Where samples of the new variances go: those of the whole space (plan::FormSamples), of
  /// which the subgroup's are written. For rules that keep one and devices that know the space's
  /// forms (SI_CHECK); null: not wanted.
  base::Bf16* samples_out = nullptr;
};

/// One message. Owned by the caller, not moved and not touched between submit() and kDone.
struct Command {
  CommandKind kind = CommandKind::kBeginStep;
  CompletionQueue* replies = nullptr;
  void* owner = nullptr;  // the caller's own

  base::StepNumber step = 0;                    // kBeginStep, kUpdate, kPrepare, kCommit, kTakeBack
  base::SubgroupId subgroup;                    // kPutGradient, kReadState, kWriteState
  uint64_t first = 0;                           // kPutGradient: first element within the subgroup
  uint64_t count = 0;                           // kPutGradient, kReadState, kWriteState: elements
  base::DataType type = base::DataType::kBf16;  // of the gradient put, or of weights_out
  const void* gradient = nullptr;               // kPutGradient: [count] of type
  /// kPutGradient: above 0, `gradient` is a message of so many bytes (compressed_gradient.h) with
  /// the whole subgroup's gradient; first, count and type are not read. For devices that were made
  /// for it (LocalDeviceOptions::compressed_block_bytes).
  uint64_t message_bytes = 0;

  /// kUpdate: one entry per group of the parameter space.
  std::vector<kernels::StepScalars> scalars;
  std::vector<SubgroupUpdate> updates;

  /// kReadState, kWriteState: [count] f32 for each plane of the layout; null: not wanted (on write:
  /// zeros). Elements [first, first + count) of the subgroup; first a multiple of kBlockElements on
  /// read, 0 and the whole subgroup on write.
  std::array<float*, 4> planes{};
  uint32_t plane_mask = ~0u;  // kWriteState: bit i: the i-th plane of the layout; others stay
  /// kWriteState: [count], the residual plane as it is kept, in place of its f32; or null. It comes
  /// over the host link and is counted there as state.
  const base::Bf16* residual = nullptr;

  std::string blob;  // kPrepare
};

struct DeviceInfo {
  std::string name;  // as in messages: the recipe's name or path
  std::string kind;  // "local", "emulated local" (behind links), "emulated" (in memory), ...
  std::string ring;
  uint32_t slots = 0;
  uint64_t memory_bytes = 0;  // slots
  uint64_t gradient_memory_bytes = 0;
  bool gradients_spilled = false;  // some of them go to the store's spill area
  uint32_t threads = 0;            // processor threads
  uint64_t state_cache_bytes = 0;
  uint32_t cached_subgroups = 0;
};

/// Threads: submit() from one thread at a time, but for kPutGradient where gradients are not
/// spilled (DeviceInfo): those of different elements may come from several threads at once.
/// Completions are pushed from the device's own threads or from within submit().
class Device {
 public:
  virtual ~Device() = default;  // waits for what is in flight

  virtual const DeviceInfo& info() const = 0;
  virtual const storage::StoreLayout& layout() const = 0;
  virtual storage::StoreState state() const = 0;
  virtual std::string blob() const = 0;
  /// Once after opening, before any command: the step that recovery decided on.
  virtual base::Status recover_to(base::StepNumber step) = 0;

  /// Once after opening, before any command: the state of these subgroups of the layout stays in
  /// this machine's memory from its first update on, and is not read from the drive again. Steps
  /// are written as ever; with durability "none" cached subgroups are written by kFlush, and when
  /// the device is closed between steps.
  /// Errors: kOutOfMemory; kUnsupported for a device that has no such memory.
  virtual base::Status cache_state(std::span<const base::SubgroupId> subgroups);

  /// Takes the command. Never fails: a failure is the completion's status. Commands of one device
  /// are carried out in order, but for kPutGradient, which may complete early.
  virtual void submit(Command& command) = 0;

  /// Over the host link: up are weights (and state, for a host update), down are gradients.
  virtual base::TrafficReading host_traffic() const = 0;
  /// At the drive: up is read, down is written.
  virtual base::TrafficReading store_traffic() const = 0;
  virtual uint64_t bytes_written_ever() const = 0;
  /// Of state that was in memory and would have been read from the drive.
  virtual uint64_t state_bytes_cached() const { return 0; }

  /// Buffers of this machine that nobody uses until the next kBeginStep, kReadState or kWriteState:
  /// the slots of a device that has them here. To be used while no command is under way.
  virtual std::span<std::byte> idle_memory() { return {}; }
};

}  // namespace smartinf::csd
