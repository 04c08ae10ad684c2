#include "smartinf/train/step_gradients.h"

#include "smartinf/train/scalar_type.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using base::Status;
using torch::Tensor;

// While the commit of the step before goes on they wait here, and backward does not; but not
// where there is no memory for them.
void StepGradients::take(UnitPass::Gradient gradient) {
  ready_.push_back(std::move(gradient));
  // Several ranks begin at the same gradient, whoever's commit ends first.
  if (!begun_ && options_.may_wait && options_.alone && updater_.committing()) return;
  throw_if_error(begin());
  throw_if_error(put(/*all=*/false));
}

Status StepGradients::finish() {
  SI_RETURN_IF_ERROR(begin());
  SI_RETURN_IF_ERROR(put(/*all=*/true));
  begun_ = false;
  return Status();
}

Status StepGradients::begin() {
  if (!begun_) SI_RETURN_IF_ERROR(begin_());
  begun_ = true;
  return Status();
}

// In the order in which backward makes them; each gradient is freed once it is down. From an
// accelerator a unit's gradients are copied while backward computes the next ones: those that have
// come go down.
Status StepGradients::put(bool all) {
  if (!options_.alone) return put_sums();
  const torch::ScalarType type = scalar_type(options_.type);
  for (UnitPass::Gradient& gradient : std::exchange(ready_, {})) {
    const Tensor values = std::exchange(gradient.sums.front(), {}).to(type).contiguous();
    if (copies_ == nullptr) {
      SI_RETURN_IF_ERROR(updater_.put_gradient(gradient.first, values.const_data_ptr(),
                                               options_.type,
                                               static_cast<uint64_t>(values.numel())));
      continue;
    }
    while (!copies_->fits(static_cast<uint64_t>(values.numel()))) {
      SI_RETURN_IF_ERROR(put_oldest_copy());
    }
    copies_->start(gradient.first, values);
  }
  while (copies_ != nullptr && !copies_->empty() && (all || copies_->next_is_there())) {
    SI_RETURN_IF_ERROR(put_oldest_copy());
  }
  return Status();
}

Status StepGradients::put_oldest_copy() {
  const GradientCopies::Copied copied = copies_->next();
  return updater_.put_gradient(copied.first, copied.values, options_.type, copied.count);
}

// In the order in which backward makes them. The engine has read them when a call returns.
Status StepGradients::put_sums() {
  const torch::ScalarType type = scalar_type(options_.leaf_type);
  const auto ranges = plan::summation_nodes(options_.micro_batches, options_.mine);
  for (UnitPass::Gradient& gradient : std::exchange(ready_, {})) {
    std::vector<Tensor> sums;
    std::vector<const void*> nodes;
    for (size_t i = 0; i < gradient.sums.size(); ++i) {
      const bool leaf = ranges[i % ranges.size()].size() == 1;
      Tensor sum = std::exchange(gradient.sums[i], {});
      sums.push_back(sum.to(torch::kCPU, leaf ? type : torch::kFloat32).contiguous());
      nodes.push_back(sums.back().const_data_ptr());
    }
    engine::GradientSums of_rank;
    of_rank.micro_batches = options_.micro_batches;
    of_rank.trees = gradient.trees;
    of_rank.type = options_.leaf_type;
    of_rank.nodes = nodes;
    SI_RETURN_IF_ERROR(updater_.put_gradient_sums(gradient.first, gradient.count, of_rank));
  }
  return Status();
}

}  // namespace smartinf::train
