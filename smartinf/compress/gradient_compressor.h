// Makes a step's compressed gradients: collects what comes in, adds what earlier steps did not
// send, selects and packs; the rest is the new residual. docs/smartcomp.md has the formulas.
//
// Everything happens when the update starts, because only then the step's scale (loss scale,
// accumulation, clipping) is known: a gradient is scaled before the residual is added.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/compress/density.h"
#include "smartinf/compress/message.h"
#include "smartinf/compress/second_moment_factors.h"
#include "smartinf/kernels/feedback.h"
#include "smartinf/kernels/signs.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::compress {

/// Counts of a step's compression.
struct CompressionSummary {
  uint64_t elements = 0;     // elements that took part
  uint64_t values = 0;       // sent of them
  uint64_t bytes = 0;        // of messages
  double density = 0;        // of the step: CompressOptions::density or the warm-up's
  double residual_norm = 0;  // of the next step's residual; 0 without error feedback
};

/// A step: begin_step, put, begin_update, then compress or leave for every subgroup, summary,
/// commit. Threads: one at a time, but for compress() and leave(); nobody calls while a residual is
/// being read by reference.
class GradientCompressor {
 public:
  /// A thread's working memory: a block in its stages. About 1.3 MiB.
  struct Scratch {
    std::vector<float> values = std::vector<float>(base::kBlockElements);
    std::vector<float> arrived = std::vector<float>(base::kBlockElements);
    std::vector<uint32_t> indices = std::vector<uint32_t>(base::kBlockElements);
    std::vector<float> selected = std::vector<float>(base::kBlockElements);
    RowColumnFactors factors;
    std::vector<float> candidates = std::vector<float>(kernels::kSignCandidates);
    std::vector<uint64_t> sent = std::vector<uint64_t>(base::kBlockElements / 64);
    std::vector<uint64_t> negative = std::vector<uint64_t>(base::kBlockElements / 64);
  };

  /// Memory: 2 bytes a parameter for the step's gradient, with feedback 2 more. matrices: of the
  /// space where messages have row and column factors, else empty.
  static base::Result<std::unique_ptr<GradientCompressor>> make(const CompressOptions& options,
                                                                uint64_t elements, uint64_t seed,
                                                                std::vector<MatrixLayout> matrices);

  void begin_step();
  /// Copies a piece, cast to bf16.
  void put(uint64_t first, const void* gradient, base::DataType type, uint64_t count);

  /// When the gradient is complete: chooses the step's density and computes the means of the
  /// gradient's squares by row and column. scale: by which the gradient is multiplied; norm: its
  /// norm after that. skipped: spans of the space that have no gradient.
  void begin_update(base::StepNumber step, double scale, double norm,
                    std::span<const plan::GroupSpan> skipped, base::ThreadTeam& team);
  /// The message of a subgroup; valid until the same writer's next. `skipped` are spans of it,
  /// in order, that send nothing and keep their residual as it is. Threads: several at once, each
  /// with subgroups, a scratch and a writer of its own; what they make does not depend on it.
  std::span<const std::byte> compress(Scratch& scratch, CompressedWriter& writer,
                                      const plan::Subgroup& subgroup,
                                      std::span<const plan::GroupSpan> skipped);
  /// A subgroup that is skipped: its residual stays. Threads: as compress().
  void leave(const plan::Subgroup& subgroup);
  /// After the last subgroup of a step.
  CompressionSummary summary() const;

  /// The step is committed: its residual is used from now on. Until then it is the step before's.
  void commit();

  bool feedback() const { return options_.error_feedback; }
  /// The residual of the step in progress: [count]. For the store.
  const base::Bf16* next_residual(uint64_t first) const { return gradient_ + first; }
  /// The residual of the committed step: [elements]; null without error feedback.
  const base::Bf16* residual() const { return residual_; }
  /// Between steps: commit() makes it the residual. [elements]
  void propose_residual(const base::Bf16* values);
  /// Sets the residual of the committed step, from the store.
  void set_residual(uint64_t first, std::span<const float> values);
  uint64_t memory_bytes() const {
    return memory_.size() + (second_moment_ ? second_moment_->memory_bytes() : 0);
  }

 private:
  GradientCompressor(const CompressOptions& options, uint64_t elements, uint64_t seed,
                     std::vector<MatrixLayout> matrices, base::AlignedBuffer memory);
  /// A block of the step in progress on its way.
  struct Block {
    kernels::FeedbackBlock feedback;  // no residual without feedback
    size_t most = 0;                  // elements that may be sent
    float& threshold;                 // as kernels::top_k_near()'s
  };
  void compress_block(Scratch& scratch, CompressedWriter& writer, uint64_t first, uint64_t count,
                      uint64_t next, std::span<const plan::GroupSpan> skipped);
  /// For nearly all blocks of signs; same bits as compress_in_stages(). Returns how many elements
  /// are sent, or nothing where it is not possible.
  std::optional<size_t> compress_as_signs(Scratch& scratch, CompressedWriter& writer,
                                          const Block& block);
  /// Returns how many elements are sent.
  size_t compress_in_stages(Scratch& scratch, CompressedWriter& writer, const Block& block,
                            std::span<const plan::GroupSpan> skipped);
  /// Packs the selected elements. Returns them as the device receives them: [sent], empty without
  /// error feedback.
  std::span<const float> add_block(Scratch& scratch, CompressedWriter& writer, size_t sent);

  const CompressOptions options_;
  const uint64_t elements_;
  const uint64_t seed_;
  std::optional<SecondMomentFactors> second_moment_;
  base::AlignedBuffer memory_;
  base::Bf16* gradient_ = nullptr;  // [elements]; becomes the new residual, block by block
  base::Bf16* residual_ = nullptr;  // [elements] of the committed step; null without feedback
  // State of the step in progress.
  base::StepNumber step_ = 0;
  float scale_ = 1;
  double density_ = 0;
  bool finite_ = true;  // the step's gradient
  std::atomic<uint64_t> elements_of_step_{0};
  std::atomic<uint64_t> values_of_step_{0};
  std::atomic<uint64_t> bytes_of_step_{0};
  std::vector<float> thresholds_;         // by block, from the step before
  std::vector<double> residual_squares_;  // by block, so that their sum has one order
};

}  // namespace smartinf::compress
