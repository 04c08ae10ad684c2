#include "smartinf/train/layer_stream.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include <c10/core/StreamGuard.h>

#include "smartinf/base/check.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using base::Status;
using torch::Tensor;

LayerStream::LayerStream(engine::WeightSource& source, const Model& model,
                         const CopyStreams& streams, base::DataType type,
                         const plan::UnitPlacement& placement, bool several_ranks,
                         std::span<const uint32_t> only)
    : source_(source),
      model_(model),
      streams_(streams),
      type_(type),
      placement_(placement),
      several_ranks_(several_ranks),
      weights_(model.units().size()) {
  const std::span<const plan::Unit> units = model.units();
  const bool beside = streams.beside();
  const auto host = torch::dtype(scalar_type(type)).pinned_memory(beside);
  const auto elements = [](uint64_t count) { return static_cast<int64_t>(count); };
  own_.assign(only.begin(), only.end());
  if (only.empty()) {
    own_.resize(units.size());
    std::iota(own_.begin(), own_.end(), 0u);
  }
  const auto end_of = [&](size_t first_units) {
    return first_units == 0 ? 0 : units[own_[first_units - 1]].end();
  };
  const bool from_devices = placement.in_memory < own_.size();
  in_memory_end_ = host_elements_ = end_of(std::min<size_t>(placement.in_memory, own_.size()));
  if (from_devices && host_elements_ > 0) {
    const plan::Subgroup last = source.subgroup_at(host_elements_ - 1);
    host_elements_ = last.first + last.count;
  }
  if (!only.empty()) add_regions(only);
  if (regions_.empty()) add_region(0, only.empty() ? host_elements_ : 0);
  host_elements_ = regions_.back().end;
  const uint64_t in_memory = regions_.back().at + host_elements_ - regions_.back().first;
  host_N_ = torch::empty({elements(in_memory)}, host);
  const bool copies = beside && !streams.in_place();
  const auto resident_units =
      std::min<size_t>(copies ? placement.on_accelerator : placement.in_memory, own_.size());
  resident_elements_ = end_of(resident_units);
  accelerator_N_ = host_N_;
  if (copies) {
    uint64_t there = 0;
    if (resident_elements_ > 0) {
      const Region& region = *region_of(resident_elements_ - 1);
      there = region.at + resident_elements_ - region.first;
    }
    accelerator_N_ =
        torch::empty({elements(there)}, host.pinned_memory(false).device(streams.device()));
  } else if (beside && in_memory > 0) {
    accelerator_N_ = computed_with(host_N_.data_ptr(), in_memory);
  }
  if (beside) {
    old_used_ = streams.done_so_far();  // by whoever had the memory before
    arrived_there_.emplace(streams.event());
  }
  for (const uint32_t unit : own_) {
    if (units[unit].end() > resident_elements_) break;
    weights_[unit] = model.weights_of(unit, part(accelerator_N_, units[unit]));
  }
  for (const plan::Unit& unit : units) unit_elements_.push_back(unit.count);
  if (from_devices) {
    uint64_t all_bytes = 0;
    std::vector<plan::Unit> streamed;
    for (size_t i = placement.in_memory; i < own_.size(); ++i) streamed.push_back(units[own_[i]]);
    std::vector<uint64_t> slots =
        engine::window_slot_bytes(source, streamed, type, placement.host_slots);
    for (uint64_t& bytes : slots) all_bytes += bytes = base::round_up(bytes, base::kIoAlignment);
    slots_N_ = torch::empty({elements(all_bytes / base::data_type_bytes(type))}, host);
    engine::LayerWindow::Options window;
    window.units.assign(units.begin(), units.end());
    window.type = type;
    std::span left(static_cast<std::byte*>(slots_N_.data_ptr()), all_bytes);
    for (const uint64_t bytes : slots) {
      window.slots.push_back(left.first(bytes));
      left = left.subspan(bytes);
    }
    window.slots_owner = std::make_shared<const Tensor>(slots_N_);
    window.resident = [this](uint64_t first) { return weights_at(first); };
    window.wait_resident = [this](const plan::Subgroup& subgroup) {
      return arrive_in_host(subgroup.first + subgroup.count);
    };
    window_ = std::make_unique<engine::LayerWindow>(source, std::move(window));
  }
  if (copies && resident_units < own_.size()) {
    std::vector<uint64_t> streamed;
    for (size_t i = resident_units; i < own_.size(); ++i) streamed.push_back(units[own_[i]].count);
    for (const uint64_t size : plan::slot_sizes(streamed, placement.accelerator_slots)) {
      add_accelerator_slot(size);
    }
  }
}

