// Continues prompts until they end.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/train/sampling.h"
#include "smartinf/train/sequence_decoder.h"

namespace smartinf::train {

/// Continues each prompt, which is not empty, until it has options.tokens more, an end token or
/// options.positions in all. Prompts do not influence each other, also not by the numbers that are
/// drawn. decoder: has no sequences, before and afterwards; stops by options.stop itself. Errors:
/// those of the decoder.
base::Status decode(SequenceDecoder& decoder, std::span<const std::vector<int64_t>> prompts,
                    const DecodeOptions& options, const TakeToken& take);

}  // namespace smartinf::train
