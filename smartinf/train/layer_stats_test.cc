#include "smartinf/train/layer_stats.h"

#include <cmath>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/test_all.h"
#include "smartinf/train/test_runs.h"

namespace smartinf::train {
namespace {

TEST(LayersOfParameters, AreTheirNamesUpToTheNumber) {
  EXPECT_EQ(layer_of("model.layers.12.self_attn.q_proj.weight"), "model.layers.12");
  EXPECT_EQ(layer_of("transformer.h.0.mlp.c_fc.bias"), "transformer.h.0");
  EXPECT_EQ(layer_of("model.layers.1.mlp.experts.7.up_proj.weight"), "model.layers.1");
  EXPECT_EQ(layer_of("model.embed_tokens.weight"), "model.embed_tokens");
  EXPECT_EQ(layer_of("scale"), "scale");
}

TEST(NormsOfLayers, AreThoseOfTheirElements) {
  plan::ParameterSpace space;
  constexpr uint64_t kMany = 100'000;
  ASSERT_TRUE(space.add("l.0.a.weight", {3}, 0).ok());
  ASSERT_TRUE(space.add("l.1.a.weight", {kMany}, 0).ok());
  ASSERT_TRUE(space.add("l.0.b.weight", {2}, 0).ok());
  ASSERT_TRUE(space.add("zero.weight", {1}, 0).ok());
  LayerStats stats(space);
  std::vector<float> before(kMany + 6, 2.0f);
  before.back() = 0;
  std::vector<float> after = before;
  for (float& weight : after) weight += 0.5f;
  for (int step = 1; step <= 2; ++step) {  // the second one does not add to the first
    stats.begin();
    // Cut within parameters, the later part first.
    stats.add_weights(4, std::span(before).subspan(4));
    stats.add_weights(0, std::span(before).first(4));
    stats.add_gradient(kMany + 3, torch::tensor({6.0f, 8.0f}));
    stats.add_gradient(3, torch::ones({100, kMany / 100}).t());
    stats.add_gradient(0, torch::zeros({3}));
    stats.add_updated_weights(0, after);
    const auto line = nlohmann::json::parse(stats.to_json(7, 0.5));
    EXPECT_EQ(line["step"], 7);
    const nlohmann::json& layers = line["layers"];
    EXPECT_EQ(layers.size(), 3u);
    EXPECT_EQ(layers["l.0"]["gradient_norm"], 5.0);
    EXPECT_DOUBLE_EQ(layers["l.0"]["weight_norm"], std::sqrt(20.0));
    EXPECT_DOUBLE_EQ(layers["l.0"]["update_ratio"], 0.25);
    EXPECT_DOUBLE_EQ(layers["l.1"]["gradient_norm"], 0.5 * std::sqrt(kMany));
    EXPECT_DOUBLE_EQ(layers["l.1"]["weight_norm"], 2 * std::sqrt(kMany));
    EXPECT_DOUBLE_EQ(layers["l.1"]["update_ratio"], 0.25);
    EXPECT_TRUE(layers["zero"]["update_ratio"].is_null());
  }
}

/// Rows of layers in a run's log, by step.
std::map<uint64_t, nlohmann::json> layer_rows(const Job& job) {
  std::map<uint64_t, nlohmann::json> rows;
  std::ifstream log(job.options.train.run + "/log.jsonl");
  for (std::string text; std::getline(log, text);) {
    const auto line = nlohmann::json::parse(text);
    if (line.contains("layers")) rows[line["step"].get<uint64_t>()] = line["layers"];
  }
  return rows;
}

double whole_norm(const nlohmann::json& layers) {
  double squares = 0;
  for (const auto& layer : layers) squares += std::pow(layer["gradient_norm"].get<double>(), 2);
  return std::sqrt(squares);
}

/// All units but the embedding come from the devices.
plan::TrainingPlan streamed_plan(const Options& options) {
  plan::TrainingPlan plan;
  plan.placement = {1, 1, 3, 0};
  plan.recompute = plan.streams = true;
  plan.gradient_memory_bytes = ~uint64_t{0};
  plan.input_bytes = 2 * options.data.sequence * options.model.width;
  plan.inputs_in_memory = uint64_t{options.model.layers + 1} * options.train.accumulation;
  return plan;
}

/// A run with norms of layers every second step beside the same run without.
void expect_same_bits(const TestRuns& runs, const std::string& name, Overlap overlap,
                      bool streams) {
  SCOPED_TRACE(name);
  Job plain = runs.job(name, 6, 6, 2);
  plain.options.train.accumulation = 2;
  plain.options.train.overlap = overlap;
  plain.updater.gradient_type = base::DataType::kF32;
  if (streams) plain.plan = streamed_plan(plain.options);
  Job measured = runs.job(name + "-layers", 6, 6, 2);
  measured.options.train.accumulation = 2;
  measured.options.train.overlap = overlap;
  measured.options.train.layer_stats_every = 2;
  measured.updater.gradient_type = base::DataType::kF32;
  measured.plan = plain.plan;
  const Outcome expected = runs.train(plain);
  const Outcome made = runs.train(measured);
  EXPECT_EQ(made.described.find("come from the devices") != std::string::npos, streams);
  EXPECT_EQ(made.losses, expected.losses);
  EXPECT_EQ(made.norms, expected.norms);
  EXPECT_TRUE(same_bits(made.state, expected.state));
  EXPECT_TRUE(layer_rows(plain).empty());
  const auto rows = layer_rows(measured);
  ASSERT_EQ(rows.size(), 3u);
  for (const auto& [step, layers] : rows) {
    EXPECT_EQ(step % 2, 0u);
    EXPECT_EQ(layers.size(), 8u);  // the embedding, six layers, the norm
    EXPECT_NEAR(whole_norm(layers), made.norms[step - 1], 1e-9 * made.norms[step - 1]);
    // Adam changes an element by about the learning rate, 3e-3; weights begin at about 0.02.
    EXPECT_GT(layers["model.layers.1"]["update_ratio"], 1e-3);
    EXPECT_LT(layers["model.layers.1"]["update_ratio"], 1.0);
  }
}

TEST(NormsOfLayers, ChangeNoBitOfARunAndAddUpToTheNormOfAll) {
  const TestRuns runs;
  expect_same_bits(runs, "early", Overlap::kEarly, /*streams=*/false);
  expect_same_bits(runs, "streamed-late", Overlap::kLate, /*streams=*/true);
  if (!base::test_all()) return;
  expect_same_bits(runs, "late", Overlap::kLate, /*streams=*/false);
  expect_same_bits(runs, "streamed-none", Overlap::kNone, /*streams=*/true);
}

}  // namespace
}  // namespace smartinf::train
