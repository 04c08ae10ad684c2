#include "smartinf/serve/hosted_device.h"

#include <algorithm>

#include <fmt/format.h>

#include "smartinf/serve/hosted_session.h"

namespace smartinf::serve::wire {

DeviceLease::~DeviceLease() {
  if (device_ == nullptr) return;
  const std::lock_guard lock(device_->mutex_);
  device_->leased_ = false;
  device_->holder_.clear();
}

bool HostedDevice::allows(const std::string& client) const {
  return served_.clients.empty() ||
         std::ranges::find(served_.clients, client) != served_.clients.end();
}

base::Result<DeviceLease> HostedDevice::lease(const std::string& client) {
  std::shared_ptr<HostedSession> over;  // its end takes locks of its own
  const std::lock_guard lock(mutex_);
  if (leased_) {
    return base::Status(base::ErrorCode::kBusy,
                        fmt::format("device {} is in use by client {}", served_.name, holder_),
                        "Wait until it is done; a client that vanished is forgotten after the "
                        "server's lease_seconds.");
  }
  leased_ = true;
  holder_ = client;
  // The session before holds some of the device's memory for what it has not sent.
  over.swap(session_);
  return DeviceLease(*this, client);
}

std::string HostedDevice::holder() const {
  const std::lock_guard lock(mutex_);
  return holder_;
}

std::shared_ptr<HostedSession> HostedDevice::session() const {
  const std::lock_guard lock(mutex_);
  return session_;
}

void HostedDevice::set_session(std::shared_ptr<HostedSession> session) {
  // The old one may be the last reference, whose end takes locks of its own.
  const std::lock_guard lock(mutex_);
  session_.swap(session);
}

}  // namespace smartinf::serve::wire
