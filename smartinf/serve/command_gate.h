// Checks what a server lets through to a device. A client is authenticated and still not believed:
// what a device would take for a bug of its caller (SI_CHECK), or would size memory by, is an error
// here, or in check() of the messages (csd/messages/).
#pragma once

#include <cstdint>

#include "smartinf/base/status.h"
#include "smartinf/csd/device_space.h"
#include "smartinf/serve/protocol.h"
#include "smartinf/storage/row_layout.h"

namespace smartinf::serve::wire {

/// A layout as a client gives it for a new state. bytes_max: of the container, with the spool.
/// Errors: kInvalidArgument; kNoSpace.
base::Status check_layout(const storage::StoreLayout& layout, storage::Durability durability,
                          uint64_t spool_bytes, uint64_t bytes_max);
/// Tables beside a state and its spool of others_bytes. quota_bytes: of the client; 0: all that are
/// free. Errors: kInvalidArgument for a file that cannot be; kNoSpace.
base::Status check_tables(const storage::RowFileLayout& layout, uint64_t others_bytes,
                          uint64_t quota_bytes);
/// Checks what a client says of the space against the layout that the device has.
base::Status check_share(const storage::StoreLayout& layout, const csd::DeviceShare& share);

/// The order of the commands of one open device. Threads: one at a time.
class CommandGate {
 public:
  /// created: it stands in step 0, and need not be recovered.
  explicit CommandGate(bool created) : recovered_(created) {}

  /// Whether a command that was checked (csd::check) may go to the device now; called right before.
  /// state: of the device. space: its own.
  base::Status admit(const CommandBody& body, const csd::DeviceSpace& space,
                     const storage::StoreState& state);
  /// A message that was admitted is done.
  void finished(const csd::Message& message);

 private:
  base::Status admit_message(const csd::Message& message, const storage::StoreState& state);

  bool recovered_ = false;
  bool cached_ = false;
  bool begun_ = false;         // some command came
  uint32_t updates_ = 0;       // under way...
  uint32_t late_updates_ = 0;  // ...of them, those that need all gradients
};

}  // namespace smartinf::serve::wire
