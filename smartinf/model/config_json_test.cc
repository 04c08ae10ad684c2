#include "smartinf/model/config_json.h"

#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "smartinf/model/config_counts.h"

namespace smartinf::model {
namespace {

using base::ErrorCode;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Json = nlohmann::ordered_json;

Json small(const std::string& type) {
  if (type == "gpt2") {
    return {{"model_type", type}, {"vocab_size", 99}, {"n_layer", 2}, {"n_embd", 8}, {"n_head", 2}};
  }
  Json config = {{"model_type", type},       {"vocab_size", 99},        {"hidden_size", 16},
                 {"intermediate_size", 24},  {"num_hidden_layers", 3},  {"head_dim", 4},
                 {"num_attention_heads", 4}, {"num_key_value_heads", 2}};
  if (type == "mixtral") config["num_local_experts"] = 3;
  if (type == "qwen3_moe") config["num_experts"] = 3, config["moe_intermediate_size"] = 8;
  if (type == "mixtral" || type == "qwen3_moe") config["num_experts_per_tok"] = 2;
  return config;
}

base::Result<Config> read(const std::string& type, const Json& changes = Json::object(),
                          const std::vector<std::string>& ignored = {}) {
  Json config = small(type);
  config.update(changes);
  return read_config(config.dump(), "m/config.json", ignored, "--known");
}

Architecture architecture(const std::string& type, const Json& changes = Json::object()) {
  const auto config = read(type, changes);
  EXPECT_TRUE(config.ok()) << config.status().to_string();
  return config.ok() ? config->architecture : Architecture();
}

/// Where it is refused: why; empty where it is not.
std::string refusal(const std::string& type, const Json& changes) {
  return read(type, changes).status().to_string();
}

TEST(Config, WhatTheClassDoesNotKnowChangesNothingAndIsNamed) {
  const auto config = read("llama", {{"_model_name_or_path", "a/b"},
                                     {"unk_token_id", 0},
                                     {"rope_interleaved", true},
                                     {"transformers.js_config", {{"dtype", "q4"}}},
                                     {"is_llama_config", false},
                                     {"torch_dtype", "bfloat16"},
                                     {"sliding_window", 2}});
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_THAT(config->unknown_keys,
              AllOf(HasSubstr("_model_name_or_path"), HasSubstr("unk_token_id"),
                    HasSubstr("rope_interleaved"), HasSubstr("transformers.js_config"),
                    HasSubstr("sliding_window"), Not(HasSubstr("is_llama_config")),
                    Not(HasSubstr("torch_dtype"))));
  EXPECT_THAT(config->architecture.windows, Each(0));
  EXPECT_THAT(read("llama", {{"unk_token_id", 0}}, {"unk_token_id"})->unknown_keys, IsEmpty());
  EXPECT_FALSE(architecture("mistral", {{"attention_bias", true}, {"mlp_bias", true}}).output_bias);
}

TEST(Config, WhatItComputesWithAndWeDoNotIsRefusedAllInOneMessage) {
  const std::string said = refusal("gpt2", {{"scale_attn_weights", false},
                                            {"is_causal", false},
                                            {"quantization_config", {{"bits", 4}}}});
  EXPECT_THAT(said,
              AllOf(HasSubstr("scale_attn_weights is false"), HasSubstr("is_causal is false"),
                    HasSubstr("quantization_config"), HasSubstr("--known scale_attn_weights,")));
  EXPECT_TRUE(read("gpt2", {{"scale_attn_weights", false}}, {"scale_attn_weights"}).ok());
  const auto rope = read("llama", {{"rope_scaling", {{"rope_type", "longrope"}}}});
  EXPECT_EQ(rope.status().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(rope.status().to_string(), AllOf(HasSubstr("longrope"), Not(HasSubstr("--known"))));
  for (const auto& [type, key, value] : std::vector<std::tuple<std::string, std::string, Json>>{
           {"mixtral", "output_router_logits", true},
           {"mixtral", "router_jitter_noise", 0.1},
           {"qwen3_moe", "mlp_only_layers", {1}},
           {"qwen3_moe", "decoder_sparse_step", 2},
           {"gemma2", "use_bidirectional_attention", true},
           {"llama", "per_layer_config", {{"0", {{"head_dim", 2}}}}},
           {"llama", "transformers_weights", "other.safetensors"},
           {"llama", "hidden_act", "relu"},
           {"qwen2", "layer_types", {"linear_attention", "full_attention", "full_attention"}}}) {
    EXPECT_THAT(refusal(type, {{key, value}}), HasSubstr(key)) << type;
  }
}

TEST(Config, MissingKeysAreThoseOfTheClass) {
  EXPECT_THAT(architecture("mistral").windows, Each(4096));
  EXPECT_THAT(architecture("mistral", {{"sliding_window", nullptr}}).windows, Each(0));
  EXPECT_EQ(architecture("mixtral").rope.base, 1e6);
  EXPECT_EQ(architecture("mixtral").norm_eps, 1e-5);
  EXPECT_EQ(architecture("gemma2").attention_softcap, 50);
  EXPECT_EQ(architecture("gemma2", {{"attn_logit_softcapping", nullptr}}).attention_softcap, 0);
  EXPECT_EQ(architecture("gemma3_text").padding_token, 0);
  EXPECT_EQ(architecture("gemma3_text", {{"pad_token_id", nullptr}}).padding_token, -1);
  EXPECT_EQ(architecture("qwen3").positions, 32768u);
  EXPECT_THAT(read("llama")->end.tokens, ElementsAre(2));
  EXPECT_THAT(read("llama", {{"eos_token_id", nullptr}})->end.tokens, IsEmpty());
  EXPECT_THAT(read("qwen2")->end.tokens, IsEmpty());
  Json without = small("qwen3");
  without.erase("head_dim");
  EXPECT_EQ(read_config(without.dump(), "", {})->architecture.head_width, 128u);
}

TEST(Config, WindowsByLayer) {
  const Json full = {{"layer_types", {"full_attention", "sliding_attention", "full_attention"}},
                     {"sliding_window", 7},
                     {"use_sliding_window", true}};
  for (const char* type : {"mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"}) {
    EXPECT_THAT(architecture(type, full).windows, ElementsAre(0, 7, 0)) << type;
  }
  for (const char* type : {"mixtral", "qwen3_moe"}) {  // which do not read layer_types
    EXPECT_THAT(architecture(type, full).windows, ElementsAre(7, 7, 7)) << type;
    EXPECT_THAT(read(type, full)->unknown_keys, HasSubstr("layer_types"));
  }
  EXPECT_THAT(architecture("llama", full).windows, Each(0));
  EXPECT_THAT(
      architecture("qwen2", {{"use_sliding_window", true}, {"max_window_layers", 1}}).windows,
      ElementsAre(0, 4096, 4096));
  EXPECT_THAT(
      architecture("gemma3_text", {{"_sliding_window_pattern", 2}, {"sliding_window", 5}}).windows,
      Each(5));
  EXPECT_THAT(refusal("qwen2",
                      {{"layer_types", {"sliding_attention", "full_attention", "full_attention"}}}),
              HasSubstr("sliding_window"));
  EXPECT_THAT(refusal("mistral", {{"sliding_window", 0}}), HasSubstr("sliding_window"));
}

TEST(Config, OfTwoNamesTheGeneralOneCounts) {
  EXPECT_EQ(architecture("gpt2", {{"num_attention_heads", 4}}).heads, 4u);
  EXPECT_EQ(architecture("mixtral", {{"num_experts", 5}}).experts, 5u);
  EXPECT_EQ(architecture("qwen3_moe", {{"num_local_experts", 5}}).experts, 5u);
  const Json both = {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}},
                     {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5e4}}},
                     {"rope_theta", 3e4}};
  EXPECT_EQ(architecture("llama", both).rope.factor, 2);
  EXPECT_EQ(architecture("llama", both).rope.base, 3e4);
  const Json yarn = {{"rope_scaling",
                      {{"type", "yarn"}, {"factor", 2.0}, {"original_max_position_embeddings", 8}}},
                     {"original_max_position_embeddings", 32}};
  EXPECT_EQ(architecture("llama", yarn).rope.original_positions, 32);
}

