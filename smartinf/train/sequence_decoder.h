// Continues many sequences at once, a token of each in a step. Needs no torch to include.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::train {

/// A sequence, in a decoder and in its store of keys and values; the caller's number.
using SequenceId = uint64_t;

/// Prompts are computed in parts of so many tokens, counted from their beginning, so that the bits
/// of a part depend on the tokens up to its end alone: what several prompts begin with can be
/// computed once, as far as whole parts go. Smaller parts share more and compute slower.
inline constexpr uint64_t kPromptPart = 256;

/// Numbers of sequences that are the beginning of others have the highest bit, and no others.
inline constexpr SequenceId kPrefixBit = SequenceId{1} << 63;
constexpr bool is_prefix(SequenceId id) { return (id & kPrefixBit) != 0; }

struct SequenceInput {
  SequenceId id = 0;
  std::span<const int64_t> prompt;  // not empty, below the vocabulary
  std::span<const int64_t> made;    // what it was continued with before, in an interrupted job
  uint64_t tokens_max = 0;          // prompt and all new ones; above those of prompt and made
  /// Sequences of one call, or of several, that have these in common share the prompt's first
  /// prefix_tokens: whole parts, below the prompt's tokens; 0: it shares none. prefix: a number
  /// that follows from these tokens.
  SequenceId prefix = 0;
  uint64_t prefix_tokens = 0;
};

/// A sequence whose keys and values cannot be used any more.
struct LostSequence {
  SequenceId id = 0;
  base::Status why;  // names the device
};

/// Tokens and bits of a sequence do not depend on the others, nor on when it was taken in.
/// Threads: one caller. Errors: as values; after one of step() the sequences are of no use.
class SequenceDecoder {
 public:
  /// The next token of a sequence. logits: [V], the caller's during the call.
  using Choose = std::function<int64_t(SequenceId id, std::span<const float> logits)>;

  virtual ~SequenceDecoder() = default;

  /// Takes sequences in: computes their prompts, then brings `made` in by the steps that made it,
  /// so that what follows has the bits of a job that was not interrupted. What the store has of a
  /// sequence already is not computed again. Errors: kNoSpace, kOutOfMemory: nothing of the call
  /// is taken in; kAlreadyExists; kInvalidArgument; those of store and weights.
  virtual base::Status admit(std::span<const SequenceInput> sequences) = 0;
  /// Computes the logits behind each sequence and gives them to `choose`, in the order in which
  /// the sequences were taken in, those with a common prefix together. Its token is the sequence's
  /// next input. A sequence that has its tokens_max is released before the next step (SI_CHECK).
  virtual base::Status step(const Choose& choose) = 0;
  /// Forgets a sequence; its keys and values are gone.
  virtual void release(SequenceId id) = 0;
  /// Sequences that admit() and step() have lost since the last call, with a device or because of
  /// damaged blocks; `choose` was not called for them in that step. They are released, and go on
  /// with the same bits when they are taken in again with all their tokens.
  virtual std::vector<LostSequence> take_lost() { return {}; }
  /// Tokens of prompts that were not computed, because other prompts begin with them.
  virtual uint64_t shared_tokens() const { return 0; }
  /// The keys and values so far survive this process, where the store is on devices.
  virtual base::Status save() = 0;
};

}  // namespace smartinf::train
