// Declarations that the files of the accelerator share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "tests/accelerator/accelerator.h"

namespace smartinf::test_accelerator {

inline c10::Device the_device() { return {c10::DeviceType::PrivateUse1, 0}; }
constexpr size_t kStreams = 16;  // stream 0 is the default stream
constexpr int kPoison = 0xff;    // as bytes of f32 and bf16: NaN

Options& options();

// allocator.cc. Device addresses are of pages that nobody may touch; the same byte lies for this
// library at host_view(address). An address of the host is its own view.
void* host_view(const void* address);
c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);
/// Its first bytes are the same afterwards.
void resize_storage(const c10::Storage& storage, size_t bytes);

// streams.cc.
struct Event;
c10::StreamId current_stream();
c10::StreamId exchange_stream(c10::StreamId stream);
c10::StreamId next_stream();
/// Runs `work` after all that the stream was given before. Returns at once.
void enqueue(c10::StreamId stream, std::function<void()> work);
/// As above, late: after Options::delay_us, and `bytes` take their time on the link.
void enqueue_copy(c10::StreamId stream, bool to_device, size_t bytes, std::function<void()> work);
bool idle(c10::StreamId stream);
/// Waits for all that the stream was given. What the accelerator does to compute on the calling
/// thread: the host knows nothing of it (that is host_waits_for).
void drain(c10::StreamId stream);
void host_waits_for(c10::StreamId stream);
void host_waits_for_all();
void record(Event** event, c10::StreamId stream);
void block(Event* event, c10::StreamId stream);
bool reached(Event* event);
void host_waits_for(Event* event);
double milliseconds_between(Event* first, Event* second);
void destroy(Event* event);

// order_check.cc. A clock counts, for each stream, the accesses known to be before.
using Clock = std::array<uint64_t, kStreams>;
struct Access {
  uintptr_t begin;
  uintptr_t end;
  bool writes;
};
/// One operator's or copy's accesses to device memory. Throws where they are not ordered.
void note_accesses(c10::StreamId stream, const std::vector<Access>& accesses,
                   const std::string& name);
/// The range is freed by the stream: other streams must be done with it (recorded: need not).
void note_freed(c10::StreamId stream, uintptr_t begin, uintptr_t end, bool recorded);
Clock clock_of(c10::StreamId stream);
void stream_knows(c10::StreamId stream, const Clock& clock);
void host_knows(const Clock& clock);
void reset_order();

}  // namespace smartinf::test_accelerator
