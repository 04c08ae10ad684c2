#include "smartinf/engine/layer_window.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

uint64_t end_of(const plan::Subgroup& subgroup) { return subgroup.first + subgroup.count; }

std::vector<uint64_t> bytes_of(const WeightSource& source, std::span<const plan::Unit> units,
                               base::DataType type) {
  std::vector<uint64_t> bytes;
  for (const plan::Unit& unit : units) {
    if (unit.count == 0) {
      bytes.push_back(0);
      continue;
    }
    const uint64_t first = source.subgroup_at(unit.first).first;
    const uint64_t end = end_of(source.subgroup_at(unit.end() - 1));
    bytes.push_back((end - first) * base::data_type_bytes(type));
  }
  return bytes;
}

}  // namespace

std::vector<uint64_t> window_slot_bytes(const WeightSource& source,
                                        std::span<const plan::Unit> units, base::DataType type,
                                        uint32_t slots) {
  return plan::slot_sizes(bytes_of(source, units, type), slots);
}

LayerWindow::LayerWindow(WeightSource& source, Options options)
    : source_(source),
      options_(std::move(options)),
      value_bytes_(base::data_type_bytes(options_.type)),
      unit_bytes_(bytes_of(source, options_.units, options_.type)),
      slots_(options_.slots.size()),
      more_(std::make_shared<std::vector<base::AlignedBuffer>>()) {
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].memory = options_.slots[i];
}

LayerWindow::~LayerWindow() {
  forget();
  if (!source_.hangs()) return;
  storage::leak_in_flight(std::shared_ptr(options_.slots_owner));
  storage::leak_in_flight(std::shared_ptr(more_));
}

void LayerWindow::start(std::span<const uint32_t> order) {
  order_.assign(order.begin(), order.end());
  next_ = 0;
  read_ahead();
}

Result<std::byte*> LayerWindow::get(uint32_t unit) {
  const size_t use = plan::next_use(uses(), unit);
  if (use < order_.size()) next_ = use + 1;
  uint32_t found = slot_of(unit);
  if (found != kNone) {
    ++hits_;
  } else if (failure_.ok()) {
    ++misses_;
    SI_ASSIGN_OR_RETURN(found, slot_for(unit));
    failure_ = load(unit, found);
  }
  if (failure_.ok()) {
    ++slots_[found].held;
    read_ahead();
    if (failure_.ok()) failure_ = finish(slots_[found]);
    if (failure_.ok()) return at(slots_[found], options_.units[unit].first);
    --slots_[found].held;
  }
  forget();
  return std::exchange(failure_, Status());
}

bool LayerWindow::has_come(uint32_t unit) const {
  const uint32_t slot = slot_of(unit);
  if (slot == kNone || !failure_.ok()) return false;
  return std::ranges::all_of(slots_[slot].pending,
                             [this](const Pending& pending) { return has_come(pending); });
}

bool LayerWindow::has_come(const Pending& pending) const {
  if (pending.resident != nullptr) return false;
  if (pending.from == kNone) return source_.has_fetched(pending.subgroup.first);
  return std::ranges::all_of(slots_[pending.from].pending, [&](const Pending& other) {
    return other.subgroup.first != pending.subgroup.first || has_come(other);
  });
}

void LayerWindow::release(uint32_t unit) {
  const uint32_t slot = slot_of(unit);
  SI_CHECK(slot != kNone && slots_[slot].held > 0, "a unit is released that is not held");
  --slots_[slot].held;
  read_ahead();
}

void LayerWindow::updated() {
  for (const Slot& slot : slots_) SI_CHECK(slot.held == 0, "weights are updated that are in use");
  forget();
  failure_ = Status();
}

uint32_t LayerWindow::slot_of(uint32_t unit) const {
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].unit == unit) return i;
  }
  return kNone;
}

std::optional<uint32_t> LayerWindow::choose(uint32_t unit, std::optional<size_t> ahead) const {
  std::vector<plan::Slot> slots;
  for (const Slot& slot : slots_) {
    slots.push_back({slot.memory.size(), std::nullopt, slot.held > 0});
    if (slot.unit != kNone) slots.back().unit = slot.unit;
  }
  return plan::choose_slot(slots, uses(), unit, ahead);
}

/// A slot for a unit that is wanted now.
Result<uint32_t> LayerWindow::slot_for(uint32_t unit) {
  if (const std::optional<uint32_t> slot = choose(unit)) return *slot;
  const auto held = std::ranges::count_if(slots_, [](const Slot& slot) { return slot.held > 0; });
  if (static_cast<size_t>(held) >= options_.slots.size()) {
    return Status(ErrorCode::kFailedPrecondition, "every slot of the layer window is held",
                  "Release a unit first, or give the window more slots.");
  }
  SI_ASSIGN_OR_RETURN(more_->emplace_back(), base::AlignedBuffer::allocate(unit_bytes_[unit]));
  slots_.emplace_back().memory = more_->back().bytes();
  base::log(base::LogLevel::kWarning,
            "units of weights are held together that are not next to each other in their order: "
            "one more slot of " +
                base::format_bytes(unit_bytes_[unit]));
  return static_cast<uint32_t>(slots_.size() - 1);
}

