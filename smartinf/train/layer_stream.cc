#include "smartinf/train/layer_stream.h"

#include "smartinf/base/clock.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using base::Status;
using torch::Tensor;

LayerStream::LayerStream(engine::Updater& updater, const Model& model, torch::Device accelerator,
                         base::DataType type)
    : updater_(updater), model_(model), elements_(model.units().back().end()), type_(type) {
  host_N_ = torch::empty({static_cast<int64_t>(elements_)},
                         torch::dtype(scalar_type(type)).pinned_memory(!accelerator.is_cpu()));
  accelerator_N_ = accelerator.is_cpu() ? host_N_ : torch::empty_like(host_N_, accelerator);
  for (size_t unit = 0; unit < model.units().size(); ++unit) {
    const plan::Unit& span = model.units()[unit];
    weights_.push_back(
        model.weights_of(unit, accelerator_N_.narrow(0, static_cast<int64_t>(span.first),
                                                     static_cast<int64_t>(span.count))));
  }
}

Status LayerStream::load() {
  SI_RETURN_IF_ERROR(
      updater_.load_weights(type_, [this](uint64_t first) { return weights_at(first); }));
  arrived_ = elements_;
  if (!accelerator_N_.is_same(host_N_)) accelerator_N_.copy_(host_N_);
  return Status();
}

void* LayerStream::weights_at(uint64_t element) const {
  return static_cast<std::byte*>(host_N_.data_ptr()) + element * base::data_type_bytes(type_);
}

const UnitWeights& LayerStream::get(size_t unit) {
  throw_if_error(arrive(model_.units()[unit].first, model_.units()[unit].count));
  return weights_[unit];
}

Status LayerStream::arrive(uint64_t first, uint64_t count) {
  if (first + count <= arrived_) return Status();
  const uint64_t begin_ns = base::now_ns();
  const uint64_t from = arrived_;
  const uint64_t some = first + count - from;
  SI_RETURN_IF_ERROR(updater_.wait_weights(from, some));
  if (!accelerator_N_.is_same(host_N_)) {
    const auto part = [&](const Tensor& weights_N) {
      return weights_N.narrow(0, static_cast<int64_t>(from), static_cast<int64_t>(some));
    };
    part(accelerator_N_).copy_(part(host_N_), /*non_blocking=*/true);
  }
  arrived_ = from + some;
  waited_s_ += base::seconds_since(begin_ns);
  return Status();
}

}  // namespace smartinf::train
