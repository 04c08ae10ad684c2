// A sequence in pieces, with keys and values that were kept, beside the whole sequence at once; how
// tokens are chosen.
#include "smartinf/train/decode.h"

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
      KeyValueCache cache(variant.architecture, 20, torch::kFloat32);
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

std::set<int64_t> drawn(const Tensor& logits_V, const Sampling& sampling) {
  std::set<int64_t> tokens;
  for (uint64_t i = 0; i < 400; ++i) tokens.insert(choose_token(logits_V, sampling, i));
  return tokens;
}

TEST(ChooseToken, OnlyTheLikeliestAreDrawn) {
  const Tensor logits_V = torch::log(torch::tensor({0.1, 0.4, 0.05, 0.3, 0.15}));
  EXPECT_THAT(drawn(logits_V, {}), testing::ElementsAre(1));
  EXPECT_THAT(drawn(logits_V, {.temperature = 1}), testing::ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(drawn(logits_V, {.temperature = 1, .top_k = 2}), testing::ElementsAre(1, 3));
  EXPECT_THAT(drawn(logits_V, {.temperature = 1, .top_p = 0.75}), testing::ElementsAre(1, 3, 4));
  EXPECT_THAT(drawn(logits_V, {.temperature = 1, .top_p = 0.65}), testing::ElementsAre(1, 3));
  EXPECT_THAT(drawn(logits_V, {.temperature = 1, .top_k = 1, .top_p = 0.9}),
              testing::ElementsAre(1));
  EXPECT_THAT(drawn(logits_V, {.temperature = 0.01}), testing::ElementsAre(1));
}

TEST(ChooseToken, TokensAreAsOftenAsTheirShare) {
  const Tensor logits_V = torch::log(torch::tensor({0.2, 0.5, 0.3}));
  std::vector<double> shares(3);
  for (uint64_t i = 0; i < 4000; ++i) {
    shares[static_cast<size_t>(choose_token(logits_V, {.temperature = 1, .seed = 5}, i))] +=
        1.0 / 4000;
  }
  EXPECT_NEAR(shares[0], 0.2, 0.03);
  EXPECT_NEAR(shares[1], 0.5, 0.03);
}

}  // namespace
}  // namespace smartinf::train
