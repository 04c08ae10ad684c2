// A device without a drive: its store lies in memory, and links give it a drive's speed. Ten of
// them, scaled down, run on two cores and behave as ten CSDs behind one host link would.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/options.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/storage/check_store.h"
#include "smartinf/storage/summary.h"

namespace smartinf::csd {

/// The medium. It outlives the devices opened on it one after another, as a drive does.
class EmulatedDrive {
 public:
  /// Pages are taken from the system as they are written. cache_bytes: for keys and values, beside;
  /// row_bytes: for tables, likewise. Errors: kOutOfMemory.
  static base::Result<std::unique_ptr<EmulatedDrive>> create(uint64_t size_bytes,
                                                             uint64_t cache_bytes = 0,
                                                             uint64_t row_bytes = 0);
  /// Bytes that a store of this layout needs, with the spool behind it. Errors: as Store::create's
  /// for the layout.
  static base::Result<uint64_t> size_for(const storage::StoreLayout& layout,
                                         storage::Durability durability, uint64_t spool_bytes = 0);

  std::span<std::byte> contents() const { return memory_.bytes(); }
  uint64_t size_bytes() const { return memory_.size(); }
  std::span<std::byte> cache_contents() const { return cache_memory_.bytes(); }
  std::span<std::byte> row_contents() const { return row_memory_.bytes(); }

  bool holds_store() const { return holds_store_; }
  /// Summary of its store. Errors: kNotFound, kCorrupt.
  base::Result<storage::StoreSummary> summarize() const;
  /// Snapshot of the state on it; name: of the device, in messages. Errors:
  /// storage::StateReader::open's.
  base::Result<std::unique_ptr<Snapshot>> snapshot(const std::string& name) const;
  /// Not while a device has it open. See storage::check_container.
  base::Result<storage::CheckReport> check(
      const storage::CheckOptions& options,
      const std::function<void(const storage::StoreFault&)>& visit);
  /// Creates a state; the drive holds one only: what is replaced is gone at once. Not while a
  /// device has it open.
  base::Result<std::unique_ptr<NewState>> create_state(const std::string& name,
                                                       const storage::StoreLayout& layout,
                                                       const NewStateOptions& options);
  /// Not while a device has it open.
  void erase() { holds_store_ = false; }

 private:
  friend base::Result<std::unique_ptr<Device>> create_emulated_device(
      LocalDeviceOptions options, const storage::StoreLayout& layout, EmulatedDrive& drive);
  explicit EmulatedDrive(base::AlignedBuffer memory) : memory_(std::move(memory)) {}
  base::AlignedBuffer memory_;
  base::AlignedBuffer cache_memory_;
  base::AlignedBuffer row_memory_;
  bool holds_store_ = false;
};

/// As create_local_device and open_local_device, on `drive`, which must outlive the device.
/// options.path is only a name; options.store.wrap_ring and options.links.store apply as ever.
base::Result<std::unique_ptr<Device>> create_emulated_device(LocalDeviceOptions options,
                                                             const storage::StoreLayout& layout,
                                                             EmulatedDrive& drive);
base::Result<std::unique_ptr<Device>> open_emulated_device(LocalDeviceOptions options,
                                                           EmulatedDrive& drive);

}  // namespace smartinf::csd
