// A device without a drive: its store lies in memory, and links give it a drive's speed. Ten of
// them, scaled down, run on two cores and behave as ten CSDs behind one host link would.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/options.h"

namespace smartinf::csd {

/// The medium. It outlives the devices opened on it one after another, as a drive does.
class EmulatedDrive {
 public:
  /// Pages are taken from the system as they are written. Errors: kOutOfMemory.
  static base::Result<std::unique_ptr<EmulatedDrive>> create(uint64_t size_bytes);
  /// What a store of this layout needs. Errors: as Store::create's for the layout.
  static base::Result<uint64_t> size_for(const storage::StoreLayout& layout,
                                         storage::Durability durability);

  std::span<std::byte> contents() const { return memory_.bytes(); }
  uint64_t size_bytes() const { return memory_.size(); }

  /// What its store says of itself; nullopt: it holds none. Not while a device has it open.
  base::Result<std::optional<storage::StoreState>> peek();
  /// Not while a device has it open.
  void erase() { holds_store_ = false; }

 private:
  friend base::Result<std::unique_ptr<Device>> create_emulated_device(
      LocalDeviceOptions options, const storage::StoreLayout& layout, EmulatedDrive& drive);
  explicit EmulatedDrive(base::AlignedBuffer memory) : memory_(std::move(memory)) {}
  base::AlignedBuffer memory_;
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
