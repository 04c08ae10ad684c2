// XXH3-64 (Yann Collet, specification 0.1.1) of what is longer than 240 bytes: eight accumulators
// over stripes of 64 bytes, as one vector. smartinf/base/checksum.cc is the truth.

__constant const ulong kXxhSecret[24] = {
    0xbe4ba423396cfeb8ul, 0x1cad21f72c81017cul, 0xdb979083e96dd4deul, 0x1f67b3b7a4a44072ul,
    0x78e5c0cc4ee679cbul, 0x2172ffcc7dd05a82ul, 0x8e2443f7744608b8ul, 0x4c263a81e69035e0ul,
    0xcb00c391bb52283cul, 0xa32e531b8b65d088ul, 0x4ef90da297486471ul, 0xd8acdea946ef1938ul,
    0x3f349ce33f76faa8ul, 0x1d4f0bc7c7bbdcf9ul, 0x3159b4cd4be0518aul, 0x647378d9c97e9fc8ul,
    0xc3ebd33483acc5eaul, 0xeb6313faffa081c5ul, 0x49daf0b751dd0d17ul, 0x9e68d429265516d3ul,
    0xfca1477d58be162bul, 0xce31d07ad1b8f88ful, 0x280416958f3acb45ul, 0x7e404bbbcafbd7aful};
__constant const ulong kXxhStart[8] = {0x00000000c2b2ae3dul, 0x9e3779b185ebca87ul,
                                       0xc2b2ae3d27d4eb4ful, 0x165667b19e3779f9ul,
                                       0x85ebca77c2b2ae63ul, 0x0000000085ebca77ul,
                                       0x27d4eb2f165667c5ul, 0x000000009e3779b1ul};
#define XXH_PRIME32_1 0x9e3779b1ul
#define XXH_PRIME64_1 0x9e3779b185ebca87ul

/// Word i of the seed's secret: that of the constant one, plus or minus the seed.
static inline ulong xxh_secret(ulong seed, uint word) {
  return kXxhSecret[word] + ((word & 1u) != 0 ? -seed : seed);
}
/// Eight bytes of it from `at` on, which is no multiple of eight.
static inline ulong xxh_secret_at(ulong seed, uint at) {
  const uint shift = at % 8 * 8;
  return xxh_secret(seed, at / 8) >> shift | xxh_secret(seed, at / 8 + 1) << (64 - shift);
}

/// Eight bytes at any address.
static inline ulong word_at(global const uchar* at) { return as_ulong(vload8(0, at)); }

/// The same with zeros from `end` on.
static inline ulong word_within(global const uchar* at, global const uchar* end) {
  if (at + 8 <= end) return word_at(at);
  ulong word = 0;
  for (uint i = 0; at + i < end; ++i) word |= (ulong)at[i] << 8 * i;
  return word;
}

static inline ulong8 xxh_accumulate(ulong8 acc, ulong8 data, ulong8 neighbour, ulong8 secret) {
  const ulong8 keyed = data ^ secret;
  return acc + neighbour + (keyed & 0xfffffffful) * (keyed >> 32);
}

static inline ulong8 xxh_secrets(ulong seed, uint word) {
  const ulong8 even = (ulong8)(seed, -seed, seed, -seed, seed, -seed, seed, -seed);
  return vload8(0, kXxhSecret + word) + ((word & 1u) != 0 ? -even : even);
}

/// The checksum of `bytes` bytes, more than 240 and aligned to 4.
static inline ulong xxh3(global const uchar* data, ulong bytes, ulong seed) {
  const ulong stripes = (bytes - 1) / 64;
  global const uchar* end = data + bytes - 64;
  ulong8 acc = vload8(0, kXxhStart);
  const ulong8 scramble = xxh_secrets(seed, 16);
  for (ulong first = 0; first < stripes; first += 16) {
    const uint some = (uint)min((ulong)16, stripes - first);
    for (uint s = 0; s < some; ++s) {
      const ulong8 word =
          as_ulong8(vload16(0, (global const uint*)(data + (first + s) * 64)));
      acc = xxh_accumulate(acc, word, word.s10325476, xxh_secrets(seed, s));
    }
    if (some == 16) acc = (acc ^ (acc >> 47) ^ scramble) * XXH_PRIME32_1;
  }
  ulong8 word;
  ulong8 secret;
  for (uint l = 0; l < 8; ++l) {
    ((ulong*)&word)[l] = word_at(end + l * 8);
    ((ulong*)&secret)[l] = xxh_secret_at(seed, 121 + l * 8);
  }
  acc = xxh_accumulate(acc, word, word.s10325476, secret);
  ulong sum = bytes * XXH_PRIME64_1;
  for (uint i = 0; i < 8; i += 2) {
    const ulong a = ((const ulong*)&acc)[i] ^ xxh_secret_at(seed, 11 + 8 * i);
    const ulong b = ((const ulong*)&acc)[i + 1] ^ xxh_secret_at(seed, 19 + 8 * i);
    sum += (a * b) ^ mul_hi(a, b);
  }
  sum = (sum ^ (sum >> 37)) * 0x165667919e3779f9ul;
  return sum ^ (sum >> 32);
}
