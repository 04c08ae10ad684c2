// A computational storage device: storage, memory and a processor that owns subgroups. The
// interface is shaped like messages (caller-owned command records, completions in a queue), because
// the same calls work across a thread, a network and an OpenCL queue.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/csd/messages/families.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

struct Command;
class Snapshot;  // snapshot.h

/// A device's answer to a command. Update says kWeightsReady once per subgroup that it updates,
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
  bool gradients_spilled = false;  // some of them go to the store's spill area
  base::Status
      updates_as_completed;  // why plan::UpdateMode::kAsCompleted cannot be asked for; ok: it can
  uint32_t threads = 0;      // processor threads
  uint64_t state_cache_bytes = 0;
  uint32_t cached_subgroups = 0;
  uint64_t spool_bytes = 0;        // room for PutSpool
  uint64_t cache_memory_bytes = 0;  // for keys and values (messages/cache); 0: it keeps none
  uint64_t row_memory_bytes = 0;    // for tables (messages/rows); 0: it keeps none
  uint32_t weight_read_slots = 0;  // their memory is part of memory_bytes
  /// Another process drives it. What stands for it here takes every command and does nothing.
  bool of_other_rank = false;
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
  /// are carried out in order, but for gradients, which may complete early, ReadWeights, and those
  /// of the spool, the cache and tables.
  virtual void submit(Command& command) = 0;

  /// Over the host link: up are weights (and state, for a host update), down are gradients.
  virtual base::TrafficReading host_traffic() const = 0;
  /// At the drive: up is read, down is written.
  virtual base::TrafficReading store_traffic() const = 0;
  virtual uint64_t bytes_written_ever() const = 0;
  /// Bytes of state that was in memory and would have been read from the drive.
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
