// Keys and values of a sequence that is continued token by token: what was computed before is not
// computed again.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/types.h>

#include "smartinf/model/architecture.h"

namespace smartinf::train {

/// Keys and values of one sequence, in every layer. Threads: one caller.
class KeyValueCache {
 public:
  virtual ~KeyValueCache() = default;
  /// Tokens of the sequence that all layers have.
  virtual int64_t tokens() const = 0;
  /// Puts keys and values of the tokens behind those, [1, K, T, D], into a layer, and makes of them
  /// those of the whole sequence, [1, K, S, D]: views, until the next call. Errors: StatusError.
  virtual void extend(uint32_t layer, torch::Tensor& key_BKTD, torch::Tensor& value_BKTD) = 0;
};

/// Where the model computes; all memory is allocated at once. Layers with a window keep all of the
/// sequence as well.
class TensorCache final : public KeyValueCache {
 public:
  /// tokens_max: of the sequence. weights: their type and device.
  TensorCache(const model::Architecture& model, int64_t tokens_max,
              const torch::TensorOptions& weights) {
    const std::vector<int64_t> sizes{1, int64_t{model.kv_heads}, tokens_max,
                                     int64_t{model.head_width}};
    for (uint32_t layer = 0; layer < model.layers; ++layer) {
      layers_.push_back({torch::empty(sizes, weights), torch::empty(sizes, weights)});
    }
  }
  static uint64_t bytes(const model::Architecture& model, uint64_t tokens_max,
                        uint64_t value_bytes) {
    return 2 * model.layers * model.kv_width() * tokens_max * value_bytes;
  }

  int64_t tokens() const override { return tokens_; }
  void extend(uint32_t layer, torch::Tensor& key_BKTD, torch::Tensor& value_BKTD) override {
    Layer& kept = layers_[layer];
    const int64_t count = key_BKTD.size(2);
    kept.key_BKSD.narrow(2, tokens_, count).copy_(key_BKTD);
    kept.value_BKSD.narrow(2, tokens_, count).copy_(value_BKTD);
    key_BKTD = kept.key_BKSD.narrow(2, 0, tokens_ + count);
    value_BKTD = kept.value_BKSD.narrow(2, 0, tokens_ + count);
  }
  /// All layers have been given so many more.
  void advance(int64_t count) { tokens_ += count; }

 private:
  struct Layer {
    torch::Tensor key_BKSD, value_BKSD;
  };
  std::vector<Layer> layers_;
  int64_t tokens_ = 0;
};

}  // namespace smartinf::train
