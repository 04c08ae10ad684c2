#include "smartinf/sim/model_shape.h"

#include <charconv>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::sim {
namespace {

using testing::HasSubstr;

TEST(ModelShape, PresetsHaveTheSizeTheyAreNamedAfter) {
  for (const std::string_view name : model_preset_names()) {
    const auto model = model_preset(name);
    ASSERT_TRUE(model.ok());
    ASSERT_TRUE(check_model(*model).ok()) << name;
    EXPECT_EQ(model->space().count(), model->parameters()) << name;
    const size_t dash = name.find('-');
    double billions = 0;
    std::from_chars(name.data() + dash + 1, name.data() + name.size(), billions);
    // Names round; Qwen's and Llama's own count loosely (Llama 3.2 "1B" has 1.24e9).
    const bool loose = name.starts_with("llama") || name.starts_with("qwen");
    EXPECT_NEAR(static_cast<double>(model->parameters()) / 1e9 / billions, 1.0, loose ? 0.25 : 0.05)
        << name;
  }
}

TEST(ModelShape, CountsKnownModelsExactly) {
  // Counts of the published checkpoints.
  EXPECT_EQ(model_preset("llama3-8B")->parameters(), 8030261248u);
  EXPECT_EQ(model_preset("llama3-70B")->parameters(), 70553706496u);
  EXPECT_EQ(model_preset("gpt2-0.12B")->parameters(), 124439808u);
}

TEST(ModelShape, PresetsAreThePublishedModels) {
  EXPECT_EQ(model_preset("qwen3-8B")->parameters(), 8190735360u) << "norms of query and key";
  EXPECT_EQ(model_preset("qwen2.5-0.5B")->parameters(), 494032768u) << "biases";
  for (const std::string_view name : model_preset_names()) {
    const auto model = model_preset(name);
    const bool taken =
        name.starts_with("llama") || name.starts_with("qwen") || name.starts_with("gpt2");
    EXPECT_EQ(model->architecture.has_value(), taken) << name;
    if (taken) {
      EXPECT_EQ(model->units().back().end(), model->parameters()) << name;
    }
  }
}

/// The trainer's own list of parameters and the counts for planning agree where both know a model.
TEST(ModelShape, CountsWhatTheTrainerHas) {
  for (const char* config :
       {R"("model_type": "llama", "attention_bias": true, "mlp_bias": true)",
        R"("model_type": "mistral", "sliding_window": 8)", R"("model_type": "qwen2")",
        R"("model_type": "qwen3", "head_dim": 32)", R"("model_type": "gemma2")",
        R"("model_type": "gemma3_text", "head_dim": 32)",
        R"("model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2)",
        R"("model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 48)"}) {
    const auto model = model_from_hf_config(
        fmt::format(R"({{"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 200, {}}})",
                    config),
        "config.json");
    ASSERT_TRUE(model.ok()) << model.status().to_string();
    ASSERT_TRUE(model->architecture.has_value()) << model->train_lacks.to_string();
    EXPECT_EQ(model->parameters(), model->units().back().end()) << config;
    EXPECT_EQ(model->space().count(), model->parameters()) << config;
    EXPECT_EQ(model->with_layers(2).parameters(), model->with_layers(2).units().back().end());
  }
}

TEST(ModelShape, ATokenGoesThroughSomeExperts) {
  const auto with = [](int used) {
    return *model_from_hf_config(
        fmt::format(R"({{"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
            "vocab_size": 200, "num_local_experts": 8, "num_experts_per_tok": {}}})",
                    used),
        "config.json");
  };
  EXPECT_EQ(with(2).parameters(), with(8).parameters());
  EXPECT_EQ(with(2).active_parameters() + 6 * 3 * 64 * 96, with(8).active_parameters());
  EXPECT_LT(with(2).layer_forward_flops(), with(8).layer_forward_flops());
}

TEST(ModelShape, FindsTheNearestName) {
  EXPECT_THAT(model_preset("gpt2-16.7B").status().to_string(), HasSubstr("gpt2-16.6B"));
  EXPECT_TRUE(model_preset("GPT2-4.0b").ok());
  EXPECT_TRUE(model_preset("gpt2-33B").ok());
}

TEST(ModelShape, ReadsHuggingFaceConfigs) {
  const auto llama = model_from_hf_config(R"({"model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false,
    "max_position_embeddings": 8192})",
                                          "config.json");
  ASSERT_TRUE(llama.ok()) << llama.status().to_string();
  EXPECT_EQ(llama->parameters(), model_preset("llama3-8B")->parameters());
  const auto gpt2 = model_from_hf_config(
      R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
          "n_positions": 1024})",
      "config.json");
  ASSERT_TRUE(gpt2.ok());
  EXPECT_EQ(gpt2->parameters(), 124439808u);
}

TEST(ModelShape, SaysWhatIsWrongWithAConfig) {
  const auto failure = [](const std::string& text) {
    const auto model = model_from_hf_config(text, "config.json");
    EXPECT_FALSE(model.ok());
    return model.ok() ? std::string() : model.status().to_string();
  };
  EXPECT_THAT(failure("{"), HasSubstr("not a JSON object"));
  EXPECT_THAT(failure(R"({"hidden_size": 64})"), HasSubstr("model_type is \"\""));
  EXPECT_THAT(failure(R"({"model_type": "new"})"), HasSubstr("model_type is \"new\""));
  EXPECT_THAT(failure(R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
                         "vocab_size": 100})"),
              HasSubstr("num_hidden_layers"));
  EXPECT_THAT(failure(R"({"model_type": "llama", "hidden_size": "64", "num_hidden_layers": 2})"),
              HasSubstr("hidden_size or n_embd or d_model: expected a whole number"));
  EXPECT_THAT(failure(R"({"model_type": "llama", "hidden_size": 4194304, "num_attention_heads": 4,
                         "vocab_size": 100, "num_hidden_layers": 65536,
                         "intermediate_size": 4194304})"),
              HasSubstr("above 1e15 parameters"));
  EXPECT_THAT(failure(
                  R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 6,
                         "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 100,
                         "intermediate_size": 96})"),
              HasSubstr("do not divide"));
  EXPECT_THAT(failure(
                  R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 3,
                         "vocab_size": 100})"),
              HasSubstr("head_dim is missing"));
  EXPECT_THAT(failure(
                  R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4})"),
              HasSubstr("vocab_size: expected a whole number"));
}

}  // namespace
}  // namespace smartinf::sim
