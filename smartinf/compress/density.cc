#include "smartinf/compress/density.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/compress/message.h"

namespace smartinf::compress {

std::string describe_compression(const CompressOptions& options) {
  SI_CHECK(options.on(), "gradients are compressed");
  std::string text = fmt::format("the largest {:.3g} % of the elements", 100 * options.density);
  if (options.warmup_steps > 0) text += fmt::format(" after {} steps", options.warmup_steps);
  text += options.values == ValueEncoding::kSign
              ? " as signs"
              : fmt::format(" in {}", value_encoding_name(options.values));
  if (!options.error_feedback) return text + "; the rest is lost (error_feedback = false)";
  text += "; the rest (the residual) stays in host memory and is sent later; ";
  if (options.residual_every == 0) {
    return text + "it is lost when the run stops (residual_every = 0)";
  }
  if (options.residual_every == 1) {
    return text +
           "the devices write it in every step, 2 bytes a parameter on the link (0.13 with "
           "residual_every = 16, with which a crash loses it)";
  }
  return text + fmt::format("the devices write it every {} steps (residual_every)",
                            options.residual_every);
}

size_t values_per_block(double density, uint64_t elements) {
  const double values = std::round(density * static_cast<double>(elements));
  return std::clamp<size_t>(static_cast<size_t>(values), 1, elements);
}

double bytes_per_element(const CompressOptions& options) {
  constexpr uint64_t kMany = 2 * base::kBlockElements;  // as ranks send them at once
  const size_t values = values_per_block(options.density, base::kBlockElements);
  return static_cast<double>(CompressedWriter::bytes_max(kMany, values, options.values, 0)) /
         static_cast<double>(kMany);
}

double density_of_step(const CompressOptions& options, uint64_t step) {
  if (step > options.warmup_steps || options.density >= kWarmupDensity) return options.density;
  const double done = static_cast<double>(step - 1) / static_cast<double>(options.warmup_steps);
  return kWarmupDensity * std::pow(options.density / kWarmupDensity, done);
}

double density_max(const CompressOptions& options) {
  return options.warmup_steps > 0 ? std::max(options.density, kWarmupDensity) : options.density;
}

}  // namespace smartinf::compress
