#include "smartinf/csd/emulated_device.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "smartinf/base/units.h"
#include "smartinf/csd/device_over_store.h"
#include "smartinf/csd/linked_ring.h"
#include "smartinf/csd/store_snapshot.h"
#include "smartinf/storage/block_store.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/format.h"

namespace smartinf::csd {
namespace {

using base::Result;
using base::Status;
using storage::IoOp;
using storage::IoRequest;

/// Moves data at submission and says so at the next reap. Speed is the links' matter.
class DriveRing final : public storage::Ring {
 public:
  DriveRing(std::span<std::byte> contents, uint32_t depth) : contents_(contents), depth_(depth) {
    moved_.reserve(depth);
  }

  std::string_view name() const override { return "memory"; }
  uint32_t depth() const override { return depth_; }
  Result<uint32_t> add_file(int, std::string) override { return 0u; }
  base::Status register_memory(std::span<std::byte>) override { return base::Status(); }

  Status submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* request : requests) {
      request->outcome = move(*request);
      moved_.push_back(request);
    }
    return Status();
  }

  Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    // As a drive with nothing to do: silent until the time is up.
    if (moved_.empty()) std::this_thread::sleep_for(wait);
    const size_t count = std::min(done.size(), moved_.size());
    const auto end = moved_.begin() + static_cast<std::ptrdiff_t>(count);
    std::copy(moved_.begin(), end, done.begin());
    moved_.erase(moved_.begin(), end);
    return count;
  }

 private:
  int64_t move(const IoRequest& request) {
    if (request.op == IoOp::kSync) return 0;
    const uint64_t bytes = request.buffer.size();
    if (request.offset_bytes > contents_.size() ||
        bytes > contents_.size() - request.offset_bytes) {
      return -EIO;
    }
    std::byte* place = contents_.data() + request.offset_bytes;
    if (request.op == IoOp::kRead) {
      std::memcpy(request.buffer.data(), place, bytes);
    } else {
      std::memcpy(place, request.buffer.data(), bytes);
    }
    return static_cast<int64_t>(bytes);
  }

  const std::span<std::byte> contents_;
  uint32_t depth_;
  std::vector<IoRequest*> moved_;  // at most depth_
};

/// For reading, beside a ring or without one.
storage::ReadOnlyContainer contents_of(const EmulatedDrive& drive, const std::string& name) {
  storage::ReadOnlyContainer container;
  container.file_path = name;
  container.memory = drive.contents();
  container.size_bytes = drive.size_bytes();
  return container;
}

storage::Container container_on(EmulatedDrive& drive, const std::string& name,
                                const storage::StoreOptions& options) {
  storage::Container container;
  container.path = name;
  container.file_path = name;
  container.direct = true;
  container.size_bytes = drive.contents().size();
  container.ring = std::make_unique<DriveRing>(drive.contents(), options.ring.depth);
  if (options.wrap_ring) container.ring = options.wrap_ring(std::move(container.ring));
  container.open_to_read = [&drive, name] {
    return Result<storage::ReadOnlyContainer>(contents_of(drive, name));
  };
  return container;
}

/// Lets keys and values lie in the drive's memory for them.
void keep_files_on(EmulatedDrive& drive, LocalDeviceOptions& options) {
  options.open_cache_place =
      [&drive, path = options.path](
          std::string_view name,
          const storage::StoreOptions& store) -> Result<storage::CachePlace> {
    const std::span<std::byte> contents =
        name == storage::kRowFileName ? drive.row_contents() : drive.cache_contents();
    storage::CachePlace place;
    place.path = path;
    place.direct = true;
    place.size_bytes = contents.size();
    place.ring = std::make_unique<DriveRing>(contents, store.ring.depth);
    if (store.wrap_ring) place.ring = store.wrap_ring(std::move(place.ring));
    return place;
  };
}

class EmulatedNewState final : public StoreNewState {
 public:
  EmulatedNewState(std::unique_ptr<storage::Store> store, EmulatedDrive& drive)
      : StoreNewState(std::move(store), {}), drive_(drive) {}
  ~EmulatedNewState() override {
    (void)close();
    if (!finished_) drive_.erase();
  }
  Status finish() override {
    finished_ = true;
    return Status();
  }

 private:
  EmulatedDrive& drive_;
  bool finished_ = false;
};

