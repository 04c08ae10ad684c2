#include "smartinf/csd/device_source.h"

namespace smartinf::csd {

using base::Result;

namespace {

base::Status unsupported(const DeviceSource& source) {
  return {base::ErrorCode::kUnsupported,
          "device " + source.name() + ": its kind gives no state as a whole",
          {}};
}

}  // namespace

Result<storage::StoreSummary> DeviceSource::summarize() { return unsupported(*this); }

Result<storage::CheckReport> DeviceSource::check(
    const storage::CheckOptions&, const std::function<void(const storage::StoreFault&)>&) {
  return unsupported(*this);
}

Result<std::unique_ptr<Snapshot>> DeviceSource::snapshot(storage::ReaderLock) {
  return unsupported(*this);
}

Result<std::unique_ptr<NewState>> DeviceSource::create_state(const storage::StoreLayout&,
                                                             const NewStateOptions&) {
  return unsupported(*this);
}

}  // namespace smartinf::csd
