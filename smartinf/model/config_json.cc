#include "smartinf/model/config_json.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"
#include "smartinf/model/config_counts.h"
#include "smartinf/model/key_reader.h"
#include "smartinf/model/placeholder.h"

namespace smartinf::model {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using Json = nlohmann::ordered_json;

// Keys that transformers' classes know and that do not change what a step of training computes.
constexpr auto kHarmless = std::to_array<std::string_view>({"_name_or_path",
                                                            "name_or_path",
                                                            "_commit_hash",
                                                            "architectures",
                                                            "attn_implementation",
                                                            "_attn_implementation",
                                                            "_attn_implementation_autoset",
                                                            "auto_map",
                                                            "bos_token_id",
                                                            "cache_implementation",
                                                            "chunk_size_feed_forward",
                                                            "dtype",
                                                            "eos_token_id",
                                                            "experts_implementation",
                                                            "finetuning_task",
                                                            "gradient_checkpointing",
                                                            "id2label",
                                                            "is_encoder_decoder",
                                                            "label2id",
                                                            "model_type",
                                                            "num_labels",
                                                            "output_attentions",
                                                            "output_hidden_states",
                                                            "pad_token_id",
                                                            "problem_type",
                                                            "return_dict",
                                                            "task_specific_params",
                                                            "tie_last_hidden_states",
                                                            "tokenizer_class",
                                                            "torch_dtype",
                                                            "torchscript",
                                                            "transformers_version",
                                                            "use_cache",
                                                            "unsloth_version"});
constexpr double kNormEpsLeast = 1e-30;
// Every tensor is listed before it is looked for, and what is listed takes memory.
constexpr uint32_t kFeedForwardsMax = uint32_t{1} << 16;

// Values that transformers' class of a family takes where a key is not given.
struct Defaults {
  uint32_t positions = 0;
  double norm_eps = 1e-6;
  double rope_theta = 10000;
  int64_t eos_token = -1;      // < 0: none
  int64_t padding_token = -1;  // < 0: none
};

Defaults defaults_of(Family family) {
  switch (family) {
    case Family::kLlama:
      return {.positions = 2048, .eos_token = 2};
    case Family::kMistral:
      return {.positions = 131072, .eos_token = 2};
    case Family::kQwen2:
      return {.positions = 32768};
    case Family::kQwen3:
      return {.positions = 32768};
    case Family::kGemma2:
      return {.positions = 8192, .eos_token = 1, .padding_token = 0};
    case Family::kGemma3:
      return {.positions = 131072, .rope_theta = 1e6, .eos_token = 1, .padding_token = 0};
    case Family::kGpt2:
      return {.positions = 1024, .norm_eps = 1e-5, .eos_token = 50256};
    case Family::kMixtral:
      return {.positions = 131072, .norm_eps = 1e-5, .rope_theta = 1e6, .eos_token = 2};
    case Family::kQwen3Moe:
      return {.positions = 32768};
  }
  return {};
}

Activation read_activation(KeyReader& keys, const std::string& key, const std::string& otherwise) {
  const std::string name = keys.text(key, otherwise);
  if (name == "silu" || name == "swish") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::kGeluTanh;
  keys.unsupported(key, name);
  return Activation::kSilu;
}

const char* type_text(base::DataType type) {
  switch (type) {
    case base::DataType::kF32:
      return "float32";
    case base::DataType::kBf16:
      return "bfloat16";
    case base::DataType::kF16:
      return "float16";
  }
  return "?";
}

/// One object of rope_parameters; the older rope_scaling has no rope_theta. partial, original: what
/// stands beside it, null where nothing does.
Rope read_rope_object(KeyReader& outer, const Json& object, const std::string& prefix, double base,
                      const Json* partial, const Json* original, uint32_t positions) {
  constexpr double kPositionsMax = 1e9;
  constexpr double kBaseMax = 1e12;
  Rope rope;
  if (!object.is_object()) {
    outer.fail(Status(ErrorCode::kCorrupt, fmt::format("config.json: {} is not an object", prefix),
                      "Check the file, or get the model's folder again", outer.place()));
    return rope;
  }
  KeyReader keys(object, outer.path(), prefix + ".");
  rope.base = keys.number("rope_theta", base, 1.001, kBaseMax);
  const std::string type = keys.text("rope_type", keys.text("type", "default"));
  const auto original_positions = [&] {
    const double given =
        keys.number("original_max_position_embeddings", positions, 1, kPositionsMax);
    if (original == nullptr) return given;
    return outer.number("original_max_position_embeddings", given, 1, kPositionsMax);
  };
  if (type == "linear") {
    rope.scaling = Rope::Scaling::kLinear;
  } else if (type == "llama3") {
    rope.scaling = Rope::Scaling::kLlama3;
    rope.low_frequency_factor = keys.number("low_freq_factor", {});
    rope.high_frequency_factor = keys.number("high_freq_factor", {});
    rope.original_positions = original_positions();
    if (rope.high_frequency_factor <= rope.low_frequency_factor) {
      keys.wrong("high_freq_factor", "a number above low_freq_factor");
    }
  } else if (type == "yarn") {
    rope.scaling = Rope::Scaling::kYarn;
    rope.original_positions = original_positions();
    rope.beta_fast = keys.number("beta_fast", 32);
    rope.beta_slow = keys.number("beta_slow", 1);
    rope.mscale = keys.number("mscale", 0, 0);
    rope.mscale_all_dim = keys.number("mscale_all_dim", 0, 0);
    rope.attention_factor = keys.number("attention_factor", 0);
    rope.truncate = keys.flag("truncate", true);
  } else if (type != "default") {
    keys.unsupported("rope_type", type);
  }
  const bool scaled = rope.scaling != Rope::Scaling::kNone;
  if (scaled) rope.factor = keys.number("factor", {}, 1e-3);
  // The unscaled table of these families always covers the whole head.
  if (scaled && keys.has("partial_rotary_factor")) {
    keys.must_be("partial_rotary_factor", 1.0);
  } else if (scaled && partial != nullptr) {
    outer.must_be("partial_rotary_factor", 1.0);
  }
  // Parameters of one set for each kind of layers are refused, where the family has one for all.
  for (const char* kind : {"full_attention", "sliding_attention"}) {
    if (keys.has(kind)) keys.unsupported(kind, *keys.find(kind));
  }
  for (const char* of_other_types :
       {"attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor",
        "low_freq_factor", "mrope_section", "mscale", "mscale_all_dim",
        "original_max_position_embeddings", "partial_rotary_factor", "short_factor", "truncate",
        "type"}) {
    keys.find(of_other_types);
  }
  outer.take(std::move(keys));
  return rope;
}

void read_rope(KeyReader& keys, const Defaults& defaults, Architecture& model) {
  const auto given_object = [&](const char* key) {  // where it says something
    const Json* value = keys.find(key);
    return value != nullptr && !(value->is_structured() && value->empty()) ? value : nullptr;
  };
  constexpr double kBaseMax = 1e12;
  const double base = keys.number("rope_theta", defaults.rope_theta, 1.001, kBaseMax);
  const Json* parameters = given_object("rope_parameters");
  const Json* scaling = given_object("rope_scaling");
  const Json* partial = keys.find("partial_rotary_factor");
  const Json* original = keys.find("original_max_position_embeddings");
  const Json none = Json::object();
  if (model.family != Family::kGemma3) {
    // The older name counts where both are there.
    const Json* object = scaling != nullptr ? scaling : parameters;
    model.rope = read_rope_object(keys, object != nullptr ? *object : none,
                                  scaling != nullptr ? "rope_scaling" : "rope_parameters", base,
                                  partial, original, model.positions);
    model.window_rope = model.rope;
    return;
  }
  const double local = keys.number("rope_local_base_freq", 10000, 1.001, kBaseMax);
  Json full = none;
  Json window = none;
  if (parameters != nullptr && !parameters->is_object()) {
    return keys.wrong("rope_parameters", "an object");
  }
  if (parameters != nullptr) {
    KeyReader both(*parameters, keys.path(), "rope_parameters.");
    if (both.has("full_attention")) full = *both.find("full_attention");
    if (both.has("sliding_attention")) window = *both.find("sliding_attention");
    keys.take(std::move(both));
  }
  if (scaling != nullptr && scaling->is_object() && full.is_object()) {
    full.update(*scaling);
  } else if (scaling != nullptr) {
    return keys.wrong("rope_scaling", "an object");
  }
  model.rope = read_rope_object(
      keys, full, scaling != nullptr ? "rope_scaling" : "rope_parameters.full_attention", base,
      partial, nullptr, model.positions);
  model.window_rope = read_rope_object(keys, window, "rope_parameters.sliding_attention", local,
                                       partial, nullptr, model.positions);
}

/// A window's tokens; 0: none. `missing`: where the key is not there.
uint32_t read_window(KeyReader& keys, uint32_t missing) {
  if (!keys.given("sliding_window")) return missing;
  const uint32_t window = keys.count("sliding_window", 0);
  if (keys.has("sliding_window") && window == 0) {
    keys.wrong("sliding_window", "a number above 0, or null");
  }
  return window;
}

/// Which layers see a window only: by layer_types, else by `otherwise`.
template <typename Otherwise>
void read_windows(KeyReader& keys, uint32_t window, Otherwise otherwise, Architecture& model) {
  const Json* types = keys.find("layer_types");
  if (types != nullptr && (!types->is_array() || types->size() != model.layers)) {
    keys.wrong("layer_types", "a list with an entry for each layer");
    return;
  }
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    bool slides = otherwise(layer);
    if (types != nullptr) {
      const Json& type = (*types)[layer];
      slides = type == "sliding_attention";
      if (!slides && type != "full_attention" && type != "attention") {
        return keys.unsupported("layer_types", type);
      }
    }
    if (slides && window == 0) {
      return keys.wrong("sliding_window",
                        "a number above 0 that is used, because layer_types has such layers");
    }
    model.windows.push_back(slides ? window : 0);
  }
}

