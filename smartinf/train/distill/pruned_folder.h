// A student that is a part of its teacher, as a folder that transformers loads.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/train/distill/layered_model.h"
#include "smartinf/train/distill/prune.h"
#include "smartinf/train/model_source.h"

namespace smartinf::train {

/// What stays of each layer: channels, and groups of heads, by the sum over tokens of a channel's
/// squared activation times the squared norm of its column in the matrix behind it (down_proj,
/// o_proj), a group by the sum over its columns. Squared activations are estimated from gradients:
/// that matrix's, of the product of the layer's output with random signs, has r_i a_j of each
/// token, whose square is a_j^2 in the mean; so what a channel does behind the matrix counts with
/// it. Each layer gets the inputs that the teacher gives it. Errors: StatusError; torch throws.
std::vector<Kept> choose_kept(const LayeredModel& teacher, const model::Architecture& pruned,
                              std::span<const Batch> batches, uint64_t seed);

/// Writes the teacher without the rest. texts: config.json of the pruned model and the tokenizer's
/// files. Errors: those of write_model_folder().
base::Status write_pruned_folder(const LayeredModel& teacher, const model::Architecture& pruned,
                                 std::span<const Kept> kept, TextFiles texts,
                                 const std::string& out);

}  // namespace smartinf::train
