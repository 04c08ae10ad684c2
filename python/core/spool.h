// engine::Spool as the Python module shows it: of an open updater, or over directories of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <nanobind/nanobind.h>
#include <sys/types.h>

#include "smartinf/engine/options.h"
#include "smartinf/engine/scratch_spool.h"
#include "smartinf/engine/spool.h"

namespace smartinf::python {

/// Documented for its users in module.cc. Threads: calls of several threads take turns; none holds
/// the GIL while it waits.
class PySpool {
 public:
  /// Over directories of its own.
  explicit PySpool(const engine::UpdaterOptions& options);
  /// The spool of an updater, which calls close() before it ends.
  explicit PySpool(engine::Spool& spool);
  ~PySpool();
  PySpool(const PySpool&) = delete;
  PySpool& operator=(const PySpool&) = delete;

  uint64_t put(uintptr_t address, uint64_t bytes);
  bool settled(uint64_t ticket);
  void wait(uint64_t ticket);
  void start_get(uint64_t ticket, uintptr_t address);
  void drop(uint64_t ticket);
  nanobind::dict counts();
  /// memory: what puts and gets have used; kept for good where a device may still use it.
  void close(nanobind::object memory);
  /// As above, of which nothing is known.
  void close();

 private:
  void run(const std::function<void(engine::Spool&)>& work);
  engine::Spool::Ticket known(uint64_t ticket) const;

  const pid_t owner_;  // the devices' threads exist only there
  std::mutex mutex_;   // of all below
  std::unique_ptr<engine::ScratchSpool> scratch_;
  engine::Spool* spool_ = nullptr;                // null: closed
  std::unordered_map<uint64_t, uint64_t> bytes_;  // of each ticket
};

}  // namespace smartinf::python
