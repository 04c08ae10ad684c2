// engine::LayerWindow as the Python module shows it, over an Updater or Weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "smartinf/engine/layer_window.h"

#include "python/core/weight_source.h"

namespace smartinf::python {

std::vector<uint64_t> window_slot_bytes(PyWeightSource& source, const PySpans& units,
                                        const std::string& type, uint32_t slots);

/// Documented for its users in module.cc. Threads: calls of several threads take turns, with those
/// of the source.
class PyLayerWindow {
 public:
  /// The source outlives it. slots: (address, bytes).
  PyLayerWindow(PyWeightSource& source, const PySpans& units, const std::string& type,
                const std::vector<std::pair<uintptr_t, uint64_t>>& slots, uintptr_t kept_address,
                const PySpans& kept, nanobind::object memory);
  ~PyLayerWindow();
  PyLayerWindow(const PyLayerWindow&) = delete;
  PyLayerWindow& operator=(const PyLayerWindow&) = delete;

  void start(const std::vector<uint32_t>& order);
  uintptr_t get(uint32_t unit);
  bool has_come(uint32_t unit);
  void release(uint32_t unit);
  void updated();
  uint64_t hits();
  uint64_t misses();
  void close();

  /// The source's, on its caller's thread.
  void source_closes() { window_.reset(); }

 private:
  /// Runs `work` on the source's thread, while the window is open.
  void run(const std::function<void()>& work);
  void check_unit(uint32_t unit) const;

  PyWeightSource& source_;
  std::vector<uint32_t> held_;                   // by unit: get()s that were not released
  std::unique_ptr<engine::LayerWindow> window_;  // on the caller's thread
};

}  // namespace smartinf::python
