#include "apps/smartinf/synthetic_steps.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "smartinf/base/clock.h"
#include "smartinf/kernels/feedback.h"

namespace smartinf::apps {

using base::DataType;
using base::Status;

namespace {

/// Spread over [-scale, scale), and no two neighbours alike.
float value_at(uint64_t element, float scale) {
  const auto mixed = static_cast<uint32_t>(element * 2654435761u);
  return (static_cast<float>(mixed >> 8) * 0x1p-23f - 1.0f) * scale;
}

}  // namespace

base::Result<plan::ParameterSpace> synthetic_space(uint64_t params) {
  constexpr uint64_t kMatrix = kMatrixColumns * kMatrixColumns;
  static_assert(kMatrix % engine::kGradientCutElements == 0, "the rest is cut where it begins");
  plan::ParameterSpace space;
  if (params >= kMatrix) {
    SI_RETURN_IF_ERROR(
        space.add("matrices", {params / kMatrix, kMatrixColumns, kMatrixColumns}, 0));
  }
  const uint64_t rest = params % kMatrix;
  std::vector<uint64_t> shape{rest};
  if (rest % kMatrixColumns == 0) shape = {rest / kMatrixColumns, kMatrixColumns};
  if (rest > 0) SI_RETURN_IF_ERROR(space.add("rest", std::move(shape), 0));
  return space;
}

void step_rows_ahead(std::span<const base::Bf16> residual, std::byte* weights) {
  const std::vector<float> roots(kMatrixColumns, 1e-2f);
  for (size_t first = 0; first < residual.size(); first += kMatrixColumns) {
    const auto row =
        residual.subspan(first, std::min<size_t>(kMatrixColumns, residual.size() - first));
    kernels::step_ahead(kernels::kernels(), {.lr = 1e-3f, .bias = 1, .eps = 1e-8f}, row, 1.0f,
                        std::span(roots).first(row.size()), weights + first * sizeof(base::Bf16),
                        DataType::kBf16);
  }
}

base::Result<std::unique_ptr<SyntheticSteps>> SyntheticSteps::make(uint64_t params,
                                                                   DataType gradient_type,
                                                                   DataType weights_type) {
  std::unique_ptr<SyntheticSteps> steps(new SyntheticSteps());
  SI_ASSIGN_OR_RETURN(steps->space_, synthetic_space(params));
  steps->gradient_type_ = gradient_type;
  steps->weights_type_ = weights_type;
  SI_ASSIGN_OR_RETURN(steps->weights_,
                      base::AlignedBuffer::allocate(params * base::data_type_bytes(weights_type)));
  const uint64_t cut = std::min(params, engine::kGradientCutElements);
  SI_ASSIGN_OR_RETURN(steps->gradient_,
                      base::AlignedBuffer::allocate(cut * base::data_type_bytes(gradient_type)));
  for (uint64_t i = 0; i < cut; ++i) {
    const float value = value_at(i * 7919 + 1, 1e-3f);
    if (gradient_type == DataType::kF32) {
      std::memcpy(steps->gradient_.data() + i * sizeof(value), &value, sizeof(value));
    } else {
      const base::Bf16 narrow = base::to_bf16(value);
      std::memcpy(steps->gradient_.data() + i * sizeof(narrow), &narrow, sizeof(narrow));
    }
  }
  return steps;
}

Status SyntheticSteps::initialize(engine::Updater& updater) const {
  return updater.initialize(
      [](uint64_t first, std::span<float> out) {
        for (size_t i = 0; i < out.size(); ++i) out[i] = value_at(first + i, 0.05f);
        return Status();
      },
      {});
}

Status SyntheticSteps::put_gradients(engine::Updater& updater, uint64_t first,
                                     uint64_t count) const {
  const uint64_t end = first + count;
  for (; first < end; first += engine::kGradientCutElements) {
    SI_RETURN_IF_ERROR(updater.put_gradient(first, gradient_.data(), gradient_type_,
                                            std::min(engine::kGradientCutElements, end - first)));
  }
  return Status();
}

engine::UpdateOptions SyntheticSteps::update_options() const {
  engine::UpdateOptions options;
  options.groups = {{.lr = 1e-4, .weight_decay = 0.01}};
  return options;
}

engine::WeightsSink SyntheticSteps::weights_sink() {
  return [this](uint64_t first) {
    return weights_.data() + first * base::data_type_bytes(weights_type_);
  };
}

base::Result<StepTimes> SyntheticSteps::step(engine::Updater& updater) {
  StepTimes times;
  SI_RETURN_IF_ERROR(updater.begin_step());
  const uint64_t gradient_ns = base::now_ns();
  SI_RETURN_IF_ERROR(put_gradients(updater, 0, space_.count()));
  times.gradient_s = base::seconds_since(gradient_ns);
  const uint64_t update_ns = base::now_ns();
  SI_RETURN_IF_ERROR(updater.finish_gradients(1).status());
  SI_RETURN_IF_ERROR(updater.start_update(update_options(), weights_type_, weights_sink()));
  SI_RETURN_IF_ERROR(updater.start_commit({}));
  SI_RETURN_IF_ERROR(updater.wait_weights(0, space_.count()));
  times.weights_s = base::seconds_since(update_ns);
  SI_RETURN_IF_ERROR(updater.wait_commit());
  times.update_s = base::seconds_since(update_ns);
  return times;
}

}  // namespace smartinf::apps