void LayerStream::add_accelerator_slot(uint64_t elements) {
  Tensor weights_N = torch::empty({static_cast<int64_t>(elements)}, accelerator_N_.options());
  // Used by whoever had the memory before, in the order of this stream.
  accelerator_slots_.push_back(
      {std::move(weights_N), std::nullopt, false, false, streams_.event(), streams_.done_so_far()});
}

void LayerStream::close() {
  for (AcceleratorSlot& slot : accelerator_slots_) slot.copied.synchronize();
  while (!in_use_.empty()) end_oldest_use();
  window_.reset();
}

/// Of units that stay, and of the others the subgroups that reach beyond the units of `only`.
void LayerStream::add_regions(std::span<const uint32_t> only) {
  const std::span<const plan::Unit> units = model_.units();
  for (size_t i = 0; i < only.size(); ++i) {
    size_t from = i;  // units next to each other
    size_t to = i;
    while (from > 0 && only[from - 1] + 1 == only[from]) --from;
    while (to + 1 < only.size() && only[to] + 1 == only[to + 1]) ++to;
    const plan::Unit& unit = units[only[i]];
    for (uint64_t at = unit.first; at < unit.end();) {
      const plan::Subgroup subgroup = source_.subgroup_at(at);
      at = subgroup.first + subgroup.count;
      const bool shared = subgroup.first < units[only[from]].first || at > units[only[to]].end();
      if (in_memory(only[i]) || shared) add_region(subgroup.first, at);
    }
  }
}

void LayerStream::add_region(uint64_t first, uint64_t end) {
  if (!regions_.empty() && first <= regions_.back().end) {
    regions_.back().end = std::max(regions_.back().end, end);
    return;
  }
  const uint64_t at =
      regions_.empty() ? 0 : regions_.back().at + regions_.back().end - regions_.back().first;
  regions_.push_back({first, end, at});
}

const LayerStream::Region* LayerStream::region_of(uint64_t element) const {
  for (const Region& region : regions_) {
    if (region.has(element)) return &region;
  }
  return nullptr;
}

Tensor LayerStream::part(const Tensor& weights_N, const plan::Unit& unit) const {
  if (unit.count == 0) return weights_N.narrow(0, 0, 0);  // an embedding that is a table
  const Region& region = *region_of(unit.first);
  return weights_N.narrow(0, static_cast<int64_t>(region.at + unit.first - region.first),
                          static_cast<int64_t>(unit.count));
}

Status LayerStream::load() {
  if (host_elements_ > 0 || several_ranks_) {
    SI_RETURN_IF_ERROR(
        source_.load_weights(type_, [this](uint64_t first) { return weights_at(first); }));
  }
  updated();
  host_arrived_ = host_elements_;
  return arrive(resident_elements_);
}

void* LayerStream::weights_at(uint64_t element) const {
  const Region* region = region_of(element);
  if (region == nullptr) return nullptr;
  return static_cast<std::byte*>(host_N_.data_ptr()) +
         (region->at + element - region->first) * base::data_type_bytes(type_);
}

void LayerStream::updated() {
  host_arrived_ = arrived_ = 0;
  while (!in_use_.empty()) end_oldest_use();
  if (streams_.beside()) old_used_->record(streams_.current());
  for (AcceleratorSlot& slot : accelerator_slots_) {
    finish_copy(slot);
    slot.unit.reset();
  }
  if (window_ != nullptr) window_->updated();
}

