#include "python/core/caller.h"

#include <chrono>
#include <exception>
#include <utility>

#include <nanobind/nanobind.h>

#include "python/core/errors.h"

namespace nb = nanobind;

namespace smartinf::python {
namespace {

/// Signals are looked at this often: well below what a person notices, and far above the cost.
constexpr auto kSignalPeriod = std::chrono::milliseconds(50);

}  // namespace

Caller::Caller() : thread_([this] { serve(); }) {}

Caller::~Caller() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
}

void Caller::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return phase_ == Phase::kRunning || closing_; });
    if (phase_ != Phase::kRunning) return;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      work_();
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    thrown_ = std::move(thrown);
    work_ = nullptr;
    phase_ = Phase::kDone;
    changed_.notify_all();
  }
}

void Caller::run(std::function<void()> work) {
  nb::object raised;  // by the last signal handler that raised
  std::exception_ptr thrown;
  bool ours = false;
  for (bool done = false; !done;) {
    {
      const nb::gil_scoped_release released;
      std::unique_lock lock(mutex_);
      if (!ours && caller_ == std::this_thread::get_id()) {
        throw StatusError(
            base::Status(base::ErrorCode::kFailedPrecondition,
                         "a signal handler has interrupted a call, and made another one",
                         "Let the handler set a flag, and make the call behind step()"));
      }
      if (!ours && changed_.wait_for(lock, kSignalPeriod, [&] { return phase_ == Phase::kFree; })) {
        work_ = std::move(work);
        phase_ = Phase::kRunning;
        caller_ = std::this_thread::get_id();
        ours = true;
        changed_.notify_all();
      }
      if (ours && changed_.wait_for(lock, kSignalPeriod, [&] { return phase_ == Phase::kDone; })) {
        thrown = std::exchange(thrown_, nullptr);
        phase_ = Phase::kFree;
        caller_ = {};
        changed_.notify_all();
        done = true;
      }
    }
    if (PyErr_CheckSignals() != 0) {
      if (!ours) throw nb::python_error();
      PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
      PyErr_Fetch(&type, &value, &trace);
      PyErr_NormalizeException(&type, &value, &trace);
      Py_XDECREF(type);
      Py_XDECREF(trace);
      raised = nb::steal(value);
    }
  }
  if (thrown) std::rethrow_exception(thrown);
  if (raised.is_valid()) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
    throw nb::python_error();
  }
}

void Caller::run_always(std::function<void()> work) {
  if (std::this_thread::get_id() == thread_.get_id()) {  // a callback's garbage is collected
    work();
    return;
  }
  const nb::gil_scoped_release released;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return phase_ == Phase::kFree; });
  work_ = std::move(work);
  phase_ = Phase::kRunning;
  changed_.notify_all();
  changed_.wait(lock, [&] { return phase_ == Phase::kDone; });
  thrown_ = nullptr;
  phase_ = Phase::kFree;
  changed_.notify_all();
}

}  // namespace smartinf::python
