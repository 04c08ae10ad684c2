// A disk without a disk: a twin in memory whose power can be cut at any point. What was not synced
// is then lost, kept or torn, by seed. Completions come in another order than submissions, by seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "smartinf/storage/container.h"
#include "smartinf/storage/ring.h"

namespace smartinf::storage {

/// Feeds any number of disks and fails for all of them at once, after a set number of events: every
/// submission and every completion of a request is one. So each boundary of I/O can be cut at.
class PowerSupply {
 public:
  void cut_after(uint64_t events) { cut_at_ = events_ + events; }
  void restore() { cut_at_ = ~uint64_t{0}; }
  bool on() const { return events_ < cut_at_; }
  uint64_t events() const { return events_; }
  /// Counts one event; false once the power is off.
  bool pass() {
    if (!on()) return false;
    ++events_;
    return true;
  }

 private:
  uint64_t events_ = 0;
  uint64_t cut_at_ = ~uint64_t{0};
};

/// The fate of writes that were not synced when the power goes.
enum class CutFate : uint8_t {
  kLost,   // all of them
  kKept,   // none: the drive's cache survived
  kWhole,  // each is kept or lost as a whole: reordered
  kTorn,   // each of their sectors is kept or lost
};
inline constexpr uint32_t kCutFates = 4;

class MemoryDisk {
 public:
  /// Bytes that are written as a whole. Real drives promise 512 bytes; less, so that nothing is
  /// safe only because it happens to fit one sector.
  static constexpr uint64_t kSectorBytes = 64;

  explicit MemoryDisk(uint64_t bytes) : visible_(bytes), durable_(bytes) {}

  /// The bytes that a read gives. Changing it directly is damage (tests).
  std::span<std::byte> contents() { return visible_; }
  /// After a power cut: decides what was kept of the writes in flight and of those not synced.
  void settle(CutFate fate, uint64_t seed);

 private:
  friend class MemoryRing;
  struct Write {
    IoRequest* request = nullptr;  // until it is completed
    uint64_t offset_bytes = 0;
    std::vector<std::byte> bytes;
    bool durable = false;  // completed, and written durably
    bool covered = false;  // completed before the sync in flight was submitted
  };
  std::vector<std::byte> visible_;
  std::vector<std::byte> durable_;
  std::vector<Write> unsynced_;  // in order of submission
};

/// A ring on one disk; `disk` and `power` outlive it. The descriptor given to add_file does not
/// matter.
std::unique_ptr<Ring> make_memory_ring(MemoryDisk& disk, PowerSupply& power, uint32_t depth,
                                       uint64_t seed);

/// The disk as a container for a store.
Container memory_container(std::string name, MemoryDisk& disk, std::unique_ptr<Ring> ring);

}  // namespace smartinf::storage
