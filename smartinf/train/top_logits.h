// What a student learns of a teacher's logits, and where they are kept until it does.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <torch/types.h>

#include "smartinf/base/status.h"
#include "smartinf/model/safetensors.h"

namespace smartinf::train {

/// What is kept of a teacher's logits: the K most likely tokens of each row.
struct TopLogits {
  torch::Tensor token_MK;    // int32
  torch::Tensor chances_ML;  // f32 logarithms of their chances; the last of L = K + 1 is of all
                             // other tokens together
  /// Some neighbouring rows.
  TopLogits rows(int64_t first, int64_t count) const {
    return {token_MK.narrow(0, first, count), chances_ML.narrow(0, first, count)};
  }
};
/// Of all logits. k is below their number.
TopLogits top_logits(const torch::Tensor& logits_RV, int64_t k);

struct Divergence {
  torch::Tensor loss;         // scalar of f32: the sum over rows, in nats
  torch::Tensor gradient_RV;  // f32, of the sum
};
/// The Kullback-Leibler divergence of the student's chances from the teacher's over K tokens and
/// all others as one. Equal bits have a loss and a gradient of exactly 0. Source: Hinton et al.
/// 2015 (1503.02531), of K classes and a rest.
Divergence divergence(const torch::Tensor& logits_RV, const TopLogits& teacher);

/// A file of the teacher's logits of micro batches in order, mapped. Threads: const members are
/// safe from any thread.
class StoredLogits {
 public:
  /// One tensor of f32, [micro batches, M, 2 K + 1]: tokens, which f32 has exactly, then chances.
  static constexpr const char* kTensor = "top_logits";
  /// [M, 2 K + 1] f32, as the file has them.
  static torch::Tensor packed(const TopLogits& logits);

  /// Errors: kNotFound, kCorrupt.
  static base::Result<StoredLogits> open(const std::string& path);
  uint64_t micro_batches() const { return static_cast<uint64_t>(all_BML_.size(0)); }
  /// micro_batch is below micro_batches().
  TopLogits at(uint64_t micro_batch, torch::Device device) const;

 private:
  StoredLogits(model::SafetensorsFile file, torch::Tensor all_BML)
      : file_(std::move(file)), all_BML_(std::move(all_BML)) {}

  model::SafetensorsFile file_;
  torch::Tensor all_BML_;  // in the file
};

}  // namespace smartinf::train
