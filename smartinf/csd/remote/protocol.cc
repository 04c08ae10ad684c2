#include "smartinf/csd/remote/protocol.h"

#include <utility>

namespace smartinf::csd::wire {

Outcome::Outcome(const base::Status& status)
    : code(status.code()), what(status.what()), advice(status.advice()) {
  if (status.ok()) return;
  const base::ErrorPlace& place = status.place();
  path = place.path;
  offset_bytes = place.offset_bytes;
  length_bytes = place.length_bytes;
  system_errno = place.system_errno;
}

base::Status Outcome::status() const {
  if (code == base::ErrorCode::kOk) return base::Status();
  return base::Status(code, what, advice, {path, offset_bytes, length_bytes, system_errno});
}

}  // namespace smartinf::csd::wire
