// A test's tool: the logits that this room's model gives with the weights of an exported folder, to
// be compared with what transformers say. Usage: logits_of_export FOLDER f32|bf16 TOKENS.i64
// OUT.f32 TOKENS holds one sequence of int64; OUT gets [T, V] f32.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include <nlohmann/json.hpp>
#include <torch/types.h>

#include "smartinf/train/model.h"
#include "smartinf/train/parameters.h"
#include "smartinf/train/safetensors.h"

int main(int argc, char** argv) {
  using namespace smartinf;
  if (argc != 5) return 2;
  const std::string folder = argv[1];
  const bool f32 = std::string(argv[2]) == "f32";
  const auto config = nlohmann::json::parse(std::ifstream(folder + "/config.json"));
  train::ModelOptions model;
  model.layers = config["num_hidden_layers"];
  model.width = config["hidden_size"];
  model.heads = config["num_attention_heads"];
  model.kv_heads = config["num_key_value_heads"];
  model.mlp_width = config["intermediate_size"];
  model.vocabulary = config["vocab_size"];
  model.rope_base = config["rope_theta"];
  model.norm_eps = config["rms_norm_eps"];
  model.tied_head = config["tie_word_embeddings"];

  const auto file = train::SafetensorsFile::open(folder + "/model.safetensors");
  const auto space = train::make_parameter_space(model);
  if (!file.ok() || !space.ok()) return 1;
  const torch::Tensor weights_N = torch::empty({static_cast<int64_t>(space->count())},
                                               f32 ? torch::kFloat32 : torch::kBFloat16);
  for (const plan::ParameterRange& range : space->ranges()) {
    const std::span<const std::byte> bytes = file->tensor(range.name);
    if (bytes.size() != range.count * weights_N.element_size()) return 1;
    std::memcpy(
        static_cast<std::byte*>(weights_N.data_ptr()) + range.first * weights_N.element_size(),
        bytes.data(), bytes.size());
  }

  std::ifstream in(argv[3], std::ios::binary);
  const std::vector<char> raw(std::istreambuf_iterator<char>(in), {});
  const auto count = static_cast<int64_t>(raw.size() / sizeof(int64_t));
  const torch::Tensor tokens_BT = torch::empty({1, count}, torch::kInt64);
  std::memcpy(tokens_BT.data_ptr(), raw.data(), tokens_BT.nbytes());

  const torch::NoGradGuard no_grad;
  const train::Model trained(model, *space, weights_N.options(), static_cast<uint32_t>(count));
  std::vector<train::UnitWeights> weights;
  for (const plan::Unit& unit : trained.units()) {
    const torch::Tensor of_unit_N =
        weights_N.narrow(0, static_cast<int64_t>(unit.first), static_cast<int64_t>(unit.count));
    weights.push_back(trained.weights_of(weights.size(), of_unit_N));
  }
  torch::Tensor x_BTC = trained.embed(weights.front(), tokens_BT);
  for (size_t unit = 1; unit < trained.head(); ++unit) {
    x_BTC = trained.run_layers(unit, weights[unit], x_BTC);
  }
  const torch::Tensor logits_TV =
      torch::linear(trained.final_norm(weights.back(), x_BTC),
                    trained.head_matrix(weights.back(), weights.front()))
          .to(torch::kFloat32)
          .contiguous();
  std::ofstream(argv[4], std::ios::binary)
      .write(static_cast<const char*>(logits_TV.const_data_ptr()),
             static_cast<std::streamsize>(logits_TV.nbytes()));
  return 0;
}
