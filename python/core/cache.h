// engine::KeyValueStore as the Python module shows it: keys and values of sequences that are
// continued, in memory or on devices.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <sys/types.h>

#include "smartinf/engine/device_source.h"
#include "smartinf/engine/key_value_store.h"

namespace smartinf::python {

/// Documented for its users in module.cc. Threads: calls of several threads take turns; none holds
/// the GIL while it waits.
class PyCache {
 public:
  /// Tokens of a sequence, and where they begin among those that are given.
  using Runs = std::vector<std::tuple<engine::SequenceId, uint64_t, uint64_t>>;

  PyCache(const nanobind::dict& options, const std::vector<uint32_t>& windows, uint32_t heads,
          uint32_t kv_heads, uint32_t head_width, float softcap, const std::string& format,
          uint64_t memory_bytes, uint32_t threads);
  ~PyCache();
  PyCache(const PyCache&) = delete;
  PyCache& operator=(const PyCache&) = delete;

  uint64_t sequence_bytes(uint64_t tokens) const;
  void open(engine::SequenceId id, uint64_t tokens_max);
  void drop(engine::SequenceId id);
  void append(uint32_t layer, const Runs& runs, const std::string& type, uintptr_t keys,
              uintptr_t values);
  void attend(uint32_t layer, const std::vector<engine::SequenceId>& ids, uintptr_t queries,
              uintptr_t out);
  nanobind::dict traffic();
  void close();

 private:
  void run(const std::function<void(engine::KeyValueStore&)>& work);
  void check_layer(uint32_t layer) const;

  const pid_t owner_;  // the store's threads exist only there
  engine::KeyValueShape shape_;
  std::mutex mutex_;                              // of what follows
  engine::DeviceSources sources_;                 // none: in memory
  std::unique_ptr<engine::KeyValueStore> store_;  // null: closed
};

}  // namespace smartinf::python
