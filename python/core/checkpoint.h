// Checkpoints as the Python module shows them: what is in one, and its elements.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>

#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/stored_run.h"

namespace smartinf::python {

/// Documented for its users in module.cc. Threads: one at a time.
class PyCheckpoint {
 public:
  explicit PyCheckpoint(const std::string& path);
  PyCheckpoint(const PyCheckpoint&) = delete;
  PyCheckpoint& operator=(const PyCheckpoint&) = delete;

  const std::string& trainer() const { return description_.trainer; }
  std::string rule() const;
  std::vector<std::string> planes() const;
  nanobind::list parts() const;
  void read(size_t part, size_t plane, uint64_t first, uint64_t count, uintptr_t address);
  void check();
  /// Of all ranks. Null: it has none.
  engine::StoredTables* tables() const { return tables_.get(); }

 private:
  struct Part {
    engine::StoredRun run;
    engine::ElementReader reader{run};  // refers to it: a part stays where it is
  };
  engine::Checkpoint description_;
  std::vector<std::unique_ptr<Part>> parts_;
  std::unique_ptr<engine::StoredTables> tables_;  // of the parts' devices
};

}  // namespace smartinf::python
