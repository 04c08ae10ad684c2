#include "smartinf/train/adapters.h"

#include "smartinf/base/clock.h"
#include "smartinf/train/scalar_type.h"

namespace smartinf::train {

using base::Status;
using torch::Tensor;

Adapters::Adapters(engine::WeightSource& source, std::span<const model::LoraTarget> targets,
                   const model::LoraOptions& options, std::span<const plan::Unit> units,
                   torch::Device accelerator, base::DataType type)
    : source_(source), type_(type) {
  const int64_t rank = options.rank;
  const uint64_t elements =
      targets.empty() ? 0 : targets.back().first_b + options.rank * targets.back().out;
  const bool beside = !accelerator.is_cpu();
  const auto host = torch::dtype(scalar_type(type)).pinned_memory(beside);
  host_N_ = torch::empty({static_cast<int64_t>(elements)}, host);
  accelerator_N_ =
      beside ? torch::empty_like(host_N_, host.pinned_memory(false).device(accelerator)) : host_N_;
  for (const plan::Unit& unit : units) by_unit_.emplace_back(unit.layers);
  size_t unit = 0;
  for (const model::LoraTarget& target : targets) {
    while (target.layer >= units[unit].first_layer + units[unit].layers) ++unit;
    const auto leaf = [&](uint64_t first, int64_t rows, int64_t columns) {
      const Tensor flat = accelerator_N_.narrow(0, static_cast<int64_t>(first), rows * columns);
      return Parameter{flat.view({rows, columns}).detach().requires_grad_(true), first,
                       target.part};
    };
    const auto in = static_cast<int64_t>(target.in);
    const auto out = static_cast<int64_t>(target.out);
    by_unit_[unit][target.layer - units[unit].first_layer].push_back(
        {leaf(target.first_a, rank, in), leaf(target.first_b, out, rank),
         static_cast<int64_t>(target.offset), options.scale()});
  }
}

Status Adapters::load() {
  SI_RETURN_IF_ERROR(
      source_.load_weights(type_, [this](uint64_t first) { return weights_at(first); }));
  copy();
  return Status();
}

/// To where the model computes.
void Adapters::copy() {
  // variable_data(): no change that autograd would object to.
  if (!accelerator_N_.is_cpu()) accelerator_N_.variable_data().copy_(host_N_, true);
  arrived_ = true;
}

void* Adapters::weights_at(uint64_t element) const {
  return static_cast<std::byte*>(host_N_.data_ptr()) + element * base::data_type_bytes(type_);
}

Status Adapters::wait_all() {
  if (arrived_) return Status();
  const uint64_t begin_ns = base::now_ns();
  SI_RETURN_IF_ERROR(source_.wait_weights(0, static_cast<uint64_t>(host_N_.numel())));
  waited_s_ += base::seconds_since(begin_ns);
  copy();
  return Status();
}

}  // namespace smartinf::train
