#include "smartinf/serve/grpc_room.h"

#include <atomic>
#include <latch>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/eventfd.h>
#include <sys/mman.h>

#include "smartinf/storage/file_descriptor.h"

namespace smartinf::serve::wire {

using base::ErrorCode;
using base::Status;

namespace {

// Needs of gRPC 1.51 on a machine with many cores, and some more; streams and connections that come
// later are refused where there is nothing left for them.
constexpr int kDescriptors = 32;
constexpr int kThreads = 32;
constexpr size_t kAddressBytes = size_t{256} << 20;

Status try_descriptors() {
  std::vector<storage::FileDescriptor> taken;
  for (int i = 0; i < kDescriptors; ++i) {
    taken.emplace_back(::eventfd(0, EFD_CLOEXEC));
    if (!taken.back().is_open()) {
      return base::errno_status(errno, "no files are left for connections", {});
    }
  }
  return Status();
}

Status try_threads() {
  std::vector<std::jthread> taken;
  std::latch enough(1);
  bool all = true;
  try {
    for (int i = 0; i < kThreads; ++i) taken.emplace_back([&] { enough.wait(); });
  } catch (const std::system_error&) {
    all = false;
  }
  enough.count_down();
  if (all) return Status();
  return Status(ErrorCode::kUnavailable, "no threads are left for connections",
                "Raise the limit of processes (ulimit -u, the container's pids.max) or of the "
                "address space (ulimit -v), or lower that of stacks (ulimit -s 8192).");
}

Status try_address_space() {
  void* const taken =
      ::mmap(nullptr, kAddressBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (taken == MAP_FAILED) {
    return Status(ErrorCode::kOutOfMemory, "no memory is left for connections",
                  "Raise the limit of the address space (ulimit -v).");
  }
  (void)::munmap(taken, kAddressBytes);
  return Status();
}

}  // namespace

Status check_room_for_grpc() {
  static std::atomic<bool> found{false};
  if (found) return Status();
  SI_RETURN_IF_ERROR(try_descriptors());
  SI_RETURN_IF_ERROR(try_threads());
  SI_RETURN_IF_ERROR(try_address_space());
  found = true;
  return Status();
}

}  // namespace smartinf::serve::wire
