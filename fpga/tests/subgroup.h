// A subgroup in a card's memory, its step by the kernels, and the same step by the scalar truth.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/kernels/update_rule.h"

#include "fpga/kernels/job.h"

namespace smartinf::fpga {

struct SpanOfScalars {
  uint64_t count = 0;
  kernels::StepScalars scalars;
};

struct Step {
  kernels::UpdateRule rule = kernels::UpdateRule::kAdamW;
  uint32_t count = 0;
  std::vector<SpanOfScalars> spans;
  base::DataType gradient_type = base::DataType::kBf16;
  std::optional<base::DataType> weights_type = base::DataType::kBf16;
  uint64_t checksum_seed = 5;
};

/// Tables that the host gives an update kernel beside the planes (job.h).
struct CardTables {
  std::vector<Word> spans;
  std::vector<Word> seeds;
  uint32_t span_count = 0;
  uint32_t weights_type = kWeightsNone;
};

/// A gradient kernel, given the stream of the update kernel.
using GradientKernel = std::function<void(hls::stream<GradientWord>&)>;

/// Planes of f32 in whole words, with what lies behind them.
class Subgroup {
 public:
  /// Numbers of all magnitudes, NaN, infinities and denormals among them where `edges`.
  Subgroup(kernels::UpdateRule rule, uint32_t count, uint64_t seed, bool edges);

  /// Prepares a step: its tables, and room for its weights and its report.
  CardTables prepare(const Step& step);
  /// One step on the card, in place. What the run said, empty when all was well.
  std::string update_on_card(const Step& step, const GradientKernel& gradient,
                             const software::Options& options);
  /// The same by the scalar kernels, from the dense gradient.
  void update_by_truth(const Step& step, const void* gradient);

  bool operator==(const Subgroup& other) const;
  /// Where they differ first, in words.
  std::string difference(const Subgroup& other) const;

  std::vector<std::vector<Word>> planes;
  std::vector<Word> weights;
  std::vector<Word> report;  // checksums
  double cycles = 0;         // that the card took
  uint32_t count;
};

/// Elements of f32 or bf16 in whole words.
std::vector<Word> make_gradient(base::DataType type, uint32_t count, uint64_t seed, bool edges);

const void* bytes_of(const std::vector<Word>& words);
uint8_t* bytes_of(std::vector<Word>& words);
std::vector<Word> words_of(const void* bytes, size_t count);

/// The gradient kernel for a dense gradient.
GradientKernel dense_gradient(const std::vector<Word>& gradient, base::DataType type,
                              uint32_t count);

}  // namespace smartinf::fpga
