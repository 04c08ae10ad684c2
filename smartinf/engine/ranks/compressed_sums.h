// Sums of gradients that replicas send compressed (SmartComp): piece by piece, each of a rank's in
// one message to the rank that has the piece's state, which adds up what arrives of all ranks, in
// their order. What a message does not carry, the residual, waits on the rank that made it.
// docs/ranks.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/compress/gradient_compressor.h"
#include "smartinf/engine/gradient_tracker.h"

namespace smartinf::engine {

/// A step: begin_step, compress ..., then committed(), or another begin_step: then it was aborted.
/// Threads: one caller, but for bytes(), pays() and add(), which may be called beside it within a
/// step.
class CompressedSums {
 public:
  using Piece = GradientTracker::Piece;

  /// pieces: all of the space, in order. Memory: 2 bytes for each element that is compressed, with
  /// feedback 4.
  static base::Result<std::unique_ptr<CompressedSums>> make(
      const compress::CompressOptions& options, uint64_t seed, std::vector<Piece> pieces);

  void begin_step(base::StepNumber step, base::ThreadTeam& team);
  /// Bytes of a message of so many elements, the same in all messages of a step: the most that one
  /// can have.
  uint64_t bytes(uint64_t count) const;
  /// Whether that is less than the elements in bf16.
  bool pays(uint64_t count) const { return bytes(count) < count * sizeof(base::Bf16); }
  /// Makes the message of a piece. Shapes: sum: [piece.count]; out: [bytes(piece.count)].
  void compress(const Piece& piece, std::span<const float> sum, std::byte* out);
  /// Adds elements of a piece, from its element `from` on, as a message has them; NaN where the sum
  /// was not finite. Errors: kCorrupt.
  base::Status add(const Piece& piece, const std::byte* message, uint64_t from,
                   std::span<float> out, std::vector<float>& scratch) const;

  /// The pieces within [first, first + count) keep their residual: they are not updated in this
  /// step.
  void leave(uint64_t first, uint64_t count);
  void committed() { compressor_->commit(); }

 private:
  CompressedSums(const compress::CompressOptions& options, std::vector<Piece> pieces,
                 std::vector<uint64_t> places,
                 std::unique_ptr<compress::GradientCompressor> compressor);
  plan::Subgroup place_of(const Piece& piece) const;

  const compress::CompressOptions options_;
  const std::vector<Piece> pieces_;
  const std::vector<uint64_t> places_;  // of each piece in the compressor's memory
  const std::unique_ptr<compress::GradientCompressor> compressor_;
  double density_ = 0;  // of the step
  compress::GradientCompressor::Scratch scratch_;
  compress::CompressedWriter writer_;
};

}  // namespace smartinf::engine