Status LayerStream::wait_all() {
  SI_RETURN_IF_ERROR(arrive_in_host(host_elements_));
  return arrive(resident_elements_);
}

Status LayerStream::arrive_in_host(uint64_t end) {
  if (end <= host_arrived_) return Status();
  const uint64_t begin_ns = base::now_ns();
  SI_RETURN_IF_ERROR(source_.wait_weights(host_arrived_, end - host_arrived_));
  host_arrived_ = end;
  waited_s_ += base::seconds_since(begin_ns);
  return Status();
}

Status LayerStream::arrive(uint64_t end) {
  end = std::min(end, resident_elements_);
  SI_RETURN_IF_ERROR(arrive_in_host(end));
  if (end <= arrived_) return Status();
  if (streams_.beside() && !streams_.in_place()) {
    {
      const c10::StreamGuard guard(streams_.up());
      old_used_->block(streams_.up());
      for (const Region& region : regions_) {
        const uint64_t first = std::max(arrived_, region.first);
        if (first >= std::min(end, region.end)) continue;
        const plan::Unit some{first, std::min(end, region.end) - first};
        // variable_data(): autograd does not take this for a change of what the units before have
        // kept for backward.
        part(accelerator_N_.variable_data(), some)
            .copy_(part(host_N_, some), /*non_blocking=*/true);
      }
      arrived_there_->record(streams_.up());
    }
    arrived_there_->block(streams_.current());
  }
  arrived_ = end;
  return Status();
}

void LayerStream::start(std::vector<uint32_t> order) {
  next_ = 0;
  std::erase_if(order, [&](uint32_t unit) {
    return !std::ranges::binary_search(own_, unit) || unit_elements_[unit] == 0 ||
           model_.units()[unit].end() <= resident_elements_;
  });
  order_ = order;
  if (window_ == nullptr) return;
  std::erase_if(order, [&](uint32_t unit) { return in_memory(unit); });
  window_->start(order);
}

const UnitWeights& LayerStream::get(size_t unit) {
  const auto number = static_cast<uint32_t>(unit);
  if (const size_t use = plan::next_use(uses(), number); use < order_.size()) next_ = use + 1;
  const plan::Unit& span = model_.units()[unit];
  if (span.end() <= resident_elements_) {
    throw_if_error(arrive(span.end()));
    return weights_[unit];
  }
  if (!streams_.beside() || streams_.in_place()) {
    // Of three slots one is read into, while what was computed with last is still in use.
    while (in_use_.size() > 1) end_oldest_use();
    weights_[unit] = model_.weights_of(unit, in_host(unit));
    return weights_[unit];
  }
  AcceleratorSlot* slot = slot_of(unit);
  if (slot == nullptr) slot = bring(number);
  slot->held = true;
  slot->copied.block(streams_.current());
  weights_[unit] =
      model_.weights_of(unit, slot->weights_N.narrow(0, 0, static_cast<int64_t>(span.count)));
  return weights_[unit];
}

void LayerStream::release(size_t unit) {
  if (model_.units()[unit].end() <= resident_elements_) {
    // The next one's new weights come up while the accelerator computes with this one.
    const size_t next = std::min(unit + 1, model_.units().size() - 1);
    if (streams_.beside()) throw_if_error(arrive(model_.units()[next].end()));
    return bring_ahead();
  }
  weights_[unit].clear();
  if (!streams_.beside()) return window_->release(static_cast<uint32_t>(unit));
  if (streams_.in_place()) {
    in_use_.emplace_back(static_cast<uint32_t>(unit), streams_.done_so_far());
    return;
  }
  AcceleratorSlot* slot = slot_of(unit);
  SI_CHECK(slot != nullptr && slot->held, "a unit is released that is not held");
  slot->used.record(streams_.current());
  slot->held = false;
  // The copy is done by the time that the accelerator computes with it, which has only been
  // started.
  if (several_ranks_) finish_copy(*slot);
  bring_ahead();
}

