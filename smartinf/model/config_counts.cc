#include "smartinf/model/config_counts.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"
#include "smartinf/model/key_reader.h"

namespace smartinf::model {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using Json = nlohmann::ordered_json;
using KeyNames = std::initializer_list<const char*>;

constexpr uint64_t kWidthMax = uint64_t{1} << 22;
constexpr uint64_t kVocabularyMax = uint64_t{1} << 28;
constexpr uint64_t kLayersMax = 1 << 16;
constexpr uint64_t kParametersMax = 1'000'000'000'000'000;

/// Saturates at what no model has.
uint64_t product(std::initializer_list<uint64_t> extents) {
  unsigned __int128 all = 1;
  for (const uint64_t extent : extents) {
    all = std::min<unsigned __int128>(all * extent, kParametersMax + 1);
  }
  return static_cast<uint64_t>(all);
}

// Defaults of keys that decide sizes, where they do not follow from others; under the last of the
// names that are read one after the other, so that each of the names can be given. A key that is
// null is given.
const Json& class_defaults() {
  static const Json defaults = Json::parse(R"({
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_experts": 60,
                  "num_experts_per_tok": 4},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
                  "num_experts_per_tok": 8},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256},
    "smollm3": {"num_key_value_heads": 4},
    "gpt2": {"n_positions": 1024},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "num_experts": 128,
                "experts_per_token": 4},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "deepseek_v2": {"moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
                    "q_lora_rank": 1536},
    "deepseek_v3": {"moe_intermediate_size": 2048, "n_routed_experts": 256,
                    "first_k_dense_replace": 3, "q_lora_rank": 1536, "num_experts_per_tok": 8},
    "starcoder2": {"num_key_value_heads": 2},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size_mlp": 16384,
                    "num_experts": 16},
    "bert": {"max_position_embeddings": 512},
    "t5": {"d_kv": 64},
    "jamba": {"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2}
  })");
  return defaults;
}

// Families name the same thing differently; the first name that is there counts. The first thing
// that is wrong is kept.
class Keys {
 public:
  Keys(const Json& object, std::string path) : object_(object), path_(std::move(path)) {}

  /// Keys that are not there have what transformers' class of this model_type takes.
  void set_type(const std::string& type) { defaults_ = class_defaults().value(type, Json()); }

  const Json* find(KeyNames names) const {
    for (const char* name : names) {
      const auto given = object_.find(name);
      const auto missing = defaults_.find(name);
      if (given != object_.end() && !given->is_null()) return &*given;
      if (given == object_.end() && missing != defaults_.end()) return &*missing;
    }
    return nullptr;
  }
  uint64_t count(KeyNames names, std::optional<uint64_t> otherwise = {},
                 uint64_t most = kWidthMax) {
    const Json* value = find(names);
    if (value == nullptr && otherwise.has_value()) return *otherwise;
    if (value != nullptr && value->is_number_unsigned() && value->get<uint64_t>() <= most) {
      return value->get<uint64_t>();
    }
    wrong(names, fmt::format("a whole number up to {}", most), value != nullptr);
    return 0;
  }
  /// At least 1.
  uint64_t size(KeyNames names, std::optional<uint64_t> otherwise = {}, uint64_t most = kWidthMax) {
    const uint64_t value = count(names, otherwise, most);
    if (value == 0) wrong(names, "a number above 0", find(names) != nullptr);
    return value;
  }
  bool flag(KeyNames names, bool otherwise) {
    const Json* value = find(names);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) wrong(names, "true or false", true);
    return value->is_boolean() && value->get<bool>();
  }
  std::string text(KeyNames names, std::string otherwise) const {
    const Json* value = find(names);
    return value != nullptr && value->is_string() ? value->get<std::string>()
                                                  : std::move(otherwise);
  }
  bool lists(KeyNames names, uint64_t number) const {
    const Json* value = find(names);
    return value != nullptr && value->is_array() &&
           std::find(value->begin(), value->end(), number) != value->end();
  }
  /// Whether the class that the file was written from ("LlamaForCausalLM") ends so.
  bool architecture_ends(std::string_view end) const {
    const Json* value = find({"architectures"});
    if (value == nullptr || !value->is_array() || value->empty()) return false;
    const Json& first = value->front();
    return first.is_string() && first.get<std::string>().ends_with(end);
  }
  void wrong(KeyNames names, std::string_view expected, bool there) {
    fail(Status(ErrorCode::kCorrupt,
                fmt::format("config.json: {}: expected {}, found {}", fmt::join(names, " or "),
                            expected, there ? "something else" : "nothing"),
                "Check the file, or get the model's folder again", place()));
  }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  base::ErrorPlace place() const { return {path_, {}, {}, 0}; }
  const Status& status() const { return status_; }

 private:
  const Json& object_;
  Json defaults_;
  std::string path_;
  Status status_;
};

