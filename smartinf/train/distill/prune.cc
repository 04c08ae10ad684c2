#include "smartinf/train/distill/prune.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <nlohmann/json.hpp>

#include "smartinf/base/check.h"
#include "smartinf/model/config_json.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using model::Architecture;
using model::Part;

namespace {

uint32_t share_of(uint32_t count, double share, uint32_t unit) {
  const auto units = static_cast<uint32_t>(std::lround(count * share / unit));
  return std::clamp(units * unit, std::min(unit, count), count);
}

/// Places of `kept` blocks of `width` each.
std::vector<uint64_t> widened(std::span<const uint32_t> kept, uint64_t width, uint64_t offset) {
  std::vector<uint64_t> places;
  for (const uint32_t one : kept) {
    for (uint64_t i = 0; i < width; ++i) places.push_back(offset + one * width + i);
  }
  return places;
}

/// Extent of a tensor that pruning shortens, and what stays of it; empty: all stays.
struct Cut {
  size_t extent = 0;
  std::vector<uint64_t> places;
};

Cut cut_of(const Architecture& model, const model::Tensor& tensor, const Kept& kept) {
  const bool matrix = tensor.shape.size() == 2;
  const size_t out = matrix && model.transposed ? 1 : 0;  // the extent of a matrix's results
  switch (tensor.part) {
    case Part::kGateUp:
    case Part::kGateUpBias:
      return {out, widened(kept.channels, 1, 0)};
    case Part::kDown:
      return {1 - out, widened(kept.channels, 1, 0)};
    case Part::kQkv:
    case Part::kQkvBias: {
      const uint64_t width = tensor.shape[out];
      const uint64_t of_queries = model.query_width() / model.kv_heads;
      if (width == model.query_width() + 2 * uint64_t{model.kv_width()}) {  // all in one
        Cut cut{out, widened(kept.groups, of_queries, 0)};
        for (const uint64_t offset : {0, 1}) {
          const auto more = widened(kept.groups, model.head_width,
                                    model.query_width() + offset * model.kv_width());
          cut.places.insert(cut.places.end(), more.begin(), more.end());
        }
        return cut;
      }
      const bool queries = tensor.name.find("q_proj") != std::string::npos;
      return {out, widened(kept.groups, queries ? of_queries : model.head_width, 0)};
    }
    case Part::kOutput:
      return {1 - out, widened(kept.groups, model.query_width() / model.kv_heads, 0)};
    default:
      return {};
  }
}

}  // namespace

Result<Architecture> pruned_architecture(const Architecture& model, const Pruning& pruning) {
  if (model.experts != 0) {
    return Status(ErrorCode::kUnsupported, "student.prune: layers with experts are not pruned",
                  "Make a smaller model otherwise, and name its folder as student.from");
  }
  Architecture pruned = model;
  pruned.mlp_width = share_of(model.mlp_width, pruning.ffn, 8);
  pruned.kv_heads = share_of(model.kv_heads, pruning.heads, 1);
  pruned.heads = model.heads / model.kv_heads * pruned.kv_heads;
  return pruned;
}

Result<std::string> pruned_config(const std::string& config_json, const Architecture& pruned) {
  auto json = nlohmann::ordered_json::parse(config_json);
  const bool gpt2 = pruned.family == model::Family::kGpt2;
  json[gpt2 ? "n_inner" : "intermediate_size"] = pruned.mlp_width;
  if (!gpt2) {
    json["num_attention_heads"] = pruned.heads;
    json["num_key_value_heads"] = pruned.kv_heads;
    json["head_dim"] = pruned.head_width;
  }
  std::string text = json.dump(2) + "\n";
  SI_ASSIGN_OR_RETURN(const model::Config made,
                      model::read_config(text, "the student's config.json", {}));
  const Architecture& there = made.architecture;
  if (there.mlp_width == pruned.mlp_width && there.heads == pruned.heads &&
      there.kv_heads == pruned.kv_heads && there.head_width == pruned.head_width) {
    return text;
  }
  return Status(ErrorCode::kUnsupported,
                "student.prune: the teacher's family has no key for fewer heads of the same width",
                "Leave heads out");
}

std::vector<uint32_t> largest(std::span<const double> scores, size_t count) {
  std::vector<uint32_t> places(scores.size());
  std::iota(places.begin(), places.end(), 0u);
  std::ranges::stable_sort(places, [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  places.resize(std::min(count, places.size()));
  std::ranges::sort(places);
  return places;
}

std::vector<float> pruned_values(const Architecture& model, const model::Tensor& tensor,
                                 const Kept& kept, std::span<const float> values) {
  const Cut cut = cut_of(model, tensor, kept);
  if (cut.places.empty()) return {values.begin(), values.end()};
  const uint64_t columns = tensor.shape.size() == 2 ? tensor.shape[1] : 1;
  SI_CHECK(values.size() == tensor.shape[0] * columns, "the tensor is whole");
  std::vector<float> made;
  if (cut.extent == 0) {
    for (const uint64_t row : cut.places) {
      const auto from = values.subspan(row * columns, columns);
      made.insert(made.end(), from.begin(), from.end());
    }
    return made;
  }
  for (uint64_t row = 0; row < tensor.shape[0]; ++row) {
    for (const uint64_t column : cut.places) made.push_back(values[row * columns + column]);
  }
  return made;
}

}  // namespace smartinf::train
