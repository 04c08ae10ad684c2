// The kernels that bring gradients to an update kernel, linked to it by a stream: dense ones as
// they are, others made dense. Shells around message.h and scatter.h, with their ports.
#include "fpga/kernels/message.h"
#include "fpga/kernels/scatter.h"

// clang-format off
#define SI_READ_PORT(name, of) \
  SI_PRAGMA(HLS INTERFACE m_axi port = name bundle = of offset = slave \
            max_read_burst_length = 64 num_read_outstanding = 16)
// clang-format on

namespace smartinf {
namespace fpga {

/// Widens bf16, of which a word of memory holds two words' elements.
inline void widen(hls::stream<Word>& in, uint32_t count, uint32_t type,
                  hls::stream<GradientWord>& out) {
  Word narrow = 0;
  for (uint32_t w = 0; w < divide_up(count, kLanes); ++w) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 65536)
    SI_PIPELINE(1);
    const bool upper = w % 2 != 0;
    if (type == kGradientF32 || !upper) narrow = in.read();
    Word word;
    for (int i = 0; i < kLanes; ++i) {
      SI_PRAGMA(HLS UNROLL)
      const uint32_t bits = upper ? narrow.range(256 + 16 * i + 15, 256 + 16 * i).to_uint()
                                  : narrow.range(16 * i + 15, 16 * i).to_uint();
      set_lane(word, i, type == kGradientBf16 ? bits << 16 : lane(narrow, i));
    }
    send(word, out);
  }
}

}  // namespace fpga
}  // namespace smartinf

using smartinf::fpga::BlockHead;
using smartinf::fpga::Extent;
using smartinf::fpga::GradientWord;
using smartinf::fpga::kBurstWords;
using smartinf::fpga::Pair;
using smartinf::fpga::Word;

extern "C" {

void smartinf_gradient_dense(const Word* memory, uint32_t count, uint32_t type,
                             hls::stream<GradientWord>& gradients) {
  SI_READ_PORT(memory, gradient)
  SI_PRAGMA(HLS INTERFACE axis port = gradients)
  const uint32_t in_word =
      type == smartinf::fpga::kGradientBf16 ? 2 * smartinf::fpga::kLanes : smartinf::fpga::kLanes;
  hls::stream<Word, kBurstWords> read("gradient, as it lies");
  SI_REGION;
  SI_PROCESS(smartinf::fpga::read_words(memory, smartinf::fpga::divide_up(count, in_word), read));
  SI_PROCESS(smartinf::fpga::widen(read, count, type, gradients));
}

void smartinf_gradient_pairs(const Word* pairs, uint32_t pair_count, uint32_t count, Word* status,
                             hls::stream<GradientWord>& gradients) {
  SI_READ_PORT(pairs, gradient)
  SI_READ_PORT(status, status)
  SI_PRAGMA(HLS INTERFACE axis port = gradients)
  hls::stream<Word, kBurstWords> read("pairs, as they lie");
  hls::stream<Pair, 16> unpacked("pairs");
  hls::stream<uint32_t> found("status");
  SI_REGION;
  SI_PROCESS(smartinf::fpga::read_words(pairs, smartinf::fpga::divide_up(pair_count, 8), read));
  SI_PROCESS(smartinf::fpga::unpack_pairs(read, pair_count, unpacked));
  SI_PROCESS(smartinf::fpga::scatter(unpacked, count, gradients, found));
  SI_PROCESS(smartinf::fpga::write_status(found, status));
}

void smartinf_gradient_message(const Word* directory, const Word* values, const Word* lows,
                               const Word* highs, uint64_t bytes, uint32_t count, Word* status,
                               hls::stream<GradientWord>& gradients) {
  SI_READ_PORT(directory, directory)
  SI_READ_PORT(values, values)
  SI_READ_PORT(lows, lows)
  SI_READ_PORT(highs, highs)
  SI_READ_PORT(status, directory)
  SI_PRAGMA(HLS INTERFACE axis port = gradients)
  const uint32_t blocks = smartinf::fpga::divide_up(count, smartinf::fpga::kBlockElements);
  hls::stream<BlockHead, 4> heads("heads of blocks");
  hls::stream<Extent, 4> value_extents("extents of values"), value_parts("parts of values");
  hls::stream<Extent, 4> low_extents("extents of low parts"), low_parts("parts of low parts");
  hls::stream<Extent, 4> high_extents("extents of high parts"), high_parts("parts of high parts");
  hls::stream<uint64_t, kBurstWords> value_bits("bits of values"), low_bits("bits of low parts"),
      high_bits("bits of high parts");
  hls::stream<uint32_t, 16> value_fields("values"), low_fields("low parts"), ones("high parts");
  hls::stream<Pair, 16> pairs("pairs");
  hls::stream<uint32_t> found("status");
  SI_REGION;
  SI_PROCESS(smartinf::fpga::read_directory(directory, bytes, count, heads, value_extents,
                                            low_extents, high_extents));
  SI_PROCESS(smartinf::fpga::read_extents(values, blocks, value_extents, value_parts, value_bits));
  SI_PROCESS(smartinf::fpga::read_extents(lows, blocks, low_extents, low_parts, low_bits));
  SI_PROCESS(smartinf::fpga::read_extents(highs, blocks, high_extents, high_parts, high_bits));
  SI_PROCESS(smartinf::fpga::split_fields(value_parts, blocks, value_bits, value_fields));
  SI_PROCESS(smartinf::fpga::split_fields(low_parts, blocks, low_bits, low_fields));
  SI_PROCESS(smartinf::fpga::find_ones(high_parts, blocks, high_bits, ones));
  SI_PROCESS(smartinf::fpga::join_pairs(heads, blocks, value_fields, low_fields, ones, pairs));
  SI_PROCESS(smartinf::fpga::scatter(pairs, count, gradients, found));
  SI_PROCESS(smartinf::fpga::write_status(found, status));
}
}