// Adds parameters to the embedding, to the layer that was begun, or to the head.
class Counter {
 public:
  explicit Counter(ConfigCounts& counts) : counts_(counts), section_(&counts.embedding) {}

  void begin_layer() {
    counts_.layers.emplace_back();
    section_ = &counts_.layers.back().parameters;
  }
  void begin_head() { section_ = &counts_.head; }
  LayerCount& layer() { return counts_.layers.back(); }

  /// used: of the rows of experts, those that a token goes through.
  void experts(uint64_t all, uint64_t used, uint64_t out, uint64_t in) {
    add(product({all, out, in}));
    if (!counts_.layers.empty() && section_ == &layer().parameters) {
      layer().active = std::min(kParametersMax, layer().active + product({used, out, in}));
      layer().idle = std::min(kParametersMax, layer().idle + product({all - used, out, in}));
    }
  }
  void matrix(uint64_t out, uint64_t in, bool bias = false) {
    experts(1, 1, out, in);
    if (bias) vector(out);
  }
  void table(uint64_t rows, uint64_t width) { add(product({rows, width})); }
  void vector(uint64_t width) { add(width); }

 private:
  void add(uint64_t elements) {
    *section_ = std::min(kParametersMax + 1, *section_ + elements);
    counts_.largest = std::max(counts_.largest, elements);
  }

  ConfigCounts& counts_;
  uint64_t* section_;
};

/// The differences between families of decoders whose layers are attention and a feed-forward part.
struct Form {
  bool tied = false;  // where the file does not say
  bool qkv_bias = false;
  bool output_bias = false;
  bool mlp_bias = false;
  bool gated = true;
  bool fused = false;            // query, key and value are one parameter; so are gate and up
  bool norm_bias = false;        // LayerNorm
  bool norm_weight = true;       // OLMo's have none
  uint64_t norms = 2;            // of a layer
  uint64_t query_key_norms = 0;  // 1: of a head's width; 2: of all heads together
  bool head_bias = false;
  bool sinks = false;  // a number for each head
};

struct Experts {
  uint64_t count = 0;  // 0: a dense layer
  uint64_t per_token = 0;
  uint64_t width = 0;   // of each
  uint64_t shared = 0;  // width of what every token goes through beside them
  bool biases = false;
  bool router_bias = false;
  bool shared_gate = false;
};

void read_shape(Keys& keys, ConfigCounts& counts) {
  counts.width = keys.size({"hidden_size", "n_embd", "d_model"});
  counts.heads = keys.size({"num_attention_heads", "n_head", "num_heads"});
  counts.kv_heads = keys.size({"num_key_value_heads", "num_kv_heads"}, counts.heads);
  const bool divides = counts.heads > 0 && counts.width % counts.heads == 0;
  const Json* head = keys.find({"head_dim", "d_kv"});
  if (head == nullptr && !divides) {
    keys.fail(Status(ErrorCode::kCorrupt,
                     fmt::format("config.json: {} attention heads do not divide the width {}, and "
                                 "head_dim is missing",
                                 counts.heads, counts.width),
                     "Check the file, or get the model's folder again", keys.place()));
    return;
  }
  counts.head_width = keys.size({"head_dim", "d_kv"}, divides ? counts.width / counts.heads : 1);
  counts.vocabulary = keys.size({"vocab_size"}, {}, kVocabularyMax);
  counts.context = keys.size({"max_position_embeddings", "n_positions", "seq_length", "n_ctx"},
                             2048, kVocabularyMax);
}

uint64_t layers_of(Keys& keys) {
  return keys.size({"num_hidden_layers", "n_layer", "num_layers"}, {}, kLayersMax);
}

void norm(Counter& counter, const Form& form, uint64_t width) {
  if (!form.norm_weight) return;
  counter.vector(width);
  if (form.norm_bias) counter.vector(width);
}

