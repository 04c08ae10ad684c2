// One optimizer step over a contiguous run of elements: read state and gradient once, write state
// and new weights once. The table of kernels of an instruction set is chosen once, at start.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/tile_kernels.h"
#include "smartinf/kernels/update_rule.h"

namespace smartinf::kernels {

/// Squares of neighbours in a row of a matrix: square i is mean * columns[i]. Rows of a block are
/// ordered, without gaps, and sum to its elements.
struct SecondMomentRow {
  uint64_t count = 0;
  float mean = 0;
  const float* columns = nullptr;  // [count]
};

/// One checksum block of a subgroup: what an update reads and writes.
struct UpdateBlock {
  /// This block of each plane, in rule_planes() order, encoded as base::plane_encoding says.
  /// Aligned to 4 bytes; 64 is faster.
  std::array<std::byte*, 3> planes{};
  uint64_t count = 0;              // elements: kBlockElements, or less for a subgroup's last block
  uint64_t element = 0;            // index of the first one in the parameter space; multiple of 256
  const void* gradient = nullptr;  // [count] of gradient_type
  base::DataType gradient_type = base::DataType::kBf16;
  /// Adam and AdamW only: what the variance takes in place of the squares of `gradient`, already
  /// scaled; it is at least 1 - beta2 of each of those. Empty: those squares.
  std::span<const SecondMomentRow> second_moment = {};
  void* weights_out = nullptr;  // [count] of weights_type, or null: no weights wanted
  base::DataType weights_type = base::DataType::kBf16;
};

/// A span of a block whose elements share scalars. Spans of a block are ordered, without
/// gaps, and sum to the block's elements. All name the same rule, step and seed.
struct ScalarsSpan {
  uint64_t count = 0;
  const StepScalars* scalars = nullptr;
};

/// The kernels of one instruction set; all sets give the same bits.
/// Threads: every function is pure and safe on disjoint data. Errors: none at run time; arguments
/// that contradict each other are bugs (SI_CHECK).
class KernelTable {
 public:
  explicit constexpr KernelTable(const TileKernels& tiles) : tiles_(tiles) {}

  std::string_view isa() const { return tiles_.isa; }  // "scalar", "SSE4", "AVX2", "AVX3", ...

  /// Applies one step to one block in place, in one pass over memory.
  /// Shapes: see UpdateBlock. Units: see StepScalars. NaN results are 0x7fc00000.
  /// Source: rules.h has the formulas, state_codec.h the formats.
  void update_block(base::StateFormat format, const UpdateBlock& block,
                    std::span<const ScalarsSpan> runs) const;

  /// Casts master to weights (resume, export). Shapes: [n] f32 -> [n] of type. Nearest, ties to
  /// even.
  void cast_from_f32(const float* in, void* out, base::DataType out_type, size_t n) const {
    tiles_.narrow(in, out, out_type, n);
  }
  /// Widens gradients or weights. Shapes: [n] of type -> [n] f32. Exact.
  void cast_to_f32(const void* in, base::DataType in_type, float* out, size_t n) const {
    tiles_.widen(in, in_type, out, n);
  }

  struct Norm {
    double sum_of_squares = 0;  // infinity when not finite
    bool finite = true;
    size_t first_bad = 0;  // index of the first infinity or NaN when not finite, else 0
  };
  /// Sum of squares in f64 over a fixed tree of kNormLeafElements leaves, so that it does not
  /// depend on threads or instruction set; infinities and NaN are found on the way. Shapes: [n] of
  /// type.
  Norm partial_norm(const void* in, base::DataType type, size_t n) const;

  /// Decodes one block of a plane (export, conversion between formats). Shapes: encoded_bytes(n) ->
  /// [n] f32. A q8 variance holds square roots; `kind` says which code is meant.
  void decode_block(base::Encoding encoding, base::PlaneKind kind, const std::byte* in, float* out,
                    size_t n) const;
  /// Encodes one block of a plane with the rounding that update_block uses for the same (element,
  /// step, seed). Shapes: [n] f32 -> encoded_bytes(n). element: multiple of 256.
  void encode_block(base::Encoding encoding, base::PlaneKind kind, const float* in, std::byte* out,
                    size_t n, uint64_t element, uint64_t step, uint64_t seed) const;

  const TileKernels& tiles() const { return tiles_; }

 private:
  TileKernels tiles_;
};

/// The table in use: the best this processor has, or the one SMARTINF_FORCE_ISA names.
const KernelTable& kernels();

/// Tables this machine can run, the scalar truth first, the fastest last.
std::vector<const KernelTable*> supported_tables();

/// The table of that name, in any letter case. Errors: kUnsupported with the names there are.
base::Result<const KernelTable*> find_table(std::string_view isa);

/// Why SMARTINF_FORCE_ISA could not be honoured (unknown or unsupported name), or ok. An app checks
/// it at start and stops; kernels() falls back to the scalar table, which is never wrong.
base::Status forced_isa_status();

}  // namespace smartinf::kernels
