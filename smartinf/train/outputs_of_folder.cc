// A test's tool: what this module's model computes with the weights of a folder of Hugging Face's,
// to be compared with what transformers compute. Usage: outputs_of_folder FOLDER f32|bf16
// IN.safetensors OUT.safetensors. IN has tokens [B, T + 1] (I64) and perhaps document_ends (I64).
// OUT gets logits [B T, V] and, by its name, the gradient of each parameter of the mean loss, f32.
// FOLDER -: of each folder that stdin names on a line, into its own OUT, or the error as text into
// its OUT.txt.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <torch/autograd.h>
#include <torch/types.h>

#include "smartinf/base/file.h"
#include "smartinf/model/config_json.h"
#include "smartinf/model/safetensors.h"
#include "smartinf/model/weight_files.h"
#include "smartinf/train/model.h"

namespace smartinf::train {
namespace {

using torch::Tensor;

std::vector<int64_t> integers(const model::SafetensorsFile& file, const std::string& name) {
  const auto bytes = file.tensor(name);
  std::vector<int64_t> numbers(bytes.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

base::Status run(const std::string& folder, bool f32, const std::string& in,
                 const std::string& out) {
  SI_ASSIGN_OR_RETURN(const std::string text,
                      base::read_text_file(folder + "/config.json", "cannot read it"));
  SI_ASSIGN_OR_RETURN(const model::Config config,
                      model::read_config(text, folder + "/config.json", {}));
  SI_ASSIGN_OR_RETURN(const model::WeightFiles files,
                      model::WeightFiles::open(folder, config.architecture));
  SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space,
                      model::make_parameter_space(config.architecture));
  const auto elements = static_cast<int64_t>(space.count());
  Tensor weights_N = torch::empty({elements}, torch::kFloat32);
  SI_RETURN_IF_ERROR(files.read(0, {weights_N.data_ptr<float>(), space.count()}));
  weights_N = weights_N.to(f32 ? torch::kFloat32 : torch::kBFloat16);

  SI_ASSIGN_OR_RETURN(const base::DataFile in_file, base::DataFile::open(in));
  SI_ASSIGN_OR_RETURN(const model::SafetensorsHeader header,
                      model::SafetensorsHeader::read(in_file));
  SI_ASSIGN_OR_RETURN(const model::SafetensorsFile inputs, model::SafetensorsFile::open(in));
  const auto& shape = header.tensors.at("tokens").shape;
  const Tensor all_BT = torch::tensor(integers(inputs, "tokens"), torch::kInt64)
                            .view({static_cast<int64_t>(shape[0]), static_cast<int64_t>(shape[1])});
  const Tensor tokens_BT = all_BT.narrow(1, 0, all_BT.size(1) - 1).contiguous();
  const Tensor targets_M = all_BT.narrow(1, 1, all_BT.size(1) - 1).flatten();
  const DocumentEnds documents = integers(inputs, "document_ends");

  const Model model(config.architecture, space, weights_N.options(),
                    static_cast<uint32_t>(tokens_BT.size(1)));
  std::vector<UnitWeights> weights;
  std::vector<Tensor> leaves;
  for (const plan::Unit& unit : model.units()) {
    weights.push_back(model.weights_of(
        weights.size(),
        weights_N.narrow(0, static_cast<int64_t>(unit.first), static_cast<int64_t>(unit.count))));
    for (const Parameter& parameter : weights.back()) leaves.push_back(parameter.weight);
  }
  Tensor x_BTC = model.embed(weights.front(), tokens_BT, documents);
  for (size_t unit = 1; unit < model.head(); ++unit) {
    x_BTC = model.run_layers(unit, weights[unit], {}, x_BTC, documents);
  }
  const Tensor logits_MV = model.logits(model.final_norm(weights.back(), x_BTC),
                                        model.head_matrix(weights.back(), weights.front()));
  const Tensor loss = torch::cross_entropy_loss(logits_MV.to(torch::kFloat32), targets_M);
  const auto gradients = torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/std::nullopt,
                                               /*create_graph=*/false, /*allow_unused=*/true);
  Tensor gradient_N = torch::zeros({elements}, torch::kFloat32);
  size_t next = 0;
  for (const UnitWeights& unit : weights) {
    for (const Parameter& parameter : unit) {
      const Tensor& gradient = gradients[next++];
      if (!gradient.defined()) continue;  // of an expert that no token went through
      gradient_N.narrow(0, static_cast<int64_t>(parameter.first), gradient.numel())
          .copy_(gradient.flatten());
    }
  }
  std::vector<model::TensorInfo> tensors{
      {"logits",
       base::DataType::kF32,
       {static_cast<uint64_t>(logits_MV.size(0)), static_cast<uint64_t>(logits_MV.size(1))}}};
  for (const plan::ParameterRange& range : space.ranges()) {
    tensors.push_back({range.name, base::DataType::kF32, range.shape});
  }
  SI_ASSIGN_OR_RETURN(model::SafetensorsWriter writer,
                      model::SafetensorsWriter::create(out, tensors, {}));
  for (const Tensor& each : {logits_MV.detach().to(torch::kFloat32).contiguous(), gradient_N}) {
    SI_RETURN_IF_ERROR(writer.append({static_cast<const std::byte*>(each.const_data_ptr()),
                                      static_cast<size_t>(each.nbytes())}));
  }
  return writer.finish();
}

}  // namespace
}  // namespace smartinf::train

int main(int argc, char** argv) {
  using smartinf::train::run;
  if (argc != 5) return 2;
  const std::string folder = argv[1];
  const bool f32 = std::string(argv[2]) == "f32";
  if (folder != "-") {
    const auto status = run(folder, f32, argv[3], argv[4]);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
    return status.ok() ? 0 : 1;
  }
  for (std::string line; std::getline(std::cin, line);) {
    const std::string out = line + "/" + argv[4];
    const auto status = run(line, f32, argv[3], out);
    if (!status.ok()) std::ofstream(out + ".txt") << status.to_string();
  }
  return 0;
}
