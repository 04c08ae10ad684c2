// What the trainer does only on several ranks.
#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/torch_trainer.h"

namespace smartinf::train {

using base::Result;
using base::Status;
using torch::Tensor;

// In the order in which backward makes them. The engine has read them when a call returns.
Status TorchTrainer::put_sums() {
  const torch::ScalarType type = scalar_type(weights_type_);
  for (UnitPass::Gradient& gradient : std::exchange(gradients_ready_, {})) {
    std::vector<Tensor> sums;
    std::vector<const void*> nodes;
    const auto ranges = plan::summation_nodes(options_.train.accumulation, mine_);
    for (size_t i = 0; i < gradient.sums.size(); ++i) {
      const bool leaf = ranges[i % ranges.size()].size() == 1;
      Tensor sum = std::exchange(gradient.sums[i], {});
      sums.push_back(sum.to(torch::kCPU, leaf ? type : torch::kFloat32).contiguous());
      nodes.push_back(sums.back().const_data_ptr());
    }
    engine::GradientSums of_rank;
    of_rank.micro_batches = options_.train.accumulation;
    of_rank.trees = gradient.trees;
    of_rank.type = weights_type_;
    of_rank.nodes = nodes;
    SI_RETURN_IF_ERROR(updater_->put_gradient_sums(
        gradient.first, static_cast<uint64_t>(sums.front().numel()), of_rank));
  }
  return Status();
}

Result<std::vector<double>> TorchTrainer::losses_of_all(std::span<const double> mine) const {
  if (ranks_.alone()) return std::vector<double>(mine.begin(), mine.end());
  const uint64_t count = options_.train.accumulation;
  const auto most = static_cast<size_t>(base::divide_up(count, ranks_.world()));
  std::vector<double> padded(mine.begin(), mine.end());
  padded.resize(most);
  SI_ASSIGN_OR_RETURN(const std::vector<double> all, ranks_.all<double>(padded));
  std::vector<double> losses;
  for (uint32_t rank = 0; rank < ranks_.world(); ++rank) {
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(rank * most);
    const auto of_rank = plan::micro_batches_of(count, rank, ranks_.world()).size();
    losses.insert(losses.end(), from, from + static_cast<std::ptrdiff_t>(of_rank));
  }
  return losses;
}

Result<std::vector<std::vector<int64_t>>> TorchTrainer::first_ranks_prompts(
    std::span<const std::vector<int64_t>> prompts) const {
  const nlohmann::json mine = std::vector(prompts.begin(), prompts.end());
  SI_ASSIGN_OR_RETURN(const std::string text, ranks_.from_first(mine.dump()));
  return base::parse_json(text).get<std::vector<std::vector<int64_t>>>();
}

}  // namespace smartinf::train
