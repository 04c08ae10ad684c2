// How many elements of a gradient are sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "smartinf/compress/options.h"

namespace smartinf::compress {

/// One line for people about the elements that are sent of gradients, and what becomes of the rest.
/// on() (SI_CHECK).
std::string describe_compression(const CompressOptions& options);

/// Elements that a block of `elements` sends at this density. At least one.
size_t values_per_block(double density, uint64_t elements);

/// Bytes of a message of signs or numbers, for each of many elements, without factors of the second
/// moment; at most.
double bytes_per_element(const CompressOptions& options);

/// The density of a step (from 1): during the warm-up it falls from kWarmupDensity to
/// options.density by the same factor each step.
/// Source: Lin et al. 2018 (Deep Gradient Compression), section 3.3.
inline constexpr double kWarmupDensity = 0.25;
double density_of_step(const CompressOptions& options, uint64_t step);
/// The largest that density_of_step() gives.
double density_max(const CompressOptions& options);

}  // namespace smartinf::compress
