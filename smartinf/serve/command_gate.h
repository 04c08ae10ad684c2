// What a server lets through to a device. A client is authenticated and still not believed: what a
// device would take for a bug of its caller (SI_CHECK), or would size memory by, is an error here.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "smartinf/base/status.h"
#include "smartinf/serve/protocol.h"

namespace smartinf::serve::wire {

/// A layout as a client gives it for a new state. bytes_max: of the container, with the spool.
/// Errors: kInvalidArgument; kNoSpace.
base::Status check_layout(const storage::StoreLayout& layout, storage::Durability durability,
                          uint64_t spool_bytes, uint64_t bytes_max);
/// What a client says of the space, against the layout that the device has.
base::Status check_share(const storage::StoreLayout& layout, const csd::DeviceShare& share);

/// The commands of one open device. Threads: one at a time.
class CommandGate {
 public:
  /// All outlive it. created: it stands in step 0, and need not be recovered.
  CommandGate(const storage::StoreLayout& layout, const csd::DeviceShare& share, bool created);

  /// Bytes that its payload must have. Errors: kInvalidArgument.
  base::Result<uint64_t> payload_bytes(const CommandBody& body) const;
  /// Whether it may go to the device now; called right before. prepared_step, committed_step: of
  /// the device. initialized: it holds a committed state.
  base::Status admit(const CommandBody& body, const storage::StoreState& state);
  /// It is done.
  void finished(const CommandBody& body);

  /// Null for a subgroup of another device.
  const storage::StoredSubgroup* find(base::SubgroupId subgroup) const;
  /// Of all updates' weights together; of the space's samples.
  uint64_t elements() const { return elements_; }
  uint64_t samples() const { return samples_; }

 private:
  base::Status admit_update(const UpdateWanted& update, const storage::StoreState& state);

  const storage::StoreLayout& layout_;
  const csd::DeviceShare& share_;
  std::unordered_map<base::SubgroupId, size_t> index_;
  uint64_t elements_ = 0;
  uint64_t samples_ = 0;
  uint32_t groups_ = 1;
  bool recovered_ = false;
  bool cached_ = false;
  bool begun_ = false;         // some command came
  uint32_t updates_ = 0;       // under way...
  uint32_t late_updates_ = 0;  // ...of them, those that need all gradients
};

}  // namespace smartinf::serve::wire