Status no_state(const std::string& name) {
  return Status(base::ErrorCode::kNotFound, "the device holds no state", {},
                base::ErrorPlace{name, {}, {}, 0});
}

}  // namespace

Result<std::unique_ptr<EmulatedDrive>> EmulatedDrive::create(uint64_t size_bytes,
                                                             uint64_t cache_bytes,
                                                             uint64_t row_bytes) {
  SI_ASSIGN_OR_RETURN(base::AlignedBuffer memory, base::AlignedBuffer::allocate(size_bytes));
  std::unique_ptr<EmulatedDrive> drive(new EmulatedDrive(std::move(memory)));
  if (cache_bytes > 0) {
    SI_ASSIGN_OR_RETURN(drive->cache_memory_, base::AlignedBuffer::allocate(cache_bytes));
  }
  if (row_bytes > 0) {
    SI_ASSIGN_OR_RETURN(drive->row_memory_, base::AlignedBuffer::allocate(row_bytes));
  }
  return drive;
}

Result<uint64_t> EmulatedDrive::size_for(const storage::StoreLayout& layout,
                                         storage::Durability durability, uint64_t spool_bytes) {
  const uint32_t slots = durability == storage::Durability::kStep ? 2 : 1;
  SI_ASSIGN_OR_RETURN(const storage::Geometry geometry, storage::Geometry::make(layout, slots));
  return base::round_up(geometry.container_bytes(), base::kIoAlignment) + spool_bytes;
}

Result<storage::StoreSummary> EmulatedDrive::summarize() const {
  if (!holds_store_) return no_state("emulated drive");
  return storage::summarize(contents_of(*this, "emulated drive"));
}

Result<std::unique_ptr<Snapshot>> EmulatedDrive::snapshot(const std::string& name) const {
  if (!holds_store_) return no_state(name);
  SI_ASSIGN_OR_RETURN(auto reader, storage::StateReader::open(contents_of(*this, name), name));
  return make_snapshot(std::move(reader), name, {});
}

Result<storage::CheckReport> EmulatedDrive::check(
    const storage::CheckOptions& options,
    const std::function<void(const storage::StoreFault&)>& visit) {
  if (!holds_store_) return no_state("emulated drive");
  return storage::check_container(container_on(*this, "emulated drive", {}), options, visit);
}

Result<std::unique_ptr<NewState>> EmulatedDrive::create_state(const std::string& name,
                                                              const storage::StoreLayout& layout,
                                                              const NewStateOptions& options) {
  if (holds_store_ && !options.replace) {
    return Status(base::ErrorCode::kAlreadyExists, "the device already holds a state",
                  "Use another device.",
                  base::ErrorPlace{name, {}, {}, 0});
  }
  storage::StoreOptions store_options;
  store_options.durability = options.durability;
  auto store =
      storage::BlockStore::create(container_on(*this, name, store_options), layout, store_options);
  if (!store.ok()) return std::move(store).status().with_context("device " + name);
  holds_store_ = true;
  return std::unique_ptr<NewState>(std::make_unique<EmulatedNewState>(std::move(*store), *this));
}

Result<std::unique_ptr<Device>> create_emulated_device(LocalDeviceOptions options,
                                                       const storage::StoreLayout& layout,
                                                       EmulatedDrive& drive) {
  const storage::StoreOptions store = linked_store_options(options);
  SI_ASSIGN_OR_RETURN(
      std::unique_ptr<storage::Store> made,
      storage::BlockStore::create(container_on(drive, options.path, store), layout, store));
  drive.holds_store_ = true;
  keep_files_on(drive, options);
  return make_device_over(std::move(made), StoreOrigin::kCreated, std::move(options), "emulated");
}

Result<std::unique_ptr<Device>> open_emulated_device(LocalDeviceOptions options,
                                                     EmulatedDrive& drive) {
  const storage::StoreOptions store = linked_store_options(options);
  SI_ASSIGN_OR_RETURN(std::unique_ptr<storage::Store> opened,
                      storage::BlockStore::open(container_on(drive, options.path, store), store));
  keep_files_on(drive, options);
  return make_device_over(std::move(opened), StoreOrigin::kOpened, std::move(options), "emulated");
}

}  // namespace smartinf::csd