TEST(Config, NumbersThatCannotBeAreRefusedByName) {
  const auto rope = [](const char* key, const Json& value) {
    Json object = {{"rope_type", "yarn"}, {"factor", 2.0}};
    object[key] = value;
    return Json{{"rope_parameters", object}};
  };
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, Json>>{{"factor", 1e-300},
                                                 {"factor", 1e300},
                                                 {"factor", 0},
                                                 {"factor", -2},
                                                 {"factor", "x"},
                                                 {"attention_factor", 1e300},
                                                 {"beta_fast", -1},
                                                 {"rope_theta", 1e300},
                                                 {"rope_theta", 0},
                                                 {"original_max_position_embeddings", 0},
                                                 {"mscale", 1e20}}) {
    EXPECT_THAT(refusal("llama", rope(key, value)), HasSubstr(key)) << value;
  }
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, Json>>{{"rms_norm_eps", 1e300},
                                                 {"rms_norm_eps", 0},
                                                 {"rms_norm_eps", -1},
                                                 {"eos_token_id", "x"},
                                                 {"eos_token_id", uint64_t{1} << 40},
                                                 {"eos_token_id", {1, 2.5}},
                                                 {"pad_token_id", 99},
                                                 {"pad_token_id", -100},
                                                 {"pad_token_id", "x"},
                                                 {"num_hidden_layers", 0},
                                                 {"num_hidden_layers", uint64_t{1} << 24},
                                                 {"hidden_size", 1e3},
                                                 {"vocab_size", -1},
                                                 {"attention_dropout", 1e300},
                                                 {"initializer_range", 1e300}}) {
    EXPECT_THAT(refusal("llama", {{key, value}}), Not(HasSubstr("success"))) << key << value;
    EXPECT_FALSE(read("llama", {{key, value}}).ok()) << key << value;
  }
  EXPECT_THAT(refusal("gemma2", {{"query_pre_attn_scalar", 0}}),
              HasSubstr("query_pre_attn_scalar"));
  EXPECT_THAT(refusal("gemma2", {{"final_logit_softcapping", 0}}),
              HasSubstr("final_logit_softcapping"));
}

