// Memory of the accelerator: capped, counted, poisoned, and out of the host's reach; and pinned
// memory of the host.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include "tests/accelerator/internal.h"

namespace smartinf::test_accelerator {
namespace {

constexpr size_t kReservedBytes = size_t{1} << 36;  // of addresses; pages are there once touched
constexpr size_t kRoundBytes = 512;

char* reserve(int protection) {
  void* address =
      mmap(nullptr, kReservedBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "test accelerator: no ", kReservedBytes,
              " bytes of addresses");
  return static_cast<char*>(address);
}

struct Block {
  size_t bytes;
  c10::StreamId stream;          // that allocated it, and whose order frees it
  std::set<c10::StreamId> used;  // other streams, by recordStream
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  char* view(uintptr_t address) const {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(untouchable_);
    if (address < begin || address >= begin + kReservedBytes) return nullptr;
    return memory_ + (address - begin);
  }

  c10::DataPtr allocate(size_t wanted) override {
    if (wanted == 0) return {nullptr, the_device()};
    const size_t bytes = (wanted + kRoundBytes - 1) / kRoundBytes * kRoundBytes;
    std::unique_lock lock(mutex_);
    if (beyond_cap(bytes)) {  // what waits for a recorded stream still counts
      lock.unlock();
      for (size_t i = 0; i < kStreams; ++i) drain(static_cast<c10::StreamId>(i));
      lock.lock();
    }
    TORCH_CHECK_WITH(OutOfMemoryError, !beyond_cap(bytes),
                     "test accelerator: out of memory: ", bytes, " bytes are wanted, and ",
                     current_, " of ", options().memory_bytes, " bytes are in use");
    const size_t offset = take_addresses(bytes);
    blocks_.emplace(offset, Block{bytes, current_stream(), {}});
    current_ += bytes;
    peak_ = std::max(peak_, current_);
    lock.unlock();
    std::memset(memory_ + offset, kPoison, bytes);
    void* address = untouchable_ + offset;
    return {address, address, &give_back, the_device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    drain(current_stream());
    std::memcpy(host_view(to), host_view(from), bytes);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const std::lock_guard lock(mutex_);
    const auto block =
        blocks_.find(static_cast<size_t>(static_cast<char*>(data.get()) - untouchable_));
    if (block != blocks_.end() && stream.id() != block->second.stream) {
      block->second.used.insert(stream.id());
    }
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    peak_ = current_;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const std::lock_guard lock(mutex_);
    stats.allocated_bytes[0].current = static_cast<int64_t>(current_);
    stats.allocated_bytes[0].peak = static_cast<int64_t>(peak_);
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    const size_t all = options().memory_bytes == 0 ? kReservedBytes : options().memory_bytes;
    return {all - std::min(all, current_), all};
  }

 private:
  bool beyond_cap(size_t bytes) const {
    return options().memory_bytes != 0 && current_ + bytes > options().memory_bytes;
  }

  static void give_back(void* address);

  // The bytes may be taken again once the recorded streams have come to this point, and the
  // addresses once the block's own stream has: until then its late copies still land here.
  void free_block(size_t offset) {
    Block block;
    {
      const std::lock_guard lock(mutex_);
      block = blocks_.at(offset);
    }
    const auto address = reinterpret_cast<uintptr_t>(untouchable_ + offset);
    note_freed(block.stream, address, address + block.bytes, !block.used.empty());
    const std::shared_ptr<void> last(nullptr, [this, offset](void* /*none*/) { release(offset); });
    for (const c10::StreamId stream : block.used) {
      enqueue(stream, [last] {});
    }
  }

  void release(size_t offset) {
    std::unique_lock lock(mutex_);
    const Block block = blocks_.extract(offset).mapped();
    current_ -= block.bytes;
    lock.unlock();
    const auto poison = [this, offset, bytes = block.bytes] {
      std::memset(memory_ + offset, kPoison, bytes);
      const std::lock_guard free_lock(mutex_);
      free_.emplace(bytes, offset);
    };
    if (idle(block.stream)) {
      poison();
    } else {
      enqueue(block.stream, poison);
    }
  }

  // Addresses of a freed block of the same size, or new ones.
  size_t take_addresses(size_t bytes) {
    const auto freed = free_.find(bytes);
    if (freed != free_.end()) return free_.extract(freed).mapped();
    TORCH_CHECK(used_ + bytes <= kReservedBytes, "test accelerator: no addresses are left");
    return std::exchange(used_, used_ + bytes);
  }

  char* const untouchable_ = reserve(PROT_NONE);
  char* const memory_ = reserve(PROT_READ | PROT_WRITE);
  std::mutex mutex_;
  std::multimap<size_t, size_t> free_;  // bytes and offset
  std::map<size_t, Block> blocks_;      // by offset
  size_t used_ = 0;                     // of the addresses
  size_t current_ = 0;
  size_t peak_ = 0;
};

DeviceMemory& device_memory() {
  static auto* made = new DeviceMemory;  // never destroyed: tensors may outlive it
  return *made;
}

void DeviceMemory::give_back(void* address) {
  DeviceMemory& memory = device_memory();
  memory.free_block(static_cast<size_t>(static_cast<char*>(address) - memory.untouchable_));
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    if (wanted == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* address = std::aligned_alloc(4096, (wanted + 4095) / 4096 * 4096);
    TORCH_CHECK(address != nullptr, "test accelerator: no ", wanted, " bytes of pinned memory");
    const std::lock_guard lock(mutex_);
    ranges_.emplace(reinterpret_cast<uintptr_t>(address), wanted);
    return {address, address, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  void add(const void* address, size_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_.emplace(reinterpret_cast<uintptr_t>(address), bytes);
  }
  void remove(const void* address) {
    const std::lock_guard lock(mutex_);
    ranges_.erase(reinterpret_cast<uintptr_t>(address));
  }
  bool contains(uintptr_t address) {
    const std::lock_guard lock(mutex_);
    const auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) return false;
    const auto range = std::prev(after);
    return address < range->first + range->second;
  }

 private:
  static void give_back(void* address);

  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;  // begin and bytes
};

PinnedMemory& pinned_memory() {
  static auto* made = new PinnedMemory;
  return *made;
}

void PinnedMemory::give_back(void* address) {
  {
    const std::lock_guard lock(pinned_memory().mutex_);
    const auto range = pinned_memory().ranges_.extract(reinterpret_cast<uintptr_t>(address));
    note_freed(0, range.key(), range.key() + range.mapped(), /*recorded=*/true);
  }
  std::free(address);
}

}  // namespace

void* host_view(const void* address) {
  char* view = device_memory().view(reinterpret_cast<uintptr_t>(address));
  return view != nullptr ? view : const_cast<void*>(address);
}

c10::DeviceAllocator& device_allocator() { return device_memory(); }
c10::Allocator& pinned_allocator() { return pinned_memory(); }
bool is_pinned(const void* address) {
  return pinned_memory().contains(reinterpret_cast<uintptr_t>(address));
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DataPtr made = device_allocator().allocate(bytes);
  if (std::min(bytes, storage.nbytes()) != 0) {
    device_allocator().copy_data(made.mutable_get(), storage.data(),
                                 std::min(bytes, storage.nbytes()));
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

extern "C" Memory smartinf_test_accelerator_memory() {
  const auto bytes = device_memory().getDeviceStats(0).allocated_bytes[0];
  return {static_cast<uint64_t>(bytes.current), static_cast<uint64_t>(bytes.peak)};
}

extern "C" void smartinf_test_accelerator_pin(const void* address, uint64_t bytes) {
  pinned_memory().add(address, bytes);
}
extern "C" void smartinf_test_accelerator_unpin(const void* address) {
  pinned_memory().remove(address);
}

extern "C" void smartinf_test_accelerator_reset_peak() { device_memory().resetPeakStats(0); }

}  // namespace smartinf::test_accelerator
