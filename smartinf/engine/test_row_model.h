// Tables of rows in memory, and batches for them, which tests compare those on devices with.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "smartinf/engine/options.h"
#include "smartinf/kernels/row_rules.h"

namespace smartinf::engine {

/// All tables of a run in memory, dense.
class Reference {
 public:
  explicit Reference(const std::vector<TableOptions>& tables) : tables_(tables) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const uint64_t bytes = kernels::record_bytes(tables[t].rule.rule, tables[t].dim);
      auto& records = records_.emplace_back(tables[t].rows, std::vector<std::byte>(bytes));
      for (uint64_t row = 0; row < tables[t].rows; ++row) {
        kernels::initial_record(tables[t].start, static_cast<uint32_t>(t), row, tables[t].dim,
                                records[row]);
      }
    }
  }
  void put(size_t table, uint64_t row, std::span<const float> weights) {
    std::ranges::fill(records_[table][row], std::byte{0});
    std::memcpy(records_[table][row].data(), weights.data(), weights.size_bytes());
  }
  void step(size_t table, std::span<const int64_t> ids, std::span<const float> gradients,
            uint64_t number, double lr, double scale) {
    const TableOptions& options = tables_[table];
    std::map<int64_t, std::vector<float>> sums;
    for (size_t i = 0; i < ids.size(); ++i) {
      auto [sum, is_new] = sums.try_emplace(ids[i], options.dim, 0.0f);
      for (uint32_t d = 0; d < options.dim; ++d) {
        const float value = gradients[i * options.dim + d];
        sum->second[d] = is_new ? value : sum->second[d] + value;
      }
    }
    const auto scalars = kernels::make_row_scalars(options.rule, lr, number, scale);
    if (options.rule.rule == kernels::RowRule::kAdamW) {  // every row
      const std::vector<float> zeros(options.dim);
      for (uint64_t row = 0; row < options.rows; ++row) {
        const auto sum = sums.find(static_cast<int64_t>(row));
        if (sum == sums.end() && kernels::record_step(records_[table][row]) == 0) continue;
        kernels::update_record(scalars, sum == sums.end() ? zeros : sum->second,
                               records_[table][row]);
      }
      return;
    }
    for (const auto& [row, sum] : sums) {
      kernels::update_record(scalars, sum, records_[table][static_cast<size_t>(row)]);
    }
  }
  const std::vector<std::byte>& record(size_t table, uint64_t row) const {
    return records_[table][row];
  }
  std::vector<float> weights(size_t table, std::span<const int64_t> ids) const {
    std::vector<float> all;
    for (const int64_t id : ids) {
      const auto* values =
          reinterpret_cast<const float*>(records_[table][static_cast<size_t>(id)].data());
      all.insert(all.end(), values, values + tables_[table].dim);
    }
    return all;
  }

 private:
  std::vector<TableOptions> tables_;
  std::vector<std::vector<std::vector<std::byte>>> records_;
};

struct Batch {
  std::vector<int64_t> ids;
  std::vector<float> gradients;
};
/// Ids with many repeats.
inline Batch batch_of(uint64_t seed, uint64_t rows, uint32_t dim, size_t count) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  Batch batch;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t below = random() % 3 == 0 ? 16 : rows;
    batch.ids.push_back(static_cast<int64_t>(random() % below));
  }
  batch.gradients.resize(count * dim);
  for (float& value : batch.gradients) value = normal(random);
  return batch;
}

}  // namespace smartinf::engine
