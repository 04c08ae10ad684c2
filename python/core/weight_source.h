// Base of the module's classes that bring weights: a thread that calls the core, the layer windows
// over them, and no harm from fork.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "smartinf/base/status.h"
#include "smartinf/engine/weight_source.h"

#include "python/core/caller.h"
#include "python/core/errors.h"

namespace smartinf::python {

class PyLayerWindow;

using PySpans = std::vector<std::pair<uint64_t, uint64_t>>;  // (first, count) in elements

/// Threads: calls of several threads take turns.
class PyWeightSource {
 public:
  virtual ~PyWeightSource();
  PyWeightSource(const PyWeightSource&) = delete;
  PyWeightSource& operator=(const PyWeightSource&) = delete;

  /// Raises UsageError when it was closed, or belongs to the process that forked this one.
  virtual engine::WeightSource& weights() = 0;
  virtual uint64_t count() = 0;
  /// Where the subgroup ends that holds an element.
  uint64_t subgroup_end(uint64_t element);
  /// One flat array at `address` in the order of the space. kept: spans whose subgroups are wanted,
  /// whole, and no others; nothing: all are.
  engine::WeightsSink flat_sink(uintptr_t address, base::DataType type,
                                const std::optional<PySpans>& kept);
  /// On the caller's thread: since the resident weights were loaded.
  bool update_started() const { return update_started_; }

  /// Caller::run() of what works on weights(). Errors: closed by another thread in the meantime.
  void run(const std::function<void()>& work);
  /// The same for destructors: also when it was closed, and nothing is raised.
  void run_always(std::function<void()> work) { caller_->run_always(std::move(work)); }
  bool forked() const;

  /// Windows that are open; on the caller's thread.
  void add(PyLayerWindow* window) { windows_.insert(window); }
  void remove(PyLayerWindow* window) { windows_.erase(window); }

 protected:
  /// name: in messages, "the <name> is closed".
  PyWeightSource(std::string name, std::string closed_advice);

  StatusError closed() const;
  /// Raises UsageError in a forked child.
  void check_process() const;
  /// Caller::run() of what makes or closes the weights: run() checks that.
  Caller& caller() { return *caller_; }
  /// The last call: closes the windows and runs `work`; then waits for calls of other threads.
  void run_last(const std::function<void()>& work);

  bool update_started_ = false;  // on the caller's thread

 private:
  const std::string name_, closed_advice_;
  const pid_t owner_;  // threads exist only there
  std::unique_ptr<Caller> caller_;
  std::set<PyLayerWindow*> windows_;
  bool closed_ = false;  // seen on the caller's thread only
  int calls_ = 0;        // threads in run(); with the GIL held
};

}  // namespace smartinf::python
