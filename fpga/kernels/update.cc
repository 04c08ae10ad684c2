// The kernels that update: shells around update.h, one for each rule, with their ports.
#include "fpga/kernels/update.h"

using smartinf::fpga::GradientWord;
using smartinf::fpga::update_subgroup;
using smartinf::fpga::Word;
namespace kernels = smartinf::kernels;

// Reads and writes of a plane share a port: AXI's are independent.
// clang-format off
#define SI_PORT(name, of) \
  SI_PRAGMA(HLS INTERFACE m_axi port = name bundle = of offset = slave \
            max_read_burst_length = 64 max_write_burst_length = 64 \
            num_read_outstanding = 16 num_write_outstanding = 16)
// clang-format on

extern "C" {

void smartinf_update_adam(hls::stream<GradientWord>& gradients, const Word* master_in,
                          Word* master_out, const Word* momentum_in, Word* momentum_out,
                          const Word* variance_in, Word* variance_out, Word* weights,
                          const Word* spans, const Word* seeds, Word* report, uint32_t count,
                          uint32_t span_count, uint32_t weights_type) {
  SI_PRAGMA(HLS INTERFACE axis port = gradients)
  SI_PORT(master_in, first)
  SI_PORT(master_out, first)
  SI_PORT(momentum_in, second)
  SI_PORT(momentum_out, second)
  SI_PORT(variance_in, third)
  SI_PORT(variance_out, third)
  SI_PORT(weights, weights)
  SI_PORT(spans, weights)
  SI_PORT(seeds, tables)
  SI_PORT(report, tables)
  update_subgroup<kernels::kRuleAdamW>(gradients, master_in, master_out, momentum_in, momentum_out,
                                       variance_in, variance_out, weights, spans, seeds, report,
                                       count, span_count, weights_type);
}

void smartinf_update_sgd(hls::stream<GradientWord>& gradients, const Word* master_in,
                         Word* master_out, const Word* momentum_in, Word* momentum_out,
                         Word* weights, const Word* spans, const Word* seeds, Word* report,
                         uint32_t count, uint32_t span_count, uint32_t weights_type) {
  SI_PRAGMA(HLS INTERFACE axis port = gradients)
  SI_PORT(master_in, first)
  SI_PORT(master_out, first)
  SI_PORT(momentum_in, second)
  SI_PORT(momentum_out, second)
  SI_PORT(weights, weights)
  SI_PORT(spans, weights)
  SI_PORT(seeds, tables)
  SI_PORT(report, tables)
  update_subgroup<kernels::kRuleSgdMomentum>(gradients, master_in, master_out, momentum_in,
                                             momentum_out, nullptr, nullptr, weights, spans, seeds,
                                             report, count, span_count, weights_type);
}

void smartinf_update_adagrad(hls::stream<GradientWord>& gradients, const Word* master_in,
                             Word* master_out, const Word* variance_in, Word* variance_out,
                             Word* weights, const Word* spans, const Word* seeds, Word* report,
                             uint32_t count, uint32_t span_count, uint32_t weights_type) {
  SI_PRAGMA(HLS INTERFACE axis port = gradients)
  SI_PORT(master_in, first)
  SI_PORT(master_out, first)
  SI_PORT(variance_in, second)
  SI_PORT(variance_out, second)
  SI_PORT(weights, weights)
  SI_PORT(spans, weights)
  SI_PORT(seeds, tables)
  SI_PORT(report, tables)
  update_subgroup<kernels::kRuleAdagrad>(gradients, master_in, master_out, variance_in,
                                         variance_out, nullptr, nullptr, weights, spans, seeds,
                                         report, count, span_count, weights_type);
}
}
