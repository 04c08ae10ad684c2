#include "python/core/weight_source.h"

#include <chrono>
#include <thread>
#include <unordered_set>
#include <utility>

#include <nanobind/nanobind.h>
#include <unistd.h>

#include "python/core/arguments.h"
#include "python/core/layer_window.h"

namespace nb = nanobind;

namespace smartinf::python {

using base::ErrorCode;
using base::Status;

PyWeightSource::PyWeightSource(std::string name, std::string closed_advice)
    : name_(std::move(name)),
      closed_advice_(std::move(closed_advice)),
      owner_(getpid()),
      caller_(std::make_unique<Caller>()) {}

PyWeightSource::~PyWeightSource() {
  // The thread that would have to be joined lives in the parent. The memory goes with the process.
  if (forked()) (void)caller_.release();
}

bool PyWeightSource::forked() const { return getpid() != owner_; }

StatusError PyWeightSource::closed() const {
  return StatusError(
      Status(ErrorCode::kFailedPrecondition, "the " + name_ + " is closed", closed_advice_));
}

void PyWeightSource::check_process() const {
  if (!forked()) return;
  throw StatusError(
      Status(ErrorCode::kFailedPrecondition,
             "this " + name_ + " belongs to the process that this one was forked from",
             "Use it there, or make a new one here on other devices."));
}

uint64_t PyWeightSource::subgroup_end(uint64_t element) {
  if (element >= count()) usage("there is no element " + std::to_string(element));
  const plan::Subgroup subgroup = weights().subgroup_at(element);
  return subgroup.first + subgroup.count;
}

engine::WeightsSink PyWeightSource::flat_sink(uintptr_t address, base::DataType type,
                                              const std::optional<PySpans>& kept) {
  std::unordered_set<uint64_t> wanted;
  for (const auto& [first, elements] : kept.value_or(PySpans())) {
    if (first > count() || elements > count() - first) usage("weights beyond the model's last");
    for (uint64_t at = first; at < first + elements;) {
      const plan::Subgroup subgroup = weights().subgroup_at(at);
      wanted.insert(subgroup.first);
      at = subgroup.first + subgroup.count;
    }
  }
  auto* flat = reinterpret_cast<std::byte*>(address);
  return [flat, type, all = !kept, wanted = std::move(wanted)](uint64_t first) -> void* {
    return all || wanted.contains(first) ? flat + first * base::data_type_bytes(type) : nullptr;
  };
}

void PyWeightSource::run(const std::function<void()>& work) {
  struct Call {
    explicit Call(int& calls) : calls_(calls) { ++calls_; }
    ~Call() { --calls_; }
    int& calls_;
  };
  check_process();
  const Call call(calls_);
  caller_->run([&] {
    if (closed_) throw closed();
    work();
  });
}

void PyWeightSource::run_last(const std::function<void()>& work) {
  caller_->run([&] {
    for (PyLayerWindow* window : std::exchange(windows_, {})) window->source_closes();
    work();
    closed_ = true;
  });
  // A thread that is still in a call when the interpreter ends would be ended by it inside of C++,
  // which std::terminate answers. No new call begins.
  while (calls_ > 0) {
    const nb::gil_scoped_release released;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace smartinf::python
