// One optimizer step over a contiguous run of elements: read state and gradient once, write state
// and new weights once. The table of kernels of an instruction set is chosen once, at start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/update_rule.h"

namespace smartinf::kernels {

/// A run of elements of one group inside one checksum block of a subgroup.
/// `plane` pointers address the run's own first element's block: planes are encoded per block
/// (base::encoded_bytes), so a run inside a block is (block pointer, first element in block, count).
struct UpdateSpan {
  /// Start of this block of each plane, in rule_planes() order; up to 3. 64-byte aligned.
  std::byte* planes[3] = {nullptr, nullptr, nullptr};
  uint64_t block_elements = 0;  // elements this block holds (kBlockElements, or less for the last)
  uint64_t first = 0;           // first element of the run within the block
  uint64_t count = 0;           // elements of the run
  uint64_t element = 0;         // the run's first element's index in the parameter space
  const void* gradient = nullptr;  // [count] of gradient_type, the run's own
  base::DataType gradient_type = base::DataType::kBf16;
  void* weights_out = nullptr;  // [count] of weights_type, or null: no weights wanted
  base::DataType weights_type = base::DataType::kBf16;
};
// For q8 planes a run must start at a multiple of kQ8GroupElements within its block or be the
// continuation of a group that starts in the run before it; the caller processes whole blocks
// through update_block() below, which cuts runs of different groups correctly.

/// A stretch of a block whose elements share scalars. Stretches of a block are ordered, without
/// gaps, and sum to the block's elements.
struct GroupRun {
  uint64_t count = 0;
  const StepScalars* scalars = nullptr;
};

/// Every instruction set's implementation of every kernel; all give the same bits.
struct KernelTable {
  std::string_view isa;  // "scalar", "SSE4", "AVX2", "AVX3", "AVX3_SPR", "NEON"...

  /// Applies one step to one whole block in place. Several GroupRuns when ranges with different
  /// scalars meet in the block. The gradient and weights_out pointers are those of the block's
  /// first element; span.first is 0 and span.count == span.block_elements.
  /// Threads: pure; safe on disjoint blocks. Errors: none at run time.
  void (*update_block)(base::StateFormat format, const UpdateSpan& block,
                       std::span<const GroupRun> runs);

  /// Casts master to weights (resume, export). Shapes: [n] f32 -> [n] of type.
  void (*cast_from_f32)(const float* in, void* out, base::DataType out_type, size_t n);
  /// Widens gradients or weights. Shapes: [n] of type -> [n] f32. Exact.
  void (*cast_to_f32)(const void* in, base::DataType in_type, float* out, size_t n);

  /// Sum of squares in f64 over a fixed tree of 4096-element leaves, so that the result does not
  /// depend on threads or instruction set. `finite` turns false on an infinity or NaN, and
  /// first_bad is then its index.
  struct Norm {
    double sum_of_squares = 0;
    bool finite = true;
    size_t first_bad = 0;
  };
  Norm (*partial_norm)(const void* in, base::DataType type, size_t n);

  /// Decodes or encodes one block of a plane (import, export, conversion between formats).
  /// q8 variance holds square roots of values; `kind` says which code is meant.
  void (*decode_block)(base::Encoding encoding, base::PlaneKind kind, const std::byte* in,
                       float* out, size_t n);
  void (*encode_block)(base::Encoding encoding, base::PlaneKind kind, const float* in,
                       std::byte* out, size_t n, uint64_t element, uint64_t step, uint64_t seed);
};

/// The table in use: the best this processor has, or the one SMARTINF_FORCE_ISA names.
const KernelTable& kernels();

/// Tables this machine can run, the scalar truth first.
std::vector<const KernelTable*> supported_tables();

/// Why SMARTINF_FORCE_ISA could not be honoured (unknown or unsupported name), or ok. An app checks
/// it at start and stops; kernels() falls back to the scalar table, which is never wrong.
base::Status forced_isa_status();

}  // namespace smartinf::kernels
