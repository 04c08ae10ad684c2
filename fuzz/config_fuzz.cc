// config.json and generation_config.json of strangers: any text ends in a typed error, or in a
// model whose numbers a computation can begin with. Input: the text; behind the first NUL what is
// read as generation_config.json.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "smartinf/base/check.h"
#include "smartinf/model/config_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace smartinf;
  constexpr uint32_t kHeadWidthMax = 4096;  // whose table is made: it takes time
  constexpr uint64_t kFeedForwardsMax = 256;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t middle = std::min(input.find('\0'), input.size());
  const std::string text(input.substr(0, middle));
  const std::string generation(input.substr(std::min(middle + 1, input.size())));

  const auto config = model::read_config(text, "config.json", {});
  const uint32_t vocabulary = config.ok() ? config->architecture.vocabulary : 100;
  const auto end = model::read_generation_config(generation, "generation_config.json", vocabulary);
  if (end.ok()) {
    SI_CHECK(std::ranges::all_of(end->tokens,
                                 [&](int64_t token) { return token >= 0 && token < vocabulary; }),
             "a token beyond the vocabulary");
  }
  if (!config.ok()) {
    SI_CHECK(!config.status().to_string().empty(), "a failure says nothing");
    return 0;
  }
  const model::Architecture& model = config->architecture;
  SI_CHECK(model.windows.size() == model.layers, "a window for each layer");
  SI_CHECK(model.padding_token < int64_t{model.vocabulary},
           "a padding token beyond the vocabulary");
  SI_CHECK(static_cast<float>(model.norm_eps) > 0, "a norm may divide by nothing");
  SI_CHECK(std::isfinite(static_cast<float>(model.attention_scale)), "scores are not finite");
  if (!model.learned_positions && model.head_width <= kHeadWidthMax) {
    for (const model::Rope& rope : {model.rope, model.window_rope}) {
      const auto frequencies = model::rope_frequencies(rope, model.head_width);
      SI_CHECK(std::ranges::all_of(frequencies, [](float one) { return std::isfinite(one); }),
               "an angle is not finite");
      const double magnitude = model::rope_magnitude(rope);
      SI_CHECK(std::isfinite(static_cast<float>(magnitude)), "sines are not finite");
    }
  }
  if (uint64_t{model.layers} * std::max(1u, model.experts) <= kFeedForwardsMax) {
    (void)model::make_parameter_space(model);
  }
  const auto again = model::read_config(model::with_type(text, base::DataType::kBf16), "again", {});
  SI_CHECK(again.ok(), "what is exported is not read");
  return 0;
}
