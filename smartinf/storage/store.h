// A device's persistent half: the state of the subgroups it owns, in two slots each, with the
// metadata that makes a step atomic. The format is in docs/format.md and storage/format.h.
//
// Nothing of the last committed step is overwritten until the next one is prepared, so a crash, a
// failed write or a change of mind costs the step in flight and nothing else.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/storage/ring.h"

namespace smartinf::storage {

/// 128 random bits that name a run; all its devices carry it.
struct RunId {
  std::array<uint8_t, 16> bytes{};
  friend bool operator==(const RunId&, const RunId&) = default;
  std::string to_string() const;  // 32 hex digits
};
RunId make_run_id();

/// A subgroup as this store holds it. Plane offsets inside an extent follow from count.
struct StoredSubgroup {
  base::SubgroupId id;
  uint64_t first_element = 0;  // in the parameter space
  uint64_t count = 0;          // elements
};

/// How the checksums of a store's blocks are computed. A device whose processor computes others
/// gives them a kind of their own here.
enum class ChecksumKind : uint16_t { kXxh3 = 0 };

/// The checksum of a block, and what it is seeded with (base::checksum).
struct BlockSum {
  uint64_t seed = 0;
  uint64_t checksum = 0;
};

/// Layout that a store is created with and keeps for life.
struct StoreLayout {
  RunId run;
  uint32_t device_index = 0;  // this device's place in the run...
  uint32_t device_count = 1;  // ...of so many
  base::StateFormat format = base::StateFormat::kF32;
  ChecksumKind checksum_kind = ChecksumKind::kXxh3;
  std::vector<base::PlaneKind> planes;  // master first
  /// The planes that an update reads and writes: all but a residual, which stands last.
  std::span<const base::PlaneKind> state_planes() const {
    const bool residual = !planes.empty() && planes.back() == base::PlaneKind::kResidual;
    return std::span(planes).first(planes.size() - (residual ? 1 : 0));
  }
  std::vector<StoredSubgroup> subgroups;
  /// Bytes per element reserved for gradients that do not fit the memory budget; 0: none.
  uint32_t gradient_spill_bytes = 0;
  /// Opaque to the store, equal on all devices: the parameter space and rule as JSON.
  std::string description;
  /// The step of the state that is copied here (restore, reshard); 0: a new run's store.
  base::StepNumber copied_step = 0;
};

enum class Durability : uint8_t {
  kStep,  // every step survives power loss
  kNone,  // scratch runs: in place, half the space, nothing is promised after a crash
};
inline constexpr std::array<std::string_view, 2> kDurabilityNames{"step", "none"};
constexpr base::EnumNames enum_names(Durability) { return kDurabilityNames; }

struct StoreOptions {
  RingOptions ring;
  Durability durability = Durability::kStep;
  bool checksums = true;
  uint64_t io_bytes = uint64_t{4} << 20;  // size of one transfer
  uint32_t io_depth = 8;                  // transfers in flight per direction
  std::chrono::milliseconds watchdog{
      60'000};                      // a request without completion for so long is reported
  bool read_only = false;           // for checking: nothing can be written
  bool force_block_device = false;  // use a block device that holds something else
  /// Room for kWriteSpool, reserved when the store is made or opened: a file of its own in a
  /// directory, which is gone when the process is; on a block device what lies behind the store.
  uint64_t spool_bytes = 0;
  /// Wraps the ring that was made, or puts another in its place (tests: faulty; emulation: links).
  std::function<std::unique_ptr<Ring>(std::unique_ptr<Ring>)> wrap_ring;
};

/// Which of the transfers that wait for a drive is started first: the smaller one. A less urgent
/// one is delayed for as long as more urgent ones are waiting, and no longer.
enum class IoPriority : uint8_t { kWeights, kActivations, kGradients, kState };
inline constexpr size_t kIoPriorities = 4;

/// Moves whole subgroups, single planes or a part of the spool between a buffer and the drive.
/// Owned by the caller and not moved while in flight; reusable after completion.
struct SubgroupIo {
  enum class Op : uint8_t {
    kRead,
    kWrite,
    kReadGradient,
    kWriteGradient,
    kFlush,      // between steps: writes planes that hold() kept in memory
    kReadSpool,  // what kWriteSpool wrote since the store was opened, of no step; no subgroup
    kWriteSpool,
  };
  Op op = Op::kRead;
  /// None: kState, kGradients or kActivations, as the op says.
  std::optional<IoPriority> priority;
  base::SubgroupId subgroup;
  /// The slot's memory, planes at Store::plane_offset, up to the end of the last one that takes
  /// part. For gradients count * gradient_spill_bytes, rounded up to kIoAlignment. For the spool
  /// any, of a size that is a multiple of kIoAlignment.
  std::span<std::byte> buffer;
  uint64_t spool_offset_bytes = 0;  // in the spool; a multiple of kIoAlignment
  uint32_t plane_mask = ~0u;        // bit i: the i-th plane of the layout takes part
  void* owner = nullptr;            // the caller's own

