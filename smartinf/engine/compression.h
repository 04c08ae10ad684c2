// Interface of an updater whose gradients go down compressed, beside that of others.
#pragma once

#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/compress/gradient_compressor.h"
#include "smartinf/kernels/feedback.h"

namespace smartinf::engine {

/// State that compression carries from step to step beside the planes of the rule. Exported by
/// Compression::state(), imported by Updater::edit_state().
struct CompressionState {
  /// [space().count()], what was not sent yet. Exported: valid until the next call that changes
  /// state; null without feedback. Imported: null leaves it as it is.
  const base::Bf16* residual = nullptr;
  /// How far weights of each group are ahead of the stored ones, by the residual. Exported: empty
  /// when they are not. Imported: empty leaves it as it is.
  std::vector<kernels::StepAhead> ahead;
};

/// Threads: those of the updater that it belongs to.
class Compression {
 public:
  virtual ~Compression() = default;
  /// State of the committed step.
  virtual CompressionState state() const = 0;
  /// The next commit writes the residual, whatever compress::CompressOptions::residual_every says:
  /// for the last step before a run ends.
  virtual void write_residual() = 0;
  /// Counts of what was done to the last step's gradient.
  virtual compress::CompressionSummary summary() const = 0;
};

}  // namespace smartinf::engine
