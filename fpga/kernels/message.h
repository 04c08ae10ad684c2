// The decompressor: messages of smartinf/compress (docs/format.md, the compressed gradient's
// format), one value in a cycle. The directory says where each block's values, low parts and high
// parts begin; three readers bring these three streams of bits, whose fields have fixed widths but
// for the high parts: ones, whose places are what matters. Messages are checked where they arrive
// (compress::CompressedView::parse); here a malformed one is named and harms nothing else.
#pragma once

#include "fpga/kernels/scatter.h"

namespace smartinf {
namespace fpga {

static const uint64_t kMessageMagic = 0x314752434e494953u;  // compress::kCompressedMagic
static const uint32_t kMessageVersion = 4;
static const uint32_t kHeaderBytes = 48;
static const uint32_t kEncodingF32 = 0;
static const uint32_t kEncodingBf16 = 1;
static const uint32_t kEncodingSign = 3;
static const uint32_t kDenseBlock = 0xff;
static const uint32_t kLowBitsMax = 16;

/// So many bits of a message from a byte on.
struct Extent {
  uint64_t first;  // byte
  uint32_t bytes;
  uint32_t fields;  // in it
  uint8_t width;    // of a field, in bits; 0: the fields are zeros that take no room
};

/// Head of a block, as the decoder knows it.
struct BlockHead {
  uint32_t first;  // element
  uint32_t elements;
  uint32_t values;
  uint8_t low_bits;
  bool sign;
  bool dense;
  bool narrow;  // values of 16 bits
  bool last;
  uint32_t status;
};

/// Eight bytes of the directory. Few, so that none is read ahead.
inline uint64_t eight_bytes(const Word* message, uint32_t at) {
  const Word word = message[at / 8];
  return wide_lane(word, static_cast<int>(at % 8));
}

/// Reads header and directory, which lie on multiples of eight bytes.
inline void read_directory(const Word* message, uint64_t bytes, uint32_t count,
                           hls::stream<BlockHead>& heads, hls::stream<Extent>& values,
                           hls::stream<Extent>& lows, hls::stream<Extent>& highs) {
  const uint32_t blocks = divide_up(count, kBlockElements);
  const uint64_t kind = eight_bytes(message, 1);
  const uint32_t encoding = static_cast<uint32_t>(kind >> 16 & 0xff);
  const uint64_t factors = eight_bytes(message, 3);  // runs, and how many there are
  const bool sign = encoding == kEncodingSign;
  const bool narrow = encoding != kEncodingF32;
  uint32_t status = kStatusOk;
  if (eight_bytes(message, 0) != kMessageMagic || eight_bytes(message, 2) != count) {
    status = kStatusCorrupt;
  }
  if ((kind & 0xffff) != kMessageVersion || (narrow && encoding != kEncodingBf16 && !sign)) {
    status = kStatusUnknown;
  }
  if (factors != 0) status = kStatusFactors;
  const uint64_t sections = kHeaderBytes + uint64_t{8} * blocks;
  const uint64_t size = sections < bytes ? bytes - sections : 0;
  uint32_t begin = 0;
  for (uint32_t b = 0; b < blocks; ++b) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 16)
    const uint64_t entry = status == kStatusOk ? eight_bytes(message, kHeaderBytes / 8 + b) : 0;
    const uint32_t end = static_cast<uint32_t>(entry);
    BlockHead head;
    head.first = b * kBlockElements;
    head.elements = smaller(kBlockElements, count - head.first);
    head.values = static_cast<uint32_t>(entry >> 32 & 0xffffff);
    const uint32_t code = static_cast<uint32_t>(entry >> 56);
    head.dense = code == kDenseBlock;
    head.low_bits = static_cast<uint8_t>(head.dense ? 0 : code);
    head.sign = sign;
    head.narrow = narrow;
    head.last = b + 1 == blocks;
    // At most 2^18 bytes of values and 2^17 of low parts, where their number is right.
    const uint32_t value_fields = sign ? 1 : head.values;
    const uint32_t value_bytes = value_fields * (narrow ? 2 : 4);
    const uint32_t width = head.low_bits + (sign ? 1 : 0);
    const uint32_t low_bytes = divide_up(head.values * width, 8);
    const bool fits = end >= begin && end <= size && head.values <= head.elements &&
                      head.low_bits <= kLowBitsMax && value_bytes + low_bytes <= end - begin &&
                      (!head.dense || head.values == head.elements);
    if (status == kStatusOk && !fits) status = kStatusCorrupt;
    if (status != kStatusOk) {  // the rest is zeros
      head.values = 0;
      head.low_bits = 0;
    }
    head.status = status;
    const uint64_t at = sections + begin;
    const bool nothing = status != kStatusOk;
    const Extent of_values = {at, nothing ? 0 : value_bytes, nothing ? 0 : value_fields,
                              static_cast<uint8_t>(narrow ? 16 : 32)};
    const Extent of_lows = {at + value_bytes, nothing ? 0 : low_bytes, head.values,
                            static_cast<uint8_t>(nothing ? 0 : width)};
    const uint32_t ones = head.dense ? 0 : head.values;
    const Extent of_highs = {at + value_bytes + low_bytes,
                             nothing || ones == 0 ? 0 : end - begin - value_bytes - low_bytes, ones,
                             1};
    heads.write(head);
    values.write(of_values);
    lows.write(of_lows);
    highs.write(of_highs);
    begin = end;
  }
}

