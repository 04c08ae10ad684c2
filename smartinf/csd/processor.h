// A device's computing half, as an interface: jobs on the subgroups in its slots, done in the
// background. The cores of this machine are one implementation (cpu_processor.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <variant>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/compress/message.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/plane_blocks.h"
#include "smartinf/kernels/attention.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::csd {

class GradientMemory;
struct Slot;

/// The gradient of a subgroup, where its update finds it.
struct GradientView {
  const std::byte* dense = nullptr;  // [count] of type; null: compressed
  base::DataType type = base::DataType::kBf16;
  compress::CompressedView compressed;  // without a dense one
  /// The memory that a gradient from the spill area is checked against. Null: it was never away.
  const GradientMemory* memory = nullptr;
  uint32_t subgroup = 0;  // index in the layout
};

/// Verifies, updates and seals all planes of the update's rule; new weights go to weights_out.
struct UpdateJob {
  PlaneBlocks planes;
  GradientView gradient;
  std::span<const kernels::StepScalars> scalars;  // one entry per group of the parameter space
  std::span<const plan::GroupSpan> groups;        // LocalDeviceOptions::groups
  std::span<const compress::MatrixLayout> matrices;
  void* weights_out = nullptr;  // [count] of weights_type; null: not wanted
  base::DataType weights_type = base::DataType::kBf16;
  base::Bf16* samples_out = nullptr;  // SubgroupUpdate::samples_out
};

/// Planes to f32 in the caller's memory (ReadState::planes).
struct DecodeJob {
  PlaneBlocks planes;
  PlaneBlocks cached;  // planes of cached_mask come from there, which is in memory
  uint32_t cached_mask = 0;
  const ReadState* read = nullptr;
};

/// Planes from f32 in the caller's memory (WriteState); those not given become zero.
struct EncodeJob {
  PlaneBlocks planes;
  const WriteState* write = nullptr;
};

/// The master plane as weights in the caller's memory (ReadWeights), as an update sends them up.
struct CastJob {
  PlaneBlocks planes;
  void* weights_out = nullptr;  // [count] of type
  base::DataType type = base::DataType::kBf16;
};

/// A slot's one job. Not touched by the device between Processor::start() and the call of
/// on_finished.
struct Job {
  std::variant<UpdateJob, DecodeJob, EncodeJob, CastJob> work;
  Slot* slot = nullptr;  // the one that owns it
  base::Status status;   // after it has finished: the first failure, or ok
};

/// Memory that slots lie in. Released on destruction.
class SlotMemory {
 public:
  virtual ~SlotMemory() = default;
  /// Aligned for direct I/O. Mapped here, and read and written by the drive as well as by jobs.
  virtual std::span<std::byte> bytes() const = 0;
};

/// A query that is folded over blocks of a layer of a sequence.
struct FoldFrom {
  kernels::FoldQuery query;
  uint64_t first_token = 0;  // of the sequence, that it sees
};

/// Consecutive whole blocks of a layer, and what is folded over them. The bits are those of
/// kernels::fold_block, block by block.
struct FoldJob {
  std::span<const std::byte> blocks;  // aligned to 4096
  uint64_t first_block = 0;           // in the sequence
  uint64_t end_token = 0;             // of the sequence
  std::span<const FoldFrom> queries;  // not empty
};

/// Folds where a processor computes. Threads: one at a time, beside the processor's jobs.
class Folder {
 public:
  virtual ~Folder() = default;
  /// Errors: the processor's; the states are then of no use.
  virtual base::Status fold(const FoldJob& job) = 0;
};

/// Threads: start() and allocate() from the device's threads, one at a time.
/// Bound: one job per slot.
class Processor {
 public:
  /// Finishes what was started.
  virtual ~Processor() = default;
  /// Memory that this kind of processor can work on. Errors: kOutOfMemory.
  virtual base::Result<std::unique_ptr<SlotMemory>> allocate(uint64_t bytes) = 0;
  virtual void start(Job& job) = 0;
  /// For queries of a shape. Null: the cores of this machine fold. Errors: the processor's;
  /// kUnsupported, its bits differ.
  virtual base::Result<std::unique_ptr<Folder>> make_folder(const kernels::AttentionShape&) {
    return std::unique_ptr<Folder>();
  }
  /// Threads of this machine that compute at a time, for DeviceInfo.
  virtual uint32_t threads() const = 0;
};

/// Makes a device's processor. on_finished is called once for each job, on any thread.
using ProcessorFactory =
    std::function<base::Result<std::unique_ptr<Processor>>(std::function<void(Job&)> on_finished)>;

}  // namespace smartinf::csd
