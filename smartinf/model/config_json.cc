#include "smartinf/model/config_json.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"

namespace smartinf::model {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using Json = nlohmann::ordered_json;

// What transformers writes as well, and what does not change what a step of training computes.
constexpr std::array<std::string_view, 33> kHarmless{"_name_or_path",
                                                     "architectures",
                                                     "auto_map",
                                                     "bos_token_id",
                                                     "cache_implementation",
                                                     "chunk_size_feed_forward",
                                                     "dtype",
                                                     "eos_token_id",
                                                     "id2label",
                                                     "initializer_range",
                                                     "is_encoder_decoder",
                                                     "label2id",
                                                     "max_position_embeddings",
                                                     "max_window_layers",
                                                     "model_type",
                                                     "pad_token_id",
                                                     "problem_type",
                                                     "return_dict",
                                                     "router_aux_loss_coef",
                                                     "sliding_window",
                                                     "summary_activation",
                                                     "summary_first_dropout",
                                                     "summary_proj_to_labels",
                                                     "summary_type",
                                                     "summary_use_proj",
                                                     "task_specific_params",
                                                     "torch_dtype",
                                                     "transformers_version",
                                                     "use_cache",
                                                     "use_sliding_window",
                                                     "n_ctx",
                                                     "_attn_implementation_autoset",
                                                     "unsloth_version"};
constexpr uint64_t kCountMax = uint64_t{1} << 24;

// Reads keys and remembers which ones; the first thing that is wrong is kept.
class KeyReader {
 public:
  KeyReader(const Json& object, std::string path, std::string prefix = {})
      : object_(object), path_(std::move(path)), prefix_(std::move(prefix)) {}

