#include "smartinf/train/parameters.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "smartinf/train/random.h"

namespace smartinf::train {

base::Result<plan::ParameterSpace> make_parameter_space(const ModelOptions& model) {
  const uint64_t width = model.width;
  const uint64_t kv_width = uint64_t{model.kv_heads} * model.head_width();
  const uint64_t mlp_width = model.mlp_width;
  plan::ParameterSpace space;
  SI_RETURN_IF_ERROR(
      space.add("model.embed_tokens.weight", {model.vocabulary, width}, kMatrixGroup));
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    const auto name = [layer](std::string_view part) {
      return fmt::format("model.layers.{}.{}.weight", layer, part);
    };
    SI_RETURN_IF_ERROR(space.add(name("input_layernorm"), {width}, kVectorGroup));
    SI_RETURN_IF_ERROR(space.add(name("self_attn.q_proj"), {width, width}, kMatrixGroup));
    SI_RETURN_IF_ERROR(space.add(name("self_attn.k_proj"), {kv_width, width}, kMatrixGroup));
    SI_RETURN_IF_ERROR(space.add(name("self_attn.v_proj"), {kv_width, width}, kMatrixGroup));
    SI_RETURN_IF_ERROR(space.add(name("self_attn.o_proj"), {width, width}, kMatrixGroup));
    SI_RETURN_IF_ERROR(space.add(name("post_attention_layernorm"), {width}, kVectorGroup));
    SI_RETURN_IF_ERROR(space.add(name("mlp.gate_proj"), {mlp_width, width}, kMatrixGroup));
    SI_RETURN_IF_ERROR(space.add(name("mlp.up_proj"), {mlp_width, width}, kMatrixGroup));
    SI_RETURN_IF_ERROR(space.add(name("mlp.down_proj"), {width, mlp_width}, kMatrixGroup));
  }
  SI_RETURN_IF_ERROR(space.add("model.norm.weight", {width}, kVectorGroup));
  if (!model.tied_head) {
    SI_RETURN_IF_ERROR(space.add("lm_head.weight", {model.vocabulary, width}, kMatrixGroup));
  }
  return space;
}

std::vector<plan::Unit> model_units(const ModelOptions& model, const plan::ParameterSpace& space) {
  // A forward waits for a whole unit's weights, and a unit takes a slot: not too much at once.
  constexpr uint64_t kUnitsMin = 16;
  std::vector<plan::Unit> units;
  const auto first_of = [&](const std::string& name) { return space.find(name)->first; };
  const auto layer_begin = [&](uint32_t layer) {
    return layer < model.layers
               ? first_of(fmt::format("model.layers.{}.input_layernorm.weight", layer))
               : first_of("model.norm.weight");
  };
  units.push_back({0, layer_begin(0), 0, 0});
  const uint64_t layer_elements = layer_begin(1) - layer_begin(0);
  const uint64_t group = std::max<uint64_t>(1, space.count() / kUnitsMin / layer_elements);
  for (uint32_t layer = 0; layer < model.layers;) {
    const auto layers = static_cast<uint32_t>(std::min<uint64_t>(group, model.layers - layer));
    const uint64_t first = layer_begin(layer);
    units.push_back({first, layer_begin(layer + layers) - first, layer, layers});
    layer += layers;
  }
  units.push_back({units.back().end(), space.count() - units.back().end(), 0, 0});
  return units;
}

InitialWeights::InitialWeights(const ModelOptions& model, const plan::ParameterSpace& space,
                               uint64_t seed)
    : space_(space), seed_(seed) {
  for (const plan::ParameterRange& range : space.ranges()) {
    const bool into_residual = range.name.ends_with("self_attn.o_proj.weight") ||
                               range.name.ends_with("mlp.down_proj.weight");
    const double scale = into_residual ? 1 / std::sqrt(2.0 * model.layers) : 1;
    std_.push_back(range.shape.size() == 1 ? 0 : model.init_std * scale);
  }
}

void InitialWeights::fill(uint64_t first, std::span<float> out) const {
  uint64_t element = first;
  const uint64_t end = first + out.size();
  while (element < end) {
    const plan::ParameterRange& range = space_.at(element);
    const double std = std_[static_cast<size_t>(&range - space_.ranges().data())];
    for (const uint64_t stop = std::min(end, range.first + range.count); element < stop;
         ++element) {
      out[element - first] =
          std == 0 ? 1.0f : static_cast<float>(std * random_normal(seed_, element));
    }
  }
}

}  // namespace smartinf::train