void attention(Counter& counter, const Form& form, const ConfigCounts& counts) {
  const uint64_t query = counts.heads * counts.head_width;
  const uint64_t kv = counts.kv_heads * counts.head_width;
  if (form.fused) {
    counter.matrix(query + 2 * kv, counts.width, form.qkv_bias);
  } else {
    for (const uint64_t out : {query, kv, kv}) counter.matrix(out, counts.width, form.qkv_bias);
  }
  counter.matrix(counts.width, query, form.output_bias);
  for (const uint64_t out : {query, kv}) {
    if (form.query_key_norms == 0) continue;
    const uint64_t width = form.query_key_norms == 1 ? counts.head_width : out;
    counter.vector(width);
  }
  if (form.sinks) counter.vector(counts.heads);
}

void feed_forward(Counter& counter, const Form& form, uint64_t width, uint64_t inner) {
  if (form.gated && form.fused) {
    counter.matrix(2 * inner, width, form.mlp_bias);
  } else {
    for (int i = 0; i < (form.gated ? 2 : 1); ++i) counter.matrix(inner, width, form.mlp_bias);
  }
  counter.matrix(width, inner, form.mlp_bias);
}

void mixture(Counter& counter, const Experts& experts, uint64_t width) {
  const uint64_t used = std::min(experts.count, experts.per_token);
  counter.matrix(experts.count, width, experts.router_bias);
  counter.experts(experts.count, used, 2 * experts.width, width);
  counter.experts(experts.count, used, width, experts.width);
  if (experts.biases) {
    counter.table(experts.count, 2 * experts.width);
    counter.table(experts.count, width);
  }
  if (experts.shared > 0) feed_forward(counter, Form(), width, experts.shared);
  if (experts.shared_gate) counter.matrix(1, width);
}

void output_head(Keys& keys, Counter& counter, const Form& form, ConfigCounts& counts) {
  counts.tied = keys.flag({"tie_word_embeddings"}, form.tied);
  if (!counts.tied) counter.matrix(counts.vocabulary, counts.width);
  if (form.head_bias) counter.vector(counts.vocabulary);
}

/// Where a layer has experts in place of one feed-forward part, by transformers' many names.
Experts experts_of(Keys& keys, const std::string& type, uint64_t layer) {
  Experts experts;
  experts.count = keys.count(
      {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}, 0, kLayersMax);
  if (experts.count == 0) return experts;
  experts.per_token =
      keys.count({"num_experts_per_tok", "experts_per_token", "moe_k"}, 1, kLayersMax);
  experts.width = keys.size({"moe_intermediate_size", "intermediate_size"});
  // Which layers are dense.
  bool dense = keys.lists({"mlp_only_layers"}, layer);
  const uint64_t step = keys.size({"decoder_sparse_step"}, 1);
  dense |= step > 0 && (layer + 1) % step != 0;
  dense |= layer < keys.count({"first_k_dense_replace"}, 0);
  if (type == "llama4_text") {
    const uint64_t every = keys.size({"interleave_moe_layer_step"}, 1);
    const bool listed = keys.find({"moe_layers"}) != nullptr;
    dense = listed ? !keys.lists({"moe_layers"}, layer) : every > 0 && (layer + 1) % every != 0;
  }
  if (type == "jamba") {
    const uint64_t every = keys.size({"expert_layer_period"}, 2);
    dense = experts.count == 1 ||
            (every > 0 && layer % every != keys.count({"expert_layer_offset"}, 1));
  }
  if (dense) return Experts();
  if (type == "qwen2_moe") {
    experts.shared = keys.count({"shared_expert_intermediate_size"}, 5632);
    experts.shared_gate = true;
  }
  if (type == "llama4_text") experts.shared = experts.width;
  if (type == "deepseek_v2" || type == "deepseek_v3") {
    experts.shared = experts.width * keys.count({"n_shared_experts"}, 1);
  }
  experts.biases = experts.router_bias = type == "gpt_oss";
  return experts;
}

/// Keys and values go through a narrow product (DeepSeek-AI 2024, multi-head latent attention).
void latent_attention(Keys& keys, Counter& counter, ConfigCounts& counts) {
  const uint64_t rotary = keys.size({"qk_rope_head_dim"}, 64);
  const uint64_t plain = keys.size({"qk_nope_head_dim"}, 128);
  const uint64_t value = keys.size({"v_head_dim"}, 128);
  const uint64_t latent = keys.size({"kv_lora_rank"}, 512);
  const uint64_t query_rank = keys.count({"q_lora_rank"}, 0);
  const bool bias = keys.flag({"attention_bias"}, false);
  const uint64_t query = counts.heads * (rotary + plain);
  if (query_rank == 0) {
    counter.matrix(query, counts.width);
  } else {
    counter.matrix(query_rank, counts.width, bias);
    counter.vector(query_rank);
    counter.matrix(query, query_rank);
  }
  counter.matrix(latent + rotary, counts.width, bias);
  counter.vector(latent);
  counter.matrix(counts.heads * (plain + value), latent);
  counter.matrix(counts.width, counts.heads * value, bias);
  counts.head_width = rotary + plain;
}

