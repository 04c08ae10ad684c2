// How the engine gets at a device before there is one: look, measure, create, open, erase. One
// source per entry of the recipe's [[device]] list; local ones are made from DeviceOptions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/csd/device.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/storage/store.h"

namespace smartinf::engine {

/// What the engine gives one device, for as long as it is open.
struct DeviceShare {
  uint64_t slot_memory_bytes = 0;       // at most so much for slots
  uint64_t compressed_block_bytes = 0;  // above 0: gradients come compressed
  uint64_t gradient_memory_bytes = 0;   // at most so much for gradients; the rest is spilled
  std::vector<plan::GroupSpan> groups;  // of the whole parameter space
  std::vector<compress::MatrixLayout> matrices;  // of it too, where compression needs them
};

/// Threads: one at a time.
class DeviceSource {
 public:
  virtual ~DeviceSource() = default;

  /// As in messages: the recipe's name, or the path.
  virtual const std::string& name() const = 0;
  /// What tells one place from another, e.g. the canonical path.
  virtual std::string place() const = 0;

  /// What it holds; nullopt: nothing of ours. Nothing is changed.
  /// Errors: kInvalidArgument (a plain file), kCorrupt, kIo.
  virtual base::Result<std::optional<storage::StoreState>> peek() = 0;
  /// Bytes per second of a step's traffic, for placement: the user's number, or measured at first
  /// use.
  virtual base::Result<double> bandwidth() = 0;
  /// Bytes that a new state may take there.
  virtual base::Result<uint64_t> capacity_bytes() = 0;

  virtual base::Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                                            const DeviceShare& share) = 0;
  virtual base::Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) = 0;
  /// Removes the state that is there, to start an interrupted creation over. Not while it is open.
  virtual base::Status erase() = 0;
};

}  // namespace smartinf::engine