/// A unit's weights in the host's memory; the window's slot is held until its release().
Tensor LayerStream::in_host(size_t unit) {
  const plan::Unit& span = model_.units()[unit];
  if (in_memory(unit)) {
    throw_if_error(arrive_in_host(span.end()));
    return part(host_N_, span);
  }
  const uint64_t begin_ns = base::now_ns();
  base::Result<std::byte*> weights = window_->get(static_cast<uint32_t>(unit));
  throw_if_error(weights.status());
  waited_s_ += base::seconds_since(begin_ns);
  if (streams_.in_place()) return computed_with(*weights, span.count);
  return torch::from_blob(*weights, {static_cast<int64_t>(span.count)},
                          torch::dtype(scalar_type(type_)));
}

/// Weights in the host's memory as the accelerator has them in place.
Tensor LayerStream::computed_with(void* weights, uint64_t elements) const {
  return at::for_blob(weights, {static_cast<int64_t>(elements)})
      .options(torch::dtype(scalar_type(type_)).device(streams_.device()))
      .target_device(streams_.device())
      .make_tensor();
}

/// In place: a slot is free when what was started with it has been computed.
void LayerStream::end_oldest_use() {
  in_use_.front().second.synchronize();
  window_->release(in_use_.front().first);
  in_use_.pop_front();
}

LayerStream::AcceleratorSlot* LayerStream::slot_of(size_t unit) {
  for (AcceleratorSlot& slot : accelerator_slots_) {
    if (slot.unit == unit) return &slot;
  }
  return nullptr;
}

/// Starts the copy of a unit to a slot (plan::choose_slot). Null: it is only brought ahead, and
/// there is none for it.
LayerStream::AcceleratorSlot* LayerStream::bring(uint32_t unit, std::optional<size_t> ahead) {
  std::vector<plan::Slot> slots;
  uint32_t held = 0;
  for (const AcceleratorSlot& slot : accelerator_slots_) {
    slots.push_back({static_cast<uint64_t>(slot.weights_N.numel()), slot.unit, slot.held});
    held += slot.held ? 1 : 0;
  }
  std::optional<uint32_t> chosen = plan::choose_slot(slots, uses(), unit, ahead);
  if (!chosen && ahead) return nullptr;
  if (!chosen) {  // as the window does
    SI_CHECK(held < placement_.accelerator_slots, "every slot on the accelerator is held");
    chosen = static_cast<uint32_t>(slots.size());
    add_accelerator_slot(unit_elements_[unit]);
  }
  AcceleratorSlot* const to = &accelerator_slots_[*chosen];
  finish_copy(*to);
  const Tensor host_N = in_host(unit);
  {
    const c10::StreamGuard guard(streams_.up());
    to->used.block(streams_.up());  // by whoever had the slot before
    to->weights_N.variable_data().narrow(0, 0, host_N.size(0)).copy_(host_N, /*non_blocking=*/true);
    to->copied.record(streams_.up());
  }
  to->unit = unit;
  to->host_held = !in_memory(unit);
  return to;
}

/// Whether its weights of the last update are in the host's memory, which nothing has to be asked
/// for.
bool LayerStream::is_at_hand(uint32_t unit) const {
  return in_memory(unit) && model_.units()[unit].end() <= host_arrived_;
}

/// While the accelerator computes with one unit the next ones are copied: those behind the next one
/// where that waits for nothing.
void LayerStream::bring_ahead() {
  if (accelerator_slots_.empty()) return;
  for (AcceleratorSlot& slot : accelerator_slots_) {
    if (slot.host_held && !several_ranks_ && slot.copied.query()) finish_copy(slot);
  }
  for (size_t use = next_; use < order_.size(); ++use) {
    if (slot_of(order_[use]) != nullptr) continue;
    if (use > next_ && !is_at_hand(order_[use])) return;
    if (bring(order_[use], use) == nullptr) return;
  }
}

/// The host's slot that a copy came from is free.
void LayerStream::finish_copy(AcceleratorSlot& slot) {
  if (!std::exchange(slot.host_held, false)) return;
  slot.copied.synchronize();
  window_->release(static_cast<uint32_t>(*slot.unit));
}

}  // namespace smartinf::train
