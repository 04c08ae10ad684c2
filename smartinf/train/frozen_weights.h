// Weights that are not trained, read from the model's own files as often as they are wanted.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "smartinf/engine/weight_source.h"
#include "smartinf/model/weight_files.h"

namespace smartinf::train {

/// What is fetched at once: 8 MiB in bf16. Long enough for a drive, short enough that a unit's
/// pieces are read side by side.
inline constexpr uint64_t kFrozenPieceElements = uint64_t{4} << 20;

/// Threads: one caller; threads of its own read.
class FrozenWeights final : public engine::WeightSource {
 public:
  /// elements: of the files' space.
  FrozenWeights(model::WeightFiles files, uint64_t elements);
  /// Waits for what is being read.
  ~FrozenWeights() override;

  base::Status load_weights(base::DataType type, const engine::WeightsSink& sink) override;
  base::Status wait_weights(uint64_t, uint64_t) override { return base::Status(); }
  plan::Subgroup subgroup_at(uint64_t element) const override;
  base::Status fetch_weights(uint64_t first, base::DataType type, void* out) override;
  base::Status wait_fetched(uint64_t first) override;

 private:
  struct Fetch {
    uint64_t first;
    base::DataType type;
    void* out;
  };
  void work();

  const model::WeightFiles files_;
  const uint64_t elements_;
  std::mutex mutex_;
  std::condition_variable wanted_, done_;
  bool ends_ = false;
  std::deque<Fetch> queue_;
  std::map<uint64_t, std::optional<base::Status>> fetches_;  // by first element; nothing: under way
  std::vector<std::thread> threads_;
};

}  // namespace smartinf::train
