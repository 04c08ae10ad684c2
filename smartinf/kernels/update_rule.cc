#include "smartinf/kernels/update_rule.h"

#include <array>
#include <cmath>

#include "smartinf/base/check.h"

namespace smartinf::kernels {
namespace {

using base::PlaneKind;

constexpr std::array kRules = {UpdateRule::kAdamW, UpdateRule::kAdam, UpdateRule::kSgdMomentum,
                               UpdateRule::kAdagrad, UpdateRule::kLion};
constexpr std::array kAdamPlanes = {PlaneKind::kMaster, PlaneKind::kMomentum, PlaneKind::kVariance};
constexpr std::array kMomentumPlanes = {PlaneKind::kMaster, PlaneKind::kMomentum};
constexpr std::array kVariancePlanes = {PlaneKind::kMaster, PlaneKind::kVariance};

}  // namespace

std::span<const UpdateRule> all_update_rules() { return kRules; }

std::span<const PlaneKind> rule_planes(UpdateRule rule) {
  switch (rule) {
    case UpdateRule::kAdamW:
    case UpdateRule::kAdam:
      return kAdamPlanes;
    case UpdateRule::kSgdMomentum:
    case UpdateRule::kLion:
      return kMomentumPlanes;
    case UpdateRule::kAdagrad:
      return kVariancePlanes;
  }
  SI_CHECK(false, "unknown update rule");
  return {};
}

StepScalars make_step_scalars(const RuleOptions& run_options, const GroupOptions& group,
                              base::StepNumber step, double gradient_scale, uint64_t seed) {
  SI_CHECK(step >= 1, "optimizer steps count from 1");
  const RuleOptions& options = group.rule ? *group.rule : run_options;
  SI_CHECK(options.rule == run_options.rule, "a group cannot have another rule");
  const base::StepNumber group_step = group.step > 0 ? group.step : step;
  const auto t = static_cast<double>(group_step);
  StepScalars scalars;
  scalars.rule = options.rule;
  scalars.skip = group.skip;
  scalars.nesterov = options.nesterov;
  scalars.maximize = options.maximize;
  scalars.first_step = group_step == 1;
  scalars.gradient_scale = static_cast<float>(gradient_scale);
  scalars.lr = static_cast<float>(group.lr);
  scalars.beta1 = static_cast<float>(options.beta1);
  scalars.one_minus_beta1 = static_cast<float>(1 - options.beta1);
  scalars.beta2 = static_cast<float>(options.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  scalars.eps = static_cast<float>(options.eps);
  scalars.dampening_factor = static_cast<float>(1 - options.dampening);
  scalars.initial_variance = static_cast<float>(options.initial_accumulator_value);
  scalars.step = step;
  scalars.seed = seed;
  switch (options.rule) {
    case UpdateRule::kAdamW:
    case UpdateRule::kAdam: {
      const double bias2_sqrt = std::sqrt(1 - std::pow(options.beta2, t));
      scalars.step_size =
          static_cast<float>(group.lr * bias2_sqrt / (1 - std::pow(options.beta1, t)));
      scalars.eps = static_cast<float>(options.eps * bias2_sqrt);
      break;
    }
    case UpdateRule::kAdagrad:
      scalars.step_size = static_cast<float>(group.lr / (1 + (t - 1) * options.lr_decay));
      break;
    case UpdateRule::kSgdMomentum:
    case UpdateRule::kLion:
      scalars.step_size = scalars.lr;
      break;
  }
  if (options.rule == UpdateRule::kAdamW || options.rule == UpdateRule::kLion) {
    scalars.decay_factor = static_cast<float>(1 - group.lr * group.weight_decay);
  } else {
    scalars.weight_decay = static_cast<float>(group.weight_decay);
  }
  return scalars;
}

}  // namespace smartinf::kernels
