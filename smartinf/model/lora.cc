#include "smartinf/model/lora.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace smartinf::model {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr std::string_view kWeight = ".weight";

/// The part of a name behind the layer's number: "self_attn.q_proj".
std::string_view within_layer(std::string_view module) {
  const size_t digits = module.find_first_of("0123456789");
  return module.substr(module.find('.', digits) + 1);
}

/// Whether a target is the module's name or its end, whole words.
bool names(std::string_view target, std::string_view module) {
  return target == kAllLinear || target == module ||
         (module.ends_with(target) && module[module.size() - target.size() - 1] == '.');
}

}  // namespace

Result<std::vector<LoraTarget>> lora_targets(const Architecture& model,
                                             const LoraOptions& options) {
  std::vector<LoraTarget> targets;
  std::set<std::string> possible;
  std::vector<bool> named(options.targets.size());
  Part part = Part::kEmbedding;
  uint64_t offset = 0;
  uint32_t layer = 0;
  bool in_layers = false;
  for (const Tensor& tensor : tensors_of(model)) {
    if (tensor.part == Part::kAttentionNorm) {
      layer += in_layers ? 1 : 0;
      in_layers = true;
    }
    offset = tensor.part == part ? offset : 0;
    part = tensor.part;
    const bool expert = model.experts != 0 && (part == Part::kGateUp || part == Part::kDown);
    const bool linear =
        part == Part::kQkv || part == Part::kOutput || part == Part::kGateUp || part == Part::kDown;
    if (!linear || expert) continue;
    const uint64_t out = tensor.shape[model.transposed ? 1 : 0];
    const uint64_t in = tensor.shape[model.transposed ? 0 : 1];
    const std::string module = tensor.name.substr(0, tensor.name.size() - kWeight.size());
    possible.emplace(within_layer(module));
    bool chosen = false;
    for (size_t i = 0; i < options.targets.size(); ++i) {
      if (!names(options.targets[i], module)) continue;
      named[i] = chosen = true;
    }
    if (chosen) targets.push_back({module, part, offset, in, out, layer, 0, 0});
    offset += out;
  }
  for (size_t i = 0; i < named.size(); ++i) {
    if (named[i]) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("lora.targets: \"{}\" is no matrix of a layer", options.targets[i]),
                  fmt::format("There are {}, or \"{}\"", fmt::join(possible, ", "), kAllLinear));
  }
  uint64_t first = 0;
  for (LoraTarget& target : targets) {
    target.first_a = first;
    target.first_b = first + options.rank * target.in;
    first = target.first_b + options.rank * target.out;
  }
  return targets;
}

Result<plan::ParameterSpace> lora_space(std::span<const LoraTarget> targets, uint32_t rank) {
  plan::ParameterSpace space;
  for (const LoraTarget& target : targets) {
    const std::string module = "base_model.model." + target.module;
    SI_RETURN_IF_ERROR(space.add(module + ".lora_A.weight", {rank, target.in}, kMatrixGroup));
    SI_RETURN_IF_ERROR(space.add(module + ".lora_B.weight", {target.out, rank}, kMatrixGroup));
  }
  return space;
}

void fill_lora(std::span<const LoraTarget> targets, uint32_t rank, uint64_t first,
               std::span<float> out, double (*draw)(uint64_t seed, uint64_t element),
               uint64_t seed) {
  auto target = std::upper_bound(
      targets.begin(), targets.end(), first,
      [](uint64_t element, const LoraTarget& one) { return element < one.first_a; });
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t element = first + i;
    while (target != targets.end() && element >= target->first_a) ++target;
    const LoraTarget& here = *(target - 1);
    const double bound = 1 / std::sqrt(static_cast<double>(here.in));
    out[i] = element < here.first_a + rank * here.in
                 ? static_cast<float>(bound * (2 * draw(seed, element) - 1))
                 : 0.0f;
  }
}

void add_lora(const LoraTarget& target, const LoraOptions& options, std::span<const float> adapters,
              bool transposed, uint64_t row, std::span<float> rows) {
  const uint64_t rank = options.rank;
  const float* a = adapters.data() + target.first_a;  // [rank, in]
  const float* b = adapters.data() + target.first_b;  // [out, rank]
  const auto scale = static_cast<float>(options.scale());
  const uint64_t columns = transposed ? target.out : target.in;
  for (uint64_t first = 0; first < rows.size(); first += columns, ++row) {
    float* to = rows.data() + first;
    for (uint64_t k = 0; k < rank; ++k) {
      if (transposed) {
        const float factor = scale * a[k * target.in + row];
        for (uint64_t j = 0; j < columns; ++j) to[j] += factor * b[j * rank + k];
      } else {
        const float factor = scale * b[row * rank + k];
        for (uint64_t j = 0; j < columns; ++j) to[j] += factor * a[k * target.in + j];
      }
    }
  }
}

std::string lora_config(const Architecture& model, const LoraOptions& options,
                        std::span<const LoraTarget> targets, const std::string& base) {
  std::set<std::string> modules;
  for (const LoraTarget& target : targets) {
    modules.insert(target.module.substr(target.module.rfind('.') + 1));
  }
  // GPT-2's two c_proj have one last word: the longer name tells them apart.
  for (const LoraTarget& target : targets) {
    if (!target.module.ends_with(".c_proj")) continue;
    modules.erase("c_proj");
    modules.emplace(within_layer(target.module));
  }
  const nlohmann::ordered_json config{{"peft_type", "LORA"},
                                      {"task_type", "CAUSAL_LM"},
                                      {"base_model_name_or_path", base},
                                      {"r", options.rank},
                                      {"lora_alpha", options.alpha},
                                      {"lora_dropout", 0.0},
                                      {"target_modules", modules},
                                      {"bias", "none"},
                                      {"fan_in_fan_out", model.transposed},
                                      {"use_rslora", false},
                                      {"use_dora", false},
                                      {"modules_to_save", nullptr},
                                      {"inference_mode", true}};
  return config.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace smartinf::model
