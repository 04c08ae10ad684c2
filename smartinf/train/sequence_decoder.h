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

struct SequenceInput {
  SequenceId id = 0;
  std::span<const int64_t> prompt;  // not empty, below the vocabulary
  std::span<const int64_t> made;    // what it was continued with before, in an interrupted job
  uint64_t tokens_max = 0;          // prompt and all new ones; above those of prompt and made
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
  /// the sequences were taken in. Its token is the sequence's next input. A sequence that has its
  /// tokens_max is released before the next step (SI_CHECK).
  virtual base::Status step(const Choose& choose) = 0;
  /// Forgets a sequence; its keys and values are gone.
  virtual void release(SequenceId id) = 0;
  /// Sequences that admit() and step() have lost since the last call, with a device or because of
  /// damaged blocks; `choose` was not called for them in that step. They are released, and go on
  /// with the same bits when they are taken in again with all their tokens.
  virtual std::vector<LostSequence> take_lost() { return {}; }
  /// The keys and values so far survive this process, where the store is on devices.
  virtual base::Status save() = 0;
};

}  // namespace smartinf::train
