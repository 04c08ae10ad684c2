// Continues sequences by torch's operations, one after another, with keys and values beside the
// model: on an accelerator, and for the samples of a training.
#pragma once

#include <memory>
#include <stop_token>
#include <vector>

#include <torch/types.h>

#include "smartinf/train/key_value_cache.h"
#include "smartinf/train/sequence_decoder.h"
#include "smartinf/train/unit_pass.h"

namespace smartinf::train {

class TorchDecoder final : public SequenceDecoder {
 public:
  /// weights: their type and device. All that is referred to outlives this. stop: ends the call
  /// that is under way with kCancelled.
  TorchDecoder(const Model& model, UnitPass& pass, const torch::TensorOptions& weights,
               std::stop_token stop);

  base::Status admit(std::span<const SequenceInput> sequences) override;
  base::Status step(const Choose& choose) override;
  void release(SequenceId id) override;
  base::Status save() override { return base::Status(); }

 private:
  struct Sequence {
    SequenceId id = 0;
    TensorCache cache;
    torch::Tensor next_1T;       // that the cache does not have yet
    std::vector<int64_t> known;  // behind those
  };
  std::vector<torch::Tensor> pass_over(std::span<Sequence* const> sequences);
  torch::Tensor as_row(std::span<const int64_t> tokens) const;

  const Model& model_;
  UnitPass& pass_;
  const torch::TensorOptions weights_;
  const std::stop_token stop_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
};

}  // namespace smartinf::train
