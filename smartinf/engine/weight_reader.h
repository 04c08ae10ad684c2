// Weights that nobody updates, read from files by threads of their own as often as they are wanted.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "smartinf/engine/weight_source.h"

namespace smartinf::engine {

/// Threads: one caller.
class WeightReader : public WeightSource {
 public:
  /// subgroup_elements are read at once.
  WeightReader(uint64_t elements, uint64_t subgroup_elements)
      : elements_(elements), subgroup_elements_(subgroup_elements) {}
  ~WeightReader() override;

  uint64_t elements() const { return elements_; }

  base::Status load_weights(base::DataType type, const WeightsSink& sink) override;
  base::Status wait_weights(uint64_t, uint64_t) override { return base::Status(); }
  plan::Subgroup subgroup_at(uint64_t element) const override;
  base::Status fetch_weights(uint64_t first, base::DataType type, void* out) override;
  base::Status wait_fetched(uint64_t first) override;

 protected:
  /// Puts the weights of a subgroup to out, [count] of type. Threads: several at once.
  virtual base::Status read(const plan::Subgroup& subgroup, base::DataType type,
                            std::byte* out) = 0;
  /// Waits for the reads that have begun; there are no others any more. Whoever implements read()
  /// calls it first in its destructor.
  void stop();

 private:
  struct Fetch {
    plan::Subgroup subgroup;
    base::DataType type;
    std::byte* out;
  };
  void work();

  const uint64_t elements_;
  const uint64_t subgroup_elements_;
  std::mutex mutex_;
  std::condition_variable wanted_, done_;
  bool ends_ = false;
  std::deque<Fetch> queue_;
  std::map<uint64_t, std::optional<base::Status>> fetches_;  // by first element; nothing: under way
  std::vector<std::jthread> threads_;                        // from the first fetch on
};

}  // namespace smartinf::engine
