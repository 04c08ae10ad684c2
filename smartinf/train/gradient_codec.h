// The short form of a gradient that goes back between stages of a pipeline: a product of two narrow
// matrices by power iteration (PowerSGD: Vogels et al., NeurIPS 2019), or integers of 8 or 4 bits
// with a scale for each 128 values. What is lost is added to the next gradient of the step
// (Optimus-CC, ASPLOS 2023), and dropped at the step's end: nothing is left for a run that goes on
// later.
#pragma once

#include <cstdint>
#include <span>

#include <torch/types.h>

#include "smartinf/train/options.h"

namespace smartinf::train {

/// Whether a stage sends the gradient of this micro batch in its short form. Pure; SI_CHECK: not
/// the first stage.
bool is_compressed(const StageCompression& options, uint32_t stages, uint32_t stage,
                   uint64_t micro_batches, uint64_t micro_batch);

/// Bytes of the short form of [..., C] values.
uint64_t compressed_bytes(const StageCompression& options, std::span<const int64_t> sizes);

/// The gradient of compress()'s bytes: [sizes] of `type`, in the host's memory.
torch::Tensor decompress(const StageCompression& options, const torch::Tensor& bytes,
                         std::span<const int64_t> sizes, torch::ScalarType type);

/// One sender's. The same gradients give the same bytes with as many threads of torch.
/// Threads: one caller.
class GradientCodec {
 public:
  explicit GradientCodec(const StageCompression& options) : options_(options) {}
  /// What is left of the step before is dropped.
  void begin_step() { error_ = factor_ = torch::Tensor(); }
  /// gradient: [..., C], in the host's memory; of one shape in a step. [compressed_bytes()] uint8.
  torch::Tensor compress(const torch::Tensor& gradient);

 private:
  const StageCompression options_;
  torch::Tensor error_;   // [rows, C] f32; undefined: none
  torch::Tensor factor_;  // [C, r] f32, of the gradient before; undefined: none
};

}  // namespace smartinf::train
