#include "smartinf/sim/model_shape.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/check.h"
#include "smartinf/base/nearest.h"
#include "smartinf/base/text.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

struct Preset {
  std::string_view name;
  uint64_t layers, hidden, heads, kv_heads, head_size, feed_forward, vocabulary, positions;
  bool gated, tied, biases;
  uint64_t sequence;
};

constexpr Preset gpt2(std::string_view name, uint64_t layers, uint64_t hidden, uint64_t heads) {
  return {name, layers, hidden, heads, heads, hidden / heads, 4 * hidden, 50257,
          1024, false,  true,   true,  1024};
}
constexpr Preset bert(std::string_view name, uint64_t layers, uint64_t hidden, uint64_t heads) {
  return {name, layers, hidden, heads, heads, hidden / heads, 4 * hidden, 30522,
          1024, false,  true,   true,  1024};
}
constexpr Preset bloom(std::string_view name, uint64_t layers, uint64_t hidden, uint64_t heads) {
  return {name, layers, hidden, heads, heads, hidden / heads, 4 * hidden, 250880,
          0,    false,  true,   true,  1024};
}
constexpr Preset vit(std::string_view name, uint64_t layers, uint64_t hidden, uint64_t heads,
                     uint64_t tokens) {
  return {name, layers, hidden, heads, heads, hidden / heads, 4 * hidden,
          0,    tokens, false,  true,  true,  tokens};
}
constexpr Preset llama(std::string_view name, uint64_t layers, uint64_t hidden, uint64_t heads,
                       uint64_t kv_heads, uint64_t feed_forward, bool tied) {
  return {name, layers, hidden, heads, kv_heads, hidden / heads, feed_forward, 128256,
          0,    true,   tied,   false, 2048};
}
constexpr Preset qwen(std::string_view name, uint64_t layers, uint64_t hidden, uint64_t heads,
                      uint64_t kv_heads, uint64_t head_size, uint64_t feed_forward, bool tied) {
  return {name,   layers, hidden, heads, kv_heads, head_size, feed_forward,
          151936, 0,      true,   tied,  false,    2048};
}

