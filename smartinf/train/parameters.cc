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
  plan::ModelElements elements;
  elements.layers = model.layers;
  elements.embedding = space.find("model.layers.0.input_layernorm.weight")->first;
  const uint64_t layers_end = space.find("model.norm.weight")->first;
  elements.layer = (layers_end - elements.embedding) / model.layers;
  elements.head = space.count() - layers_end;
  return plan::make_units(elements);
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