void read_experts(KeyReader& keys, Architecture& model) {
  // Each class has one name that counts and takes the other one as well, which wins.
  std::vector<std::string> names{"num_local_experts", "num_experts"};
  if (model.family == Family::kQwen3Moe) std::swap(names[0], names[1]);
  model.experts = keys.has(names[1]) ? keys.count(names[1]) : keys.count(names[0]);
  keys.find(names[0]);
  model.experts_per_token = keys.count("num_experts_per_tok");
  keys.find("router_aux_loss_coef");  // of the loss that output_router_logits asks for
  keys.must_be("output_router_logits", false);
  if (model.family == Family::kMixtral) {
    keys.must_be("router_jitter_noise", 0.0);
  } else {
    keys.find("intermediate_size");  // of layers without experts, which are refused
    model.mlp_width = keys.count("moe_intermediate_size");
    model.normalized_experts = keys.flag("norm_topk_prob", false);
    keys.must_be("decoder_sparse_step", 1);
    keys.must_be("mlp_only_layers", Json::array());
  }
  if (model.experts == 0 || model.experts_per_token == 0 ||
      model.experts_per_token > model.experts) {
    keys.wrong("num_experts_per_tok", "from 1 to the number of experts");
  }
}

void read_gemma(KeyReader& keys, Architecture& model) {
  const bool second = model.family == Family::kGemma2;
  model.norm = Norm::kRmsPlusOne;
  model.norm_after = true;
  model.scaled_embedding = true;
  model.query_key_norm = !second;
  model.attention_scale = 1 / std::sqrt(keys.number("query_pre_attn_scalar", 256));
  const auto softcap = [&](const char* key, double missing) {
    return keys.given(key) ? keys.number(key, 0) : missing;
  };
  // Gemma 3's class has the key as well, and does not compute with it.
  const auto attention = softcap("attn_logit_softcapping", second ? 50 : 0);
  model.attention_softcap = second ? attention : 0;
  model.logit_softcap = softcap("final_logit_softcapping", second ? 30 : 0);
  keys.must_be("use_bidirectional_attention", false);
  uint32_t pattern = 2;
  if (!second) {
    pattern = keys.count("sliding_window_pattern", 6);
    keys.find("_sliding_window_pattern");  // what the class made of it
    if (pattern == 0) return keys.wrong("sliding_window_pattern", "a number above 0");
  }
  read_windows(
      keys, read_window(keys, 4096), [&](uint32_t layer) { return (layer + 1) % pattern != 0; },
      model);
}