  /// Null where the key is not given, or is null.
  const Json* find(const std::string& key) {
    read_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  bool has(const std::string& key) { return find(key) != nullptr; }
  uint32_t count(const std::string& key, std::optional<uint32_t> otherwise = std::nullopt) {
    const Json* value = find(key);
    if (value == nullptr && otherwise.has_value()) return *otherwise;
    if (value != nullptr && value->is_number_unsigned() && value->get<uint64_t>() <= kCountMax) {
      return value->get<uint32_t>();
    }
    wrong(key, fmt::format("a whole number up to {}", kCountMax));
    return 0;
  }
  double number(const std::string& key, std::optional<double> otherwise = std::nullopt) {
    const Json* value = find(key);
    if (value == nullptr && otherwise.has_value()) return *otherwise;
    if (value != nullptr && value->is_number()) return value->get<double>();
    wrong(key, "a number");
    return 0;
  }
  bool flag(const std::string& key, bool otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (value->is_boolean()) return value->get<bool>();
    wrong(key, "true or false");
    return otherwise;
  }
  std::string text(const std::string& key, std::string otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (value->is_string()) return value->get<std::string>();
    wrong(key, "a text");
    return otherwise;
  }
  /// Another value is refused.
  void must_be(const std::string& key, const Json& value) {
    const Json* found = find(key);
    if (found != nullptr && *found != value) unsupported(key, *found);
  }
  void unsupported(const std::string& key, const Json& value) {
    std::string shown = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (shown.size() > 60) shown = shown.substr(0, 60) + "...";
    fail(Status(
        ErrorCode::kUnsupported,
        fmt::format("config.json: {}{} is {}, which is not implemented", prefix_, key, shown),
        "Choose a model without it; docs/models.md says what is implemented", place()));
  }
  void wrong(const std::string& key, std::string_view expected) {
    fail(Status(ErrorCode::kCorrupt,
                fmt::format("config.json: {}{}: expected {}, found {}", prefix_, key, expected,
                            object_.contains(key) ? "something else" : "nothing"),
                "Check the file, or get the model's folder again", place()));
  }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  base::ErrorPlace place() const { return {path_, {}, {}, 0}; }

  /// Of keys that were not asked for.
  Status finish(std::span<const std::string> ignored) {
    for (const auto& [key, value] : object_.items()) {
      const bool off =
          value.is_null() || value == false || (value.is_structured() && value.empty());
      if (read_.contains(key) || off ||
          std::find(ignored.begin(), ignored.end(), key) != ignored.end()) {
        continue;
      }
      fail(Status(ErrorCode::kUnsupported,
                  fmt::format("config.json: {}{} is not known here, and may change what the model "
                              "computes",
                              prefix_, base::printable(key) ? key : "a key"),
                  "If you know that it does not, name it in model.ignored_keys", place()));
    }
    return status_;
  }

 private:
  const Json& object_;
  std::string path_;
  std::string prefix_;
  std::set<std::string> read_;
  Status status_;
};

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

/// One object of rope_parameters; the older rope_scaling has no rope_theta.
Rope read_rope_object(KeyReader& outer, const Json& object, const std::string& prefix,
                      const std::string& path, double base, uint32_t positions) {
  Rope rope;
  if (!object.is_object()) {
    outer.fail(Status(ErrorCode::kCorrupt, "config.json: " + prefix + " is not an object", {},
                      outer.place()));
    return rope;
  }
  KeyReader keys(object, path, prefix);
  rope.base = keys.number("rope_theta", base);
  const std::string type = keys.text("rope_type", keys.text("type", "default"));
  keys.must_be("partial_rotary_factor", 1.0);
  if (type == "linear") {
    rope.scaling = Rope::Scaling::kLinear;
    rope.factor = keys.number("factor");
  } else if (type == "llama3") {
    rope.scaling = Rope::Scaling::kLlama3;
    rope.factor = keys.number("factor");
    rope.low_frequency_factor = keys.number("low_freq_factor");
    rope.high_frequency_factor = keys.number("high_freq_factor");
    rope.original_positions = keys.number("original_max_position_embeddings");
  } else if (type == "yarn") {
    rope.scaling = Rope::Scaling::kYarn;
    rope.factor = keys.number("factor");
    rope.original_positions = keys.number("original_max_position_embeddings", positions);
    rope.beta_fast = keys.number("beta_fast", 32);
    rope.beta_slow = keys.number("beta_slow", 1);
    rope.mscale = keys.number("mscale", 0);
    rope.mscale_all_dim = keys.number("mscale_all_dim", 0);
    rope.attention_factor = keys.number("attention_factor", 0);
    rope.truncate = keys.flag("truncate", true);
  } else if (type == "default") {
    keys.find("factor");  // not used
    keys.find("original_max_position_embeddings");
  } else {
    keys.unsupported("rope_type", type);
  }
  const bool possible = rope.base > 1 && rope.factor > 0 && rope.low_frequency_factor > 0 &&
                        rope.high_frequency_factor > rope.low_frequency_factor &&
                        rope.beta_fast > 0 && rope.beta_slow > 0 &&
                        (rope.scaling == Rope::Scaling::kNone ||
                         rope.scaling == Rope::Scaling::kLinear || rope.original_positions > 0);
  Status status = keys.finish({});
  if (status.ok() && !possible) {
    status = Status(ErrorCode::kCorrupt, "config.json: " + prefix + " has numbers that cannot be",
                    "Check the file", outer.place());
  }
  outer.fail(std::move(status));
  return rope;
}

void read_rope(KeyReader& keys, const std::string& path, Architecture& model) {
  const double base = keys.number("rope_theta", 10000);
  const Json* parameters = keys.find("rope_parameters");
  const Json* scaling = keys.find("rope_scaling");
  const Json none = Json::object();
  const auto read = [&](const Json& object, const std::string& prefix, double theta) {
    return read_rope_object(keys, object, prefix, path, theta, model.positions);
  };
  keys.must_be("partial_rotary_factor", 1.0);
  if (model.family == Family::kGemma3) {
    const double local = keys.number("rope_local_base_freq", 10000);
    const bool by_type =
        parameters != nullptr && parameters->is_object() && parameters->contains("full_attention");
    if (by_type) {
      KeyReader both(*parameters, path, "rope_parameters.");
      const Json* full = both.find("full_attention");
      const Json* window = both.find("sliding_attention");
      keys.fail(both.finish({}));
      model.rope = read(*full, "rope_parameters.full_attention.", 1000000);
      model.window_rope =
          read(window != nullptr ? *window : none, "rope_parameters.sliding_attention.", local);
      return;
    }
    model.rope = read(scaling != nullptr ? *scaling : none, "rope_scaling.",
                      keys.number("rope_theta", 1000000));
    model.window_rope = read(none, "", local);
    return;
  }
  model.rope = parameters != nullptr
                   ? read(*parameters, "rope_parameters.", base)
                   : read(scaling != nullptr ? *scaling : none, "rope_scaling.", base);
  model.window_rope = model.rope;
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
      slides = (*types)[layer] == "sliding_attention";
      if (!slides && (*types)[layer] != "full_attention") {
        keys.unsupported("layer_types", (*types)[layer]);
      }
    }
    model.windows.push_back(slides ? window : 0);
  }
}

