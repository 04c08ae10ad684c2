// XXH3-64 of a plane's blocks while they pass by, a word in each cycle: the checksums that stores
// have (smartinf/base/checksum.h). A word is one stripe of XXH3. What 16 stripes add to the
// accumulators does not depend on these, so it is summed up at full speed, and the accumulators are
// scrambled behind, eight cycles for every 16 words. Blocks of at most 240 bytes have another form
// of XXH3; their checksums are the host's, and 0 here. Source: Collet 2019-2023, xxHash, XXH3's
// long form with a seed.
#pragma once

#include "fpga/kernels/dataflow.h"

namespace smartinf {
namespace fpga {

static const uint32_t kStripesInGroup = 16;
static const uint32_t kShortBytes = 240;
static const int kKeys = 24;

/// XXH3's secret, as little-endian words, changed by the seed.
inline void make_keys(uint64_t seed, uint64_t keys[kKeys]) {
  static const uint64_t kSecret[kKeys] = {
      0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
      0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
      0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
      0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
      0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
      0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};
  for (int i = 0; i < kKeys; ++i) {
    SI_PRAGMA(HLS UNROLL)
    keys[i] = i % 2 == 0 ? kSecret[i] + seed : kSecret[i] - seed;
  }
}

/// Eight bytes of the keys from any place on. The place is a constant once loops are unrolled.
inline uint64_t key_at(const uint64_t keys[kKeys], int byte) {
  const int shift = byte % 8 * 8;
  return shift == 0 ? keys[byte / 8] : keys[byte / 8] >> shift | keys[byte / 8 + 1] << (64 - shift);
}

inline uint64_t product_32(uint64_t key) { return (key & 0xffffffffu) * (key >> 32); }

/// Both halves of a product of 128 bits, one over the other.
inline uint64_t folded_product(uint64_t a, uint64_t b) {
  const uint64_t low = (a & 0xffffffffu) * (b & 0xffffffffu);
  const uint64_t cross_a = (a >> 32) * (b & 0xffffffffu);
  const uint64_t cross_b = (a & 0xffffffffu) * (b >> 32);
  const uint64_t middle = (low >> 32) + (cross_a & 0xffffffffu) + cross_b;
  const uint64_t high = (a >> 32) * (b >> 32) + (cross_a >> 32) + (middle >> 32);
  return (middle << 32 | (low & 0xffffffffu)) ^ high;
}

/// Passes a plane of `count` f32 on and sums up its stripes. seeds: one for each block. parts: for
/// every block its seed, the sums of each whole group, that of the rest, and the last two words.
inline void sum_stripes(uint32_t count, hls::stream<uint64_t>& seeds, hls::stream<Word>& in,
                        hls::stream<Word>& out, hls::stream<Word>& parts) {
  for (uint32_t first = 0; first < count; first += kBlockElements) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 16)
    const uint32_t words = divide_up(smaller(kBlockElements, count - first), kLanes);
    uint64_t keys[kKeys];
    SI_PRAGMA(HLS ARRAY_PARTITION variable = keys complete)
    uint64_t moving[kKeys];
    SI_PRAGMA(HLS ARRAY_PARTITION variable = moving complete)
    uint64_t sums[8] = {};
    SI_PRAGMA(HLS ARRAY_PARTITION variable = sums complete)
    const uint64_t seed = seeds.read();
    parts.write(Word(seed));
    make_keys(seed, keys);
    for (int i = 0; i < kKeys; ++i) {
      SI_PRAGMA(HLS UNROLL)
      moving[i] = keys[i];
    }
    Word before = 0;
    Word word = 0;
    for (uint32_t w = 0; w < words; ++w) {
      SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 4096)
      SI_PIPELINE(SI_WORD_CYCLES);
      before = word;
      word = in.read();
      out.write(word);
      // The last word, whole or not, is part of the last stripe, which has keys of its own.
      const bool last = w + 1 == words;
      const bool group_ends = w % kStripesInGroup == kStripesInGroup - 1;
      Word part;
      for (int i = 0; i < 8; ++i) {
        SI_PRAGMA(HLS UNROLL)
        const uint64_t added = wide_lane(word, i ^ 1) + product_32(wide_lane(word, i) ^ moving[i]);
        const uint64_t sum = sums[i] + (last ? 0 : added);
        set_wide_lane(part, i, sum);
        sums[i] = group_ends ? 0 : sum;
      }
      if (group_ends || last) parts.write(part);
      for (int i = 0; i < kKeys; ++i) {
        SI_PRAGMA(HLS UNROLL)
        moving[i] = group_ends ? keys[i] : moving[i + 1 < kKeys ? i + 1 : i];
      }
    }
    parts.write(before);
    parts.write(word);
  }
}

