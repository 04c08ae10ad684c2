// Options of the compression of gradients.
#pragma once

#include <cstdint>

#include "smartinf/compress/message.h"

namespace smartinf::compress {

/// Values of CompressOptions::stages.
inline constexpr uint32_t kAllStages = ~uint32_t{0};
inline constexpr uint32_t kChosenStages = kAllStages - 1;

/// SmartComp: gradients compressed before the host link and expanded on the device. What it costs
/// and gains is in docs/smartcomp.md.
struct CompressOptions {
  /// Share of the elements that are sent, the largest of each block of base::kBlockElements;
  /// 0: gradients are sent dense, of UpdaterOptions::gradient_type.
  double density = 0;
  ValueEncoding values = ValueEncoding::kSign;
  /// Whether what is not sent waits in host memory, as bf16, and is added to the next gradient
  /// (error feedback); the rule's second moment takes the dense gradient's, by row and column, and
  /// weights come up as if what waits had arrived (kernels::step_ahead). false: Top-K alone, as in
  /// the paper; what is not sent is lost.
  bool error_feedback = true;
  /// Steps between writes of the residual to the devices (2 bytes a parameter over the host link
  /// each time); 1: a crash loses nothing of it. 0: never.
  uint64_t residual_every = 16;
  uint64_t warmup_steps = 0;  // the density falls from 0.25 to its value
  /// Of several ranks, which send each other what is compressed: so many stages of a pipeline, from
  /// the first on, whose replicas do. kChosenStages: whoever knows the links chooses.
  uint32_t stages = kAllStages;

  bool on() const { return density > 0; }
  /// Default of `values`. Without error feedback nothing makes up for what the one magnitude of
  /// signs is too large or too small.
  ValueEncoding default_values() const {
    return error_feedback ? ValueEncoding::kSign : ValueEncoding::kBf16;
  }
  /// The residual is part of the state on the devices.
  bool residual_on_devices() const { return on() && error_feedback && residual_every > 0; }
};

}  // namespace smartinf::compress
