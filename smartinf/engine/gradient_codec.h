// Which elements of a gradient are sent: one block of it at a time, so that the choice does not
// depend on how the parameter space is cut into subgroups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "smartinf/engine/options.h"

namespace smartinf::engine {

/// Threads: pure.
class GradientCodec {
 public:
  virtual ~GradientCodec() = default;
  virtual std::string_view name() const = 0;
  /// Whether it selects the largest: those of kernels::top_k().
  virtual bool takes_largest() const { return false; }
  /// At most k elements of a block: their indices, ascending, and values. Zeros are left out.
  /// Shapes: in: [n], n <= kBlockElements; indices, values: [kBlockElements]. Returns how many.
  /// seed: of this block in this step. border: what the codec left there for the same block in the
  /// step before, at first 0; only time depends on it.
  virtual size_t select(std::span<const float> in, size_t k, uint64_t seed, float& border,
                        uint32_t* indices, float* values) const = 0;
};

/// codec is not kNone (SI_CHECK).
const GradientCodec& gradient_codec(CompressOptions::Codec codec);

/// What a value and its index count as in the ratio, against 4 bytes for every element: 4 bytes
/// each, as in the paper, so that 0.02 sends 1 %; a sign and its index 1, so that it sends 8 %.
constexpr double counted_bytes(csd::ValueForm form) {
  return form == csd::ValueForm::kSign ? 1 : 8;
}
/// What is sent of gradients and what becomes of the rest, for people: one line. on() (SI_CHECK).
std::string describe_compression(const CompressOptions& options);
/// Values that a block of n elements may send. At least one.
size_t values_per_block(const CompressOptions& options, double ratio, uint64_t elements);

/// The ratio of a step (from 1): during the warm-up it falls from kWarmupRatio to options.ratio by
/// the same factor each step; an automatic one is at least that, and rises with the backlog: square
/// of the norm of what is kept over that of the step's gradient.
/// Source: Lin et al. 2018 (DGC), section 3.3, for the warm-up; docs/smartcomp.md for the rest.
inline constexpr double kWarmupRatio = 0.5;
double ratio_of_step(const CompressOptions& options, uint64_t step, double backlog);
/// The largest that ratio_of_step() gives.
double ratio_most(const CompressOptions& options);

}  // namespace smartinf::engine
