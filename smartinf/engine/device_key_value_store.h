// Keys and values of sequences on devices, which fold queries over them (csd/messages/cache). Each
// sequence lies on one device, whole blocks only; this machine keeps the block of each layer that
// is not whole and folds it last, so that the bits are those of a store in memory.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/messages/cache/cache_memory.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/key_value_store.h"

namespace smartinf::engine {

struct DeviceStoreOptions {
  KeyValueShape shape;
  /// Names the job whose keys and values these are: random bits that come back with it.
  std::array<uint8_t, 16> job{};
  /// What else they depend on, compared as it is: weights, tokenizer.
  std::string identity;
  bool afresh = false;                                // what was saved is lost
  uint64_t device_memory_bytes = csd::kCacheWorkBytes;  // of each device, for reading and writing
  /// By device, beside it, for blocks that are then not read again from the drive; empty: nothing.
  std::vector<uint64_t> kept_bytes;
  std::chrono::nanoseconds device_silence_max = std::chrono::minutes(10);
};

/// Opens the devices, each with a directory that holds nothing, or the cache of this job beside
/// whatever state. What a sequence had at the last save() is there again after open() with the same
/// tokens_max: tokens() says how much. failure() of a sequence names the device; when a device is
/// lost or its blocks are damaged, the sequences on it fail and all others go on.
/// Errors, each naming the device: kMismatch, another job's; kBusy; kCorrupt; the drive's.
base::Result<std::unique_ptr<KeyValueStore>> make_device_store(const DeviceSources& sources,
                                                               DeviceStoreOptions options);

/// Deletes what make_device_store() made there, after the store is closed; the state of a run that
/// lies beside it stays, and the cache with it. Errors: the first of the sources'; the others are
/// deleted.
base::Status erase_device_store(const DeviceSources& sources);

}  // namespace smartinf::engine
