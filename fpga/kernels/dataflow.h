// Words, streams and dataflow regions. With Vitis a region is Vitis' own; in software each of its
// calls is a process of sim/processes.h.
#pragma once

#include <cstdint>

#include <ap_int.h>
#include <hls_stream.h>

#define SI_TEXT(text) #text
/// A pragma in which macros are expanded.
#define SI_PRAGMA(text) _Pragma(SI_TEXT(text))

/// Cycles that the arithmetic takes for a word of 16 elements. 1: as fast as words can come, for
/// cards where each plane has memory of its own. With one bank for all planes a word of each cannot
/// come more often than every sixth cycle, and 4 needs a quarter of the multipliers (docs/fpga.md).
#ifndef SI_WORD_CYCLES
#define SI_WORD_CYCLES 1
#endif

// After the streams of a function, which is a region then: SI_REGION; SI_PROCESS(call(...)); ...
// In a loop whose bodies follow each other so many cycles apart: SI_PIPELINE(1);
// Where a word of memory is read or written: SI_WORD_MOVED();
#if defined(SI_SOFTWARE_STREAMS)
#define SI_REGION software::Region si_region
#define SI_PROCESS(...) si_region.start(#__VA_ARGS__, [&] { __VA_ARGS__; })
#define SI_PIPELINE(cycles) software::Simulation::current().pass(cycles)
#define SI_WORD_MOVED() software::Simulation::current().move_word()
#else
#define SI_REGION SI_PRAGMA(HLS DATAFLOW)
#define SI_PROCESS(...) __VA_ARGS__
#define SI_PIPELINE(cycles) SI_PRAGMA(HLS PIPELINE II = cycles)
#define SI_WORD_MOVED()
#endif

namespace smartinf {
namespace fpga {

/// Word that memory gives in one access.
typedef ap_uint<512> Word;

static const int kLanes = 16;                     // f32 or u32 in a word
static const uint32_t kBlockElements = 1u << 16;  // base::kBlockElements
static const uint32_t kBlockWords = kBlockElements / kLanes;

/// Elements on the way from reader to writer. Deep enough that readers go on while memory turns
/// from reading to writing: a burst is 64 words, the most that AXI's limit of 4096 bytes allows.
static const int kBurstWords = 64;

inline uint32_t lane(const Word& word, int i) { return word.range(32 * i + 31, 32 * i).to_uint(); }
inline void set_lane(Word& word, int i, uint32_t value) { word.range(32 * i + 31, 32 * i) = value; }
inline uint64_t wide_lane(const Word& word, int i) {
  return word.range(64 * i + 63, 64 * i).to_uint64();
}
inline void set_wide_lane(Word& word, int i, uint64_t value) {
  word.range(64 * i + 63, 64 * i) = value;
}

inline uint32_t divide_up(uint32_t value, uint32_t unit) { return (value + unit - 1) / unit; }
inline uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

/// Burst reader.
inline void read_words(const Word* memory, uint32_t words, hls::stream<Word>& out) {
  for (uint32_t w = 0; w < words; ++w) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 65536)
    SI_PIPELINE(1);
    SI_WORD_MOVED();
    out.write(memory[w]);
  }
}

/// Burst writer.
inline void write_words(hls::stream<Word>& in, uint32_t words, Word* memory) {
  for (uint32_t w = 0; w < words; ++w) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 65536)
    SI_PIPELINE(1);
    SI_WORD_MOVED();
    memory[w] = in.read();
  }
}

}  // namespace fpga
}  // namespace smartinf
