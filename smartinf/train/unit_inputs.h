// The inputs of units between forward and backward: where the model computes, or in the host's
// memory and on the devices.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torch/types.h>

#include "smartinf/train/spooled_buffers.h"

namespace smartinf::train {

/// A pass uses each input in forward, soon after it was made, and once more in backward.
///
/// Threads: one caller. Errors: StatusError of the devices.
class UnitInputs {
 public:
  /// Empty: inputs stay the tensors that they are. Else they are copied to `buffers`, of which
  /// there are buffers_min(batches of a pass) or more.
  explicit UnitInputs(std::optional<SpooledBuffers> buffers) : buffers_(std::move(buffers)) {}
  static uint64_t buffers_min(uint64_t batches) { return batches + SpooledBuffers::kOnTheirWay; }

  /// A pass begins; what was kept before is dropped. Inputs of units below `units`, all of one
  /// shape and type.
  void begin(size_t units, size_t batches);
  /// The unit's input of a batch has been made; all batches of a unit before the next unit's.
  void put(size_t unit, size_t batch, torch::Tensor input);
  /// In forward: it stays.
  torch::Tensor get(size_t unit, size_t batch);
  /// Ends the use of what get() gave, until backward.
  void release(size_t unit, size_t batch);
  /// In backward, which begins with the first call: batch after batch of the last unit, then of the
  /// one before. It is there until the next call, and not kept any longer.
  torch::Tensor take(size_t unit, size_t batch);

 private:
  torch::Tensor as_input(const torch::Tensor& bytes_N) const;

  std::optional<SpooledBuffers> buffers_;
  size_t batches_ = 0;
  std::vector<torch::Tensor> made_;  // by unit and batch; beside buffers until release()
  std::vector<int64_t> sizes_;       // of an input
  torch::TensorOptions options_;
};

}  // namespace smartinf::train
