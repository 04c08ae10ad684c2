#include "smartinf/sim/planner.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/plan/memory_plan.h"

namespace smartinf::sim {
namespace {

using testing::HasSubstr;

using plan::TrainingProgram;

/// With micro batches of one sequence, as who is short of memory trains.
Plan plan_of(std::string_view model, std::string_view machine, const PlanRequest& request = {},
             std::string_view gpu = "") {
  auto shape = model_preset(model);
  auto built = load_machine(machine);
  EXPECT_TRUE(shape.ok() && built.ok());
  shape->batch = 1;
  if (!gpu.empty()) built->gpu = *gpu_preset(gpu);
  auto plan = make_plan(*shape, *built, request);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return *plan;
}

TEST(Planner, RecommendsTheFastestExactOptionThatFits) {
  const Plan plan = plan_of("llama3-8B", "workstation-gen5");
  ASSERT_TRUE(plan.fits);
  const PlanOption& best = plan.options[plan.recommended];
  EXPECT_TRUE(best.exact);
  for (const PlanOption& choice : plan.options) {
    if (choice.exact && choice.fits) {
      EXPECT_LE(best.times.total_s, choice.times.total_s);
    }
    EXPECT_GT(choice.drive_life_days, 0);
    EXPECT_GT(choice.cost_per_mtoken, 0);
  }
}

TEST(Planner, RecommendsTheOptionAskedFor) {
  PlanRequest request;
  request.requested = true;
  request.options.method = Method::kSmartComp;
  for (const base::StateFormat format : {base::StateFormat::kF32, base::StateFormat::kQ8}) {
    request.options.format = format;  // the second is not among those that are tried anyway
    const Plan plan = plan_of("llama3-8B", "workstation-gen5", request, "H100");
    const PlanOption& marked = plan.options[plan.recommended];
    EXPECT_EQ(marked.options.method, Method::kSmartComp);
    EXPECT_EQ(marked.options.format, format);
    const auto recipe = plan_recipe(plan);
    ASSERT_TRUE(recipe.ok());
    EXPECT_THAT(*recipe, HasSubstr("density = 0.08\nresidual_every = 16\n"));
  }
  EXPECT_THAT(*plan_recipe(plan_of("llama3-8B", "workstation-gen5", {}, "H100")),
              testing::Not(HasSubstr("[compress]")));
}

TEST(Planner, DriveLifeIsEnduranceOverBytesWritten) {
  const Plan plan = plan_of("llama3-8B", "workstation-gen5");
  for (const PlanOption& choice : plan.options) {
    const double per_step = static_cast<double>(choice.times.bytes.drive_written) / 4;
    const double steps = 1200e12 / per_step;
    EXPECT_NEAR(choice.drive_life_days / (steps * choice.times.total_s / 86400), 1.0, 1e-9);
  }
}

TEST(Planner, CostIsWhatWearsOutWhileTokensAreMade) {
  const Plan plan = plan_of("llama3-8B", "workstation-gen5");
  const PlanOption& best = plan.options[plan.recommended];
  EXPECT_NEAR(best.tokens_per_s, 2048 / best.times.total_s, 1e-6);
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
  for (const PlanOption& choice : plan->options) EXPECT_NE(choice.times.bound_by, "GPU");
  for (const Purchase& purchase : plan->purchases) {
    EXPECT_THAT(purchase.what, testing::Not(HasSubstr("GPU")));
  }
}

TEST(Planner, SaysByHowMuchItDoesNotFit) {
  const Plan plan = plan_of("llama3-405B", "workstation-gen4");
  EXPECT_FALSE(plan.fits);
  EXPECT_THAT(plan.options[plan.recommended].shortfall, HasSubstr("host memory lacks"));
  EXPECT_THAT(plan_result(plan).headline, HasSubstr("It does not fit"));
  // Memory lacks: nothing that would only make it faster is offered.
  ASSERT_FALSE(plan.purchases.empty());
  for (const Purchase& purchase : plan.purchases) EXPECT_EQ(purchase.step_s, 0) << purchase.what;
  EXPECT_THAT(plan.purchases[0].what, HasSubstr("a GPU with memory of"));
  ASSERT_EQ(plan.fitting.size(), 1u);
  EXPECT_THAT(plan.fitting[0], HasSubstr("of the 126 layers"));
}

TEST(Planner, CountsWhatPythonHoldsAndNamesWhatFits) {
  PlanRequest request;
  request.program = TrainingProgram::kPython;
  const Plan python = plan_of("llama3-8B", "workstation-gen4", request);
  EXPECT_TRUE(python.fits) << plan_result(python).text();
  EXPECT_TRUE(python.use.release_gradients);
  ASSERT_EQ(python.uses.size(), 3u);
  EXPECT_THAT(python.uses[0].shortfall, HasSubstr("GPU memory lacks"))
      << "24 GB do not hold 16 GB of weights and 16 GB of gradients";
  EXPECT_GT(python.uses[0].need.gpu_bytes, 4 * python.model.parameters());
  EXPECT_THAT(plan_result(python).text(), HasSubstr("It fits, with Python, release_gradients"));
  // Too large a micro batch is named, too.
  ModelShape wide = python.model;
  wide.batch = 8;
  const auto too_wide = make_plan(wide, python.machine, request);
  ASSERT_TRUE(too_wide.ok());
  EXPECT_FALSE(too_wide->fits);
  EXPECT_THAT(plan_result(*too_wide).text(),
              HasSubstr("It would fit with Python, release_gradients=True, a micro batch of "));
}

TEST(Planner, TrainStreamsWhatDoesNotStay) {
  PlanRequest request;
  request.options.accumulation = 8;
  const Plan plan = plan_of("llama3-8B", "workstation-gen4", request);
  ASSERT_TRUE(plan.fits) << plan_result(plan).text();
  EXPECT_EQ(plan.use.program, TrainingProgram::kTrain);
  const PlanOption& best = plan.best();
  const MemoryNeed& need = best.need;
  ASSERT_TRUE(need.plan.streams);
  ASSERT_EQ(need.units.size(), 18u) << "two layers each";
  EXPECT_LE(need.gpu_bytes, plan.machine.gpu.memory_bytes);
  EXPECT_LE(need.host_bytes, plan.machine.host.memory_bytes);
  ASSERT_NE(best.options.streamed(), nullptr);
  EXPECT_EQ(best.options.streamed()->placement.in_memory, need.plan.placement.in_memory);
  EXPECT_THAT(plan_result(plan).headline, HasSubstr("4 of 18 units from the host's memory"));
  // Methods that cannot stream do not fit.
  for (const PlanOption& option : plan.options) {
    const bool can =
        option.options.method == Method::kSmart || option.options.method == Method::kSmartOver;
    EXPECT_EQ(option.fits, can) << option.label;
  }
}

TEST(Planner, ALittleMemoryLeavesMoreToTheDevices) {
  auto machine = *load_machine("workstation-gen4");
  ModelShape model = *model_preset("llama3-8B");
  model.batch = 1;
  const uint64_t p = model.parameters();
  const MemoryNeed wide = memory_need(model, machine, {}, {});
  EXPECT_EQ(wide.units_from_devices(), 0u);
  EXPECT_EQ(wide.units_from_host(), 0u) << "gradients leave unit by unit: all weights have room";
  EXPECT_FALSE(wide.plan.streams);
  machine.host.memory_bytes = 16'000'000'000;
  const MemoryNeed tight = memory_need(model, machine, {}, {});
  EXPECT_GT(tight.units_from_devices(), 0u);
  EXPECT_LE(tight.host_bytes, machine.host.memory_bytes);
  EXPECT_EQ(tight.drive_bytes, (2 * 12 + 2) * ((p + 3) / 4) + (tight.plan.spool_bytes + 3) / 4)
      << "state twice, spilled gradients, spool";
  EXPECT_TRUE(shortfall_of(tight, machine, {}, {}).empty());
  machine.host.memory_bytes = 4'000'000'000;
  const MemoryNeed least = memory_need(model, machine, {}, {});
  EXPECT_GT(least.host_bytes, machine.host.memory_bytes);
  EXPECT_EQ(least.units_from_devices(), least.units.size()) << "the smallest plan";
  EXPECT_THAT(shortfall_of(least, machine, {}, {}), HasSubstr("host memory lacks"));
}

TEST(Planner, ARecipeMakesTrainPlanTheSame) {
  auto machine = *load_machine("workstation-gen4");
  machine.host.memory_bytes = 16'000'000'000;
  ModelShape model = *model_preset("llama3-8B");
  model.batch = 1;
  const auto plan = make_plan(model, machine, {});
  ASSERT_TRUE(plan.ok() && plan->fits);
  const auto recipe = plan_recipe(*plan);
  ASSERT_TRUE(recipe.ok());
  EXPECT_THAT(*recipe, HasSubstr("[memory]\nhost = 16000000000\naccelerator = 24000000000\n"
                                 "activations = \"recompute\"\n"));
  EXPECT_THAT(*recipe, HasSubstr(fmt::format("[engine]\ngradient_budget = {}\n",
                                             plan->best().need.plan.gradient_memory_bytes)));
  EXPECT_THAT(*recipe, HasSubstr(streamed_text(plan->best().need)));
}

TEST(Planner, AccumulationSharesOneUpdateAmongMoreTokens) {
  PlanRequest request;
  const Plan one = plan_of("llama3-8B", "workstation-gen4", request, "H100");
  request.options.accumulation = 256;
  const Plan many = plan_of("llama3-8B", "workstation-gen4", request, "H200");
  const PlanOption& often = one.options[one.recommended];
  const PlanOption& seldom = many.options[many.recommended];
  EXPECT_EQ(seldom.times.bytes.drive_written, often.times.bytes.drive_written);
  EXPECT_NEAR(seldom.tokens_per_s, 256 * 2048 / seldom.times.total_s, 1e-6);
  EXPECT_GT(seldom.tokens_per_s, 1.5 * often.tokens_per_s);
  EXPECT_GT(seldom.drive_life_days, 1.5 * often.drive_life_days);
  EXPECT_THAT(*plan_recipe(many), HasSubstr("accumulation = 256\n"));
  EXPECT_EQ(seldom.need.gpu_bytes, often.need.gpu_bytes + 4 * one.model.parameters())
      << "sums in f32";
}

TEST(Planner, OverlapsAsTheProgramDoes) {
  using plan::Overlap;
  const Plan train = plan_of("llama3-8B", "workstation-gen5", {}, "H100");
  ASSERT_EQ(train.use.program, TrainingProgram::kTrain);
  for (const PlanOption& option : train.options) {
    EXPECT_EQ(option.options.overlap, Overlap::kLate) << option.label;
    EXPECT_NE(option.options.resident(), nullptr);
  }
  ASSERT_EQ(train.overlaps.size(), 3u);
  for (size_t i = 0; i + 1 < train.overlaps.size(); ++i) {
    EXPECT_LT(train.overlaps[i + 1].second, train.overlaps[i].second);
  }
  EXPECT_EQ(train.overlaps[1].second, train.best().times.total_s);
  EXPECT_THAT(plan_result(train).text(), HasSubstr("With \"early\" it takes "));
  EXPECT_THAT(*plan_recipe(train), testing::Not(HasSubstr("overlap")));

  PlanRequest request;
  request.overlap = Overlap::kEarly;
  const Plan early = plan_of("llama3-8B", "workstation-gen5", request, "H100");
  EXPECT_EQ(early.best().options.overlap, Overlap::kEarly);
  EXPECT_THAT(*plan_recipe(early), HasSubstr("overlap = \"early\"\n"));
  for (const PlanOption& option : early.options) {
    const bool compressed = option.options.method == Method::kSmartComp;
    EXPECT_EQ(option.options.overlap, compressed ? Overlap::kLate : Overlap::kEarly);
  }
  // The Python package has to be asked, and for early updates to release gradients.
  request.program = TrainingProgram::kPython;
  EXPECT_EQ(plan_of("llama3-8B", "workstation-gen5", request, "H100").best().options.overlap,
            Overlap::kLate);
  request.overlap.reset();
  const Plan python = plan_of("llama3-8B", "workstation-gen5", request, "H100");
  EXPECT_EQ(python.best().options.overlap, Overlap::kNone);
  EXPECT_THAT(plan_result(python).text(), HasSubstr("overlap=\"late\", model=model"));
}

TEST(Planner, SaysWhenDrivesDieSoon) {
  const Plan plan = plan_of("llama3-8B", "workstation-gen4");
  const double days = plan.options[plan.recommended].drive_life_days;
  ASSERT_GT(days, 2);
  ASSERT_LT(days, kFewDays);
  EXPECT_THAT(plan_result(plan).text(), HasSubstr("wears the drives out in "));
  EXPECT_TRUE(wears_soon(plan.best()));
  EXPECT_EQ(drive_life_text(0), "-");
  EXPECT_EQ(drive_life_text(0.5), "12 hours");
  EXPECT_EQ(drive_life_text(7.2), "7 days");
  EXPECT_EQ(drive_life_text(3650), "10.0 years");
}

TEST(Planner, MemoryFollowsFromShapes) {
  auto machine = load_machine("workstation-gen4");
  ASSERT_TRUE(machine.ok());
  machine->gpu = *gpu_preset("H200");
  const auto model = model_preset("llama3-8B");
  const MemoryNeed need = memory_need(*model, *machine, {}, {});
  const uint64_t p = model->parameters();
  // Weights and the engine's gradients, 16 bit each, its budget and the process.
  EXPECT_GT(need.host_bytes, 4 * p);
  EXPECT_LT(need.host_bytes, 4 * p + 5'000'000'000);
  EXPECT_EQ(need.drive_bytes, 2 * 12 * ((p + 3) / 4)) << "state twice, on four drives";

  StepOptions options;
  options.method = Method::kSmartComp;
  const MemoryNeed compressed = memory_need(*model, *machine, options, {});
  // And 16 bits of what was not sent, which six slots of four devices hold, too.
  EXPECT_EQ(compressed.host_bytes,
            need.host_bytes + 2 * p + 4 * 6 * 2 * plan::kSubgroupElementsMax);
  EXPECT_EQ(compressed.drive_bytes, 2 * 14 * ((p + 3) / 4)) << "which is kept there, too";
  machine->software.gradient_spilled = true;
  EXPECT_EQ(memory_need(*model, *machine, options, {}).host_bytes, compressed.host_bytes)
      << "compression never spills";
}

TEST(Planner, WithoutAGpuTheWholeProcessIsCounted) {
  auto machine = load_machine("workstation-gen4");
  ASSERT_TRUE(machine.ok());
  machine->gpu.name = "none";
  machine->host.process_bytes = 500'000'000;
  machine->devices.front().count = 1;
  const ModelShape model = *model_preset("llama3-1B");
  TrainingUse kept;
  kept.recompute = false;
  const MemoryNeed small = memory_need(model, *machine, {}, {});
  EXPECT_EQ(small.gpu_bytes, 0u);
  // Weights and the engine's gradients, two bytes each.
  EXPECT_GT(small.host_bytes, machine->host.process_bytes + 4 * model.parameters());
  const uint64_t saved = memory_need(model, *machine, {}, kept).host_bytes - small.host_bytes;
  // With all kept the peak is in the head, else in the last layer's backward.
  const uint64_t of_layer = layer_saved_bytes(model.training_model(), TrainingProgram::kTrain, 2);
  EXPECT_GT(saved, (model.layers - 1) * of_layer);
  EXPECT_LT(saved, model.layers * of_layer);
  // Another layer takes for each parameter 4 bytes of weight and 4 of the engine's gradients, and
  // its input.
  ModelShape deep = model;
  deep.vocabulary = 256;
  ASSERT_TRUE(complete_model(deep).ok());
  StepOptions wide;
  wide.value_bytes = 4;
  const uint64_t added = memory_need(deep, *machine, wide, {}).host_bytes;
  ++deep.layers;
  ASSERT_TRUE(complete_model(deep).ok());
  EXPECT_EQ(memory_need(deep, *machine, wide, {}).host_bytes,
            added + 8 * model.layer_parameters() + 4 * deep.batch * deep.sequence * deep.hidden);
}

TEST(Planner, RecipesHaveEveryKeyOfTheModel) {
  const auto recipe = plan_recipe(plan_of("llama3-8B", "workstation-gen5", {}, "H100"));
  ASSERT_TRUE(recipe.ok()) << recipe.status().to_string();
  EXPECT_THAT(*recipe, HasSubstr("[model]\nlayers = 32\nwidth = 4096\nheads = 32\nkv_heads = 8\n"
                                 "mlp_width = 14336\nvocabulary = 128256\ntied_head = false\n"
                                 "rope_base = 500000\nnorm_eps = 1e-05\ninit_std = 0.02\n"));
  EXPECT_THAT(*recipe, HasSubstr("/mnt/drive-3/smartinf"));
  EXPECT_THAT(*recipe, testing::Not(HasSubstr("hidden")));
}

ModelShape of_config(const std::string& more) {
  auto model = model_from_hf_config(R"({"hidden_size": 64, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
      "intermediate_size": 128)" + more +
                                        "}",
                                    "config.json");
  EXPECT_TRUE(model.ok()) << model.status().to_string();
  return *model;
}

TEST(Planner, ARecipeTakesWhatItsKeysCannotSayFromAFolder) {
  for (const char* model : {"qwen3-0.6B", "qwen2.5-0.5B", "llama3-1B", "gpt2-0.12B"}) {
    const Plan plan = plan_of(model, "workstation-gen5");
    EXPECT_EQ(plan.use.program, TrainingProgram::kTrain) << model;
    const auto recipe = plan_recipe(plan);
    ASSERT_TRUE(recipe.ok()) << recipe.status().to_string();
    EXPECT_THAT(*recipe, HasSubstr("[model]\nfrom = \"model\"")) << model;
    EXPECT_THAT(*recipe, testing::Not(HasSubstr("layers ="))) << model;
  }
  ModelShape folder = of_config(R"(, "model_type": "llama")");
  EXPECT_TRUE(keys_say(folder));
  folder.folder = "/models/it";
  const auto recipe = plan_recipe(*make_plan(folder, *load_machine("workstation-gen5"), {}));
  ASSERT_TRUE(recipe.ok());
  EXPECT_THAT(*recipe, HasSubstr("[model]\nfrom = \"/models/it\"\n"));
  EXPECT_THAT(*recipe, HasSubstr("paths = [\"chats.jsonl\"]"));
}

TEST(Planner, TheTrainersReaderSaysWhatTrainTakes) {
  const ModelShape plain = of_config(
      R"(, "model_type": "llama", "rope_theta": 5e5, "rms_norm_eps": 1e-6,
      "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "initializer_range": 0.01)");
  EXPECT_TRUE(check_train_can(plain).ok());
  EXPECT_TRUE(keys_say(plain));
  for (const char* more :
       {R"(, "model_type": "llama", "attention_bias": true)",
        R"(, "model_type": "mistral", "sliding_window": 4096)",
        R"(, "model_type": "llama", "hidden_act": "gelu")", R"(, "model_type": "gemma2")",
        R"(, "model_type": "llama", "head_dim": 32)"}) {
    EXPECT_TRUE(check_train_can(of_config(more)).ok()) << more;
    EXPECT_FALSE(keys_say(of_config(more))) << more;
  }
  for (const auto& [more, what] :
       {std::pair{R"(, "model_type": "llama", "rope_scaling": {"type": "longrope"})", "longrope"},
        {R"(, "model_type": "phi3")", "model_type is \"phi3\""},
        {R"(, "model_type": "qwen2_moe", "num_experts": 4)", "qwen2_moe"}}) {
    EXPECT_THAT(check_train_can(of_config(more)).what(), HasSubstr(what));
    const auto plan = make_plan(of_config(more), *load_machine("workstation-gen5"), {});
    ASSERT_TRUE(plan.ok());
    EXPECT_EQ(plan->use.program, TrainingProgram::kPython) << more;
    EXPECT_EQ(plan_recipe(*plan).status().code(), base::ErrorCode::kUnsupported);
  }
}

/// A workstation with 64 GB and two drives.
Machine small_machine() {
  Machine machine = *load_machine("workstation-gen4");
  machine.host.memory_bytes = 64'000'000'000;
  machine.devices.front().count = 2;
  return machine;
}

TEST(Planner, SaysThatItFitsWhereAProgramHoldsIt) {
  PlanRequest request;
  request.options.accumulation = 16;
  for (const auto& [name, accumulation] :
       {std::pair{"qwen3-8B", 16}, {"qwen3-14B", 4}, {"llama3-8B", 16}}) {
    ModelShape model = *model_preset(name);
    model.batch = 1;
    request.options.accumulation = static_cast<uint32_t>(accumulation);
    const auto plan = make_plan(model, small_machine(), request);
    ASSERT_TRUE(plan.ok());
    EXPECT_TRUE(plan->fits) << plan_result(*plan).text();
    EXPECT_EQ(use_name(plan->use), "smartinf train");
    EXPECT_TRUE(plan_recipe(*plan).ok());
    request.program = TrainingProgram::kPython;
    const auto python = make_plan(model, small_machine(), request);
    ASSERT_TRUE(python.ok());
    EXPECT_TRUE(python->fits) << name << plan_result(*python).text();
    const UseNeed& streamed = python->uses.back();
    EXPECT_EQ(use_name(streamed.use), "Python, streamed");
    EXPECT_TRUE(streamed.shortfall.empty()) << name << streamed.shortfall;
    EXPECT_GT(streamed.need.memory_budget, 0u);
    EXPECT_LT(streamed.need.memory_budget, streamed.need.host_bytes);
    EXPECT_LE(streamed.need.host_bytes, small_machine().host.memory_bytes);
    request.program.reset();
  }
}

TEST(Planner, AGradientBudgetIsFoundWhereHostMemoryLacks) {
  PlanRequest request;
  request.program = TrainingProgram::kPython;
  request.options.accumulation = 16;
  ModelShape model = *model_preset("llama3-8B");
  model.batch = 1;
  model.sequence = 2048;
  const auto plan = make_plan(model, small_machine(), request);
  ASSERT_TRUE(plan.ok());
  // docs/finetune.md: 50.7 GB with 2 GB of gradients, and 2 to 4 GB for the process.
  EXPECT_THAT(use_name(plan->use), HasSubstr("release_gradients=True, gradient_budget="));
  const MemoryNeed& need = plan->best().need;
  EXPECT_LE(need.host_bytes, small_machine().host.memory_bytes);
  EXPECT_LT(need.plan.gradient_memory_bytes, 2 * model.parameters());
  EXPECT_EQ(need.plan.gradient_memory_bytes, plan->use.gradient_budget);
  EXPECT_NEAR(static_cast<double>(need.host_bytes - need.plan.gradient_memory_bytes) / 1e9, 51,
              1.5);
  // The rest is written and read again.
  const uint64_t spilled = 2 * model.parameters() - need.plan.gradient_memory_bytes;
  EXPECT_NEAR(static_cast<double>(plan->best().times.bytes.drive_written),
              static_cast<double>(12 * model.parameters() + spilled), 1e6);
  EXPECT_EQ(need.drive_bytes, (2 * 12 + 2) * ((model.parameters() + 1) / 2));
}

TEST(Planner, MemoryOfManyExpertsIsThatOfAll) {
  const ModelShape mixtral = of_config(R"(, "model_type": "mixtral", "num_local_experts": 64,
      "num_experts_per_tok": 2)");
  for (const bool train : {true, false}) {
    TrainingUse use;
    use.program = train ? TrainingProgram::kTrain : TrainingProgram::kPython;
    const MemoryNeed need = memory_need(mixtral, *load_machine("workstation-gen4"), {}, use);
    EXPECT_EQ(need.gpu_parts.front().bytes, 2 * mixtral.parameters());
    EXPECT_GE(need.drive_bytes, 24 * mixtral.parameters() / 4);
  }
}

TEST(Planner, WhatWearsLessStandsBesideAShortLife) {
  const Plan plan = plan_of("llama3-8B", "workstation-gen4");
  ASSERT_LT(plan.best().drive_life_days, kYearDays);
  ASSERT_GE(plan.wear_less.size(), 3u);
  for (const WearLess& one : plan.wear_less) {
    EXPECT_GT(one.drive_life_days, plan.best().drive_life_days) << one.how;
    EXPECT_THAT(plan_result(plan).text(),
                HasSubstr(one.how + " in " + drive_life_text(one.drive_life_days)));
  }
  EXPECT_THAT(plan.wear_less.back().how, testing::StartsWith("accumulation "));
}

TEST(Planner, CountsAreInWordsThatFitThem) {
  EXPECT_EQ(parameters_text(of_config(R"(, "model_type": "llama")")), "0.12 million parameters");
  EXPECT_EQ(parameters_text(*model_preset("llama3-8B")), "8.03 billion parameters");
  EXPECT_THAT(parameters_text(of_config(R"(, "model_type": "mixtral", "num_local_experts": 8)")),
              testing::EndsWith(" million of them for each token"));
}

}  // namespace
}  // namespace smartinf::sim