/// Reads windows by layer, of the families whose layers may have one each.
void read_windows_of_family(KeyReader& keys, Architecture& model) {
  const auto all = [](bool slides) { return [slides](uint32_t) { return slides; }; };
  switch (model.family) {
    case Family::kMistral: {
      const uint32_t window = read_window(keys, 4096);
      return read_windows(keys, window, all(window > 0), model);
    }
    case Family::kQwen2:
    case Family::kQwen3: {
      const bool used = keys.flag("use_sliding_window", false);
      const uint32_t window = used ? read_window(keys, 4096) : 0;
      keys.find("sliding_window");
      const uint32_t from = keys.count("max_window_layers", 28);
      return read_windows(
          keys, window, [&](uint32_t layer) { return window > 0 && layer >= from; }, model);
    }
    case Family::kMixtral:  // and not by layer_types
      return model.windows.assign(model.layers, read_window(keys, 0));
    case Family::kQwen3Moe: {
      const bool used = keys.flag("use_sliding_window", false);
      model.windows.assign(model.layers, used ? read_window(keys, 4096) : 0);
      keys.find("sliding_window");
      keys.find("max_window_layers");  // of its dense sisters
      return;
    }
    default:
      return model.windows.assign(model.layers, 0);
  }
}

/// pad_token_id, which transformers' embedding gets as padding_idx: from behind where it is
/// negative.
int64_t read_padding_token(KeyReader& keys, const Defaults& defaults, uint32_t vocabulary) {
  if (!keys.given("pad_token_id")) {
    return defaults.padding_token < int64_t{vocabulary} ? defaults.padding_token : -1;
  }
  const Json* value = keys.find("pad_token_id");
  if (value == nullptr) return -1;
  const int64_t count = vocabulary;
  if (value->is_number_integer() && *value < count && *value >= -count) {
    const auto token = value->get<int64_t>();
    return token < 0 ? token + count : token;
  }
  keys.wrong("pad_token_id", fmt::format("a token of the vocabulary of {}", vocabulary));
  return -1;
}

