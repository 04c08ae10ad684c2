// A step's gradients on their way from backward to the updater.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/updater.h"
#include "smartinf/plan/micro_batches.h"
#include "smartinf/train/gradient_copies.h"
#include "smartinf/train/unit_pass.h"

namespace smartinf::train {

/// Threads: one caller. A step: take() ..., then finish().
class StepGradients {
 public:
  struct Options {
    base::DataType type = base::DataType::kBf16;  // of one process's gradients
    /// Several ranks: each has sums over `mine` of all micro batches, of leaf_type for one of them.
    bool alone = true;
    uint32_t micro_batches = 1;
    plan::MicroBatchRange mine;
    base::DataType leaf_type = base::DataType::kBf16;
    /// There is memory for those that wait until the step before is committed.
    bool may_wait = true;
  };
  /// begin: begins the step at the updater, as late as possible; it waits for the commit of the
  /// step before. copies: from an accelerator; null without one. The updater outlives this.
  StepGradients(engine::Updater& updater, const Options& options,
                std::unique_ptr<GradientCopies> copies, std::function<base::Status()> begin)
      : updater_(updater),
        options_(options),
        copies_(std::move(copies)),
        begin_(std::move(begin)) {}

  /// A parameter's gradient is complete; it is freed once it is down. Errors: StatusError.
  void take(UnitPass::Gradient gradient);
  /// All of the step's are down, none is left on its way from an accelerator.
  base::Status finish();

 private:
  base::Status begin();
  base::Status put(bool all);
  base::Status put_sums();
  base::Status put_oldest_copy();

  engine::Updater& updater_;
  const Options options_;
  const std::unique_ptr<GradientCopies> copies_;
  const std::function<base::Status()> begin_;
  bool begun_ = false;                     // the step, at the updater
  std::vector<UnitPass::Gradient> ready_;  // that go down next
};

}  // namespace smartinf::train
