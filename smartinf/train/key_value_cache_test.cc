// A sequence in pieces, with keys and values that were kept, beside the whole sequence at once.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/train/model.h"
#include "smartinf/train/model_source.h"

namespace smartinf::train {
namespace {

using torch::Tensor;

model::Architecture small_model() {
  ModelOptions options;
  options.layers = 3;
  options.width = 32;
  options.heads = 4;
  options.kv_heads = 2;
  options.vocabulary = 50;
  return architecture_of(options, 32);
}

/// A model with random weights, which computes from the tokens to the logits.
class WholeModel {
 public:
  explicit WholeModel(const model::Architecture& architecture)
      : space_(model::make_parameter_space(architecture).value()),
        model_(architecture, space_, torch::kFloat32, 32) {
    torch::manual_seed(1);
    const Tensor weights_N = torch::randn({static_cast<int64_t>(space_.count())}) * 0.3;
    for (const plan::Unit& unit : model_.units()) {
      weights_.push_back(model_.weights_of(
          weights_.size(),
          weights_N.narrow(0, static_cast<int64_t>(unit.first), static_cast<int64_t>(unit.count))));
    }
  }

  Tensor logits(const Tensor& tokens_1T, KeyValueCache* cache) const {
    Tensor x_1TC = model_.embed(weights_.front(), tokens_1T, {}, cache);
    for (size_t unit = 1; unit < model_.head(); ++unit) {
      x_1TC = model_.run_layers(unit, weights_[unit], {}, x_1TC, {}, cache);
    }
    return model_.logits(model_.final_norm(weights_.back(), x_1TC),
                         model_.head_matrix(weights_.back(), weights_.front()));
  }

 private:
  plan::ParameterSpace space_;
  Model model_;
  std::vector<UnitWeights> weights_;
};

struct Variant {
  std::string name;
  model::Architecture architecture;
};

std::vector<Variant> variants() {
  std::vector<Variant> all{{"plain", small_model()},
                           {"windows", small_model()},
                           {"softcap", small_model()},
                           {"learned_positions", small_model()}};
  all[1].architecture.windows = {0, 4, 7};
  all[2].architecture.windows = {5, 0, 5};
  all[2].architecture.attention_softcap = 2;
  all[3].architecture.learned_positions = true;
  return all;
}

TEST(Cache, APieceOfASequenceHasTheLogitsThatItHasInTheWhole) {
  const torch::NoGradGuard no_grad;
  const Tensor tokens_1T = torch::arange(20, torch::kInt64).mul(7).remainder(50).unsqueeze(0);
  for (const Variant& variant : variants()) {
    SCOPED_TRACE(variant.name);
    const WholeModel model(variant.architecture);
    const Tensor whole_TV = model.logits(tokens_1T, nullptr);
    for (const std::vector<int64_t>& pieces :
         {std::vector<int64_t>{9, 1, 1, 6, 3}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 11}}) {
      TensorCache cache(variant.architecture, 20, torch::kFloat32);
      int64_t from = 0;
      for (const int64_t count : pieces) {
        const Tensor piece_TV = model.logits(tokens_1T.narrow(1, from, count), &cache);
        const Tensor apart = (piece_TV - whole_TV.narrow(0, from, count)).abs().max();
        EXPECT_LT(apart.item<double>(), 1e-5 * whole_TV.abs().max().item<double>())
            << count << " tokens behind " << from;
        cache.advance(count);
        from += count;
      }
    }
  }
}

}  // namespace
}  // namespace smartinf::train