uint32_t read_layers(KeyReader& keys, const std::string& key) {
  const uint32_t layers = keys.count(key);
  if (layers <= kFeedForwardsMax) return layers;
  keys.wrong(key, fmt::format("a number up to {}", kFeedForwardsMax));
  return 0;
}

/// All families but GPT-2.
void read_llama_like(KeyReader& keys, Architecture& model) {
  const Family family = model.family;
  const Defaults defaults = defaults_of(family);
  const bool gemma = family == Family::kGemma2 || family == Family::kGemma3;
  model.layers = read_layers(keys, "num_hidden_layers");
  model.width = keys.count("hidden_size");
  model.heads = keys.count("num_attention_heads");
  const auto count_or = [&](const char* key, uint32_t null) {
    const uint32_t missing = class_default(kFamilyNames[static_cast<size_t>(family)], key);
    return keys.given(key) || missing == 0 ? keys.count(key, null) : missing;
  };
  model.kv_heads = count_or("num_key_value_heads", model.heads);
  model.head_width = count_or("head_dim", model.heads == 0 ? 0 : model.width / model.heads);
  model.positions = keys.count("max_position_embeddings", defaults.positions);
  model.norm_eps = keys.number("rms_norm_eps", defaults.norm_eps, kNormEpsLeast, 1);
  model.activation = gemma ? read_activation(keys, "hidden_activation", "gelu_pytorch_tanh")
                           : read_activation(keys, "hidden_act", "silu");
  if (gemma) keys.find("hidden_act");  // hidden_activation counts
  model.tied_head = keys.flag("tie_word_embeddings", gemma);
  model.qkv_bias = family == Family::kQwen2;
  if (family == Family::kLlama || family == Family::kQwen3 || family == Family::kQwen3Moe ||
      gemma) {
    model.qkv_bias = model.output_bias = keys.flag("attention_bias", false);
  }
  if (family == Family::kLlama) {
    model.mlp_bias = keys.flag("mlp_bias", false);
    keys.find("pretraining_tp");  // how products were split: the same but for rounding
  }
  model.query_key_norm = family == Family::kQwen3 || family == Family::kQwen3Moe;
  if (family == Family::kMixtral || family == Family::kQwen3Moe) read_experts(keys, model);
  if (family != Family::kQwen3Moe) model.mlp_width = keys.count("intermediate_size");
  model.padding_token = read_padding_token(keys, defaults, model.vocabulary);
  read_rope(keys, defaults, model);
  if (gemma) return read_gemma(keys, model);
  read_windows_of_family(keys, model);
}

