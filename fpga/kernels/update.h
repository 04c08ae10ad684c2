// The update of a subgroup: planes of f32 and a stream of gradients in, planes and new weights out,
// with the checksums of both.
#pragma once

#include "fpga/kernels/dataflow.h"
#include "fpga/kernels/digest.h"
#include "fpga/kernels/exact_rules.h"
#include "fpga/kernels/job.h"

namespace smartinf {
namespace fpga {

/// Sums that wait while the block before is finished, some 200 cycles in which twelve groups come.
static const int kPartsAhead = 16;

/// A part of a word whose elements share scalars: most often all of it.
struct Beat {
  uint8_t begin;  // lanes
  uint8_t end;
  bool skip;      // they stay as they are
  bool new_span;  // its scalars are the next ones
  bool first;     // of its word
  bool last;
};

/// Plans what is to be done with each word. Where the spans hold fewer elements than there are, the
/// others stay as they are.
inline void plan_beats(const Word* spans, uint32_t span_count, uint32_t count,
                       hls::stream<Word>& scalars, hls::stream<Beat>& beats) {
  uint32_t at = 0;
  for (uint32_t s = 0; s <= span_count; ++s) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 2 max = 16)
    const bool given = s < span_count;
    const Word head = given ? spans[2 * s] : Word(0);
    const Word body = given ? spans[2 * s + 1] : Word(0);
    const uint32_t size = given ? lane(head, 0) : count - at;
    const uint32_t end = size < count - at ? at + size : count;
    if (at < end && given) scalars.write(body);
    bool new_span = given;
    while (at < end) {
      SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 65536)
      SI_PIPELINE(1);
      const uint32_t begin = at % kLanes;
      const uint32_t size_here = smaller(kLanes - begin, end - at);
      Beat beat;
      beat.begin = static_cast<uint8_t>(begin);
      beat.end = static_cast<uint8_t>(begin + size_here);
      beat.skip = !given || lane(body, kSkipLane) != 0;
      beat.new_span = new_span;
      beat.first = begin == 0;
      at += size_here;
      beat.last = at % kLanes == 0 || at == count;
      new_span = false;
      beats.write(beat);
    }
  }
}

/// The scalars of a span. The rule is the kernel's own, so that nothing of the others is built.
template <uint32_t kRule>
kernels::RuleScalars scalars_of(const Word& word) {
  kernels::RuleScalars s;
  s.rule = kRule;
  s.skip = 0;
  s.nesterov = lane(word, 2);
  s.first_step = lane(word, 3);
  s.gradient_scale = Float32::of_bits(lane(word, 4));
  s.lr = Float32::of_bits(lane(word, 5));
  s.beta1 = Float32::of_bits(lane(word, 6));
  s.one_minus_beta1 = Float32::of_bits(lane(word, 7));
  s.beta2 = Float32::of_bits(lane(word, 8));
  s.one_minus_beta2 = Float32::of_bits(lane(word, 9));
  s.eps = Float32::of_bits(lane(word, 10));
  s.decay_factor = Float32::of_bits(lane(word, 11));
  s.weight_decay = Float32::of_bits(lane(word, 12));
  s.step_size = Float32::of_bits(lane(word, 13));
  s.dampening_factor = Float32::of_bits(lane(word, 14));
  s.initial_variance = Float32::of_bits(lane(word, 15));
  return s;
}

/// Adam's third plane, and which of the rule's fields the second is.
template <uint32_t kRule>
struct Planes {
  static const int kCount =
      kRule == kernels::kRuleSgdMomentum || kRule == kernels::kRuleAdagrad ? 2 : 3;
  static const bool kSecondIsVariance = kRule == kernels::kRuleAdagrad;
};

