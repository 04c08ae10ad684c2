// The kernels that bring gradients to an update kernel, linked to it by a stream: dense ones as
// they are.
#include "fpga/kernels/dataflow.h"
#include "fpga/kernels/job.h"

namespace smartinf {
namespace fpga {

inline void send(const Word& word, hls::stream<GradientWord>& out) {
  GradientWord message;
  message.data = word;
  message.keep = ~uint64_t{0};
  message.last = 0;
  out.write(message);
}

/// Widens bf16, of which a word of memory holds two words' elements.
inline void widen(hls::stream<Word>& in, uint32_t count, uint32_t type,
                  hls::stream<GradientWord>& out) {
  Word narrow = 0;
  for (uint32_t w = 0; w < divide_up(count, kLanes); ++w) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 65536)
    SI_PRAGMA(HLS PIPELINE II = 1)
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

extern "C" {

void smartinf_gradient_dense(const smartinf::fpga::Word* memory, uint32_t count, uint32_t type,
                             hls::stream<smartinf::fpga::GradientWord>& gradients) {
  SI_PRAGMA(HLS INTERFACE m_axi port = memory bundle = gradient offset =
                slave max_read_burst_length = 64 num_read_outstanding = 16)
  SI_PRAGMA(HLS INTERFACE axis port = gradients)
  const uint32_t in_word =
      type == smartinf::fpga::kGradientBf16 ? 2 * smartinf::fpga::kLanes : smartinf::fpga::kLanes;
  hls::stream<smartinf::fpga::Word, smartinf::fpga::kBurstWords> read("gradient, as it lies");
  SI_REGION;
  SI_PROCESS(smartinf::fpga::read_words(memory, smartinf::fpga::divide_up(count, in_word), read));
  SI_PROCESS(smartinf::fpga::widen(read, count, type, gradients));
}
}
