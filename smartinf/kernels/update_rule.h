// The update rules by name and option, and the scalars one step of them needs. Scalars are computed
// once per step in double on the host side and handed to every device, so all devices agree on
// them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/state_format.h"

namespace smartinf::kernels {

enum class UpdateRule : uint8_t {
  kAdamW = 0,
  kAdam = 1,
  kSgdMomentum = 2,
  kAdagrad = 3,
  kLion = 4
};

/// Every rule, in the order of its number.
std::span<const UpdateRule> all_update_rules();

inline constexpr std::array<std::string_view, 5> kUpdateRuleNames{"adamw", "adam", "sgd", "adagrad",
                                                                  "lion"};
constexpr base::EnumNames enum_names(UpdateRule) { return kUpdateRuleNames; }
constexpr std::string_view update_rule_name(UpdateRule rule) { return base::enum_name(rule); }
constexpr std::optional<UpdateRule> update_rule_from_name(std::string_view name) {
  return base::enum_from_name<UpdateRule>(name);
}

/// The planes the rule keeps, in their order on the drive; master comes first.
std::span<const base::PlaneKind> rule_planes(UpdateRule rule);

/// Whether its variance can be given squares that are not its gradient's
/// (UpdateBlock::second_moment).
inline bool takes_factored_second_moment(UpdateRule rule) {
  return rule == UpdateRule::kAdamW || rule == UpdateRule::kAdam;
}

/// A user's options, in torch.optim's meaning. What a rule does not know must be at its default.
struct RuleOptions {
  UpdateRule rule = UpdateRule::kAdamW;
  double beta1 = 0.9;     // Adam(W), Lion; momentum of SGD
  double beta2 = 0.999;   // Adam(W), Lion
  double eps = 1e-8;      // Adam(W), Adagrad
  double dampening = 0;   // SGD
  bool nesterov = false;  // SGD
  bool maximize = false;
  double lr_decay = 0;                   // Adagrad
  double initial_accumulator_value = 0;  // Adagrad
};

/// Options that differ between ranges of the parameter space in one step (torch's param_groups).
struct GroupOptions {
  double lr = 1e-3;
  double weight_decay = 0;
  bool skip = false;          // nothing of the group changes in this step, whatever its gradient
  base::StepNumber step = 0;  // of its own, e.g. fewer than the updater's; 0: the updater's
  std::optional<RuleOptions> rule = {};  // in place of the updater's options, for the same rule
};

/// One group's scalars for one step, already rounded to the f32 the kernels use.
struct StepScalars {
  UpdateRule rule = UpdateRule::kAdamW;
  bool skip = false;  // state is left as it is; weights still come out
  bool nesterov = false;
  bool maximize = false;
  bool first_step = false;   // SGD takes the gradient itself as its first momentum, as torch does;
                             // Adagrad takes initial_variance as its first accumulator
  float gradient_scale = 1;  // unscale and clip factor, applied to each gradient on the way in
  float lr = 0;
  float beta1 = 0, one_minus_beta1 = 0;
  float beta2 = 0, one_minus_beta2 = 0;
  float eps = 0;               // Adam(W): eps * sqrt(1 - beta2^t)
  float decay_factor = 1;      // decoupled decay: 1 - lr * weight_decay (AdamW, Lion)
  float weight_decay = 0;      // L2 added to the gradient (Adam, SGD, Adagrad)
  float step_size = 0;         // lr * sqrt(1 - beta2^t) / (1 - beta1^t);
                               // Adagrad: lr / (1 + (t - 1) * lr_decay)
  float dampening_factor = 1;  // 1 - dampening (SGD)
  float initial_variance = 0;  // initial_accumulator_value (Adagrad)
  uint64_t step = 0;           // counts from 1; with seed it makes stochastic rounding repeatable
  uint64_t seed = 0;           // of the run

  bool operator==(const StepScalars&) const = default;
};

/// `step` is the updater's; a group's own one takes its place but in the seed of rounding.
/// Errors: none; options are validated where the user gave them. step counts from 1 (SI_CHECK).
StepScalars make_step_scalars(const RuleOptions& options, const GroupOptions& group,
                              base::StepNumber step, double gradient_scale, uint64_t seed);

}  // namespace smartinf::kernels