void read_experts(KeyReader& keys, Architecture& model) {
  const char* key = keys.has("num_local_experts") ? "num_local_experts" : "num_experts";
  model.experts = keys.count(key);
  model.experts_per_token = keys.count("num_experts_per_tok");
  if (model.family == Family::kQwen3Moe) {
    keys.find("intermediate_size");  // of layers without experts, which are refused
    model.mlp_width = keys.count("moe_intermediate_size");
    model.normalized_experts = keys.flag("norm_topk_prob", false);
    keys.must_be("decoder_sparse_step", 1);
    keys.must_be("mlp_only_layers", Json::array());
  }
  keys.must_be("output_router_logits", false);  // else the loss has another term
  keys.must_be("router_jitter_noise", 0.0);
  if (model.experts == 0 || model.experts_per_token == 0 ||
      model.experts_per_token > model.experts) {
    keys.wrong("num_experts_per_tok", "from 1 to the number of experts");
  }
}

void read_gemma(KeyReader& keys, Architecture& model) {
  model.norm = Norm::kRmsPlusOne;
  model.norm_after = true;
  model.scaled_embedding = true;
  model.query_key_norm = model.family == Family::kGemma3;
  const double scale = keys.number("query_pre_attn_scalar", 256);
  if (!(scale > 0)) keys.wrong("query_pre_attn_scalar", "a number above 0");
  model.attention_scale = 1 / std::sqrt(scale);
  model.attention_softcap = keys.number("attn_logit_softcapping", 0);
  model.logit_softcap = keys.number("final_logit_softcapping", 0);
  keys.must_be("use_bidirectional_attention", false);
  const uint32_t window = keys.count("sliding_window", 4096);
  uint32_t pattern = 2;
  if (model.family == Family::kGemma3) {
    pattern = keys.count("sliding_window_pattern", keys.count("_sliding_window_pattern", 6));
  }
  if (pattern == 0 || window == 0) return keys.wrong("sliding_window", "a number above 0");
  read_windows(
      keys, window, [&](uint32_t layer) { return (layer + 1) % pattern != 0; }, model);
}