/// Mamba's mixer (Gu and Dao 2023). norms: Jamba's, of the step and of both projections.
void state_space(Counter& counter, uint64_t width, uint64_t inner, uint64_t states, uint64_t kernel,
                 uint64_t rank, bool bias, bool convolution_bias, bool norms) {
  counter.layer().attends = false;
  counter.matrix(2 * inner, width, bias);
  counter.matrix(inner, kernel, convolution_bias);
  counter.matrix(rank + 2 * states, inner);
  counter.matrix(inner, rank, true);
  counter.table(inner, states);
  counter.vector(inner);
  counter.matrix(width, inner, bias);
  if (norms) counter.vector(rank + 2 * states);
}

/// time_step_rank: a number, or "auto".
uint64_t step_rank(Keys& keys, const char* name, uint64_t width) {
  const Json* value = keys.find({name});
  if (value == nullptr || value->is_string()) return (width + 15) / 16;
  return keys.size({name});
}

Form form_of(Keys& keys, const std::string& type) {
  Form form;
  const bool attention_bias = keys.flag({"attention_bias"}, type == "gpt_oss");
  form.qkv_bias = form.output_bias = attention_bias;
  form.mlp_bias = keys.flag({"mlp_bias"}, false);
  if (type == "qwen2" || type == "qwen2_moe") {
    form.qkv_bias = type == "qwen2" || keys.flag({"qkv_bias"}, true);
    form.output_bias = false;
  } else if (type == "qwen3" || type == "qwen3_moe") {
    form.query_key_norms = 1;
  } else if (type == "gemma" || type == "gemma2" || type == "gemma3_text") {
    form.tied = true;
    form.norms = type == "gemma" ? 2 : 4;
    form.query_key_norms = type == "gemma3_text" ? 1 : 0;
  } else if (type == "smollm3") {
    form.tied = true;
  } else if (type == "phi3") {
    form.fused = true;
  } else if (type == "olmo2" || type == "olmoe") {
    form.query_key_norms = 2;
  } else if (type == "olmo") {
    form.norm_weight = false;
  } else if (type == "gpt_oss") {
    form.sinks = true;
  } else if (type == "starcoder2") {
    form.qkv_bias = form.output_bias = form.mlp_bias = keys.flag({"use_bias"}, true);
    form.norm_bias = true;
    form.gated = false;
    form.tied = true;
  } else if (type == "phi") {
    form.qkv_bias = form.output_bias = form.mlp_bias = form.norm_bias = form.head_bias = true;
    form.gated = false;
    form.norms = 1;
  } else if (type == "gpt_neox") {
    form.qkv_bias = form.output_bias = keys.flag({"attention_bias"}, true);
    form.mlp_bias = form.norm_bias = form.fused = true;
    form.gated = false;
  }
  return form;
}

/// Decoders in the form of Llama, each with what it has beside that.
void count_decoder(Keys& keys, const std::string& type, Counter& counter, ConfigCounts& counts) {
  read_shape(keys, counts);
  const Form form = form_of(keys, type);
  const bool latent = type == "deepseek_v2" || type == "deepseek_v3";
  const uint64_t layers = layers_of(keys);
  const uint64_t dense = type == "llama4_text" ? keys.size({"intermediate_size_mlp"})
                                               : keys.size({"intermediate_size"});
  counter.table(counts.vocabulary, counts.width);
  counts.gated = form.gated;
  for (uint64_t layer = 0; layer < layers && keys.status().ok(); ++layer) {
    counter.begin_layer();
    if (latent) {
      latent_attention(keys, counter, counts);
    } else {
      attention(counter, form, counts);
    }
    for (uint64_t i = 0; i < form.norms; ++i) norm(counter, form, counts.width);
    const Experts experts = experts_of(keys, type, layer);
    if (experts.count == 0) {
      feed_forward(counter, form, counts.width, dense);
      counts.mlp_width = std::max(counts.mlp_width, dense);
    } else {
      mixture(counter, experts, counts.width);
      counts.mlp_width =
          std::max(counts.mlp_width,
                   std::min(experts.per_token, experts.count) * experts.width + experts.shared);
    }
  }
  counter.begin_head();
  norm(counter, form, counts.width);
  output_head(keys, counter, form, counts);
}

