// A served device on an emulated drive, behind a proxy that can break its connections, and a
// client. For tests.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/test_device.h"
#include "smartinf/csd/test_model.h"
#include "smartinf/serve/test_proxy.h"
#include "smartinf/serve/test_server.h"

namespace smartinf::serve::wire {

/// Waits for what must happen soon.
template <typename Condition>
bool soon(const Condition& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

class RemoteSession : public testing::Test {
 protected:
  RemoteSession() : layout_(csd::test_layout(base::StateFormat::kF32, 0)) {
    const storage::StoredSubgroup& last = layout_.subgroups.back();
    elements_ = last.first_element + last.count;
    share_.groups = csd::test_groups(elements_);
    drive_ = std::move(*csd::EmulatedDrive::create(
        *csd::EmulatedDrive::size_for(layout_, storage::Durability::kStep, 0)));
    start_server();
  }

  csd::LocalDeviceOptions local() const {
    csd::LocalDeviceOptions options;
    options.name = "fast0";
    options.threads = 2;
    options.slots = slots_;
    options.store.durability = durability_;
    options.store.io_bytes = 256 * 1024;
    options.store.wrap_ring = wrap_ring_;
    options.groups = share_.groups;
    options.matrices = share_.matrices;
    return options;
  }
  ServedDevice served() {
    const TestSource::Functions functions{
        [this](const storage::StoreLayout& layout, const csd::DeviceShare&) {
          return csd::create_emulated_device(local(), layout, *drive_);
        },
        [this](const csd::DeviceShare&) { return csd::open_emulated_device(local(), *drive_); },
        [this] { return drive_->summarize(); }, [this] { drive_->erase(); }, create_state_};
    ServedDevice device;
    device.name = "fast0";
    device.memory_bytes = memory_bytes_;
    device.clients = clients_;
    device.source = [functions](const csd::SourceWishes&) {
      return base::Result<std::unique_ptr<csd::DeviceSource>>(
          std::make_unique<TestSource>("fast0", functions));
    };
    return device;
  }
  void start_server() {
    server_.reset();
    ServerOptions options = test_server_options({served()});
    options.lease_seconds = lease_seconds_;
    options.listen.buffer_bytes = buffer_bytes_;
    options.revoked = [this](const Peer& peer) {
      if (looked_up_) looked_up_();
      return revoked_ && peer.name == "trainer";
    };
    server_ = start_test_server(std::move(options));
    if (proxy_ == nullptr) {
      proxy_ = std::make_unique<TestProxy>(server_->port());
    } else {
      proxy_->lead_to(server_->port());
    }
  }
  RemoteDeviceOptions remote() const {
    RemoteDeviceOptions options = test_remote(proxy_->port(), "fast0");
    options.remote.keepalive_seconds = 1;
    return options;
  }
  base::Status create() {
    source_ = remote_source(remote());
    auto device = source_->create(layout_, share_);
    if (!device.ok()) return std::move(device).status();
    device_ = std::move(*device);
    driver_.drive(*device_);
    return driver_.make_start(layout_);
  }
  base::Status open() {
    device_.reset();
    source_ = remote_source(remote());
    auto device = source_->open(share_);
    if (!device.ok()) return std::move(device).status();
    device_ = std::move(*device);
    driver_.drive(*device_);
    return device_->recover_to(device_->state().committed_step);
  }
  base::Status step(uint64_t number) {
    SI_RETURN_IF_ERROR(driver_.run(csd::BeginStep{number}));
    SI_RETURN_IF_ERROR(driver_.put_all(layout_, number));
    SI_RETURN_IF_ERROR(driver_.update(layout_, number));
    return driver_.finish_step(number);
  }
  void expect_state_after(uint64_t steps) {
    csd::ReferenceModel reference(layout_, share_.groups);
    for (uint64_t number = 1; number <= steps; ++number) {
      reference.step(number, base::DataType::kBf16, base::DataType::kBf16);
    }
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      std::vector<float> master(layout_.subgroups[i].count);
      csd::ReadState read;
      read.subgroup = layout_.subgroups[i].id;
      read.count = layout_.subgroups[i].count;
      read.planes[0] = master.data();
      const base::Status status = driver_.run(read);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_TRUE(master == reference.plane(i, 0)) << "subgroup " << i;
    }
  }

  std::vector<std::string> clients_{"trainer"};
  uint64_t memory_bytes_ = uint64_t{1} << 30;
  double lease_seconds_ = 30;
  uint64_t buffer_bytes_ = uint64_t{256} << 20;
  std::atomic<bool> revoked_{false};
  std::function<void()> looked_up_;  // where a certificate is; set before the server starts
  std::function<std::unique_ptr<storage::Ring>(std::unique_ptr<storage::Ring>)>
      wrap_ring_;  // of the served device
  uint32_t slots_ = 3;
  storage::Durability durability_ = storage::Durability::kStep;
  std::function<base::Result<std::unique_ptr<csd::NewState>>(const storage::StoreLayout&)>
      create_state_;
  storage::StoreLayout layout_;
  uint64_t elements_ = 0;
  csd::DeviceShare share_;
  csd::DeviceDriver driver_;
  std::unique_ptr<csd::EmulatedDrive> drive_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<TestProxy> proxy_;
  std::unique_ptr<csd::DeviceSource> source_;
  std::unique_ptr<csd::Device> device_;
};

#define ASSERT_OK(expression)                         \
  do {                                                \
    const base::Status status_ = (expression);        \
    ASSERT_TRUE(status_.ok()) << status_.to_string(); \
  } while (false)

}  // namespace smartinf::serve::wire
