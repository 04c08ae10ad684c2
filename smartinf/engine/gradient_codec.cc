#include "smartinf/engine/gradient_codec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/state_format.h"
#include "smartinf/kernels/selection.h"

namespace smartinf::engine {
namespace {

using Codec = CompressOptions::Codec;

size_t drop_zeros(size_t count, uint32_t* indices, float* values) {
  size_t kept = 0;
  for (size_t i = 0; i < count; ++i) {
    if (values[i] == 0) continue;
    indices[kept] = indices[i];
    values[kept++] = values[i];
  }
  return kept;
}

class TopK final : public GradientCodec {
 public:
  std::string_view name() const override { return "topk"; }
  bool takes_largest() const override { return true; }
  size_t select(std::span<const float> in, size_t k, uint64_t, float& border, uint32_t* indices,
                float* values) const override {
    const size_t count = kernels::top_k_near(kernels::kernels(), in, k, base::kBlockElements,
                                             indices, values, border);
    return drop_zeros(count, indices, values);
  }
};

/// The control: as many elements, by lot.
class RandomK final : public GradientCodec {
 public:
  std::string_view name() const override { return "randomk"; }
  size_t select(std::span<const float> in, size_t k, uint64_t seed, float&, uint32_t* indices,
                float* values) const override {
    thread_local const std::unique_ptr<float[]> lots =
        std::make_unique<float[]>(base::kBlockElements);
    for (size_t i = 0; i < in.size(); ++i) {
      lots[i] = static_cast<float>(base::mix_seed(seed, i) >> 40);  // 24 bits: exact
    }
    const size_t count =
        kernels::top_k(kernels::kernels(), {lots.get(), in.size()}, k, indices, values);
    for (size_t i = 0; i < count; ++i) values[i] = in[indices[i]];
    return drop_zeros(count, indices, values);
  }
};

class Dense final : public GradientCodec {
 public:
  std::string_view name() const override { return "dense"; }
  size_t select(std::span<const float> in, size_t, uint64_t, float&, uint32_t* indices,
                float* values) const override {
    for (size_t i = 0; i < in.size(); ++i) {
      indices[i] = static_cast<uint32_t>(i);
      values[i] = in[i];
    }
    return in.size();
  }
};

}  // namespace

const GradientCodec& gradient_codec(Codec codec) {
  static const TopK top_k;
  static const RandomK random_k;
  static const Dense dense;
  switch (codec) {
    case Codec::kTopK:
      return top_k;
    case Codec::kRandomK:
      return random_k;
    case Codec::kDense:
      return dense;
    case Codec::kNone:
      break;
  }
  SI_CHECK(false, "no codec, nothing to select");
}

std::string describe_compression(const CompressOptions& options) {
  const double share = std::min(1.0, options.ratio * 4 / counted_bytes(options.values));
  std::string text(gradient_codec(options.codec).name());
  const bool dense = options.codec == Codec::kDense;
  if (!dense) {
    text += fmt::format(", {:.3g} % of the elements", 100 * share);
    if (options.automatic()) text += fmt::format(" and more up to ratio {}", options.ratio_max);
    if (options.warmup_steps > 0) text += fmt::format(" after {} steps", options.warmup_steps);
  }
  text += options.values == csd::ValueForm::kSign
              ? " as signs"
              : fmt::format(" in {}", csd::value_form_name(options.values));
  text += dense ? "; what rounding takes" : "; the rest";
  if (options.feedback == CompressOptions::Feedback::kNone) return text + " is lost";
  text += " is sent later, ";
  if (options.keep_every == 0) {
    return text + "but for what waits when the run stops (keep_every = 0)";
  }
  if (options.keep_every == 1) {
    return text +
           "and written in every step, 2 bytes a parameter on the link (keep_every = 16 makes that "
           "0.13; a crash then loses what waits)";
  }
  return text + fmt::format("and written every {} steps (keep_every)", options.keep_every);
}

size_t values_per_block(const CompressOptions& options, double ratio, uint64_t elements) {
  if (options.codec == Codec::kDense) return elements;
  const double share = ratio * 4 / counted_bytes(options.values);
  const double values = std::round(share * static_cast<double>(elements));
  return std::clamp<size_t>(static_cast<size_t>(values), 1, elements);
}

double ratio_of_step(const CompressOptions& options, uint64_t step, double backlog) {
  double ratio = options.ratio;
  if (step <= options.warmup_steps && ratio < kWarmupRatio) {
    const double done = static_cast<double>(step - 1) / static_cast<double>(options.warmup_steps);
    ratio = kWarmupRatio * std::pow(ratio / kWarmupRatio, done);
  }
  if (!options.automatic() || backlog <= options.backlog) return ratio;
  const double wanted = options.ratio * backlog / options.backlog;
  return std::max(ratio, std::min(wanted, options.ratio_max));
}

double ratio_most(const CompressOptions& options) {
  return std::max({options.ratio, options.ratio_max, options.warmup_steps > 0 ? kWarmupRatio : 0});
}

}  // namespace smartinf::engine
