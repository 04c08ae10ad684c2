// Interfaces that torch asks of a device: its guard (current device, streams, events), its hooks
// (pinned memory, presence), its name and its allocator.
#include <cstdlib>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tests/accelerator/internal.h"

namespace smartinf::test_accelerator {
namespace {

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const uint64_t number = std::strtoull(text, &end, 10);
  TORCH_CHECK(*text != '\0' && *end == '\0', variable, " is \"", text, "\", not a whole number");
  return number;
}

Options options_from_environment() {
  Options read;
  read.memory_bytes = number_from("SMARTINF_TEST_ACCELERATOR_MEMORY_BYTES", 0);
  read.link_bytes_per_s = number_from("SMARTINF_TEST_ACCELERATOR_LINK_BYTES_PER_S", 0);
  read.delay_us = static_cast<uint32_t>(number_from("SMARTINF_TEST_ACCELERATOR_DELAY_US", 0));
  read.check_order = number_from("SMARTINF_TEST_ACCELERATOR_CHECK_ORDER", 1) != 0;
  return read;
}

c10::Stream stream_of(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, the_device(), id);
}
Event* event_of(void* event) { return static_cast<Event*>(event); }

// There is one device, which is always the current one.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return the_device().type(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "test accelerator: there is no ", device);
  }
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return the_device();
  }

  c10::Stream getStream(c10::Device /*device*/) const override {
    return stream_of(current_stream());
  }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return stream_of(next_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high*/) const override {
    return stream_of(next_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(exchange_stream(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    if (!idle(stream.id())) return false;
    host_waits_for(stream.id());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits_for(stream.id()); }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override { host_waits_for_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    test_accelerator::record(reinterpret_cast<Event**>(event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    test_accelerator::block(event_of(event), stream.id());
  }
  bool queryEvent(void* event) const override { return reached(event_of(event)); }
  void synchronizeEvent(void* event) const override { host_waits_for(event_of(event)); }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    destroy(event_of(event));
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex /*device*/) const override {
    return milliseconds_between(event_of(first), event_of(second));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex /*device*/) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
  c10::Device getDeviceFromPtr(void* /*address*/) const override { return the_device(); }
  // The CPU's kernels draw from it.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {
    static const auto* made = new at::Generator(at::detail::createCPUGenerator());
    return *made;
  }
};

const bool registered = [] {
  c10::register_privateuse1_backend("test_accelerator");
  c10::SetAllocator(the_device().type(), &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

Options& options() {
  static Options current = options_from_environment();
  return current;
}

extern "C" void smartinf_test_accelerator_set_options(const Options* changed) {
  host_waits_for_all();
  options() = *changed;
  reset_order();
}

}  // namespace smartinf::test_accelerator