  /// Set at completion. On failure the buffer's contents must not be used.
  base::Status status;

  // The store's own while in flight.
  uint64_t next_offset_bytes = 0;
  uint32_t transfers_in_flight = 0;
  bool all_started = false;
  SubgroupIo* next = nullptr;
};

inline bool is_spool(const SubgroupIo& io) {
  return io.op == SubgroupIo::Op::kReadSpool || io.op == SubgroupIo::Op::kWriteSpool;
}

class StateReader;  // state_reader.h

/// State of one device, as far as recovery needs it; read without opening it for writing.
struct StoreState {
  RunId run;
  uint32_t device_index = 0;
  uint32_t device_count = 1;
  base::StepNumber committed_step = 0;
  base::StepNumber prepared_step = 0;  // committed_step, or one more
  bool initialized = false;            // false: creation was interrupted, start over
  bool complete = false;               // its first step is committed, not prepared only
  base::StepNumber copied_step = 0;    // of StoreLayout
  /// Durability kNone only: a crash fell into a step, or the process ended before it wrote what it
  /// held in memory, and nothing that can be used is left.
  bool torn = false;
};

/// The text about a torn state.
inline constexpr std::string_view kTornState =
    "a crash fell into a step, or its state was in memory only, and durability \"none\" keeps "
    "nothing to go back to";

/// Threads: one thread drives I/O and steps (begin_step, start, poll, prepare, commit, abort).
/// verify_block and seal_block are safe from any thread, for different blocks at once, between
/// begin_step and prepare.
class Store {
 public:
  /// Makes a store in a directory (made if missing) or on a block device, reserves all its space
  /// and locks it. It is initialized once prepare and commit of its first step have succeeded.
  /// Errors: kAlreadyExists (holds another run: named), kNoSpace (with what is needed and free, for
  /// the state or the spool), kBusy, kInvalidArgument (path is a plain file, ...), kIo.
  static base::Result<std::unique_ptr<Store>> create(const std::string& path,
                                                     const StoreLayout& layout,
                                                     StoreOptions options);
  /// Opens and locks what create() made. Errors: kNotFound, kBusy, kCorrupt, kMismatch (version),
  /// kNoSpace (for the spool).
  static base::Result<std::unique_ptr<Store>> open(const std::string& path, StoreOptions options);
  /// Looks without locking or changing anything; for inspect, recovery and error messages.
  static base::Result<StoreState> peek(const std::string& path);

  virtual ~Store() = default;

  /// Waits for what is in flight; the store is of no use afterwards. Destruction does so by itself,
  /// but cannot say that it failed: kTimeout, a request hangs (named). Then the store and the
  /// memory of its transfers are leaked with leak_in_flight() by their owner: the drive may still
  /// write there.
  virtual base::Status close() = 0;

  virtual const StoreLayout& layout() const = 0;
  virtual const std::string& path() const = 0;
  virtual std::string_view ring_name() const = 0;
  virtual StoreState state() const = 0;
  /// The durability that the store was made with, whatever it was opened with.
  virtual Durability durability() const = 0;
  /// The client metadata of the committed step (at most kClientMetadataBytesMax), as given
  /// to prepare().
  virtual std::string client_metadata() const = 0;
  /// Opens what is on the drive for reading, beside this store: between steps it is the committed
  /// state. Nothing may be written while it is read but the step after that. Safe from any thread.
  /// Errors: StateReader::open's; kUnsupported where the drive has no other way to be read.
  virtual base::Result<std::unique_ptr<StateReader>> read_committed() const = 0;
  static constexpr uint64_t kClientMetadataBytesMax = 64 * 1024;

  /// Which step's state reads give: recovery calls it once after open, before any transfer, with
  /// the step it decided on (committed_step or prepared_step of state()); durable when it returns.
  /// All devices of a run are recovered before any of them begins a step.
  virtual base::Status recover_to(base::StepNumber step) = 0;

