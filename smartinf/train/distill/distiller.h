// Blockwise distillation: each layer of a student learns to do what the teacher's layer does, one
// layer after another. Needs torch to link, not to include.
#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/engine/options.h"
#include "smartinf/train/distill/options.h"
#include "smartinf/train/options.h"
#include "smartinf/train/ranks/ranks.h"
#include "smartinf/train/step_report.h"

namespace smartinf::train {

/// Folders that a distillation leaves in its run's, as transformers loads them.
inline constexpr std::string_view kStudentFolder = "student";  // distilled
/// The student before its training, where it was made of the teacher.
inline constexpr std::string_view kUntrainedFolder = "untrained";
/// The distilled student after its steps as a whole model (distill.whole_steps).
inline constexpr std::string_view kWholeFolder = "student-whole";
/// A rounded student's codes and scales in compressed-tensors' layout, which smartinf does not
/// read.
inline constexpr std::string_view kPackedFolder = "student-int4";

struct DistillJob {
  Options options;  // model.from is the teacher's folder; train.steps are those of each block
  DistillOptions distill;
  engine::UpdaterOptions updater;  // each device's path is a folder, with a store for each block
  std::string recipe;              // its text is kept in the run's folder
  /// Ranks that each have, or share, some neighbouring blocks (distill.stages): all see the run's
  /// folder and the devices.
  Ranks ranks;
  std::stop_token stop;
  std::function<void(const std::string& line)> note;  // for people
  /// A step was made, of this block, from 0, of so many; report.step is the block's.
  std::function<void(const StepReport& report, uint32_t block, uint32_t blocks)> show;
  uint64_t steps_at_once = 0;  // for tests: instead of those that there is memory for
};

/// Losses on the data held out, in nats per token.
struct DistillLosses {
  double teacher = 0;
  double untrained = 0;
  double distilled = 0;
  double whole = 0;  // of the student that was trained as a whole then; 0: none was
};

struct DistillSummary {
  std::string folder;           // of the distilled student
  std::string packed;           // of its codes and scales; empty: it is not rounded
  uint64_t micro_batches = 0;   // of blocks' steps, whose activations this process has made
  uint64_t teacher_layers = 0;  // layers of the teacher that it has computed, of one micro batch
  DistillLosses losses;
};

/// Goes on from what is committed, to the end, and writes the student. In each part of the steps
/// whose activations there is memory for, layer after layer: the teacher's layer is read, computes
/// all micro batches once, and its outputs are the targets of the student's layer and the inputs of
/// the next; then the student's layer makes its steps. A block sees the same micro batches in the
/// same order however many steps a part has, so the weights have the same bits. Of several ranks
/// each relays its teacher layers' outputs to those behind, and makes its blocks' updates without
/// waiting for others: the same bits again. Ranks that share blocks each compute some micro batches
/// of a step, and update together. All end together. losses: rank 0's alone. Then, with
/// distill.whole_steps, the teacher's most likely logits of so many steps are kept in a file, and a
/// Trainer of its own makes these steps of the whole student.
/// Errors: kCancelled; whatever a user can get wrong, by key, file or device.
base::Result<DistillSummary> distill(const DistillJob& job);

}  // namespace smartinf::train
