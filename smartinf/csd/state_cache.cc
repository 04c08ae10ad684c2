#include "smartinf/csd/state_cache.h"

#include <algorithm>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/device_parts.h"

namespace smartinf::csd {

base::Status StateCache::allocate(const storage::Store& store,
                                  std::span<const uint32_t> subgroups) {
  SI_CHECK(entries_.empty(), "the cache is allocated once");
  if (subgroups.empty()) return base::Status();
  const storage::StoreLayout& layout = store.layout();
  const size_t planes = layout.state_planes().size();
  const auto bytes_of = [&](uint32_t subgroup) {
    return store.plane_offset(layout.subgroups[subgroup].id, planes);
  };
  uint64_t bytes = 0;
  for (const uint32_t subgroup : subgroups) bytes += bytes_of(subgroup);
  SI_ASSIGN_OR_RETURN(memory_, base::AlignedBuffer::allocate(bytes));
  entry_of_.assign(layout.subgroups.size(), kNone);
  uint64_t at = 0;
  for (const uint32_t subgroup : subgroups) {
    SI_CHECK(entry_of_[subgroup] == kNone, "a subgroup is cached once");
    entry_of_[subgroup] = static_cast<uint32_t>(entries_.size());
    Entry& entry = entries_.emplace_back();
    entry.subgroup = subgroup;
    entry.extent = memory_.bytes().subspan(at, bytes_of(subgroup));
    at += entry.extent.size();
  }
  return base::Status();
}

StateCache::Entry* StateCache::find(uint32_t subgroup) {
  return holds(subgroup) ? &entries_[entry_of_[subgroup]] : nullptr;
}
const StateCache::Entry* StateCache::find(uint32_t subgroup) const {
  return holds(subgroup) ? &entries_[entry_of_[subgroup]] : nullptr;
}

std::span<std::byte> StateCache::extent(uint32_t subgroup) const {
  const Entry* entry = find(subgroup);
  return entry == nullptr ? std::span<std::byte>() : entry->extent;
}

uint32_t StateCache::current(uint32_t subgroup) const {
  const Entry* entry = find(subgroup);
  return entry == nullptr || entry->in_step ? 0 : entry->planes;
}

uint32_t StateCache::unwritten(uint32_t subgroup) const {
  const Entry* entry = find(subgroup);
  return entry == nullptr ? 0 : entry->unwritten;
}

void StateCache::begin_update(uint32_t subgroup) {
  Entry& entry = *find(subgroup);
  entry.planes = 0;
  entry.in_step = true;
}

void StateCache::updated(uint32_t subgroup, uint32_t plane_mask, bool held) {
  Entry& entry = *find(subgroup);
  entry.planes = plane_mask;
  entry.unwritten = held ? plane_mask : 0;
}

void StateCache::overwritten(uint32_t subgroup, uint32_t plane_mask) {
  Entry* entry = find(subgroup);
  if (entry == nullptr) return;
  entry->planes &= ~plane_mask;
  entry->unwritten &= ~plane_mask;
}

void StateCache::flushed(uint32_t subgroup) { find(subgroup)->unwritten = 0; }

void StateCache::commit() {
  for (Entry& entry : entries_) entry.in_step = false;
}

void StateCache::abort() {
  for (Entry& entry : entries_) {
    if (!entry.in_step) continue;
    entry.planes = entry.unwritten = 0;
    entry.in_step = false;
  }
}

void StateCache::drop() {
  for (Entry& entry : entries_) {
    entry.planes = entry.unwritten = 0;
    entry.in_step = false;
  }
}

std::vector<uint32_t> StateCache::all_unwritten() const {
  std::vector<uint32_t> all;
  for (const Entry& entry : entries_) {
    if (entry.unwritten != 0) all.push_back(entry.subgroup);
  }
  return all;
}

void StateCache::count_hit(const storage::Store& store, uint32_t subgroup, uint32_t plane_mask) {
  if (plane_mask == 0) return;
  const storage::StoreLayout& layout = store.layout();
  uint64_t bytes = 0;
  for (size_t plane = 0; plane < layout.planes.size(); ++plane) {
    if ((plane_mask >> plane & 1u) == 0) continue;
    bytes +=
        base::round_up(store.plane_bytes(layout.subgroups[subgroup].id, plane), base::kIoAlignment);
  }
  hit_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

void StateFlush::start(Command* command) {
  SI_CHECK(!running_, "one flush at a time");
  command_ = command;
  running_ = true;
  status_ = base::Status();
  left_ = parts_.cache.all_unwritten();
  std::reverse(left_.begin(), left_.end());
  for (Slot& slot : parts_.slots) {
    SI_CHECK(slot.state == SlotState::kFree, "a flush needs free slots");
    if (!left_.empty()) write_next(slot);
  }
  end_if_done();
}

void StateFlush::write_next(Slot& slot) {
  const uint32_t subgroup = left_.back();
  left_.pop_back();
  slot.state = SlotState::kFlushing;
  slot.subgroup = subgroup;
  ++in_flight_;
  parts_.start(slot.master_out, storage::SubgroupIo::Op::kFlush, subgroup,
               parts_.cache.extent(subgroup), parts_.cache.unwritten(subgroup));
}

void StateFlush::on_transfer(Transfer& transfer) {
  Slot& slot = *transfer.slot;
  slot.state = SlotState::kFree;
  --in_flight_;
  if (transfer.io.status.ok()) {
    parts_.cache.flushed(slot.subgroup);
  } else if (status_.ok()) {
    status_ = transfer.io.status;
  }
  if (status_.ok() && !left_.empty()) write_next(slot);
  end_if_done();
}

void StateFlush::end_if_done() {
  if (!running_ || in_flight_ > 0) return;
  running_ = false;
  left_.clear();
  if (status_.ok() && parts_.postpones_writes()) status_ = parts_.store->finish_flush();
  if (command_ != nullptr) parts_.complete(*std::exchange(command_, nullptr), status_);
}

void StateFlush::abandon(const base::Status& status) {
  in_flight_ = 0;
  if (!running_) return;
  status_ = status;
  end_if_done();
}

}  // namespace smartinf::csd
