#include "smartinf/train/unit_inputs.h"

#include <utility>

namespace smartinf::train {

using torch::Tensor;

void UnitInputs::begin(size_t units, size_t batches) {
  batches_ = batches;
  made_.assign(units * batches, Tensor());
  if (buffers_) buffers_->begin(units, batches);
}

Tensor UnitInputs::as_input(const Tensor& bytes_N) const {
  int64_t values = 1;
  for (const int64_t size : sizes_) values *= size;
  const int64_t bytes = values * static_cast<int64_t>(options_.dtype().itemsize());
  return bytes_N.narrow(0, 0, bytes)
      .view(torch::typeMetaToScalarType(options_.dtype()))
      .view(sizes_);
}

void UnitInputs::put(size_t unit, size_t batch, Tensor input) {
  if (buffers_) {
    sizes_ = input.sizes().vec();
    options_ = input.options();
    const SpooledBuffers::Part all{input.contiguous().view(-1).view(torch::kUInt8), 0};
    buffers_->put(unit, batch, {&all, 1});
    if (input.is_cpu()) input = as_input(buffers_->kept(unit, batch));
  }
  made_[unit * batches_ + batch] = std::move(input);
}

Tensor UnitInputs::get(size_t unit, size_t batch) { return made_[unit * batches_ + batch]; }

void UnitInputs::release(size_t unit, size_t batch) {
  if (!buffers_) return;
  made_[unit * batches_ + batch] = Tensor();
  buffers_->release(unit, batch);
}

Tensor UnitInputs::take(size_t unit, size_t batch) {
  Tensor made = std::exchange(made_[unit * batches_ + batch], Tensor());
  if (!buffers_) return made;
  return as_input(buffers_->take(unit, batch));
}

}  // namespace smartinf::train