void read_gpt2(KeyReader& keys, Architecture& model) {
  // The class takes both names; the general one wins.
  const auto count = [&](const char* key, const char* general,
                         std::optional<uint32_t> otherwise = std::nullopt) {
    const uint32_t own = keys.has(general) ? 0 : keys.count(key, otherwise);
    keys.find(key);
    return keys.has(general) ? keys.count(general) : own;
  };
  model.layers = read_layers(keys, keys.has("num_hidden_layers") ? "num_hidden_layers" : "n_layer");
  keys.find("n_layer");
  model.width = count("n_embd", "hidden_size");
  model.heads = model.kv_heads = count("n_head", "num_attention_heads");
  model.head_width = model.heads == 0 ? 0 : model.width / model.heads;
  model.positions = count("n_positions", "max_position_embeddings", 1024);
  model.mlp_width = keys.count("n_inner", 4 * model.width);
  model.norm = Norm::kLayer;
  model.norm_eps = keys.number("layer_norm_epsilon", 1e-5, kNormEpsLeast, 1);
  model.activation = read_activation(keys, "activation_function", "gelu_new");
  model.tied_head = keys.flag("tie_word_embeddings", true);
  model.gated = false;
  model.qkv_bias = model.output_bias = model.mlp_bias = true;
  model.transposed = true;
  model.learned_positions = true;
  model.windows.assign(model.layers, 0);
  keys.must_be("scale_attn_weights", true);
  keys.must_be("scale_attn_by_inverse_layer_idx", false);
  keys.must_be("add_cross_attention", false);
  keys.find("reorder_and_upcast_attn");  // the same but for rounding
  for (const char* of_other_heads :
       {"n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
        "summary_type", "summary_use_proj"}) {
    keys.find(of_other_heads);
  }
}

/// Reads the keys that transformers heeds in every model, whatever its class knows.
void read_what_all_have(KeyReader& keys) {
  keys.must_be("quantization_config", Json());
  keys.must_be("is_causal", true);
  keys.must_be("per_layer_config", Json::object());
  keys.must_be("transformers_weights", Json());  // weights of other files
  keys.must_be("configuration_files", Json::array());
  keys.must_be("attribute_map", Json::object());
}

