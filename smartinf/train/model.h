// A decoder-only transformer unit by unit: what each unit computes with the weights that it is
// given, for every architecture of model/architecture.h. Who brings the weights is layer_stream.h,
// who runs the units after each other is unit_pass.h.
//
// Shapes are in the names: B sequences, T tokens, C the residual stream's width, V the vocabulary,
// H heads, K heads of keys and values, D head width, N elements of a unit; E is (H + 2K) D, query,
// key and value side by side; F the feed-forward part's width, G is 2 F, gate and up side by side;
// M is B T; X is experts; S the tokens of a sequence so far, T of which are new.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <torch/types.h>

#include "smartinf/model/architecture.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/unit.h"
#include "smartinf/train/key_value_cache.h"

namespace smartinf::train {

class EmbeddingTable;  // embedding_table.h

/// A leaf of autograd: a span of the space, one or several ranges that one matrix product uses
/// together.
struct Parameter {
  torch::Tensor weight;
  uint64_t first = 0;  // element of the space
  model::Part part = model::Part::kEmbedding;
};
/// The parameters of a unit, in the order of the space, which they cover without gaps.
using UnitWeights = std::vector<Parameter>;

/// The first of a layer's parameters that is this part; null: it has none.
const Parameter* find_part(std::span<const Parameter> parameters, model::Part part);
/// Of a part that the layer has (SI_CHECK).
const torch::Tensor& weight_of_part(std::span<const Parameter> parameters, model::Part part);

/// Trained matrices beside a matrix, or a part of one, that is not trained: y = W x + scale B (A
/// x).
struct Adapter {
  Parameter a;         // [rank, in]
  Parameter b;         // [out, rank]
  int64_t offset = 0;  // of the outputs of the part that the matrix belongs to
  double scale = 1;
};
using LayerAdapters = std::vector<Adapter>;

/// Ends of documents in the rows of [B, T] laid end to end, ascending; the end of each row is one.
/// A token sees its own document only, and positions begin anew with each. Empty: each row is a
/// document.
using DocumentEnds = std::vector<int64_t>;

/// Threads: one caller; torch's own threads work inside. Errors: torch throws.
class Model {
 public:
  /// weights: their type and device, which are those of activations too. sequence: tokens that a
  /// row has at most. frozen: weights have no gradients. table: of an architecture that has one.
  Model(const model::Architecture& architecture, const plan::ParameterSpace& space,
        const torch::TensorOptions& weights, uint32_t sequence, bool frozen = false,
        EmbeddingTable* table = nullptr);

  const model::Architecture& architecture() const { return model_; }
  /// The embedding, layers, and the final norm with the head (which may be the embedding's).
  std::span<const plan::Unit> units() const { return units_; }
  size_t head() const { return units_.size() - 1; }
  bool tied_head() const { return model_.tied_head; }
  /// Rows of the embedding; null: it is a parameter.
  EmbeddingTable* table() const { return table_; }
  /// Views of weights_N, all weights of a unit.
  UnitWeights weights_of(size_t unit, const torch::Tensor& weights_N) const;

  /// Unit 0: [B, T] int64 -> [B, T, C]. cache: of a sequence that the tokens continue (then B is 1,
  /// without documents), or null. rows_BTC: the tokens' rows of the table; undefined: they are
  /// looked up, and no gradient will follow.
  torch::Tensor embed(const UnitWeights& embedding, const torch::Tensor& tokens_BT,
                      const DocumentEnds& documents, const KeyValueCache* cache = nullptr,
                      const torch::Tensor& rows_BTC = {}) const;
  /// A unit of layers: [B, T, C] -> [B, T, C]. adapters: of each layer, or empty. cache: as above;
  /// it gets the tokens' keys and values.
  torch::Tensor run_layers(size_t unit, const UnitWeights& layers,
                           std::span<const LayerAdapters> adapters, torch::Tensor x_BTC,
                           const DocumentEnds& documents, KeyValueCache* cache = nullptr) const;
  /// The last unit's norm: [B, T, C] -> [M, C].
  torch::Tensor final_norm(const UnitWeights& head, const torch::Tensor& x_BTC) const;
  /// The matrix that makes logits of that. embedding: unit 0, where the head is tied to it.
  const torch::Tensor& head_matrix(const UnitWeights& head, const UnitWeights& embedding) const {
    return model_.tied_head ? embedding.front().weight : head.back().weight;
  }
  /// [M, C] -> [M, V].
  torch::Tensor logits(const torch::Tensor& h_MC, const torch::Tensor& matrix_VC) const;

  /// Tables of the rotary positions: the model's own tensors, which all layers use. May be
  /// undefined.
  std::vector<torch::Tensor> tables() const {
    return {angles_.cosine_T1D, angles_.sine_T1D, window_angles_.cosine_T1D,
            window_angles_.sine_T1D};
  }

 private:
  struct Shape {
    uint64_t first = 0;  // element of the space
    uint64_t count = 0;
    std::vector<int64_t> sizes;
    model::Part part;
  };
  /// Cosines and sines of rotary angles; both halves of D alike.
  struct Angles {
    torch::Tensor cosine_T1D, sine_T1D;  // of documents: [B, T, 1, D]
  };
  /// Inputs that a unit's layers need of a batch beside activations.
  struct Rows {
    const DocumentEnds& documents;
    KeyValueCache* cache;          // or null
    Angles angles, window_angles;  // undefined with learned positions
  };
  struct Layer {
    std::span<const Parameter> parameters;
    std::span<const Adapter> adapters;
  };

  Angles make_angles(const model::Rope& rope, const torch::TensorOptions& weights,
                     uint32_t sequence) const;
  Rows rows_of(const torch::Tensor& x_BTC, const DocumentEnds& documents,
               KeyValueCache* cache) const;
  torch::Tensor run_layer(const Layer& layer, uint32_t index, const torch::Tensor& x_BTC,
                          const Rows& rows) const;
  torch::Tensor attention(const Layer& layer, uint32_t index, const torch::Tensor& h_BTC,
                          const Rows& rows) const;
  torch::Tensor attend(const torch::Tensor& query_BHTD, const torch::Tensor& key_BKSD,
                       const torch::Tensor& value_BKSD, uint32_t window) const;
  torch::Tensor feed_forward(const Layer& layer, const torch::Tensor& h_BTC) const;
  torch::Tensor run_experts(const Layer& layer, const torch::Tensor& h_BTC) const;
  torch::Tensor norm(std::span<const Parameter> layer, model::Part weight, model::Part bias,
                     const torch::Tensor& x) const;
  torch::Tensor product(const Layer& layer, model::Part weight, model::Part bias,
                        const torch::Tensor& x) const;
  static torch::Tensor rotated(const Angles& angles, const torch::Tensor& x_BTHD);
  torch::Tensor activated(const torch::Tensor& x) const;

  model::Architecture model_;
  bool frozen_;
  EmbeddingTable* table_;
  std::vector<plan::Unit> units_;
  std::vector<std::vector<Shape>> shapes_;  // by unit
  Angles angles_;
  Angles window_angles_;  // of layers with a window
};

}  // namespace smartinf::train
