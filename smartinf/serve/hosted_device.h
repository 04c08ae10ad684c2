// A device that a server offers: who may use it, who does, and what that may take.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "smartinf/csd/device_source.h"
#include "smartinf/serve/memory_account.h"
#include "smartinf/serve/protocol.h"

namespace smartinf::serve {

/// As the server's file has it.
struct ServedDevice {
  std::string name;
  std::vector<std::string> clients;  // by their certificates' names; empty: every one of the CA's
  uint64_t memory_bytes = 0;         // for slots, gradients and what is on its way
  uint64_t quota_bytes = 0;          // bytes of a client's state at most; 0: all that are free
  /// Makes the source of the device itself, with the options that a client wishes.
  std::function<base::Result<std::unique_ptr<csd::DeviceSource>>(const csd::SourceWishes&)> source;
};

namespace wire {

class HostedSession;

struct DeviceCounters {
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> commands{0};
  std::atomic<uint64_t> errors{0};  // commands that failed
  std::atomic<uint64_t> commits{0};
  std::atomic<uint64_t> sessions{0};     // sessions that were opened
  std::atomic<uint64_t> connections{0};  // of sessions
};

class HostedDevice;

/// The right of one client to use a device, until destruction.
class DeviceLease {
 public:
  DeviceLease() = default;
  DeviceLease(HostedDevice& device, std::string client)
      : device_(&device), client_(std::move(client)) {}
  DeviceLease(DeviceLease&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), client_(std::move(other.client_)) {}
  DeviceLease& operator=(DeviceLease&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(client_, other.client_);
    return *this;
  }
  ~DeviceLease();

 private:
  HostedDevice* device_ = nullptr;
  std::string client_;
};

/// Threads: any.
class HostedDevice {
 public:
  explicit HostedDevice(ServedDevice served)
      : served_(std::move(served)), memory_(served_.memory_bytes) {}

  const ServedDevice& served() const { return served_; }
  const std::string& name() const { return served_.name; }
  bool allows(const std::string& client) const;
  MemoryAccount& memory() { return memory_; }
  DeviceCounters& counters() { return counters_; }

  /// Errors: kBusy, with the name of whoever has it.
  base::Result<DeviceLease> lease(const std::string& client);
  /// The client that has it; empty: nobody.
  std::string holder() const;

  std::shared_ptr<HostedSession> session() const;
  void set_session(std::shared_ptr<HostedSession> session);

 private:
  friend class DeviceLease;
  const ServedDevice served_;
  MemoryAccount memory_;
  DeviceCounters counters_;
  mutable std::mutex mutex_;
  std::string holder_;
  bool leased_ = false;
  std::shared_ptr<HostedSession> session_;
};

}  // namespace wire
}  // namespace smartinf::serve