/// Checks what no key's own check says.
Status check(const Architecture& model, const base::ErrorPlace& place) {
  const auto wrong = [&](std::string what) {
    return Status(ErrorCode::kCorrupt, "config.json: " + std::move(what),
                  "Check the file, or get the model's folder again", place);
  };
  if (model.layers == 0 || model.width == 0 || model.heads == 0 || model.kv_heads == 0 ||
      model.head_width == 0 || model.mlp_width == 0 || model.vocabulary == 0) {
    return wrong("a size of the model is 0");
  }
  if (model.heads % model.kv_heads != 0) return wrong("heads cannot share keys and values evenly");
  if (model.transposed && model.query_width() != model.width) {
    return wrong("n_head does not divide n_embd");
  }
  if (!model.learned_positions && model.head_width % 2 != 0) return wrong("head_dim is odd");
  if (uint64_t{model.layers} * std::max(1u, model.experts) > kFeedForwardsMax) {
    return wrong(fmt::format("{} layers of {} experts are more than can be dealt with",
                             model.layers, model.experts));
  }
  return Status();
}

/// A number, a list of them, or null. Negative and others that no token has are left to who asks.
std::vector<int64_t> read_tokens(KeyReader& keys, const std::string& key) {
  const Json* value = keys.find(key);
  if (value == nullptr) return {};
  std::vector<int64_t> tokens;
  for (const Json& token : value->is_array() ? *value : Json::array({*value})) {
    const bool possible = token.is_number_integer() && token >= -1 && token <= KeyReader::kCountMax;
    if (!possible) {
      keys.wrong(key, "a token's number, or a list of them");
      return {};
    }
    tokens.push_back(token.get<int64_t>());
  }
  return tokens;
}

/// The end tokens that a vocabulary has; of others there is a note.
EndTokens end_tokens(KeyReader& keys, std::string_view file, uint32_t vocabulary) {
  EndTokens found{read_tokens(keys, "eos_token_id"), {}};
  std::vector<int64_t> strange;
  std::erase_if(found.tokens, [&](int64_t token) {
    const bool known = token >= 0 && token < int64_t{vocabulary};
    if (!known) strange.push_back(token);
    return !known;
  });
  if (!strange.empty()) {
    found.note = fmt::format(
        "{}: eos_token_id names {}, which the vocabulary of {} does not have: no text ends there",
        file, fmt::join(strange, ", "), vocabulary);
  }
  return found;
}

Status no_json_object(std::string_view file, std::string_view text, std::string advice,
                      const std::string& path) {
  const std::optional<Placeholder> placeholder = find_placeholder(text);
  return Status(
      ErrorCode::kCorrupt,
      fmt::format("{} is {}", file, placeholder ? placeholder->what : "not a JSON object"),
      placeholder ? placeholder->advice : std::move(advice), base::ErrorPlace{path, {}, {}, 0});
}

}  // namespace

