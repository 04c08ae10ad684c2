// Tensors that autograd keeps of a unit for its backward, as bytes that may leave memory: the way
// of SSDTrain (Wu et al., 2024).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/types.h>

#include "smartinf/train/spooled_buffers.h"

namespace smartinf::train {

/// Saved tensors of one unit and one micro batch. Tensors that share memory are kept once; the
/// unit's weights and its input are not kept, but found where they are in backward, and neither are
/// small tensors.
///
/// Threads: one caller, and autograd's while it computes for him.
class SavedTensors : public std::enable_shared_from_this<SavedTensors> {
 public:
  static std::shared_ptr<SavedTensors> make() { return std::make_shared<SavedTensors>(); }

  /// Records what autograd saves on this thread as long as it lives. weights_N: all weights of the
  /// unit; others: tensors that outlive the graph, and are not kept either.
  class Recording {
   public:
    Recording(SavedTensors& to, const torch::Tensor& weights_N, const torch::Tensor& input,
              std::vector<torch::Tensor> others);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;
  };

  /// Bytes of what was recorded.
  uint64_t bytes() const { return bytes_; }
  /// Lets go of the tensors: their bytes, to be kept together in [bytes()].
  std::vector<SpooledBuffers::Part> give_up();
  /// For backward: what was given up is in kept_N, where the model computes, and weights and input
  /// are here now. All three stay until backward is done.
  void found_in(const torch::Tensor& kept_N, const torch::Tensor& weights_N,
                const torch::Tensor& input);

 private:
  friend struct SavedTensorHooks;
  enum class Place : uint8_t { kWeights, kInput, kKept };
  /// A view of one of the three.
  struct View {
    Place place = Place::kKept;
    int64_t offset_bytes = 0;
    std::vector<int64_t> sizes, strides;
    torch::TensorOptions options;
  };
  struct Stored {
    c10::Storage storage;
    uint64_t offset_bytes = 0;
  };
  /// False: it stays where it is.
  bool record(const torch::Tensor& tensor, View& view);
  torch::Tensor find(const View& view) const;

  torch::Tensor weights_, input_;
  std::vector<torch::Tensor> others_;  // while it is recorded
  std::vector<Stored> stored_;
  uint64_t bytes_ = 0;
  torch::Tensor kept_;  // bytes, where the model computes
};

/// From now on torch's autograd asks this module what to do with tensors that it saves. Once per
/// process, before the first backward: torch starts the threads of accelerators for one engine. A
/// second call does nothing.
void watch_saved_tensors();

}  // namespace smartinf::train
