#include "smartinf/train/top_logits.h"

#include <utility>

#include "smartinf/base/data_file.h"

namespace smartinf::train {

using base::Result;
using torch::Tensor;

namespace {

/// Chances are no smaller: the logarithm of a rest that f32 rounds to nothing.
constexpr double kLeastChance = 1e-7;

/// [R, K] -> [R, K + 1]: the rest behind them.
Tensor with_rest(const Tensor& chances_RK) {
  const Tensor rest_R1 = (1 - chances_RK.exp().sum(-1, /*keepdim=*/true)).clamp_min(kLeastChance);
  return torch::cat({chances_RK, rest_R1.log()}, -1);
}

}  // namespace

TopLogits top_logits(const Tensor& logits_RV, int64_t k) {
  const torch::NoGradGuard no_grad;
  auto [chances_RK, token_RK] = torch::log_softmax(logits_RV.to(torch::kFloat32), -1).topk(k, -1);
  return {token_RK.to(torch::kInt32), with_rest(chances_RK)};
}

Divergence divergence(const Tensor& logits_RV, const TopLogits& teacher) {
  const torch::NoGradGuard no_grad;
  const Tensor& theirs_RL = teacher.chances_ML;
  const Tensor token_RK = teacher.token_MK.to(torch::kInt64);
  const Tensor log_chances_RV = torch::log_softmax(logits_RV.to(torch::kFloat32), -1);
  const Tensor mine_RL = with_rest(log_chances_RV.gather(-1, token_RK));
  // Chances less the teacher's; those of the rest have the teacher's rest in the student's shares.
  // So equal bits have no gradient, which one of logarithms would not be.
  const int64_t k = token_RK.size(1);
  const Tensor rest_R1 = (theirs_RL.narrow(1, k, 1) - mine_RL.narrow(1, k, 1)).exp();
  const Tensor of_top_RK = mine_RL.narrow(1, 0, k).exp() - theirs_RL.narrow(1, 0, k).exp();
  return {(theirs_RL.exp() * (theirs_RL - mine_RL)).sum(),
          log_chances_RV.exp().mul_(1 - rest_R1).scatter_(1, token_RK, of_top_RK)};
}

Tensor StoredLogits::packed(const TopLogits& logits) {
  return torch::cat({logits.token_MK.to(torch::kFloat32), logits.chances_ML}, -1)
      .to(torch::kCPU)
      .contiguous();
}

Result<StoredLogits> StoredLogits::open(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const base::DataFile header_of, base::DataFile::open(path));
  SI_ASSIGN_OR_RETURN(const model::SafetensorsHeader header,
                      model::SafetensorsHeader::read(header_of));
  const auto found = header.tensors.find(kTensor);
  if (found == header.tensors.end() || found->second.type != "F32" ||
      found->second.shape.size() != 3 || found->second.shape[2] % 2 != 1) {
    return base::Status(base::ErrorCode::kCorrupt, "the file has no logits of a teacher",
                        "Delete the file; smartinf distill makes it again",
                        base::ErrorPlace{path, {}, {}, 0});
  }
  SI_ASSIGN_OR_RETURN(model::SafetensorsFile file, model::SafetensorsFile::open(path));
  const std::vector<int64_t> shape(found->second.shape.begin(), found->second.shape.end());
  // Nothing writes through it.
  auto* const values = const_cast<std::byte*>(file.tensor(kTensor).data());
  Tensor all_BML = torch::from_blob(values, shape, torch::kFloat32);
  return StoredLogits(std::move(file), std::move(all_BML));
}

TopLogits StoredLogits::at(uint64_t micro_batch, torch::Device device) const {
  const Tensor one_ML = all_BML_[static_cast<int64_t>(micro_batch)].to(device);
  const int64_t k = (one_ML.size(1) - 1) / 2;
  return {one_ML.narrow(1, 0, k).to(torch::kInt32), one_ML.narrow(1, k, k + 1).clone()};
}

}  // namespace smartinf::train
