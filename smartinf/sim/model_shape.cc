#include "smartinf/sim/model_shape.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/check.h"
#include "smartinf/base/nearest.h"
#include "smartinf/model/config_json.h"

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

std::string_view type_of(std::string_view name) {
  if (name.starts_with("llama3-")) return "llama";
  if (name.starts_with("qwen2.5-")) return "qwen2";
  if (name.starts_with("qwen3-")) return "qwen3";
  return name.substr(0, name.find('-'));
}

/// A config.json of the model. All llama3 sizes but 8B and 70B are of releases 3.1 and 3.2, which
/// scale rotary positions.
std::string config_of(const ModelShape& model) {
  nlohmann::json config{{"model_type", model.type}, {"vocab_size", model.vocabulary}};
  if (model.type == "gpt2") {
    config.update({{"n_layer", model.layers},
                   {"n_embd", model.hidden},
                   {"n_head", model.heads},
                   {"n_inner", model.feed_forward},
                   {"n_positions", model.positions}});
    return config.dump();
  }
  config.update({{"num_hidden_layers", model.layers},
                 {"hidden_size", model.hidden},
                 {"num_attention_heads", model.heads},
                 {"num_key_value_heads", model.kv_heads},
                 {"head_dim", model.head_size},
                 {"intermediate_size", model.feed_forward},
                 {"tie_word_embeddings", model.tied},
                 {"rope_theta", model.type == "llama" ? 5e5 : 1e6},
                 {"rms_norm_eps", model.type == "llama" ? 1e-5 : 1e-6}});
  const std::string_view name = model.name;
  if (model.type == "llama" && name != "llama3-8B" && name != "llama3-70B") {
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", name == "llama3-405B" ? 8.0 : 32.0},
                              {"low_freq_factor", 1.0},
                              {"high_freq_factor", 4.0},
                              {"original_max_position_embeddings", 8192}};
  }
  return config.dump();
}

/// Reads the architecture as `smartinf train` does.
void read_architecture(const std::string& config, const std::string& origin, ModelShape& model) {
  Result<model::Config> read = model::read_config(config, origin, {});
  model.architecture.reset();
  model.train_lacks = Status();
  if (read.ok()) {
    model.architecture = std::move(read->architecture);
  } else {
    model.train_lacks = std::move(read).status();
  }
}

}  // namespace

uint64_t ModelShape::layer_parameters(uint64_t layer) const {
  if (counts) return counts->layers[layer].parameters;
  const uint64_t query = heads * head_size;
  const uint64_t key_value = kv_heads * head_size;
  uint64_t count = hidden * query * 2 + hidden * key_value * 2;
  count += hidden * feed_forward * (gated ? 3 : 2);
  count += 2 * hidden;  // norms
  if (biases) count += query + 2 * key_value + hidden + feed_forward + hidden + 2 * hidden;
  return count;
}

uint64_t ModelShape::embedding_parameters() const {
  return counts ? counts->embedding : hidden * (vocabulary + positions);
}

uint64_t ModelShape::head_parameters() const {
  if (counts) return counts->head;
  return hidden * (biases ? 2 : 1) + (tied ? 0 : hidden * vocabulary);
}

uint64_t ModelShape::parameters() const {
  if (counts) return counts->parameters();
  return embedding_parameters() + layers * layer_parameters() + head_parameters();
}

double ModelShape::active_parameters() const {
  if (layers == 0) return 0;
  if (!counts) {
    return static_cast<double>(hidden) *
           static_cast<double>(2 * (heads + kv_heads) * head_size + feed_forward * (gated ? 3 : 2));
  }
  double active = 0;
  for (const model::LayerCount& layer : counts->layers) active += static_cast<double>(layer.active);
  return active / static_cast<double>(layers);
}

ModelShape ModelShape::with_layers(uint64_t fewer) const {
  ModelShape model = *this;
  model.layers = fewer;
  if (model.counts) model.counts->layers.resize(fewer);
  if (model.architecture) model.architecture->layers = static_cast<uint32_t>(fewer);
  return model;
}

ModelShape ModelShape::stage(uint32_t begin, uint32_t end) const {
  const std::vector<plan::Unit> all = units();
  model::ConfigCounts part;
  if (begin == 0) part.embedding = embedding_parameters();
  if (end == all.size()) part.head = head_parameters();
  for (uint32_t unit = begin; unit < end; ++unit) {
    for (uint64_t l = all[unit].first_layer; l < all[unit].first_layer + all[unit].layers; ++l) {
      part.layers.push_back(counts ? counts->layers[l]
                                   : model::LayerCount{layer_parameters(l),
                                                       static_cast<uint64_t>(active_parameters()),
                                                       0, true});
    }
  }
  ModelShape model = *this;
  model.whole = false;
  model.layers = part.layers.size();
  if (end < all.size()) model.vocabulary = 0;
  model.architecture.reset();
  model.counts = std::move(part);
  return model;
}

