#include "smartinf/train/tensor_memory.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

namespace smartinf::train {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kOwnPagesBytes = size_t{1} << 20;  // from here on

struct Pages {
  std::byte* address = nullptr;
  size_t bytes = 0;
};

Pages map(size_t bytes);

// Freed pages wait here for the next tensor of the same size, as long as all pages together are no
// more than tensors have once needed at the same time: a step makes the tensors of the step before,
// and the system is spared clearing pages for them. What waits never adds to the peak.
class PagePool {
 public:
  // Null when the system has no more.
  void* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    Pages pages;
    if (const auto found = by_size_.find(bytes); found != by_size_.end()) {
      const Place place = found->second;
      pages = *place;
      forget(place);
    } else {
      needed_ = std::max(needed_, in_use_bytes_ + bytes);
      while (in_use_bytes_ + waiting_bytes_ + bytes > needed_) unmap_oldest();
      pages = map(bytes);
      if (pages.address == nullptr) return nullptr;
    }
    in_use_.emplace(pages.address, bytes);
    in_use_bytes_ += bytes;
    return pages.address;
  }

  // Whether it was from here.
  bool give(void* address) {
    if (reinterpret_cast<uintptr_t>(address) % kHugePageBytes != 0) return false;
    const std::lock_guard lock(mutex_);
    const auto found = in_use_.find(address);
    if (found == in_use_.end()) return false;
    const Pages pages{static_cast<std::byte*>(address), found->second};
    in_use_.erase(found);
    in_use_bytes_ -= pages.bytes;
    waiting_bytes_ += pages.bytes;
    by_size_.emplace(pages.bytes, waiting_.insert(waiting_.end(), pages));
    return true;
  }

  void unmap_waiting() {
    const std::lock_guard lock(mutex_);
    while (!waiting_.empty()) unmap_oldest();
    needed_ = in_use_bytes_;
  }

 private:
  using Place = std::list<Pages>::iterator;

  void unmap_oldest() {
    const Pages oldest = waiting_.front();
    forget(waiting_.begin());
    munmap(oldest.address, oldest.bytes);
  }

  void forget(Place place) {
    const auto [first, last] = by_size_.equal_range(place->bytes);
    by_size_.erase(std::find_if(first, last, [&](const auto& at) { return at.second == place; }));
    waiting_bytes_ -= place->bytes;
    waiting_.erase(place);
  }

  std::mutex mutex_;
  std::list<Pages> waiting_;  // longest first
  std::unordered_multimap<size_t, Place> by_size_;
  size_t waiting_bytes_ = 0;
  std::unordered_map<void*, size_t> in_use_;  // bytes by address
  size_t in_use_bytes_ = 0;
  size_t needed_ = 0;  // in_use_bytes_ at its highest
};

PagePool& pool() {
  static auto* made = new PagePool;  // never destroyed: tensors may outlive it
  return *made;
}

// Whole huge pages begin on their own boundary, so that the system can give them at once; the rest,
// less than one, is of small pages.
Pages map(size_t bytes) {
  const size_t room = bytes + kHugePageBytes;
  void* mapped = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return {};
  auto* start = static_cast<std::byte*>(mapped);
  const size_t before =
      (kHugePageBytes - reinterpret_cast<uintptr_t>(start) % kHugePageBytes) % kHugePageBytes;
  if (before > 0) munmap(start, before);
  munmap(start + before + bytes, room - before - bytes);
  const Pages pages{start + before, bytes};
  madvise(pages.address, bytes / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE);
  return pages;
}

// Small ones go where they went before. torch also frees by address alone (raw_deallocate), so a
// tensor's context is its address, and one deleter serves both.
class PagesAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    void* address = nullptr;
    if (wanted < kOwnPagesBytes) {
      address = small().allocate(wanted).release_context();
    } else {
      address = pool().take((wanted + kPageBytes - 1) / kPageBytes * kPageBytes);
      TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "no memory for a tensor of ", wanted,
                       " bytes");
    }
    return {address, address, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static c10::Allocator& small() {
    static c10::Allocator* const before = c10::GetDefaultCPUAllocator();
    return *before;
  }
  static void give_back(void* address) {
    if (!pool().give(address)) small().raw_deallocate(address);
  }
};

}  // namespace

void give_tensors_their_own_pages() {
  static const bool given = [] {
    c10::SetCPUAllocator(new PagesAllocator);
    return true;
  }();
  static_cast<void>(given);
}

void unmap_waiting_pages() { pool().unmap_waiting(); }

}  // namespace smartinf::train