/// Brings extents as eight bytes after eight bytes, each extent from its first byte on; what
/// follows an extent's last byte means nothing. The extents are passed on to whoever takes them
/// apart.
inline void read_extents(const Word* message, uint32_t blocks, hls::stream<Extent>& in,
                         hls::stream<Extent>& extents, hls::stream<uint64_t>& out) {
  for (uint32_t b = 0; b < blocks; ++b) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 16)
    const Extent extent = in.read();
    extents.write(extent);
    const int shift = static_cast<int>(extent.first % 8 * 8);
    const uint64_t first = extent.first / 8;
    const uint64_t last = (extent.first + extent.bytes - 1) / 8;  // of those that are read
    const uint32_t pieces = divide_up(extent.bytes, 8);
    const uint32_t reads = pieces == 0 || shift == 0 ? pieces : pieces + 1;
    uint64_t before = 0;
    Word word = 0;
    for (uint32_t i = 0; i < reads; ++i) {
      SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 0 max = 32769)
      SI_PIPELINE(1);
      const uint64_t at = first + i;
      if ((i == 0 || at % 8 == 0) && at <= last) {
        SI_WORD_MOVED();
        word = message[at / 8];
      }
      const uint64_t piece = at <= last ? wide_lane(word, static_cast<int>(at % 8)) : 0;
      if (shift == 0) {
        out.write(piece);
      } else if (i > 0) {
        out.write(before >> shift | piece << (64 - shift));
      }
      before = piece;
    }
  }
}

/// Fields of one width, one in a cycle.
inline void split_fields(hls::stream<Extent>& extents, uint32_t blocks, hls::stream<uint64_t>& in,
                         hls::stream<uint32_t>& fields) {
  for (uint32_t b = 0; b < blocks; ++b) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 16)
    const Extent extent = extents.read();
    const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << extent.width) - 1);
    uint32_t pieces = divide_up(extent.bytes, 8);
    uint64_t piece = 0;
    int left = 0;  // bits of it
    for (uint32_t i = 0; i < extent.fields; ++i) {
      SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 0 max = 65536)
      SI_PIPELINE(1);
      uint64_t field = piece;
      const int lacks = extent.width - left;
      if (lacks > 0) {
        piece = in.read();
        --pieces;
        field |= piece << left;
        piece >>= lacks;
        left = 64 - lacks;
      } else {
        piece >>= extent.width;
        left = -lacks;
      }
      fields.write(static_cast<uint32_t>(field) & mask);
    }
  }
}

/// Places of the ones, from the extent's first bit on; where there are fewer than fields, kNoIndex
/// in their place. One in a cycle, and a cycle for every eight bytes.
inline void find_ones(hls::stream<Extent>& extents, uint32_t blocks, hls::stream<uint64_t>& in,
                      hls::stream<uint32_t>& places) {
  for (uint32_t b = 0; b < blocks; ++b) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 16)
    const Extent extent = extents.read();
    const uint32_t pieces = divide_up(extent.bytes, 8);
    uint32_t read = 0;
    uint64_t piece = 0;
    for (uint32_t found = 0; found < extent.fields || read < pieces;) {
      SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 0 max = 66560)
      SI_PIPELINE(1);
      if (found < extent.fields && piece != 0) {
        const uint32_t in_piece = static_cast<uint32_t>(__builtin_ctzll(piece));
        const uint32_t place = (read - 1) * 64 + in_piece;
        places.write(place / 8 < extent.bytes ? place : kNoIndex);
        piece &= piece - 1;
        ++found;
      } else if (read < pieces) {
        piece = in.read();
        ++read;
      } else {
        places.write(kNoIndex);
        ++found;
      }
    }
  }
}

/// Puts index and value together.
inline void join_pairs(hls::stream<BlockHead>& heads, uint32_t blocks,
                       hls::stream<uint32_t>& values, hls::stream<uint32_t>& lows,
                       hls::stream<uint32_t>& ones, hls::stream<Pair>& pairs) {
  uint32_t found = kStatusOk;
  for (uint32_t b = 0; b < blocks; ++b) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 16)
    const BlockHead head = heads.read();
    if (head.status != kStatusOk && found == kStatusOk) found = head.status;
    const bool magnitude_there = head.sign && head.status == kStatusOk;
    const uint32_t magnitude = magnitude_there ? values.read() : 0;
    uint32_t lows_before = 0;
    for (uint32_t i = 0; i < head.values; ++i) {
      SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 0 max = 65536)
      SI_PIPELINE(1);
      const uint32_t low = lows.read();
      const uint32_t value = head.sign ? magnitude | (low >> head.low_bits) << 15 : values.read();
      lows_before += low & ((1u << head.low_bits) - 1);
      const uint32_t one = head.dense ? i : ones.read();
      // Before the i-th one stand i ones, and zeros for the high parts of all gaps.
      const uint64_t index = (static_cast<uint64_t>(one - i) << head.low_bits) + lows_before + i;
      if (one != kNoIndex && index < head.elements) {
        const Pair pair = {head.first + static_cast<uint32_t>(index),
                           head.narrow ? value << 16 : value};
        pairs.write(pair);
      } else {
        found = kStatusCorrupt;
      }
    }
  }
  const Pair end = {kNoIndex, found};
  pairs.write(end);
}

}  // namespace fpga
}  // namespace smartinf
