#include "smartinf/train/tensor_memory.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"

namespace smartinf::train {
namespace {

std::atomic<size_t> own_pages_bytes = size_t{1} << 20;  // from here on

// Freed pages wait here for the next tensor of the same size, as long as all pages together are no
// more than tensors have once needed at the same time: a step makes the tensors of the step before,
// and the system is spared clearing pages for them. What waits never adds to the peak. Pages that
// are given up for a tensor of another size become its own as far as they go.
class PagePool {
 public:
  // Null when the system has no more.
  void* take(size_t wanted) {
    const uint64_t bytes = base::round_up(wanted, base::kPageBytes);
    const std::lock_guard lock(mutex_);
    base::AlignedBuffer pages;
    // The last that was given is the likeliest to be in the caches.
    const auto same = std::find_if(waiting_.rbegin(), waiting_.rend(),
                                   [&](const auto& waiting) { return waiting.size() == bytes; });
    if (same != waiting_.rend()) {
      pages = std::move(*same);
      waiting_.erase(std::next(same).base());
      waiting_bytes_ -= bytes;
    } else {
      const uint64_t needed = std::max(needed_, in_use_bytes_ + bytes);
      std::vector<base::AlignedBuffer> given_up;
      while (in_use_bytes_ + waiting_bytes_ + bytes > needed) {
        waiting_bytes_ -= waiting_.front().size();
        given_up.push_back(std::move(waiting_.front()));
        waiting_.pop_front();
      }
      const auto most = std::ranges::max_element(given_up, {}, &base::AlignedBuffer::size);
      if (most != given_up.end() && most->resize(bytes)) {
        pages = std::move(*most);
      } else {
        given_up.clear();
        auto mapped = base::AlignedBuffer::allocate(bytes, base::kHugePageBytes);
        if (!mapped.ok()) return nullptr;
        pages = std::move(*mapped);
      }
      needed_ = needed;
    }
    in_use_bytes_ += bytes;
    void* address = pages.data();
    in_use_.emplace(address, std::move(pages));
    return address;
  }

  // Whether it was from here.
  bool give(void* address) {
    if (reinterpret_cast<uintptr_t>(address) % base::kHugePageBytes != 0) return false;
    const std::lock_guard lock(mutex_);
    auto found = in_use_.extract(address);
    if (found.empty()) return false;
    in_use_bytes_ -= found.mapped().size();
    waiting_bytes_ += found.mapped().size();
    waiting_.push_back(std::move(found.mapped()));
    return true;
  }

  void unmap_waiting() {
    const std::lock_guard lock(mutex_);
    waiting_.clear();
    waiting_bytes_ = 0;
    needed_ = in_use_bytes_;
  }

 private:
  std::mutex mutex_;
  std::deque<base::AlignedBuffer> waiting_;  // longest first
  uint64_t waiting_bytes_ = 0;
  std::unordered_map<void*, base::AlignedBuffer> in_use_;  // by address
  uint64_t in_use_bytes_ = 0;
  uint64_t needed_ = 0;  // in_use_bytes_ at its highest
};

PagePool& pool() {
  static auto* made = new PagePool;  // never destroyed: tensors may outlive it
  return *made;
}

// Small ones go where they went before. torch also frees by address alone (raw_deallocate), so a
// tensor's context is its address, and one deleter serves both.
class PagesAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    void* address = nullptr;
    if (wanted < own_pages_bytes) {
      address = small().allocate(wanted).release_context();
    } else {
      address = pool().take(wanted);
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

void give_pages_to_tensors_of(size_t bytes) { own_pages_bytes = bytes; }

void unmap_waiting_pages() { pool().unmap_waiting(); }

}  // namespace smartinf::train