/// All families but GPT-2.
void read_llama_like(KeyReader& keys, const std::string& path, Architecture& model) {
  const Family family = model.family;
  const bool gemma = family == Family::kGemma2 || family == Family::kGemma3;
  model.layers = keys.count("num_hidden_layers");
  model.width = keys.count("hidden_size");
  model.heads = keys.count("num_attention_heads");
  model.kv_heads = keys.count("num_key_value_heads", model.heads);
  model.head_width = keys.count("head_dim", model.heads == 0 ? 0 : model.width / model.heads);
  model.positions = keys.count("max_position_embeddings", 2048);
  model.norm_eps = keys.number("rms_norm_eps", 1e-6);
  model.activation = gemma ? read_activation(keys, "hidden_activation", "gelu_pytorch_tanh")
                           : read_activation(keys, "hidden_act", "silu");
  if (gemma) keys.find("hidden_act");  // hidden_activation counts
  model.tied_head = keys.flag("tie_word_embeddings", gemma);
  const bool bias = keys.flag("attention_bias", false);
  model.qkv_bias = bias || family == Family::kQwen2;
  model.output_bias = bias;
  model.mlp_bias = keys.flag("mlp_bias", false);
  model.query_key_norm = family == Family::kQwen3 || family == Family::kQwen3Moe;
  keys.must_be("pretraining_tp", 1);
  if (family == Family::kMixtral || family == Family::kQwen3Moe) read_experts(keys, model);
  if (family != Family::kQwen3Moe) model.mlp_width = keys.count("intermediate_size");
  // Where transformers' embedding gets it as padding_idx.
  if (keys.has("pad_token_id")) model.padding_token = keys.count("pad_token_id");
  if (model.padding_token >= int64_t{model.vocabulary}) {
    return keys.wrong("pad_token_id", "a token of the vocabulary");
  }
  read_rope(keys, path, model);
  if (gemma) return read_gemma(keys, model);
  const bool qwen =
      family == Family::kQwen2 || family == Family::kQwen3 || family == Family::kQwen3Moe;
  uint32_t window = family == Family::kLlama ? 0 : keys.count("sliding_window", 0);
  if (qwen && !keys.flag("use_sliding_window", false)) window = 0;
  const uint32_t from =
      qwen && family != Family::kQwen3Moe ? keys.count("max_window_layers", 0) : 0;
  read_windows(
      keys, window, [&](uint32_t layer) { return layer >= from; }, model);
}

void read_gpt2(KeyReader& keys, Architecture& model) {
  model.layers = keys.count("n_layer");
  model.width = keys.count("n_embd");
  model.heads = model.kv_heads = keys.count("n_head");
  model.head_width = model.heads == 0 ? 0 : model.width / model.heads;
  model.positions = keys.count("n_positions", 1024);
  model.mlp_width = keys.count("n_inner", 4 * model.width);
  model.norm = Norm::kLayer;
  model.norm_eps = keys.number("layer_norm_epsilon", 1e-5);
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
}

/// What no key's own check says.
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
  if (!(model.norm_eps > 0)) return wrong("what is added to a norm's variance is not above 0");
  return Status();
}

}  // namespace

Result<Config> read_config(const std::string& text, const std::string& path,
                           std::span<const std::string> ignored) {
  const Json object = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (base::parse_json(text).is_discarded() || !object.is_object()) {
    return Status(ErrorCode::kCorrupt, "config.json is not a JSON object",
                  "Get the model's folder again", base::ErrorPlace{path, {}, {}, 0});
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
        fmt::format("Known are {}", fmt::join(kFamilyNames, ", ")), keys.place());
  }
  model.family = *family;
  model.vocabulary = keys.count("vocab_size");
  model.init_std = keys.number("initializer_range", 0.02);
  if (model.family == Family::kGpt2) {
    read_gpt2(keys, model);
  } else {
    read_llama_like(keys, path, model);
  }
  keys.must_be("quantization_config", Json());

  const std::string dtype = keys.text("dtype", keys.text("torch_dtype", ""));
  for (const auto known : {base::DataType::kF32, base::DataType::kBf16, base::DataType::kF16}) {
    if (dtype == type_text(known)) config.type = known;
  }
  const Json* eos = keys.find("eos_token_id");
  if (eos != nullptr && eos->is_array() && !eos->empty()) eos = &eos->front();
  if (eos != nullptr && eos->is_number_unsigned()) config.eos_token = eos->get<int64_t>();
  for (const char* key : {"attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"}) {
    if (keys.number(key, 0) == 0) continue;
    config.remark +=
        fmt::format("{}{} = {}", config.remark.empty() ? "" : ", ", key, keys.number(key, 0));
  }
  if (!config.remark.empty()) config.remark = "no dropout is applied: " + config.remark;
  std::vector<std::string> known(kHarmless.begin(), kHarmless.end());
  known.insert(known.end(), ignored.begin(), ignored.end());
  SI_RETURN_IF_ERROR(keys.finish(known));
  SI_RETURN_IF_ERROR(check(model, keys.place()));
  return config;
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
