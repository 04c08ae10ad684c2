// Cycles of the kernels' processes, which stream by stream wait for each other, against the closed
// form that the simulator has (smartinf/sim/fpga_pipeline.h).
#include <cstdio>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/sim/fpga_pipeline.h"

#include "fpga/tests/subgroup.h"

namespace smartinf::fpga {
namespace {

constexpr uint32_t kCount = 4 * kBlockElements;

Step make_step(kernels::UpdateRule rule, std::optional<base::DataType> weights) {
  Step step;
  step.rule = rule;
  step.count = kCount;
  kernels::RuleOptions options;
  options.rule = rule;
  step.spans = {{kCount, kernels::make_step_scalars(options, {}, 2, 1, 3)}};
  step.weights_type = weights;
  return step;
}

/// Cycles of an element, with the card's memory at a share of a word in a cycle.
double simulated(const Step& step, const GradientKernel& gradient, double memory) {
  Subgroup card(step.rule, kCount, 1, false);
  EXPECT_EQ(card.update_on_card(step, gradient, {.memory_words_per_cycle = memory}), "");
  return card.cycles / kCount;
}

double closed_form(const sim::PipelineElement& element, double memory) {
  // A word is 64 bytes.
  const sim::FpgaPipeline pipeline{.clock_hz = 1,
                                   .word_cycles = SI_WORD_CYCLES,
                                   .banks = memory > 0 ? 1u : 1000u,
                                   .bank_bytes_per_s = 64,
                                   .bank_efficiency = memory > 0 ? memory : 1};
  return sim::pipeline_cycles(pipeline, element).slowest();
}

void expect_near(const char* what, double simulated, double closed) {
  std::printf("%-40s %.4f cycles an element, closed form %.4f\n", what, simulated, closed);
  EXPECT_NEAR(simulated, closed, 0.03 * closed) << what;
}

TEST(Cycles, DenseGradients) {
  const std::vector<Word> f32 = make_gradient(base::DataType::kF32, kCount, 1, false);
  const std::vector<Word> bf16 = make_gradient(base::DataType::kBf16, kCount, 1, false);
  const GradientKernel from_f32 = dense_gradient(f32, base::DataType::kF32, kCount);
  const GradientKernel from_bf16 = dense_gradient(bf16, base::DataType::kBf16, kCount);
  for (const double memory : {0.0, 0.75, 1.0}) {
    expect_near("Adam, f32 gradient",
                simulated(make_step(kernels::UpdateRule::kAdamW, std::nullopt), from_f32, memory),
                closed_form({.planes = 3, .gradient_bytes = 4}, memory));
    expect_near(
        "Adam, bf16 gradient and weights",
        simulated(make_step(kernels::UpdateRule::kAdamW, base::DataType::kBf16), from_bf16, memory),
        closed_form({.planes = 3, .gradient_bytes = 2, .weights_bytes = 2}, memory));
    expect_near(
        "SGD, f32 gradient",
        simulated(make_step(kernels::UpdateRule::kSgdMomentum, std::nullopt), from_f32, memory),
        closed_form({.planes = 2, .gradient_bytes = 4}, memory));
  }
}

TEST(Cycles, Pairs) {
  for (const uint32_t every : {1u, 4u, 100u}) {
    std::vector<uint32_t> pairs;
    for (uint32_t i = 0; i < kCount; i += every) pairs.insert(pairs.end(), {i, 0x3f800000u});
    const std::vector<Word> memory_of_pairs = words_of(pairs.data(), 4 * pairs.size());
    Word status = 0;
    const GradientKernel kernel = [&](hls::stream<GradientWord>& out) {
      smartinf_gradient_pairs(memory_of_pairs.data(), static_cast<uint32_t>(pairs.size() / 2),
                              kCount, &status, out);
    };
    const double density = 1.0 / every;
    for (const double memory : {0.0, 0.75}) {
      expect_near(
          "Adam, pairs",
          simulated(make_step(kernels::UpdateRule::kAdam, std::nullopt), kernel, memory),
          closed_form({.planes = 3, .gradient_bytes = 8 * density, .values = density}, memory));
    }
  }
}

}  // namespace
}  // namespace smartinf::fpga
