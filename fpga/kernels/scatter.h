// From (index, value) pairs to dense gradients: pairs ascend, so a word is filled while its pairs
// come, and then it goes. No random access, and no dense gradient in memory. A pair or a word in
// each cycle.
#pragma once

#include "fpga/kernels/dataflow.h"
#include "fpga/kernels/job.h"

namespace smartinf {
namespace fpga {

struct Pair {
  uint32_t index;  // within the subgroup
  uint32_t bits;   // of an f32
};
/// The index of what follows the last pair; its bits are the status of what brought the pairs.
static const uint32_t kNoIndex = 0xffffffffu;

inline void send(const Word& word, hls::stream<GradientWord>& out) {
  GradientWord message;
  message.data = word;
  message.keep = ~uint64_t{0};
  message.last = 0;
  out.write(message);
}

/// Pairs as they lie in memory, eight in a word.
inline void unpack_pairs(hls::stream<Word>& in, uint32_t pair_count, hls::stream<Pair>& out) {
  Word word = 0;
  for (uint32_t i = 0; i <= pair_count; ++i) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 1048576)
    SI_PIPELINE(1);
    Pair pair = {kNoIndex, kStatusOk};
    if (i < pair_count) {
      const int at = static_cast<int>(i % 8);
      if (at == 0) word = in.read();
      pair.index = static_cast<uint32_t>(wide_lane(word, at));
      pair.bits = static_cast<uint32_t>(wide_lane(word, at) >> 32);
    }
    out.write(pair);
  }
}

/// Pairs that do not ascend or lie beyond the last element are a kStatusDisorder; then nothing of
/// the gradient means anything, but as many words go out.
inline void scatter(hls::stream<Pair>& pairs, uint32_t count, hls::stream<GradientWord>& out,
                    hls::stream<uint32_t>& status) {
  Pair next = pairs.read();
  Word word = 0;
  uint32_t least = 0;  // that the next index may be
  uint32_t found = kStatusOk;
  const uint32_t words = divide_up(count, kLanes);
  for (uint32_t w = 0; w < words;) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 131072)
    SI_PIPELINE(1);
    const bool here = next.index / kLanes == w && next.index >= least;
    if (here) {
      for (int i = 0; i < kLanes; ++i) {
        SI_PRAGMA(HLS UNROLL)
        if (next.index % kLanes == static_cast<uint32_t>(i)) set_lane(word, i, next.bits);
      }
      least = next.index + 1;
      if (least > count) found = kStatusDisorder;
      next = pairs.read();
    } else {
      send(word, out);
      word = 0;
      ++w;
    }
  }
  while (next.index != kNoIndex) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 0 max = 1)
    SI_PIPELINE(1);
    found = kStatusDisorder;
    next = pairs.read();
  }
  status.write(next.bits != kStatusOk ? next.bits : found);
}

inline void write_status(hls::stream<uint32_t>& status, Word* memory) {
  memory[0] = Word(status.read());
}

}  // namespace fpga
}  // namespace smartinf
