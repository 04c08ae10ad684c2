// Update rules of tables of which a step touches few rows. A row lies on a device as one record:
//
//     weight: [dim] f32 | planes of the rule | u32 step of its last update
//
// Only rows with a gradient are updated, except where the rule is AdamW: there a row that was left
// out is brought up when it is next touched (catch_up). A record that was never written is
// initial_record(). Every instruction set gives the same bits (docs/numerics.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/ids.h"
#include "smartinf/kernels/update_rule.h"

namespace smartinf::kernels {

enum class RowRule : uint8_t {
  kSgd = 0,         // no planes
  kSparseAdam = 1,  // momentum and variance: [dim] f32 each
  kRowAdagrad = 2,  // sum of mean squares: one f32
  kRowAdam = 3,     // momentum: [dim] f32; variance of the row: one f32
  kAdamW = 4,       // momentum and variance: [dim] f32 each; no weight decay
};

inline constexpr std::array<std::string_view, 5> kRowRuleNames{"sgd", "sparse_adam", "row_adagrad",
                                                               "row_adam", "adamw"};
constexpr base::EnumNames enum_names(RowRule) { return kRowRuleNames; }
constexpr std::string_view row_rule_name(RowRule rule) { return base::enum_name(rule); }
constexpr std::optional<RowRule> row_rule_from_name(std::string_view name) {
  return base::enum_from_name<RowRule>(name);
}

/// dim > 0.
constexpr uint64_t record_bytes(RowRule rule, uint64_t dim) {
  uint64_t numbers = dim;
  if (rule == RowRule::kSparseAdam || rule == RowRule::kAdamW) numbers += 2 * dim;
  if (rule == RowRule::kRowAdam) numbers += dim + 1;
  if (rule == RowRule::kRowAdagrad) numbers += 1;
  return (numbers + 1) * sizeof(uint32_t);
}

/// A user's options. The rate may differ from step to step.
struct RowOptions {
  RowRule rule = RowRule::kSparseAdam;
  double beta1 = 0.9;    // the three forms of Adam
  double beta2 = 0.999;  // the three forms of Adam
  double eps = 1e-8;     // not SGD; above 0: else 0 / 0 where gradients are 0
};

/// What a step's updates of a table's rows share. Of `step`, AdamW takes what its dense form takes;
/// the others take gradient_scale, lr, the betas, eps, step_size and the step's number.
struct RowScalars {
  RowRule rule = RowRule::kSparseAdam;
  StepScalars step;
};

/// Computed once a step, in double. step: from 1 to 2^32 - 1 (SI_CHECK). Errors: none; options are
/// validated where the user gave them.
RowScalars make_row_scalars(const RowOptions& options, double lr, base::StepNumber step,
                            double gradient_scale);

// Below, record: record_bytes(rule, dim), aligned to 4 bytes. dim follows from the record's size
// (SI_CHECK). Threads: pure; safe on disjoint records. Errors: none at run time.

/// What a table's rows are before they are first updated or put.
struct RowStart {
  double deviation = 0;  // weights are normal with this deviation around 0; 0: all are 0
  uint64_t seed = 0;
};

/// Weights follow from (seed, table, row, column) alone, with the same bits everywhere; planes and
/// step are 0. row: of the whole table, whichever device it lies on. Shapes: record of any rule.
/// Source: Marsaglia and Bray 1964 (the polar method), on counters in place of a sequence.
void initial_record(const RowStart& start, uint32_t table, uint64_t row, uint64_t dim,
                    std::span<std::byte> record);

/// The step of the last update; 0: none.
base::StepNumber record_step(std::span<const std::byte> record);

/// Weights as the model takes them. Shapes: record: of any rule, or weights alone; out: [dim] of
/// type. Nearest, ties to even.
void read_weights(std::span<const std::byte> record, uint64_t dim, base::DataType type, void* out);

/// Applies one step to one row in place. Shapes: gradient: [dim] f32, the sum of all that the row
/// got; gradient_scale is applied here. NaN results are 0x7fc00000.
/// Source: SGD and SparseAdam: torch.optim's, the latter with its bits. Row-wise Adagrad and Adam:
/// FBGEMM's exact_row_wise_adagrad and partial_row_wise_adam (one accumulator a row, of the mean
/// square), with the bias corrections of Adam in step size and eps. AdamW: update_rule.h's.
void update_record(const RowScalars& scalars, std::span<const float> gradient,
                   std::span<std::byte> record);

/// Brings a record of AdamW to the last of the steps that it missed, the bits being those of as
/// many updates with a gradient of zeros. missed: their scalars, in order; every step behind the
/// record's that updated the table. Of a row that was never updated, nothing changes but its step.
/// A row's weights come to rest after about 1000 steps (beta1 0.9); from there on a step is a
/// product for each variance.
void catch_up(std::span<const RowScalars> missed, std::span<std::byte> record);

/// What sums of rows start from. Unlike 0, it leaves -0 as it is.
inline constexpr float kNoGradient = -0.0f;

/// Adds the gradients of a batch to the sums of its distinct rows, in the order of the batch and in
/// f32, as coalesce() of torch does: sums[place[i]] += gradient[i].
/// Shapes: gradient: [ids, dim] of type; place: [ids]; sums: [rows, dim], at first kNoGradient.
void add_rows(base::DataType type, const void* gradient, std::span<const uint32_t> place,
              uint64_t dim, std::span<float> sums);

}  // namespace smartinf::kernels