template <uint32_t kRule>
void update_words(uint32_t count, hls::stream<Word>& scalars, hls::stream<Beat>& beats,
                  hls::stream<GradientWord>& gradients, hls::stream<Word>& first_in,
                  hls::stream<Word>& second_in, hls::stream<Word>& third_in,
                  hls::stream<Word>& first_out, hls::stream<Word>& second_out,
                  hls::stream<Word>& third_out, hls::stream<Word>& weights) {
  const bool three = Planes<kRule>::kCount == 3;
  const bool second_is_variance = Planes<kRule>::kSecondIsVariance;
  kernels::RuleScalars s = scalars_of<kRule>(Word(0));
  Word first = 0;
  Word second = 0;
  Word third = 0;
  Word gradient = 0;
  Word new_first = 0;
  Word new_second = 0;
  Word new_third = 0;
  for (uint32_t words = divide_up(count, kLanes); words > 0;) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 65536)
    SI_PIPELINE(SI_WORD_CYCLES);
    const Beat beat = beats.read();
    if (beat.new_span) s = scalars_of<kRule>(scalars.read());
    if (beat.first) {
      new_first = first = first_in.read();
      new_second = second = second_in.read();
      if (three) new_third = third = third_in.read();
      gradient = gradients.read().data;
    }
    for (int i = 0; i < kLanes; ++i) {
      SI_PRAGMA(HLS UNROLL)
      kernels::ElementState e;
      e.master = Float32::of_bits(lane(first, i));
      e.momentum = Float32::of_bits(second_is_variance ? 0 : lane(second, i));
      e.variance = Float32::of_bits(second_is_variance ? lane(second, i) : lane(third, i));
      e = kernels::update_element(s, Float32::of_bits(lane(gradient, i)), false, Float32(), e);
      if (!beat.skip && i >= beat.begin && i < beat.end) {
        set_lane(new_first, i, e.master.bits());
        set_lane(new_second, i, second_is_variance ? e.variance.bits() : e.momentum.bits());
        if (three) set_lane(new_third, i, e.variance.bits());
      }
    }
    if (beat.last) {
      first_out.write(new_first);
      second_out.write(new_second);
      if (three) third_out.write(new_third);
      weights.write(new_first);
      --words;
    }
  }
}

/// New weights, cast; bf16 two words in one.
inline void write_weights(hls::stream<Word>& in, uint32_t count, uint32_t type, Word* memory) {
  Word packed = 0;
  const uint32_t words = divide_up(count, kLanes);
  for (uint32_t w = 0; w < words; ++w) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 65536)
    SI_PIPELINE(1);
    const Word word = in.read();
    const bool upper = w % 2 != 0;
    for (int i = 0; i < kLanes; ++i) {
      SI_PRAGMA(HLS UNROLL)
      // Beyond the last element there is what memory held: zeros look better.
      const bool there = w * kLanes + static_cast<uint32_t>(i) < count;
      const uint32_t narrow = there ? base::bf16_of_f32(Float32::of_bits(lane(word, i))) : 0;
      const int place = 16 * (i % 32);
      if (upper) {
        packed.range(256 + place + 15, 256 + place) = narrow;
      } else {
        packed.range(place + 15, place) = narrow;
        packed.range(256 + place + 15, 256 + place) = 0;
      }
    }
    const bool narrow_now = type == kWeightsBf16 && (upper || w + 1 == words);
    if (type == kWeightsF32 || narrow_now) {
      SI_WORD_MOVED();
      memory[narrow_now ? w / 2 : w] = narrow_now ? packed : word;
    }
  }
}

/// Burst reader of a plane, with the checksums of what it reads.
inline void read_plane(const Word* memory, uint32_t count, hls::stream<uint64_t>& seeds,
                       hls::stream<Word>& out, hls::stream<uint64_t>& digests) {
  hls::stream<Word, kBurstWords> read("what was read");
  hls::stream<Word, kPartsAhead> parts("stripes of what was read");
  SI_REGION;
  SI_PROCESS(read_words(memory, divide_up(count, kLanes), read));
  SI_PROCESS(sum_stripes(count, seeds, read, out, parts));
  SI_PROCESS(finish_digests(count, parts, digests));
}

