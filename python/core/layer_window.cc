#include "python/core/layer_window.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <nanobind/nanobind.h>

#include "python/core/arguments.h"

namespace nb = nanobind;

namespace smartinf::python {

using base::ErrorCode;
using base::Status;

namespace {

[[noreturn]] void wrong_state(std::string what, std::string advice) {
  throw StatusError(Status(ErrorCode::kFailedPrecondition, std::move(what), std::move(advice)));
}

std::vector<plan::Unit> checked_units(PyWeightSource& source, const PySpans& given) {
  const uint64_t count = source.count();
  std::vector<plan::Unit> units;
  for (const auto& [first, elements] : given) {
    if (elements == 0 || first >= count || elements > count - first) {
      usage("unit " + std::to_string(units.size()) + " has elements " + std::to_string(first) +
            " to " + std::to_string(first + elements) + " of " + std::to_string(count));
    }
    units.push_back({first, elements, static_cast<uint32_t>(units.size()), 1});
  }
  if (units.empty()) usage("a layer window without units");
  return units;
}

}  // namespace

std::vector<uint64_t> window_slot_bytes(PyWeightSource& source, const PySpans& units,
                                        const std::string& type, uint32_t slots) {
  return engine::window_slot_bytes(source.weights(), checked_units(source, units), data_type(type),
                                   slots);
}

PyLayerWindow::PyLayerWindow(PyWeightSource& source, const PySpans& units, const std::string& type,
                             const std::vector<std::pair<uintptr_t, uint64_t>>& slots,
                             uintptr_t kept_address, const PySpans& kept, nb::object memory)
    : source_(source), held_(units.size()) {
  engine::WeightSource& weights = source.weights();
  engine::LayerWindow::Options options;
  options.units = checked_units(source, units);
  options.type = data_type(type);
  uint64_t largest = 0;
  for (const auto& [address, bytes] : slots) {
    largest = std::max(largest, bytes);
    options.slots.emplace_back(reinterpret_cast<std::byte*>(address), bytes);
  }
  const uint64_t needed = engine::window_slot_bytes(weights, options.units, options.type, 1)[0];
  if (largest < needed) {
    usage("the slots of the layer window have " + std::to_string(largest) +
              " bytes at most, and its units need " + std::to_string(needed),
          "Give it slots of window_slot_bytes().");
  }
  options.slots_owner =
      std::shared_ptr<const void>(new nb::object(std::move(memory)), [](const nb::object* object) {
        const nb::gil_scoped_acquire gil;
        delete object;
      });
  options.resident = source.flat_sink(kept_address, options.type, kept);
  options.wait_resident = [this, &weights](const plan::Subgroup& subgroup) {
    return source_.update_started() ? weights.wait_weights(subgroup.first, subgroup.count)
                                    : Status();
  };
  source_.run([&] {
    window_ = std::make_unique<engine::LayerWindow>(weights, std::move(options));
    source_.add(this);
  });
}

PyLayerWindow::~PyLayerWindow() {
  if (source_.forked()) {
    (void)window_.release();  // what it would wait for is the parent's
    return;
  }
  source_.run_always([this] {
    source_.remove(this);
    window_.reset();
  });
}

void PyLayerWindow::run(const std::function<void()>& work) {
  source_.run([&] {
    if (window_ == nullptr) wrong_state("the layer window is closed", "Make a new one.");
    work();
  });
}

void PyLayerWindow::check_unit(uint32_t unit) const {
  if (unit < held_.size()) return;
  usage("there is no unit " + std::to_string(unit) + " among " + std::to_string(held_.size()));
}

void PyLayerWindow::start(const std::vector<uint32_t>& order) {
  for (const uint32_t unit : order) check_unit(unit);
  run([&] { window_->start(order); });
}

uintptr_t PyLayerWindow::get(uint32_t unit) {
  check_unit(unit);
  const std::byte* weights = nullptr;
  try {
    run([&] {
      weights = take(window_->get(unit));
      ++held_[unit];
    });
  } catch (const nb::python_error&) {
    // A signal's: nobody learns that the unit is held.
    if (weights != nullptr) {
      source_.run_always([&] {
        if (window_ != nullptr) window_->release(unit);
        --held_[unit];
      });
    }
    throw;
  }
  return reinterpret_cast<uintptr_t>(weights);
}

bool PyLayerWindow::has_come(uint32_t unit) {
  check_unit(unit);
  bool come = false;
  run([&] { come = window_->has_come(unit); });
  return come;
}

void PyLayerWindow::release(uint32_t unit) {
  check_unit(unit);
  run([&] {
    if (held_[unit] == 0) {
      wrong_state("unit " + std::to_string(unit) + " is released and was not got",
                  "Call release() once for each get().");
    }
    --held_[unit];
    window_->release(unit);
  });
}

void PyLayerWindow::updated() {
  run([&] {
    for (size_t unit = 0; unit < held_.size(); ++unit) {
      if (held_[unit] == 0) continue;
      wrong_state("weights are updated while unit " + std::to_string(unit) + " is in use",
                  "Release every unit first.");
    }
    window_->updated();
  });
}

uint64_t PyLayerWindow::hits() {
  uint64_t hits = 0;
  run([&] { hits = window_->hits(); });
  return hits;
}

uint64_t PyLayerWindow::misses() {
  uint64_t misses = 0;
  run([&] { misses = window_->misses(); });
  return misses;
}

void PyLayerWindow::close() {
  if (source_.forked()) return;
  source_.run_always([this] {
    source_.remove(this);
    window_.reset();
  });
}

}  // namespace smartinf::python