// The paper prints sizes, not shapes. Those of GPT-2 and BERT are the published Megatron shapes of
// that size where there is one (1.16B, 1.7B, 2.5B, 8.3B) and else multiples of 26 layers x 5120 and
// 49 x 2560, which give the sizes the paper names.
constexpr std::array kPresets{
    gpt2("gpt2-0.12B", 12, 768, 12),
    gpt2("gpt2-0.34B", 24, 1024, 16),
    gpt2("gpt2-0.77B", 36, 1280, 20),
    gpt2("gpt2-1.16B", 24, 1920, 20),
    gpt2("gpt2-1.6B", 48, 1600, 25),
    gpt2("gpt2-1.7B", 24, 2304, 24),
    gpt2("gpt2-2.5B", 54, 1920, 20),
    gpt2("gpt2-4.0B", 49, 2560, 32),
    gpt2("gpt2-8.3B", 72, 3072, 32),
    gpt2("gpt2-8.4B", 26, 5120, 40),
    gpt2("gpt2-16.6B", 52, 5120, 40),
    gpt2("gpt2-20.5B", 64, 5120, 40),
    gpt2("gpt2-24.8B", 78, 5120, 40),
    gpt2("gpt2-33.0B", 104, 5120, 40),
    bert("bert-0.11B", 12, 768, 12),
    bert("bert-0.34B", 24, 1024, 16),
    bert("bert-4.0B", 50, 2560, 32),
    bert("bert-8.3B", 26, 5120, 40),
    bloom("bloom-3B", 30, 2560, 32),
    bloom("bloom-7.1B", 30, 4096, 32),
    vit("vit-0.30B", 24, 1024, 16, 197),
    vit("vit-0.63B", 32, 1280, 16, 257),
    llama("llama3-1B", 16, 2048, 32, 8, 8192, true),
    llama("llama3-3B", 28, 3072, 24, 8, 8192, true),
    llama("llama3-8B", 32, 4096, 32, 8, 14336, false),
    llama("llama3-70B", 80, 8192, 64, 8, 28672, false),
    llama("llama3-405B", 126, 16384, 128, 8, 53248, false),
    qwen("qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, true),
    qwen("qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, true),
    qwen("qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, true),
    qwen("qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, false),
    qwen("qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, false),
    qwen("qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, false),
    qwen("qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, false),
    qwen("qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, true),
    qwen("qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, true),
    qwen("qwen3-4B", 36, 2560, 32, 8, 128, 9728, true),
    qwen("qwen3-8B", 36, 4096, 32, 8, 128, 12288, false),
    qwen("qwen3-14B", 40, 5120, 40, 8, 128, 17408, false),
    qwen("qwen3-32B", 64, 5120, 64, 8, 128, 25600, false),
};

// Names that the paper or its readers use for the same thing.
constexpr std::array<std::pair<std::string_view, std::string_view>, 7> kAliases{{
    {"gpt2-774M", "gpt2-0.77B"},
    {"gpt2-1.5B", "gpt2-1.6B"},
    {"gpt2-33B", "gpt2-33.0B"},
    {"gpt2-4B", "gpt2-4.0B"},
    {"bert-345M", "bert-0.34B"},
    {"bert-4B", "bert-4.0B"},
    {"bloom-3.0B", "bloom-3B"},
}};

constexpr const char* kQkvBiases = "biases of query, key and value";
constexpr const char* kQkNorms = "norms of query and key";

/// What the published models of a family have beside their shape. All llama3 sizes but 8B and 70B
/// are of releases 3.1 and 3.2, which scale rotary positions.
void describe_preset(ModelShape& model) {
  const std::string_view name = model.name;
  if (name.starts_with("llama3-")) {
    model.rope_base = 500000;
    if (name != "llama3-8B" && name != "llama3-70B") {
      model.beyond_train.push_back("scaled rotary positions (\"llama3\")");
    }
  } else if (name.starts_with("qwen2.5-")) {
    model.rope_base = 1e6;
    model.norm_eps = 1e-6;
    model.beyond_train.push_back(kQkvBiases);
  } else if (name.starts_with("qwen3-")) {
    model.rope_base = 1e6;
    model.norm_eps = 1e-6;
    model.beyond_train.push_back(kQkNorms);
  } else {
    model.beyond_train.push_back("another architecture than Llama's");
  }
}

/// The same from a config.json of the Llama architecture.
void describe_config(const nlohmann::json& json, std::string_view type, ModelShape& model) {
  const auto lacks = [&](std::string what) { model.beyond_train.push_back(std::move(what)); };
  const auto there = [](const nlohmann::json& from, const char* key) {
    const auto found = from.find(key);
    return found != from.end() && !found->is_null() ? &*found : nullptr;
  };
  const auto number = [&](const nlohmann::json& from, const char* key, double& out) {
    const nlohmann::json* value = there(from, key);
    if (value != nullptr && value->is_number()) out = value->get<double>();
  };
  const auto is_true = [&](const char* key) {
    const nlohmann::json* value = there(json, key);
    return value != nullptr && value->is_boolean() && value->get<bool>();
  };
  model.norm_eps = 1e-6;  // where the file does not say, as in LlamaConfig
  number(json, "rope_theta", model.rope_base);
  number(json, "rms_norm_eps", model.norm_eps);
  number(json, "initializer_range", model.init_std);
  // transformers 5 has both in "rope_parameters"; before, "rope_scaling" stood alone.
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const nlohmann::json* rope = there(json, key);
    if (rope == nullptr || !rope->is_object()) continue;
    number(*rope, "rope_theta", model.rope_base);
    for (const char* kind : {"rope_type", "type"}) {
      const nlohmann::json* value = there(*rope, kind);
      if (value == nullptr || !value->is_string() || *value == "default") continue;
      lacks(fmt::format("scaled rotary positions (\"{}\")", value->get<std::string>()));
      break;
    }
  }
  if (type == "qwen2") {
    lacks(kQkvBiases);
  } else if (type == "qwen3") {
    lacks(kQkNorms);
  } else if (type != "llama" && type != "mistral" && !type.empty()) {
    lacks(fmt::format("the form of \"{}\"", type));
  }
  if (is_true("attention_bias")) lacks("biases in attention");
  if (is_true("mlp_bias")) lacks("biases in the feed-forward part");
  const bool windows =
      there(json, "use_sliding_window") == nullptr || is_true("use_sliding_window");
  const nlohmann::json* window = there(json, "sliding_window");
  if (window != nullptr && window->is_number() && windows) lacks("attention in a sliding window");
  const nlohmann::json* activation = there(json, "hidden_act");
  if (activation != nullptr && activation->is_string() && *activation != "silu") {
    lacks(fmt::format("the activation \"{}\"", activation->get<std::string>()));
  }
}

}  // namespace

uint64_t ModelShape::layer_parameters() const {
  const uint64_t query = heads * head_size;
  const uint64_t key_value = kv_heads * head_size;
  uint64_t count = hidden * query * 2 + hidden * key_value * 2;
  count += hidden * feed_forward * (gated ? 3 : 2);
  count += 2 * hidden;  // norms
  if (biases) count += query + 2 * key_value + hidden + feed_forward + hidden + 2 * hidden;
  return count;
}

uint64_t ModelShape::embedding_parameters() const { return hidden * (vocabulary + positions); }

uint64_t ModelShape::head_parameters() const {
  return hidden * (biases ? 2 : 1) + (tied ? 0 : hidden * vocabulary);
}

uint64_t ModelShape::parameters() const {
  return embedding_parameters() + layers * layer_parameters() + head_parameters();
}

plan::ParameterSpace ModelShape::space() const {
  plan::ParameterSpace space;
  const auto add = [&](std::string name, std::vector<uint64_t> shape) {
    const Status added = space.add(std::move(name), std::move(shape), 0);
    SI_CHECK(added.ok(), added.to_string());
  };
  // GPT-2's matrices are stored as inputs times outputs.
  const auto matrix = [&](const std::string& name, uint64_t out, uint64_t in) {
    add(name, biases ? std::vector{in, out} : std::vector{out, in});
    if (biases) add(name + ".bias", {out});
  };
  const auto norm = [&](const std::string& name) {
    add(name, {hidden});
    if (biases) add(name + ".bias", {hidden});
  };
  if (vocabulary > 0) add("embedding", {vocabulary, hidden});
  if (positions > 0) add("positions", {positions, hidden});
  for (uint64_t l = 0; l < layers; ++l) {
    const std::string layer = fmt::format("{}.", l);
    norm(layer + "attention_norm");
    if (biases) {
      matrix(layer + "qkv", (heads + 2 * kv_heads) * head_size, hidden);
    } else {
      matrix(layer + "q", heads * head_size, hidden);
      matrix(layer + "k", kv_heads * head_size, hidden);
      matrix(layer + "v", kv_heads * head_size, hidden);
    }
    matrix(layer + "output", hidden, heads * head_size);
    norm(layer + "norm");
    if (gated) matrix(layer + "gate", feed_forward, hidden);
    matrix(layer + "up", feed_forward, hidden);
    matrix(layer + "down", hidden, feed_forward);
  }
  norm("final_norm");
  if (!tied && vocabulary > 0) add("head", {vocabulary, hidden});
  return space;
}

double ModelShape::layer_forward_flops() const {
  const auto t = static_cast<double>(tokens());
  const double query = static_cast<double>(heads * head_size);
  const double key_value = static_cast<double>(kv_heads * head_size);
  const double h = static_cast<double>(hidden);
  const double matrices =
      h * query * 2 + h * key_value * 2 + h * static_cast<double>(feed_forward) * (gated ? 3 : 2);
  return t * (2 * matrices + 4 * static_cast<double>(sequence) * query);
}

double ModelShape::head_forward_flops() const {
  return 2.0 * static_cast<double>(tokens()) * static_cast<double>(hidden) *
         static_cast<double>(vocabulary);
}

std::vector<plan::Unit> ModelShape::units() const {
  return plan::make_units({embedding_parameters(), layer_parameters(),
                           static_cast<uint32_t>(layers), head_parameters()});
}

plan::TrainingModel ModelShape::training_model(plan::TrainingProgram program) const {
  plan::TrainingModel model;
  model.parameters = parameters();
  model.largest_parameter = hidden * std::max({vocabulary, feed_forward, heads * head_size});
  if (program == plan::TrainingProgram::kTrain && gated) {
    model.largest_parameter =
        hidden * std::max({vocabulary, 2 * feed_forward, (heads + 2 * kv_heads) * head_size});
  }
  model.layers = layers;
  model.width = hidden;
  model.heads = heads;
  model.query_width = heads * head_size;
  model.kv_width = kv_heads * head_size;
  model.mlp_width = feed_forward;
  model.vocabulary = vocabulary;
  model.tokens = tokens();
  model.gated = gated;
  model.tied = tied;
  return model;
}

double ModelShape::layer_activation_bytes() const {
  return static_cast<double>(tokens()) *
         (34.0 * static_cast<double>(hidden) + 5.0 * static_cast<double>(heads * sequence));
}

std::vector<std::string_view> model_preset_names() {
  std::vector<std::string_view> names;
  for (const Preset& preset : kPresets) names.push_back(preset.name);
  return names;
}

Result<ModelShape> model_preset(std::string_view name) {
  std::string_view wanted = name;
  for (const auto& [alias, meant] : kAliases) {
    if (base::same_name(alias, name)) wanted = meant;
  }
  for (const Preset& preset : kPresets) {
    if (!base::same_name(preset.name, wanted)) continue;
    ModelShape model;
    model.name = std::string(preset.name);
    model.layers = preset.layers;
    model.hidden = preset.hidden;
    model.heads = preset.heads;
    model.kv_heads = preset.kv_heads;
    model.head_size = preset.head_size;
    model.feed_forward = preset.feed_forward;
    model.vocabulary = preset.vocabulary;
    model.positions = preset.positions;
    model.gated = preset.gated;
    model.tied = preset.tied;
    model.biases = preset.biases;
    model.sequence = preset.sequence;
    describe_preset(model);
    return model;
  }
  const std::vector<std::string_view> names = model_preset_names();
  const std::string_view nearest = base::nearest_name(name, names);
  return Status(
      ErrorCode::kNotFound, fmt::format("unknown model '{}'", name),
      nearest.empty()
          ? fmt::format("Known models: {}; or give a Hugging Face config.json.",
                        fmt::join(names, ", "))
          : fmt::format("Did you mean {}? `smartinf simulate --list` names all.", nearest));
}

Result<ModelShape> model_from_hf_config(std::string_view json_text, std::string_view origin) {
  const auto fail = [&](std::string what) {
    base::ErrorPlace place;
    place.path = std::string(origin);
    return Status(ErrorCode::kInvalidArgument, std::move(what),
                  "It must be a Hugging Face config.json of a transformer.", std::move(place));
  };
  const nlohmann::json json = base::parse_json(json_text);
  if (!json.is_object()) return fail("not a JSON object");
  Status problem;
  // The families name the same dimension differently; the first name that is there counts.
  const auto dimension = [&](std::initializer_list<const char*> names,
                             uint64_t otherwise) -> uint64_t {
    for (const char* name : names) {
      const auto found = json.find(name);
      if (found == json.end() || found->is_null()) continue;
      if (!found->is_number_integer() || found->get<int64_t>() < 0) {
        if (problem.ok()) problem = fail(fmt::format("{} is not a whole number", name));
        return otherwise;
      }
      return found->get<uint64_t>();
    }
    return otherwise;
  };
  const auto flag = [&](const char* name, bool otherwise) {
    const auto found = json.find(name);
    return found != json.end() && found->is_boolean() ? found->get<bool>() : otherwise;
  };
  const auto type_entry = json.find("model_type");
  const std::string type =
      type_entry != json.end() && type_entry->is_string() ? type_entry->get<std::string>() : "";
  const bool old_form = type == "gpt2" || type == "bert" || type == "bloom" || type == "vit" ||
                        type == "roberta" || type == "opt" || type == "gpt_neox";

  ModelShape model;
  model.name = type.empty() ? std::string(origin) : type;
  model.layers = dimension({"num_hidden_layers", "n_layer"}, 0);
  model.hidden = dimension({"hidden_size", "n_embd"}, 0);
  model.heads = dimension({"num_attention_heads", "n_head"}, 0);
  if (!problem.ok()) return problem;
  if (model.layers == 0) return fail("num_hidden_layers (n_layer) is missing or zero");
  if (model.hidden == 0) return fail("hidden_size (n_embd) is missing or zero");
  if (model.heads == 0) return fail("num_attention_heads (n_head) is missing or zero");
  model.kv_heads = dimension({"num_key_value_heads"}, model.heads);
  model.head_size = dimension({"head_dim"}, 0);
  if (model.head_size == 0 && model.hidden % model.heads != 0) {
    return fail(
        fmt::format("{} attention heads do not divide the hidden size {}, and head_dim is missing",
                    model.heads, model.hidden));
  }
  if (model.head_size == 0) model.head_size = model.hidden / model.heads;
  model.feed_forward = dimension({"intermediate_size", "ffn_dim", "n_inner"}, 4 * model.hidden);
  model.vocabulary = dimension({"vocab_size"}, 0);
  if (model.vocabulary == 0 && type != "vit" && problem.ok()) {
    problem = fail("vocab_size is missing or zero");
  }
  const uint64_t context = dimension({"max_position_embeddings", "n_positions", "n_ctx"}, 2048);
  model.positions = old_form && type != "bloom" && type != "gpt_neox" ? context : 0;
  if (type == "vit") {
    const uint64_t image = dimension({"image_size"}, 224);
    const uint64_t patch = dimension({"patch_size"}, 16);
    if (patch == 0) return fail("patch_size is zero");
    model.positions = (image / patch) * (image / patch) + 1;
    model.vocabulary = 0;
  }
  model.sequence =
      model.positions > 0 && type == "vit" ? model.positions : std::min<uint64_t>(context, 2048);
  model.gated = !old_form;
  model.biases = old_form;
  model.tied = flag("tie_word_embeddings", old_form);
  if (old_form) {
    model.beyond_train.push_back("another architecture than Llama's");
  } else {
    describe_config(json, type, model);
  }
  if (!problem.ok()) return problem;
  SI_RETURN_IF_ERROR(check_model(model).with_context(origin));
  return model;
}

Status check_model(const ModelShape& model) {
  const auto fail = [&](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  struct Named {
    const char* name;
    uint64_t value;
  };
  for (const auto& [name, value] :
       {Named{"layers", model.layers}, Named{"hidden", model.hidden}, Named{"heads", model.heads},
        Named{"kv-heads", model.kv_heads}, Named{"head size", model.head_size},
        Named{"feed-forward", model.feed_forward}, Named{"sequence", model.sequence},
        Named{"batch", model.batch}}) {
    if (value == 0) return fail(fmt::format("{} is zero", name), "Give at least 1.");
    if (value > (uint64_t{1} << 24)) {
      return fail(fmt::format("{} is {}, which no machine of today holds", name, value),
                  "Give at most 16777216.");
    }
  }
  if (model.vocabulary > (uint64_t{1} << 28)) {
    return fail("the vocabulary is above 2^28", "Give a smaller one.");
  }
  if (model.heads % model.kv_heads != 0) {
    return fail(
        fmt::format("{} heads do not divide into {} key-value heads", model.heads, model.kv_heads),
        "Heads must be a multiple of kv-heads.");
  }
  const double parameters =
      static_cast<double>(model.layers) *
      (4.0 * static_cast<double>(model.hidden) *
           static_cast<double>(model.heads * model.head_size) +
       3.0 * static_cast<double>(model.hidden) * static_cast<double>(model.feed_forward));
  if (parameters > 1e15) {
    return fail(fmt::format("the model would have {:.1e} parameters", parameters),
                "The simulator counts up to 1e15.");
  }
  return {};
}

}  // namespace smartinf::sim
