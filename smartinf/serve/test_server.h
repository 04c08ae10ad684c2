// A server within the test's process, with certificates of its own, and sources of what it serves.
// For tests.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/base/test_scratch.h"
#include "smartinf/csd/device_source.h"
#include "smartinf/serve/remote_source.h"
#include "smartinf/serve/server.h"
#include "smartinf/serve/test_certificates.h"

namespace smartinf::serve::wire {

/// Before any thread.
inline const bool prepared = (prepare_to_serve(), true);

/// A source of whatever a test makes.
class TestSource final : public csd::DeviceSource {
 public:
  using Made = base::Result<std::unique_ptr<csd::Device>>;
  struct Functions {
    std::function<Made(const storage::StoreLayout&, const csd::DeviceShare&)> create;
    std::function<Made(const csd::DeviceShare&)> open;
    std::function<base::Result<storage::StoreSummary>()> summarize;
    std::function<void()> erase;
    std::function<base::Result<std::unique_ptr<csd::NewState>>(const storage::StoreLayout&)>
        create_state;
  };
  TestSource(std::string name, Functions functions)
      : name_(std::move(name)), functions_(std::move(functions)) {}

  const std::string& name() const override { return name_; }
  std::string place() const override { return name_; }
  base::Result<std::optional<storage::StoreState>> peek() override {
    auto summary = functions_.summarize();
    if (summary.ok()) return std::optional(summary->state);
    if (summary.status().code() == base::ErrorCode::kNotFound) {
      return std::optional<storage::StoreState>();
    }
    return std::move(summary).status();
  }
  base::Result<storage::StoreSummary> summarize() override { return functions_.summarize(); }
  base::Result<double> bandwidth() override { return 1e9; }
  base::Result<uint64_t> capacity_bytes() override { return uint64_t{1} << 40; }
  Made create(const storage::StoreLayout& layout, const csd::DeviceShare& share) override {
    return functions_.create(layout, share);
  }
  Made open(const csd::DeviceShare& share) override { return functions_.open(share); }
  base::Result<std::unique_ptr<csd::NewState>> create_state(
      const storage::StoreLayout& layout, const csd::NewStateOptions& options) override {
    if (functions_.create_state) return functions_.create_state(layout);
    return csd::DeviceSource::create_state(layout, options);
  }
  base::Status erase() override {
    if (functions_.erase) functions_.erase();
    return base::Status();
  }

 private:
  const std::string name_;
  const Functions functions_;
};

/// Commands by the index of their message.
using CommandCounts = std::array<std::atomic<uint64_t>, std::variant_size_v<csd::Message>>;

/// A device that counts the commands that reached it.
class CountedDevice final : public csd::Device {
 public:
  CountedDevice(std::unique_ptr<csd::Device> device, CommandCounts& commands)
      : device_(std::move(device)), commands_(commands) {}

  const csd::DeviceInfo& info() const override { return device_->info(); }
  const storage::StoreLayout& layout() const override { return device_->layout(); }
  storage::StoreState state() const override { return device_->state(); }
  std::string client_metadata() const override { return device_->client_metadata(); }
  base::Status recover_to(base::StepNumber step) override { return device_->recover_to(step); }
  base::Status cache_state(std::span<const base::SubgroupId> subgroups) override {
    return device_->cache_state(subgroups);
  }
  void submit(csd::Command& command) override {
    const size_t message = command.message.index();
    device_->submit(command);
    commands_[message].fetch_add(1);
  }
  base::TrafficReading host_traffic() const override { return device_->host_traffic(); }
  base::TrafficReading store_traffic() const override { return device_->store_traffic(); }
  uint64_t bytes_written_ever() const override { return device_->bytes_written_ever(); }
  uint64_t state_bytes_cached() const override { return device_->state_bytes_cached(); }
  base::Result<std::unique_ptr<csd::Snapshot>> snapshot() override { return device_->snapshot(); }
  std::span<std::byte> scratch_memory() override { return device_->scratch_memory(); }

 private:
  const std::unique_ptr<csd::Device> device_;
  CommandCounts& commands_;
};

/// Every server of the process under the same authority, which takes a second to make.
struct TestTrust {
  base::Scratch scratch;
  TestAuthority authority{scratch.path().string()};
  TestCertificate server = authority.server("localhost");
  TestCertificate client = authority.client("trainer");

  static TestTrust& shared() {
    static TestTrust trust;
    return trust;
  }
  RemoteOptions options() const {
    RemoteOptions options;
    options.certificate = client.certificate;
    options.key = client.key;
    options.ca = authority.ca();
    options.reconnect_seconds = 20;
    options.deadline_seconds = 60;
    return options;
  }
};

inline ServerOptions test_server_options(std::vector<ServedDevice> devices) {
  const TestTrust& trust = TestTrust::shared();
  ServerOptions options;
  options.listen.address = "localhost:0";
  options.listen.certificate = trust.server.certificate;
  options.listen.key = trust.server.key;
  options.listen.ca = trust.authority.ca();
  options.listen.keepalive_seconds = 1;
  options.devices = std::move(devices);
  return options;
}

inline std::unique_ptr<Server> start_test_server(ServerOptions options) {
  auto server = Server::start(std::move(options));
  SI_CHECK(server.ok(), server.status().to_string());
  return std::move(*server);
}

inline RemoteDeviceOptions test_remote(uint16_t port, const std::string& device) {
  RemoteDeviceOptions options;
  options.url = "grpc://localhost:" + std::to_string(port) + "/" + device;
  options.remote = TestTrust::shared().options();
  return options;
}

}  // namespace smartinf::serve::wire
