// How fast the kernels of fpga/ update on a card: cycles, counted, and the card's memory.
// docs/fpga.md has the derivation; fpga/tests/cycles_test.cc compares it with the kernels'
// processes.
#pragma once

#include <cstdint>

#include "smartinf/kernels/update_rule.h"

namespace smartinf::sim {

struct FpgaPipeline {
  double clock_hz = 0;       // 0: the processor is none
  uint32_t word_cycles = 1;  // cycles of the update for 16 elements (SI_WORD_CYCLES)
  uint32_t banks = 1;        // of memory, over which planes are spread evenly
  double bank_bytes_per_s = 0;
  double bank_efficiency = 1;  // share that is left of it where bursts of reads and writes mix
};

/// An element as the kernels see it.
struct PipelineElement {
  uint32_t planes = 3;        // of f32
  double gradient_bytes = 4;  // as it lies in memory, of the mean element where it is compressed
  double weights_bytes = 0;   // written beside the planes
  double values = 0;          // values that are sent of it, where it is sparse; 0: it is dense
};

/// Cycles of one element in a long row of them. The slowest of these is the pipeline's pace.
struct PipelineCycles {
  double update = 0;
  double scatter = 0;
  double memory = 0;

  double slowest() const;
};
PipelineCycles pipeline_cycles(const FpgaPipeline& pipeline, const PipelineElement& element);

/// Seconds of one element.
double pipeline_seconds(const FpgaPipeline& pipeline, const PipelineElement& element);

/// Whether there is a kernel for the rule.
bool pipeline_has(kernels::UpdateRule rule);

}  // namespace smartinf::sim