  virtual uint64_t extent_bytes(base::SubgroupId subgroup) const = 0;
  virtual uint64_t plane_offset(base::SubgroupId subgroup, size_t plane) const = 0;
  virtual uint64_t plane_bytes(base::SubgroupId subgroup, size_t plane) const = 0;
  virtual uint64_t gradient_bytes(base::SubgroupId subgroup) const = 0;
  virtual uint64_t extent_bytes_max() const = 0;
  virtual uint64_t spool_bytes() const = 0;

  /// Makes slot memory known to the ring; see Ring::register_memory.
  virtual base::Status register_memory(std::span<std::byte> memory) = 0;

  /// Starts a transfer. Its buffer is aligned to kIoAlignment. Reads give the state of the current
  /// step; writes go to the shadow slot. Any number may be started; the store keeps io_depth
  /// transfers of at most io_bytes per direction in flight. Which of them is started next is asked
  /// anew each time: the most urgent io's, the first one's among equals. So a large one gives way
  /// between its transfers.
  virtual void start(SubgroupIo& io) = 0;
  /// Puts finished ones into `done`, waiting up to `wait` for the first. Failures are in their
  /// status; a failed Result means the store cannot go on.
  virtual base::Result<size_t> poll(std::span<SubgroupIo*> done, std::chrono::nanoseconds wait) = 0;

  /// Checks block `block` (kBlockElements elements each) of plane `plane` after a read, against the
  /// checksum and identity of the current step. Errors: kCorrupt with path, offset, length, advice.
  virtual base::Status verify_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                                    std::span<const std::byte> bytes) const = 0;
  /// Records the checksum of a block about to be written for the step in progress. With checksums
  /// on, every block of a plane that is written must be sealed before prepare().
  virtual void seal_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                          std::span<const std::byte> bytes) = 0;
  /// The same for whoever computes checksums where the data are, with the same rules for threads:
  /// what verify_block() would compare, or nothing where it would not; and what seal_block() would
  /// seed with, or nothing where checksums are off, to be followed by seal_block() with the result.
  virtual std::optional<BlockSum> expected_sum(base::SubgroupId subgroup, size_t plane,
                                               uint64_t block) const = 0;
  virtual std::optional<uint64_t> seal_seed(base::SubgroupId subgroup, size_t plane,
                                            uint64_t block) const = 0;
  virtual void seal_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                          uint64_t checksum) = 0;
  /// Durability kNone only: the new contents of these planes stay in the caller's memory in the
  /// step in progress. To the step they are written (and sealed), but the drive has older ones
  /// until a kFlush, and until finish_flush() whoever opens the store finds it torn. To be called
  /// before that memory is changed: from then on the step cannot be aborted.
  virtual base::Status hold(base::SubgroupId subgroup, uint32_t plane_mask) = 0;
  /// Between steps, when kFlush has written all that was held: the store says that it holds the
  /// committed step.
  virtual base::Status finish_flush() = 0;

  /// Says that the step in progress will be `step`; seals carry it. Once before the first write:
  /// committed_step + 1; after create() any step: 0 of a new run, or the one of the state that is
  /// copied here (the same on all devices).
  virtual void begin_step(base::StepNumber step) = 0;

  /// Waits for the writes in flight and makes everything written since the last commit durable as
  /// step `step`. Planes not written keep their state. After it the step can still be aborted.
  /// After a failure the step must be aborted.
  virtual base::Status prepare(base::StepNumber step, const std::string& client_metadata) = 0;
  /// Makes the prepared step the current one. Only after all devices of the run have prepared it:
  /// from then on it is decided, so this does not fail but for a store's first step, and needs no
  /// sync.
  virtual base::Status commit(base::StepNumber step) = 0;
  /// Forgets what was written for `step`, prepared or not; durable when it returns. After a failure
  /// no device of the run may go on. With durability kNone impossible once something was written.
  virtual base::Status abort(base::StepNumber step) = 0;

  /// Up: read from the drive; down: written to it. By kind.
  virtual base::TrafficReading traffic() const = 0;
  /// Over the store's whole life, kept in the superblock.
  virtual uint64_t bytes_written_ever() const = 0;
};

/// The error for a device that is not initialized: kFailedPrecondition.
base::Status interrupted_creation(const StoreState& device);

/// The step that all devices of a run can be brought to, given what each of them says.
/// See the table in docs/format.md. Errors: kNotFound (device missing), kMismatch (another run's
/// device, or steps that no crash can explain), kFailedPrecondition (not initialized: start over).
base::Result<base::StepNumber> recovery_step(std::span<const StoreState> devices);

}  // namespace smartinf::storage
