#include "smartinf/csd/linked_ring.h"

#include <algorithm>
#include <array>
#include <string>
#include <thread>
#include <utility>

#include "smartinf/base/clock.h"
#include "smartinf/storage/forwarding_ring.h"

namespace smartinf::csd {
namespace {

using storage::IoOp;
using storage::IoRequest;

class LinkedRing final : public storage::ForwardingRing {
 public:
  LinkedRing(std::unique_ptr<storage::Ring> inner, std::vector<std::shared_ptr<Link>> links)
      : ForwardingRing(std::move(inner)),
        links_(std::move(links)),
        name_(std::string(ForwardingRing::name()) + " behind links") {
    in_flight_.reserve(depth());
  }

  std::string_view name() const override { return name_; }

  base::Status submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* request : requests) {
      uint64_t due_ns = 0;
      if (request->op != IoOp::kSync) {
        const LinkDirection direction =
            request->op == IoOp::kRead ? LinkDirection::kUp : LinkDirection::kDown;
        for (const auto& link : links_) {
          due_ns = std::max(due_ns, link->book(direction, request->kind, request->buffer.size()));
        }
      }
      in_flight_.push_back({request, due_ns, false});
    }
    return ForwardingRing::submit(requests);
  }

  base::Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    const uint64_t until_ns = base::now_ns() + static_cast<uint64_t>(wait.count());
    uint64_t inner_wait_ns = 0;
    while (true) {
      SI_RETURN_IF_ERROR(reap_inner(std::chrono::nanoseconds(inner_wait_ns)));
      const uint64_t now = base::now_ns();
      const size_t count = take_due(done, now);
      if (count > 0 || now >= until_ns || in_flight_.empty()) return count;
      // Until the first held one is due, or the inner ring has another.
      uint64_t wake_ns = until_ns;
      bool inner_busy = false;
      for (const InFlight& entry : in_flight_) {
        if (entry.moved) {
          wake_ns = std::min(wake_ns, entry.due_ns);
        } else {
          inner_busy = true;
        }
      }
      inner_wait_ns = inner_busy ? wake_ns - now : 0;
      if (!inner_busy) std::this_thread::sleep_for(std::chrono::nanoseconds(wake_ns - now));
    }
  }

 private:
  struct InFlight {
    IoRequest* request;
    uint64_t due_ns;
    bool moved;  // by the inner ring
  };

  base::Status reap_inner(std::chrono::nanoseconds wait) {
    std::array<IoRequest*, 32> moved;
    SI_ASSIGN_OR_RETURN(const size_t count, ForwardingRing::reap(moved, wait));
    for (size_t i = 0; i < count; ++i) {
      const auto entry = std::find_if(in_flight_.begin(), in_flight_.end(),
                                      [&](const InFlight& e) { return e.request == moved[i]; });
      SI_CHECK(entry != in_flight_.end(), "a ring completed what it was not given");
      entry->moved = true;
    }
    return base::Status();
  }

  size_t take_due(std::span<IoRequest*> done, uint64_t now_ns) {
    size_t count = 0;
    std::erase_if(in_flight_, [&](const InFlight& entry) {
      if (!entry.moved || entry.due_ns > now_ns || count == done.size()) return false;
      done[count++] = entry.request;
      return true;
    });
    return count;
  }

  std::vector<std::shared_ptr<Link>> links_;
  std::string name_;
  std::vector<InFlight> in_flight_;  // at most depth()
};

}  // namespace

std::unique_ptr<storage::Ring> make_linked_ring(std::unique_ptr<storage::Ring> inner,
                                                std::vector<std::shared_ptr<Link>> links) {
  return std::make_unique<LinkedRing>(std::move(inner), std::move(links));
}

storage::StoreOptions linked_store_options(const LocalDeviceOptions& options) {
  storage::StoreOptions store = options.store;
  if (options.links.store.empty()) return store;
  store.wrap_ring = [inner = options.store.wrap_ring,
                     links = options.links.store](std::unique_ptr<storage::Ring> ring) {
    if (inner) ring = inner(std::move(ring));
    return make_linked_ring(std::move(ring), links);
  };
  return store;
}

}  // namespace smartinf::csd
