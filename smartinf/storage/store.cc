#include "smartinf/storage/store.h"

#include <algorithm>
#include <random>

#include <fmt/format.h>
#include <sys/random.h>

#include "smartinf/storage/block_store.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/read_only.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;
using base::StepNumber;

std::string RunId::to_string() const {
  std::string text;
  for (const uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

RunId make_run_id() {
  RunId id;
  if (getrandom(id.bytes.data(), id.bytes.size(), 0) != static_cast<ssize_t>(id.bytes.size())) {
    std::random_device random;
    for (uint8_t& byte : id.bytes) byte = static_cast<uint8_t>(random());
  }
  return id;
}

Result<std::unique_ptr<Store>> Store::create(const std::string& path, const StoreLayout& layout,
                                             StoreOptions options) {
  const uint32_t slots = options.durability == Durability::kStep ? 2 : 1;
  SI_ASSIGN_OR_RETURN(const Geometry geometry, Geometry::make(layout, slots));
  SI_ASSIGN_OR_RETURN(Container container,
                      create_container(path, geometry.container_bytes(), options));
  SI_ASSIGN_OR_RETURN(std::unique_ptr<BlockStore> store,
                      BlockStore::create(std::move(container), layout, options));
  return std::unique_ptr<Store>(std::move(store));
}

Result<std::unique_ptr<Store>> Store::open(const std::string& path, StoreOptions options) {
  SI_ASSIGN_OR_RETURN(Container container, open_container(path, options));
  SI_ASSIGN_OR_RETURN(std::unique_ptr<BlockStore> store,
                      BlockStore::open(std::move(container), options));
  return std::unique_ptr<Store>(std::move(store));
}

Result<StoreState> Store::peek(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const ReadOnlyContainer container, open_container_to_read(path));
  SI_ASSIGN_OR_RETURN(const FoundSuperblock found, read_superblock(container));
  return state_of(found.superblock);
}

Status interrupted_creation(const StoreState& device) {
  if (device.copied_step == 0) {
    return Status(ErrorCode::kFailedPrecondition, "the run's creation was interrupted",
                  "The creation starts over when the run is started again.");
  }
  return Status(
      ErrorCode::kFailedPrecondition,
      fmt::format("a copy of step {} onto the devices was interrupted", device.copied_step),
      "Make the copy again (smartinf restore, smartinf reshard), which replaces this one; or "
      "delete it with smartinf gc for a new run from the beginning.");
}

Result<StepNumber> recovery_step(std::span<const StoreState> devices) {
  if (devices.empty()) return Status(ErrorCode::kNotFound, "no device holds a state");
  const StoreState& first = devices.front();
  std::vector<bool> present(first.device_count);
  for (const StoreState& device : devices) {
    if (!(device.run == first.run) || device.device_count != first.device_count) {
      return Status(ErrorCode::kMismatch,
                    fmt::format("the devices belong to different runs: {} and {}",
                                first.run.to_string(), device.run.to_string()),
                    "Name the devices of one run only.");
    }
    if (device.device_index >= first.device_count || present[device.device_index]) {
      return Status(ErrorCode::kMismatch,
                    fmt::format("two devices say that they are device {} of run {}",
                                device.device_index, first.run.to_string()),
                    "One of them is a copy; leave it out.");
    }
    present[device.device_index] = true;
  }
  for (uint32_t index = 0; index < first.device_count; ++index) {
    if (present[index]) continue;
    return Status(ErrorCode::kNotFound,
                  fmt::format("device {} of the {} devices of run {} is missing", index,
                              first.device_count, first.run.to_string()),
                  "Name all devices of the run.");
  }
  // The smallest prepared step is one that every device can give: whoever is further has committed
  // it, and nobody overwrites it before all have prepared the next.
  StepNumber step = ~StepNumber{0};
  StepNumber newest_committed = 0;
  bool unfinished = false;
  bool complete = false;
  for (const StoreState& device : devices) {
    if (device.torn) {
      return Status(ErrorCode::kFailedPrecondition,
                    fmt::format("device {}: {}", device.device_index, kTornState),
                    "Restore a checkpoint, or start the run anew in another directory.");
    }
    unfinished = unfinished || !device.initialized;
    step = std::min(step, device.prepared_step);
    complete = complete || device.complete;
    newest_committed = std::max(newest_committed, device.committed_step);
  }
  // Nobody commits a first step before all have prepared it. Step 0 is made anew whatever it was.
  if (unfinished && (!complete || newest_committed == 0)) return interrupted_creation(first);
  if (unfinished || newest_committed > step) {
    return Status(
        ErrorCode::kMismatch,
        fmt::format("one device has committed step {}, another has only prepared step {}, which no "
                    "crash can cause",
                    newest_committed, unfinished ? 0 : step),
        "One of them was replaced by an older copy. Restore all devices from one checkpoint.");
  }
  return step;
}

}  // namespace smartinf::storage
