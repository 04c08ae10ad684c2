#include "smartinf/train/embedding_table.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "smartinf/kernels/row_rules.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using base::Status;
using torch::Tensor;

namespace {

static_assert(kEmbeddingRuleNames.size() == kernels::kRowRuleNames.size() + 1 &&
              std::equal(kernels::kRowRuleNames.begin(), kernels::kRowRuleNames.end(),
                         kEmbeddingRuleNames.begin() + 1));

Tensor ids_of(const Tensor& tokens) {
  return tokens.detach().flatten().to(torch::kCPU, torch::kInt64).contiguous();
}

std::span<const int64_t> span_of(const Tensor& ids_M) {
  return {ids_M.const_data_ptr<int64_t>(), static_cast<size_t>(ids_M.numel())};
}

/// Rows of a stored table, each read once.
Status gather_stored(engine::StoredTables& tables, uint64_t width, std::span<const int64_t> ids,
                     base::DataType type, void* out) {
  std::vector<size_t> order(ids.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, {}, [&](size_t i) { return ids[i]; });
  const size_t bytes = width * base::data_type_bytes(type);
  auto* const rows = static_cast<std::byte*>(out);
  for (size_t at = 0; at < order.size(); ++at) {
    std::byte* const to = rows + order[at] * bytes;
    if (at > 0 && ids[order[at]] == ids[order[at - 1]]) {
      std::memcpy(to, rows + order[at - 1] * bytes, bytes);
      continue;
    }
    SI_RETURN_IF_ERROR(tables.read(0, static_cast<uint64_t>(ids[order[at]]), 1, /*initial=*/true,
                                   [&](uint64_t, std::span<const std::byte> record) {
                                     kernels::read_weights(record, width, type, to);
                                     return Status();
                                   }));
  }
  return Status();
}

}  // namespace

std::vector<engine::TableOptions> tables_of(const Options& options,
                                            const model::Architecture& model,
                                            const kernels::RuleOptions& rule) {
  if (!model.table_embedding) return {};
  engine::TableOptions table;
  table.name = model::tensors_of(model.whole()).front().name;
  table.rows = model.vocabulary;
  table.dim = model.width;
  const auto row_rule = static_cast<uint8_t>(options.embedding) - 1;
  table.rule = {static_cast<kernels::RowRule>(row_rule), rule.beta1, rule.beta2, rule.eps};
  return {table};
}

EmbeddingTable::EmbeddingTable(Gather gather, engine::RowTables* tables,
                               const model::Architecture& model, base::DataType type,
                               torch::Device device)
    : gather_(std::move(gather)),
      tables_(tables),
      width_(model.width),
      padding_token_(model.padding_token),
      type_(type),
      device_(device) {}

EmbeddingTable::EmbeddingTable(engine::RowTables& tables, const model::Architecture& model,
                               base::DataType type, torch::Device device)
    : EmbeddingTable([&tables, type](Ids ids, void* out,
                                     bool keep) { return tables.gather(0, ids, type, out, keep); },
                     &tables, model, type, device) {}

EmbeddingTable::EmbeddingTable(engine::StoredTables& tables, const model::Architecture& model,
                               base::DataType type, torch::Device device)
    : EmbeddingTable(
          [&tables, width = model.width, type](Ids ids, void* out, bool /*keep*/) {
            return gather_stored(tables, width, ids, type, out);
          },
          nullptr, model, type, device) {}

Tensor EmbeddingTable::rows(const Tensor& tokens, bool keep) {
  const Tensor ids_M = ids_of(tokens);
  std::vector<int64_t> sizes = tokens.sizes().vec();
  sizes.push_back(width_);
  const Tensor rows = torch::empty(sizes, torch::dtype(scalar_type(type_)));
  throw_if_error(gather_(span_of(ids_M), rows.data_ptr(), keep));
  return rows.to(device_);
}

void EmbeddingTable::prefetch(const Tensor& tokens) {
  const Tensor ids_M = ids_of(tokens);
  throw_if_error(tables_->prefetch(0, span_of(ids_M)));
}

void EmbeddingTable::add_gradient(const Tensor& tokens, const Tensor& gradient) {
  Tensor ids_M = ids_of(tokens);
  Tensor gradient_MC = gradient.detach().to(torch::kCPU).view({-1, width_});
  if (padding_token_ >= 0) {
    const Tensor counted_R = ids_M.ne(padding_token_).nonzero().flatten();
    ids_M = ids_M.index_select(0, counted_R);
    gradient_MC = gradient_MC.index_select(0, counted_R);
  }
  gradients_.emplace_back(ids_M, gradient_MC.contiguous());
}

Status EmbeddingTable::put_gradients() {
  for (auto& [ids_M, gradient_MC] : std::exchange(gradients_, {})) {
    SI_RETURN_IF_ERROR(
        tables_->add_gradient(0, span_of(ids_M), type_, gradient_MC.const_data_ptr()));
    gradient_MC = Tensor();
  }
  return Status();
}

}  // namespace smartinf::train
