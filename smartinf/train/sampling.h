// How a model continues a text. Needs no torch.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <stop_token>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::train {

/// How the next token is chosen.
struct Sampling {
  double temperature = 0;  // 0: the likeliest token
  uint32_t top_k = 0;      // only so many likeliest ones; 0: all
  double top_p = 1;        // of these only the likeliest that have this share together
  uint64_t seed = 1;
};
/// Errors: kInvalidArgument.
base::Status validate(const Sampling& sampling);

/// logits: [V], V > 0. draw: which of the seed's random numbers is used.
int64_t choose_token(std::span<const float> logits, const Sampling& sampling, uint64_t draw);

struct DecodeOptions {
  uint64_t tokens = 0;     // new ones, at most
  uint64_t positions = 0;  // positions that a sequence may have
  Sampling sampling;
  std::vector<int64_t> end_tokens;  // each ends a sequence
  std::stop_token stop;
};

/// A new token of a prompt, in order; the end token that it ends with as well.
using TakeToken = std::function<void(size_t prompt, int64_t token)>;

}  // namespace smartinf::train
