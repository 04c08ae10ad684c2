// Arguments of a kernel's job: the same structs on both sides. In the language of
// smartinf/base/arithmetic.h.
#pragma once

#if !defined(__OPENCL_C_VERSION__)
#include "smartinf/base/arithmetic.h"
namespace smartinf {
namespace csd {
#endif

SI_CONSTANT(uint32_t, kPlanesMax) = 3;
/// Checksums of a block: of each plane, and of a gradient that came back from the drive.
SI_CONSTANT(uint32_t, kSumsPerBlock) = 4;

/// Offsets are in bytes; those of tables in the buffer of tables, of planes in that of the state.
typedef struct UpdateArguments {
  uint64_t first_element;  // of the subgroup, in the parameter space
  uint64_t count;          // elements
  uint64_t step_seed;      // rounding_seed()
  uint64_t plane_at[3];    // in the rule's order
  uint64_t gradient_at;    // a message where it came compressed
  uint64_t weights_at;
  uint64_t has_weights;
  uint64_t spans_at;     // SpanEntry
  uint64_t scalars_at;   // RuleScalars
  uint64_t sums_in_at;   // SumEntry: kSumsPerBlock of each block
  uint64_t sums_out_at;  // the same
  uint64_t matrices_at;  // MatrixEntry
  uint64_t matrices;     // 0: the variance takes the squares of the gradient
  uint64_t compressed;   // the gradient is a message...
  uint64_t sections_at;  // ...whose sections begin here
  uint64_t message_bytes;
  uint64_t signs;       // its values are signs
  uint64_t factors_at;  // in the message: the codes of rows and columns
} UpdateArguments;

/// Elements of the subgroup up to `end` that share scalars.
typedef struct SpanEntry {
  uint64_t end;
  uint64_t scalars;  // index
} SpanEntry;

/// A checksum that the kernel computes.
typedef struct SumEntry {
  uint64_t seed;
  uint64_t expected;
  uint64_t wanted;  // 0: checksums are off, or the block is so short that the host does it
} SumEntry;

/// A part of a matrix in a message, and where the factors of its squares are
/// (compress::MatrixPart).
typedef struct MatrixEntry {
  uint64_t first;  // element of the parameter space where the part begins
  uint64_t end;
  uint64_t columns;       // of the matrix
  uint64_t first_column;  // of the part's first element
  uint64_t rows_at;       // factors before those of its rows, and of its columns
  uint64_t columns_at;
  uint64_t row_scale;
  uint64_t column_scale;
} MatrixEntry;

/// Arguments of a job that decodes or encodes a plane, or makes weights of one.
typedef struct PlaneArguments {
  uint64_t plane_at;
  uint64_t values_at;    // f32 or weights in the other buffer; block `first_block`'s first
  uint64_t encoding;     // base::Encoding
  uint64_t kind;         // base::PlaneKind
  uint64_t type;         // base::DataType of weights; of encoding: kBf16 for codes as they are
  uint64_t first_block;  // of the subgroup
  uint64_t blocks;
  uint64_t count;          // elements of the subgroup
  uint64_t wanted;         // of them, values from the first block on
  uint64_t first_element;  // of the subgroup, in the parameter space
  uint64_t zeros;          // encode zeros
  uint64_t sums_at;        // SumEntry: one of each block
  uint64_t results_at;     // index among the sums that come back
} PlaneArguments;

/// Arguments of a fold of queries over consecutive blocks of keys and values (kernels/attention.h).
typedef struct FoldArguments {
  uint64_t first_block;  // in the sequence
  uint64_t blocks;
  uint64_t block_bytes;
  uint64_t end_token;  // of the sequence
  uint64_t heads;      // of a query
  uint64_t group;      // of them, for each head of keys
  uint64_t head_width;
  uint64_t format;  // kernels::CacheFormat
  SI_F32 scale;
  SI_F32 softcap;
} FoldArguments;

#if !defined(__OPENCL_C_VERSION__)
}  // namespace csd
}  // namespace smartinf
#endif