void count_gpt2(Keys& keys, const std::string& type, Counter& counter, ConfigCounts& counts) {
  read_shape(keys, counts);
  const bool opt = type == "opt";
  const bool bloom = type == "bloom";
  const uint64_t layers = layers_of(keys);
  counts.mlp_width = opt ? keys.size({"ffn_dim"}) : keys.size({"n_inner"}, 4 * counts.width);
  Form form;
  form.tied = true;
  form.gated = false;
  form.fused = !opt;
  form.qkv_bias = form.output_bias = form.mlp_bias = keys.flag({"enable_bias"}, true);
  form.norm_bias = true;
  form.norm_weight = keys.flag({"layer_norm_elementwise_affine"}, true);
  const uint64_t narrow = keys.size({"word_embed_proj_dim"}, counts.width);  // OPT 350m only
  counter.table(counts.vocabulary, narrow);
  if (narrow != counts.width) counter.matrix(counts.width, narrow);
  if (opt) counter.table(counts.context + 2, counts.width);
  if (bloom) norm(counter, form, counts.width);
  if (!opt && !bloom) counter.table(counts.context, counts.width);
  for (uint64_t layer = 0; layer < layers && keys.status().ok(); ++layer) {
    counter.begin_layer();
    attention(counter, form, counts);
    feed_forward(counter, form, counts.width, counts.mlp_width);
    for (int i = 0; i < 2; ++i) norm(counter, form, counts.width);
  }
  counter.begin_head();
  if (keys.flag({"do_layer_norm_before"}, true)) norm(counter, form, counts.width);
  if (narrow != counts.width) counter.matrix(narrow, counts.width);
  counts.tied = keys.flag({"tie_word_embeddings"}, true);
  if (!counts.tied) counter.matrix(counts.vocabulary, narrow);
}

void count_falcon(Keys& keys, Counter& counter, ConfigCounts& counts) {
  read_shape(keys, counts);
  const bool decoder = keys.flag({"new_decoder_architecture"}, false);
  const bool parallel = keys.flag({"parallel_attn"}, true);
  if (!decoder) counts.kv_heads = keys.flag({"multi_query"}, true) ? 1 : counts.heads;
  counts.mlp_width = keys.size({"ffn_hidden_size"}, 4 * counts.width);
  Form form;
  form.tied = true;
  form.gated = false;
  form.fused = form.norm_bias = true;
  form.qkv_bias = form.output_bias = form.mlp_bias = keys.flag({"bias"}, false);
  const uint64_t beside = keys.count({"num_ln_in_parallel_attn"}, decoder ? 2 : 1);
  form.norms = !parallel || (decoder && beside == 2) ? 2 : 1;
  const uint64_t layers = layers_of(keys);
  counter.table(counts.vocabulary, counts.width);
  for (uint64_t layer = 0; layer < layers && keys.status().ok(); ++layer) {
    counter.begin_layer();
    attention(counter, form, counts);
    feed_forward(counter, form, counts.width, counts.mlp_width);
    for (uint64_t i = 0; i < form.norms; ++i) norm(counter, form, counts.width);
  }
  counter.begin_head();
  norm(counter, form, counts.width);
  output_head(keys, counter, form, counts);
}

void count_t5(Keys& keys, Counter& counter, ConfigCounts& counts) {
  read_shape(keys, counts);
  counts.context = keys.size({"n_positions"}, 512, kVocabularyMax);
  counts.mlp_width = keys.size({"d_ff"});
  Form form;
  form.tied = true;
  form.gated = counts.gated = keys.text({"feed_forward_proj"}, "relu").starts_with("gated");
  const uint64_t buckets = keys.size({"relative_attention_num_buckets"}, 32);
  const uint64_t encoder = layers_of(keys);
  const uint64_t decoder = keys.size({"num_decoder_layers"}, encoder, kLayersMax);
  counter.table(counts.vocabulary, counts.width);
  for (uint64_t layer = 0; layer < encoder + decoder && keys.status().ok(); ++layer) {
    const bool decodes = layer >= encoder;
    counter.begin_layer();
    for (int i = 0; i < (decodes ? 2 : 1); ++i) {
      attention(counter, form, counts);
      norm(counter, form, counts.width);
    }
    if (layer == 0 || layer == encoder) counter.table(buckets, counts.heads);
    feed_forward(counter, form, counts.width, counts.mlp_width);
    norm(counter, form, counts.width);
  }
  counter.begin_head();
  for (int i = 0; i < 2; ++i) norm(counter, form, counts.width);
  output_head(keys, counter, form, counts);
}

