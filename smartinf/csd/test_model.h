// The plain reference that devices are compared with: the scalar kernels on arrays in memory, block
// after block, without devices, stores or threads. For tests.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/state_format.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/compress/message.h"
#include "smartinf/kernels/update.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

/// Subgroups of uneven sizes, not at the start of the space and with gaps, as a device among
/// several owns them.
inline storage::StoreLayout test_layout(base::StateFormat format, uint32_t spill_bytes,
                                        uint32_t subgroups = 6,
                                        kernels::UpdateRule rule = kernels::UpdateRule::kAdamW) {
  storage::StoreLayout layout;
  layout.run = storage::make_run_id();
  layout.format = format;
  const auto planes = kernels::rule_planes(rule);
  layout.planes.assign(planes.begin(), planes.end());
  layout.gradient_spill_bytes = spill_bytes;
  layout.description = "{}";
  for (uint32_t i = 0; i < subgroups; ++i) {
    const bool last = i + 1 == subgroups;
    layout.subgroups.push_back({base::SubgroupId{2 * i + 1}, (2 * i + 1) * 2 * base::kBlockElements,
                                last ? base::kBlockElements + 4321 : 2 * base::kBlockElements});
  }
  return layout;
}

/// Two groups that alternate, with cuts inside blocks.
inline std::vector<plan::GroupSpan> test_groups(uint64_t elements) {
  std::vector<plan::GroupSpan> groups;
  uint64_t first = 0;
  for (uint32_t i = 0; first < elements; ++i) {
    const uint64_t count = std::min<uint64_t>(elements - first, 50'000 + 1000 * (i % 7));
    groups.push_back({first, count, i % 2});
    first += count;
  }
  return groups;
}

/// Evenly spread in [-scale, scale), by seed.
inline std::vector<float> random_floats(uint64_t count, uint64_t seed, float scale) {
  std::vector<float> values(count);
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (float& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f * scale;
  }
  return values;
}

/// The gradient of a subgroup in a step: [count] of type.
inline std::vector<std::byte> test_gradient(const storage::StoredSubgroup& subgroup, uint64_t step,
                                            base::DataType type) {
  const std::vector<float> wide =
      random_floats(subgroup.count, subgroup.id.value * 1000 + step, 0.1f);
  std::vector<std::byte> narrow(subgroup.count * base::data_type_bytes(type));
  kernels::kernels().cast_from_f32(wide.data(), narrow.data(), type, wide.size());
  return narrow;
}

/// The part of a gradient that is sent when it is compressed.
struct TestSparsity {
  uint64_t every = 1;    // elements at multiples of it within their block; the others count as 0
  bool factors = false;  // of the second moment go along: those of test_matrices()
  bool signs = false;    // values are signs
};

/// Matrices of all kinds, without gaps; subgroups cut through them.
inline std::vector<compress::MatrixLayout> test_matrices(uint64_t elements) {
  std::vector<compress::MatrixLayout> matrices;
  for (uint64_t first = 0; first < elements; first = matrices.back().end()) {
    constexpr std::array<uint64_t, 5> kColumns = {1000, 77, 4096, 100'000, 1};
    const uint64_t columns =
        std::min(kColumns[matrices.size() % kColumns.size()], elements - first);
    const uint64_t rows = std::min<uint64_t>((elements - first) / columns, 90);
    matrices.push_back({first, rows, columns, compress::sample_count(matrices), 0});
  }
  return matrices;
}
/// Factor of a row, or of a column, in a step's message: what a factor's byte holds exactly.
inline float test_factor(uint64_t matrix, uint64_t step, bool of_row, uint64_t index) {
  const uint64_t mixed = (index + 3 * matrix + 5 * step) % 61;
  if (of_row && mixed == 0) return 0;
  const float mantissa = 1 + static_cast<float>(mixed % 8) / 8;
  return std::ldexp(mantissa, static_cast<int>(mixed / 8) - (of_row ? 20 : 4));
}
/// Factors of a subgroup, in the message's order.
inline compress::RowColumnFactors test_factors(const std::vector<compress::MatrixLayout>& matrices,
                                               const storage::StoredSubgroup& subgroup,
                                               uint64_t step) {
  compress::RowColumnFactors factors;
  for (uint64_t f = 0; f < matrices.size(); ++f) {
    const uint64_t first = std::max(subgroup.first_element, matrices[f].first);
    const uint64_t end = std::min(subgroup.first_element + subgroup.count, matrices[f].end());
    if (first >= end) continue;
    const auto row_of = [&](uint64_t element) {
      return (element - matrices[f].first) / matrices[f].columns;
    };
    const size_t rows_at = factors.values.size();
    for (uint64_t row = row_of(first); row <= row_of(end - 1); ++row) {
      factors.values.push_back(test_factor(f, step, true, row));
    }
    const size_t columns_at = factors.values.size();
    for (uint64_t e = first; e < std::min(end, first + matrices[f].columns); ++e) {
      const uint64_t column = (e - matrices[f].first) % matrices[f].columns;
      factors.values.push_back(test_factor(f, step, false, column));
    }
    factors.runs.push_back(static_cast<uint32_t>(columns_at - rows_at));
    factors.runs.push_back(static_cast<uint32_t>(factors.values.size() - columns_at));
  }
  return factors;
}

/// But for AdamW every option of the rule has another value than its default, so that none can get
/// lost.
inline std::vector<kernels::StepScalars> test_scalars(
    uint64_t step, kernels::UpdateRule rule = kernels::UpdateRule::kAdamW) {
  kernels::RuleOptions options;
  options.rule = rule;
  if (rule != kernels::UpdateRule::kAdamW) {
    options.beta1 = 0.8;
    options.beta2 = 0.95;
    options.eps = 1e-6;
    options.maximize = true;
    options.lr_decay = 0.1;
    options.initial_accumulator_value = 0.01;
    options.dampening = step % 2 == 0 ? 0.25 : 0;
    options.nesterov = step % 2 != 0;  // which has no dampening
  }
  return {kernels::make_step_scalars(options, {1e-2, 0.1}, step, 0.5, 7),
          kernels::make_step_scalars(options, {3e-3, 0.0}, step, 0.5, 7)};
}

class ReferenceModel {
 public:
  ReferenceModel(const storage::StoreLayout& layout, std::vector<plan::GroupSpan> groups,
                 kernels::UpdateRule rule = kernels::UpdateRule::kAdamW)
      : layout_(layout),
        groups_(std::move(groups)),
        rule_(rule),
        scalar_(*kernels::supported_tables().front()) {
    const storage::StoredSubgroup& last = layout_.subgroups.back();
    matrices_ = test_matrices(last.first_element + last.count);
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      std::vector<std::vector<std::byte>> planes;
      for (size_t plane = 0; plane < layout_.planes.size(); ++plane) {
        const std::vector<float> values =
            plane == 0 ? master_at_start(subgroup) : std::vector<float>(subgroup.count);
        std::vector<std::byte> encoded(base::encoded_bytes(encoding(plane), subgroup.count));
        for_blocks(subgroup.count, [&](uint64_t first, uint64_t count) {
          scalar_.encode_block(encoding(plane), layout_.planes[plane], values.data() + first,
                               at(encoded, plane, first), count, subgroup.first_element + first, 0,
                               0);
        });
        planes.push_back(std::move(encoded));
      }
      state_.push_back(std::move(planes));
    }
  }

  static std::vector<float> master_at_start(const storage::StoredSubgroup& subgroup) {
    return random_floats(subgroup.count, subgroup.id.value, 1.0f);
  }

  /// One step of every subgroup; returns each one's new weights, [count] of type.
  std::vector<std::vector<std::byte>> step(uint64_t number, base::DataType gradient_type,
                                           base::DataType weights_type,
                                           TestSparsity sparsity = {}) {
    const std::vector<kernels::StepScalars> scalars = test_scalars(number, rule_);
    std::vector<std::vector<std::byte>> weights;
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      const storage::StoredSubgroup& subgroup = layout_.subgroups[i];
      std::vector<std::byte> gradient = test_gradient(subgroup, number, gradient_type);
      for (uint64_t e = 0; e < subgroup.count; ++e) {
        if (e % base::kBlockElements % sparsity.every == 0) continue;
        std::fill_n(
            gradient.begin() + static_cast<ptrdiff_t>(e * base::data_type_bytes(gradient_type)),
            base::data_type_bytes(gradient_type), std::byte{0});
      }
      if (sparsity.signs) {
        send_signs(subgroup, sparsity, reinterpret_cast<base::Bf16*>(gradient.data()));
      }
      std::vector<std::byte> out(subgroup.count * base::data_type_bytes(weights_type));
      for_blocks(subgroup.count, [&](uint64_t first, uint64_t count) {
        kernels::UpdateBlock block;
        for (size_t plane = 0; plane < layout_.planes.size(); ++plane) {
          block.planes[plane] = at(state_[i][plane], plane, first);
        }
        block.count = count;
        block.element = subgroup.first_element + first;
        block.gradient = gradient.data() + first * base::data_type_bytes(gradient_type);
        block.gradient_type = gradient_type;
        block.weights_out = out.data() + first * base::data_type_bytes(weights_type);
        block.weights_type = weights_type;
        std::vector<kernels::ScalarsSpan> runs;  // one per element's group, joined
        for (uint64_t e = 0; e < count; ++e) {
          const kernels::StepScalars* own = &scalars[group_of(block.element + e)];
          if (runs.empty() || runs.back().scalars != own) runs.push_back({0, own});
          ++runs.back().count;
        }
        std::vector<kernels::SecondMomentRow> second_moment;  // one for each element
        std::vector<float> columns(count);
        for (uint64_t e = 0; sparsity.factors && e < count; ++e) {
          const Place place = place_of(block.element + e);
          columns[e] = test_factor(place.matrix, number, false, place.column);
          second_moment.push_back(
              {1, test_factor(place.matrix, number, true, place.row), &columns[e]});
        }
        block.second_moment = second_moment;
        scalar_.update_block(layout_.format, block, runs);
      });
      weights.push_back(std::move(out));
    }
    return weights;
  }

  /// A plane of a subgroup as f32.
  std::vector<float> plane(size_t subgroup, size_t plane) {
    const uint64_t count = layout_.subgroups[subgroup].count;
    std::vector<float> values(count);
    for_blocks(count, [&](uint64_t first, uint64_t n) {
      scalar_.decode_block(encoding(plane), layout_.planes[plane],
                           at(state_[subgroup][plane], plane, first), values.data() + first, n);
    });
    return values;
  }

 private:
  struct Place {
    uint64_t matrix, row, column;
  };
  Place place_of(uint64_t element) const {
    uint64_t matrix = 0;
    while (matrices_[matrix].end() <= element) ++matrix;
    const uint64_t within = element - matrices_[matrix].first;
    return {matrix, within / matrices_[matrix].columns, within % matrices_[matrix].columns};
  }
  /// Makes of a gradient what arrives when it is sent as signs.
  void send_signs(const storage::StoredSubgroup& subgroup, const TestSparsity& sparsity,
                  base::Bf16* gradient) const {
    for_blocks(subgroup.count, [&](uint64_t first, uint64_t count) {
      double sum = 0;
      uint64_t sent = 0;
      for (uint64_t e = 0; e < count; e += sparsity.every, ++sent) {
        sum += std::abs(base::to_f32(gradient[first + e]));
      }
      const float magnitude = base::to_f32(kernels::mean_magnitude(sum, sent));
      for (uint64_t e = 0; e < count; e += sparsity.every) {
        base::Bf16& value = gradient[first + e];
        value = base::to_bf16(std::copysign(magnitude, base::to_f32(value)));
      }
    });
  }
  base::Encoding encoding(size_t plane) const {
    return base::plane_encoding(layout_.format, layout_.planes[plane]);
  }
  std::byte* at(std::vector<std::byte>& encoded, size_t plane, uint64_t first) const {
    return encoded.data() + base::encoded_bytes(encoding(plane), first);
  }
  uint32_t group_of(uint64_t element) {
    while (element < groups_[cursor_].first) --cursor_;
    while (element >= groups_[cursor_].first + groups_[cursor_].count) ++cursor_;
    return groups_[cursor_].group;
  }
  template <typename Visit>
  static void for_blocks(uint64_t count, const Visit& visit) {
    for (uint64_t first = 0; first < count; first += base::kBlockElements) {
      visit(first, std::min(base::kBlockElements, count - first));
    }
  }

  storage::StoreLayout layout_;
  std::vector<plan::GroupSpan> groups_;
  const kernels::UpdateRule rule_;
  std::vector<compress::MatrixLayout> matrices_;
  const kernels::KernelTable& scalar_;
  std::vector<std::vector<std::vector<std::byte>>> state_;  // subgroup, plane, encoded
  size_t cursor_ = 0;
};

}  // namespace smartinf::csd