/// The checksums from what sum_stripes() has summed up.
inline void finish_digests(uint32_t count, hls::stream<Word>& parts,
                           hls::stream<uint64_t>& digests) {
  const uint64_t kPrime32_1 = 0x9e3779b1u;
  const uint64_t kPrime64_1 = 0x9e3779b185ebca87u;
  static const uint64_t kStart[8] = {0xc2b2ae3du,         kPrime64_1,          0xc2b2ae3d27d4eb4fu,
                                     0x165667b19e3779f9u, 0x85ebca77c2b2ae63u, 0x85ebca77u,
                                     0x27d4eb2f165667c5u, kPrime32_1};
  for (uint32_t first = 0; first < count; first += kBlockElements) {
    SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 1 max = 16)
    const uint32_t elements = smaller(kBlockElements, count - first);
    const uint32_t bytes = 4 * elements;
    uint64_t keys[kKeys];
    SI_PRAGMA(HLS ARRAY_PARTITION variable = keys complete)
    uint64_t sums[8];
    make_keys(wide_lane(parts.read(), 0), keys);
    for (int i = 0; i < 8; ++i) sums[i] = kStart[i];
    // A lane of one group after another; each needs what it left eight cycles before.
    const uint32_t scrambles = (divide_up(elements, kLanes) - 1) / kStripesInGroup * 8;
    Word part = 0;
    for (uint32_t i = 0; i < scrambles; ++i) {
      SI_PRAGMA(HLS LOOP_TRIPCOUNT min = 0 max = 2040)
      SI_PIPELINE(1);
      SI_PRAGMA(HLS DEPENDENCE variable = sums inter distance = 8 true)
      const int at = static_cast<int>(i % 8);
      if (at == 0) part = parts.read();
      const uint64_t sum = sums[at] + wide_lane(part, at);
      sums[at] = (sum ^ sum >> 47 ^ keys[16 + at]) * kPrime32_1;
    }
    const Word rest = parts.read();
    const Word before = parts.read();
    const Word word = parts.read();
    // The last 64 bytes: what the last word lacks, it takes from the one before.
    const uint32_t in_last = (elements - 1) % kLanes + 1;
    uint32_t both[2 * kLanes];
    for (int i = 0; i < kLanes; ++i) {
      both[i] = lane(before, i);
      both[kLanes + i] = lane(word, i);
    }
    Word stripe;
    for (int i = 0; i < kLanes; ++i) set_lane(stripe, i, both[in_last + static_cast<uint32_t>(i)]);
    for (int i = 0; i < 8; ++i) {
      const uint64_t key = wide_lane(stripe, i) ^ key_at(keys, 121 + 8 * i);
      sums[i] += wide_lane(rest, i) + wide_lane(stripe, i ^ 1) + product_32(key);
    }
    uint64_t digest = bytes * kPrime64_1;
    for (int i = 0; i < 4; ++i) {
      digest += folded_product(sums[2 * i] ^ key_at(keys, 11 + 16 * i),
                               sums[2 * i + 1] ^ key_at(keys, 19 + 16 * i));
    }
    digest = (digest ^ digest >> 37) * 0x165667919e3779f9u;
    digest ^= digest >> 32;
    digests.write(bytes > kShortBytes ? digest : 0);
  }
}

}  // namespace fpga
}  // namespace smartinf