/// Encoders after BERT: norms follow what they normalize, and the head depends on the class.
void count_bert(Keys& keys, Counter& counter, ConfigCounts& counts) {
  read_shape(keys, counts);
  counts.mlp_width = keys.size({"intermediate_size"});
  Form form;
  form.gated = false;
  form.qkv_bias = form.output_bias = form.mlp_bias = form.norm_bias = true;
  const uint64_t layers = layers_of(keys);
  counter.table(counts.vocabulary, counts.width);
  counter.table(counts.context, counts.width);
  counter.table(keys.size({"type_vocab_size"}, 2), counts.width);
  norm(counter, form, counts.width);
  for (uint64_t layer = 0; layer < layers && keys.status().ok(); ++layer) {
    counter.begin_layer();
    attention(counter, form, counts);
    feed_forward(counter, form, counts.width, counts.mlp_width);
    for (int i = 0; i < 2; ++i) norm(counter, form, counts.width);
  }
  counter.begin_head();
  counter.matrix(counts.width, counts.width, true);  // of the pooler, or of the masked tokens' head
  if (keys.architecture_ends("Model")) return;
  if (keys.architecture_ends("ForSequenceClassification")) {
    const Json* labels = keys.find({"id2label"});
    counter.matrix(labels != nullptr && labels->is_object() ? labels->size() : 2, counts.width,
                   true);
    return;
  }
  norm(counter, form, counts.width);
  form.tied = form.head_bias = true;
  output_head(keys, counter, form, counts);
}

void count_vit(Keys& keys, Counter& counter, ConfigCounts& counts) {
  counts.width = keys.size({"hidden_size"});
  counts.heads = counts.kv_heads = keys.size({"num_attention_heads"});
  counts.head_width = counts.heads == 0 ? 0 : counts.width / counts.heads;
  counts.mlp_width = keys.size({"intermediate_size"});
  const uint64_t image = keys.size({"image_size"}, 224);
  const uint64_t patch = keys.size({"patch_size"}, 16);
  const uint64_t layers = layers_of(keys);
  Form form;
  form.gated = false;
  form.qkv_bias = keys.flag({"qkv_bias"}, true);
  form.output_bias = form.mlp_bias = form.norm_bias = true;
  if (!keys.status().ok()) return;
  const uint64_t across = image / patch;
  counts.context = across * across + 1;
  counter.vector(counts.width);
  counter.table(counts.context, counts.width);
  counter.matrix(counts.width, keys.size({"num_channels"}, 3) * patch * patch, true);
  for (uint64_t layer = 0; layer < layers; ++layer) {
    counter.begin_layer();
    attention(counter, form, counts);
    feed_forward(counter, form, counts.width, counts.mlp_width);
    for (int i = 0; i < 2; ++i) norm(counter, form, counts.width);
  }
  counter.begin_head();
  norm(counter, form, counts.width);
  const Json* labels = keys.find({"id2label"});
  const bool pools = keys.architecture_ends("Model");
  counter.matrix(pools ? keys.size({"pooler_output_size"}, counts.width)
                 : labels != nullptr && labels->is_object() ? labels->size()
                                                            : 2,
                 counts.width, true);
}