plan::ParameterSpace ModelShape::space() const {
  plan::ParameterSpace space;
  if (counts && architecture) {
    return *model::make_parameter_space(*architecture);
  }
  const auto add = [&](std::string parameter, std::vector<uint64_t> shape) {
    const Status added = space.add(std::move(parameter), std::move(shape), 0);
    SI_CHECK(added.ok(), added.to_string());
  };
  // GPT-2's matrices are stored as inputs times outputs.
  const auto matrix = [&](const std::string& parameter, uint64_t out, uint64_t in) {
    add(parameter, biases ? std::vector{in, out} : std::vector{out, in});
    if (biases) add(parameter + ".bias", {out});
  };
  const auto norm = [&](const std::string& parameter) {
    add(parameter, {hidden});
    if (biases) add(parameter + ".bias", {hidden});
  };
  if (counts) {
    add("embedding", {counts->embedding});
    for (uint64_t l = 0; l < layers; ++l) add(fmt::format("{}", l), {layer_parameters(l)});
    if (counts->head > 0) add("head", {counts->head});
    return space;
  }
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
  double attending = 1;
  if (counts && layers > 0) {
    const auto attends = [](const model::LayerCount& layer) { return layer.attends; };
    attending = static_cast<double>(std::ranges::count_if(counts->layers, attends)) /
                static_cast<double>(layers);
  }
  const double scores = 4 * static_cast<double>(sequence) * static_cast<double>(heads * head_size);
  return static_cast<double>(tokens()) * (2 * active_parameters() + attending * scores);
}

double ModelShape::head_forward_flops() const {
  return 2.0 * static_cast<double>(tokens()) * static_cast<double>(hidden) *
         static_cast<double>(vocabulary);
}

std::vector<plan::Unit> ModelShape::units() const {
  if (architecture) return model::make_units(*architecture);
  return plan::make_units({embedding_parameters(), layer_parameters(),
                           static_cast<uint32_t>(layers), head_parameters()});
}

plan::TrainingModel ModelShape::training_model(plan::TrainingProgram program) const {
  if (program == plan::TrainingProgram::kTrain && architecture) {
    return model::training_model(*architecture, tokens());
  }
  plan::TrainingModel model;
  model.parameters = parameters();
  model.largest_parameter =
      counts ? counts->largest : hidden * std::max({vocabulary, feed_forward, heads * head_size});
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
    model.type = type_of(preset.name);
    SI_RETURN_IF_ERROR(complete_model(model));
    return model;
  }
  const std::vector<std::string_view> names = model_preset_names();
  const std::string_view nearest = base::nearest_name(name, names);
  return Status(
      ErrorCode::kNotFound, fmt::format("unknown model '{}'", name),
      nearest.empty()
          ? fmt::format("Known models: {}; or give a Hugging Face config.json, or its folder.",
                        fmt::join(names, ", "))
          : fmt::format("Did you mean {}? `smartinf simulate --list` names all.", nearest));
}

Status complete_model(ModelShape& model) {
  const std::string config = config_of(model);
  read_architecture(config, model.name, model);
  // The shapes of the paper's own models are what its figures were made with.
  if (!model.gated) return {};
  SI_ASSIGN_OR_RETURN(model.counts, model::count_config(config, model.name));
  return {};
}

Result<ModelShape> model_from_hf_config(const std::string& text, const std::string& origin,
                                        uint64_t parameters) {
  SI_ASSIGN_OR_RETURN(model::ConfigCounts counts, model::count_config(text, origin, parameters));
  ModelShape model;
  model.name = counts.type.empty() ? origin : counts.type;
  model.type = counts.type;
  model.layers = counts.layers.size();
  model.hidden = counts.width;
  model.heads = counts.heads;
  model.kv_heads = counts.kv_heads;
  model.head_size = counts.head_width;
  model.feed_forward = counts.mlp_width;
  model.vocabulary = counts.vocabulary;
  model.sequence = std::min<uint64_t>(counts.context, 2048);
  model.gated = counts.gated;
  model.tied = counts.tied;
  model.biases = false;
  model.counts = std::move(counts);
  read_architecture(text, origin, model);
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
       {Named{"layers", model.whole ? model.layers : 1}, Named{"hidden", model.hidden},
        Named{"heads", model.heads}, Named{"kv-heads", model.kv_heads},
        Named{"head size", model.head_size}, Named{"feed-forward", model.feed_forward},
        Named{"sequence", model.sequence}, Named{"batch", model.batch}}) {
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
