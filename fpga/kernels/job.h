// Interface between the host and the kernels: names, numbers and tables of one call for one
// subgroup. Planes and gradients lie in the card's memory from a multiple of 64 bytes on, in whole
// words; what lies behind the last element keeps its bits.
#pragma once

#include <ap_axi_sdata.h>

#include "fpga/kernels/dataflow.h"

namespace smartinf {
namespace fpga {

static const int kPlanesMax = 3;

/// From a gradient kernel to an update kernel: 16 f32.
typedef ap_axiu<512, 0, 0, 0> GradientWord;

static const uint32_t kWeightsNone = 0;
static const uint32_t kWeightsF32 = 1;
static const uint32_t kWeightsBf16 = 2;

// Tables, in words:
// spans   two for each (kernels::ScalarsSpan): its number of elements in lane 0;
// kernels::RuleScalars, lane by lane. seeds   one for each block of 65536: seeds of the checksums
// of the planes as read, from wide lane 0 on, and as written,
//         from wide lane 3 on.
// report  likewise the checksums; 0 for blocks of at most 60 elements, whose checksums are the
// host's. The host compares those
//         of what was read with what it knows, and drops what was written if one is wrong.
static const int kSkipLane = 1;  // of RuleScalars: skip

// Findings of a gradient kernel, in lane 0 of a word. The words of the gradient have come in any
// case; where the status is not kStatusOk the host drops the step.
static const uint32_t kStatusOk = 0;
static const uint32_t kStatusDisorder = 1;  // indices that do not ascend, or lie beyond the end
static const uint32_t kStatusCorrupt =
    2;  // a message that contradicts itself, or is of another length
static const uint32_t kStatusUnknown =
    3;  // of another version, or with values of another kind (f16)
static const uint32_t kStatusFactors =
    4;  // with a second moment in factors, which is not done here

static const uint32_t kGradientF32 = 0;
static const uint32_t kGradientBf16 = 1;

}  // namespace fpga
}  // namespace smartinf

extern "C" {

/// One step of a subgroup of `count` elements; at least one. Where `in` and `out` of a plane are
/// the same, it is updated in place. Unused pointers may be null where nothing is written through
/// them (weights).
void smartinf_update_adam(hls::stream<smartinf::fpga::GradientWord>& gradients,
                          const smartinf::fpga::Word* master_in, smartinf::fpga::Word* master_out,
                          const smartinf::fpga::Word* momentum_in,
                          smartinf::fpga::Word* momentum_out,
                          const smartinf::fpga::Word* variance_in,
                          smartinf::fpga::Word* variance_out, smartinf::fpga::Word* weights,
                          const smartinf::fpga::Word* spans, const smartinf::fpga::Word* seeds,
                          smartinf::fpga::Word* report, uint32_t count, uint32_t span_count,
                          uint32_t weights_type);
void smartinf_update_sgd(hls::stream<smartinf::fpga::GradientWord>& gradients,
                         const smartinf::fpga::Word* master_in, smartinf::fpga::Word* master_out,
                         const smartinf::fpga::Word* momentum_in,
                         smartinf::fpga::Word* momentum_out, smartinf::fpga::Word* weights,
                         const smartinf::fpga::Word* spans, const smartinf::fpga::Word* seeds,
                         smartinf::fpga::Word* report, uint32_t count, uint32_t span_count,
                         uint32_t weights_type);
void smartinf_update_adagrad(hls::stream<smartinf::fpga::GradientWord>& gradients,
                             const smartinf::fpga::Word* master_in,
                             smartinf::fpga::Word* master_out,
                             const smartinf::fpga::Word* variance_in,
                             smartinf::fpga::Word* variance_out, smartinf::fpga::Word* weights,
                             const smartinf::fpga::Word* spans, const smartinf::fpga::Word* seeds,
                             smartinf::fpga::Word* report, uint32_t count, uint32_t span_count,
                             uint32_t weights_type);

/// A subgroup's gradient, all of its elements, of kGradientF32 or kGradientBf16.
void smartinf_gradient_dense(const smartinf::fpga::Word* memory, uint32_t count, uint32_t type,
                             hls::stream<smartinf::fpga::GradientWord>& gradients);

/// A gradient of which pairs are given, u32 index and f32 value, ascending; the rest is zero.
void smartinf_gradient_pairs(const smartinf::fpga::Word* pairs, uint32_t pair_count, uint32_t count,
                             smartinf::fpga::Word* status,
                             hls::stream<smartinf::fpga::GradientWord>& gradients);

/// A gradient as a message of smartinf/compress, which is given four times, because four readers of
/// the same memory need a port each.
void smartinf_gradient_message(const smartinf::fpga::Word* directory,
                               const smartinf::fpga::Word* values, const smartinf::fpga::Word* lows,
                               const smartinf::fpga::Word* highs, uint64_t bytes, uint32_t count,
                               smartinf::fpga::Word* status,
                               hls::stream<smartinf::fpga::GradientWord>& gradients);
}
