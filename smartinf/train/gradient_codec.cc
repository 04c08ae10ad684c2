#include "smartinf/train/gradient_codec.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include <torch/types.h>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/train/random.h"

namespace smartinf::train {

using torch::Tensor;

namespace {

constexpr auto kCoded = static_cast<int64_t>(kCodedBlock);

struct Shape {
  int64_t rows = 1;
  int64_t width = 1;

  int64_t values() const { return rows * width; }
  int64_t blocks() const { return (values() + kCoded - 1) / kCoded; }
};

Shape shape_of(std::span<const int64_t> sizes) {
  return {std::accumulate(sizes.begin(), sizes.end() - 1, int64_t{1}, std::multiplies()),
          sizes.back()};
}

int64_t rank_of(const StageCompression& options, const Shape& shape) {
  return std::min({int64_t{options.rank}, shape.rows, shape.width});
}

int bits_of(const StageCompression& options) { return options.form == GradientForm::kInt8 ? 8 : 4; }

Tensor first_factor(int64_t width, int64_t rank) {
  Tensor factor_CR = torch::empty({width, rank}, torch::kFloat32);
  auto* values = factor_CR.data_ptr<float>();
  for (int64_t i = 0; i < width * rank; ++i) {
    values[i] = static_cast<float>(random_normal(/*seed=*/714, static_cast<uint64_t>(i)));
  }
  return factor_CR;
}

/// Columns of length one at right angles (Gram and Schmidt); a column that has nothing of its own
/// is zero.
Tensor at_right_angles(const Tensor& columns_TR) {
  constexpr double kNothing = 1e-6;  // of the column's length, beyond what f32 has
  Tensor rows_RT = columns_TR.t().contiguous().to(torch::kFloat64);
  for (int64_t r = 0; r < rows_RT.size(0); ++r) {
    Tensor row_T = rows_RT[r];
    const double before = row_T.norm().item<double>();
    for (int turn = 0; turn < 2 && r > 0; ++turn) {  // the second time for what rounding left
      const Tensor others_rT = rows_RT.narrow(0, 0, r);
      row_T.sub_(others_rT.t().mv(others_rT.mv(row_T)));
    }
    const double after = row_T.norm().item<double>();
    if (after > kNothing * before) {
      row_T.div_(after);
    } else {
      row_T.zero_();
    }
  }
  return rows_RT.to(torch::kFloat32).t();
}

Tensor raw_bytes(const Tensor& tensor) {
  return tensor.contiguous().view({-1}).view(torch::kUInt8);
}

/// [rows, width] f32.
Tensor decompressed(const StageCompression& options, const Tensor& bytes, const Shape& shape) {
  if (options.form == GradientForm::kLowRank) {
    const int64_t rank = rank_of(options, shape);
    const Tensor both = bytes.view(torch::kBFloat16).to(torch::kFloat32);
    const Tensor left_TR = both.narrow(0, 0, shape.rows * rank).view({shape.rows, rank});
    const Tensor right_CR =
        both.narrow(0, shape.rows * rank, shape.width * rank).view({shape.width, rank});
    return left_TR.mm(right_CR.t());
  }
  const Tensor scales_B = bytes.narrow(0, 0, shape.blocks() * 4).view(torch::kFloat32).unsqueeze(1);
  Tensor values = bytes.narrow(0, shape.blocks() * 4, bytes.size(0) - shape.blocks() * 4);
  if (bits_of(options) == 4) {
    values = torch::stack({values.bitwise_and(15), values.bitwise_right_shift(4)}, 1).view({-1});
    values = values.to(torch::kInt8).sub_(8);
  } else {
    values = values.view(torch::kInt8);
  }
  const Tensor all = values.view({shape.blocks(), kCoded}).to(torch::kFloat32).mul_(scales_B);
  return all.view({-1}).narrow(0, 0, shape.values()).view({shape.rows, shape.width});
}

Tensor integers(const StageCompression& options, const Tensor& gradient, const Shape& shape) {
  const int bits = bits_of(options);
  const double most = bits == 8 ? 127 : 7;
  Tensor values = torch::zeros({shape.blocks() * kCoded}, torch::kFloat32);
  values.narrow(0, 0, shape.values()).copy_(gradient.view({-1}));
  values = values.view({shape.blocks(), kCoded});
  const Tensor scales_B = values.abs().amax(1, /*keepdim=*/true).div_(most);
  values = values.div_(scales_B.where(scales_B > 0, torch::ones_like(scales_B))).round_();
  values = values.clamp_(-most, most).to(torch::kInt8).view({-1});
  if (bits == 4) {
    const Tensor pairs = values.add_(8).view(torch::kUInt8).view({-1, 2});
    values = pairs.select(1, 0).bitwise_or(pairs.select(1, 1).bitwise_left_shift(4));
  }
  return torch::cat({raw_bytes(scales_B), raw_bytes(values)});
}

}  // namespace

bool is_compressed(const StageCompression& options, uint32_t stages, uint32_t stage,
                   uint64_t micro_batches, uint64_t micro_batch) {
  SI_CHECK(stage > 0 && stage < stages, "a stage that sends nothing back");
  if (options.form == GradientForm::kNone) return false;
  if (options.when == CompressWhen::kAlways) return true;
  if (options.when == CompressWhen::kExposed) {
    return micro_batch + options.exposed.at(stage) >= micro_batches;
  }
  // Behind them the stage before has no forward left to compute meanwhile.
  return micro_batch + (stages - stage) >= micro_batches;
}

uint64_t compressed_bytes(const StageCompression& options, std::span<const int64_t> sizes) {
  const Shape shape = shape_of(sizes);
  return compressed_bytes(options, static_cast<uint64_t>(shape.rows),
                          static_cast<uint64_t>(shape.width));
}

Tensor decompress(const StageCompression& options, const Tensor& bytes,
                  std::span<const int64_t> sizes, torch::ScalarType type) {
  const torch::NoGradGuard no_grad;
  return decompressed(options, bytes, shape_of(sizes))
      .to(type)
      .view(c10::IntArrayRef(sizes.data(), sizes.size()));
}

Tensor GradientCodec::compress(const Tensor& gradient) {
  const torch::NoGradGuard no_grad;
  const Shape shape = shape_of({gradient.sizes().data(), gradient.sizes().size()});
  Tensor values_TC = gradient.to(torch::kFloat32).reshape({shape.rows, shape.width});
  if (error_.defined()) values_TC = values_TC + error_;
  Tensor bytes;
  if (options_.form == GradientForm::kLowRank) {
    const bool first = !factor_.defined();
    if (first) factor_ = first_factor(shape.width, rank_of(options_, shape));
    Tensor left_TR;
    for (int turn = 0; turn < (first ? 2 : 1); ++turn) {
      left_TR = at_right_angles(values_TC.mm(factor_));
      factor_ = values_TC.t().mm(left_TR);
    }
    bytes = torch::cat(
        {raw_bytes(left_TR.to(torch::kBFloat16)), raw_bytes(factor_.to(torch::kBFloat16))});
  } else {
    bytes = integers(options_, values_TC, shape);
  }
  if (options_.feedback == ErrorFeedback::kStep) {
    error_ = values_TC - decompressed(options_, bytes, shape);
  }
  return bytes;
}

}  // namespace smartinf::train
