// What a model computes for one token each of several sequences, on CPUs: what train/model.h
// computes for whole sequences by torch, with the same roundings, by kernels whose bits for a row
// do not depend on the other rows (kernels/row_product.h, row_ops.h). Attention is the store's.
//
// Shapes as in model.h; M is rows, one for each sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "smartinf/base/thread_team.h"
#include "smartinf/engine/key_value_store.h"
#include "smartinf/kernels/row_product.h"
#include "smartinf/train/model.h"

namespace smartinf::train {

/// Rows that go through the model together.
struct ModelRows {
  std::vector<engine::SequenceId> ids;
  std::vector<int64_t> tokens;
  std::vector<int64_t> positions;  // of the tokens in their sequences
  std::vector<float> x_MC;         // the residual stream
  /// Cosines and sines of the positions' rotary angles.
  struct Angles {
    std::vector<float> cosine_MD, sine_MD;
  };
  Angles angles, window_angles;  // empty with learned positions

  // State of the attention that is under way.
  std::vector<float> query_MHD, attended_MHD;
  std::vector<engine::AttendQuery> queries;
  std::optional<engine::AttendTicket> ticket;

  size_t count() const { return ids.size(); }
};

/// Threads: one caller. Errors: StatusError of the store. A row of a sequence for which the store
/// has a failure() goes on with numbers that mean nothing, and the other rows are as without it.
class RowModel {
 public:
  /// model: on the CPU; it and team outlive this.
  RowModel(const Model& model, base::DataType type, base::ThreadTeam& team);

  struct Layer {
    std::span<const Parameter> parameters;
    std::span<const Adapter> adapters;
    uint32_t index = 0;
  };

  /// Makes x_MC and angles of tokens and positions.
  void embed(const UnitWeights& embedding, ModelRows& rows);
  /// The first part of a layer: gives the tokens' keys and values to the store and begins their
  /// attention.
  void begin_layer(const Layer& layer, ModelRows& rows, engine::KeyValueStore& store);
  /// The rest of it.
  void end_layer(const Layer& layer, ModelRows& rows, engine::KeyValueStore& store);
  /// [count, V], of rows from `first` on; until the next call. matrix_VC: the head's.
  std::span<const float> logits(const UnitWeights& head, const torch::Tensor& matrix_VC,
                                const ModelRows& rows, size_t first, size_t count);

 private:
  using Rows = std::span<float>;
  using ConstRows = std::span<const float>;

  void each_row(size_t rows, size_t width, const std::function<void(size_t row)>& body);
  std::vector<float> values_of(const torch::Tensor& weights) const;
  kernels::RowMatrix matrix_of(const torch::Tensor& weights, bool transposed) const;
  void norm(std::span<const Parameter> parameters, model::Part weight, model::Part bias,
            ConstRows in, Rows out);
  std::vector<float> product(const Layer& layer, model::Part weight, model::Part bias,
                             ConstRows in);
  void add_adapter(const Adapter& adapter, ConstRows in, size_t rows, Rows y);
  void activate(Rows row) const;
  std::vector<float> feed_forward(const Layer& layer, ConstRows h_MC);
  std::vector<float> run_experts(const Layer& layer, ConstRows h_MC);
  void add_made(const Layer& layer, model::Part post_norm, std::vector<float> made_MC, Rows x_MC);
  ModelRows::Angles angles_at(std::span<const int64_t> positions, const torch::Tensor& cosine_T1D,
                              const torch::Tensor& sine_T1D) const;

  const Model& model_;
  const model::Architecture& shape_;
  const base::DataType type_;
  base::ThreadTeam& team_;
  kernels::RowProduct product_;
  std::vector<float> logits_MV_;
};

}  // namespace smartinf::train
