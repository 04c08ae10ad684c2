// The embedding of a model as a table on devices (engine/row_tables.h): rows of a micro batch's
// tokens come up for its forward, and their gradients go down behind the step's backward.
#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <torch/types.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/stored_tables.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/model/architecture.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// The tables of a run, of what the recipe asks for. Adam's forms take the betas and eps of `rule`.
std::vector<engine::TableOptions> tables_of(const Options& options,
                                            const model::Architecture& model,
                                            const kernels::RuleOptions& rule);

/// The table that tables_of() names, alone on the devices. Threads: that of the updater's caller.
class EmbeddingTable {
 public:
  /// type, device: of what the model computes with. tables outlives this.
  EmbeddingTable(engine::RowTables& tables, const model::Architecture& model, base::DataType type,
                 torch::Device device);
  /// The table of a run that goes on nowhere.
  EmbeddingTable(engine::StoredTables& tables, const model::Architecture& model,
                 base::DataType type, torch::Device device);

  /// [...] int64 -> [..., C] of the last update. keep: gradients of these rows will follow. Errors:
  /// StatusError of the devices.
  torch::Tensor rows(const torch::Tensor& tokens, bool keep);
  /// A hint: tokens whose rows will be looked up. Returns at once.
  void prefetch(const torch::Tensor& tokens);

  /// Gradient of rows(tokens), kept until put_gradients(): the step may not have begun yet.
  void add_gradient(const torch::Tensor& tokens, const torch::Tensor& gradient);
  /// Gives all to the step that the updater has begun, in the order in which they came.
  base::Status put_gradients();
  /// Drops those of a step that was given up.
  void forget() { gradients_.clear(); }

 private:
  using Ids = std::span<const int64_t>;
  using Gather = std::function<base::Status(Ids ids, void* out, bool keep)>;

  EmbeddingTable(Gather gather, engine::RowTables* tables, const model::Architecture& model,
                 base::DataType type, torch::Device device);

  const Gather gather_;
  engine::RowTables* const tables_;  // null: nothing is trained
  const int64_t width_;
  const int64_t padding_token_;
  const base::DataType type_;
  const torch::Device device_;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> gradients_;  // ids [M], and of them [M, C]
};

}  // namespace smartinf::train