TEST(Config, TokensThatTheVocabularyDoesNotHave) {
  EXPECT_EQ(architecture("llama", {{"pad_token_id", -1}}).padding_token, 98);
  const auto config = read("llama", {{"eos_token_id", {5, -1, 1000}}});
  ASSERT_TRUE(config.ok());
  EXPECT_THAT(config->end.tokens, ElementsAre(5));
  EXPECT_THAT(config->end.note, HasSubstr("-1, 1000"));
  const auto generation = read_generation_config("{\"eos_token_id\": [3, 4]}", "g.json", 10);
  ASSERT_TRUE(generation.ok());
  EXPECT_THAT(generation->tokens, ElementsAre(3, 4));
  EXPECT_THAT(read_generation_config("no", "g.json", 10).status().to_string(),
              AllOf(HasSubstr("generation_config.json"), HasSubstr("g.json")));
  EXPECT_THAT(
      read_generation_config("{\"eos_token_id\": \"x\"}", "g.json", 10).status().to_string(),
      HasSubstr("generation_config.json: eos_token_id"));
}

TEST(Config, WhatIsNoConfigIsNamed) {
  EXPECT_THAT(
      read_config("version https://git-lfs.github.com/spec/v1\noid", "c", {}).status().to_string(),
      HasSubstr("git lfs pull"));
  EXPECT_THAT(read_config("[]", "c", {}).status().to_string(), HasSubstr("JSON object"));
  EXPECT_THAT(read_config("{\"model_type\": \"bert\"}", "c", {}).status().to_string(),
              HasSubstr("bert"));
}

TEST(Config, OfTooManyKeysNothingIsMade) {
  std::string text = "{\"model_type\": \"llama\"";
  for (int i = 0; i < 30'000; ++i) text += fmt::format(", \"k{}\": 0", i);
  text += "}";
  EXPECT_THAT(read_config(text, "c", {}).status().to_string(), HasSubstr("30001 keys"));
  EXPECT_THAT(count_config(text, "c", 0).status().to_string(), HasSubstr("30001 keys"));
  EXPECT_THAT(read_generation_config(text, "c", 10).status().to_string(), HasSubstr("30001 keys"));
}

}  // namespace
}  // namespace smartinf::model
