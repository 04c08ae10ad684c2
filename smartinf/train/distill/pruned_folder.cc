#include "smartinf/train/distill/pruned_folder.h"

#include <algorithm>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/autograd.h>

#include "smartinf/train/export.h"

namespace smartinf::train {

using base::Status;
using torch::Tensor;

namespace {

constexpr uint64_t kCopiedAtOnce = uint64_t{1} << 22;  // elements of what stays whole

std::vector<double> to_doubles(const Tensor& scores_N) {
  const Tensor on_host = scores_N.to(torch::kCPU, torch::kFloat64).contiguous();
  return {on_host.data_ptr<double>(), on_host.data_ptr<double>() + on_host.numel()};
}

}  // namespace

std::vector<Kept> choose_kept(const LayeredModel& teacher, const model::Architecture& pruned,
                              std::span<const Batch> batches, uint64_t seed) {
  const torch::AutoGradMode mode(true);
  at::Generator signs = at::detail::createCPUGenerator(seed);
  const model::Architecture& model = teacher.architecture();
  const int64_t out = model.transposed ? 1 : 0;  // the extent of a matrix's results
  std::vector<Tensor> all_BTC = teacher.embed(batches);
  std::vector<Kept> all;
  for (uint32_t index = 0; index < teacher.layers(); ++index) {
    const ModelPart layer = teacher.layer(index);
    const Tensor& down = weight_of_part(layer.weights, model::Part::kDown);
    const Tensor& output = weight_of_part(layer.weights, model::Part::kOutput);
    Tensor of_channels;  // sums of squared gradients
    Tensor of_heads;
    for (size_t i = 0; i < batches.size(); ++i) {
      const Tensor y_BTC = layer.run(all_BTC[i], batches[i].document_ends);
      const Tensor sign_BTC =
          (torch::randint(0, 2, y_BTC.sizes(), signs, torch::kFloat32) * 2 - 1).to(y_BTC.options());
      const auto made = torch::autograd::grad({y_BTC}, {down, output}, {sign_BTC});
      const auto squares = [&](const Tensor& gradient) {
        return gradient.to(torch::kFloat32).square().sum(out);
      };
      of_channels = i == 0 ? squares(made[0]) : of_channels + squares(made[0]);
      of_heads = i == 0 ? squares(made[1]) : of_heads + squares(made[1]);
      all_BTC[i] = y_BTC.detach();
    }
    const torch::NoGradGuard no_grad;
    const auto norms = [&](const Tensor& matrix) {
      return matrix.to(torch::kFloat32).square().sum(out);
    };
    const Tensor groups = (of_heads * norms(output)).view({int64_t{model.kv_heads}, -1}).sum(1);
    all.push_back({largest(to_doubles(of_channels * norms(down)), pruned.mlp_width),
                   largest(to_doubles(groups), pruned.kv_heads)});
  }
  return all;
}

Status write_pruned_folder(const LayeredModel& teacher, const model::Architecture& pruned,
                           std::span<const Kept> kept, TextFiles texts, const std::string& out) {
  SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space, model::make_parameter_space(pruned));
  const model::WeightFiles& files = teacher.files();
  const auto read = [&](const std::function<Status(std::span<const float>)>& take) -> Status {
    const std::vector<model::Tensor> tensors = model::tensors_of(teacher.architecture());
    std::vector<float> values;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const plan::ParameterRange& range = teacher.space().ranges()[i];
      const bool whole = range.shape == space.ranges()[i].shape;
      const uint64_t at_once = whole ? kCopiedAtOnce : range.count;
      for (uint64_t done = 0; done < range.count; done += values.size()) {
        values.resize(std::min(at_once, range.count - done));
        SI_RETURN_IF_ERROR(files.read(range.first + done, values));
        if (whole) {
          SI_RETURN_IF_ERROR(take(values));
          continue;
        }
        const plan::Unit first = teacher.layer_span(0);
        const uint64_t layer = (range.first - first.first) / first.count;
        SI_RETURN_IF_ERROR(
            take(pruned_values(teacher.architecture(), tensors[i], kept[layer], values)));
      }
    }
    return Status();
  };
  constexpr uint64_t kShardBytes = 5'000'000'000;
  return write_model_folder(
             out, {space, files.type().value_or(base::DataType::kF32), std::move(texts), "", read},
             kShardBytes)
      .status();
}

}  // namespace smartinf::train