void count_mamba(Keys& keys, const std::string& type, Counter& counter, ConfigCounts& counts) {
  const bool second = type == "mamba2";
  counts.width = counts.head_width = keys.size({"hidden_size", "d_model"});
  counts.heads = counts.kv_heads = 1;
  counts.vocabulary = keys.size({"vocab_size"}, {}, kVocabularyMax);
  counts.context = keys.size({"max_position_embeddings"}, 2048, kVocabularyMax);
  const uint64_t inner =
      second ? keys.size({"expand"}, 2) * counts.width
             : keys.size({"intermediate_size", "d_inner"}, keys.size({"expand"}, 2) * counts.width);
  counts.mlp_width = inner;
  const uint64_t states = keys.size({"state_size"}, second ? 128 : 16);
  const uint64_t kernel = keys.size({"conv_kernel"}, 4);
  const bool bias = keys.flag({"use_bias"}, false);
  const bool convolution_bias = keys.flag({"use_conv_bias"}, true);
  const uint64_t layers = layers_of(keys);
  counter.table(counts.vocabulary, counts.width);
  for (uint64_t layer = 0; layer < layers && keys.status().ok(); ++layer) {
    counter.begin_layer();
    counter.vector(counts.width);
    if (!second) {
      state_space(counter, counts.width, inner, states, kernel,
                  step_rank(keys, "time_step_rank", counts.width), bias, convolution_bias, false);
      continue;
    }
    counter.layer().attends = false;
    const uint64_t heads = keys.size({"num_heads"}, 128);
    const uint64_t channels = inner + 2 * keys.size({"n_groups"}, 8) * states;
    counter.matrix(inner + channels + heads, counts.width, bias);
    counter.matrix(channels, kernel, convolution_bias);
    counter.vector(3 * heads);
    counter.vector(inner);
    counter.matrix(counts.width, inner, bias);
  }
  counter.begin_head();
  counter.vector(counts.width);
  Form form;
  form.tied = !second;
  output_head(keys, counter, form, counts);
}

void count_jamba(Keys& keys, Counter& counter, ConfigCounts& counts) {
  read_shape(keys, counts);
  const Form form;
  counts.gated = true;
  const uint64_t dense = keys.size({"intermediate_size"});
  const uint64_t period = keys.size({"attn_layer_period"}, 8);
  const uint64_t offset = keys.count({"attn_layer_offset"}, 4);
  const uint64_t inner = keys.size({"mamba_expand"}, 2) * counts.width;
  const uint64_t layers = layers_of(keys);
  counter.table(counts.vocabulary, counts.width);
  for (uint64_t layer = 0; layer < layers && keys.status().ok(); ++layer) {
    counter.begin_layer();
    for (int i = 0; i < 2; ++i) norm(counter, form, counts.width);
    if (layer % period == offset) {
      attention(counter, form, counts);
    } else {
      state_space(counter, counts.width, inner, keys.size({"mamba_d_state"}, 16),
                  keys.size({"mamba_d_conv"}, 4), step_rank(keys, "mamba_dt_rank", counts.width),
                  keys.flag({"mamba_proj_bias"}, false), keys.flag({"mamba_conv_bias"}, true),
                  true);
    }
    const Experts experts = experts_of(keys, "jamba", layer);
    if (experts.count == 0) {
      feed_forward(counter, form, counts.width, dense);
    } else {
      mixture(counter, experts, counts.width);
    }
    counts.mlp_width = std::max(counts.mlp_width, dense * std::max<uint64_t>(1, experts.per_token));
  }
  counter.begin_head();
  norm(counter, form, counts.width);
  output_head(keys, counter, form, counts);
}

/// Counts a model of an unknown family, by the usual names, with so many parameters.
void count_unknown(Keys& keys, uint64_t parameters, ConfigCounts& counts) {
  read_shape(keys, counts);
  const uint64_t layers = layers_of(keys);
  counts.mlp_width = keys.size({"intermediate_size", "ffn_dim", "n_inner"}, 4 * counts.width);
  counts.gated = true;
  counts.tied = keys.flag({"tie_word_embeddings"}, false);
  counts.embedding = product({counts.vocabulary, counts.width});
  counts.head = counts.width + (counts.tied ? 0 : counts.embedding);
  counts.largest = std::max(counts.embedding, product({counts.width, counts.mlp_width}));
  if (!keys.status().ok()) return;
  if (parameters <= counts.embedding + counts.head + layers) {
    keys.fail(
        Status(ErrorCode::kInvalidArgument,
               fmt::format("{} parameters are fewer than embedding and head have", parameters),
               "Give the number of all parameters", keys.place()));
    return;
  }
  const uint64_t rest = parameters - counts.embedding - counts.head;
  counts.layers.assign(layers, {rest / layers, rest / layers, 0, true});
  counts.head += rest % layers;
}

constexpr std::array<std::string_view, 23> kDecoders{
    "llama",     "mistral",     "mixtral",     "qwen2",      "qwen2_moe",  "qwen3",
    "qwen3_moe", "gemma",       "gemma2",      "phi",        "phi3",       "gemma3_text",
    "smollm3",   "gpt_neox",    "gpt_oss",     "olmo",       "olmo2",      "olmoe",
    "granite",   "deepseek_v2", "deepseek_v3", "starcoder2", "llama4_text"};
