#include "smartinf/train/unit_inputs.h"

#include <utility>

namespace smartinf::train {

using torch::Tensor;

void UnitInputs::begin(size_t units, size_t batches) {
  batches_ = batches;
  made_.assign(units * batches, Tensor());
  if (buffers_) buffers_->begin(units, batches);
}

Tensor UnitInputs::tensor_in(std::span<std::byte> buffer) const {
  return torch::from_blob(buffer.data(), sizes_, options_.device(torch::kCPU));
}

void UnitInputs::put(size_t unit, size_t batch, Tensor input) {
  if (buffers_) {
    sizes_ = input.sizes().vec();
    options_ = input.options();
    Tensor copy = tensor_in(buffers_->put(unit, batch));
    copy.copy_(input);
    if (input.is_cpu()) input = std::move(copy);
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
  return tensor_in(buffers_->take(unit, batch)).to(options_.device());
}

}  // namespace smartinf::train
