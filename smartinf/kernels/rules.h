// The update formulas (arithmetic.h) with a step's scalars.
#pragma once

#include "smartinf/kernels/arithmetic.h"
#include "smartinf/kernels/update_rule.h"

namespace smartinf::kernels {

static_assert(kRuleAdamW == static_cast<uint32_t>(UpdateRule::kAdamW) &&
              kRuleAdam == static_cast<uint32_t>(UpdateRule::kAdam) &&
              kRuleSgdMomentum == static_cast<uint32_t>(UpdateRule::kSgdMomentum) &&
              kRuleAdagrad == static_cast<uint32_t>(UpdateRule::kAdagrad) &&
              kRuleLion == static_cast<uint32_t>(UpdateRule::kLion));

inline RuleScalars rule_scalars(const StepScalars& s) {
  return {.rule = static_cast<uint32_t>(s.rule),
          .skip = s.skip,
          .nesterov = s.nesterov,
          .first_step = s.first_step,
          .gradient_scale = s.maximize ? -s.gradient_scale : s.gradient_scale,
          .lr = s.lr,
          .beta1 = s.beta1,
          .one_minus_beta1 = s.one_minus_beta1,
          .beta2 = s.beta2,
          .one_minus_beta2 = s.one_minus_beta2,
          .eps = s.eps,
          .decay_factor = s.decay_factor,
          .weight_decay = s.weight_decay,
          .step_size = s.step_size,
          .dampening_factor = s.dampening_factor,
          .initial_variance = s.initial_variance};
}

}  // namespace smartinf::kernels
