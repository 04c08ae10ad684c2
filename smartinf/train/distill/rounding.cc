#include "smartinf/train/distill/rounding.h"

#include <utility>

#include <fmt/format.h>

#include "smartinf/train/scalar_type.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

namespace {

constexpr double kLeastScale = 1e-5;  // of a group of zeros, and of one that is cut to nothing
constexpr int64_t kLeastCode = -8;
constexpr int64_t kLargestCode = 7;

}  // namespace

/// Of a matrix, as [R, G, group].
struct Rounding::Parts {
  Tensor ratio;    // weights over their scale
  Tensor rounded;  // before codes end at their range's ends
  Tensor unit;     // [R, G, 1]: the scale without a cut
  Tensor scale;    // [R, G, 1]
};

Result<Rounding> Rounding::of(const LayeredModel& model, uint32_t layer, uint32_t group) {
  const model::Architecture& architecture = model.architecture();
  if (architecture.experts > 0 || architecture.transposed) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("student.quantise: layers of {} are not rounded",
                              base::enum_name(architecture.family)),
                  "Name a teacher whose layers have neither experts nor matrices of [in, out]");
  }
  Rounding made;
  made.group_ = group;
  made.scale_type_ = model.files().type().value_or(base::DataType::kF32);
  const plan::Unit span = model.layer_span(layer);
  for (const plan::ParameterRange& range : model.space().ranges()) {
    if (range.first < span.first || range.first >= span.end() || range.shape.size() != 2) continue;
    if (range.shape[1] % group != 0) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("student.quantise: rows of {} have {} weights, which groups of {} "
                                "do not divide",
                                range.name, range.shape[1], group),
                    "Choose smaller groups: student.quantise = \"int4,group=64\" or 32");
    }
    Matrix matrix{range.name, range.first - span.first, static_cast<int64_t>(range.shape[0]),
                  static_cast<int64_t>(range.shape[1]), static_cast<int64_t>(made.space_.count())};
    SI_RETURN_IF_ERROR(made.space_.add(range.name + ".offset", range.shape, 0));
    matrix.cuts = static_cast<int64_t>(made.space_.count());
    SI_RETURN_IF_ERROR(
        made.space_.add(range.name + ".cut", {range.shape[0], range.shape[1] / group}, 0));
    made.matrices_.push_back(std::move(matrix));
  }
  made.exact_N_ = model.weights_of(layer);
  return made;
}

Rounding::Parts Rounding::parts(const Matrix& matrix, const Tensor& trained) const {
  const std::vector<int64_t> grouped{matrix.rows, matrix.columns / group_, group_};
  const int64_t count = matrix.rows * matrix.columns;
  Parts parts;
  parts.ratio = exact_N_.narrow(0, static_cast<int64_t>(matrix.first), count)
                    .view(grouped)
                    .to(torch::kFloat32);
  parts.unit = parts.ratio.gather(-1, parts.ratio.abs().argmax(-1, /*keepdim=*/true)) / kLeastCode;
  const Tensor cut = trained.narrow(0, matrix.cuts, count / group_).view(parts.unit.sizes());
  const Tensor scale = parts.unit * (1 - cut.clamp(0, 1));
  parts.scale = torch::where(scale < 0, scale.clamp_max(-kLeastScale), scale.clamp_min(kLeastScale))
                    .to(scalar_type(scale_type_))
                    .to(torch::kFloat32);
  parts.ratio = parts.ratio / parts.scale;
  const Tensor offset = trained.narrow(0, matrix.offsets, count).view(grouped);
  parts.rounded = offset.clamp(-0.5, 0.5).add_(parts.ratio).round_();
  return parts;
}

Rounding::Codes Rounding::codes(const Matrix& matrix, const Tensor& trained) const {
  const torch::NoGradGuard no_grad;
  const Parts parts = this->parts(matrix, trained);
  return {parts.rounded.clamp(kLeastCode, kLargestCode)
              .to(torch::kInt8)
              .view({matrix.rows, matrix.columns}),
          parts.scale.squeeze(-1)};
}

void Rounding::put_weights(const Tensor& trained, Tensor& weights_N) const {
  const torch::NoGradGuard no_grad;
  int64_t done = 0;
  const auto keep_until = [&](int64_t end) {
    weights_N.narrow(0, done, end - done).copy_(exact_N_.narrow(0, done, end - done));
  };
  for (const Matrix& matrix : matrices_) {
    const auto first = static_cast<int64_t>(matrix.first);
    const int64_t count = matrix.rows * matrix.columns;
    keep_until(first);
    const Parts parts = this->parts(matrix, trained);
    weights_N.narrow(0, first, count)
        .copy_((parts.rounded.clamp(kLeastCode, kLargestCode) * parts.scale).flatten());
    done = first + count;
  }
  keep_until(weights_N.numel());
}

Rounding::Gradient Rounding::gradient(const Matrix& matrix, const Tensor& trained,
                                      const Tensor& by_weight_RC) const {
  const torch::NoGradGuard no_grad;
  const Parts parts = this->parts(matrix, trained);
  const Tensor by_weight = by_weight_RC.to(torch::kFloat32).reshape(parts.ratio.sizes());
  const Tensor inside = (parts.rounded >= kLeastCode).logical_and_(parts.rounded <= kLargestCode);
  // code * scale: by the scale itself, and by ratio = w / scale where the code follows it.
  const Tensor by_scale =
      parts.rounded.clamp(kLeastCode, kLargestCode).sub_(parts.ratio * inside).mul_(by_weight);
  return {(by_weight * parts.scale).mul_(inside).view({matrix.rows, matrix.columns}),
          by_scale.sum(-1).mul_(parts.unit.squeeze(-1)).neg_()};
}

Tensor packed_words(const Tensor& code_RC) {
  const torch::NoGradGuard no_grad;
  const Tensor code = (code_RC.to(torch::kInt64) - kLeastCode).view({code_RC.size(0), -1, 8});
  const Tensor place = torch::arange(0, 32, 4, code.options());
  return code.bitwise_left_shift(place).sum(-1).to(torch::kInt32);  // the upper half has its sign
}

}  // namespace smartinf::train
