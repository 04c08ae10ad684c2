// A window over weights that do not all fit in memory: units pass through a fixed number of slots,
// read from the devices before they are used. The order of use is known, so a slot is given to the
// unit that is used next, and taken from the one that is used last (plan::choose_slot).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/weight_source.h"
#include "smartinf/plan/slots.h"
#include "smartinf/plan/unit.h"

namespace smartinf::engine {

/// Bytes of each of so many slots for these units, as plan::slot_sizes() has them. Of a unit there
/// are whole subgroups in a slot: one at each end that it shares.
std::vector<uint64_t> window_slot_bytes(const WeightSource& source,
                                        std::span<const plan::Unit> units, base::DataType type,
                                        uint32_t slots);

/// Threads: one caller, who is the source's.
class LayerWindow {
 public:
  struct Options {
    std::vector<plan::Unit> units;
    base::DataType type = base::DataType::kBf16;
    /// window_slot_bytes(). At least as many as units are held at once; one more reads ahead.
    std::vector<std::span<std::byte>> slots;
    /// Owns the slots; lives as long as the window, and for ever where a read into them hangs.
    std::shared_ptr<const void> slots_owner;
    /// Where updates put the subgroups that stay in memory: what a unit shares with them is copied
    /// from there, when wait_resident(subgroup) has returned. May be empty.
    WeightsSink resident;
    std::function<base::Status(const plan::Subgroup&)> wait_resident;
  };
  LayerWindow(WeightSource& source, Options options);
  /// Waits for what is being read.
  ~LayerWindow();
  LayerWindow(const LayerWindow&) = delete;
  LayerWindow& operator=(const LayerWindow&) = delete;

  /// The uses to come, in order: reading ahead begins. Units that are in a slot stay there.
  void start(std::span<const uint32_t> order);
  /// The weights of the step whose update was started last, or of the committed one. Waits for
  /// them; a unit that is not in the order is read at once. They stay until release(), which every
  /// get() needs that succeeds. Where those that are large enough are held by others, and not all
  /// are, there is one slot more from then on, and a remark: units are held together that are not
  /// next to each other. Errors: of the device, named, also of what is read ahead, after which any
  /// unit may be asked for again; kFailedPrecondition when as many units are held as there were
  /// slots; kOutOfMemory.
  base::Result<std::byte*> get(uint32_t unit);
  /// Whether get() would return at once, with a unit that is in a slot. False also where the source
  /// cannot tell.
  bool has_come(uint32_t unit) const;
  void release(uint32_t unit);
  /// An update was started, or aborted: nothing that was read before is current.
  void updated();

  /// Units that get() found in a slot or on their way, and those that it had to ask for.
  uint64_t hits() const { return hits_; }
  uint64_t misses() const { return misses_; }
  /// Bytes of slots beside those that the window was given.
  uint64_t more_bytes() const;

 private:
  static constexpr uint32_t kNone = ~0u;

  /// A subgroup of a slot's unit, until it has come.
  struct Pending {
    plan::Subgroup subgroup;
    uint32_t from = kNone;           // the slot that it is copied from; kNone: it is being read
    const void* resident = nullptr;  // where it is in memory
  };
  struct Slot {
    std::span<std::byte> memory;
    uint32_t unit = kNone;
    uint32_t held = 0;
    uint64_t first = 0;  // element at memory...
    uint64_t end = 0;    // ...and behind the last one
    std::vector<Pending> pending;
  };

  uint32_t slot_of(uint32_t unit) const;
  plan::Uses uses() const { return {order_, next_, unit_bytes_}; }
  std::optional<uint32_t> choose(uint32_t unit, std::optional<size_t> ahead = std::nullopt) const;
  base::Result<uint32_t> slot_for(uint32_t unit);
  void read_ahead();
  base::Status load(uint32_t unit, uint32_t slot);
  base::Status finish(Slot& slot);
  base::Status finish(Slot& slot, size_t pending);
  base::Status empty(uint32_t slot);
  void forget();
  bool has_come(const Pending& pending) const;
  std::byte* at(const Slot& slot, uint64_t element) const;

  WeightSource& source_;
  const Options options_;
  const uint64_t value_bytes_;
  const std::vector<uint64_t> unit_bytes_;
  std::vector<Slot> slots_;
  std::shared_ptr<std::vector<base::AlignedBuffer>> more_;  // of the last slots
  std::vector<uint32_t> order_;
  size_t next_ = 0;       // in order_: the use that get() is asked for next
  base::Status failure_;  // of reading ahead
  uint64_t hits_ = 0;
  uint64_t misses_ = 0;
};

}  // namespace smartinf::engine
