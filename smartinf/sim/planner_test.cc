#include "smartinf/sim/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/sim/figures.h"

namespace smartinf::sim {
namespace {

using testing::HasSubstr;

Plan plan_of(std::string_view model, std::string_view machine, const StepOptions& options = {},
             bool asked = false) {
  const auto shape = model_preset(model);
  const auto built = load_machine(machine);
  EXPECT_TRUE(shape.ok() && built.ok());
  auto plan = make_plan(*shape, *built, options, asked);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return *plan;
}

TEST(Planner, RecommendsTheFastestExactWayThatFits) {
  const Plan plan = plan_of("llama3-8B", "workstation-gen5");
  ASSERT_TRUE(plan.fits);
  const Choice& best = plan.choices[plan.recommended];
  EXPECT_TRUE(best.exact);
  for (const Choice& choice : plan.choices) {
    if (choice.exact && choice.fits) {
      EXPECT_LE(best.times.total_s, choice.times.total_s);
    }
    EXPECT_GT(choice.drive_life_days, 0);
    EXPECT_GT(choice.cost_per_mtoken, 0);
  }
}

TEST(Planner, RecommendsTheWayAskedFor) {
  StepOptions options;
  options.method = Method::kSmartComp;
  for (const base::StateFormat format : {base::StateFormat::kF32, base::StateFormat::kQ8}) {
    options.format = format;  // the second is not among those that are tried anyway
    const Plan plan = plan_of("llama3-8B", "workstation-gen5", options, true);
    const Choice& marked = plan.choices[plan.recommended];
    EXPECT_EQ(marked.options.method, Method::kSmartComp);
    EXPECT_EQ(marked.options.format, format);
    const auto recipe = plan_recipe(plan);
    ASSERT_TRUE(recipe.ok());
    EXPECT_THAT(*recipe, HasSubstr("codec = \"topk\"\nratio = 0.02\nkeep_every = 16\n"));
  }
  EXPECT_THAT(*plan_recipe(plan_of("llama3-8B", "workstation-gen5")),
              testing::Not(HasSubstr("[compress]")));
}

TEST(Planner, DriveLifeIsEnduranceOverBytesWritten) {
  const Plan plan = plan_of("llama3-8B", "workstation-gen5");
  for (const Choice& choice : plan.choices) {
    const double per_step = static_cast<double>(choice.times.bytes.drive_written) / 4;
    const double steps = 1200e12 / per_step;
    EXPECT_NEAR(choice.drive_life_days / (steps * choice.times.total_s / 86400), 1.0, 1e-9);
  }
}

TEST(Planner, CostIsWhatWearsOutWhileTokensAreMade) {
  const Plan plan = plan_of("llama3-8B", "workstation-gen5");
  const Choice& best = plan.choices[plan.recommended];
  EXPECT_NEAR(best.tokens_per_s, 4 * 2048 / best.times.total_s, 1e-6);
  // Machine and GPU over four years, four drives over their life, power.
  const double per_s = (3000 + 1800) / (4 * 365 * 86400.0) +
                       4 * 250 / (best.drive_life_days * 86400) + 0.7 * 0.30 / 3600;
  EXPECT_NEAR(best.cost_per_mtoken, per_s / best.tokens_per_s * 1e6, 1e-6);
}

TEST(Planner, BuysNoGpuForAMachineWithoutOne) {
  auto machine = load_machine("workstation-gen4");
  ASSERT_TRUE(machine.ok());
  machine->gpu.name = "none";
  const auto plan = make_plan(*model_preset("llama3-1B"), *machine, {});
  ASSERT_TRUE(plan.ok());
  for (const Purchase& purchase : plan->purchases) {
    EXPECT_THAT(purchase.what, testing::Not(HasSubstr("GPU")));
  }
}

TEST(Planner, SaysByHowMuchItDoesNotFit) {
  const Plan plan = plan_of("llama3-405B", "workstation-gen4");
  EXPECT_FALSE(plan.fits);
  EXPECT_THAT(plan.choices[plan.recommended].shortfall, HasSubstr("host lacks"));
  EXPECT_THAT(plan_html(plan), HasSubstr("It does not fit"));
}

TEST(Planner, MemoryFollowsFromShapes) {
  auto machine = load_machine("workstation-gen4");
  ASSERT_TRUE(machine.ok());
  const auto model = model_preset("llama3-8B");
  const MemoryNeed need = memory_need(*model, *machine, {});
  const uint64_t p = model->parameters();
  EXPECT_EQ(need.host_bytes, 4 * p) << "16-bit weights and gradients";
  EXPECT_EQ(need.drive_bytes, 2 * 12 * ((p + 3) / 4)) << "state twice, on four drives";

  StepOptions options;
  options.method = Method::kSmartComp;
  const MemoryNeed compressed = memory_need(*model, *machine, options);
  EXPECT_EQ(compressed.host_bytes, 6 * p) << "and 16 bits of what was not sent";
  EXPECT_EQ(compressed.drive_bytes, 2 * 14 * ((p + 3) / 4)) << "which is kept there, too";
  machine->software.gradient_spilled = true;
  EXPECT_EQ(memory_need(*model, *machine, options).host_bytes, 6 * p) << "compression never spills";
  machine->gpu.name = "none";
  EXPECT_GT(memory_need(*model_preset("llama3-1B"), *machine, options).host_bytes,
            memory_need(*model_preset("llama3-1B"), *machine, {}).host_bytes +
                3 * model_preset("llama3-1B")->parameters());
}

TEST(Planner, WhatAutogradKeepsOfALayerIsWhatTorchReported) {
  ModelShape model;  // recipes/quickstart.toml
  model.hidden = 256, model.heads = 4, model.kv_heads = 2, model.head_size = 64;
  model.feed_forward = 768, model.batch = 8, model.sequence = 256;
  // Storages behind torch.autograd.graph.saved_tensors_hooks, torch 2.15 on the CPU.
  EXPECT_EQ(model.layer_saved_bytes(2), 27836416u);
  EXPECT_EQ(model.layer_saved_bytes(4), 47235072u);
}

TEST(Planner, WithoutAGpuTheWholeProcessIsCounted) {
  auto machine = load_machine("workstation-gen4");
  ASSERT_TRUE(machine.ok());
  machine->gpu.name = "none";
  machine->host.process_bytes = 500'000'000;
  machine->devices.front().count = 1;
  const ModelShape model = *model_preset("llama3-1B");
  const MemoryNeed small = memory_need(model, *machine, {});
  // Weights, autograd's gradients and the engine's, two bytes each.
  EXPECT_GT(small.host_bytes, machine->host.process_bytes + 6 * model.parameters());
  const uint64_t saved = small.host_bytes_without_checkpoints - small.host_bytes;
  // Its vocabulary is large: the peak is where the loss is, with all that was kept.
  EXPECT_EQ(saved, model.layers * (model.layer_saved_bytes(2) - model.checkpoint_bytes()));
  // Without one it is in the first layer's backward, when all gradients are there: 4 bytes of
  // weight, 4 of gradient, and 2 of the engine's.
  ModelShape deep = model;
  deep.vocabulary = 256;
  StepOptions wide;
  wide.value_bytes = 4;
  const uint64_t added = memory_need(deep, *machine, wide).host_bytes;
  ++deep.layers;
  EXPECT_EQ(memory_need(deep, *machine, wide).host_bytes, added + 10 * model.layer_parameters());
  EXPECT_EQ(memory_need(*model_preset("llama3-1B"), *load_machine("workstation-gen4"), {})
                .host_bytes_without_checkpoints,
            0u);
}

TEST(Planner, WritesARecipeForLlamaFormsOnly) {
  const auto recipe = plan_recipe(plan_of("llama3-8B", "workstation-gen5"));
  ASSERT_TRUE(recipe.ok());
  EXPECT_THAT(*recipe, HasSubstr("mlp_width = 14336"));
  EXPECT_THAT(*recipe, HasSubstr("/mnt/drive-3/smartinf"));
  EXPECT_FALSE(plan_recipe(plan_of("gpt2-4.0B", "smartssd-a5000")).ok());
}

TEST(Figures, AllOfThemHaveRowsAndThePaperPointsThatAreKnown) {
  for (const uint32_t number : figure_numbers()) {
    const auto figure = make_figure(number);
    ASSERT_TRUE(figure.ok()) << number << " " << figure.status().to_string();
    EXPECT_GE(figure->rows.size(), 9u) << number;
    for (const FigureRow& row : figure->rows) EXPECT_GT(row.value, 0) << number;
    const bool known = number == 3 || number == 9 || number == 11;
    size_t given = 0;
    for (const FigureRow& row : figure->rows) given += row.paper >= 0 ? 1 : 0;
    EXPECT_EQ(given, known ? figure->rows.size() : 0) << number;
    EXPECT_EQ(figure->basis.starts_with("simulated only"), !known) << number;
  }
  EXPECT_FALSE(make_figure(4).ok());
}

}  // namespace
}  // namespace smartinf::sim
