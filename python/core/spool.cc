#include "python/core/spool.h"

#include <utility>

#include <unistd.h>

#include "python/core/errors.h"

namespace nb = nanobind;

namespace smartinf::python {

using base::ErrorCode;
using base::Status;
using engine::Spool;

namespace {

StatusError refused(const char* what, const char* advice) {
  return StatusError(Status(ErrorCode::kFailedPrecondition, what, advice));
}

}  // namespace

PySpool::PySpool(const engine::UpdaterOptions& options) : owner_(getpid()) {
  const nb::gil_scoped_release released;
  scratch_ = take(engine::ScratchSpool::open(options));
  spool_ = &scratch_->spool();
}

PySpool::PySpool(Spool& spool) : owner_(getpid()), spool_(&spool) {}

PySpool::~PySpool() {
  if (getpid() != owner_) {
    (void)scratch_.release();  // its threads live in the parent
    return;
  }
  const nb::gil_scoped_release released;
  close();
}

void PySpool::run(const std::function<void(Spool&)>& work) {
  if (getpid() != owner_) {
    throw refused("these activations belong to the process that this one was forked from",
                  "Use them there.");
  }
  const nb::gil_scoped_release released;
  const std::lock_guard lock(mutex_);
  if (spool_ == nullptr) throw refused("the devices of activations are closed", "");
  work(*spool_);
}

Spool::Ticket PySpool::known(uint64_t ticket) const {
  if (!bytes_.contains(ticket)) throw refused("no such ticket", "It was dropped, or never given.");
  return {ticket};
}

uint64_t PySpool::put(uintptr_t address, uint64_t bytes) {
  uint64_t ticket = 0;
  run([&](Spool& spool) {
    ticket = take(spool.put({reinterpret_cast<const std::byte*>(address), bytes})).value;
    bytes_[ticket] = bytes;
  });
  return ticket;
}

bool PySpool::settled(uint64_t ticket) {
  bool settled = false;
  run([&](Spool& spool) { settled = spool.settled(known(ticket)); });
  return settled;
}

void PySpool::wait(uint64_t ticket) {
  run([&](Spool& spool) { check(spool.wait(known(ticket))); });
}

void PySpool::start_get(uint64_t ticket, uintptr_t address) {
  run([&](Spool& spool) {
    const Spool::Ticket put = known(ticket);
    check(spool.start_get(put, {reinterpret_cast<std::byte*>(address), bytes_.at(ticket)}));
  });
}

void PySpool::drop(uint64_t ticket) {
  run([&](Spool& spool) {
    spool.drop(known(ticket));
    bytes_.erase(ticket);
  });
}

nb::dict PySpool::counts() {
  Spool::Counts counts;
  uint64_t used = 0;
  run([&](Spool& spool) {
    counts = spool.counts();
    used = spool.used_bytes();
  });
  nb::dict out;
  out["put"] = counts.put_bytes;
  out["got"] = counts.got_bytes;
  out["copied"] = counts.copied_bytes;
  out["used"] = used;
  out["used_max"] = counts.used_bytes_max;
  return out;
}

void PySpool::close(nb::object memory) {
  if (getpid() != owner_) return;
  std::shared_ptr<void> held(memory.inc_ref().ptr(), [](void* object) {
    const nb::gil_scoped_acquire acquired;
    Py_DECREF(static_cast<PyObject*>(object));
  });
  const nb::gil_scoped_release released;
  {
    const std::lock_guard lock(mutex_);
    if (spool_ != nullptr) {
      for (const auto& [ticket, bytes] : bytes_) spool_->drop({ticket});
      bytes_.clear();
      spool_->retire(std::move(held));
    }
  }
  close();
}

void PySpool::close() {
  const std::lock_guard lock(mutex_);
  if (spool_ == nullptr) return;
  for (const auto& [ticket, bytes] : bytes_) spool_->drop({ticket});
  bytes_.clear();
  spool_ = nullptr;
  scratch_.reset();
}

}  // namespace smartinf::python