constexpr std::array<std::string_view, 10> kOthers{"gpt2", "opt", "bloom", "falcon", "t5",
                                                   "bert", "vit", "mamba", "mamba2", "jamba"};

/// Python's json writes infinity and what is no number as words, which JSON has not.
std::string without_words(std::string_view text) {
  std::string plain;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    std::string_view next = text.substr(i, 1);
    if (quoted && next == "\\") {
      next = text.substr(i, 2);
    } else if (next == "\"") {
      quoted = !quoted;
    }
    std::string_view written = next;
    for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
      if (quoted || !text.substr(i).starts_with(word)) continue;
      next = word;
      written = "null";
    }
    plain += written;
    i += next.size() - 1;
  }
  return plain;
}

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void count_known(Keys& keys, const std::string& type, Counter& counter, ConfigCounts& counts) {
  if (contains(kDecoders, type)) return count_decoder(keys, type, counter, counts);
  if (type == "falcon") return count_falcon(keys, counter, counts);
  if (type == "t5") return count_t5(keys, counter, counts);
  if (type == "bert") return count_bert(keys, counter, counts);
  if (type == "vit") return count_vit(keys, counter, counts);
  if (type == "jamba") return count_jamba(keys, counter, counts);
  if (type == "mamba" || type == "mamba2") return count_mamba(keys, type, counter, counts);
  count_gpt2(keys, type, counter, counts);
}

}  // namespace

uint32_t class_default(std::string_view type, std::string_view key) {
  return class_defaults().value(std::string(type), Json::object()).value(std::string(key), 0u);
}

uint64_t ConfigCounts::parameters() const {
  uint64_t all = embedding + head;
  for (const LayerCount& layer : layers) all = std::min(kParametersMax + 1, all + layer.parameters);
  return all;
}

Result<ConfigCounts> count_config(const std::string& text, const std::string& path,
                                  uint64_t parameters) {
  SI_RETURN_IF_ERROR(KeyReader::check_keys(text, "config.json", path));
  const Json object = base::parse_json(without_words(text));
  Keys keys(object, path);
  if (!object.is_object()) {
    return Status(ErrorCode::kCorrupt, "config.json is not a JSON object",
                  "Get the model's folder again", keys.place());
  }
  ConfigCounts counts;
  counts.type = keys.text({"model_type"}, "");
  const bool known = contains(kDecoders, counts.type) || contains(kOthers, counts.type);
  if (!known && parameters == 0) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("config.json: model_type is \"{}\", whose parameters are not counted here",
                    base::printable(counts.type) ? counts.type : "?"),
        fmt::format("Known are {}, {}", fmt::join(kDecoders, ", "), fmt::join(kOthers, ", ")),
        keys.place());
  }
  if (known && parameters != 0) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("the parameters of a {} follow from its config.json", counts.type),
                  "Leave out their number", keys.place());
  }
  Counter counter(counts);
  keys.set_type(counts.type);
  if (known) {
    count_known(keys, counts.type, counter, counts);
  } else {
    // Models of texts and images have the text's part in an object of its own.
    const Json* inner = keys.find({"text_config"});
    Keys shape(inner != nullptr && inner->is_object() ? *inner : object, path);
    count_unknown(shape, parameters, counts);
    keys.fail(shape.status());
  }
  if (keys.status().ok() && counts.parameters() > kParametersMax) {
    keys.fail(Status(ErrorCode::kCorrupt, "config.json: the model would have above 1e15 parameters",
                     "Check the file", keys.place()));
  }
  SI_RETURN_IF_ERROR(keys.status());
  return counts;
}

plan::TrainingModel training_model(const Architecture& model, uint64_t tokens) {
  plan::TrainingModel shape;
  shape.parameters = make_units(model).back().end();
  shape.layers = model.layers;
  shape.width = model.width;
  shape.heads = model.heads;
  shape.query_width = model.query_width();
  shape.kv_width = model.kv_width();
  // The width that a token goes through, in all of its experts.
  shape.mlp_width = uint64_t{model.mlp_width} * std::max(1u, model.experts_per_token);
  shape.gated = model.gated;
  shape.vocabulary = model.vocabulary;
  shape.tokens = tokens;
  shape.tied = model.tied_head;
  // Gate and up are one parameter to the trainer, and so are query, key and value.
  shape.largest_parameter = shape.width * std::max({shape.vocabulary, 2 * uint64_t{model.mlp_width},
                                                    shape.query_width + 2 * shape.kv_width});
  return shape;
}

}  // namespace smartinf::model