uint64_t LayerWindow::more_bytes() const {
  uint64_t bytes = 0;
  for (const base::AlignedBuffer& buffer : *more_) bytes += buffer.bytes().size();
  return bytes;
}

void LayerWindow::read_ahead() {
  for (size_t use = next_; use < order_.size() && failure_.ok(); ++use) {
    const uint32_t unit = order_[use];
    if (slot_of(unit) != kNone) continue;
    const std::optional<uint32_t> slot = choose(unit, use);
    if (!slot) return;
    failure_ = load(unit, *slot);
  }
}

/// Starts reading a unit into a slot. A subgroup that is in memory already is copied when the unit
/// is wanted: a unit shares the one at its end with the next.
Status LayerWindow::load(uint32_t unit, uint32_t index) {
  SI_RETURN_IF_ERROR(empty(index));
  Slot& slot = slots_[index];
  const plan::Unit& wanted = options_.units[unit];
  slot.first = source_.subgroup_at(wanted.first).first;
  slot.end = slot.first;
  slot.unit = unit;
  while (slot.end < wanted.end()) {
    Pending pending{source_.subgroup_at(slot.end), kNone, nullptr};
    const uint64_t first = pending.subgroup.first;
    const uint64_t end = end_of(pending.subgroup);
    if (options_.resident) pending.resident = options_.resident(first);
    for (uint32_t i = 0; i < slots_.size() && pending.resident == nullptr; ++i) {
      const Slot& other = slots_[i];
      const bool has =
          i != index && other.unit != kNone && other.first <= first && end <= other.end;
      if (has) pending.from = i;
    }
    if (pending.from == kNone && pending.resident == nullptr) {
      SI_RETURN_IF_ERROR(source_.fetch_weights(first, options_.type, at(slot, first)));
    }
    slot.pending.push_back(pending);
    slot.end = end;
  }
  return Status();
}

Status LayerWindow::finish(Slot& slot) {
  Status first;
  while (!slot.pending.empty()) {
    Status status = finish(slot, slot.pending.size() - 1);
    if (first.ok()) first = std::move(status);
  }
  return first;
}

Status LayerWindow::finish(Slot& slot, size_t index) {
  const Pending pending = slot.pending[index];
  slot.pending.erase(slot.pending.begin() + static_cast<std::ptrdiff_t>(index));
  const plan::Subgroup& subgroup = pending.subgroup;
  const uint64_t bytes = subgroup.count * value_bytes_;
  if (pending.resident != nullptr) {
    SI_RETURN_IF_ERROR(options_.wait_resident(subgroup));
    std::memcpy(at(slot, subgroup.first), pending.resident, bytes);
    return Status();
  }
  if (pending.from == kNone) return source_.wait_fetched(subgroup.first);
  Slot& other = slots_[pending.from];
  for (size_t i = 0; i < other.pending.size(); ++i) {
    if (other.pending[i].subgroup.first != subgroup.first) continue;
    SI_RETURN_IF_ERROR(finish(other, i));
    break;
  }
  std::memcpy(at(slot, subgroup.first), at(other, subgroup.first), bytes);
  return Status();
}

/// Nothing is on its way into the slot any more, or to be copied from it. Errors: of what is
/// copied.
Status LayerWindow::empty(uint32_t index) {
  Slot& slot = slots_[index];
  for (Slot& other : slots_) {
    for (size_t i = other.pending.size(); i-- > 0;) {
      if (other.pending[i].from == index) SI_RETURN_IF_ERROR(finish(other, i));
    }
  }
  static_cast<void>(finish(slot));  // what failed is not wanted any more
  slot.unit = kNone;
  return Status();
}

/// Empties all slots that are not held, of whatever is in them: after a failure, and where it is
/// old. Those that are held are complete.
void LayerWindow::forget() {
  for (Slot& slot : slots_) {
    if (slot.held > 0) continue;
    for (const Pending& pending : std::exchange(slot.pending, {})) {
      if (pending.from != kNone || pending.resident != nullptr) continue;
      static_cast<void>(source_.wait_fetched(pending.subgroup.first));
    }
    slot.unit = kNone;
  }
}

std::byte* LayerWindow::at(const Slot& slot, uint64_t element) const {
  return slot.memory.data() + (element - slot.first) * value_bytes_;
}

}  // namespace smartinf::engine