/// Burst writer of a plane, likewise.
inline void write_plane(hls::stream<Word>& in, uint32_t count, hls::stream<uint64_t>& seeds,
                        Word* memory, hls::stream<uint64_t>& digests) {
  hls::stream<Word, kBurstWords> sealed("what is to be written");
  hls::stream<Word, kPartsAhead> parts("stripes of what is written");
  SI_REGION;
  SI_PROCESS(sum_stripes(count, seeds, in, sealed, parts));
  SI_PROCESS(finish_digests(count, parts, digests));
  SI_PROCESS(write_words(sealed, divide_up(count, kLanes), memory));
}

inline void read_seeds(const Word* memory, uint32_t count, int planes,
                       hls::stream<uint64_t> seeds[2 * kPlanesMax]) {
  for (uint32_t b = 0; b < divide_up(count, kBlockElements); ++b) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 16)
    const Word word = memory[b];
    for (int p = 0; p < planes; ++p) {
      SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 2 max = 3)
      seeds[p].write(wide_lane(word, p));
      seeds[kPlanesMax + p].write(wide_lane(word, kPlanesMax + p));
    }
  }
}

inline void write_report(hls::stream<uint64_t> digests[2 * kPlanesMax], uint32_t count, int planes,
                         Word* memory) {
  for (uint32_t b = 0; b < divide_up(count, kBlockElements); ++b) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 16)
    Word word = 0;
    for (int p = 0; p < planes; ++p) {
      SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 2 max = 3)
      set_wide_lane(word, p, digests[p].read());
      set_wide_lane(word, kPlanesMax + p, digests[kPlanesMax + p].read());
    }
    memory[b] = word;
  }
}

/// The whole of it, as docs/fpga.md draws it. For rules of two planes nothing of the third is
/// built.
template <uint32_t kRule>
void update_subgroup(hls::stream<GradientWord>& gradients, const Word* first_in, Word* first_out,
                     const Word* second_in, Word* second_out, const Word* third_in, Word* third_out,
                     Word* weights_out, const Word* spans, const Word* seeds_in, Word* report,
                     uint32_t count, uint32_t span_count, uint32_t weights_type) {
  const int planes = Planes<kRule>::kCount;
  hls::stream<Word> scalars("scalars");
  hls::stream<Beat, 16> beats("beats");
  hls::stream<uint64_t> seeds[2 * kPlanesMax];
  hls::stream<uint64_t> digests[2 * kPlanesMax];
  hls::stream<Word, 16> first_old("first plane, old"), first_new("first plane, new");
  hls::stream<Word, 16> second_old("second plane, old"), second_new("second plane, new");
  hls::stream<Word, 16> third_old("third plane, old"), third_new("third plane, new");
  hls::stream<Word, kBurstWords> weights("weights");
  SI_REGION;
  SI_PROCESS(plan_beats(spans, span_count, count, scalars, beats));
  SI_PROCESS(read_seeds(seeds_in, count, planes, seeds));
  SI_PROCESS(read_plane(first_in, count, seeds[0], first_old, digests[0]));
  SI_PROCESS(read_plane(second_in, count, seeds[1], second_old, digests[1]));
  if (planes == 3) {  // known when it is compiled
    SI_PROCESS(read_plane(third_in, count, seeds[2], third_old, digests[2]));
    SI_PROCESS(write_plane(third_new, count, seeds[5], third_out, digests[5]));
  }
  SI_PROCESS(update_words<kRule>(count, scalars, beats, gradients, first_old, second_old, third_old,
                                 first_new, second_new, third_new, weights));
  SI_PROCESS(write_plane(first_new, count, seeds[3], first_out, digests[3]));
  SI_PROCESS(write_plane(second_new, count, seeds[4], second_out, digests[4]));
  SI_PROCESS(write_weights(weights, count, weights_type, weights_out));
  SI_PROCESS(write_report(digests, count, planes, report));
}

}  // namespace fpga
}  // namespace smartinf
