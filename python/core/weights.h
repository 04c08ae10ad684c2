// engine::StripedWeights as the Python module shows it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/engine/striped_weights.h"

#include "python/core/weight_source.h"

namespace smartinf::python {

/// Documented for its users in module.cc.
class PyWeights final : public PyWeightSource {
 public:
  static std::unique_ptr<PyWeights> create(const std::vector<std::string>& paths, uint64_t elements,
                                           const std::string& type, std::string description,
                                           uint64_t stripe_bytes);
  static std::unique_ptr<PyWeights> open(const std::vector<std::string>& paths);
  static void remove_files(const std::vector<std::string>& paths);
  ~PyWeights() override;

  void write(uint64_t first, uintptr_t address, uint64_t count);
  void finish();
  void load_weights(const std::string& type, uintptr_t address, const std::optional<PySpans>& kept);
  uint64_t count() override { return core().elements(); }
  std::string type();
  std::string description() { return core().description(); }
  void close();

  engine::WeightSource& weights() override { return core(); }

 private:
  PyWeights();
  engine::StripedWeights& core();

  std::unique_ptr<engine::StripedWeights> weights_;
};

}  // namespace smartinf::python
