// A smaller model of the same family with some of a model's feed-forward channels and heads. Needs
// no torch; which ones are kept is decided by pruned_folder.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"
#include "smartinf/train/distill/options.h"

namespace smartinf::train {

/// What stays of one layer, ascending.
struct Kept {
  std::vector<uint32_t> channels;  // of the feed-forward part
  std::vector<uint32_t> groups;    // heads of keys and values, each with its heads of queries
};

/// The model's shape with these shares of each layer: channels rounded to a multiple of 8, heads to
/// whole groups, at least one of each. Errors: kUnsupported for layers with experts.
base::Result<model::Architecture> pruned_architecture(const model::Architecture& model,
                                                      const Pruning& pruning);
/// config.json of the pruned model. Errors: kUnsupported where the family has no key for it.
base::Result<std::string> pruned_config(const std::string& config_json,
                                        const model::Architecture& pruned);

/// The `count` places with the largest scores, ascending; of equal ones the first.
std::vector<uint32_t> largest(std::span<const double> scores, size_t count);

/// Elements of a layer's tensor that stay, in order. tensor: the model's; values: all of it.
std::vector<float> pruned_values(const model::Architecture& model, const model::Tensor& tensor,
                                 const Kept& kept, std::span<const float> values);

}  // namespace smartinf::train
