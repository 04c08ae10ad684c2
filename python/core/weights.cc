#include "python/core/weights.h"

#include <utility>

#include <nanobind/nanobind.h>

#include "python/core/arguments.h"

namespace nb = nanobind;

namespace smartinf::python {

PyWeights::PyWeights() : PyWeightSource("set of weights", "Open it again.") {}

std::unique_ptr<PyWeights> PyWeights::create(const std::vector<std::string>& paths,
                                             uint64_t elements, const std::string& type,
                                             std::string description, uint64_t stripe_bytes) {
  const engine::StripedWeights::Options options{paths, elements, data_type(type),
                                                std::move(description), stripe_bytes};
  std::unique_ptr<PyWeights> made(new PyWeights());
  made->caller().run([&] { made->weights_ = take(engine::StripedWeights::create(options)); });
  return made;
}

std::unique_ptr<PyWeights> PyWeights::open(const std::vector<std::string>& paths) {
  std::unique_ptr<PyWeights> made(new PyWeights());
  made->caller().run([&] { made->weights_ = take(engine::StripedWeights::open(paths)); });
  if (made->weights_ == nullptr) return nullptr;
  return made;
}

void PyWeights::remove_files(const std::vector<std::string>& paths) {
  const nb::gil_scoped_release released;
  check(engine::StripedWeights::remove(paths));
}

PyWeights::~PyWeights() {
  if (forked()) {
    (void)weights_.release();
    return;
  }
  const nb::gil_scoped_release released;
  weights_.reset();
}

engine::StripedWeights& PyWeights::core() {
  check_process();
  if (weights_ == nullptr) throw closed();
  return *weights_;
}

void PyWeights::write(uint64_t first, uintptr_t address, uint64_t count) {
  engine::StripedWeights& weights = core();
  run([&] { check(weights.write(first, reinterpret_cast<const void*>(address), count)); });
}

void PyWeights::finish() {
  engine::StripedWeights& weights = core();
  run([&] { check(weights.finish()); });
}

void PyWeights::load_weights(const std::string& type, uintptr_t address,
                             const std::optional<PySpans>& kept) {
  engine::StripedWeights& weights = core();
  const base::DataType out = data_type(type);
  run([&] { check(weights.load_weights(out, flat_sink(address, out, kept))); });
}

std::string PyWeights::type() { return std::string(base::data_type_name(core().type())); }

void PyWeights::close() {
  if (weights_ == nullptr || forked()) return;
  // Another thread may be in a call, or wait for its turn with a reference to the weights.
  std::unique_ptr<engine::StripedWeights> closing = std::move(weights_);
  try {
    run_last([&] { closing.reset(); });
  } catch (...) {
    weights_ = std::move(closing);  // a signal came before this call's turn
    throw;
  }
}

}  // namespace smartinf::python