Result<Config> read_config(const std::string& text, const std::string& path,
                           std::span<const std::string> ignored, std::string_view option) {
  SI_RETURN_IF_ERROR(KeyReader::check_keys(text, "config.json", path));
  const Json object = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (base::parse_json(text).is_discarded() || !object.is_object()) {
    return no_json_object("config.json", text, "Get the model's folder again", path);
  }
  KeyReader keys(object, path);
  Config config;
  Architecture& model = config.architecture;
  const std::string type = keys.text("model_type", "");
  const std::optional<Family> family = base::enum_from_name<Family>(type);
  if (!family.has_value()) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("config.json: model_type is \"{}\"", base::printable(type) ? type : "?"),
        fmt::format("Known here are {}; every model of transformers can be trained from Python "
                    "(smartinf.from_pretrained, docs/streamed-models.md)",
                    fmt::join(kFamilyNames, ", ")),
        keys.place());
  }
  model.family = *family;
  model.vocabulary = keys.count("vocab_size");
  model.init_std = keys.number("initializer_range", 0.02, 0, 1);
  if (model.family == Family::kGpt2) {
    read_gpt2(keys, model);
  } else {
    read_llama_like(keys, model);
  }
  read_what_all_have(keys);

  const std::string dtype = keys.text("dtype", keys.text("torch_dtype", ""));
  for (const auto known : {base::DataType::kF32, base::DataType::kBf16, base::DataType::kF16}) {
    if (dtype == type_text(known)) config.type = known;
  }
  const int64_t eos = defaults_of(model.family).eos_token;
  if (keys.given("eos_token_id")) {
    config.end = end_tokens(keys, "config.json", model.vocabulary);
  } else if (eos >= 0 && eos < int64_t{model.vocabulary}) {
    config.end.tokens = {eos};
  }
  for (const char* key : {"attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"}) {
    const double dropout = keys.number(key, 0, 0, 1);
    if (dropout == 0) continue;
    config.remark += fmt::format("{}{} = {}", config.remark.empty() ? "" : ", ", key, dropout);
  }
  if (!config.remark.empty()) config.remark = "no dropout is applied: " + config.remark;
  SI_RETURN_IF_ERROR(keys.finish(ignored, option));
  SI_RETURN_IF_ERROR(check(model, keys.place()));

  std::vector<std::string> unknown = keys.unknown();
  std::erase_if(unknown, [&](const std::string& key) {
    return std::ranges::find(kHarmless, key) != kHarmless.end() ||
           std::ranges::find(ignored, key) != ignored.end();
  });
  if (!unknown.empty()) {
    config.unknown_keys =
        fmt::format("config.json: {} {} nothing: transformers' class of {} does not know {}",
                    fmt::join(unknown, ", "), unknown.size() == 1 ? "changes" : "change", type,
                    unknown.size() == 1 ? "it" : "them");
  }
  return config;
}

Result<EndTokens> read_generation_config(const std::string& text, const std::string& path,
                                         uint32_t vocabulary) {
  SI_RETURN_IF_ERROR(KeyReader::check_keys(text, "generation_config.json", path));
  const Json object = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (base::parse_json(text).is_discarded() || !object.is_object()) {
    return no_json_object("generation_config.json", text,
                          "Remove it, or get the model's folder again", path);
  }
  KeyReader keys(object, path, {}, "generation_config.json");
  EndTokens found = end_tokens(keys, "generation_config.json", vocabulary);
  SI_RETURN_IF_ERROR(keys.finish({}, {}));
  return found;
}

std::string write_config(const Architecture& model, base::DataType type, int64_t eos_token) {
  Json config = {
      {"architectures", {"LlamaForCausalLM"}},
      {"model_type", "llama"},
      {"vocab_size", model.vocabulary},
      {"hidden_size", model.width},
      {"intermediate_size", model.mlp_width},
      {"num_hidden_layers", model.layers},
      {"num_attention_heads", model.heads},
      {"num_key_value_heads", model.kv_heads},
      {"head_dim", model.head_width},
      {"hidden_act", "silu"},
      {"max_position_embeddings", model.positions},
      {"initializer_range", model.init_std},
      {"rms_norm_eps", model.norm_eps},
      {"rope_theta", model.rope.base},
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", model.rope.base}}},
      {"tie_word_embeddings", model.tied_head},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"mlp_bias", false},
      {"use_cache", true},
      {"dtype", type_text(type)},
      {"torch_dtype", type_text(type)},
      {"bos_token_id", nullptr},
      {"eos_token_id", nullptr},
  };
  if (eos_token >= 0) config["bos_token_id"] = config["eos_token_id"] = eos_token;
  return config.dump(2) + "\n";
}

std::string with_type(const std::string& text, base::DataType type) {
  Json config = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (config.contains(key)) config[key] = type_text(type);
  }
  return config.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace smartinf::model
